"""The sides of a run, ready for use: pairs of one or several sources, and their images, stored or live."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from m1clip.config import DataConfig
from m1clip.data.index import Indexed, Rows
from m1clip.data.pairs import PairDataset, ProgressFactory, no_progress
from m1clip.data.pixel_cache import decoded, stored
from m1clip.data.rows import BadRow, BadRows
from m1clip.data.sources import Source, open_sources, scored
from m1clip.data.workers import Workers, decode_rows
from m1clip.images import Pixels

WINDOW = 10_000  # rows that a live shard's order is shuffled over: its files are read nearly in sequence


class Images(Protocol):
    def take(self, rows: Rows) -> tuple[Rows, Pixels]:
        """The images of some rows; of a row that cannot be decoded another's, with its number."""
        ...


@dataclass(frozen=True)
class Cached:
    pixels: Pixels
    good: Rows

    def take(self, rows: Rows) -> tuple[Rows, Pixels]:
        return rows, self.pixels[self.good[rows]]


class OnTheFly:
    """Decoded by worker processes when asked for. A row that cannot be is replaced by the next that can."""

    def __init__(self, pairs: PairDataset, size: int, workers: int, max_bad: float):
        self.pairs, self.size, self.max_bad = pairs, size, max_bad
        self.faults = BadRows(len(pairs), len(pairs))
        self.bad = set[int]()
        self.workers = Workers(partial(decode_rows, pairs, size), workers)

    def take(self, rows: Rows) -> tuple[Rows, Pixels]:
        rows = np.array([self._good(int(row)) for row in rows])
        pixels = np.empty((len(rows), self.size, self.size, 3), np.uint8)
        todo = np.arange(len(rows))
        while len(todo):
            parts = [part for part in np.array_split(todo, 2 * self.workers.number) if len(part)]
            for part, done in zip(
                parts, self.workers.map([rows[part].tolist() for part in parts]), strict=True
            ):
                pixels[part] = done.pixels
                for row, (kind, what) in done.bad.items():
                    self.bad.add(row)
                    self.faults.add(BadRow(kind, self.pairs.row(row), what), image=True)
            self.faults.require_few(self.max_bad)
            todo = np.flatnonzero(np.isin(rows, list(self.bad)))
            rows[todo] = [self._good(int(row)) for row in rows[todo]]
        return rows, pixels

    def _good(self, row: int) -> int:
        if len(self.bad) == len(self.pairs):
            raise ValueError("not one image can be decoded; m1clip data check tells why")
        while row in self.bad:
            row = (row + 1) % len(self.pairs)
        return row


@dataclass(frozen=True)
class Part:
    pairs: PairDataset
    rows: Rows
    """Those of its pairs that are used."""
    images: Images
    weight: float = 1.0


class Split:
    """PairDataset by index, as any source has them, and their images."""

    def __init__(self, parts: Sequence[Part]):
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self.order = lru_cache(2)(self._order)  # an epoch's order is asked for at every step

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def identity(self) -> str:
        """Equal for the same rows with the same captions in the same order."""
        return "+".join(f"{part.pairs.identity}/{len(part.rows)}@{part.weight:g}" for part in self.parts)

    def _at(self, index: int) -> tuple[Part, int]:
        part = int(np.searchsorted(self.starts, index, "right")) - 1
        return self.parts[part], int(self.parts[part].rows[index - self.starts[part]])

    def captions(self, index: int) -> Sequence[str]:
        part, row = self._at(index)
        return part.pairs.captions(row)

    def row(self, index: int) -> str:
        part, row = self._at(index)
        return part.pairs.row(row)

    def take(self, rows: Rows) -> tuple[Rows, Pixels]:
        """Images (B, S, S, 3), and the rows they are of: others where one cannot be decoded."""
        if len(self.parts) == 1:
            return self.parts[0].images.take(rows)
        number = np.searchsorted(self.starts, rows, "right") - 1
        found, pixels = rows.copy(), None
        for k in np.unique(number):
            mine = number == k
            some, seen = self.parts[k].images.take(rows[mine] - self.starts[k])
            pixels = np.empty((len(rows), *seen.shape[1:]), np.uint8) if pixels is None else pixels
            found[mine], pixels[mine] = some + self.starts[k], seen
        assert pixels is not None
        return found, pixels

    def met(self) -> BadRows:
        """What could not be decoded so far, where images are decoded live."""
        lives = [part.images.faults for part in self.parts if isinstance(part.images, OnTheFly)]
        return sum(lives, BadRows())

    @property
    def per_epoch(self) -> int:
        return sum(round(part.weight * len(part.rows)) for part in self.parts)

    def _order(self, seed: int, epoch: int) -> Rows:
        """The rows of an epoch, each as often as its source's weight says; the n-th time + n * len(self)."""
        rng = np.random.default_rng((seed, epoch))
        if len(self.parts) == 1 and self.parts[0].weight == 1:
            return _shuffled(self.parts[0], rng)
        orders = [self._weighted(k, rng) for k in range(len(self.parts))]
        places = np.concatenate(
            [(np.arange(len(order)) + rng.random(len(order))) / len(order) for order in orders]
        )
        rows: Rows = np.concatenate(orders)[np.argsort(places)]
        return rows

    def _weighted(self, k: int, rng: np.random.Generator) -> Rows:
        part, number = self.parts[k], round(self.parts[k].weight * len(self.parts[k].rows))
        rounds = [_shuffled(part, rng) + n * len(self) for n in range(-(-number // len(part.rows)))]
        rows: Rows = np.concatenate(rounds)[:number] + self.starts[k]
        return rows


def _shuffled(part: Part, rng: np.random.Generator) -> Rows:
    """A random order; where files of many images are read live, one that jumps between few of them."""
    number = len(part.rows)
    if not (isinstance(part.images, OnTheFly) and isinstance(part.pairs, Indexed)):
        return rng.permutation(number)
    files = part.pairs.container()[part.rows]
    if (files < 0).any() or number <= WINDOW:
        return rng.permutation(number)
    lots = rng.permutation(int(files.max()) + 1)
    in_turn = np.argsort(lots[files], kind="stable")
    return in_turn[np.argsort(np.arange(number) + rng.random(number) * WINDOW)]


@dataclass(frozen=True)
class Splits:
    train: Split
    val: Split
    skipped: BadRows
    facts: dict[str, str]
    """For a person: where the images come from, how the sides were divided."""

    def record(self) -> dict[str, Any]:
        """What a run keeps: which data it was, and what was left out of it."""
        return {
            "identity": self.train.identity,
            "live": [isinstance(part.images, OnTheFly) for part in self.train.parts],
            "train": len(self.train),
            "val": len(self.val),
            **self.facts,
            "rows": self.skipped.rows,
            "skipped": dict(self.skipped.counts),
            "named": [str(fault) for fault in self.skipped.named[:1000]],
        }


def open_splits(
    config: DataConfig, size: int, margin: int, bars: ProgressFactory = no_progress, live: Sequence[bool] = ()
) -> Splits:
    """Images of `size` for the validation side, and of `margin`, which leaves room for crops, to train on.

    `live` says of each source how a run that is resumed had its images: their order depends on it.
    """
    sources = open_sources(config, bars)
    faults = sum((source.faults for source in sources), BadRows())
    modes: Sequence[bool | None] = live or [None] * len(sources)
    train = [_part(one, margin, config, faults, bars, mode) for one, mode in zip(sources, modes, strict=True)]
    val = [open_part(scored(one.val, config), size, config, faults, bars) for one in sources]
    faults.require_few(config.max_bad_rows)
    if not all(len(part.rows) for part in (*train, *val)):
        raise ValueError(
            f"{config.data}: no image of one of its sides can be decoded; m1clip data check tells more"
        )
    now = [one.spec for one, part in zip(sources, train, strict=True) if isinstance(part.images, OnTheFly)]
    facts = {"split": "; ".join(dict.fromkeys(source.why for source in sources))}
    if now:
        facts["images"] = f"{', '.join(now)} decoded while training: beyond --cache-gb {config.cache_gb:g}"
    return Splits(Split(train), Split(val), faults, facts)


def _part(
    source: Source,
    size: int,
    config: DataConfig,
    faults: BadRows,
    bars: ProgressFactory,
    live: bool | None = None,
) -> Part:
    """Training pairs of one source: from the cache, or live if they do not fit into it."""
    pairs = source.train
    most = {True: 0.0, False: float("inf"), None: config.cache_gb}[live]
    with bars("preparing images", len(pairs)) as advance:
        store = stored(pairs, size, most, config.workers, advance)
    if store is None:
        images = OnTheFly(pairs, size, config.workers, config.max_bad_rows)
        return Part(pairs, np.arange(len(pairs)), images, source.weight)
    return _sound(pairs, store.pixels(), store.bad(), faults, source.weight)


def open_part(
    pairs: PairDataset, size: int, config: DataConfig, faults: BadRows, bars: ProgressFactory = no_progress
) -> Part:
    """PairDataset to score on: from the cache, or all of them in memory if they do not fit into it."""
    with bars("preparing images", len(pairs)) as advance:
        store = stored(pairs, size, config.cache_gb, config.workers, advance)
        if store is None:
            done = decoded(pairs, size, config.workers, advance)
            bad = {row: BadRow(kind, pairs.row(row), what) for row, (kind, what) in done.bad.items()}
            return _sound(pairs, done.pixels, bad, faults)
    return _sound(pairs, store.pixels(), store.bad(), faults)


def _sound(
    pairs: PairDataset, pixels: Pixels, bad: dict[int, BadRow], faults: BadRows, weight: float = 1.0
) -> Part:
    for fault in bad.values():
        faults.add(fault, image=True)
    good = np.setdiff1d(np.arange(len(pairs)), list(bad)).astype(np.int64)
    return Part(pairs, good, Cached(pixels, good), weight)
