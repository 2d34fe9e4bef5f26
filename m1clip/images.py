"""An image as the models see it: square, RGB, bytes. The one place that decides how others become so."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Pixels = NDArray[np.uint8]


def square(image: Image.Image, size: int) -> Pixels:
    """RGB bytes (size, size, 3): upright, the largest square in the middle, scaled, as in CLIP."""
    image = rgb(ImageOps.exif_transpose(image))
    side = min(image.size)
    left, top = ((whole - side) / 2 for whole in image.size)
    box = (left, top, left + side, top + side)
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box))


def rgb(image: Image.Image) -> Image.Image:
    """Transparency lies on white, and sixteen bits become eight: Pillow alone would clip them to white."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith(("I", "F")):
        grey = np.asarray(image, dtype=np.float64)
        most = 255.0 if grey.max(initial=0) < 256 else 65535.0
        return Image.fromarray((grey.clip(0, most) * (255 / most)).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return image.convert("RGB")
