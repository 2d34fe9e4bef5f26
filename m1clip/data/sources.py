"""A --data spec to sources of pairs, split into train, val and test. No torch."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from m1clip.config import DataConfig
from m1clip.data.decode import BadImage
from m1clip.data.index import SPLIT_CODES, IndexedPairs, IndexWriter, RowIndices
from m1clip.data.pixel_cache import explain_full_disk, row_chunks, temporary_cache
from m1clip.data.rows import BadRows, PairDataset, ProgressFactory, no_progress
from m1clip.files import cache_folder

SCHEMES = ("synthetic", "coco", "flickr30k", "flickr8k", "hf")
MAX_VAL = 5000  # validation images of a dataset's own split that are used, unless --val-size asks for more
SYNTHETIC_VAL = 240


class NoUsablePairs(ValueError):  # noqa: N818 - the data is wrong, not the program
    def __init__(self, spec: str, bad_rows: BadRows):
        super().__init__(f"{spec}: {bad_rows}" if bad_rows else f"{spec} has no pairs")
        self.spec, self.bad_rows = spec, bad_rows


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


def _exists(spec: str) -> bool:
    scheme, colon, path = spec.partition(":")
    return os.path.exists(os.path.expanduser(path if colon and scheme in SCHEMES else spec))


def _open_source(spec: str, weight: float, config: DataConfig, progress: ProgressFactory) -> Source:
    if spec.partition(":")[0] == "synthetic":
        return _open_synthetic(spec, weight, config)
    from m1clip.data.readers import list_rows  # here, because synthetic data needs no readers

    bad_rows, folder = BadRows(), temporary_cache("index-")
    with progress(f"listing {spec}", None) as advance, explain_full_disk(folder):
        IndexWriter(list_rows(spec, config), config, bad_rows).write(folder, advance)
    pairs = IndexedPairs(folder)
    if not len(pairs):
        raise NoUsablePairs(spec, bad_rows)
    bad_rows.require_at_most(config.max_bad_rows)
    train, val, test, reason = split_rows(pairs, config, progress)
    val_pairs = pairs.take(val)
    test_pairs = None if test is None else val_pairs if test is val else pairs.take(test)
    return Source(spec, weight, pairs, pairs.take(train), val_pairs, test_pairs, bad_rows, reason)


def _open_synthetic(spec: str, weight: float, config: DataConfig) -> Source:
    from m1clip.data.synthetic import SyntheticScenes

    size = spec.partition(":")[2]
    if size and not size.isdecimal():
        raise ValueError(f"in {spec!r}, {size!r} must be a whole number of scenes")
    train = SyntheticScenes(int(size or 12000), config.seed)
    val = SyntheticScenes(SYNTHETIC_VAL if config.val_size == "auto" else config.val_size, config.seed, "val")
    return Source(spec, weight, train, train, val, None, BadRows(), "combinations not in training")


def split_rows(
    pairs: IndexedPairs, config: DataConfig, progress: ProgressFactory
) -> tuple[RowIndices, RowIndices, RowIndices | None, str]:
    """Rows of the train, val and test splits, and how they were chosen. A dataset's own splits are kept."""
    codes = np.array([*SPLIT_CODES])[pairs.column("split")]
    if not np.isin(codes, ("train", "val", "test")).any():  # no word names a split
        codes = np.where(codes == "unknown", "", codes)
    train = np.flatnonzero(np.isin(codes, ("", "train")))
    val, test = np.flatnonzero(codes == "val"), np.flatnonzero(codes == "test")
    if len(train) and (len(val) or len(test)):
        rest = np.count_nonzero(np.isin(codes, ("unlisted", "unknown")))
        reason = f"the dataset's own {'val' if len(val) else 'test'} split"
        reason += f"; {rest:,} images are in no split" if rest else ""
        return train, val if len(val) else test, test if len(test) else None, reason
    rows = np.flatnonzero(codes != "unlisted")
    if not len(rows):
        raise ValueError("no image is in a split: the split lists do not match the captions")
    hashes = content_hashes(pairs, progress)[rows]
    distinct = np.unique(hashes)
    count = min(1000, max(1, len(distinct) // 20)) if config.val_size == "auto" else config.val_size
    if count >= len(distinct):
        raise ValueError(f"--val-size {count} of {len(distinct)} distinct images leaves none for training")
    is_val = hashes <= distinct[count - 1]
    return rows[~is_val], rows[is_val], None, "by a hash of each image's bytes"


def validation_subset(pairs: PairDataset, config: DataConfig) -> PairDataset:
    """All validation pairs, or as many as are asked for, evenly spaced."""
    limit = MAX_VAL if config.val_size == "auto" else config.val_size
    if len(pairs) <= limit or not isinstance(pairs, IndexedPairs):
        return pairs
    return pairs.take(np.linspace(0, len(pairs) - 1, limit).astype(np.int64))


def content_hashes(pairs: IndexedPairs, progress: ProgressFactory = no_progress) -> NDArray[np.uint64]:
    """A hash of each image's bytes; cached, so that they are read once."""
    path = cache_folder() / f"content-{blake2b(pairs.fingerprint.encode(), digest_size=8).hexdigest()}.npy"
    with suppress(OSError, ValueError, EOFError):
        cached: NDArray[np.uint64] = np.load(path)
        if len(cached) == len(pairs):
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
        partial = path.with_name(f"content-{os.getpid()}.new.npy")
        np.save(partial, hashes)
        os.replace(partial, path)
    return hashes


def _remove_val_images(sources: list[Source], progress: ProgressFactory) -> list[Source]:
    """Remove from every training split the validation and test images of the other sources."""
    indexed = {source.spec: source.all for source in sources if isinstance(source.all, IndexedPairs)}
    if len(indexed) < 2:
        return sources
    hashes = {spec: content_hashes(pairs, progress) for spec, pairs in indexed.items()}
    splits = ((source.spec, pairs) for source in sources for pairs in (source.val, source.test))
    held_out = [hashes[spec][pairs.rows] for spec, pairs in splits if isinstance(pairs, IndexedPairs)]
    for i, source in enumerate(sources):
        if isinstance(source.train, IndexedPairs):
            rows = np.flatnonzero(~np.isin(hashes[source.spec][source.train.rows], np.concatenate(held_out)))
            if not len(rows):
                raise ValueError(f"every training image of {source.spec} is a validation image of another source")
            sources[i] = replace(source, train=source.train.take(rows))
    return sources
