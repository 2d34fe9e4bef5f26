"""What is in a source: every image decoded, every caption read, and what is odd about them. No torch."""

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m1clip.data.decode import BROKEN, ORIENTATION, BadImage, decode, header
from m1clip.data.index import Indexed
from m1clip.data.pairs import PairDataset, ProgressFactory
from m1clip.data.rows import BadRow
from m1clip.data.sources import Source
from m1clip.data.workers import Workers, parts_of

PART = 64
TINY = 32  # pixels of the shorter side
HUGE = 25_000_000  # pixels: slow to decode
NEAR, NEAR_TINT = 3, 8  # bits of 64, twice, in which two looks may differ, and steps of 255 in color
TRAITS = ("tiny", "huge", "CMYK", "16-bit", "palette", "alpha", "grey", "EXIF-rotated", "animated", "HEIC")
FOUND = np.dtype(
    [
        ("good", "?"),
        ("width", "i4"),
        ("height", "i4"),
        ("bytes", "i8"),
        ("traits", "u2"),
        ("content", "u8"),
        ("look", "u8", (2,)),
        ("tint", "i2", (3,)),
    ]
)
SIZES = (64, 128, 224, 336, 512, 1024, 2048)  # pixels of the shorter side, where the histogram is cut
Found = NDArray[Any]
Couple = tuple[int, int]


def _traits(image: Image.Image) -> int:
    try:
        return traits(image)
    except BROKEN as error:  # what comes after the first image of an animation, for one
        raise BadImage("unreadable", f"cannot be decoded ({error})") from None


def traits(image: Image.Image) -> int:
    """What is odd about an image whose header is read, a bit for each of TRAITS."""
    width, height = image.size
    true = (
        min(width, height) < TINY,
        width * height > HUGE,
        image.mode == "CMYK",
        image.mode.startswith(("I", "F")) or _is_deep(image),
        image.mode == "P",
        image.has_transparency_data,
        image.mode in ("L", "1", "LA"),
        image.getexif().get(ORIENTATION, 1) != 1,
        getattr(image, "is_animated", False),
        image.format == "HEIF",
    )
    return sum(1 << bit for bit, one in enumerate(true) if one)


def _is_deep(image: Image.Image) -> bool:
    """A PNG or TIFF of 16 bits in color, which Pillow reads as 8."""
    tile = image.tile[0] if getattr(image, "tile", None) else None  # type: ignore[attr-defined]
    return image.format in ("PNG", "TIFF") and tile is not None and ";16" in str(tile[3])


def look(image: Image.Image) -> tuple[int, int]:
    """Twice 64 bits that hardly change when an image is scaled or saved anew.

    Is a spot brighter than the one to the left, and than the one above?
    """
    grey = np.asarray(image.convert("L").resize((9, 9), Image.Resampling.BILINEAR), dtype=np.int16)
    across, down = grey[1:, 1:] > grey[1:, :-1], grey[1:, 1:] > grey[:-1, 1:]
    return tuple(int.from_bytes(np.packbits(bits).tobytes()) for bits in (across, down))  # type: ignore[return-value]


def examine(pairs: PairDataset, rows: Sequence[int]) -> tuple[Found, dict[int, tuple[str, str]]]:
    """Facts about some images, and which of them cannot be used."""
    found, bad = np.zeros(len(rows), FOUND), dict[int, tuple[str, str]]()
    for one, row in zip(found, rows, strict=True):
        try:
            if isinstance(pairs, Indexed):
                data = pairs.read(row)
                raw, image = header(data), decode(data, 256)
                bits = _traits(raw)
            else:
                raw = image = pairs.image(row)
                data, bits = image.tobytes(), _traits(image)
        except BadImage as error:
            bad[row] = (error.kind, str(error))
            continue
        content = int.from_bytes(blake2b(data, digest_size=8).digest())
        tint = np.asarray(image.resize((1, 1), Image.Resampling.BOX))[0, 0]
        values = (True, *raw.size, len(data), bits, content, look(image), tint)
        for name, value in zip(FOUND.names or (), values, strict=True):
            one[name] = value
    return found, bad


def survey(pairs: PairDataset, workers: int, bars: ProgressFactory) -> tuple[Found, list[BadRow]]:
    """Facts about every image, and faults of those that cannot be used."""
    parts = parts_of(len(pairs), PART)
    work = partial(examine, pairs)
    found, faults = [], list[BadRow]()
    with bars("looking at images", len(pairs)) as advance, Workers(work, workers) as pool:
        for some, bad in map(work, parts) if len(parts) == 1 else pool.map(parts):
            found.append(some)
            faults += [BadRow(kind, pairs.row(row), what) for row, (kind, what) in bad.items()]
            advance(len(some))
    return np.concatenate(found), faults


def alike(found: Found, most: int = 100_000) -> list[Couple]:
    """Couples of images that look the same; flat ones, which all look the same, are left out.

    Two looks that differ in at most three bits are equal in one of four quarters: only such are compared.
    """
    looks, below, tint = found["look"][:, 0], found["look"][:, 1], found["tint"]
    bits = np.bitwise_count(looks)
    rows = np.flatnonzero((bits > 4) & (bits < 60))
    couples = set[Couple]()
    for quarter in range(4):
        key = (looks[rows] >> np.uint64(16 * quarter)) & np.uint64(0xFFFF)
        order = rows[np.argsort(key, kind="stable")]
        cuts = np.flatnonzero(np.diff(np.sort(key))) + 1
        for group in np.split(order, cuts):
            for i, row in enumerate(group[:-1]):
                rest = group[i + 1 : i + 2000]  # a bound for sets in which all are alike
                near = rest[np.bitwise_count(looks[rest] ^ looks[row]) <= NEAR]
                near = near[np.bitwise_count(below[near] ^ below[row]) <= NEAR]
                near = near[(np.abs(tint[near] - tint[row]) <= NEAR_TINT).all(1)]
                couples.update((min(int(row), int(other)), max(int(row), int(other))) for other in near)
            if len(couples) >= most:
                return sorted(couples)
    return sorted(couples)


def doubles(source: Source, found: Found) -> dict[str, list[Couple]]:
    """Couples of rows with the same bytes, with the same look, and those of them that stand on two sides."""
    good = np.flatnonzero(found["good"])
    content = found["content"]
    order = good[np.argsort(content[good], kind="stable")]
    groups = [
        group for group in np.split(order, np.flatnonzero(np.diff(content[order])) + 1) if len(group) > 1
    ]
    equal = [_couple(a, b) for group in groups for a, b in pairwise(group)]
    near = [(good[a], good[b]) for a, b in alike(found[good])]
    near = [_couple(a, b) for a, b in near if content[a] != content[b]]
    side = np.zeros(len(found), int)
    for number, pairs in enumerate((source.train, source.val, source.test), 1):
        if isinstance(pairs, Indexed):
            side[pairs.rows] = number
    across = []
    for group in groups:  # of copies, one on each side is enough to tell
        mine, others = group[side[group] == 1], group[side[group] > 1]
        across += [_couple(mine[0], others[0])] if len(mine) and len(others) else []
    leaks = across + [(a, b) for a, b in near if side[a] * side[b] and (side[a] == 1) != (side[b] == 1)]
    return {"same_bytes": sorted(equal), "look_alike": near, "leaks": leaks}


def _couple(a: int, b: int) -> Couple:
    return int(min(a, b)), int(max(a, b))


def sizes(found: Found) -> dict[str, int]:
    """How many images by the length of their shorter side."""
    shorter = np.minimum(found["width"], found["height"])[found["good"]]
    counts = np.bincount(np.searchsorted(SIZES, shorter, "right"), minlength=len(SIZES) + 1)
    names = [f"below {SIZES[0]}", *(f"{a}–{b - 1}" for a, b in pairwise(SIZES)), f"{SIZES[-1]} up"]
    return dict(zip(names, counts.tolist(), strict=True))


def odd(found: Found) -> dict[str, int]:
    good = found[found["good"]]
    counts = {name: int((good["traits"] >> bit & 1).sum()) for bit, name in enumerate(TRAITS)}
    return {name: count for name, count in counts.items() if count}


def largest(found: Found) -> int | None:
    """The row of the image with the most pixels."""
    area = found["width"].astype(np.int64) * found["height"]
    return int(area.argmax()) if area.any() else None


def notable(found: Found, twice: dict[str, list[Couple]]) -> list[tuple[int, str]]:
    """Rows worth a look, and why: one of each odd kind, and couples that are or look the same."""
    rows, shown = list[tuple[int, str]](), list[Couple]()
    for bit, name in enumerate(TRAITS):
        some = np.flatnonzero(found["good"] & (found["traits"] >> bit & 1).astype(bool))[:1]
        rows += [(int(row), name) for row in some if name != "grey"]
    for key, name in (("leaks", "on both sides"), ("same_bytes", "same bytes"), ("look_alike", "look alike")):
        overwrite = [couple for couple in twice[key] if couple not in shown][:2]
        shown += overwrite
        rows += [(row, f"{name} {n}") for n, couple in enumerate(overwrite, 1) for row in couple]
    return rows


def captions_of(pairs: PairDataset, bars: ProgressFactory) -> dict[str, Any]:
    """Lengths, vocabulary and repetitions of all captions."""
    names, owners = array("q"), array("i")
    lengths, each, known = array("i"), array("i"), Counter[str]()
    with bars("reading captions", len(pairs)) as advance:
        for row in range(len(pairs)):
            texts = pairs.captions(row)
            each.append(len(texts))
            for text in texts:
                words = re.findall(r"\w+", text.lower())
                known.update(words)
                lengths.append(len(words))
                names.append(hash(text))
                owners.append(row)
            advance(1)
    return {
        "captions": len(names),
        "captions_per_image": _spread(each),
        "words_per_caption": _spread(lengths),
        "vocabulary": len(known),
        "commonest_words": known.most_common(10),
        **_repeated(pairs, np.frombuffer(names, np.int64), np.frombuffer(owners, np.int32)),
    }


def _spread(values: Sequence[int]) -> dict[str, int]:
    least, median, most = np.quantile(np.asarray(values), (0, 0.5, 1)).astype(int).tolist()
    return {"least": least, "median": median, "most": most}


def _repeated(pairs: PairDataset, names: NDArray[np.int64], owners: NDArray[np.int32]) -> dict[str, Any]:
    """Captions that several images share, those that one has twice, and the five most shared."""
    _, first, which, times = np.unique(names, return_index=True, return_inverse=True, return_counts=True)
    once = np.unique(which * (len(owners) + 1) + owners) // (
        len(owners) + 1
    )  # once for each image that has it
    images = np.bincount(once, minlength=len(first))
    examples = []
    for k in np.lexsort((first, -images))[:5]:
        if images[k] > 1:
            row = int(owners[first[k]])
            place = int(first[k]) - int(np.searchsorted(owners, row))
            examples.append((pairs.captions(row)[place], int(images[k])))
    return {
        "repeated_captions": int(times[images > 1].sum()),
        "doubled_captions": len(names) - len(once),
        "most_repeated": examples,
    }
