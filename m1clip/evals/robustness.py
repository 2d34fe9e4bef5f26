"""Accuracy on corrupted images: blur, noise, JPEG compression, crops and loss of color, in five strengths.

Corruptions change the model's input; their sizes are relative to the image, so that models of all sizes compare.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from m1clip.data.index import ProgressFactory
from m1clip.data.splits import Split
from m1clip.evals.embed import Embedder
from m1clip.images import Pixels
from m1clip.workers import row_chunks

STRENGTHS = (1, 2, 3, 4, 5)
BLUR = (0.005, 0.01, 0.015, 0.025, 0.04)  # radius, as a fraction of the width
NOISE = (0.04, 0.08, 0.12, 0.18, 0.26)  # standard deviation, as a fraction of white
JPEG = (30, 20, 12, 7, 3)  # quality
CROP = (0.9, 0.75, 0.6, 0.45, 0.3)  # area of the center that is left
GRAY = (0.2, 0.4, 0.6, 0.8, 1.0)  # how much of the color is lost
MAX_IMAGES = 200  # so that 25 corruptions take the time of 5,000 images
CHUNK = 64


def _blur(image: Image.Image, level: int, rng: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(BLUR[level] * image.width))


def _noise(image: Image.Image, level: int, rng: np.random.Generator) -> Image.Image:
    pixels = np.asarray(image, np.float32)
    noisy = pixels + 255 * NOISE[level] * rng.standard_normal(pixels.shape, np.float32)
    return Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8))


def _jpeg(image: Image.Image, level: int, rng: np.random.Generator) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG[level])
    return Image.open(buffer).convert("RGB")


def _crop(image: Image.Image, level: int, rng: np.random.Generator) -> Image.Image:
    margin = (1 - CROP[level] ** 0.5) / 2 * image.width
    box = (margin, margin, image.width - margin, image.height - margin)
    return image.resize(image.size, Image.Resampling.BICUBIC, box=box)


def _gray(image: Image.Image, level: int, rng: np.random.Generator) -> Image.Image:
    return Image.blend(image, image.convert("L").convert("RGB"), GRAY[level])


CORRUPTIONS: dict[str, Callable[[Image.Image, int, np.random.Generator], Image.Image]] = {}
CORRUPTIONS |= {"blur": _blur, "noise": _noise, "JPEG": _jpeg, "crop": _crop, "gray": _gray}


@dataclass(frozen=True)
class Robustness:
    metric: str  # what the scores are
    images: int
    clean: float
    scores: dict[str, tuple[float, ...]]  # by corruption, one for each strength
    chance: float


def corrupt(images_NHWC: Pixels, kind: str, level: int, first: int = 0) -> Pixels:
    """`level` is 0 to 4; noise depends on the position of an image, counted from `first`."""
    corrupted = [
        np.asarray(CORRUPTIONS[kind](Image.fromarray(image), level, np.random.default_rng((level, first + i))))
        for i, image in enumerate(images_NHWC)
    ]
    return np.stack(corrupted)


def robustness(
    embedder: Embedder,
    pairs: Split,
    rows: Sequence[int],
    score: Callable[[Tensor], float],
    metric: str,
    chance: float,
    progress: ProgressFactory,
) -> Robustness:
    """Scores of the rows' images under each corruption; `score` takes their embeddings."""
    pixels = pairs.take(np.array(rows))[1]
    clean, scores = score(encode(embedder, pixels)), {}
    with progress("encoding corrupted images", len(CORRUPTIONS) * len(STRENGTHS) * len(rows)) as advance:
        for kind in CORRUPTIONS:
            results = []
            for level in range(len(STRENGTHS)):
                parts = []
                for chunk in row_chunks(len(rows), CHUNK):
                    corrupted = corrupt(pixels[chunk.start : chunk.stop], kind, level, chunk.start)
                    parts.append(encode(embedder, corrupted))
                    advance(len(chunk))
                results.append(score(torch.cat(parts)))
            scores[kind] = tuple(results)
    return Robustness(metric, len(rows), clean, scores, chance)


@torch.inference_mode()
def encode(embedder: Embedder, images_NHWC: Pixels) -> Tensor:
    return embedder.encode_pixels(torch.from_numpy(np.array(images_NHWC))).float().cpu()
