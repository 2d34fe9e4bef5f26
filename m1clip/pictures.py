"""A picture as the models see it: square, RGB, bytes. The one place that decides how others become so."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Pixels = NDArray[np.uint8]


def square(picture: Image.Image, size: int) -> Pixels:
    """RGB bytes (size, size, 3): upright, the largest square in the middle, scaled, as in CLIP."""
    picture = ImageOps.exif_transpose(picture).convert("RGB")
    side = min(picture.size)
    left, top = ((whole - side) / 2 for whole in picture.size)
    box = (left, top, left + side, top + side)
    return np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC, box))
