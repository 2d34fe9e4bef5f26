"""Perceptual hashes of images, and pairs of images that look the same. No torch."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

MAX_BITS, MAX_COLOR = 3, 8  # differences of near duplicates: bits of each 64-bit dHash, mean color of 255
MAX_NEAR_DUPLICATES = 100_000
HASH = np.dtype([("dhash", "u8", 2), ("color", "i2", 3)])
ImageHashes = NDArray[Any]  # has the fields of HASH
Pair = tuple[int, int]


def perceptual_hash(image: Image.Image) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two 64-bit difference hashes, which resizing and recompression hardly change, and the mean color.

    Each bit tells whether a pixel of a thumbnail is brighter than its left or upper neighbor.
    """
    gray = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.BILINEAR), dtype=np.int16)
    left, upper = gray[1:, 1:] > gray[1:, :-1], gray[1:, 1:] > gray[:-1, 1:]
    color = np.asarray(image.resize((1, 1), Image.Resampling.BOX))[0, 0]
    return tuple(int.from_bytes(np.packbits(bits).tobytes()) for bits in (left, upper)), tuple(color)


def near_duplicates(images: ImageHashes) -> list[Pair]:
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


def has_near_duplicate(image: Any, others: ImageHashes, by_block: Sequence[NDArray[Any]]) -> bool:
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


def block_keys(images: ImageHashes, block: int) -> NDArray[np.uint64]:
    """16 bits of the first hash."""
    keys: NDArray[np.uint64] = (images["dhash"][:, 0] >> np.uint64(16 * block)) & np.uint64(0xFFFF)
    return keys


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
