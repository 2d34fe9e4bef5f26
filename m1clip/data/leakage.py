"""What a training and a validation split share: images that look the same, and groups kept in one split. No torch."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m1clip.data.index import IndexedPairs, PairDataset, ProgressFactory, array_file
from m1clip.data.splits import OnTheFlyImages, Split
from m1clip.decode import BadImage
from m1clip.files import atomic_write, cache_folder, open_regular
from m1clip.perceptual_hash import HASH, ImageHashes, block_keys, has_near_duplicate, near_duplicates, perceptual_hash
from m1clip.workers import map_chunks, row_chunks

MAX_HASHED = 20_000  # training images compared after training


def image_hashes(pairs: IndexedPairs, workers: int, progress: ProgressFactory) -> ImageHashes:
    """The perceptual hash of every image; cached, so that they are decoded once. An unreadable image looks flat."""
    path = cache_folder() / f"hashes-{blake2b(pairs.fingerprint.encode(), digest_size=8).hexdigest()}.npy"
    with suppress(OSError, ValueError, EOFError), open_regular(path) as file:
        cached: ImageHashes = np.load(file)
        if cached.shape == (len(pairs),) and cached.dtype == HASH:
            return cached
    chunks = []
    with progress("comparing images", len(pairs)) as advance:
        for chunk in map_chunks(partial(hashes_of_rows, pairs), row_chunks(len(pairs), 64), workers):
            chunks.append(chunk)
            advance(len(chunk))
    found = np.concatenate(chunks)
    with suppress(OSError):  # a full disk: they are decoded again next time
        atomic_write(path, bytes(array_file(found)))
    return found


def hashes_of_rows(pairs: PairDataset, rows: Sequence[int]) -> ImageHashes:
    found = np.zeros(len(rows), HASH)
    for i, row in enumerate(rows):
        with suppress(BadImage):  # reported when it is decoded for training
            found[i] = perceptual_hash(pairs.image(row, 256))
    return found


def duplicate_keys(pairs: IndexedPairs, workers: int, progress: ProgressFactory) -> list[list[str]]:
    """For each image a key of every pair of near duplicates that it is in; of an image without any, its own."""
    keys: list[list[str]] = [[] for _ in range(len(pairs))]
    for a, b in near_duplicates(image_hashes(pairs, workers, progress)):
        for row in (a, b):
            keys[row].append(pairs.location(a))
    return [of_row or [pairs.location(row)] for row, of_row in enumerate(keys)]


def val_near_duplicates(train: Split, val: Split) -> int | None:
    """Validation images that look like a training image; None if the images are not decoded yet, or too many."""
    stores = [part.images for split in (train, val) for part in split.parts]
    if len(train) > MAX_HASHED or any(isinstance(store, OnTheFlyImages) for store in stores):
        return None
    train_hashes, val_hashes = (split_hashes(split) for split in (train, val))
    by_block = [np.argsort(block_keys(train_hashes, block)) for block in range(4)]
    return sum(has_near_duplicate(image, train_hashes, by_block) for image in val_hashes)


def split_hashes(split: Split) -> ImageHashes:
    chunks = (split.take(np.array(rows))[1] for rows in row_chunks(len(split), 256))
    images = (Image.fromarray(image) for chunk in chunks for image in chunk)
    return np.array([perceptual_hash(image.reduce(max(1, image.width // 64))) for image in images], HASH)


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
