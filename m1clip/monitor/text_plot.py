"""Curves as text: two by four dots a letter, so that a terminal over ssh is enough."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from rich.text import Text

from m1clip.monitor.log import Column

# The bit of the dot in each of a letter's two columns and four rows, from the top.
BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


@dataclass(frozen=True)
class Line:
    x: Column
    y: Column
    style: str


class Canvas:
    def __init__(self, width: int, height: int):
        self.width, self.height = width, height
        self.bits = [[0] * width for _ in range(height)]
        self.styles = [[""] * width for _ in range(height)]

    def dot(self, x: int, y: int, style: str) -> None:
        """y counts dots from the bottom."""
        row, column = self.height - 1 - y // 4, x // 2
        if 0 <= row < self.height and 0 <= column < self.width:
            self.bits[row][column] |= BITS[x % 2][3 - y % 4]
            self.styles[row][column] = style

    def row(self, number: int) -> Text:
        made = Text()
        for bits, style in zip(self.bits[number], self.styles[number], strict=True):
            made.append(chr(0x2800 + bits) if bits else " ", style)
        return made


def plot(
    title: str,
    lines: Sequence[Line],
    width: int,
    height: int,
    say: Callable[..., str],
    levels: Sequence[float] = (),
) -> Text:
    """A title, the curves with their scale on the left, and the range of steps below; levels are dotted."""
    title_text = Text(title[:width], "bold")
    rows, across = height - 2, span([line.x for line in lines])
    up = span([*(robust(line.y) for line in lines), np.array(levels, np.float64)])
    if across is None or up is None or rows < 1:
        empty = [Text("  nothing yet", "dim")] if height > 1 else []
        return block([title_text, *empty], height)
    names = scale(up, say, rows >= 5)
    label = max(map(len, names)) + 1
    canvas = Canvas(max(4, width - label - 1), rows)
    for level in levels:
        high = place(level, up, 4 * rows)
        for x in range(0, 2 * canvas.width, 4):
            canvas.dot(x, high, "dim")
    for line in reversed(lines):  # the first is drawn last, over the others
        draw(canvas, line, across, up)
    places = {0: names[0], (rows - 1) // 2: names[1], rows - 1: names[2]} if rows > 2 else {0: names[0]}
    body = [
        Text.assemble((f"{places.get(number, ''):>{label - 1}} ", "dim"), canvas.row(number)) for number in range(rows)
    ]
    first, last = f"{across[0]:,.0f}", f"{across[1]:,.0f}"
    below = " " * label + first + last.rjust(max(1, canvas.width - len(first)))
    return block([title_text, *body, Text(below, "dim")], height)


def scale(up: tuple[float, float], say: Callable[..., str], middle: bool) -> list[str]:
    """The ends and the middle in words, with as many digits as tell them apart."""
    for digits in (3, 4, 5, 6):
        names = [say(value, digits) for value in (up[1], (up[0] + up[1]) / 2, up[0])]
        if len(set(names)) == len(names):
            break
    return names if middle else [names[0], "", names[2]]


def draw(canvas: Canvas, line: Line, across: tuple[float, float], up: tuple[float, float]) -> None:
    """The span of the values in each column of dots, joined to the one before unless there is a break."""
    dots = 2 * canvas.width
    column_N = np.clip(((line.x - across[0]) / (across[1] - across[0]) * (dots - 1)), 0, dots - 1)
    column_N = np.nan_to_num(column_N).astype(int)
    last: tuple[int, int] | None = None  # the dot that the next is joined to
    edges = [*np.flatnonzero(np.diff(column_N, prepend=-1)).tolist(), len(column_N)]
    for start, end in pairwise(edges):
        values = line.y[start:end]
        known = values[np.isfinite(values)]
        if not len(known):
            last = None
            continue
        x, tall = int(column_N[start]), 4 * canvas.height
        if last is not None and np.isfinite(values[0]):
            join(canvas, last, (x, place(known[0], up, tall)), line.style)
        for y in range(place(known.min(), up, tall), place(known.max(), up, tall) + 1):
            canvas.dot(x, y, line.style)
        last = (x, place(known[-1], up, tall)) if np.isfinite(values[-1]) else None


def join(canvas: Canvas, a: tuple[int, int], b: tuple[int, int], style: str) -> None:
    dots = max(abs(b[0] - a[0]), abs(b[1] - a[1]), 1)
    for k in range(dots):
        x, y = (round(p + (q - p) * k / dots) for p, q in zip(a, b, strict=True))
        canvas.dot(x, y, style)


def place(value: float, up: tuple[float, float], dots: int) -> int:
    part = (value - up[0]) / (up[1] - up[0])
    return int(min(max(part, 0.0), 1.0) * (dots - 1) + 0.5)


def robust(y: Column) -> Column:
    """Without the few values that would flatten all others."""
    known = y[np.isfinite(y)]
    if len(known) < 50:
        return known
    low, high = np.quantile(known, [0.005, 0.995])
    return np.array([low, high, known[-1]])


def span(parts: Sequence[Column]) -> tuple[float, float] | None:
    """From the least to the greatest of what is known, never empty."""
    known = np.concatenate([part[np.isfinite(part)] for part in parts]) if parts else np.empty(0)
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    room = (high - low) or abs(high) or 1.0
    return (low, high) if high > low else (low - 0.5 * room, high + 0.5 * room)


def bar(part: float, width: int) -> str:
    """A bar of eighths of a letter; `part` of 1."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("" if not rest else chr(0x2590 - rest))).ljust(width)


def block(lines: Sequence[Text], height: int) -> Text:
    """Exactly that many lines."""
    lines = [*lines[:height], *[Text()] * (height - len(lines))]
    return Text("\n").join(lines)


def beside(blocks: Sequence[Text], width: int) -> Text:
    """Blocks of equal height in columns of that width."""
    columns = [list(one.split("\n", allow_blank=True)) for one in blocks]
    rows = []
    for cells in zip(*columns, strict=True):
        row = Text()
        for number, cell in enumerate(cells):
            cell = cell.copy()
            cell.truncate(width - 1, overflow="ellipsis", pad=number < len(cells) - 1)
            row.append(cell).append(" " if number < len(cells) - 1 else "")
        rows.append(row)
    return Text("\n").join(rows)
