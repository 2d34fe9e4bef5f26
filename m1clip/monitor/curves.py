"""Curves of a run: which there are, smoothed, and downsampled to what a screen can show."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from m1clip.format import number, percent
from m1clip.monitor.log import Array, Log, float_or_nan, subsample

PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Curve:
    key: str  # field of the log records
    title: str
    kind: str  # of the log records
    chance: str | None = None  # field with the value of random guessing
    unit: str = ""  # "%" for fractions of 1, else the unit written after the number
    log_axis: bool = False
    recent: int = 50  # steps that are averaged for the current value

    def points(self, log: Log, x_axis: str = "step", window: int = 1) -> tuple[Array, Array]:
        """The curve over steps or minutes of training.

        Step curves have a NaN at each gap, which is three times the usual distance between logged steps, and are
        averaged over the last `window` steps since a gap; 0 averages 1 % of all steps.
        """
        if x_axis == "minutes" and log.start:  # unknown before the start of the log is read
            return np.empty(0), np.empty(0)
        steps, y = log.column("step", self.kind), log.column(self.key, self.kind)
        x = minutes_at(log, steps) if x_axis == "minutes" else steps
        if self.kind != "step" or len(steps) < 2:
            return x, y
        distances = np.diff(steps)
        gaps = np.flatnonzero(distances > 3 * np.median(distances)) + 1
        y = np.concatenate([moving_average(part, window or len(y) // 100) for part in np.split(y, gaps)])
        return np.insert(x, gaps, x[gaps]), np.insert(y, gaps, np.nan)

    def current(self, log: Log) -> float | None:
        return log.recent_mean(self.key, self.recent) if self.kind == "step" else log.last(self.kind).get(self.key)

    def chance_level(self, log: Log) -> float | None:
        """The value of random guessing, from the last record that has it."""
        known = log.known_column(self.chance, self.kind)[-1:].tolist() if self.chance else []
        return known[0] if known else None

    def text(self, value: float | None) -> str:
        return percent(value) if self.unit == "%" else number(value, unit=self.unit)


CURVES = {row["key"]: Curve(**row) for row in json.loads((PAGE / "curves.json").read_bytes())}  # the page reads it too


def minutes_at(log: Log, steps: Array) -> Array:
    """Minutes of training up to each step, without evaluation, checkpoints and pauses."""
    step_ms = np.nan_to_num(log.column("step_ms")) + np.nan_to_num(log.column("between_ms"))
    minutes = np.concatenate([[0.0], np.cumsum(step_ms) / 60_000])
    return minutes[np.searchsorted(log.column("step"), steps, "right")]


def moving_average(y: Array, window: int) -> Array:
    """The mean of the known values among each value and the window - 1 before it; unknown values stay NaN.

    The sum over a window is the end of one block plus the start of the next: without the subtraction of a
    running total, an outlier of 1e17 does not cancel the digits of later values.
    """
    window = min(window, len(y))
    if window <= 1:
        return y
    known = np.isfinite(y)
    values_and_counts = np.pad([np.where(known, y, 0.0), known], ((0, 0), (0, -len(y) % window)))
    blocks = values_and_counts.reshape(2, -1, window)
    sums = np.cumsum(blocks, axis=2)
    sums[:, 1:, :-1] += np.cumsum(blocks[:, :, ::-1], axis=2)[:, :-1, -2::-1]
    total, count = sums.reshape(2, -1)[:, : len(y)]
    return np.where(known, total / np.maximum(count, 1), np.nan)


def downsample(x: Array, y: Array, max_points: int) -> tuple[Array, Array]:
    """About `max_points` points that look the same: minimum, maximum and gaps of each bucket."""
    if len(x) <= max_points:
        return x, y
    size = -(-len(y) // max(1, max_points // 2))
    buckets = np.pad(y, (0, -len(y) % size), constant_values=y[-1]).reshape(-1, size)
    known = np.isfinite(buckets)
    lowest, highest = np.where(known, buckets, np.inf).argmin(1), np.where(known, buckets, -np.inf).argmax(1)
    starts, first_gap = size * np.arange(len(buckets)), known.argmin(1)
    kept = np.concatenate([starts + lowest, starts + highest, (starts + first_gap)[~known.all(1)]])
    kept = np.unique(np.minimum(np.append(kept, [0, len(x) - 1]), len(x) - 1))
    return x[kept], y[kept]


def gradient_norms(log: Log, max_steps: int) -> tuple[list[int], list[str], Array]:
    """Steps, blocks and gradient norms (block x step) of at most `max_steps` diagnostics records."""
    records = subsample(log.known_records("diagnostics", "grad_norms"), max_steps)
    blocks = list(records[-1]["grad_norms"]) if records else []
    norms = [[float_or_nan(record["grad_norms"].get(block)) for record in records] for block in blocks]
    return [record["step"] for record in records], blocks, np.array(norms)
