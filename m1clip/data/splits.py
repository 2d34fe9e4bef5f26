"""Train and validation splits of a run: pairs of its sources, with cached or on-the-fly images. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from m1clip.config import DataConfig
from m1clip.data.index import IndexedPairs, RowIndices
from m1clip.data.pixel_cache import WorkerPool, build_pixel_cache, decode_rows, decode_to_memory
from m1clip.data.rows import BadRows, PairDataset, ProgressFactory, no_progress
from m1clip.data.sources import Source, validation_subset
from m1clip.images import Pixels

SHUFFLE_WINDOW = 10_000  # rows; on the fly, shards are read nearly in sequence


class OnTheFlyImages:
    """Images decoded by worker processes on request. A bad row is replaced by the next good one."""

    def __init__(self, pairs: PairDataset, image_size: int, workers: int, max_bad_rows: float):
        self.pairs, self.image_size, self.max_bad_rows = pairs, image_size, max_bad_rows
        self.bad_rows, self.bad = BadRows(len(pairs), len(pairs)), set[int]()
        self.pool = WorkerPool(partial(decode_rows, pairs, image_size), workers)

    def take(self, rows: RowIndices) -> tuple[RowIndices, Pixels]:
        rows, todo = np.array(rows), np.arange(len(rows))
        pixels = np.empty((len(rows), self.image_size, self.image_size, 3), np.uint8)
        while len(todo):
            while (bad := np.isin(rows, list(self.bad))).any():
                if len(self.bad) == len(self.pairs):
                    raise ValueError("no image can be decoded; `m1clip data check` lists the reasons")
                rows[bad] = (rows[bad] + 1) % len(self.pairs)
            chunks = [chunk for chunk in np.array_split(todo, 2 * self.pool.workers) if len(chunk)]
            results = self.pool.map([rows[chunk].tolist() for chunk in chunks])
            for chunk, decoded in zip(chunks, results, strict=True):
                pixels[chunk] = decoded.pixels
                self.bad.update(decoded.bad)
                self.bad_rows.add_images(self.pairs, decoded.bad)
            self.bad_rows.require_at_most(self.max_bad_rows)
            todo = np.flatnonzero(np.isin(rows, list(self.bad)))
        return rows, pixels


@dataclass(frozen=True)
class SplitPart:
    pairs: PairDataset
    rows: RowIndices  # usable ones of `pairs`
    images: Pixels | OnTheFlyImages  # cached ones by row of `pairs`
    weight: float = 1.0

    @property
    def pairs_per_epoch(self) -> int:
        return round(self.weight * len(self.rows))

    def take(self, rows: RowIndices) -> tuple[RowIndices, Pixels]:
        if isinstance(self.images, OnTheFlyImages):
            return self.images.take(rows)
        return rows, self.images[self.rows[rows]]

    def shuffled(self, rng: np.random.Generator) -> RowIndices:
        """A random order; shards that are read on the fly are shuffled, and their rows within a window."""
        count = len(self.rows)
        if not (isinstance(self.images, OnTheFlyImages) and isinstance(self.pairs, IndexedPairs)):
            return rng.permutation(count)
        shard = self.pairs.column("container")[self.rows] - 1
        if (shard < 0).any() or count <= SHUFFLE_WINDOW:
            return rng.permutation(count)
        in_shard_order = np.argsort(rng.permutation(int(shard.max()) + 1)[shard], kind="stable")
        return in_shard_order[np.argsort(np.arange(count) + rng.random(count) * SHUFFLE_WINDOW)]


class Split:
    """Pairs of all sources by row, and their images."""

    def __init__(self, parts: Sequence[SplitPart]):
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *(len(part.rows) for part in parts)])
        self.order = lru_cache(2)(self._order)  # used at every step of an epoch

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def identity(self) -> str:
        """Changes with the rows, their captions or their order."""
        return "+".join(f"{part.pairs.identity}/{len(part.rows)}@{part.weight:g}" for part in self.parts)

    @property
    def pairs_per_epoch(self) -> int:
        return sum(part.pairs_per_epoch for part in self.parts)

    def _find(self, row: int) -> tuple[PairDataset, int]:
        number = int(np.searchsorted(self.starts, row, "right")) - 1
        part = self.parts[number]
        return part.pairs, int(part.rows[row - self.starts[number]])

    def captions(self, row: int) -> Sequence[str]:
        pairs, index = self._find(row)
        return pairs.captions(index)

    def location(self, row: int) -> str:
        pairs, index = self._find(row)
        return pairs.location(index)

    def take(self, rows: RowIndices) -> tuple[RowIndices, Pixels]:
        """Images (B, H, W, 3) and their rows: a row that cannot be decoded is replaced by another one."""
        if len(self.parts) == 1:
            return self.parts[0].take(rows)
        number = np.searchsorted(self.starts, rows, "right") - 1
        taken, pixels = [], []
        for k in np.unique(number):
            part_rows, part_pixels = self.parts[k].take(rows[number == k] - self.starts[k])
            taken.append(part_rows + self.starts[k])
            pixels.append(part_pixels)
        position = np.argsort(np.argsort(number, kind="stable"))
        return np.concatenate(taken)[position], np.concatenate(pixels)[position]

    def bad_rows(self) -> BadRows:
        """Rows that could not be decoded so far, where images are decoded on the fly."""
        stores = (part.images for part in self.parts)
        return sum((store.bad_rows for store in stores if isinstance(store, OnTheFlyImages)), BadRows())

    def _order(self, seed: int, epoch: int) -> RowIndices:
        """Samples of an epoch: rows, each as often as its source's weight says.

        The n-th repetition of a row is row + n * len(self), so that its augmentation differs.
        """
        rng = np.random.default_rng((seed, epoch))
        if len(self.parts) == 1 and self.parts[0].weight == 1:
            return self.parts[0].shuffled(rng)
        orders = []
        for part, start in zip(self.parts, self.starts[:-1], strict=True):
            repeats = range(-(-part.pairs_per_epoch // len(part.rows)))
            order = np.concatenate([part.shuffled(rng) + n * len(self) for n in repeats])
            orders.append(order[: part.pairs_per_epoch] + start)
        # Every source is spread evenly over the epoch.
        position = [(np.arange(len(order)) + rng.random(len(order))) / len(order) for order in orders]
        samples: RowIndices = np.concatenate(orders)[np.argsort(np.concatenate(position))]
        return samples


@dataclass(frozen=True)
class Splits:
    train: Split
    val: Split
    skipped: BadRows
    facts: dict[str, str]  # for the run's header: how the data was split, which images are decoded on the fly

    def record(self) -> dict[str, Any]:
        """data.json of a run."""
        return {
            "identity": self.train.identity,
            "on_the_fly": [isinstance(part.images, OnTheFlyImages) for part in self.train.parts],
            "train": len(self.train),
            "val": len(self.val),
            **self.facts,
            "rows": self.skipped.rows,
            "skipped": self.skipped.record(examples=1000),
        }


def open_splits(
    sources: Sequence[Source],
    config: DataConfig,
    image_size: int,
    stored_size: int,
    progress: ProgressFactory = no_progress,
    on_the_fly: Sequence[bool] = (),
) -> Splits:
    """Validation images at `image_size`, training images at `stored_size`, which leaves a margin for crops.

    A resumed run passes `on_the_fly` of its data.json, one flag per source: the order of rows depends on it.
    """
    bad_rows = sum((source.bad_rows for source in sources), BadRows())
    limits = [0.0 if flag else float("inf") for flag in on_the_fly] or [config.cache_gb] * len(sources)
    train = []
    for source, max_gb in zip(sources, limits, strict=True):
        part = _open_part(source.train, stored_size, replace(config, cache_gb=max_gb), bad_rows, progress, False)
        train.append(replace(part, weight=source.weight))
    val_pairs = [validation_subset(source.val, config) for source in sources]
    val = open_eval_split(val_pairs, image_size, config, bad_rows, progress)
    bad_rows.require_at_most(config.max_bad_rows)
    if not all(len(part.rows) for part in (*train, *val.parts)):
        raise ValueError(f"{config.data}: a split has no image that can be decoded; see `m1clip data check`")
    facts = {"split": "; ".join(dict.fromkeys(source.split_reason for source in sources))}
    parts = zip(sources, train, strict=True)
    if uncached := [source.spec for source, part in parts if isinstance(part.images, OnTheFlyImages)]:
        facts["images"] = f"{', '.join(uncached)} decoded on the fly: above --cache-gb {config.cache_gb:g}"
    return Splits(Split(train), val, bad_rows, facts)


def open_eval_split(
    pairs: Sequence[PairDataset], image_size: int, config: DataConfig, bad_rows: BadRows, progress: ProgressFactory
) -> Split:
    """One split of several datasets, cached, or decoded to memory if the cache limit is too small."""
    return Split([_open_part(dataset, image_size, config, bad_rows, progress, is_eval=True) for dataset in pairs])


def _open_part(
    pairs: PairDataset, image_size: int, config: DataConfig, bad_rows: BadRows, progress: ProgressFactory, is_eval: bool
) -> SplitPart:
    with progress("decoding images", len(pairs)) as advance:
        if cache := build_pixel_cache(pairs, image_size, config.cache_gb, config.workers, advance):
            pixels, bad = cache.pixels(), cache.bad_images()
        elif is_eval:
            pixels, bad = decode_to_memory(pairs, image_size, config.workers, advance)
        else:
            images = OnTheFlyImages(pairs, image_size, config.workers, config.max_bad_rows)
            return SplitPart(pairs, np.arange(len(pairs)), images)
    bad_rows.add_images(pairs, bad)
    good_rows = np.setdiff1d(np.arange(len(pairs)), list(bad)).astype(np.int64)
    return SplitPart(pairs, good_rows, pixels)
