"""Curves of a run: which there are, smoothed, and downsampled to what a screen can show."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m1clip.format import number, percent
from m1clip.monitor.log import Column, Log, evenly_spaced, float_or_nan


@dataclass(frozen=True)
class Curve:
    key: str  # field of the log records
    title: str
    kind: str = "step"  # of the log records
    chance: str | None = None  # field with the value of random guessing
    unit: str = ""  # "%" for fractions of 1, else the unit written after the number
    log_axis: bool = False
    recent: int = 50  # steps that are averaged for the current value


CURVES = {
    curve.key: curve
    for curve in (
        Curve("loss", "loss", chance="chance_loss", recent=10),
        Curve("accuracy", "batch accuracy", chance="chance_accuracy", unit="%", recent=10),
        Curve("mean_r1", "validation R@1", "eval", "chance_r1", "%"),
        Curve("i2t_r1", "validation R@1, image→text", "eval", "chance_i2t_r1", "%"),
        Curve("t2i_r1", "validation R@1, text→image", "eval", "chance_t2i_r1", "%"),
        Curve("i2t_r10", "validation R@10, image→text", "eval", "chance_i2t_r10", "%"),
        Curve("t2i_r10", "validation R@10, text→image", "eval", "chance_t2i_r10", "%"),
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
    kind = CURVES[key].kind
    steps, y = log.column("step", kind), log.column(key, kind)
    x = minutes_at(log, steps) if x_axis == "minutes" else steps
    if kind != "step":
        return x, y
    gaps = gap_ends(steps)
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
    known = log.known_column(curve.chance, curve.kind).tolist() if curve.chance else []
    return known[-1] if known else None


def current_value(log: Log, key: str) -> float | None:
    curve = CURVES[key]
    return log.recent_mean(key, curve.recent) if curve.kind == "step" else log.last(curve.kind).get(key)


def format_value(key: str, value: float | None) -> str:
    return percent(value) if CURVES[key].unit == "%" else number(value, unit=CURVES[key].unit)


def moving_average(y: Column, window: int) -> Column:
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


def gradient_norms(log: Log, max_steps: int) -> tuple[list[int], list[str], Column]:
    """Steps, blocks and gradient norms (block x step) of at most `max_steps` diagnostics records."""
    records = evenly_spaced(log.known_records("diagnostics", "grad_norms"), max_steps)
    blocks = list(records[-1]["grad_norms"]) if records else []
    norms = [[float_or_nan(record["grad_norms"].get(block)) for record in records] for block in blocks]
    return [record["step"] for record in records], blocks, np.array(norms)
