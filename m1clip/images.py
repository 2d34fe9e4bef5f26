"""PIL images as square RGB bytes, the input of every vision tower: one transform for model and data."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Pixels = NDArray[np.uint8]


def center_crop(image: Image.Image, size: int) -> Pixels:
    """Upright RGB (size, size, 3): the largest central square, resized bicubically as in CLIP."""
    image = to_rgb(ImageOps.exif_transpose(image))
    crop = min(image.size)
    left, top = ((length - crop) / 2 for length in image.size)
    box = (left, top, left + crop, top + crop)
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box))


def to_rgb(image: Image.Image) -> Image.Image:
    """Put transparency on white and scale 16 bits to 8; Pillow alone would clip them to white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        gray = np.asarray(image, dtype=np.float64)
        white = 255.0 if gray.max(initial=0) < 256 else 65535.0
        return Image.fromarray((gray.clip(0, white) * (255 / white)).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
