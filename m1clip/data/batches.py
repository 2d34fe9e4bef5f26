"""Batches for training: a stream in which batch k is a function of (seed, k), so that any position resumes.

Shapes: B pairs, L tokens, C colours, S pixels a side.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip.data.pairs import Pairs
from m1clip.pictures import Pixels


class Tokenize(Protocol):
    """Captions, and for messages where each came from, to token ids (B, L)."""

    def __call__(self, texts: Sequence[str], *, rows: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True)
class Batch:
    bytes_BSSC: Tensor
    tokens_BL: Tensor
    rows: NDArray[np.int64]


@dataclass(frozen=True)
class Batches:
    pairs: Pairs
    pixels: Pixels
    tokenize: Tokenize
    size: int
    seed: int
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.size > len(self.pairs):
            raise ValueError(f"batch {self.size} is larger than the {len(self.pairs)} training pairs")

    @property
    def per_epoch(self) -> int:
        """Full batches only: a smaller one would have fewer negatives and another chance level."""
        return len(self.pairs) // self.size

    def at(self, step: int) -> Batch:
        epoch, k = divmod(step, self.per_epoch)
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.pairs))
        rows = order[k * self.size : (k + 1) * self.size]
        captions = [self.pairs.captions(int(row)) for row in rows]
        which = draws(self.seed, epoch, rows, stream=0)
        chosen = [ways[int(u * len(ways))] for ways, u in zip(captions, which, strict=True)]
        tokens_BL = self.tokenize(chosen, rows=[self.pairs.row(int(row)) for row in rows])
        pixels = self.pixels[rows]
        if self.shift:
            most = self.shift * pixels.shape[1]
            moves = np.stack([draws(self.seed, epoch, rows, stream) for stream in (1, 2)], axis=1)
            pixels = shifted(pixels, np.rint((2 * moves - 1) * most).astype(int))
        return Batch(torch.from_numpy(pixels), tokens_BL, rows)

    def stream(self, start: int, stop: int) -> Iterator[Batch]:
        """Batches start … stop - 1; the next is made by a thread while this one is used."""
        with ThreadPoolExecutor(1, "batches") as pool:
            ahead = pool.submit(self.at, start)
            for step in range(start + 1, stop + 1):
                batch = ahead.result()
                if step < stop:
                    ahead = pool.submit(self.at, step)
                yield batch


def draws(seed: int, epoch: int, rows: NDArray[np.int64], stream: int) -> NDArray[np.float64]:
    """Uniform numbers in 0…1, each a function of (seed, epoch, row, stream) and of nothing else."""
    key = np.random.SeedSequence((seed, epoch, stream)).generate_state(1, np.uint64)[0]
    x = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    for turn in (30, 27):  # the mixing of splitmix64
        x = (x ^ (x >> np.uint64(turn))) * np.uint64(0xBF58476D1CE4E5B9)
    unit: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) / 2.0**53
    return unit


def shifted(pixels: Pixels, moves: NDArray[np.int_]) -> Pixels:
    """Each picture moved by its own (down, right) pixels; what enters repeats the edge."""
    reach = np.arange(pixels.shape[1])
    down = np.clip(reach[None] - moves[:, :1], 0, len(reach) - 1)
    right = np.clip(reach[None] - moves[:, 1:], 0, len(reach) - 1)
    which = np.arange(len(pixels))[:, None, None]
    moved: Pixels = pixels[which, down[:, :, None], right[:, None, :]]
    return moved
