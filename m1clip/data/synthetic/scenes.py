"""Built-in data: drawn scenes and their captions, any number of them, each a function of (seed, index).

A caption says everything that varies, and no two scenes of a split say the same; so it names its image.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, Literal

from PIL import Image

from m1clip.data.synthetic import drawings, polygons, render
from m1clip.data.synthetic.drawings import COLORS, POSITIONS, SIZES, SKIES, SUBJECTS, TIMES, Look

Split = Literal["train", "val"]
SALT = {"train": "train", "val": "held-out"}
"""Part of every random key: another value would draw other scenes."""

COUNTS = ("one", "two", "three", "four")
PLURALS = {"cactus": "cacti", "leaf": "leaves", "fish": "fish", "bus": "buses", "bench": "benches"}
# At most 75 letters each, so that they fit the seeds' character tokenizer with start and end (length 77).
TEMPLATES = (
    "{count} {size} {color} {subject} {at} the {position}, {place} at {time} with {sky}",
    "{place} at {time} with {sky}: {count} {size} {color} {subject} {at} the {position}",
    "{sky} over {count} {size} {color} {subject} {at} the {position}, {place} at {time}",
    "at {time}, {count} {size} {color} {subject} {at} the {position}, {place} with {sky}",
)

OUTDOORS = ("meadow", "desert", "snow", "valley", "forest")
# The seeds' four categories: eight subjects each, and the five places where they are found.
CATEGORIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nature": (("tree", "pine", "palm", "cactus", "flower", "mushroom", "leaf", "mountain"), OUTDOORS),
    "animals": (("cat", "duck", "rabbit", "elephant", "turtle", "snail", "fish", "giraffe"), OUTDOORS),
    "urban": (
        ("car", "bus", "house", "tower", "bicycle", "lamp", "boat", "bench"),
        ("street", "park", "harbour", "square", "village"),
    ),
    "food": (
        ("apple", "banana", "cake", "pizza", "burger", "cup", "carrot", "donut"),
        ("table", "blanket", "tray", "shelf", "counter"),
    ),
}
PLACES_OF = {subject: places for subjects, places in CATEGORIES.values() for subject in subjects}

# A combination is (subject, color, place). One in eight is kept out of all training, whatever the seed:
# a model may have seen purple cats, and cats in the snow, but never a purple cat in the snow.
COMBINATIONS = [(s, c, p) for s, places in PLACES_OF.items() for c in COLORS for p in places]
DETAILS = [
    (count, size, position, time, sky)
    for count in range(1, len(COUNTS) + 1)
    for size in SIZES
    for position in POSITIONS
    for time in TIMES
    for sky in SKIES
]
VAL = len(COMBINATIONS) // 8


@dataclass(frozen=True)
class SyntheticScenes:
    """`size` pairs of one split. Random access, no state: any process can draw any scene."""

    size: int
    seed: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.most:
            raise ValueError(f"synthetic has 1 to {self.most:,} {self.split} scenes, not {self.size:,}")

    @property
    def most(self) -> int:
        combinations = VAL if self.split == "val" else len(COMBINATIONS) - VAL
        return combinations * len(DETAILS)

    @property
    def _key(self) -> str:
        return f"{self.seed}/{SALT[self.split]}"

    @property
    def fingerprint(self) -> str:
        """Equal for equal images: what a cache of them is named by."""
        return f"synthetic/{_drawing_code()}/{self.split}/{self.seed}/{self.size}"

    @property
    def identity(self) -> str:
        return self.fingerprint

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> str:
        return f"synthetic {self.split} scene {index}"

    def look(self, index: int) -> Look:
        place, detail = divmod(shuffled(index, self.most, self._key), len(DETAILS))
        if self.split == "train":
            place += VAL
        subject, color, where = COMBINATIONS[shuffled(place, len(COMBINATIONS), SALT["val"])]
        count, size, position, time, sky = DETAILS[detail]
        return Look(subject, color, count, size, position, where, time, sky)

    def image(self, index: int, least: int = 0) -> Image.Image:
        return render.paint(self.look(index), Random(f"{self._key}/{index}"))

    def captions(self, index: int) -> list[str]:
        """To train on, the same said in every way; to test on, in one."""
        ways = range(len(TEMPLATES)) if self.split == "train" else [index % len(TEMPLATES)]
        look = self.look(index)
        return [caption(look, way) for way in ways]

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        """Hard negatives: (what was changed, the scene's caption with that one word made wrong)."""
        look, rng = self.look(index), Random(f"edit/{self._key}/{index}")
        for field in fields(Look):
            truth = getattr(look, field.name)
            others = [word for word in alternatives(look, field.name) if word != truth]
            if others:
                wrong: Any = {field.name: rng.choice(others)}
                yield field.name, caption(replace(look, **wrong), index % len(TEMPLATES))


def caption(look: Look, way: int) -> str:
    one = look.count == 1
    return TEMPLATES[way].format(
        count=COUNTS[look.count - 1],
        size=look.size,
        color=look.color,
        subject=look.subject if one else PLURALS.get(look.subject, look.subject + "s"),
        at="in" if look.position == "middle" else "on",
        position=look.position,
        place=look.place,
        time=look.time,
        sky=look.sky,
    )


def alternatives(look: Look, field: str) -> list[str] | list[int]:
    """Values that change exactly one word of the caption: no new plural, no new preposition."""
    match field:
        case "subject":
            return list(SUBJECTS)
        case "color":
            return list(COLORS)
        case "count":
            return [] if look.count == 1 else [2, 3, 4]
        case "size":
            return list(SIZES)
        case "position":
            return [] if look.position == "middle" else ["left", "right"]
        case "place":
            return list(PLACES_OF[look.subject])
        case "time":
            return list(TIMES)
        case _:
            return list(SKIES)


def shuffled(index: int, size: int, key: str) -> int:
    """Where `index` goes in a random order of range(size), without making the order.

    Four rounds of a Feistel network over the next even number of bits; results beyond `size` go round again.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for salt in _salts(key):
            mixed = (right + salt) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 >> 32 & mask)
        index = left << half | right
        if index < size:
            return index


@lru_cache
def _drawing_code() -> str:
    """Changes when any line that draws does, so that no stale image is ever taken from a cache."""
    files = (__file__, polygons.__file__, drawings.__file__, render.__file__)
    source = b"".join(Path(file).read_bytes() for file in files)
    return blake2b(source, digest_size=8).hexdigest()


@lru_cache
def _salts(key: str) -> tuple[int, ...]:
    return struct.unpack("<4Q", blake2b(key.encode(), digest_size=32).digest())
