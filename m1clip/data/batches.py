"""Training batches. Batch k is a function of (seed, k), so that a run can resume at any step.

Shapes: B pairs, K captions per image, L tokens, D features, N images and M captions of the split.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip import devices
from m1clip.data.augment import CAPTION, DROPOUT_KEY, VIEW, Augmentation, Uniform, augment_images, sample_uniform
from m1clip.data.index import RowIndices
from m1clip.data.splits import Split
from m1clip.images import Pixels

MAX_TOKENIZED = 500_000  # captions; of larger splits they are tokenized batch by batch
Tokenize = Callable[[Sequence[str]], Tensor]
TokenIds = Sequence[Sequence[int] | NDArray[np.int32]]


# Inputs of a tower: pixels or token ids, or for a frozen tower its precomputed features.
class Images(NamedTuple):
    images_BHWC: Tensor  # uint8


class ImageFeatures(NamedTuple):
    features_BD: Tensor


class Tokens(NamedTuple):
    tokens_BKL: Tensor  # int64


class TextFeatures(NamedTuple):
    features_BKD: Tensor


Input = TypeVar("Input", bound=tuple[Tensor, ...])


def map_input(function: Callable[[Tensor], Tensor], inputs: Input) -> Input:
    return type(inputs)(*map(function, inputs))


@dataclass(frozen=True)
class Batch:
    image: Images | ImageFeatures
    text: Tokens | TextFeatures
    key_B: Tensor
    """Random key of each row for dropout: a function of (seed, epoch, sample)."""
    duplicate_BB: Tensor | None
    """False negatives: different rows with an equal caption or image; None if there are none."""
    rows: RowIndices

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, vision: torch.device, text: torch.device) -> "Batch":
        """Copy each input to the device of its tower; keys stay on the CPU if there are two devices."""
        return Batch(
            map_input(lambda tensor: devices.copy_to(tensor, vision), self.image),
            map_input(lambda tensor: devices.copy_to(tensor, text), self.text),
            devices.copy_to(self.key_B, vision) if vision == text else self.key_B,
            None if self.duplicate_BB is None else devices.copy_to(self.duplicate_BB, vision),
            self.rows,
        )

    def split(self, size: int) -> "list[Batch]":
        """Micro-batches of at most `size` pairs; duplicates concern the whole batch only."""
        return [self._take(slice(start, start + size)) for start in range(0, len(self), size)]

    def _take(self, rows: slice) -> "Batch":
        image, text = map_input(itemgetter(rows), self.image), map_input(itemgetter(rows), self.text)
        return Batch(image, text, self.key_B[rows], None, self.rows[rows])


@dataclass(frozen=True)
class ImageFeatureTable:
    """Features of a frozen vision tower for every image of a split."""

    views: Sequence[NDArray[Any]]
    """(N, D) for each augmented view."""
    image_id_N: RowIndices
    """Equal for equal images."""
    source_row_N: RowIndices
    """Row whose image was encoded: another one where the row's own cannot be decoded."""

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

    features_MD: NDArray[Any]
    """In the order of encoding: captions of similar length together."""
    position_M: RowIndices
    """Position of each caption in features_MD."""
    start_N: RowIndices
    """First caption of each image, and at the end M."""
    caption_id_M: RowIndices
    """Equal for equal captions."""

    def take(self, captions: RowIndices, K: int) -> Tensor:
        features = torch.from_numpy(self.features_MD[self.position_M[captions]]).float()
        return features.view(-1, K, features.shape[1])


@dataclass(frozen=True)
class FeatureTables:
    """Precomputed features of the towers that are frozen."""

    images: ImageFeatureTable | None = None
    captions: CaptionFeatureTable | None = None


@dataclass(frozen=True)
class TokenizedCaptions:
    """All captions of a split as token ids."""

    ids_M: Sequence[NDArray[np.int32]]
    start_N: RowIndices
    """First caption of each image, and at the end M."""
    pad: Callable[[TokenIds], Tensor]

    def take(self, captions: RowIndices) -> tuple[Tensor, list[bytes]]:
        """Padded ids of some captions, and an id for each that is equal for equal captions."""
        ids = [self.ids_M[caption] for caption in captions.tolist()]
        return self.pad(ids), [caption.tobytes() for caption in ids]


def tokenize_captions(
    pairs: Split, encode: Callable[[Sequence[str]], TokenIds], pad: Callable[[TokenIds], Tensor]
) -> TokenizedCaptions | None:
    """None if there are too many captions to keep in memory."""
    if len(pairs) > MAX_TOKENIZED:
        return None
    counts = [len(pairs.captions(row)) for row in range(len(pairs))]
    if sum(counts) > MAX_TOKENIZED:
        return None
    captions = (caption for row in range(len(pairs)) for caption in pairs.captions(row))
    ids: list[NDArray[np.int32]] = []
    while chunk := list(islice(captions, 4096)):
        ids += [np.array(caption, np.int32) for caption in encode(chunk)]
    return TokenizedCaptions(ids, np.cumsum([0, *counts]), pad)


@dataclass(frozen=True)
class BatchStream:
    pairs: Split
    tokenize: Tokenize
    batch_size: int
    seed: int
    image_size: int
    """Input resolution of the model; stored images may be larger."""
    augmentation: Augmentation = Augmentation()
    captions_per_image: int = 1
    tokenized: TokenizedCaptions | None = None
    features: FeatureTables = FeatureTables()
    mask_duplicates: bool = True

    def __post_init__(self) -> None:
        pairs = self.pairs.pairs_per_epoch
        if self.batch_size > pairs:
            raise ValueError(f"batch_size {self.batch_size} is larger than the {pairs} training pairs")

    @property
    def steps_per_epoch(self) -> int:
        """Full batches only: a smaller one has fewer negatives and another chance level."""
        return self.pairs.pairs_per_epoch // self.batch_size

    def epoch_end(self, step: int) -> int | None:
        """Number of the epoch that is complete after `step` steps; None within an epoch."""
        epoch, rest = divmod(step, self.steps_per_epoch)
        return None if rest else epoch

    def epoch_start(self, step: int) -> int:
        return step - step % self.steps_per_epoch

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
        return Batch(image, text, torch.from_numpy(key_B), duplicate_BB, rows)

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

    def _captions(
        self, epoch: int, samples: RowIndices, rows: RowIndices
    ) -> tuple[Tokens | TextFeatures, list[list[Any]]]:
        """K captions of each row, and for each k ids that are equal for equal captions."""
        uniform_B, K = sample_uniform(self.seed, epoch, samples, CAPTION), self.captions_per_image
        text: Tokens | TextFeatures
        if (table := self.features.captions) is not None:
            captions = pick_captions(table.start_N, rows, uniform_B, K)
            text = TextFeatures(table.take(captions, K))
            ids = table.caption_id_M[captions].tolist()
        else:
            if self.tokenized is not None:
                captions = pick_captions(self.tokenized.start_N, rows, uniform_B, K)
                tokens, ids = self.tokenized.take(captions)
            else:
                tokens = self.tokenize(self._pick_texts(rows, uniform_B))
                ids = [caption.tobytes() for caption in tokens.numpy()]
            text = Tokens(tokens.view(-1, K, tokens.shape[1]))
        return text, [ids[k::K] for k in range(K)]

    def _pick_texts(self, rows: RowIndices, uniform_B: Uniform) -> list[str]:
        picked = []
        for row, u in zip(rows, uniform_B, strict=True):
            texts = self.pairs.captions(int(row))
            first = int(u * len(texts))
            picked += [texts[(first + k) % len(texts)] for k in range(self.captions_per_image)]
        return picked


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
    equal: list[Tensor] = []
    for ids in ids_by_kind:
        if len(set(ids)) < len(ids):
            group_B = torch.from_numpy(group_ids(ids))
            equal.append(group_B[:, None] == group_B)
    return torch.stack(equal).any(0).fill_diagonal_(False) if equal else None
