"""BatchStream for training: a stream in which batch k is a function of (seed, k), so that any position resumes.

Shapes: B pairs, L tokens, C colors, S pixels a side.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip import devices
from m1clip.config import VisionConfig
from m1clip.data import augment
from m1clip.data.features import Features
from m1clip.data.index import Rows
from m1clip.data.splits import Split
from m1clip.data.token_cache import TokenizedCaptions
from m1clip.images import Pixels


class Tokenize(Protocol):
    """Captions to token ids (B, L)."""

    def __call__(self, texts: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    """Where a tower is locked, its side is what the tower made of it before: (B, D), in floating point."""

    images_BHWC: Tensor
    tokens_BL: Tensor
    """Of one caption an image; of several, (B, K, L)."""
    key_B: Tensor
    """What the noise of each row is drawn from: a function of (seed, epoch, row)."""
    duplicate_BB: Tensor | None
    """Couples that share a caption or an image and are no pair; None where there are none."""
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def to(self, vision: torch.device, text: torch.device) -> "Batch":
        """Each part where it is needed. Keys stay with the host where the towers are on two devices."""
        key_B = devices.copy_to(self.key_B, vision) if vision == text else self.key_B
        duplicate_BB = None if self.duplicate_BB is None else devices.copy_to(self.duplicate_BB, vision)
        tokens_BL = devices.copy_to(self.tokens_BL, text)
        return Batch(devices.copy_to(self.images_BHWC, vision), tokens_BL, key_B, duplicate_BB, self.rows)

    def split(self, size: int) -> "list[Batch]":
        """Parts of at most `size` pairs; whose duplicates are whose belongs to the whole."""
        cuts = [slice(start, start + size) for start in range(0, len(self), size)]
        return [
            Batch(self.images_BHWC[cut], self.tokens_BL[cut], self.key_B[cut], None, self.rows[cut])
            for cut in cuts
        ]


@dataclass(frozen=True)
class Augmentation:
    """What is done to the images of training, as config.py has it."""

    crop: float = 1.0
    flip: bool = False
    color: float = 0.0


@dataclass(frozen=True)
class BatchStream:
    pairs: Split
    tokenize: Tokenize
    size: int
    seed: int
    side: int
    """Pixels of the images the model sees; those stored may be larger."""
    augment: Augmentation = Augmentation()
    mask_duplicates: bool = True
    sides: Sequence[int] = ()
    """Pixels a side, in equal shares of the `total` steps; none is the model's own."""
    total: int = 0
    features: Features = Features()
    """Of the sides whose towers are locked."""
    captions: int = 1
    """Of each image in a step, where it has several."""
    told: TokenizedCaptions | None = None
    """All captions as token ids, where they are not too many."""

    def __post_init__(self) -> None:
        if self.size > self.pairs.per_epoch:
            raise ValueError(f"batch {self.size} is larger than the {self.pairs.per_epoch} training pairs")

    @property
    def per_epoch(self) -> int:
        """Full batches only: a smaller one would have fewer negatives and another chance level."""
        return self.pairs.per_epoch // self.size

    def ended_epoch(self, step: int) -> int | None:
        """The number of the epoch that ends with this many steps done; None within one."""
        epoch, into = divmod(step, self.per_epoch)
        return None if into else epoch

    def epoch_start(self, step: int) -> int:
        return step - step % self.per_epoch

    def at(self, step: int) -> Batch:
        epoch, k = divmod(step, self.per_epoch)
        turns = self.pairs.order(self.seed, epoch)[k * self.size : (k + 1) * self.size]
        rows, image, looks = self._images(step, epoch, turns)
        text, words = self._captions(epoch, turns, rows)
        duplicate_BB = duplicates(*words, looks) if self.mask_duplicates else None
        key_B = torch.from_numpy((draws(self.seed, epoch, turns, stream=3) * 2.0**32).astype(np.int64))
        return Batch(image, text, key_B, duplicate_BB, rows)

    def _images(self, step: int, epoch: int, turns: Rows) -> tuple[Rows, Tensor, Sequence[Any]]:
        """The rows that could be had, their images, and a name for each that is equal for equal ones."""
        rows, known = turns % len(self.pairs), self.features
        if not known.views:
            rows, pixels = self.pairs.take(rows)
            side = self.side
            if self.sides:
                side = self.sides[min(step, self.total - 1) * len(self.sides) // self.total]
            return rows, seen(pixels, self.augment, side, self.seed, epoch, turns), looks_of(pixels)
        assert known.look_N is not None
        assert known.instead_N is not None
        rows = known.instead_N[rows]
        made = known.of_images(rows, draws(self.seed, epoch, turns, stream=12))
        return rows, torch.from_numpy(made).float(), known.look_N[rows].tolist()

    def _captions(self, epoch: int, turns: Rows, rows: Rows) -> tuple[Tensor, list[list[Any]]]:
        """Captions of each row, one or several that follow each other; for the first of each row, the second
        and so on a list of names, equal for equal ones."""
        draw_B, known, K = draws(self.seed, epoch, turns, stream=0), self.features, self.captions
        if self.told is not None:
            start_N = self.told.start_N
            text, names = self.told.take(several(start_N[rows], start_N[rows + 1], draw_B, K))
        elif known.texts is None:
            ways = [self.pairs.captions(int(row)) for row in rows]
            firsts = [int(u * len(some)) for some, u in zip(ways, draw_B, strict=True)]
            drawn = zip(ways, firsts, strict=True)
            text = self.tokenize([some[(first + k) % len(some)] for some, first in drawn for k in range(K)])
            names = [ids.tobytes() for ids in text.numpy()]
        else:
            assert known.start_N is not None
            assert known.caption_M is not None
            numbers = several(known.start_N[rows], known.start_N[rows + 1], draw_B, K)
            text = torch.from_numpy(known.of_captions(numbers)).float()  # torch is far quicker than NumPy
            names = known.caption_M[numbers].tolist()
        return text if K == 1 else text.view(-1, K, text.shape[1]), [names[k::K] for k in range(K)]

    def stream(self, start: int, stop: int) -> Iterator[Batch]:
        """BatchStream start … stop - 1; the next is made by a thread while this one is used."""
        with ThreadPoolExecutor(1, "batches") as pool:
            ahead = pool.submit(self.at, start)
            for step in range(start + 1, stop + 1):
                batch = ahead.result()
                if step < stop:
                    ahead = pool.submit(self.at, step)
                yield batch


def several(first_B: Rows, end_B: Rows, draw_B: NDArray[np.float64], K: int) -> Rows:
    """Numbers of K captions of each row that follow each other, of those from `first` to before `end`."""
    many_B = end_B - first_B
    into_BK = ((draw_B * many_B).astype(np.int64)[:, None] + np.arange(K)) % many_B[:, None]
    return (first_B[:, None] + into_BK).ravel()


def seen(pixels: Pixels, how: Augmentation, side: int, seed: int, epoch: int, turns: Rows) -> Tensor:
    """The images as training sees them in an epoch."""

    def drawn(*streams: int) -> NDArray[np.float64]:
        return np.stack([draws(seed, epoch, turns, stream) for stream in streams])

    if how.crop < 1:
        images_BHWC = augment.cropped(pixels, drawn(4, 5, 6, 7), how.crop, side)
    else:
        images_BHWC = augment.resized(torch.from_numpy(pixels), side)
    if how.flip:
        images_BHWC = augment.flipped(images_BHWC, drawn(8)[0])
    if how.color:
        images_BHWC = augment.colored(images_BHWC, drawn(9, 10, 11), how.color)
    return images_BHWC


def looks_of(pixels: Pixels) -> list[bytes]:
    """A name for each image, equal for equal ones."""
    step = max(1, pixels.shape[1] // 16)
    looks = [one.tobytes() for one in pixels[:, ::step, ::step]]  # equal images have equal samples
    return looks if len(set(looks)) == len(looks) else [fingerprint(one) for one in pixels]


def duplicates(*names_of: Sequence[Any]) -> Tensor | None:
    """Which couples of different rows have equal names of one kind: equal captions, or equal images."""
    same: list[Tensor] = []
    for names in names_of:
        if len(set(names)) < len(names):
            number = {name: i for i, name in enumerate(names)}
            group_B = torch.tensor([number[name] for name in names])
            same.append(group_B[:, None] == group_B)
    if not same:
        return None
    return torch.stack(same).any(0).fill_diagonal_(False)


def fingerprint(image: Pixels) -> bytes:
    return blake2b(image.tobytes(), digest_size=8).digest()


def growing(start: int, vision: VisionConfig) -> tuple[int, ...]:
    """The sides of images that grow by a patch at a time; none where they do not."""
    return (*range(start, vision.image_size, vision.patch_size), vision.image_size) if start else ()


def draws(seed: int, epoch: int, rows: NDArray[np.int64], stream: int) -> NDArray[np.float64]:
    """Uniform numbers in 0…1, each a function of (seed, epoch, row, stream) and of nothing else."""
    key = np.random.SeedSequence((seed, epoch, stream)).generate_state(1, np.uint64)[0]
    x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for turn in (30, 27):  # the mixing of splitmix64
        x = (x ^ (x >> np.uint64(turn))) * np.uint64(0xBF58476D1CE4E5B9)
    unit: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) / 2.0**53
    return unit
