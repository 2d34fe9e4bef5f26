"""PIL images as square RGB bytes, the input of every vision tower: one transform for model and data."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from m1clip.config import Preprocess

Pixels = NDArray[np.uint8]
MAX_RATIO = 50  # of the edges of an image that is resized as a whole


def preprocess(image: Image.Image, settings: Preprocess) -> Pixels:
    """Upright RGB (size, size, 3) with the pixels that open_clip and torchvision compute."""
    image, size = to_rgb(ImageOps.exif_transpose(image)), settings.size
    resample = Image.Resampling[settings.interpolation.upper()]
    if settings.resize_mode == "squash":
        return np.asarray(image.resize((size, size), resample))
    if settings.resize_mode == "longest":
        return np.asarray(_pad(image.resize(_fit(image.size, size, max), resample), size))
    image = _center(image)
    # Not the box of Pillow's resize: that is rounded to float32, and some pixels would differ.
    image = image.resize(_fit(image.size, round(size / settings.crop_pct), min), resample)
    to_int = round if settings.crop_offset == "round" else math.floor
    left, top = (to_int((length - size) / 2) for length in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def _center(image: Image.Image) -> Image.Image:
    """The middle of a very long image: 8 × 6,000,000 pixels, a PNG of 50 kB, would take gigabytes to resize."""
    limit = MAX_RATIO * min(image.size)
    left, top = (max(0, length - limit) // 2 for length in image.size)
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


def _fit(image_size: tuple[int, int], edge: int, choose: Callable[[tuple[int, int]], int]) -> tuple[int, int]:
    """The size of the same shape whose shorter (`min`) or longer (`max`) edge is `edge`."""
    reference, rounded = choose(image_size), int if choose is min else round  # as torchvision and open_clip round
    width, height = (max(1, rounded(edge * length / reference)) for length in image_size)
    return width, height


def _pad(image: Image.Image, size: int) -> Image.Image:
    padded = Image.new("RGB", (size, size))
    padded.paste(image, ((size - image.width) // 2, (size - image.height) // 2))
    return padded


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
