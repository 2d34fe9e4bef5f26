"""Curves of a run: which there are, over what, smoothed, and thinned to what a console can show. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from m1clip.monitor.log import Column, Log


@dataclass(frozen=True)
class Curve:
    key: str
    title: str
    kind: str = "step"
    chance: str | None = None
    """The column that says what guessing gives."""
    unit: str = ""
    """"%" for parts of 1, else what is written behind the number."""
    log: bool = False
    """Better seen on a logarithmic axis."""


CURVES = {
    curve.key: curve
    for curve in (
        Curve("loss", "loss", chance="chance_loss"),
        Curve("accuracy", "accuracy, in the batch", chance="chance_accuracy", unit="%"),
        Curve("mean_r1", "validation R@1, mean of both ways", "eval", "chance_r1", "%"),
        Curve("i2t_r1", "validation R@1, image→text", "eval", "chance_r1", "%"),
        Curve("t2i_r1", "validation R@1, text→image", "eval", "chance_r1", "%"),
        Curve("i2t_r10", "validation R@10, image→text", "eval", unit="%"),
        Curve("t2i_r10", "validation R@10, text→image", "eval", unit="%"),
        Curve("temperature", "temperature"),
        Curve("lr", "learning rate"),
        Curve("grad_norm", "gradient norm", log=True),
        Curve("pairs_per_s", "pairs a second"),
        Curve("step_ms", "milliseconds a step", unit="ms"),
        Curve("rss_gb", "memory of the process", "logger", unit="GB"),
        Curve("available_gb", "memory still free", "logger", unit="GB"),
        Curve("device_gb", "peak memory of the device", "logger", unit="GB"),
        Curve("temperature_c", "heat", "logger", unit="°C"),
        Curve("power_w", "power", "logger", unit="W"),
        Curve("alignment", "alignment (0 is perfect)", "logger"),
        Curve("modality_gap", "modality gap", "logger"),
        Curve("effective_rank_image", "directions in use, images", "logger"),
        Curve("effective_rank_text", "directions in use, captions", "logger"),
    )
}


def points(log: Log, key: str, over: str = "step", window: int = 1) -> tuple[Column, Column]:
    """The curve over steps or over minutes of training; a hole in the steps is a NaN.

    What is measured at every step is the mean of the last `window`; 0 is a hundredth of all. It begins anew
    after a hole.
    """
    curve = CURVES[key]
    if curve.kind != "step":
        x, y = log.recorded(curve.kind, "step"), log.recorded(curve.kind, key)
        return (minutes_at(log, x) if over == "minutes" else x), y
    x, y = log.column("step"), log.column(key)
    broken = breaks(x)
    parts = [smoothed(part, window or len(y) // 100) for part in np.split(y, broken)]
    x, y = minutes_at(log, x) if over == "minutes" else x, np.concatenate(parts)
    return np.insert(x, broken, x[broken]), np.insert(y, broken, np.nan)


def breaks(steps: Column) -> NDArray[np.int64]:
    """Where many steps are missing, against how far they are apart elsewhere: the first after each hole."""
    apart = np.diff(steps)
    return np.flatnonzero(apart > 3 * np.median(apart)) + 1 if len(apart) else np.empty(0, np.int64)


def minutes_at(log: Log, steps: Column) -> Column:
    """Minutes of training up to each step; evaluation, saving and rest are not counted."""
    spent = np.nan_to_num(log.column("step_ms")) + np.nan_to_num(log.column("between_ms"))
    passed = np.concatenate([[0.0], np.cumsum(spent) / 60_000])
    return passed[np.searchsorted(log.column("step"), steps, "right")]


def chance(log: Log, key: str) -> float | None:
    """What guessing gives, as the last record of it says."""
    name = CURVES[key].chance
    if name is None:
        return None
    values = log.column(name) if CURVES[key].kind == "step" else log.recorded(CURVES[key].kind, name)
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else None


def smoothed(y: Column, window: int) -> Column:
    """The mean of each value and those before it, `window` in all, of what is known; unknown stays so."""
    window = min(window, len(y))
    if window <= 1:
        return y
    known = np.isfinite(y)
    total = trailing(np.where(known, y, 0.0), window)
    count = np.minimum(np.arange(1.0, len(y) + 1), window) if known.all() else trailing(known * 1.0, window)
    return np.where(known, total / np.maximum(count, 1), np.nan)


def trailing(values: Column, window: int) -> Column:
    """Sums of each value and those before it, `window` in all.

    Of stretches as long as the window, from their start and to their end: nothing is subtracted, so that a
    value of 1e17 does not swallow those after it.
    """
    rows = np.pad(values, (0, -len(values) % window)).reshape(-1, window)
    total = np.cumsum(rows, axis=1)
    rest = np.cumsum(rows[:, ::-1], axis=1)[:, ::-1]
    total[1:, :-1] += rest[:-1, 1:]
    sums: Column = total.reshape(-1)[: len(values)]
    return sums


def thinned(x: Column, y: Column, most: int) -> tuple[Column, Column]:
    """At most about `most` points that look the same: the least and greatest of each stretch, and breaks."""
    if len(x) <= most:
        return x, y
    wide = -(-len(y) // max(1, most // 2))
    rows = np.pad(y, (0, -len(y) % wide), constant_values=y[-1]).reshape(-1, wide)
    known = np.isfinite(rows)
    least, greatest = np.where(known, rows, np.inf).argmin(1), np.where(known, rows, -np.inf).argmax(1)
    broken = known.argmin(1)  # the first that is not known; where all are, the first
    starts = wide * np.arange(len(rows))
    kept = np.concatenate([starts + least, starts + greatest, (starts + broken)[~known.all(1)]])
    kept = np.unique(np.minimum(np.append(kept, [0, len(x) - 1]), len(x) - 1))
    return x[kept], y[kept]


def said(key: str) -> Callable[..., str]:
    """How a value of the curve is written, with three digits or as many as asked for."""
    unit = CURVES[key].unit
    if unit == "%":
        return lambda value, digits=3: f"{100 * value:.{digits}g} %"
    behind = f" {unit}" if unit else ""
    return lambda value, digits=3: f"{value:,.0f}{behind}" if 1e3 <= abs(value) < 1e7 else f"{value:.{digits}g}{behind}"
