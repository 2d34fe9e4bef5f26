"""Statistics of a dataset's images and captions, duplicates, leaks, and contact sheets. No torch."""

import re
import textwrap
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from m1clip.data.index import BadImages, BadRows, IndexedPairs, PairDataset, ProgressFactory
from m1clip.data.splits import Source, TrainCaptions, caption_key
from m1clip.decode import DECODE_ERRORS, ORIENTATION, BadImage, decode, read_header
from m1clip.files import atomic_write
from m1clip.perceptual_hash import Pair, near_duplicates, perceptual_hash, rows_by_key
from m1clip.workers import map_chunks, row_chunks

TINY = 32  # pixels of the shorter edge
HUGE = 25_000_000  # pixels: slow to decode
TRAITS = ("tiny", "huge", "CMYK", "16-bit", "palette", "alpha", "grayscale", "EXIF-rotated", "animated", "HEIC")
IMAGE_STATS = np.dtype("?, i4, i4, i8, 10?, u8, 2u8, 3i2")
IMAGE_STATS.names = ("good", "width", "height", "bytes", "traits", "content", "dhash", "color")
SIZE_BINS = (64, 128, 224, 336, 512, 1024, 2048)  # pixels of the shorter edge
TILE, GAP, LINE = 224, 14, 17  # pixels of a contact sheet
BLANK = (235, 235, 238)
ImageStats = NDArray[Any]
Tile = tuple[Image.Image, str]


def image_stats(pairs: PairDataset, bad_rows: BadRows, workers: int, progress: ProgressFactory) -> ImageStats:
    """Statistics of every image; images that cannot be used are added to `bad_rows`."""
    stats = []
    with progress("decoding images", len(pairs)) as advance:
        for chunk, bad in map_chunks(partial(examine_rows, pairs), row_chunks(len(pairs), 8), workers):
            stats.append(chunk)
            bad_rows.add_images(pairs, bad)
            advance(len(chunk))
    return np.concatenate(stats)


def examine_rows(pairs: PairDataset, rows: Sequence[int]) -> tuple[ImageStats, BadImages]:
    stats, bad = np.zeros(len(rows), IMAGE_STATS), BadImages()
    for i, row in enumerate(rows):
        try:
            if isinstance(pairs, IndexedPairs):
                data = pairs.read(row)
                header, image = read_header(data), decode(data, 256)
            else:
                header = image = pairs.image(row)
                data = image.tobytes()
            traits = image_traits(header)
        except BadImage as error:
            bad[row] = (error.kind, str(error))
            continue
        content = int.from_bytes(blake2b(data, digest_size=8).digest())
        stats[i] = (True, *header.size, len(data), traits, content, *perceptual_hash(image))
    return stats, bad


def image_traits(header: Image.Image) -> tuple[bool, ...]:
    width, height = header.size
    # Pillow reads 16-bit color as 8 bits; only the tile's raw mode tells.
    tile = header.tile[0] if getattr(header, "tile", None) else None  # type: ignore[attr-defined]
    is_deep = header.format in ("PNG", "TIFF") and tile is not None and ";16" in str(tile[3])
    try:
        return (
            min(width, height) < TINY,
            width * height > HUGE,
            header.mode == "CMYK",
            header.mode.startswith(("I", "F")) or is_deep,
            header.mode == "P",
            header.has_transparency_data,
            header.mode in ("L", "1", "LA"),
            header.getexif().get(ORIENTATION, 1) != 1,
            getattr(header, "is_animated", False),
            header.format == "HEIF",
        )
    except DECODE_ERRORS as error:  # such as a broken second frame of an animation
        raise BadImage("unreadable", f"cannot be decoded ({error})") from None


def duplicate_images(source: Source, stats: ImageStats) -> dict[str, list[Pair]]:
    """Pairs of rows with equal bytes or near-equal hashes; leaks are those with one image in train, one not."""
    good, content = np.flatnonzero(stats["good"]), stats["content"]
    groups = rows_by_key(good, content[good])
    exact = [(int(a), int(b)) for group in groups for a, b in pairwise(group)]
    near = [(a, b) for a, b in near_duplicates(stats) if content[a] != content[b]]
    split = np.zeros(len(stats), int)
    for number, pairs in enumerate((source.train, source.val, source.test), 1):
        if isinstance(pairs, IndexedPairs):
            split[pairs.rows] = number
    leaks = list[Pair]()
    for group in groups:  # one leak per group of copies
        train, other = group[split[group] == 1], group[split[group] > 1]
        if len(train) and len(other):
            leaks.append((int(min(train[0], other[0])), int(max(train[0], other[0]))))
    leaks += [(a, b) for a, b in near if split[a] * split[b] and (split[a] == 1) != (split[b] == 1)]
    return {"exact_duplicates": sorted(exact), "near_duplicates": near, "leaks": leaks}


def equal_images(stats: ImageStats) -> float:
    """How often two random images have the same bytes."""
    _, counts = np.unique(stats["content"][stats["good"]], return_counts=True)
    return float(((counts / max(1, counts.sum())) ** 2).sum())


def size_histogram(stats: ImageStats) -> dict[str, int]:
    """Number of images by the length of their shorter edge."""
    shorter = np.minimum(stats["width"], stats["height"])[stats["good"]]
    counts, _ = np.histogram(shorter, (0, *SIZE_BINS, np.inf))
    ranges = [f"{low}–{high - 1}" for low, high in pairwise(SIZE_BINS)]
    names = [f"below {SIZE_BINS[0]}", *ranges, f"{SIZE_BINS[-1]} up"]
    return dict(zip(names, counts.tolist(), strict=True))


def notable_images(stats: ImageStats, duplicates: dict[str, list[Pair]]) -> list[tuple[int, str]]:
    """Rows for the contact sheet, and why: one image for each trait, and some duplicates."""
    traits = ((name, has) for name, has in zip(TRAITS, stats["traits"].T, strict=True) if name != "grayscale")
    rows, shown = [(int(has.argmax()), name) for name, has in traits if has.any()], set[Pair]()
    for kind in ("leaks", "exact_duplicates", "near_duplicates"):
        new = [pair for pair in duplicates[kind] if pair not in shown][:2]
        shown.update(new)
        name = kind.removesuffix("s").replace("_", " ")
        rows += [(row, f"{name} {number}") for number, pair in enumerate(new, 1) for row in pair]
    return rows


def caption_stats(pairs: PairDataset, progress: ProgressFactory) -> dict[str, Any]:
    hashes, rows, lengths = array("q"), array("i"), array("i")
    vocabulary = Counter[str]()
    with progress("reading captions", len(pairs)) as advance:
        for row in range(len(pairs)):
            for caption in pairs.captions(row):
                words = re.findall(r"\w+", caption.lower())
                vocabulary.update(words)
                lengths.append(len(words))
                hashes.append(hash(caption))
                rows.append(row)
            advance(1)
    return {
        "captions": len(hashes),
        "captions_per_image": min_median_max(np.bincount(rows).tolist()),
        "words_per_caption": min_median_max(lengths),
        "vocabulary": len(vocabulary),
        "commonest_words": vocabulary.most_common(10),
        **_repeated_captions(pairs, np.frombuffer(hashes, np.int64), np.frombuffer(rows, np.int32)),
    }


def split_captions(source: Source, progress: ProgressFactory) -> dict[str, int]:
    """Validation captions, how many of them also occur in training, and the number of labels if they are labels."""
    captions = [source.val.captions(row) for row in range(len(source.val))]
    with progress("comparing the captions of the splits", None):
        known = TrainCaptions.compare(map(source.train.captions, range(len(source.train))), captions)
    texts, seen = [caption_key(text) for of_image in captions for text in of_image], known.seen or frozenset()
    counts = {"val_captions": len(texts), "seen_captions": sum(text in seen for text in texts)}
    return {**counts, "labels": len(known.labels)}


def min_median_max(values: Sequence[int]) -> dict[str, int]:
    low, median, high = np.quantile(np.asarray(values), (0, 0.5, 1)).astype(int).tolist()
    return {"min": low, "median": median, "max": high}


def _repeated_captions(pairs: PairDataset, hashes: NDArray[Any], rows: NDArray[Any]) -> dict[str, Any]:
    """Captions that several images share, captions that one image has twice, and the most shared ones.

    `equal_captions`: how often two random pairs have the same caption, and are no negatives of each other.
    """
    _, first, group, uses = np.unique(hashes, return_index=True, return_inverse=True, return_counts=True)
    distinct = np.unique(group * len(pairs) + rows) // len(pairs)  # each caption once per image
    images = np.bincount(distinct, minlength=len(first))
    examples = []
    for k in np.lexsort((first, -images))[:5]:
        if images[k] > 1:
            row = int(rows[first[k]])
            caption = pairs.captions(row)[int(first[k]) - int(np.searchsorted(rows, row))]
            examples.append((caption, int(images[k])))
    share = np.bincount(group, 1 / np.bincount(rows)[rows]) / len(pairs)  # of the training pairs, by caption
    return {
        "shared_captions": int(uses[images > 1].sum()),
        "equal_captions": float((share**2).sum()),
        "duplicate_captions": len(hashes) - len(distinct),
        "most_shared": examples,
    }


# Contact sheets: a grid of images with their captions.
def sample_tiles(pairs: PairDataset, count: int) -> list[Tile]:
    """Evenly spaced images."""
    rows = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).astype(int)
    return [make_tile(pairs, row) for row in rows.tolist()]


def make_tile(pairs: PairDataset, row: int, prefix: str = "") -> Tile:
    try:
        return pairs.image(row, TILE), prefix + pairs.captions(row)[0]
    except BadImage as error:
        return Image.new("RGB", (TILE, TILE), BLANK), f"{pairs.location(row)}: {error}"


def contact_sheet(tiles: Sequence[Tile], columns: int) -> Image.Image:
    captions = [textwrap.wrap(caption, 34)[:4] for _, caption in tiles]
    width, height = TILE + GAP, TILE + LINE * max(map(len, captions)) + 2 * GAP
    columns = min(columns, len(tiles))
    sheet = Image.new("RGB", (columns * width + GAP, -(-len(tiles) // columns) * height + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for i, ((image, _), lines) in enumerate(zip(tiles, captions, strict=True)):
        x, y = GAP + i % columns * width, GAP + i // columns * height
        sheet.paste(ImageOps.pad(image.convert("RGB"), (TILE, TILE), color=BLANK), (x, y))
        draw.multiline_text((x, y + TILE + 5), "\n".join(lines), fill=(50, 50, 60), font=font, spacing=3)
    return sheet


def save_image(image: Image.Image, path: Path) -> None:
    """Write or replace an image file atomically."""
    buffer = BytesIO()
    image.save(buffer, Image.registered_extensions()[path.suffix.lower()])
    atomic_write(path, buffer.getvalue())
