"""The report of one run and the comparison of several, from the files of the runs alone.

The text and the tables are in templates/; the functions here compute what they show. None: not measured.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.document import Document
from m1clip.format import UNKNOWN, duration, number, percent
from m1clip.monitor import figures
from m1clip.monitor.curves import chance_level, minutes_at, wilson_interval
from m1clip.monitor.log import STEP_PHASES, Column, Record, RunView, event_text, flatten, number_or_none
from m1clip.monitor.terminal_views import gigabytes, local_time, watt_hours

MAX_ROWS = 24


def write_report(run: RunView, folder: Path) -> Path:
    """Write report.md, report.html and figures; return the path of the HTML file."""
    folder.mkdir(parents=True, exist_ok=True)
    document = Document(f"{run.name}: training report")
    document.template(
        "monitor/templates/report.md.j2",
        **TEMPLATE_FUNCTIONS,
        run=run,
        log=run.log,
        training_figure=figures.draw_training(run, folder / "training.png") if len(run.log) > 1 else None,
        phases=phase_times(run),
        step_time_figure=figures.draw_step_time(run, folder / "step_time.png") if len(run.log) else None,
        temperatures=temperature_extremes(run),
        temperature_figure=figures.draw_temperature(run, folder / "temperature.png") if len(run.log) else None,
        gradients=gradient_flow(run),
        gradients_figure=figures.draw_gradient_flow(run, folder / "gradients.png"),
        examples=draw_examples(run, folder),
    )
    return document.write(folder, "report")


def write_comparison(runs: Sequence[RunView], folder: Path) -> Path:
    """Write comparison.md, comparison.html and a figure; return the path of the HTML file."""
    folder.mkdir(parents=True, exist_ok=True)
    document = Document(" and ".join(run.name for run in runs) + ": comparison")
    has_steps = any(len(run.log) > 1 for run in runs)
    document.template(
        "monitor/templates/comparison.md.j2",
        **TEMPLATE_FUNCTIONS,
        runs=runs,
        comparable=is_comparable(runs),
        differences=setting_differences(runs),
        ranking=ranking(runs),
        goal=common_score(runs) if is_comparable(runs) else None,
        figure=figures.draw_comparison(runs, folder / "comparison.png") if has_steps else None,
    )
    return document.write(folder, "comparison")


def step_seconds(run: RunView) -> float | None:
    step_ms = run.log.column("step_ms") + np.nan_to_num(run.log.column("between_ms"))
    return float(np.nansum(step_ms)) / 1e3 or None


def elapsed_seconds(run: RunView) -> float | None:
    """From the start of the first step to the end of the last, pauses included."""
    times = run.log.known_column("time")
    if not len(times):
        return None
    first_step_s = np.nan_to_num(run.log.column("step_ms")[:1]).sum() / 1e3  # a step is logged at its end
    return float(times.max() - times.min() + first_step_s)


def with_interval(fraction: Any, count: Any) -> str:
    """A fraction in percent with its 95 % interval."""
    known, trials = number_or_none(fraction), int(number_or_none(count) or 0)
    if known is None or not trials:
        return percent(known)
    low, high = wilson_interval(known, trials)
    return f"{percent(known)} ({100 * low:.1f}–{100 * high:.1f})"


def median_range(values: Column) -> tuple[float, float, float] | None:
    """Median, 5th and 95th percentile of the known values."""
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, median, high = (float(value) for value in np.quantile(known, [0.05, 0.5, 0.95]))
    return median, low, high


def phase_times(run: RunView) -> Record | None:
    """Median, 5th and 95th percentile and share of each phase, and whether steps became slower."""
    ms = run.log.known_column("step_ms")
    if not len(ms):
        return None
    columns = {phase: run.log.known_column(f"{phase}_ms") for phase in STEP_PHASES}
    total = sum(float(values.sum()) for values in columns.values())
    fifth = len(ms) // 5
    rows = {
        phase: (*(median_range(values) or (None, None, None)), values.sum() / total if len(values) else None)
        for phase, values in columns.items()
    }
    return {
        "rows": rows,
        "step": median_range(ms),
        "records": max(map(len, columns.values())),
        "first": float(np.median(ms[len(ms) // 20 : fifth])) if len(ms) >= 100 else None,
        "last": float(np.median(ms[-fifth:])) if len(ms) >= 100 else None,
    }


def temperature_extremes(run: RunView) -> list[tuple[float, float, float]] | None:
    """Value, step and line of the first, the last and the lowest temperature."""
    columns = [run.log.column(name) for name in ("temperature", "step", "line")]
    known = np.flatnonzero(np.isfinite(columns[0]))
    if len(known) < 2:
        return None
    rows = np.stack(columns)[:, [known[0], known[-1], int(np.nanargmin(columns[0]))]].T
    return [(float(value), float(step), float(line)) for value, step, line in rows]


def gradient_flow(run: RunView) -> Record | None:
    """By block: the first, the median and the last gradient norm, and the last relative to the weights."""
    records = run.log.known_records("diagnostics", "grad_norms")
    if not records:
        return None
    first, last, weights = records[0], records[-1], records[-1].get("weight_norms") or {}
    rows = {}
    for name, norm in last["grad_norms"].items():
        norms = [record["grad_norms"].get(name) for record in records]
        known = [norm for norm in norms if norm is not None]
        ratio = f"{norm / weights[name]:.1e}" if norm is not None and weights.get(name) else UNKNOWN
        rows[name] = (norms[0], float(np.median(known)) if known else None, norm, ratio)
    by_norm = sorted((norm, name) for name, norm in last["grad_norms"].items() if norm)
    extremes = (by_norm[0], by_norm[-1]) if by_norm else None
    return {"rows": rows, "first": first, "last": last, "count": len(records), "extremes": extremes}


def draw_examples(run: RunView, folder: Path) -> Record:
    """Queries by group (errors, sample), each group with its figure."""
    retrievals = run.retrievals()
    groups = {}
    for group, limit in (("errors", 6), ("sample", 4)):
        queries = [query for query in retrievals.get("queries", ()) if query["group"] == group][:limit]
        if queries:
            figure = figures.draw_retrievals(queries, retrievals["shown"], folder / f"{group}.png")
            groups[group] = {"queries": queries, "figure": figure}
    return {"groups": groups, "step": retrievals.get("step")}


def largest(records: Iterable[Record], key: str) -> float | None:
    known = [value for record in records if (value := number_or_none(record.get(key))) is not None]
    return max(known, default=None)


def thin_out(records: list[Record]) -> list[Record]:
    """At most MAX_ROWS records at equal distances, with the first and the last."""
    if len(records) <= MAX_ROWS:
        return records
    return [records[index] for index in np.linspace(0, len(records) - 1, MAX_ROWS).astype(int)]


def step_gaps(run: RunView) -> list[str]:
    """Ranges of steps that are not logged."""
    steps = run.log.column("step")
    ends = np.flatnonzero(np.diff(steps) > 1)
    return [f"{steps[end] + 1:,.0f} to {steps[end + 1] - 1:,.0f}" for end in ends]


def is_comparable(runs: Sequence[RunView]) -> bool:
    """Whether all were evaluated on the same split of the same data."""
    images = {run.log.last("eval").get("images") for run in runs}
    data = {(str(run.config.get("data")), str(run.data.get("identity"))) for run in runs}
    return len(images) == len(data) == 1 and None not in images


def setting_differences(runs: Sequence[RunView]) -> list[list[str]]:
    settings = [
        flatten(run.config)
        | {f"data.{key}": run.data.get(key) for key in ("identity", "train", "val")}
        | flatten(run.machine, "machine.")
        for run in runs
    ]
    names = dict.fromkeys(name for each in settings for name in each)
    rows = ([name, *(str(each.get(name, UNKNOWN)) for each in settings)] for name in names)
    return [row for row in rows if len(set(row[1:])) > 1]


def ranking(runs: Sequence[RunView]) -> Record | None:
    """The best two runs by mean R@1, and whether their difference is significant (95 %)."""
    scored = [(run.log.last("eval").get("mean_r1"), run.name) for run in runs]
    ordered = sorted(((score, name) for score, name in scored if score is not None), reverse=True)
    if len(ordered) < 2 or not is_comparable(runs):
        return None
    (first, best), (second, runner_up) = ordered[:2]
    images = max(1, int(runs[0].log.last("eval")["images"]))
    pooled = (first + second) / 2
    error = math.sqrt(max(1e-12, 2 * pooled * (1 - pooled) / images))
    names_and_scores = {"best": best, "best_score": first, "runner_up": runner_up, "runner_up_score": second}
    return {**names_and_scores, "images": images, "significant": first - second > 1.959964 * error}


def common_score(runs: Sequence[RunView]) -> float | None:
    """The highest mean R@1 that every run reached."""
    scores = [largest(run.log.records["eval"], "mean_r1") for run in runs]
    known = [score for score in scores if score is not None]
    return min(known) if len(known) == len(scores) else None


def seconds_to_score(run: RunView, goal: float | None) -> float | None:
    """Seconds of training steps until the first evaluation with that score."""
    reached = run.log.record_column("eval", "mean_r1") >= (math.nan if goal is None else goal)
    steps = run.log.record_column("eval", "step")[reached]
    return float(minutes_at(run.log, steps[:1])[0] * 60) if len(steps) else None


def thousands(value: Any) -> Any:
    """A number with all its digits; other values as they are."""
    return value if number_or_none(value) is None else f"{value:,.10g}"


def repeat_command(run: RunView) -> str:
    return f"`m1clip train --config {shlex.quote(str(run.path / 'config.json'))} --name again`"


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(number, percent, duration, gigabytes, watt_hours, local_time, thousands, event_text, with_interval),
    *(chance_level, wilson_interval, median_range, largest, thin_out, flatten, step_gaps),
    *(step_seconds, elapsed_seconds, seconds_to_score, repeat_command),
)
TEMPLATE_FUNCTIONS = {function.__name__: function for function in FUNCTIONS}
