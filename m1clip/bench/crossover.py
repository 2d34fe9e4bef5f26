"""Where one plan overtakes another, along the batch or the size of the model, with how sure that is.

A step is taken for a constant (launches, the update) and a part that grows with the batch; both are fitted to
the measured times, and fitted again to times drawn anew from them. Knows nothing of devices.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.advisor import plan_of
from m1clip.devices import Plan

Row = dict[str, Any]
DRAWS, POINTS = 400, 3


@dataclass(frozen=True)
class Crossing:
    first: Plan
    """Faster below."""
    second: Plan
    """Faster above; where they never cross, the slower one throughout."""
    along: str
    of: str
    at: float | None
    low: float | None
    high: float | None
    span: tuple[float, float]
    ratios: tuple[float, float]
    """How many times faster the first is, least and most, at the measured points."""

    def __str__(self) -> str:
        a, b = (number(one, self.along) for one in self.span)
        if self.at is None or self.low is None or self.high is None:
            least, most = self.ratios
            lead = f"{self.first} is {least:.2f} to {most:.2f} times as fast as {self.second}"
            answer = "never" if least >= 1 else "undecided"
            return f"{self.of}: {answer}, in the measured range ({a} to {b}); {lead}"
        at, low, high = (number(one, self.along) for one in (self.at, self.low, self.high))
        return f"{self.of}: {self.second} overtakes {self.first} at {at} ({low} to {high})"

    def record(self) -> dict[str, Any]:
        return {**vars(self), "first": str(self.first), "second": str(self.second), "text": str(self)}


def number(value: float, along: str) -> str:
    return f"batch {value:.0f}" if along == "batch" else f"{value / 1e6:.3g} M parameters"


def crossings(rows: Sequence[Row], seed: int = 0) -> list[Crossing]:
    """Of every two plans that were measured in turns at three or more batches, or models at one batch."""
    found = []
    by_preset = {row["preset"]: row["parameters"] for row in rows}
    for preset in sorted(by_preset, key=lambda name: by_preset[name]):
        mine = [row for row in rows if row["preset"] == preset]
        found += _along("batch", preset, mine, seed)
    for batch in sorted({row["batch"] for row in rows}):
        mine = [row for row in rows if row["batch"] == batch]
        found += _along("parameters", f"batch {batch}", mine, seed)
    return found


def _along(along: str, of: str, rows: Sequence[Row], seed: int) -> list[Crossing]:
    plans = list(dict.fromkeys(plan_of(row) for row in rows))
    found = []
    for one, other in itertools.combinations(plans, 2):
        a = {row["contest"]: row for row in rows if plan_of(row) == one}
        b = {row["contest"]: row for row in rows if plan_of(row) == other}
        both = sorted(a.keys() & b.keys(), key=lambda contest: a[contest][along])
        if len({a[contest][along] for contest in both}) >= POINTS:
            samples = [(a[contest], b[contest]) for contest in both]
            found.append(_crossing(one, other, along, of, samples, np.random.default_rng(seed)))
    return found


def _crossing(
    one: Plan, other: Plan, along: str, of: str, samples: list[tuple[Row, Row]], rng: np.random.Generator
) -> Crossing:
    x = np.array([float(a[along]) for a, _ in samples])
    times = [[row["step_ms"] for row in side] for side in zip(*samples, strict=True)]
    ratios = np.array(times[1]) / np.array(times[0])  # above 1 where the first is faster
    if np.exp(np.log(ratios).mean()) < 1:
        one, other, ratios = other, one, 1 / ratios
        samples = [(b, a) for a, b in samples]
    drawn = [
        _meets(along, x, *(_draw(side, rng) for side in zip(*samples, strict=True))) for _ in range(DRAWS)
    ]
    inside = np.array([at for at in drawn if at is not None and x.min() <= at <= x.max()])
    least, most = float(ratios.min()), float(ratios.max())
    if len(inside) < DRAWS / 2 or least >= 1:
        return Crossing(one, other, along, of, None, None, None, (x.min(), x.max()), (least, most))
    low, at, high = np.quantile(inside, (0.05, 0.5, 0.95))
    if ratios[0] < ratios[-1]:  # the first is the faster one above
        one, other = other, one
    return Crossing(one, other, along, of, at, low, high, (x.min(), x.max()), (least, most))


def _draw(rows: Sequence[Row], rng: np.random.Generator) -> NDArray[np.float64]:
    """A median of each measurement's samples, drawn anew."""
    return np.array([np.median(rng.choice(row["samples_ms"], len(row["samples_ms"]))) for row in rows])


def _meets(
    along: str, x: NDArray[np.float64], a: NDArray[np.float64], b: NDArray[np.float64]
) -> float | None:
    """Where two fitted times are equal."""
    if along == "batch":  # a constant and a part that grows
        (slope_a, start_a), (slope_b, start_b) = (np.polyfit(x, t, 1, w=1 / t) for t in (a, b))
        meeting = (start_b - start_a) / (slope_a - slope_b) if slope_a != slope_b else math.inf
        return float(meeting) if 0 < meeting < math.inf else None
    # Sizes differ in everything, so only the ratio is fitted, as a power.
    slope, start = np.polyfit(np.log(x), np.log(b / a), 1)
    return float(np.exp(np.clip(-start / slope, -50, 50))) if slope else None
