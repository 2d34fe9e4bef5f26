"""Augmentation of a batch of images. Every number it draws belongs to (seed, epoch, row) alone.

Shapes: B images, T pixels a side as stored, S as the model sees them, C colors.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from m1clip.images import Pixels

MARGIN = 1.25
"""Split of a stored image against that of a crop: few crops have to be enlarged."""


def margin(size: int, crop: float) -> int:
    """Pixels a side that are stored for images which will be cropped."""
    return size if crop == 1 else int(np.ceil(size * MARGIN / 8)) * 8


def cropped(pixels: Pixels, draws_4B: NDArray[np.float64], least: float, size: int) -> Tensor:
    """Random parts of the images, at least the part `least` of their area, scaled to (B, size, size, C)."""
    side = pixels.shape[1]
    area, shape, across, down = draws_4B
    area = side**2 * (least + (1 - least) * area)
    ratio = np.exp((2 * shape - 1) * np.log(4 / 3))  # of width to height, as everyone has it
    wide = np.rint(np.sqrt(area * ratio)).clip(1, side).astype(int)
    high = np.rint(np.sqrt(area / ratio)).clip(1, side).astype(int)
    left, top = (np.rint(u * (side - length)).astype(int) for u, length in ((across, wide), (down, high)))
    bytes_BCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    made_BHWC = torch.empty(len(pixels), size, size, 3, dtype=torch.uint8)
    # One at a time, yet three times faster here than grid_sample over all: torch scales bytes with SIMD.
    for i, (x, y, w, h) in enumerate(zip(left, top, wide, high, strict=True)):
        made_BHWC[i] = scaled(bytes_BCHW[i : i + 1, :, y : y + h, x : x + w], size)[0].permute(1, 2, 0)
    return made_BHWC


def scaled(bytes_BCHW: Tensor, size: int) -> Tensor:
    return F.interpolate(bytes_BCHW, size=(size, size), mode="bilinear", antialias=True)


def resized(images_BHWC: Tensor, size: int) -> Tensor:
    if images_BHWC.shape[1] == size:
        return images_BHWC
    return scaled(images_BHWC.permute(0, 3, 1, 2), size).permute(0, 2, 3, 1)


def flipped(images_BHWC: Tensor, draw_B: NDArray[np.float64]) -> Tensor:
    """Half of them, mirrored."""
    mirror = torch.from_numpy(draw_B < 0.5)
    return torch.where(mirror[:, None, None, None], images_BHWC.flip(2), images_BHWC)


def colored(images_BHWC: Tensor, draws_3B: NDArray[np.float64], strength: float) -> Tensor:
    """Brightness, contrast and saturation, each multiplied by a number in 1 ± strength."""
    bright, contrast, saturation = (
        torch.from_numpy(1 + strength * (2 * draw - 1)).float()[:, None, None, None] for draw in draws_3B
    )
    x_BHWC = images_BHWC.float() * bright
    weight_C = torch.tensor([0.299, 0.587, 0.114])
    grey_BSS1 = (x_BHWC @ weight_C)[..., None]
    x_BHWC = torch.lerp(
        grey_BSS1.mean((1, 2), keepdim=True), torch.lerp(grey_BSS1, x_BHWC, saturation), contrast
    )
    return x_BHWC.round().clamp(0, 255).byte()
