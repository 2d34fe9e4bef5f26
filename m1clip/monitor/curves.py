"""Curves of a run: which there are, smoothed, and downsampled to what a screen can show."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m1clip.format import number, percent
from m1clip.monitor.log import Column, Log, float_or_nan


@dataclass(frozen=True)
class Curve:
    key: str
    """Field of the log records."""
    title: str
    kind: str = "step"
    """Kind of the log records."""
    chance: str | None = None
    """Field with the value of random guessing."""
    unit: str = ""
    """"%" for fractions of 1, else the unit written after the number."""
    log_axis: bool = False
    recent: int = 50
    """How many of the last steps are averaged for the current value."""


CURVES = {
    curve.key: curve
    for curve in (
        Curve("loss", "loss", chance="chance_loss", recent=10),
        Curve("accuracy", "batch accuracy", chance="chance_accuracy", unit="%", recent=10),
        Curve("mean_r1", "validation R@1", "eval", "chance_r1", "%"),
        Curve("i2t_r1", "validation R@1, image→text", "eval", "chance_r1", "%"),
        Curve("t2i_r1", "validation R@1, text→image", "eval", "chance_r1", "%"),
        Curve("i2t_r10", "validation R@10, image→text", "eval", unit="%"),
        Curve("t2i_r10", "validation R@10, text→image", "eval", unit="%"),
        Curve("temperature", "temperature", recent=1),
        Curve("lr", "learning rate", recent=1),
        Curve("grad_norm", "gradient norm", log_axis=True, recent=10),
        Curve("pairs_per_s", "pairs per second"),
        Curve("step_ms", "step time", unit="ms"),
        Curve("rss_gb", "process memory (RSS)", "diagnostics", unit="GB"),
        Curve("available_gb", "available memory", "diagnostics", unit="GB"),
        Curve("device_gb", "peak device memory", "diagnostics", unit="GB"),
        Curve("temperature_c", "CPU temperature", "diagnostics", unit="°C"),
        Curve("power_w", "power", "diagnostics", unit="W"),
        Curve("wh_so_far", "energy so far", "epoch", unit="Wh"),
        Curve("mean_r1_per_wh", "R@1 per Wh", "epoch"),
        Curve("alignment", "alignment (0 is perfect)", "diagnostics"),
        Curve("modality_gap", "modality gap", "diagnostics"),
        Curve("effective_rank_image", "effective rank, images", "diagnostics"),
        Curve("effective_rank_text", "effective rank, captions", "diagnostics"),
    )
}


def curve_points(log: Log, key: str, x_axis: str = "step", window: int = 1) -> tuple[Column, Column]:
    """The curve over steps or minutes of training, with a NaN at each gap in the steps.

    Step curves are averaged over the last `window` steps since a gap; 0 averages 1 % of all steps.
    """
    curve = CURVES[key]
    if curve.kind != "step":
        x, y = log.record_column(curve.kind, "step"), log.record_column(curve.kind, key)
        return (minutes_at(log, x) if x_axis == "minutes" else x), y
    x, y = log.column("step"), log.column(key)
    gaps = gap_ends(x)
    x = minutes_at(log, x) if x_axis == "minutes" else x
    y = np.concatenate([moving_average(part, window or len(y) // 100) for part in np.split(y, gaps)])
    return np.insert(x, gaps, x[gaps]), np.insert(y, gaps, np.nan)


def gap_ends(steps: Column) -> NDArray[np.int64]:
    """Indices of the steps after a gap, which is three times the usual distance between logged steps."""
    distances = np.diff(steps)
    usual = np.median(distances) if len(distances) else 0.0
    return np.flatnonzero(distances > 3 * usual) + 1


def minutes_at(log: Log, steps: Column) -> Column:
    """Minutes of training up to each step, without evaluation, checkpoints and pauses."""
    step_ms = np.nan_to_num(log.column("step_ms")) + np.nan_to_num(log.column("between_ms"))
    minutes = np.concatenate([[0.0], np.cumsum(step_ms) / 60_000])
    return minutes[np.searchsorted(log.column("step"), steps, "right")]


def chance_level(log: Log, key: str) -> float | None:
    """The value of random guessing, from the last record that has it."""
    curve = CURVES[key]
    if curve.chance is None:
        return None
    values = log.column(curve.chance) if curve.kind == "step" else log.record_column(curve.kind, curve.chance)
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def current_value(log: Log, key: str) -> float | None:
    curve = CURVES[key]
    return log.recent_mean(key, curve.recent) if curve.kind == "step" else log.last(curve.kind).get(key)


def format_value(key: str, value: float | None) -> str:
    return percent(value) if CURVES[key].unit == "%" else number(value, unit=CURVES[key].unit)


def format_tick(key: str, value: float, digits: int) -> str:
    unit = CURVES[key].unit
    return number(100 * value if unit == "%" else value, digits, unit)


def moving_average(y: Column, window: int) -> Column:
    """The mean of the known values among each value and the window - 1 before it; unknown values stay NaN."""
    window = min(window, len(y))
    if window <= 1:
        return y
    known = np.isfinite(y)
    total = _trailing_sums(np.where(known, y, 0.0), window)
    count = _trailing_sums(known * 1.0, window)
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _trailing_sums(values: Column, window: int) -> Column:
    """Sums of each value and the window - 1 before it.

    Each is the end of one block plus the start of the next: without the subtraction of a running total, an
    outlier of 1e17 does not cancel the digits of later values.
    """
    blocks = np.pad(values, (0, -len(values) % window)).reshape(-1, window)
    sums = np.cumsum(blocks, axis=1)
    block_ends = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
    sums[1:, :-1] += block_ends[:-1, 1:]
    flat: Column = sums.reshape(-1)[: len(values)]
    return flat


def downsample(x: Column, y: Column, max_points: int) -> tuple[Column, Column]:
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


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a fraction of `count` trials."""
    if count < 1:
        return 0.0, 1.0
    z = 1.959964
    center = (fraction + z * z / (2 * count)) / (1 + z * z / count)
    variance = max(0.0, fraction * (1 - fraction) / count + z * z / (4 * count * count))
    half = z / (1 + z * z / count) * math.sqrt(variance)
    return max(0.0, center - half), min(1.0, center + half)


def gradient_norms(log: Log, max_steps: int) -> tuple[list[int], list[str], Column]:
    """Steps, blocks and gradient norms (block x step) of at most `max_steps` diagnostics records."""
    records = log.known_records("diagnostics", "grad_norms")
    if not records:
        return [], [], np.empty((0, 0))
    records = [records[index] for index in np.unique(np.linspace(0, len(records) - 1, max_steps).astype(int))]
    blocks = list(records[-1]["grad_norms"])
    norms = [[float_or_nan(record["grad_norms"].get(block)) for record in records] for block in blocks]
    return [record["step"] for record in records], blocks, np.array(norms)
