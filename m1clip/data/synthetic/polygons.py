"""The language of the drawings: a few words per shape become polygons. Knows no images and no colors."""

import math
from collections.abc import Sequence
from typing import NamedTuple

Point = tuple[float, float]

INK = 0.028  # width of the line around a subject, in its own size


class Part(NamedTuple):
    """A polygon in the unit square (x right, y down), and the same grown by the width of the ink."""

    tone: str
    inside: list[Point]
    around: list[Point]


Sketch = tuple[Part, ...]


def oval(cx: float, cy: float, rx: float, ry: float) -> list[Point]:
    """Points enough to look round, and fewer where nobody would see."""
    n = 32 if max(rx, ry) > 0.15 else 14
    return [(cx + rx * math.cos(math.tau * i / n), cy + ry * math.sin(math.tau * i / n)) for i in range(n)]


def smooth(points: Sequence[Point], closed: bool) -> list[Point]:
    """A Catmull-Rom curve through the points."""
    p = [points[-1], *points, *points[:2]] if closed else [points[0], *points, points[-1]]
    curve = []
    for (ax, ay), (bx, by), (cx, cy), (dx, dy) in zip(p, p[1:], p[2:], p[3:], strict=False):
        for t in (0.0, 0.2, 0.4, 0.6, 0.8):
            a, b = t * (t * (2 - t) - 1) / 2, (t * t * (3 * t - 5) + 2) / 2
            c, d = t * (t * (4 - 3 * t) + 1) / 2, t * t * (t - 1) / 2
            curve.append((a * ax + b * bx + c * cx + d * dx, a * ay + b * by + c * cy + d * dy))
    return curve if closed else [*curve, points[-1]]


def stroke(points: Sequence[Point], width: float) -> list[Point]:
    """The polygon of a line with round ends: along it, around its end, and back."""
    side = []
    for way in (points, points[::-1]):
        for (ax, ay), (x, y), (bx, by) in zip([way[0], *way], way, [*way[1:], way[-1]], strict=False):
            angle = math.atan2(by - ay, bx - ax) - math.pi / 2
            side.append((x + width / 2 * math.cos(angle), y + width / 2 * math.sin(angle)))
        for turn in (angle + math.pi * i / 6 for i in range(1, 6)):
            side.append((x + width / 2 * math.cos(turn), y + width / 2 * math.sin(turn)))
    return side


def grow(points: Sequence[Point], by: float) -> list[Point]:
    """The polygon with every edge moved outwards."""
    edges = list(zip(points, [*points[1:], points[0]], strict=True))
    turn = math.copysign(1, sum(ax * by - bx * ay for (ax, ay), (bx, by) in edges))
    lengths = [turn * (math.dist(a, b) or 1.0) for a, b in edges]
    normals = [((by - ay) / n, (ax - bx) / n) for ((ax, ay), (bx, by)), n in zip(edges, lengths, strict=True)]
    grown = []
    for (x, y), (nx, ny), (mx, my) in zip(points, [normals[-1], *normals], normals, strict=False):
        step = by / max(1 + nx * mx + ny * my, 0.5)  # the floor keeps a sharp corner from becoming a spike
        grown.append((x + step * (nx + mx), y + step * (ny + my)))
    return grown


def outline(kind: str, n: Sequence[float]) -> list[Point]:
    """The polygon of a shape. Lines and curves lead with their width; a ring is x, y, radius, width."""
    if kind == "oval":
        return oval(*n)
    if kind == "dome":  # the upper half of an oval
        return [(x, min(y, n[1])) for x, y in oval(*n)]
    if kind == "box":
        return [(n[0], n[1]), (n[2], n[1]), (n[2], n[3]), (n[0], n[3])]
    if kind == "ring":  # one polygon, slit from rim to hole
        rim, hole = oval(n[0], n[1], n[2], n[2]), oval(n[0], n[1], n[2] - n[3], n[2] - n[3])
        return [*rim, rim[0], hole[0], *hole[::-1]]
    lead = len(n) % 2
    points = list(zip(n[lead::2], n[lead + 1 :: 2], strict=True))
    if kind == "poly":
        return points
    if kind == "blob":
        return smooth(points, closed=True)
    if kind in ("line", "curve"):
        return stroke(points if kind == "line" else smooth(points, closed=False), n[0])
    raise ValueError(f"unknown shape {kind!r}; a sketch has oval dome box ring poly blob line curve")


def sketch(text: str) -> Sketch:
    """Shapes as `kind tone numbers`, back to front, in hundredths; `* n dx dy` at the end makes n copies."""
    parts = []
    for shape in text.split(";"):
        first, _, copies = shape.partition("*")
        kind, tone, *words = first.split()
        n = [float(word) / 100 for word in words]
        inside = outline(kind, n)
        # Grown edge by edge, a ring would open at its slit.
        around = outline(kind, [*n[:2], n[2] + INK, n[3] + 2 * INK]) if kind == "ring" else grow(inside, INK)
        count, dx, dy = (float(word) for word in copies.split() or ("1", "0", "0"))
        for x, y in ((dx * i / 100, dy * i / 100) for i in range(int(count))):
            parts.append(Part(tone, *([(x + u, y + v) for u, v in polygon] for polygon in (inside, around))))
    return tuple(parts)
