"""Augmentation of a batch of images. Every random number is a function of (seed, epoch, sample) alone."""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from m1clip.images import Pixels

Uniform = NDArray[np.float64]

STORED_SCALE = 1.25  # stored size over image size: few crops have to be enlarged
# Independent streams of random numbers of a sample.
CAPTION, DROPOUT_KEY, CROP, FLIP, COLOR, VIEW = 0, 3, (4, 5, 6, 7), 8, (9, 10, 11), 12


@dataclass(frozen=True)
class Augmentation:
    crop_scale: float = 1.0
    hflip: bool = False
    color_jitter: float = 0.0


def stored_size(image_size: int, crop_scale: float) -> int:
    """Size at which images are decoded, with a margin if they are cropped."""
    return image_size if crop_scale == 1 else int(np.ceil(image_size * STORED_SCALE / 8)) * 8


def sample_uniform(seed: int, epoch: int, samples: NDArray[np.int64], stream: int) -> Uniform:
    """Uniform numbers in [0, 1), each a function of (seed, epoch, sample, stream) and nothing else."""
    key = np.random.SeedSequence((seed, epoch, stream)).generate_state(1, np.uint64)[0]
    x = samples.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift in (30, 27):  # the mixing steps of splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    unit: Uniform = (x >> np.uint64(11)).astype(np.float64) / 2.0**53
    return unit


def augment_images(
    pixels: Pixels, augmentation: Augmentation, image_size: int, seed: int, epoch: int, samples: NDArray[np.int64]
) -> Tensor:
    """images_BHWC as one epoch of training sees them."""

    def draw(*streams: int) -> Uniform:
        return np.stack([sample_uniform(seed, epoch, samples, stream) for stream in streams])

    if augmentation.crop_scale < 1:
        images_BHWC = random_resized_crop(pixels, draw(*CROP), augmentation.crop_scale, image_size)
    else:
        images_BHWC = resize(torch.from_numpy(pixels), image_size)
    if augmentation.hflip:
        images_BHWC = flip_half(images_BHWC, draw(FLIP)[0])
    if augmentation.color_jitter:
        images_BHWC = jitter_color(images_BHWC, draw(*COLOR), augmentation.color_jitter)
    return images_BHWC


def random_resized_crop(pixels: Pixels, uniform_4B: Uniform, min_area: float, image_size: int) -> Tensor:
    """Random crops of at least `min_area` of each image, resized to (B, image_size, image_size, C)."""
    full = pixels.shape[1]
    area, ratio, x, y = uniform_4B
    area = full**2 * (min_area + (1 - min_area) * area)
    ratio = np.exp((2 * ratio - 1) * np.log(4 / 3))  # width over height in 3/4 … 4/3, as in torchvision
    width = np.rint(np.sqrt(area * ratio)).clip(1, full).astype(int)
    height = np.rint(np.sqrt(area / ratio)).clip(1, full).astype(int)
    left, top = np.rint(x * (full - width)).astype(int), np.rint(y * (full - height)).astype(int)
    images_BCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    crops_BHWC = torch.empty(len(pixels), image_size, image_size, 3, dtype=torch.uint8)
    # A loop is three times faster here than grid_sample on the batch: torch resizes uint8 with SIMD.
    for i, (x0, y0, w, h) in enumerate(zip(left, top, width, height, strict=True)):
        crop_1CHW = images_BCHW[i : i + 1, :, y0 : y0 + h, x0 : x0 + w]
        crops_BHWC[i] = _interpolate(crop_1CHW, image_size)[0].permute(1, 2, 0)
    return crops_BHWC


def _interpolate(images_BCHW: Tensor, size: int) -> Tensor:
    return F.interpolate(images_BCHW, size=(size, size), mode="bilinear", antialias=True)


def resize(images_BHWC: Tensor, image_size: int) -> Tensor:
    if images_BHWC.shape[1] == image_size:
        return images_BHWC
    return _interpolate(images_BHWC.permute(0, 3, 1, 2), image_size).permute(0, 2, 3, 1)


def flip_half(images_BHWC: Tensor, uniform_B: Uniform) -> Tensor:
    flip_B111 = torch.from_numpy(uniform_B < 0.5)[:, None, None, None]
    return torch.where(flip_B111, images_BHWC.flip(2), images_BHWC)


def jitter_color(images_BHWC: Tensor, uniform_3B: Uniform, strength: float) -> Tensor:
    """Multiply brightness, contrast and saturation, each by a factor in 1 ± strength."""
    brightness, contrast, saturation = (
        torch.from_numpy(1 + strength * (2 * draw_B - 1)).float()[:, None, None, None] for draw_B in uniform_3B
    )
    x_BHWC = images_BHWC.float() * brightness
    gray_BHW1 = (x_BHWC @ torch.tensor([0.299, 0.587, 0.114]))[..., None]
    saturated_BHWC = torch.lerp(gray_BHW1, x_BHWC, saturation)
    x_BHWC = torch.lerp(gray_BHW1.mean((1, 2), keepdim=True), saturated_BHWC, contrast)
    return x_BHWC.round().clamp(0, 255).byte()
