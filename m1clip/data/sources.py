"""Which pairs a spec means: its parts found, listed and divided into sides."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob
from hashlib import blake2b
from pathlib import Path

import numpy as np
from braceexpand import braceexpand
from numpy.typing import NDArray

from m1clip.config import DataConfig
from m1clip.data import caption_datasets, folders, hf_datasets, index, tables, webdataset
from m1clip.data.cache_space import explained_if_full, own_folder
from m1clip.data.decode import BadImage
from m1clip.data.index import Builder, Indexed, Rows
from m1clip.data.pairs import PairDataset, ProgressFactory, no_progress
from m1clip.data.rows import BadRows, Listing
from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.files import cache_folder
from m1clip.format import did_you_mean

KINDS = ("synthetic", "coco", "flickr30k", "flickr8k", "hf")
GIVEN = 5000  # of a validation side as given, this many are scored unless --val-size asks for more
DRAWN = 240


class NoUsablePairs(ValueError):  # noqa: N818 - it is the data that is wrong
    """Not one row can be used; `faults` has the reasons."""

    def __init__(self, spec: str, faults: BadRows):
        super().__init__(
            f"{spec}: not one row can be used; {faults}" if faults else f"{spec} has no pairs in it"
        )
        self.spec, self.faults = spec, faults


@dataclass(frozen=True)
class Source:
    spec: str
    weight: float
    """How often each of its training pairs comes in an epoch."""
    every: PairDataset
    """All of them, of whatever side."""
    train: PairDataset
    val: PairDataset
    test: PairDataset | None
    faults: BadRows
    why: str
    """How the sides were divided."""


def open_sources(config: DataConfig, bars: ProgressFactory = no_progress) -> list[Source]:
    """The parts of a spec such as coco:DIR@2+mine.csv."""
    sources = [_open(spec, weight, config, bars) for spec, weight in parts_of(config.data)]
    return _apart(sources, bars) if len(sources) > 1 else sources


def parts_of(spec: str) -> list[tuple[str, float]]:
    """Specs and their weights; a plus sign or an @ that belongs to a path is left alone."""
    if not spec.strip():
        raise ValueError("--data is empty; a folder, a table, or synthetic:N is expected")
    parts = []
    for part in [spec] if _exists(spec) else spec.split("+"):
        found = None if _exists(part) else re.fullmatch(r"(.+)@([0-9.]+)", part.strip())
        name, weight = (found.group(1), found.group(2)) if found else (part.strip(), "1")
        try:
            parts.append((name, float(weight)))
        except ValueError:
            raise ValueError(f"in {spec!r}, {weight!r} should be a number: how often a pair comes") from None
        if not 0 < parts[-1][1] <= 1000:
            raise ValueError(f"in {spec!r}, the weight {weight} should be above 0 and at most 1000")
    return parts


def _exists(spec: str) -> bool:
    kind, mark, rest = spec.partition(":")
    return os.path.exists(os.path.expanduser(rest if mark and kind in KINDS else spec))


def _open(spec: str, weight: float, config: DataConfig, bars: ProgressFactory) -> Source:
    if spec.partition(":")[0] == "synthetic":
        return _synthetic(spec, weight, config)
    faults = BadRows()
    folder = own_folder("index-")
    with bars(f"listing {spec}", None) as listed, explained_if_full(folder):
        Builder(listing(spec, config), config, faults).write(folder, listed)
    pairs = Indexed(folder)
    if not len(pairs):
        raise NoUsablePairs(spec, faults)
    faults.require_few(config.max_bad_rows)
    train, val, test, why = divide(pairs, config, bars)
    held = pairs.take(val)
    tested = None if test is None else held if test is val else pairs.take(test)
    return Source(spec, weight, pairs, pairs.take(train), held, tested, faults, why)


def _synthetic(spec: str, weight: float, config: DataConfig) -> Source:
    size = spec.partition(":")[2]
    if size and not size.isdecimal():
        raise ValueError(f"in {spec!r}, {size!r} should be a whole number of scenes")
    number = DRAWN if config.val_size == "auto" else config.val_size
    train = SyntheticScenes(int(size or 12000), config.seed)
    val = SyntheticScenes(number, config.seed, "val")
    return Source(spec, weight, train, train, val, None, BadRows(), "combinations never trained on")


def listing(spec: str, config: DataConfig) -> Listing:
    kind, mark, rest = spec.partition(":")
    if mark and kind == "hf":
        return hf_datasets.hub(rest, config, cache_folder())
    if mark and kind in KINDS:
        path = Path(rest).expanduser()
        if not path.is_dir():
            raise FileNotFoundError(f"{kind}:{rest} needs the folder of {kind}; there is no folder {rest!r}")
        return (
            caption_datasets.coco(path, config)
            if kind == "coco"
            else caption_datasets.flickr(path, kind, config)
        )
    return _files(files_of(spec), config)


def _files(paths: list[Path], config: DataConfig) -> Listing:
    """Shards and tables with images inside are read together, others one by one."""
    endings = {path.suffix.lower() for path in paths if path.is_file()}
    if endings == {".tar"} and not any(path.is_dir() for path in paths):
        return webdataset.shards(paths)
    if endings == {".parquet"} and tables.has_images(paths[0]):
        return hf_datasets.parquet(paths, config, cache_folder())
    return folders.joined([_one(path, config) for path in paths])


def _one(path: Path, config: DataConfig) -> Listing:
    if path.is_dir():
        for inside in map(sorted, (path.glob("*.tar"), path.glob("*.parquet"), path.glob("data/*.parquet"))):
            if inside:
                return _files(inside, config)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            return hf_datasets.hub(str(path), config, cache_folder())
        return folders.folder(path, config)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if path.suffix.lower() in (".txt", ".token"):
        return caption_datasets.text_table(path, config)
    if path.suffix.lower() not in tables.TABLES:
        raise ValueError(
            f"{path} is nothing m1clip can read: a folder, {', '.join(tables.TABLES)} or plain .tar shards"
        )
    known = caption_datasets.known_json(path) if path.suffix.lower() == ".json" else None
    return known or tables.table(path, config)


def files_of(spec: str) -> list[Path]:
    """The files of a path with {000..099} or * in it, or the one it names."""
    spec = os.path.expanduser(spec)
    names = [spec] if os.path.exists(spec) else list(braceexpand(spec))
    names = [found for name in names for found in (sorted(glob(name)) if "*" in name else [name])]
    if not names or not any(map(os.path.exists, names)):
        kind = spec.partition(":")[0]
        close = f"; {did_you_mean(kind, KINDS)}" if ":" in spec else ""
        raise FileNotFoundError(f"no data source {spec!r}: there is no such file or folder{close}")
    return [Path(name) for name in names]


def divide(pairs: Indexed, config: DataConfig, bars: ProgressFactory) -> tuple[Rows, Rows, Rows | None, str]:
    """Rows of the training, validation and test sides, and the reason. Splits as given may share images."""
    side, requested = pairs.column("side"), config.val_size
    if not np.isin(side, (index.TRAIN, index.VAL, index.TEST)).any():  # no word of it names a side
        side = np.where(side == index.UNKNOWN, index.NO_SIDE, side)
    train = np.flatnonzero(np.isin(side, (index.NO_SIDE, index.TRAIN)))
    held, test = np.flatnonzero(side == index.VAL), np.flatnonzero(side == index.TEST)
    if len(train) and (len(held) or len(test)):
        left = np.count_nonzero(np.isin(side, (index.UNLISTED, index.UNKNOWN)))
        word = ("val" if len(held) else "test") + (f", {left:,} on no side" if left else "")
        return train, held if len(held) else test, test if len(test) else None, f"the {word} split as given"
    rows = np.flatnonzero(side != index.UNLISTED)
    if not len(rows):
        raise ValueError("every image is on no list: the lists of the split and the captions do not match")
    content = contents(pairs, bars)[rows]
    known = np.unique(content)
    number = min(1000, max(1, len(known) // 20)) if requested == "auto" else requested
    if number >= len(known):
        raise ValueError(f"--val-size {number} of {len(known)} different images leaves none to learn from")
    mine = content <= known[number - 1]
    return rows[~mine], rows[mine], None, "by a hash of each image's bytes"


def scored(pairs: PairDataset, config: DataConfig) -> PairDataset:
    """Those of a validation side that are scored: all, or as many as are asked for, from all over it."""
    most = GIVEN if config.val_size == "auto" else config.val_size
    if len(pairs) <= most or not isinstance(pairs, Indexed):
        return pairs
    return pairs.take(np.linspace(0, len(pairs) - 1, most).astype(np.int64))


def contents(pairs: Indexed, bars: ProgressFactory = no_progress) -> NDArray[np.uint64]:
    """A number for each image, equal for equal bytes; kept, so that they are read once."""
    path = cache_folder() / f"content-{blake2b(pairs.fingerprint.encode(), digest_size=8).hexdigest()}.npy"
    with suppress(OSError, ValueError, EOFError):
        known: NDArray[np.uint64] = np.load(path)
        if len(known) == len(pairs):
            return known
    unread = []

    def content(row: int) -> int:
        try:
            data = pairs.read(row)
        except BadImage:
            unread.append(row)  # found again, and named, when it is decoded
            return 2**64 - 1 - row % 2**32
        return int.from_bytes(blake2b(data, digest_size=8).digest())

    found = np.empty(len(pairs), np.uint64)
    with bars("reading images", len(pairs)) as advance, ThreadPoolExecutor(8) as pool:
        for start in range(0, len(pairs), 256):
            part = range(start, min(start + 256, len(pairs)))
            found[start : part.stop] = list(pool.map(content, part))
            advance(len(part))
    if not unread:
        aside = path.with_name(f"content-{os.getpid()}.new.npy")
        np.save(aside, found)
        os.replace(aside, path)
    return found


def _apart(sources: list[Source], bars: ProgressFactory) -> list[Source]:
    """Where sources are mixed, an image that one holds out is not trained on from another."""
    known = {one.spec: contents(one.every, bars) for one in sources if isinstance(one.every, Indexed)}
    if len(known) < 2:
        return sources
    kept = [
        known[one.spec][side.rows]
        for one in sources
        for side in (one.val, one.test)
        if isinstance(side, Indexed)
    ]
    out = np.unique(np.concatenate(kept))
    apart = []
    for source in sources:
        if isinstance(source.train, Indexed):
            free = np.flatnonzero(~np.isin(known[source.spec][source.train.rows], out))
            if not len(free):
                raise ValueError(f"every image of {source.spec} is validation by another part of the mixture")
            source = replace(source, train=source.train.take(free))
        apart.append(source)
    return apart
