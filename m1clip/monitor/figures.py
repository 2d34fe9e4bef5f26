"""The figures of a report, from the files of the runs."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from PIL import Image

from m1clip.monitor import curves
from m1clip.monitor.log import Record, RunView
from m1clip.plots import COLORS, PHASE_COLORS, axes, legend, log_axis, save_figure

MAX_POINTS = 1500


def draw_curve(panel: Axes, runs: Sequence[RunView], key: str, x_axis: str = "step") -> None:
    """A curve of each run, with title, unit and chance; step values are faint behind their moving average."""
    curve = curves.CURVES[key]
    scale = 100 if curve.unit == "%" else 1
    for index, run in enumerate(runs):
        style: dict[str, Any] = {"color": COLORS[index % 6], "ls": "-" if index < 6 else ":"}
        x, y = curves.curve_points(run.log, key, x_axis, 0)
        if curve.kind != "step":
            panel.plot(x, scale * y, marker="o", ms=3, lw=1.4, label=run.name, **style)
            continue
        raw_x, raw_y = curves.downsample(*curves.curve_points(run.log, key, x_axis), MAX_POINTS)
        panel.plot(raw_x, scale * raw_y, lw=0.7, alpha=0.25, **style)
        x, y = curves.downsample(x, y, MAX_POINTS)
        panel.plot(x, scale * y, lw=1.5, label=run.name, **style)
    for level in {curves.chance_level(run.log, key) for run in runs} - {None}:
        panel.axhline(scale * (level or 0.0), color=COLORS[6], lw=1, ls="--", label="chance")
    panel.set_title(curve.title, fontsize=10)
    panel.set_xlabel("minutes of training" if x_axis == "minutes" else "step")
    if curve.log_axis and any((run.log.known_column(key) > 0).any() for run in runs):
        log_axis(panel, "y")
        panel.set_ylabel("log scale")
    elif curve.unit:
        panel.set_ylabel(curve.unit)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))


def draw_training(run: RunView, path: Path) -> Path:
    """Loss, accuracy, validation recall with its interval, learning rate, gradient norm, speed."""
    keys = ("loss", "accuracy", "mean_r1", "lr", "grad_norm", "pairs_per_s")
    figure, panels = axes(len(keys), 4.2, 2.7)
    for panel, key in zip(panels, keys, strict=True):
        draw_curve(panel, [run], key)
    evals = [record for record in run.log.known_records("eval", "mean_r1") if record.get("images")]
    if evals:
        bounds = np.array([curves.wilson_interval(record["mean_r1"], int(record["images"])) for record in evals])
        steps = [record["step"] for record in evals]
        panels[2].fill_between(steps, *(100 * bounds.T), color=COLORS[0], alpha=0.15, lw=0)
    legend(figure, panels[:1])
    return save_figure(figure, path)


def draw_step_time(run: RunView, path: Path) -> Path:
    """The time of each step, and the median step by phase."""
    figure, (times, phases) = axes(2, 5.2, 2.9)
    draw_curve(times, [run], "step_ms")
    known = run.log.known_column("step_ms")
    if len(known):
        times.set_ylim(0, 1.3 * float(np.quantile(known, 0.99)))
    left = 0.0
    for phase, color in PHASE_COLORS.items():
        known = run.log.known_column(f"{phase}_ms")
        if len(known):
            median = float(np.median(known))
            phases.barh([0], [median], left=left, color=color, label=f"{phase} {median:.3g} ms")
            left += median
    phases.set_yticks([])
    phases.set_ylim(-0.8, 1.6)
    phases.set_title("median step by phase", fontsize=10)
    phases.set_xlabel("ms")
    phases.grid(visible=False)
    phases.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return save_figure(figure, path)


def draw_temperature(run: RunView, path: Path) -> Path:
    figure, (panel,) = axes(1, 7.0, 2.6)
    draw_curve(panel, [run], "temperature")
    return save_figure(figure, path)


def draw_gradient_flow(run: RunView, path: Path) -> Path:
    """Gradient norms by block over the steps."""
    steps, blocks, norms = curves.gradient_norms(run.log, 200)
    figure, (panel,) = axes(1, 8.0, 1.2 + 0.22 * len(blocks))
    log_norms = np.log10(np.where(norms > 0, norms, np.nan))
    heatmap = panel.imshow(log_norms, aspect="auto", cmap="cividis", interpolation="nearest")
    panel.set_yticks(range(len(blocks)), blocks, fontsize=8)
    ticks = np.unique(np.linspace(0, len(steps) - 1, min(8, len(steps))).astype(int))
    panel.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
    panel.set_xlabel("step")
    panel.grid(visible=False)
    bar = figure.colorbar(heatmap, ax=panel, format=FuncFormatter(lambda value, _: f"{10**value:.2g}"))
    bar.set_label("gradient norm (log scale)")
    return save_figure(figure, path)


def draw_retrievals(queries: Sequence[Record], images: Record, path: Path) -> Path:
    """A row per caption: the top images; the true one has a frame, and is last if it is not among them."""
    columns = 1 + max(len(query["top"]) for query in queries)
    figure, panels = axes(columns * len(queries), 1.4, 1.75, columns)
    for panel in panels:
        panel.set_axis_off()
    for row, query in enumerate(queries):
        hits = list(query["top"])
        if query["rank"] > len(hits):
            hits.append({"row": query["truth"], "score": query["true_score"]})
        caption = query["text"] if len(query["text"]) < 100 else query["text"][:97] + "…"
        row_panels = panels[row * columns : (row + 1) * columns]
        # The caption is wider than its panel, which must not move the others.
        row_panels[0].text(0, 1.17, caption, transform=row_panels[0].transAxes, fontsize=8).set_in_layout(False)
        for index, (panel, hit) in enumerate(zip(row_panels, hits, strict=False)):
            is_true = hit["row"] == query["truth"]
            note = "true" if is_true else "same caption" if hit.get("same_caption") else ""
            rank = query["rank"] if is_true else index + 1
            panel.set_title(f"\n{rank}. {hit['score']:.3f} {note}", fontsize=8, loc="left")
            draw_image(panel, images.get(str(hit["row"]), {}).get("jpeg"), is_true)
    return save_figure(figure, path)


def draw_image(panel: Axes, jpeg: str | None, is_true: bool) -> None:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(jpeg or "", validate=True))).convert("RGB")
    except (OSError, ValueError, TypeError):
        panel.text(0.5, 0.5, "no image", ha="center", transform=panel.transAxes, fontsize=8)
        return
    panel.imshow(np.asarray(image))
    panel.set_axis_on()
    panel.tick_params(bottom=False, left=False, labelbottom=False, labelleft=False)
    panel.grid(visible=False)
    panel.spines[:].set(visible=True, color=COLORS[2] if is_true else "#cccccc", linewidth=3 if is_true else 1)


def draw_comparison(runs: Sequence[RunView], path: Path) -> Path:
    """Loss over steps, loss and validation recall over minutes, temperature: all runs in each."""
    shown = (("loss", "step"), ("loss", "minutes"), ("mean_r1", "minutes"), ("temperature", "step"))
    figure, panels = axes(len(shown), 5.6, 2.9, columns=2)
    for panel, (key, x_axis) in zip(panels, shown, strict=True):
        draw_curve(panel, runs, key, x_axis)
    legend(figure, panels[:1])
    return save_figure(figure, path)
