"""The report of one run and the comparison of several, from the files of the runs alone.

The text and the tables are in templates/; the functions here compute and draw what they show. None: not measured.
"""

import base64
import io
import math
import shlex
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image

from m1clip.document import COLORS, Markdown, axes, legend, log_axis, render_template, save_figure, write_document
from m1clip.files import read_file, read_json, replace_files
from m1clip.format import UNKNOWN, Z, duration, interval, number, percent, wilson_interval, with_interval
from m1clip.monitor.curves import CURVES, downsample, gradient_norms, minutes_at
from m1clip.monitor.log import STEP_PHASES, Array, Record, RunView, event_text, flatten, number_or_none, subsample
from m1clip.monitor.terminal_views import gigabytes, local_time, watt_hours

MAX_POINTS = 1500
MAX_EVALUATIONS, MAX_EVAL_BYTES, MAX_FIGURE_BYTES = 20, 64_000_000, 16_000_000
PHASE_COLORS = [COLORS[index] for index in (3, 6, 5, 0, 4)]
TRAINING_CURVES = [(key, "step") for key in ("loss", "accuracy", "mean_r1", "lr", "grad_norm", "pairs_per_s")]
COMPARISON_CURVES = [("loss", "step"), ("loss", "minutes"), ("mean_r1", "minutes"), ("temperature", "step")]


def write_report(run: RunView, out: Path) -> Path:
    """Write report.md, report.html and figures; return the path of the HTML file."""
    phases, temperatures, gradients = phase_times(run), temperature_extremes(run), gradient_flow(run)
    values = {"run": run, "log": run.log, "phases": phases, "temperatures": temperatures, "gradients": gradients}
    with replace_files(out) as folder:
        if len(run.log) > 1:
            zeroshot = [("zeroshot_accuracy", "step")] if run.log.known_records("eval", "zeroshot_accuracy") else []
            draw_curves([run], TRAINING_CURVES + zeroshot, folder / "training.png", 4.2, 2.7)
        if phases:
            draw_step_time(run, phases["rows"], folder / "step_time.png")
        if temperatures:
            draw_curves([run], [("temperature", "step")], folder / "temperature.png", 10.4, 2.9)
        if gradients:
            draw_gradient_flow(run, folder / "gradients.png")
        values |= {"examples": write_examples(run, folder / "examples"), **TEMPLATE_VALUES}
        values["evaluations"] = [render_evaluation(path, folder) for path in list_evaluations(run)]
        template = "monitor/templates/report.md.j2"
        page = write_document(folder, "report", f"{run.name}: training report", template, **values)
    return out / page.name


def write_comparison(runs: Sequence[RunView], out: Path) -> Path:
    """Write comparison.md, comparison.html and a figure; return the path of the HTML file."""
    values: Record = {"runs": runs, "differences": setting_differences(runs), **TEMPLATE_VALUES}
    if is_comparable(runs):
        values |= {"comparable": True, "goal": common_score(runs), "ranking": ranking(runs)}
    title = " and ".join(run.name for run in runs) + ": comparison"
    with replace_files(out) as folder:
        if any(len(run.log) > 1 for run in runs):
            draw_curves(runs, COMPARISON_CURVES, folder / "comparison.png", 5.6, 2.9)
            values["has_curves"] = True
        page = write_document(folder, "comparison", title, "monitor/templates/comparison.md.j2", **values)
    return out / page.name


def step_seconds(run: RunView) -> float | None:
    return 60 * float(minutes_at(run.log, np.array([math.inf]))[0]) or None


def elapsed_seconds(run: RunView) -> float | None:
    """From the start of the first step to the end of the last, pauses included."""
    times, first_step_ms = run.log.known_column("time"), run.log.known_column("step_ms")[:1].sum()
    return float(np.ptp(times) + first_step_ms / 1e3) if len(times) else None  # a step is logged at its end


def median_range(values: Array) -> tuple[float | None, ...]:
    """Median, 5th and 95th percentile."""
    return tuple(np.quantile(values, [0.5, 0.05, 0.95]).tolist()) if len(values) else (None, None, None)


def phase_times(run: RunView) -> Record | None:
    """Median, 5th and 95th percentile and share of each phase, and whether steps became slower."""
    ms = run.log.known_column("step_ms")
    if not len(ms):
        return None
    columns = {phase: run.log.known_column(f"{phase}_ms") for phase in STEP_PHASES}
    total = sum(float(values.sum()) for values in columns.values())
    shares = {phase: values.sum() / total if len(values) else None for phase, values in columns.items()}
    rows = {phase: (*median_range(values), shares[phase]) for phase, values in columns.items()}
    fifth = len(ms) // 5
    first, last = (ms[len(ms) // 20 : fifth], ms[-fifth:]) if len(ms) >= 100 else (ms[:0], ms[:0])
    medians = {"step": median_range(ms), "first": median_range(first)[0], "last": median_range(last)[0]}
    return {"rows": rows, "records": max(map(len, columns.values())), **medians}


def temperature_extremes(run: RunView) -> list[list[float]] | None:
    """Value, step and line of the first, the last and the lowest temperature."""
    columns = np.stack([run.log.column(name) for name in ("temperature", "step", "line")])
    known = columns[:, np.isfinite(columns[0])]
    return list(known[:, [0, -1, known[0].argmin()]].T.tolist()) if known.shape[1] > 1 else None


def gradient_flow(run: RunView) -> Record | None:
    """By block: the first, the median and the last gradient norm, and the last norm of the weights."""
    records = run.log.known_records("diagnostics", "grad_norms")
    if not records:
        return None
    first, last, rows = records[0], records[-1], {}
    for name, norm in last["grad_norms"].items():
        norms = [record["grad_norms"].get(name) for record in records]
        median = median_range(np.array([known for known in norms if known is not None]))[0]
        rows[name] = (norms[0], median, norm, last.get("weight_norms", {}).get(name))
    by_norm = sorted((norm, name) for name, norm in last["grad_norms"].items() if norm)
    return {"rows": rows, "first": first, "last": last, "count": len(records), "by_norm": by_norm}


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
    settings = []
    for run in runs:
        data = {key: run.data.get(key) for key in ("identity", "train", "val")}
        settings.append(flatten(run.config) | flatten({"data": data, "machine": run.machine}))
    names = dict.fromkeys(chain(*settings))
    rows = ([name, *(str(each.get(name, UNKNOWN)) for each in settings)] for name in names)
    return [row for row in rows if len(set(row[1:])) > 1]


def ranking(runs: Sequence[RunView]) -> Record | None:
    """The best two of comparable runs by mean R@1, and whether their difference is significant (95 %)."""
    scores = [(run.log.last("eval").get("mean_r1"), run.name) for run in runs]
    ranked = sorted(((score, name) for score, name in scores if score is not None), reverse=True)
    if len(ranked) < 2:
        return None
    (first, _), (second, _) = ranked[:2]
    images, pooled = max(1, int(runs[0].log.last("eval")["images"])), (first + second) / 2
    error = math.sqrt(max(1e-12, 2 * pooled * (1 - pooled) / images))
    return {"best": ranked[0], "second": ranked[1], "images": images, "significant": first - second > Z * error}


def common_score(runs: Sequence[RunView]) -> float | None:
    """The highest mean R@1 that every run reached."""
    scores = [run.log.known_column("mean_r1", "eval") for run in runs]
    return min(float(column.max()) for column in scores) if all(map(len, scores)) else None


def seconds_to_score(run: RunView, goal: float | None) -> float | None:
    """Seconds of training steps until the first evaluation with that score."""
    reached = run.log.column("mean_r1", "eval") >= (math.nan if goal is None else goal)
    steps = run.log.column("step", "eval")[reached]
    return float(minutes_at(run.log, steps[:1])[0] * 60) if len(steps) else None


def thousands(value: Any) -> Any:
    """A number with all its digits; other values as they are."""
    return value if number_or_none(value) is None else f"{value:,.10g}"


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(number, percent, duration, gigabytes, watt_hours, local_time, thousands, event_text, with_interval),
    *(wilson_interval, median_range, subsample, flatten, step_gaps),
    *(step_seconds, elapsed_seconds, seconds_to_score, shlex.quote, interval, zip),
)
TEMPLATE_VALUES = {function.__name__: function for function in FUNCTIONS} | {"curves": CURVES}


def draw_curves(runs: Sequence[RunView], shown: list[tuple[str, str]], path: Path, width: float, height: float) -> None:
    """A panel for each curve and its x axis, with all runs."""
    figure, panels = axes(len(shown), width, height, columns=2 if len(shown) == 4 else 3)
    for panel, (key, x_axis) in zip(panels, shown, strict=True):
        draw_curve(panel, runs, key, x_axis)
    if len(panels) > 1:
        legend(figure, panels[:1])
    save_figure(figure, path)


def draw_curve(panel: Axes, runs: Sequence[RunView], key: str, x_axis: str = "step") -> None:
    """A curve of each run, with title, unit and chance; step values are faint behind their moving average."""
    curve = CURVES[key]
    scale = 100 if curve.unit == "%" else 1
    for index, run in enumerate(runs):
        style: dict[str, Any] = {"color": COLORS[index % 6], "ls": "-" if index < 6 else ":"}
        if curve.kind == "step":
            x, y = downsample(*curve.points(run.log, x_axis), MAX_POINTS)
            panel.plot(x, scale * y, lw=0.7, alpha=0.25, **style)
        x, y = downsample(*curve.points(run.log, x_axis, 0), MAX_POINTS)
        panel.plot(x, scale * y, lw=1.5, marker="" if curve.kind == "step" else "o", ms=3, label=run.name, **style)
    if key == "mean_r1" and len(runs) == 1:  # the intervals of several runs would hide each other
        records = [record for record in runs[0].log.known_records("eval", key) if record.get("images")]
        bounds = [wilson_interval(record[key], int(record["images"])) for record in records]
        low, high = 100 * np.array(bounds).reshape(-1, 2).T
        panel.fill_between([record["step"] for record in records], low, high, color=COLORS[0], alpha=0.15, lw=0)
    for level in {curve.chance_level(run.log) for run in runs} - {None}:
        panel.axhline(scale * (level or 0.0), color=COLORS[6], lw=1, ls="--", label="chance")
    panel.set_title(curve.title, fontsize=10)
    panel.set_xlabel("minutes of training" if x_axis == "minutes" else "step")
    if curve.log_axis and any((run.log.known_column(key) > 0).any() for run in runs):
        log_axis(panel, "y")
        panel.set_ylabel("log scale")
    elif curve.unit:
        panel.set_ylabel(curve.unit)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))


def draw_step_time(run: RunView, phase_rows: Record, path: Path) -> None:
    figure, (times, phases) = axes(2, 5.2, 2.9)
    draw_curve(times, [run], "step_ms")
    times.set_ylim(0, 1.3 * float(np.quantile(run.log.known_column("step_ms"), 0.99)))
    left = 0.0
    for (phase, (median, *_)), color in zip(phase_rows.items(), PHASE_COLORS, strict=True):
        if median is not None:
            phases.barh([0], [median], left=left, color=color, label=f"{phase} {median:.3g} ms")
            left += median
    phases.set_title("median step by phase", fontsize=10)
    phases.set(yticks=[], ylim=(-0.8, 1.6), xlabel="ms")
    phases.grid(visible=False)
    if left > 0:
        phases.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    save_figure(figure, path)


def draw_gradient_flow(run: RunView, path: Path) -> None:
    steps, blocks, norms = gradient_norms(run.log, 200)
    figure, (panel,) = axes(1, 10.4, 1.2 + 0.22 * len(blocks))
    log_norms = np.log10(np.where(norms > 0, norms, np.nan))
    heatmap = panel.imshow(log_norms, aspect="auto", cmap="cividis", interpolation="nearest")
    panel.set_yticks(range(len(blocks)), blocks, fontsize=8)
    ticks = subsample(range(len(steps)), 8)
    panel.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
    panel.set_xlabel("step")
    panel.grid(visible=False)
    bar = figure.colorbar(heatmap, ax=panel, format=FuncFormatter(lambda value, _: f"{10**value:.2g}"))
    bar.set_label("gradient norm (log scale)")
    save_figure(figure, path)


def write_examples(run: RunView, folder: Path) -> Record:
    """Queries by group (errors, sample); the images they retrieved are written to the folder."""
    retrievals, groups = run.retrievals(), Record()
    for group, limit in (("errors", 6), ("sample", 4)):
        queries = [query for query in retrievals.get("queries", ()) if query["group"] == group][:limit]
        for index, query in enumerate(queries, 1):
            if query["rank"] > len(query["top"]):  # the true image is last if it is not among the top results
                query["top"].append({"row": query["truth"], "score": query["true_score"]})
            for rank, hit in enumerate(query["top"], 1):
                image, path = retrievals["shown"].get(str(hit["row"]), {}), folder / f"{group}-{index}-{rank}.jpg"
                hit |= {"caption": image.get("caption"), "file": write_image(image.get("jpeg"), path)}
        groups |= {group: queries} if queries else {}
    return {"groups": groups, "step": retrievals.get("step")}


def list_evaluations(run: RunView) -> list[Path]:
    """The folders that `m1clip eval` wrote into the run's, by name."""
    return sorted(file.parent for file in run.path.glob("evals/*/eval.json"))[:MAX_EVALUATIONS]


def render_evaluation(path: Path, folder: Path) -> Record:
    """Name and Markdown of an evaluation; its figures are copied into the folder."""
    figures, prefix = list[str](), f"eval-{path.name}-"
    for file in sorted(file for file in path.iterdir() if file.suffix in (".png", ".jpg") and file.is_file()):
        jpeg = base64.b64encode(read_file(file, MAX_FIGURE_BYTES)).decode()
        if write_image(jpeg, folder / f"{prefix}{file.name}"):
            figures.append(file.name)
    values = {"heading": Markdown("###"), "prefix": prefix, "figures": figures, **TEMPLATE_VALUES}
    try:
        details = read_json(path / "eval.json", MAX_EVAL_BYTES)
        text = render_template("evals/templates/evaluation.md.j2", eval=details, **values)
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, jinja2.TemplateError):
        text = f"`{path / 'eval.json'}` cannot be read."  # it may have been edited, or be of another version
    return {"name": path.name, "text": Markdown(text)}


def write_image(jpeg: str | None, path: Path) -> str | None:
    """Decode base64 into a file; return its path in the report, None if it is not an image."""
    try:
        data = base64.b64decode(jpeg or "", validate=True)
        Image.open(io.BytesIO(data)).verify()
    except (OSError, ValueError, TypeError, SyntaxError, Image.DecompressionBombError):  # SyntaxError: a broken PNG
        return None
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return f"{path.parent.name}/{path.name}"
