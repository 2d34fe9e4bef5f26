"""What a training and a validation split share: images that look the same, and groups kept in one split. No torch."""

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m1clip.data.index import IndexedPairs, PairDataset, ProgressFactory, array_file
from m1clip.data.pixel_cache import map_chunks, row_chunks
from m1clip.data.splits import OnTheFlyImages, Split
from m1clip.decode import BadImage
from m1clip.files import atomic_write, cache_folder, open_regular

MAX_BITS, MAX_COLOR = 3, 8  # differences of near duplicates: bits of each 64-bit dHash, mean color of 255
MAX_NEAR_DUPLICATES = 100_000
MAX_HASHED = 20_000  # training images compared after training
LOOKS = np.dtype([("dhash", "u8", 2), ("color", "i2", 3)])
Looks = NDArray[Any]  # has the fields of LOOKS
Pair = tuple[int, int]


def looks(image: Image.Image) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two 64-bit difference hashes, which resizing and recompression hardly change, and the mean color.

    Each bit tells whether a pixel of a thumbnail is brighter than its left or upper neighbor.
    """
    gray = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.BILINEAR), dtype=np.int16)
    left, upper = gray[1:, 1:] > gray[1:, :-1], gray[1:, 1:] > gray[:-1, 1:]
    color = np.asarray(image.resize((1, 1), Image.Resampling.BOX))[0, 0]
    return tuple(int.from_bytes(np.packbits(bits).tobytes()) for bits in (left, upper)), tuple(color)


def image_looks(pairs: IndexedPairs, workers: int, progress: ProgressFactory) -> Looks:
    """The looks of every image; cached, so that they are decoded once. An unreadable image looks flat."""
    path = cache_folder() / f"looks-{blake2b(pairs.fingerprint.encode(), digest_size=8).hexdigest()}.npy"
    with suppress(OSError, ValueError, EOFError), open_regular(path) as file:
        cached: Looks = np.load(file)
        if cached.shape == (len(pairs),) and cached.dtype == LOOKS:
            return cached
    chunks = []
    with progress("comparing images", len(pairs)) as advance:
        for chunk in map_chunks(partial(looks_of_rows, pairs), row_chunks(len(pairs), 64), workers):
            chunks.append(chunk)
            advance(len(chunk))
    found = np.concatenate(chunks)
    with suppress(OSError):  # a full disk: they are decoded again next time
        atomic_write(path, bytes(array_file(found)))
    return found


def looks_of_rows(pairs: PairDataset, rows: Sequence[int]) -> Looks:
    found = np.zeros(len(rows), LOOKS)
    for i, row in enumerate(rows):
        with suppress(BadImage):  # reported when it is decoded for training
            found[i] = looks(pairs.image(row, 256))
    return found


def duplicate_keys(pairs: IndexedPairs, workers: int, progress: ProgressFactory) -> list[list[str]]:
    """For each image a key of every pair of near duplicates that it is in; of an image without any, its own."""
    keys: list[list[str]] = [[] for _ in range(len(pairs))]
    for a, b in near_duplicates(image_looks(pairs, workers, progress)):
        for row in (a, b):
            keys[row].append(pairs.location(a))
    return [of_row or [pairs.location(row)] for row, of_row in enumerate(keys)]


def near_duplicates(images: Looks) -> list[Pair]:
    """Pairs of rows that look the same. Flat images, which all look the same, are excluded.

    Hashes that differ in at most three bits agree in one of four 16-bit blocks: only these are compared.
    """
    left, upper, color = images["dhash"][:, 0], images["dhash"][:, 1], images["color"]
    bits = np.bitwise_count(left)
    rows = np.flatnonzero((bits > 4) & (bits < 60))
    pairs = set[Pair]()
    for block in range(4):
        key = (left[rows] >> np.uint64(16 * block)) & np.uint64(0xFFFF)
        for group in rows_by_key(rows, key):
            for i, row in enumerate(group[:-1]):
                near = group[i + 1 : i + 2000]  # bounds the work if all images look alike
                near = near[np.bitwise_count(left[near] ^ left[row]) <= MAX_BITS]
                near = near[np.bitwise_count(upper[near] ^ upper[row]) <= MAX_BITS]
                near = near[(np.abs(color[near] - color[row]) <= MAX_COLOR).all(1)]
                pairs.update((int(row), int(other)) for other in near)
                if len(pairs) >= MAX_NEAR_DUPLICATES:
                    return sorted(pairs)
    return sorted(pairs)


def rows_by_key(rows: NDArray[Any], keys: NDArray[Any]) -> list[NDArray[Any]]:
    """Groups of two or more rows that have the same key."""
    order = np.argsort(keys, kind="stable")
    groups = np.split(rows[order], np.flatnonzero(np.diff(keys[order])) + 1)
    return [group for group in groups if len(group) > 1]


def val_near_duplicates(train: Split, val: Split) -> int | None:
    """Validation images that look like a training image; None if the images are not decoded yet, or too many."""
    stores = [part.images for split in (train, val) for part in split.parts]
    if len(train) > MAX_HASHED or any(isinstance(store, OnTheFlyImages) for store in stores):
        return None
    train_looks, val_looks = (split_looks(split) for split in (train, val))
    by_block = [np.argsort(block_keys(train_looks, block)) for block in range(4)]
    return sum(looks_like_any(image, train_looks, by_block) for image in val_looks)


def looks_like_any(image: Any, others: Looks, by_block: Sequence[NDArray[Any]]) -> bool:
    """Whether one of the others looks like the image; `by_block` has their order by each block of the hash."""
    if not 4 < np.bitwise_count(image["dhash"][0]) < 60:  # flat
        return False
    for block, order in enumerate(by_block):
        keys, key = block_keys(others, block), block_keys(image[None], block)[0]
        start, stop = np.searchsorted(keys, key, "left", order), np.searchsorted(keys, key, "right", order)
        near = others[order[start : min(stop, start + 2000)]]
        bits = np.bitwise_count(near["dhash"] ^ image["dhash"])
        colors = np.abs(near["color"] - image["color"])
        if ((bits <= MAX_BITS).all(1) & (colors <= MAX_COLOR).all(1)).any():
            return True
    return False


def block_keys(images: Looks, block: int) -> NDArray[np.uint64]:
    """16 bits of the first hash."""
    keys: NDArray[np.uint64] = (images["dhash"][:, 0] >> np.uint64(16 * block)) & np.uint64(0xFFFF)
    return keys


def split_looks(split: Split) -> Looks:
    chunks = (split.take(np.array(rows))[1] for rows in row_chunks(len(split), 256))
    images = (Image.fromarray(image) for chunk in chunks for image in chunk)
    return np.array([looks(image.reduce(max(1, image.width // 64))) for image in images], LOOKS)


def connected_rows(keys: Iterable[Iterable[Hashable]]) -> list[int]:
    """A group number for each row: rows that share a key, directly or through others, are in one group."""
    parent, row_of_key = list[int](), dict[Hashable, int]()

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for row, keys_of_row in enumerate(keys):
        parent.append(row)
        for key in keys_of_row:
            a, b = root(row), root(row_of_key.setdefault(key, row))
            parent[max(a, b)] = min(a, b)
    return [root(row) for row in range(len(parent))]


def choose_groups(groups: Sequence[int], names: Sequence[str], count: int) -> NDArray[np.bool_]:
    """Which rows are for validation: whole groups, about `count` rows, at least one group, never all.

    The order of the groups is that of a hash of their smallest name, so it does not depend on the order of rows.
    """
    group_N = np.unique(groups, return_inverse=True)[1]
    name = [""] * (int(group_N.max()) + 1)
    for group, row_name in zip(group_N.tolist(), names, strict=True):
        name[group] = min(name[group] or row_name, row_name)
    order = sorted(range(len(name)), key=lambda group: blake2b(name[group].encode(), digest_size=8).digest())
    sizes, chosen, rows = np.bincount(group_N), list[int](), 0
    for group in order:
        if rows + sizes[group] <= count:
            chosen.append(group)
            rows += int(sizes[group])
    return np.isin(group_N, chosen or [int(sizes.argmin())])
