"""Built-in dataset: any number of drawn scenes with captions, each a function of (seed, index). No torch.

A caption describes everything that varies, and no two scenes are alike, so it identifies its image.
"""

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal

from PIL import Image

from m1clip.data import drawings
from m1clip.data.drawings import CATEGORIES, COLORS, POSITIONS, SIZES, SKIES, SUBJECTS, TIMES, Scene, render_scene

SALT = {"train": "train", "val": "held-out"}  # part of every random key: another value would draw other scenes
COUNTS = ("one", "two", "three", "four")
PLURALS = {"cactus": "cacti", "leaf": "leaves", "fish": "fish", "bus": "buses", "bench": "benches"}
# At most 75 characters, so that a character tokenizer needs 77 tokens with start and end.
TEMPLATES = (
    "{count} {size} {color} {subject} {at} the {position}, {place} at {time} with {sky}",
    "{place} at {time} with {sky}: {count} {size} {color} {subject} {at} the {position}",
    "{sky} over {count} {size} {color} {subject} {at} the {position}, {place} at {time}",
    "at {time}, {count} {size} {color} {subject} {at} the {position}, {place} with {sky}",
)
PLACES_OF = {subject: places for subjects, places in CATEGORIES.values() for subject in subjects}

# One in eight combinations of subject, color and place is never in a training split, whatever the seed:
# a model may train on purple cats, and on cats in the snow, but never on a purple cat in the snow.
COMBINATIONS = [(s, c, p) for s, places in PLACES_OF.items() for c in COLORS for p in places]
VAL_COMBINATIONS = len(COMBINATIONS) // 8
DETAILS = list(product(range(1, len(COUNTS) + 1), SIZES, POSITIONS, TIMES, SKIES))


@dataclass(frozen=True)
class SyntheticScenes:
    """`size` pairs of one split. Stateless: any process can draw any scene."""

    size: int
    seed: int = 0
    split: Literal["train", "val"] = "train"

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.max_size:
            raise ValueError(f"synthetic has 1 to {self.max_size:,} {self.split} scenes, not {self.size:,}")

    @property
    def max_size(self) -> int:
        combinations = VAL_COMBINATIONS if self.split == "val" else len(COMBINATIONS) - VAL_COMBINATIONS
        return combinations * len(DETAILS)

    @property
    def _key(self) -> str:
        return f"{self.seed}/{SALT[self.split]}"

    @property
    def fingerprint(self) -> str:
        return f"synthetic/{_code_hash()}/{self.split}/{self.seed}/{self.size}"

    identity = fingerprint

    def __len__(self) -> int:
        return self.size

    def location(self, index: int) -> str:
        return f"synthetic {self.split} scene {index}"

    def scene(self, index: int) -> Scene:
        combination, detail = divmod(permute(index, self.max_size, self._key), len(DETAILS))
        if self.split == "train":
            combination += VAL_COMBINATIONS
        subject, color, place = COMBINATIONS[permute(combination, len(COMBINATIONS), SALT["val"])]
        count, size, position, time, sky = DETAILS[detail]
        return Scene(subject, color, count, size, position, place, time, sky)

    def image(self, index: int, min_size: int = 0) -> Image.Image:
        return render_scene(self.scene(index), Random(f"{self._key}/{index}"))

    def captions(self, index: int) -> list[str]:
        """One caption for each template in training, one caption for validation."""
        scene, templates = self.scene(index), range(len(TEMPLATES))
        return [describe(scene, k) for k in templates if self.split == "train" or k == index % len(TEMPLATES)]

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        """Hard negatives: the field that was changed, and the scene's caption with one wrong word."""
        scene, rng = self.scene(index), Random(f"edit/{self._key}/{index}")
        for field, values in alternatives(scene).items():
            if others := [value for value in values if value != getattr(scene, field)]:
                change: Any = {field: rng.choice(others)}
                yield field, describe(replace(scene, **change), index % len(TEMPLATES))


def describe(scene: Scene, template: int) -> str:
    at = "in" if scene.position == "middle" else "on"
    words = {**vars(scene), "count": COUNTS[scene.count - 1], "at": at}
    if scene.count > 1:
        words["subject"] = PLURALS.get(scene.subject, scene.subject + "s")
    return TEMPLATES[template].format(**words)


def alternatives(scene: Scene) -> dict[str, Collection[Any]]:
    """Values of each field that change exactly one word of the caption: no other plural, no other preposition."""
    counts = (2, 3, 4) if scene.count > 1 else ()
    positions = () if scene.position == "middle" else ("left", "right")
    words = {"subject": SUBJECTS, "color": COLORS, "count": counts, "size": SIZES, "position": positions}
    return {**words, "place": PLACES_OF[scene.subject], "time": TIMES, "sky": SKIES}


def permute(index: int, size: int, key: str) -> int:
    """Position of `index` in a random permutation of range(size), computed without the permutation.

    Four rounds of a Feistel network over the next even number of bits, until the result is below `size`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for salt in _round_keys(key):
            mixed = (right + salt) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 >> 32 & mask)
        index = left << half | right
        if index < size:
            return index


@lru_cache
def _round_keys(key: str) -> tuple[int, ...]:
    return struct.unpack("<4Q", blake2b(key.encode(), digest_size=32).digest())


@lru_cache
def _code_hash() -> str:
    """Changes with any line that draws, so that cached images are never stale."""
    files = (__file__, drawings.__file__, drawings.FILE)
    return blake2b(b"".join(Path(file).read_bytes() for file in files), digest_size=8).hexdigest()
