"""Line plots as text for a terminal; a character has 2 x 4 Braille dots."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from m1clip.monitor.log import Column

Range = tuple[float, float]
# Bits of the 4 x 2 dots of a Braille character.
BRAILLE_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


@dataclass(frozen=True)
class Line:
    x: Column
    y: Column
    style: str


class Canvas:
    def __init__(self, width: int, height: int):
        self.dots = np.zeros((4 * height, 2 * width), bool)
        self.styles = np.full((height, width), "", object)

    def dot(self, x: int, y: int, style: str) -> None:
        """y counts dots from the bottom."""
        self.dots[-1 - y, x] = True
        self.styles[-1 - y // 4, x // 2] = style

    def rows(self) -> list[Text]:
        height, width = self.styles.shape
        bits = np.einsum("hrwc,rc->hw", self.dots.reshape(height, 4, width, 2), BRAILLE_BITS)
        return [
            Text.assemble(*((chr(0x2800 + bit) if bit else " ", style) for bit, style in zip(*row, strict=True)))
            for row in zip(bits.tolist(), self.styles.tolist(), strict=True)
        ]


def line_plot(
    title: str,
    lines: Sequence[Line],
    width: int,
    height: int,
    tick: Callable[[float, int], str],
    levels: Sequence[float] = (),
) -> Text:
    """A title, the lines with ticks on the left, and the range of x below; `levels` are dotted.

    `tick` formats a y value with a number of significant digits.
    """
    rows, x_range = height - 2, value_range([line.x for line in lines])
    y_range = value_range([*(without_outliers(line.y) for line in lines), np.array(levels, np.float64)])
    if x_range is None or y_range is None or rows < 1:
        return Text.assemble((title[:width], "bold"), ("\n  no data yet", "dim"), "\n" * (height - 2))
    top, middle, bottom = tick_labels(y_range, tick)
    label_width = max(map(len, (top, middle, bottom))) + 1
    plot_width = max(4, width - label_width - 1)
    canvas = Canvas(plot_width, rows)
    for row in dot_rows(np.array(levels), y_range, 4 * rows):
        for x in range(0, 2 * plot_width, 4):
            canvas.dot(x, round(row), "dim")
    for line in reversed(lines):  # the first is drawn last, over the others
        draw_line(canvas, line, x_range, y_range)
    labels = {0: top}
    labels |= {rows - 1: bottom} if rows > 2 else {}
    labels |= {(rows - 1) // 2: middle} if rows >= 5 else {}
    body = [
        Text.assemble((f"{labels.get(index, ''):>{label_width - 1}} ", "dim"), row)
        for index, row in enumerate(canvas.rows())
    ]
    first, last = f"{x_range[0]:,.0f}", f"{x_range[1]:,.0f}"
    x_labels = " " * label_width + first + last.rjust(max(1, plot_width - len(first)))
    return Text("\n").join([Text(title[:width], "bold"), *body, Text(x_labels, "dim")])


def tick_labels(y_range: Range, tick: Callable[[float, int], str]) -> list[str]:
    """The top, the middle and the bottom of the axis, with enough digits to differ."""
    low, high = y_range
    for digits in (3, 4, 5, 6):
        labels = [tick(value, digits) for value in (high, (low + high) / 2, low)]
        if len(set(labels)) == len(labels):
            break
    return labels


def draw_line(canvas: Canvas, line: Line, x_range: Range, y_range: Range) -> None:
    """Draw the values of each column of dots, connected to the column before unless there is a gap."""
    if not len(line.x):
        return
    height, width = canvas.dots.shape
    position = (line.x - x_range[0]) / (x_range[1] - x_range[0]) * (width - 1)
    rows = dot_rows(line.y, y_range, height)
    between = np.interp(np.arange(width), position, rows, math.nan, math.nan)  # NaN next to a NaN
    low, high = between.copy(), between.copy()
    columns = np.clip(position + 0.5, 0, width - 1).astype(int)
    np.fmin.at(low, columns, rows)
    np.fmax.at(high, columns, rows)
    before = np.concatenate([[math.nan], between[:-1]])
    joined = np.isfinite(between)
    low, high = np.where(joined, np.fmin(low, before), low), np.where(joined, np.fmax(high, before), high)
    for x in np.flatnonzero(np.isfinite(low)).tolist():
        for y in range(round(low[x]), round(high[x]) + 1):
            canvas.dot(x, y, line.style)


def dot_rows(y: Column, y_range: Range, dots: int) -> Column:
    """Rows of dots from the bottom; NaN where y is."""
    return np.clip((y - y_range[0]) / (y_range[1] - y_range[0]), 0, 1) * (dots - 1)


def without_outliers(y: Column) -> Column:
    """The range of the values without the 1 % that would flatten the curve."""
    known: Column = y[np.isfinite(y)]
    if len(known) < 50:
        return known
    return np.array([*np.quantile(known, [0.005, 0.995]), known[-1]])


def value_range(arrays: Sequence[Column]) -> Range | None:
    """Minimum and maximum of the known values, never equal; None if there are none."""
    known = np.concatenate([array[np.isfinite(array)] for array in arrays]) if arrays else np.empty(0)
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    margin = 0.0 if high > low else 0.5 * (abs(high) or 1.0)
    return low - margin, high + margin
