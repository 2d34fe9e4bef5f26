"""Where one plan overtakes another, along the batch or the size of the model, with how sure that is.

How many times as fast one is as the other is taken to rise or to fall along the way: such a curve is fitted
to the measured ratios, and again to ratios drawn anew from the samples. Knows nothing of devices.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.devices import Plan
from m1clip.estimates import plan_of

Row = dict[str, Any]
DRAWS, POINTS, SURE = 400, 3, 0.95
Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Crossing:
    first: Plan
    """Faster below."""
    second: Plan
    """Faster above; where they never cross, the slower one throughout."""
    along: str
    of: str
    never: bool
    """Whether it is sure that the first is the faster one throughout."""
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
            answer = "never" if self.never else "undecided"
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
        a = {row["time_plans"]: row for row in rows if plan_of(row) == one}
        b = {row["time_plans"]: row for row in rows if plan_of(row) == other}
        both = sorted(a.keys() & b.keys(), key=lambda time_plans: a[time_plans][along])
        if len({a[time_plans][along] for time_plans in both}) >= POINTS:
            samples = [(a[time_plans], b[time_plans]) for time_plans in both]
            found.append(_crossing(one, other, along, of, samples, np.random.default_rng(seed)))
    return found


def _crossing(
    one: Plan, other: Plan, along: str, of: str, samples: list[tuple[Row, Row]], rng: np.random.Generator
) -> Crossing:
    x = np.log([float(a[along]) for a, _ in samples])
    ratios = np.array([b["step_ms"] / a["step_ms"] for a, b in samples])  # above 1 where the first is faster
    if np.log(ratios).mean() < 0:
        one, other, ratios = other, one, 1 / ratios
        samples = [(b, a) for a, b in samples]
    sides = list(zip(*samples, strict=True))
    drawn = [np.log(_draw(sides[1], rng) / _draw(sides[0], rng)) for _ in range(DRAWS)]
    span, extremes = (math.exp(x[0]), math.exp(x[-1])), (float(ratios.min()), float(ratios.max()))
    never = float(np.mean([(y > 0).all() for y in drawn])) >= SURE
    below, above = (float(np.mean([y[end] > 0 for y in drawn])) for end in (0, -1))
    if never or not ((below >= SURE and above <= 1 - SURE) or (below <= 1 - SURE and above >= SURE)):
        return Crossing(one, other, along, of, never, None, None, None, span, extremes)
    met = [at for y in drawn if (at := _zero(x, y)) is not None]
    low, at, high = np.exp(np.quantile(met, (0.05, 0.5, 0.95)))
    if above >= SURE:  # the first is the faster one above
        one, other = other, one
    return Crossing(one, other, along, of, never, at, low, high, span, extremes)


def _draw(rows: Sequence[Row], rng: np.random.Generator) -> Numbers:
    """A median of each measurement's samples, drawn anew."""
    return np.array([np.median(rng.choice(row["samples_ms"], len(row["samples_ms"]))) for row in rows])


def _zero(x: Numbers, y: Numbers) -> float | None:
    """Where a curve through the points that only rises, or only falls, passes zero; None if it does not."""
    rising, falling = _rising(y), -_rising(-y)
    curve = rising if ((rising - y) ** 2).sum() <= ((falling - y) ** 2).sum() else falling
    if curve[0] * curve[-1] >= 0:
        return None
    after = int(np.argmax(np.sign(curve) != np.sign(curve[0])))
    part = curve[after - 1] / (curve[after - 1] - curve[after])
    return float(x[after - 1] + part * (x[after] - x[after - 1]))


def _rising(y: Numbers) -> Numbers:
    """The nearest sequence that never falls: neighbours that do are replaced by their mean."""
    blocks: list[list[float]] = []
    for value in y:
        blocks.append([float(value)])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.array([np.mean(block) for block in blocks for _ in block])
