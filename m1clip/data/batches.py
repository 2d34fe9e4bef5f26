"""Training batches and their augmentation. Batch k is a function of (seed, k): a run can resume at any step.

Shapes: B pairs, K captions per image, L tokens, D features, N images and M captions of the split.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from m1clip import devices
from m1clip.data.index import RowIndices
from m1clip.data.splits import Split
from m1clip.images import Pixels

MAX_TOKENIZED = 500_000  # captions; of larger splits they are tokenized batch by batch
STORED_SCALE = 1.25  # stored size over image size: few crops have to be enlarged
# Independent streams of random numbers of a sample.
CAPTION, DROPOUT_KEY, CROP, FLIP, COLOR, VIEW = 0, 3, (4, 5, 6, 7), 8, (9, 10, 11), 12

TokenIds = Sequence[Sequence[int] | NDArray[np.int32]]
Uniform = NDArray[np.float64]


# Inputs of a tower: pixels or token ids, or for a frozen tower its precomputed features.
class Images(NamedTuple):
    images_BHWC: Tensor  # uint8


class ImageFeatures(NamedTuple):
    features_BD: Tensor


class Tokens(NamedTuple):
    tokens_BKL: Tensor  # int64


class TextFeatures(NamedTuple):
    features_BKD: Tensor


@dataclass(frozen=True)
class Batch:
    image: Images | ImageFeatures
    text: Tokens | TextFeatures
    key_B: Tensor  # random key of each row for dropout: a function of (seed, epoch, sample)
    duplicate_BB: Tensor | None  # false negatives: different rows with an equal caption or image; None if none
    rows: RowIndices
    has_negative_B: Tensor | None = None  # None if every pair has one
    masked: float = 0.0  # fraction of the negatives that are false
    without_negative: float = 0.0  # fraction of the pairs whose negatives are all false

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, vision: torch.device, text: torch.device) -> "Batch":
        """Copy each input to the device of its tower; keys stay on the CPU if there are two devices."""
        return Batch(
            type(self.image)(devices.copy_to(self.image[0], vision)),
            type(self.text)(devices.copy_to(self.text[0], text)),
            devices.copy_to(self.key_B, vision) if vision == text else self.key_B,
            None if self.duplicate_BB is None else devices.copy_to(self.duplicate_BB, vision),
            self.rows,
            None if self.has_negative_B is None else devices.copy_to(self.has_negative_B, vision),
            *(self.masked, self.without_negative),
        )

    def split(self, size: int) -> "list[Batch]":
        """Micro-batches of at most `size` pairs; duplicates concern the whole batch only."""
        parts = []
        for rows in (slice(start, start + size) for start in range(0, len(self), size)):
            image, text = type(self.image)(self.image[0][rows]), type(self.text)(self.text[0][rows])
            parts.append(Batch(image, text, self.key_B[rows], None, self.rows[rows]))
        return parts


@dataclass(frozen=True)
class ImageFeatureTable:
    """Features of a frozen vision tower for every image of a split."""

    views: Sequence[NDArray[Any]]  # (N, D) for each augmented view
    image_id_N: RowIndices  # equal for equal images
    source_row_N: RowIndices  # row whose image was encoded: another one where the row's own cannot be decoded

    def take(self, rows: RowIndices, uniform_B: Uniform) -> Tensor:
        """(B, D): one view of each row, chosen by a uniform random number."""
        view_B = (uniform_B * len(self.views)).astype(int)
        features_BD = np.empty((len(rows), self.views[0].shape[1]), self.views[0].dtype)
        for number, view_ND in enumerate(self.views):
            features_BD[view_B == number] = view_ND[rows[view_B == number]]
        return torch.from_numpy(features_BD).float()  # torch converts far faster than NumPy


@dataclass(frozen=True)
class CaptionFeatureTable:
    """Features of a frozen text tower for every caption of a split."""

    features_MD: NDArray[Any]  # in the order of encoding: captions of similar length together
    position_M: RowIndices  # of each caption in features_MD
    start_N: RowIndices  # first caption of each image, and at the end M
    caption_id_M: RowIndices  # equal for equal captions

    def take(self, captions: RowIndices) -> tuple[Tensor, list[Any]]:
        features = torch.from_numpy(self.features_MD[self.position_M[captions]]).float()
        return features, self.caption_id_M[captions].tolist()


@dataclass(frozen=True)
class FeatureTables:
    images: ImageFeatureTable | None = None
    captions: CaptionFeatureTable | None = None


@dataclass(frozen=True)
class TokenizedCaptions:
    ids_M: Sequence[NDArray[np.int32]]
    start_N: RowIndices  # first caption of each image, and at the end M
    pad: Callable[[TokenIds], NDArray[np.int64]]

    def take(self, captions: RowIndices) -> tuple[Tensor, list[Any]]:
        """Padded ids of some captions, and an id for each that is equal for equal captions."""
        ids = [self.ids_M[caption] for caption in captions.tolist()]
        return torch.from_numpy(self.pad(ids)), [caption.tobytes() for caption in ids]


def tokenize_captions(
    pairs: Split, encode: Callable[[Sequence[str]], TokenIds], pad: Callable[[TokenIds], NDArray[np.int64]]
) -> TokenizedCaptions | None:
    """None if there are too many captions to keep in memory."""
    captions, start_N = list[str](), [0]
    for row in range(len(pairs)):
        captions += pairs.captions(row)
        start_N.append(len(captions))
        if max(len(captions), len(pairs)) > MAX_TOKENIZED:
            return None
    chunks = (captions[start : start + 4096] for start in range(0, len(captions), 4096))
    ids = [np.array(caption, np.int32) for chunk in chunks for caption in encode(chunk)]
    return TokenizedCaptions(ids, np.array(start_N), pad)


@dataclass(frozen=True)
class Augmentation:
    crop_scale: float = 1.0
    hflip: bool = False
    color_jitter: float = 0.0


@dataclass(frozen=True)
class BatchStream:
    pairs: Split
    tokenize: Callable[[Sequence[str]], NDArray[np.int64]]
    batch_size: int
    seed: int
    image_size: int  # input resolution of the model; stored images may be larger
    augmentation: Augmentation = Augmentation()
    captions_per_image: int = 1
    tokenized: TokenizedCaptions | None = None
    features: FeatureTables = FeatureTables()
    mask_duplicates: bool = True

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only: a smaller one has fewer negatives and another chance level."""
        return self.pairs.pairs_per_epoch // self.batch_size

    def epoch_end(self, step: int) -> int | None:
        """Number of the epoch that is complete after `step` steps; None within an epoch."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return None if rest else epoch

    def stream(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches start … stop - 1; a thread prepares the next one while one is used."""
        with ThreadPoolExecutor(1, "batches") as pool:
            future = pool.submit(self.batch, start)
            for step in range(start + 1, stop + 1):
                batch = future.result()
                if step < stop:
                    future = pool.submit(self.batch, step)
                yield batch

    def batch(self, step: int) -> Batch:
        epoch, k = divmod(step, self.steps_per_epoch)
        samples = self.pairs.order(self.seed, epoch)[k * self.batch_size : (k + 1) * self.batch_size]
        rows, image, image_ids = self._images(epoch, samples)
        text, caption_ids = self._captions(epoch, samples, rows)
        duplicate_BB = find_duplicates(*caption_ids, image_ids) if self.mask_duplicates else None
        key_B = (sample_uniform(self.seed, epoch, samples, DROPOUT_KEY) * 2.0**32).astype(np.int64)
        batch = Batch(image, text, torch.from_numpy(key_B), duplicate_BB, rows)
        return batch if duplicate_BB is None else replace(batch, **count_negatives(duplicate_BB))

    def _images(self, epoch: int, samples: RowIndices) -> tuple[RowIndices, Images | ImageFeatures, Sequence[Hashable]]:
        """Rows whose images could be decoded, the images, and ids that are equal for equal images."""
        rows = samples % len(self.pairs)
        if (table := self.features.images) is not None:
            rows = table.source_row_N[rows]
            features_BD = table.take(rows, sample_uniform(self.seed, epoch, samples, VIEW))
            return rows, ImageFeatures(features_BD), table.image_id_N[rows].tolist()
        rows, pixels = self.pairs.take(rows)
        images_BHWC = augment_images(pixels, self.augmentation, self.image_size, self.seed, epoch, samples)
        return rows, Images(images_BHWC), pixel_ids(pixels)

    def _captions(self, epoch: int, samples: RowIndices, rows: RowIndices) -> tuple[Tokens | TextFeatures, list[Any]]:
        """K captions of each row, and for each k ids that are equal for equal captions."""
        uniform_B, K = sample_uniform(self.seed, epoch, samples, CAPTION), self.captions_per_image
        if table := self.features.captions or self.tokenized:
            text, ids = table.take(pick_captions(table.start_N, rows, uniform_B, K))
        else:
            by_row = [self.pairs.captions(int(row)) for row in rows]
            captions, start_B = list(chain.from_iterable(by_row)), np.cumsum([0, *map(len, by_row)])
            picked = pick_captions(start_B, np.arange(len(rows)), uniform_B, K)
            tokens = self.tokenize([captions[i] for i in picked])
            text, ids = torch.from_numpy(tokens), [caption.tobytes() for caption in tokens]
        kind = TextFeatures if self.features.captions else Tokens
        return kind(text.view(-1, K, text.shape[1])), [ids[k::K] for k in range(K)]


def pick_captions(start_N: RowIndices, rows: RowIndices, uniform_B: Uniform, K: int) -> RowIndices:
    """K consecutive captions of each row, the first one random; (B · K)."""
    count_B = start_N[rows + 1] - start_N[rows]
    offset_BK = ((uniform_B * count_B).astype(np.int64)[:, None] + np.arange(K)) % count_B[:, None]
    return (start_N[rows][:, None] + offset_BK).ravel()


def pixel_ids(pixels: Pixels) -> list[bytes]:
    """Equal for equal images. Every 16th pixel is enough, unless two images agree in them."""
    stride = max(1, pixels.shape[1] // 16)
    ids = [image.tobytes() for image in pixels[:, ::stride, ::stride]]
    if len(set(ids)) == len(ids):
        return ids
    return [blake2b(image.tobytes(), digest_size=8).digest() for image in pixels]


def group_ids(values: Sequence[Hashable]) -> RowIndices:
    """An integer for each value, equal for equal values."""
    ids: dict[Hashable, int] = {}
    return np.array([ids.setdefault(value, len(ids)) for value in values], np.int64)


def find_duplicates(*ids_by_kind: Sequence[Hashable]) -> Tensor | None:
    """(B, B) mask of different rows with equal ids of any kind; None if there are none."""
    groups = [torch.from_numpy(group_ids(ids)) for ids in ids_by_kind if len(set(ids)) < len(ids)]
    equal = [group_B[:, None] == group_B for group_B in groups]
    return torch.stack(equal).any(0).fill_diagonal_(False) if equal else None


def count_negatives(duplicate_BB: Tensor) -> dict[str, Any]:
    """Fields of a batch with duplicates; counted here, in the thread that prepares batches."""
    duplicates_B, B = duplicate_BB.sum(1), len(duplicate_BB)
    has_negative_B = duplicates_B < B - 1
    fields = {"masked": duplicates_B.sum().item() / max(1, B * (B - 1)), "without_negative": 0.0}
    if has_negative_B.all():
        return fields
    return {**fields, "without_negative": 1 - has_negative_B.double().mean().item(), "has_negative_B": has_negative_B}


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
    images_BHWC = torch.from_numpy(pixels)
    crops_BHWC = torch.empty(len(pixels), image_size, image_size, 3, dtype=torch.uint8)
    # A loop is three times faster here than grid_sample on the batch: torch resizes uint8 with SIMD.
    for i, (x0, y0, w, h) in enumerate(zip(left, top, width, height, strict=True)):
        crops_BHWC[i] = resize(images_BHWC[i : i + 1, y0 : y0 + h, x0 : x0 + w], image_size)[0]
    return crops_BHWC


def resize(images_BHWC: Tensor, image_size: int) -> Tensor:
    size = (image_size, image_size)
    if images_BHWC.shape[1:3] == size:
        return images_BHWC
    images_BCHW = images_BHWC.permute(0, 3, 1, 2)
    return F.interpolate(images_BCHW, size=size, mode="bilinear", antialias=True).permute(0, 2, 3, 1)


def flip_half(images_BHWC: Tensor, uniform_B: Uniform) -> Tensor:
    flip_B111 = torch.from_numpy(uniform_B < 0.5)[:, None, None, None]
    return torch.where(flip_B111, images_BHWC.flip(2), images_BHWC)


def jitter_color(images_BHWC: Tensor, uniform_3B: Uniform, strength: float) -> Tensor:
    """Multiply brightness, contrast and saturation, each by a factor in 1 ± strength."""
    factor_3B111 = torch.from_numpy(1 + strength * (2 * uniform_3B - 1)).float()[..., None, None, None]
    brightness, contrast, saturation = factor_3B111
    x_BHWC = images_BHWC.float() * brightness
    gray_BHW1 = (x_BHWC @ torch.tensor([0.299, 0.587, 0.114]))[..., None]
    saturated_BHWC = torch.lerp(gray_BHW1, x_BHWC, saturation)
    x_BHWC = torch.lerp(gray_BHW1.mean((1, 2), keepdim=True), saturated_BHWC, contrast)
    return x_BHWC.round().clamp(0, 255).byte()
