"""Built-in dataset: any number of drawn scenes with captions, each a function of (seed, index). No torch.

A caption describes everything that varies, and no two scenes are alike, so it identifies its image.
synthetic.toml says what each word of a caption looks like.
"""

import math
import struct
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

from PIL import Image, ImageDraw

Point = tuple[float, float]
RGB = tuple[int, int, int]
Tones = dict[str, RGB]
Sketch = tuple["Polygon", ...]
Draw = ImageDraw.ImageDraw
Box = tuple[float, float, float, float]  # center x, bottom y, width (negative: mirrored) and height
INK_WIDTH = 0.028  # of the outline around a subject, relative to its size


class Polygon(NamedTuple):
    """A polygon in the unit square (x right, y down), and the same one grown by the width of the outline."""

    tone: str
    inside: list[Point]
    outline: list[Point]


def ellipse(cx: float, cy: float, rx: float, ry: float) -> list[Point]:
    n = 32 if max(rx, ry) > 0.15 else 14
    return [(cx + rx * math.cos(math.tau * i / n), cy + ry * math.sin(math.tau * i / n)) for i in range(n)]


def catmull_rom(points: Sequence[Point], closed: bool) -> list[Point]:
    p = [points[-1], *points, *points[:2]] if closed else [points[0], *points, points[-1]]
    curve = []
    for (ax, ay), (bx, by), (cx, cy), (dx, dy) in zip(p, p[1:], p[2:], p[3:], strict=False):
        for t in (0.0, 0.2, 0.4, 0.6, 0.8):
            a, b = t * (t * (2 - t) - 1) / 2, (t * t * (3 * t - 5) + 2) / 2
            c, d = t * (t * (4 - 3 * t) + 1) / 2, t * t * (t - 1) / 2
            curve.append((a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy))
    return curve if closed else [*curve, points[-1]]


def stroke(points: Sequence[Point], width: float) -> list[Point]:
    """The polygon of a line with round ends: along one edge, around the end, and back."""
    edge = []
    for path in (points, points[::-1]):
        neighbors = zip([path[0], *path], [*path[1:], path[-1]], strict=False)
        angles = [math.atan2(by - ay, bx - ax) - math.pi / 2 for (ax, ay), (bx, by) in neighbors]
        corners = [*zip(path, angles, strict=True), *((path[-1], angles[-1] + math.pi * i / 6) for i in range(1, 6))]
        edge += [(x + width / 2 * math.cos(angle), y + width / 2 * math.sin(angle)) for (x, y), angle in corners]
    return edge


def grow(points: Sequence[Point], distance: float) -> list[Point]:
    """The polygon with every edge moved outwards."""
    edges = list(zip(points, [*points[1:], points[0]], strict=True))
    turn = math.copysign(1, sum(ax * by - bx * ay for (ax, ay), (bx, by) in edges))
    lengths = [turn * (math.dist(a, b) or 1.0) for a, b in edges]
    normals = [((by - ay) / n, (ax - bx) / n) for ((ax, ay), (bx, by)), n in zip(edges, lengths, strict=True)]
    grown = []
    for (x, y), (nx, ny), (mx, my) in zip(points, [normals[-1], *normals], normals, strict=False):
        step = distance / max(1 + nx * mx + ny * my, 0.5)  # without the 0.5, sharp corners become spikes
        grown.append((x + step * (nx + mx), y + step * (ny + my)))
    return grown


def shape_polygon(kind: str, n: Sequence[float]) -> list[Point]:
    """Lines and curves start with their width; a ring is x, y, radius, width."""
    if kind == "oval":
        return ellipse(*n)
    if kind == "dome":  # the upper half of an oval
        return [(x, min(y, n[1])) for x, y in ellipse(*n)]
    if kind == "box":
        return [(n[0], n[1]), (n[2], n[1]), (n[2], n[3]), (n[0], n[3])]
    if kind == "ring":  # one polygon with a slit from rim to hole
        rim, hole = ellipse(n[0], n[1], n[2], n[2]), ellipse(n[0], n[1], n[2] - n[3], n[2] - n[3])
        return [*rim, rim[0], hole[0], *hole[::-1]]
    start = len(n) % 2
    points = list(zip(n[start::2], n[start + 1 :: 2], strict=True))
    if kind == "poly":
        return points
    if kind == "blob":
        return catmull_rom(points, closed=True)
    if kind in ("line", "curve"):
        return stroke(points if kind == "line" else catmull_rom(points, closed=False), n[0])
    raise ValueError(f"unknown shape {kind!r}; expected oval, dome, box, ring, poly, blob, line or curve")


def parse_sketch(text: str) -> Sketch:
    polygons = []
    for shape in text.split(";"):
        first, _, copies = shape.partition("*")
        kind, tone, *numbers = first.split()
        n = [float(number) / 100 for number in numbers]
        inside = shape_polygon(kind, n)
        if kind == "ring":  # grown edge by edge, it would open at its slit
            outline = shape_polygon(kind, [*n[:2], n[2] + INK_WIDTH, n[3] + 2 * INK_WIDTH])
        else:
            outline = grow(inside, INK_WIDTH)
        count, dx, dy = (float(word) for word in copies.split() or ("1", "0", "0"))
        for x, y in ((dx * i / 100, dy * i / 100) for i in range(int(count))):
            moved = ([(x + u, y + v) for u, v in polygon] for polygon in (inside, outline))
            polygons.append(Polygon(tone, *moved))
    return tuple(polygons)


def _parse(value: Any) -> Any:
    """Colors as tuples, sketches as polygons, names and numbers as they are."""
    if isinstance(value, dict):
        return {name: _parse(item) for name, item in value.items()}
    if isinstance(value, str):
        return parse_sketch(value) if " " in value else value
    return tuple(value) if isinstance(value, list) else value


FILE = Path(__file__).with_suffix(".toml")
# Changes with any line that draws, so that cached images are never stale.
CODE_HASH = blake2b(Path(__file__).read_bytes() + FILE.read_bytes(), digest_size=8).hexdigest()
_tables = _parse(tomllib.loads(FILE.read_text(encoding="utf-8"))).values()  # in the order of the file
CAPTIONS, CATEGORIES, SIZES, POSITIONS, GROUPS, COLORS, FIXED, PAINTS, TRIMS, TIMES, SUBJECTS, PLACES, SKIES = _tables
COUNTS, PLURALS, TEMPLATES = (CAPTIONS[name] for name in ("counts", "plurals", "templates"))
SALT = {"train": "train", "val": "held-out"}  # part of every random key: another value would draw other scenes
PLACES_OF = {subject: places for subjects, places in CATEGORIES.values() for subject in subjects}

# One in eight combinations of subject, color and place is never in a training split, whatever the seed:
# a model may train on purple cats, and on cats in the snow, but never on a purple cat in the snow.
COMBINATIONS = [(s, c, p) for s, places in PLACES_OF.items() for c in COLORS for p in places]
VAL_COMBINATIONS = len(COMBINATIONS) // 8
DETAILS = list(product(range(1, len(COUNTS) + 1), SIZES, POSITIONS, TIMES, SKIES))


@dataclass(frozen=True)
class Scene:
    """What an image shows: one field for each word of its caption."""

    subject: str
    color: str
    place: str
    count: int  # 1 to 4
    size: str  # small, large
    position: str  # left, middle, right
    time: str
    sky: str


def mix(a: RGB, b: RGB, weight: float) -> RGB:
    red, green, blue = (round(x + (y - x) * weight) for x, y in zip(a, b, strict=True))
    return red, green, blue


@lru_cache
def subject_tones(color: str) -> Tones:
    main = COLORS[color]
    shades = {"main": main, "dark": mix(main, (90, 16, 36), 0.25), "light": mix(main, (255, 255, 255), 0.3)}
    return {**FIXED, **shades, "ink": mix(main, (24, 12, 32), 0.66)}


@lru_cache
def background_tones(time: str) -> Tones:
    light = TIMES[time]
    red, green, blue = light["tint"]
    tinted = {tone: (int(r * red), int(g * green), int(b * blue)) for tone, (r, g, b) in PAINTS.items()}
    return {**FIXED, **tinted, "cloud": light["cloud"], "bird": light["bird"], "glass": light["glass"]}


@lru_cache(maxsize=8)
def sky_gradient(time: str, size: int) -> Image.Image:
    light, column = TIMES[time], Image.new("RGB", (1, size))
    column.putdata([mix(light["zenith"], light["horizon"], min(1.0, y / (0.42 * size))) for y in range(size)])
    return column.resize((size, size))


def draw_sketch(draw: Draw, sketch: Sketch, tones: Tones, box: Box, ink: RGB | None = None) -> None:
    """Fill the polygons of a sketch, on an outline around all of them if there is ink."""
    center, bottom, width, height = box
    x, y = center - width / 2, bottom - height
    inked = [polygon for polygon in sketch if ink and polygon.tone not in ("white", "black")]  # not steam, eyes, wheels
    outlines = [(polygon.outline, ink) for polygon in inked]
    for points, fill in [*outlines, *((polygon.inside, tones[polygon.tone]) for polygon in sketch)]:
        draw.polygon([(x + width * u, y + height * v) for u, v in points], fill=fill)


def draw_orb(image: Image.Image, scene: Scene, x: float, rng: Random) -> None:
    """The sun with its halo, or a crescent moon among stars."""
    size, light, draw = image.width, TIMES[scene.time], ImageDraw.Draw(image, "RGBA")
    y = light["orb_y"] + rng.uniform(-0.02, 0.02)

    def disc(x: float, y: float, radius: float, fill: tuple[int, ...]) -> None:
        draw.ellipse([size * edge for edge in (x - radius, y - radius, x + radius, y + radius)], fill=fill)

    if scene.time != "night":
        disc(x, y, 0.09, (*light["orb"], 70))
        return disc(x, y, 0.06, light["orb"])
    for _ in range(16):
        disc(rng.random(), rng.uniform(0, 0.36), rng.uniform(0.002, 0.004), (255, 250, 220, 150))
    disc(x, y, 0.06, light["orb"])
    disc(x + 0.03, y - 0.012, 0.051, mix(light["zenith"], light["horizon"], y / 0.42))


def draw_place(image: Image.Image, scene: Scene, rng: Random) -> None:
    size, place, tones = image.width, PLACES[scene.place], background_tones(scene.time)
    draw, horizon = ImageDraw.Draw(image), rng.uniform(0.38, 0.43) * size
    for i in range(place["count"]):
        x = (i + 0.5 + rng.uniform(-0.2, 0.2)) / place["count"] * size
        width = rng.uniform(1.0, 1.3) / place["count"] * size
        height = rng.uniform(0.85, 1.15) * place["height"] * size
        draw_sketch(draw, place["motif"], tones, (x, horizon + 1, width * rng.choice((-1, 1)), height))
    draw.rectangle((0, horizon, size, size), fill=tones[place["ground"]])
    center = rng.uniform(0.45, 0.55) * size
    draw_sketch(draw, place["floor"], tones, (center, size, size * rng.choice((-1, 1)), size - horizon))


def draw_sky(image: Image.Image, scene: Scene, columns: Sequence[float], rng: Random) -> None:
    """Clouds, birds, kites, planes or balloons."""
    size, draw = image.width, ImageDraw.Draw(image)
    ink = None if scene.sky in ("clouds", "birds") else FIXED["slate"]
    for column, trim in zip(columns, rng.sample(list(TRIMS.values()), len(columns)), strict=True):
        tones = {**background_tones(scene.time), "trim": trim, "pale": mix(trim, (255, 255, 255), 0.6)}
        scale = rng.uniform(0.88, 1.1) * (0.2 if scene.sky in ("clouds", "planes") else 0.16) * size
        x = min(max(column * size, scale / 2), size - scale / 2)
        bottom = rng.uniform(0.01, 0.15) * size + scale
        draw_sketch(draw, SKIES[scene.sky], tones, (x, bottom, scale * rng.choice((-1, 1)), scale), ink)


def draw_subjects(image: Image.Image, scene: Scene, rng: Random) -> None:
    size, box, tones = image.width, SIZES[scene.size], subject_tones(scene.color)
    draw, shadow = ImageDraw.Draw(image), ImageDraw.Draw(image, "RGBA")
    step = 0.97 * box + 0.015
    reach = (box + step * (scene.count > 1)) / 2
    center = min(max(POSITIONS[scene.position], reach), 1 - reach)
    front = rng.uniform(0.92, 0.95) if scene.count > 2 else rng.uniform(0.8, 0.92)
    jitter = 0.02 if scene.size == "small" else 0.01  # large ones would hide each other
    mirror = rng.choice((-1, 1))  # all or none: a pair face to face looks like one object
    for across, back in GROUPS[str(scene.count)]:
        scale = rng.uniform(0.92, 1.08) * box
        x = center + across * step + rng.uniform(-jitter, jitter)
        x = min(max(x, scale / 2), 1 - scale / 2) * size
        bottom = min(front + back * (step + 0.015) + rng.uniform(-jitter, jitter), 0.97) * size
        scale *= size
        edges = (x - 0.46 * scale, bottom - 0.06 * scale, x + 0.46 * scale, bottom + 0.06 * scale)
        shadow.ellipse(edges, fill=(20, 20, 50, 60))
        draw_sketch(draw, SUBJECTS[scene.subject], tones, (x, bottom, scale * mirror, scale), tones["ink"])


def render_scene(scene: Scene, rng: Random, size: int = 224) -> Image.Image:
    """All randomness comes from `rng`: equal scenes and generators in equal states give equal bytes."""
    image = sky_gradient(scene.time, 2 * size).copy()  # drawn at twice the size and halved: smooth edges
    flying = rng.randint(2, 3)
    # One more column than objects in the sky, for the sun or moon.
    columns = [(i + 0.5 + rng.uniform(-0.15, 0.15)) / (flying + 1) for i in range(flying + 1)]
    rng.shuffle(columns)
    draw_orb(image, scene, columns.pop(), rng)
    draw_place(image, scene, rng)
    draw_sky(image, scene, columns, rng)
    draw_subjects(image, scene, rng)
    return image.reduce(2)


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
        return f"synthetic/{CODE_HASH}/{self.split}/{self.seed}/{self.size}"

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
        return Scene(subject, color, place, *DETAILS[detail])

    def image(self, index: int, min_size: int = 0) -> Image.Image:
        return render_scene(self.scene(index), Random(f"{self._key}/{index}"))

    def captions(self, index: int) -> list[str]:
        """One caption for each template in training, one caption for validation."""
        scene, templates = self.scene(index), range(len(TEMPLATES))
        return [describe(scene, k) for k in templates if self.split == "train" or k == index % len(TEMPLATES)]

    def label(self, index: int) -> str:
        """What the scene shows, in the singular."""
        return self.scene(index).subject

    def label_names(self) -> list[str]:
        return list(SUBJECTS)

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        """Hard negatives: the field that was changed, and the scene's caption with exactly one wrong word."""
        scene, rng = self.scene(index), Random(f"edit/{self._key}/{index}")
        counts = (2, 3, 4) if scene.count > 1 else ()  # the same plural
        positions = () if scene.position == "middle" else ("left", "right")  # the same preposition
        words = {"subject": SUBJECTS, "color": COLORS, "count": counts, "size": SIZES, "position": positions}
        words |= {"place": PLACES_OF[scene.subject], "time": TIMES, "sky": SKIES}
        for field, values in words.items():
            if others := [value for value in values if value != getattr(scene, field)]:
                change: Any = {field: rng.choice(others)}
                yield field, describe(replace(scene, **change), index % len(TEMPLATES))


def describe(scene: Scene, template: int) -> str:
    at = "in" if scene.position == "middle" else "on"
    words = {**vars(scene), "count": COUNTS[scene.count - 1], "at": at}
    if scene.count > 1:
        words["subject"] = PLURALS.get(scene.subject, scene.subject + "s")
    return str(TEMPLATES[template].format(**words))


def permute(index: int, size: int, key: str) -> int:
    """Position of `index` in a random permutation of range(size), computed without the permutation.

    Four rounds of a Feistel network over the next even number of bits, until the result is below `size`.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    salts = struct.unpack("<4Q", blake2b(key.encode(), digest_size=32).digest())
    while True:
        left, right = index >> half, index & mask
        for salt in salts:
            mixed = (right + salt) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ ((mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 >> 32 & mask)
        index = left << half | right
        if index < size:
            return index
