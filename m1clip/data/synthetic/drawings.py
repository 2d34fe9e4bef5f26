"""What each word of a synthetic caption looks like: drawings.toml, with its sketches turned into polygons."""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

Point = tuple[float, float]
RGB = tuple[int, int, int]
Tones = dict[str, RGB]
INK_WIDTH = 0.028  # of the outline around a subject, relative to its size


class Polygon(NamedTuple):
    """A polygon in the unit square (x right, y down), and the same one grown by the width of the outline."""

    tone: str
    inside: list[Point]
    outline: list[Point]


Sketch = tuple[Polygon, ...]


@dataclass(frozen=True)
class TimeOfDay:
    zenith: RGB
    horizon: RGB
    tint: tuple[float, float, float]
    orb: RGB  # sun or moon
    orb_y: float
    cloud: RGB
    bird: RGB
    glass: RGB


@dataclass(frozen=True)
class Place:
    ground: str
    floor: Sketch
    motif: Sketch = ()
    count: int = 0
    height: float = 0.0


def ellipse(cx: float, cy: float, rx: float, ry: float) -> list[Point]:
    n = 32 if max(rx, ry) > 0.15 else 14
    return [(cx + rx * math.cos(math.tau * i / n), cy + ry * math.sin(math.tau * i / n)) for i in range(n)]


def catmull_rom(points: Sequence[Point], closed: bool) -> list[Point]:
    """A smooth curve through the points."""
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
        for (ax, ay), (x, y), (bx, by) in zip([path[0], *path], path, [*path[1:], path[-1]], strict=False):
            angle = math.atan2(by - ay, bx - ax) - math.pi / 2
            edge.append((x + width / 2 * math.cos(angle), y + width / 2 * math.sin(angle)))
        for turn in (angle + math.pi * i / 6 for i in range(1, 6)):
            edge.append((x + width / 2 * math.cos(turn), y + width / 2 * math.sin(turn)))
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


FILE = Path(__file__).with_suffix(".toml")
_toml: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))


def _values(table: dict[str, Any]) -> dict[str, Any]:
    return {name: _parse(value) for name, value in table.items()}


def _parse(value: Any) -> Any:
    """Colors as tuples, sketches as polygons, names and numbers as they are."""
    if isinstance(value, str):
        return parse_sketch(value) if " " in value else value
    return tuple(value) if isinstance(value, list) else value


SIZES, POSITIONS, COLORS, FIXED, PAINTS, TRIMS, SUBJECTS, SKIES = (
    _values(_toml[table]) for table in ("sizes", "positions", "colors", "fixed", "paints", "trims", "subjects", "skies")
)
GROUPS: dict[int, list[Point]] = {int(count): points for count, points in _toml["groups"].items()}
TIMES = {name: TimeOfDay(**_values(table)) for name, table in _toml["times"].items()}
PLACES = {name: Place(**_values(table)) for name, table in _toml["places"].items()}
