"""A picture as the models see it: square, RGB, bytes. The one place that decides how others become so."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

Pixels = NDArray[np.uint8]


def square(picture: Image.Image, size: int) -> Pixels:
    """RGB bytes (size, size, 3): upright, shorter side scaled to `size`, middle cut out, as in CLIP."""
    picture = ImageOps.exif_transpose(picture).convert("RGB")
    scale = size / min(picture.size)
    width, height = (max(size, round(side * scale)) for side in picture.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(picture.crop((left, top, left + size, top + size)))
