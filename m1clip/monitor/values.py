"""Values of a log as a document says them: with intervals and spreads, and a dash for what is unknown."""

import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from m1clip.format import percent
from m1clip.monitor.log import Column, Record, number

Z = 1.959964  # 95 %
MOST_ROWS = 24


def interval(part: float, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a part that was counted among `of`."""
    if of < 1:
        return 0.0, 1.0
    middle = (part + Z * Z / (2 * of)) / (1 + Z * Z / of)
    half = Z / (1 + Z * Z / of) * math.sqrt(max(0.0, part * (1 - part) / of + Z * Z / (4 * of * of)))
    return max(0.0, middle - half), min(1.0, middle + half)


def guessed(first: int, of: float, right: float = 1) -> float:
    """The chance that one of `right` of `of` is among the `first` of a random order."""
    missed = math.prod(max(0.0, 1 - right / (of - k)) for k in range(min(first, int(of))))
    return 1 - missed


def guessed_rank(of: float, right: float = 1) -> float:
    """The median rank of the first of `right` of `of` in a random order."""
    return (of + 1) / 2 if right == 1 else of * (1 - 0.5 ** (1 / right)) + 0.5


def most(values: Iterable[Any]) -> float:
    """The largest of what is known; NaN of nothing."""
    return max((number(value) for value in values if math.isfinite(number(value))), default=math.nan)


def spread(values: Column) -> tuple[float, float, float] | None:
    """The median and the range of the middle nine tenths of what is known."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, middle, high = np.quantile(known, [0.05, 0.5, 0.95])
    return float(middle), float(low), float(high)


def with_interval(value: Any, of: int) -> str:
    known = number(value)
    if not math.isfinite(known):
        return "–"
    low, high = interval(known, of)
    return f"{percent(known)} ({100 * low:.1f}–{100 * high:.1f})"


def part(value: Any) -> str:
    return percent(number(value)) if math.isfinite(number(value)) else "–"


def figure(value: Any, how: str) -> str:
    return format(number(value), how) if math.isfinite(number(value)) else "–"


def shown(value: Any) -> str:
    """A number in full, or words as they are."""
    known = number(value)
    return f"{known:,.10g}" if math.isfinite(known) else "–" if value is None else str(value)


def when(time: Any) -> str:
    value = number(time)
    return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S") if 0 < value < 1e11 else "–"


def picked(rows: Sequence[Record]) -> list[Record]:
    """All of a few, or some of many at equal distances, the first and the last among them."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    return [rows[place] for place in np.linspace(0, len(rows) - 1, MOST_ROWS).astype(int)]
