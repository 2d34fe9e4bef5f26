"""From a --data spec to sources, and to the train and validation splits of a run. No torch."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.config import DataConfig, Preprocess
from m1clip.data import pixel_cache
from m1clip.data.index import (
    BadRows,
    IndexedPairs,
    IndexWriter,
    PairDataset,
    ProgressFactory,
    RowIndices,
    array_file,
    no_progress,
)
from m1clip.decode import BadImage
from m1clip.files import atomic_write, cache_folder, open_regular
from m1clip.images import Pixels
from m1clip.workers import WorkerPool, row_chunks

SCHEMES = ("synthetic", "coco", "flickr30k", "flickr8k", "hf")
MAX_VAL = 5000  # validation images of a dataset's own split that are used, unless --val-size asks for more
SYNTHETIC_VAL = 240
MIN_VAL = 50  # validation images that are kept where a budget allows only some
OWN_SPLIT = "the dataset's own"
IMAGES_PER_LABEL = 5  # captions with at least so many images each are labels
GROUP_KINDS = ("none", "caption", "label", "folder", "duplicates")  # --group-by without a column of a table
SHUFFLE_WINDOW = 10_000  # rows; on the fly, shards are read nearly in sequence


class NoUsablePairs(ValueError):  # noqa: N818 - the data is wrong, not the program
    def __init__(self, spec: str, bad_rows: BadRows):
        reason = f"{spec}: {bad_rows}" if bad_rows else f"{spec} has no pairs"
        super().__init__(reason + caption_advice(spec, bad_rows))
        self.spec, self.bad_rows = spec, bad_rows


def caption_advice(spec: str, bad_rows: BadRows, caption_from: str = "auto") -> str:
    """The ways on if most bad rows are images without a caption."""
    if 2 * bad_rows.counts["no caption"] <= len(bad_rows):
        return ""
    is_folder = os.path.isdir(os.path.expanduser(spec))
    origin = "" if caption_from == "auto" else f" --caption-from {caption_from}"
    template = f"`m1clip data template {shlex.quote(spec)}{origin}`"
    table = f"the table that {template} makes" if is_folder else "their captions"
    return f"; fill in {table}, remove these {'images' if is_folder else 'rows'}, or raise --max-bad-rows to skip them"


@dataclass(frozen=True)
class Source:
    spec: str
    weight: float  # times that each training pair occurs per epoch
    all: PairDataset
    train: PairDataset
    val: PairDataset
    test: PairDataset | None
    bad_rows: BadRows
    split_reason: str

    @property
    def has_own_splits(self) -> bool:
        return not isinstance(self.all, IndexedPairs) or self.split_reason.startswith(OWN_SPLIT)


def open_sources(config: DataConfig, progress: ProgressFactory = no_progress) -> list[Source]:
    """The sources of a spec such as coco:DIR@2+mine.csv."""
    sources = [_open_source(spec, weight, config, progress) for spec, weight in parse_spec(config.data)]
    return _remove_val_images(sources, progress) if len(sources) > 1 else sources


def parse_spec(data: str) -> list[tuple[str, float]]:
    """Specs and their weights; a + or @ that is part of an existing path is left alone."""
    if not data.strip():
        raise ValueError("--data is empty; expected a folder, a table, or synthetic:N")
    specs = []
    for part in [data] if _exists(data) else data.split("+"):
        weighted = None if _exists(part) else re.fullmatch(r"(.+)@([0-9.]+)", part.strip())
        spec, weight = weighted.groups() if weighted else (part.strip(), "1")
        if not re.fullmatch(r"\d+\.?\d*|\.\d+", weight) or not 0 < float(weight) <= 1000:
            raise ValueError(f"in {data!r}, the weight {weight} must be a number above 0 and at most 1000")
        specs.append((spec, float(weight)))
    return specs


COLUMNS = ("image_column", "caption_column", "label_column")


def refuse_flags(spec: str, kind: str, config: DataConfig, flags: Sequence[str]) -> None:
    """Refuse flags that say nothing about this kind of source; in a mixture they are about another one."""
    for flag in flags:
        if getattr(config, flag) != "auto" and len(parse_spec(config.data)) == 1:
            raise ValueError(
                f"--{flag.replace('_', '-')} {getattr(config, flag)} does not apply to {spec}: it is {kind}"
            )


def _exists(spec: str) -> bool:
    scheme, colon, path = spec.partition(":")
    return os.path.exists(os.path.expanduser(path if colon and scheme in SCHEMES else spec))


def _open_source(spec: str, weight: float, config: DataConfig, progress: ProgressFactory) -> Source:
    if spec.partition(":")[0] == "synthetic":
        return _open_synthetic(spec, weight, config)
    from m1clip.data.readers import list_rows  # here, because synthetic data needs no readers

    bad_rows, folder = BadRows(), pixel_cache.temporary_cache("index-")
    with progress(f"listing {spec}", None) as advance, pixel_cache.explain_full_disk(folder):
        IndexWriter(list_rows(spec, config), config, bad_rows).write(folder, advance)
    pairs = IndexedPairs(folder)
    if not len(pairs):
        raise NoUsablePairs(spec, bad_rows)
    bad_rows.require_at_most(config.max_bad_rows, caption_advice(spec, bad_rows, config.caption_from))
    train, val, test, reason = split_rows(pairs, config, progress)
    val_pairs = pairs.take(val)
    test_pairs = None if test is None else val_pairs if test is val else pairs.take(test)
    return Source(spec, weight, pairs, pairs.take(train), val_pairs, test_pairs, bad_rows, reason)


def _open_synthetic(spec: str, weight: float, config: DataConfig) -> Source:
    from m1clip.data.synthetic import SyntheticScenes

    _, colon, size = spec.partition(":")
    if colon and not re.fullmatch(r"[0-9]{1,12}", size):
        raise ValueError(f"in {spec!r}, {size[:20]!r} must be a whole number of scenes, as in synthetic:12000")
    refuse_flags(spec, "generated", config, (*COLUMNS, "caption_from"))
    if config.group_by != "none":
        raise ValueError("--group-by is not for synthetic scenes: their validation captions never occur in training")
    train = SyntheticScenes(int(size or 12000), config.seed)
    val = SyntheticScenes(SYNTHETIC_VAL if config.val_size == "auto" else config.val_size, config.seed, "val")
    return Source(spec, weight, train, train, val, None, BadRows(), "combinations not in training")


def split_rows(
    pairs: IndexedPairs, config: DataConfig, progress: ProgressFactory
) -> tuple[RowIndices, RowIndices, RowIndices | None, str]:
    """Rows of the train, val and test splits, and how they were chosen. A dataset's own splits are kept."""
    codes = pairs.splits()
    if not np.isin(codes, ("train", "val", "test")).any():  # no word names a split
        codes = np.where(codes == "unknown", "", codes)
    train = np.flatnonzero(np.isin(codes, ("", "train")))
    val, test = np.flatnonzero(codes == "val"), np.flatnonzero(codes == "test")
    if len(train) and (len(val) or len(test)):
        rest = np.count_nonzero(np.isin(codes, ("unlisted", "unknown")))
        reason = f"{OWN_SPLIT} {'val' if len(val) else 'test'} split"
        reason += f"; {rest:,} images are in no split" if rest else ""
        if config.group_by != "none":
            raise ValueError(f"--group-by {config.group_by} cannot change {reason}; leave the flag out")
        return train, val if len(val) else test, test if len(test) else None, reason
    rows = np.flatnonzero(codes != "unlisted")
    if not len(rows):
        raise ValueError("no image is in a split: the split lists do not match the captions")
    hashes = content_hashes(pairs, progress)[rows]
    distinct = np.unique(hashes)
    count = min(1000, max(1, len(distinct) // 20)) if config.val_size == "auto" else config.val_size
    if count >= len(distinct):
        if config.val_size == "auto":
            raise ValueError("there is only one distinct image; at least two are needed, one for validation")
        raise ValueError(f"--val-size {count} of {len(distinct)} distinct images leaves none for training")
    if config.group_by != "none":
        is_val = _split_groups(pairs.take(rows), hashes, config, count, progress)
        kind = "near duplicates" if config.group_by == "duplicates" else f"images with the same {config.group_by}"
        return rows[~is_val], rows[is_val], None, f"{kind} stay in one split"
    is_val = hashes <= distinct[count - 1]
    return rows[~is_val], rows[is_val], None, "by a hash of each image's bytes"


def _split_groups(
    pairs: IndexedPairs, hashes: NDArray[np.uint64], config: DataConfig, count: int, progress: ProgressFactory
) -> NDArray[np.bool_]:
    """Which images are for validation, if copies and images of one group stay together."""
    from m1clip.data.leakage import choose_groups
    from m1clip.perceptual_hash import connected_rows

    keys, group_by = _group_keys(pairs, config, progress), config.group_by
    if not any(keys):
        raise ValueError(f"--group-by {group_by}: no image has one; choose from {', '.join(GROUP_KINDS)}, or a column")
    groups = connected_rows([*texts, content] for texts, content in zip(keys, hashes.tolist(), strict=True))
    if len(set(groups)) < 2:
        raise ValueError(f"--group-by {group_by} leaves no validation split: all images are in one group")
    names = [min(texts, default=str(content)) for texts, content in zip(keys, hashes.tolist(), strict=True)]
    return choose_groups(groups, names, count)


def _group_keys(pairs: IndexedPairs, config: DataConfig, progress: ProgressFactory) -> list[list[str]]:
    """Texts that images of one group share; none for an image in no group."""
    if config.group_by == "duplicates":
        from m1clip.data.leakage import duplicate_keys

        return duplicate_keys(pairs, config.workers, progress)
    if config.group_by == "folder":
        return [[os.path.dirname(image)] for image in pairs.texts("image")]
    if config.group_by != "caption":
        values = pairs.texts("label" if config.group_by == "label" and not any(pairs.texts("group")) else "group")
        return [[value] if value else [] for value in values]
    keys = [[caption_key(text) for text in pairs.captions(row)] for row in range(len(pairs))]
    if TrainCaptions.compare(None, keys).labels:
        raise ValueError("--group-by caption: these captions are labels; --group-by label holds out whole labels")
    return keys


def validation_subset(pairs: PairDataset, config: DataConfig) -> PairDataset:
    """All validation pairs, or as many as are asked for, evenly spaced."""
    limit = MAX_VAL if config.val_size == "auto" else config.val_size
    if len(pairs) <= limit or not isinstance(pairs, IndexedPairs):
        return pairs
    return pairs.take(np.linspace(0, len(pairs) - 1, limit).astype(np.int64))


def content_hashes(pairs: IndexedPairs, progress: ProgressFactory = no_progress) -> NDArray[np.uint64]:
    """A hash of each image's bytes; cached, so that they are read once."""
    path = cache_folder() / f"content-{blake2b(pairs.fingerprint.encode(), digest_size=8).hexdigest()}.npy"
    with suppress(OSError, ValueError, EOFError), open_regular(path) as file:
        cached: NDArray[np.uint64] = np.load(file)
        if cached.shape == (len(pairs),) and cached.dtype == np.uint64:
            return cached
    unreadable = []

    def content_hash(row: int) -> int:
        try:
            return int.from_bytes(blake2b(pairs.read(row), digest_size=8).digest())
        except BadImage:
            unreadable.append(row)  # reported when it is decoded
            return 2**64 - 1 - row % 2**32

    hashes = np.empty(len(pairs), np.uint64)
    with progress("reading images", len(pairs)) as advance, ThreadPoolExecutor(8) as pool:
        for rows in row_chunks(len(pairs), 256):
            hashes[rows.start : rows.stop] = list(pool.map(content_hash, rows))
            advance(len(rows))
    if not unreadable:
        with suppress(OSError):  # a full disk: they are read again next time
            atomic_write(path, bytes(array_file(hashes)))
    return hashes


def _remove_val_images(sources: list[Source], progress: ProgressFactory) -> list[Source]:
    """Remove from every training split the validation and test images of the other sources."""
    indexed = {source.spec: source.all for source in sources if isinstance(source.all, IndexedPairs)}
    if len(indexed) < 2:
        return sources
    hashes = {spec: content_hashes(pairs, progress) for spec, pairs in indexed.items()}
    splits = ((source.spec, pairs) for source in sources for pairs in (source.val, source.test))
    excluded = [(spec, hashes[spec][pairs.rows]) for spec, pairs in splits if isinstance(pairs, IndexedPairs)]
    for i, source in enumerate(sources):
        if isinstance(source.train, IndexedPairs):
            train = hashes[source.spec][source.train.rows]
            in_any = np.isin(train, np.concatenate([val for _, val in excluded]))
            in_own = np.isin(train, np.concatenate([val for spec, val in excluded if spec == source.spec]))
            for origin, is_removed in (("the same source", in_own), ("another source", in_any & ~in_own)):
                note = f"training images of {source.spec} removed: in the val or test split of {origin}"
                source.bad_rows.notes += Counter({note: int(is_removed.sum())})  # without zeros
            if in_any.all():
                raise ValueError(f"every training image of {source.spec} is a validation image of another source")
            sources[i] = replace(source, train=source.train.take(np.flatnonzero(~in_any)))
    return sources


def caption_key(text: str) -> str:
    """Equal for equal captions, as training compares them: without case and outer spaces."""
    return text.strip().lower()


@dataclass(frozen=True)
class TrainCaptions:
    """What the captions of the training split say about those of an evaluation."""

    seen: frozenset[str] | None  # keys of the evaluated captions that also occur in training; None if unknown
    labels: tuple[str, ...] = ()  # distinct captions of both, if they are so few that they are labels

    @classmethod
    def compare(cls, train: Iterable[Sequence[str]] | None, val: Sequence[Sequence[str]]) -> "TrainCaptions":
        """From the captions of each training image, if they are known, and of each evaluated image."""
        labels = {caption_key(one[0]): one[0] for one in val}
        is_single, images = all(len(set(map(caption_key, one))) == 1 for one in val), len(val)
        val_keys, seen = {caption_key(text) for one in val for text in one}, set[str]()
        for one in train or ():
            keys = {caption_key(text) for text in one}
            seen |= keys & val_keys
            images += 1
            is_single = is_single and len(keys) == 1
            if is_single:
                labels.setdefault(keys.pop(), one[0])
        is_label = is_single and 1 < len(labels) <= images / IMAGES_PER_LABEL
        return cls(None if train is None else frozenset(seen), tuple(labels.values()) if is_label else ())


class OnTheFlyImages:
    """Images decoded by worker processes on request. A bad row is replaced by the next good one."""

    def __init__(self, pairs: PairDataset, settings: Preprocess, workers: int, max_bad_rows: float):
        self.pairs, self.settings, self.max_bad_rows = pairs, settings, max_bad_rows
        self.bad_rows, self.bad = BadRows(len(pairs), len(pairs)), set[int]()
        self.pool = WorkerPool(partial(pixel_cache.decode_rows, pairs, settings), workers)

    def of(self, pairs: PairDataset) -> "OnTheFlyImages":
        """The same for other rows."""
        self.pool.close()
        return OnTheFlyImages(pairs, self.settings, self.pool.workers, self.max_bad_rows)

    def take(self, rows: RowIndices) -> tuple[RowIndices, Pixels]:
        rows, todo = np.array(rows), np.arange(len(rows))
        pixels = np.empty((len(rows), self.settings.size, self.settings.size, 3), np.uint8)
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

    def every(self, n: int) -> "SplitPart":
        """Every n-th row."""
        rows = self.rows[::n]
        if not isinstance(self.images, OnTheFlyImages):
            return replace(self, rows=rows)
        assert isinstance(self.pairs, IndexedPairs)
        pairs = self.pairs.take(rows)
        return replace(self, pairs=pairs, rows=np.arange(len(pairs)), images=self.images.of(pairs))

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

    def all_captions(self) -> Iterator[Sequence[str]]:
        return (self.captions(row) for row in range(len(self)))

    def location(self, row: int) -> str:
        pairs, index = self._find(row)
        return pairs.location(index)

    def labels(self) -> list[str]:
        """The class of each image; empty for those without one."""
        return [pairs.label(index) for pairs, index in map(self._find, range(len(self)))]

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
    every: int = 1  # only every n-th image is used, where a budget allows no more

    def with_every(self, n: int) -> "Splits":
        if n == 1:
            return self
        val_n = min(n, max(1, len(self.val) // MIN_VAL))
        train, val = (
            Split([part.every(k) for part in split.parts]) for split, k in ((self.train, n), (self.val, val_n))
        )
        return replace(self, train=train, val=val, every=n)

    def near_duplicates(self) -> int | None:
        """Validation images that look like a training image; None if that is unknown."""
        if not all(isinstance(part.pairs, IndexedPairs) for part in (*self.train.parts, *self.val.parts)):
            return None  # synthetic scenes
        from m1clip.data.leakage import val_near_duplicates

        return val_near_duplicates(self.train, self.val)

    def record(self) -> dict[str, Any]:
        """data.json of a run."""
        return {
            "identity": self.train.identity,
            "on_the_fly": [isinstance(part.images, OnTheFlyImages) for part in self.train.parts],
            "train": len(self.train),
            "val": len(self.val),
            "every": self.every,
            **self.facts,
            "rows": self.skipped.rows,
            "skipped": self.skipped.record(examples=1000),
        }


def open_splits(
    sources: Sequence[Source],
    config: DataConfig,
    evaluated: Preprocess,
    stored: Preprocess,
    progress: ProgressFactory = no_progress,
    on_the_fly: Sequence[bool] = (),
) -> Splits:
    """Validation images as the model sees them, training images as `stored`, with a margin for random crops.

    A resumed run passes `on_the_fly` of its data.json, one flag per source: the order of rows depends on it.
    """
    bad_rows = sum((source.bad_rows for source in sources), BadRows())
    limits = [0.0 if flag else float("inf") for flag in on_the_fly] or [config.cache_gb] * len(sources)
    train = []
    for source, max_gb in zip(sources, limits, strict=True):
        part = _open_part(source.train, stored, replace(config, cache_gb=max_gb), bad_rows, progress, False)
        train.append(replace(part, weight=source.weight))
    val_pairs = [validation_subset(source.val, config) for source in sources]
    val = open_eval_split(val_pairs, evaluated, config, bad_rows, progress)
    bad_rows.require_at_most(config.max_bad_rows)
    if not all(len(part.rows) for part in (*train, *val.parts)):
        raise ValueError(f"{config.data}: a split has no image that can be decoded; see `m1clip data check`")
    facts = {"split": "; ".join(dict.fromkeys(source.split_reason for source in sources))}
    if notes := bad_rows.note_lines():
        facts["notes"] = "; ".join(notes)
    parts = zip(sources, train, strict=True)
    if uncached := [source.spec for source, part in parts if isinstance(part.images, OnTheFlyImages)]:
        reason = "" if any(on_the_fly) else f": above --cache-gb {config.cache_gb:g}"
        facts["images"] = f"{', '.join(uncached)} decoded on the fly{reason}"
    return Splits(Split(train), val, bad_rows, facts)


def open_eval_split(
    pairs: Sequence[PairDataset], settings: Preprocess, config: DataConfig, bad_rows: BadRows, progress: ProgressFactory
) -> Split:
    """One split of several datasets, cached, or decoded to memory if the cache limit is too small."""
    return Split([_open_part(dataset, settings, config, bad_rows, progress, is_eval=True) for dataset in pairs])


def _open_part(
    pairs: PairDataset,
    settings: Preprocess,
    config: DataConfig,
    bad_rows: BadRows,
    progress: ProgressFactory,
    is_eval: bool,
) -> SplitPart:
    with progress("decoding images", len(pairs)) as advance:
        if cache := pixel_cache.build_pixel_cache(pairs, settings, config.cache_gb, config.workers, advance, is_eval):
            pixels, bad = cache.pixels(), cache.bad_images()
        elif is_eval:
            pixels, bad = pixel_cache.decode_to_memory(pairs, settings, config.workers, advance, exact=True)
        else:
            images = OnTheFlyImages(pairs, settings, config.workers, config.max_bad_rows)
            return SplitPart(pairs, np.arange(len(pairs)), images)
    bad_rows.add_images(pairs, bad)
    good_rows = np.setdiff1d(np.arange(len(pairs)), list(bad)).astype(np.int64)
    return SplitPart(pairs, good_rows, pixels)
