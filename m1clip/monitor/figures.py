"""The figures of a report, from the runs' own files."""

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
from m1clip.monitor.log import Column, Followed, number
from m1clip.monitor.values import interval
from m1clip.plots import COLORS, PHASES, axes, legend, save

MOST = 1500
GREY = COLORS[6]


def line(panel: Axes, one: Followed, key: str, style: dict[str, Any], over: str = "step") -> None:
    """A curve; one of steps is the mean of a hundredth of them, the steps themselves faint behind it."""
    x, y = curves.points(one.log, key, over, 0)
    scale = 100 if curves.CURVES[key].unit == "%" else 1
    if curves.CURVES[key].kind != "step":
        panel.plot(x, scale * y, marker="o", ms=3, lw=1.4, **style)
        return
    faint = {**style, "alpha": 0.25, "label": None}
    each_x, each_y = curves.points(one.log, key, over)
    panel.plot(*thin(each_x, scale * each_y), lw=0.7, **faint)
    panel.plot(*thin(x, scale * y), lw=1.5, **style)


def thin(x: Column, y: Column) -> tuple[Column, Column]:
    return curves.thinned(x, y, MOST)


def dress(panel: Axes, runs: Sequence[Followed], key: str, over: str = "step") -> None:
    """Title, unit, and what guessing gives."""
    about = curves.CURVES[key]
    panel.set_title(about.title, fontsize=10)
    panel.set_xlabel("minutes of training" if over == "minutes" else "step")
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"))
    if about.unit:
        panel.set_ylabel(about.unit)
    for guess in {curves.chance(one.log, key) for one in runs} - {None}:
        level = 100 * (guess or 0) if about.unit == "%" else guess or 0
        panel.axhline(level, color=GREY, lw=1, ls="--", label="chance")


def learning(one: Followed, path: Path) -> Path:
    """Loss, accuracy, validation recall with its interval, rate, gradient norm, speed."""
    keys = ("loss", "accuracy", "mean_r1", "lr", "grad_norm", "pairs_per_s")
    figure, panels = axes(len(keys), 4.2, 2.7)
    for panel, key in zip(panels, keys, strict=True):
        line(panel, one, key, {"color": COLORS[0], "label": one.name})
        dress(panel, [one], key)
    rows = [row for row in one.log.records["eval"] if row.get("mean_r1") is not None and row.get("images")]
    if rows:
        ends = np.array([interval(row["mean_r1"], int(row["images"])) for row in rows])
        steps = [row["step"] for row in rows]
        panels[2].fill_between(steps, 100 * ends[:, 0], 100 * ends[:, 1], color=COLORS[0], alpha=0.15, lw=0)
    legend(figure, panels[:1])
    return save(figure, path)


def timing(one: Followed, path: Path) -> Path:
    """What a step takes as the run goes on, and its parts stacked."""
    figure, (first, second) = axes(2, 5.2, 2.9)
    line(first, one, "step_ms", {"color": COLORS[0]})
    dress(first, [one], "step_ms")
    known = one.log.column("step_ms")
    known = known[np.isfinite(known)]
    if len(known):
        first.set_ylim(0, 1.3 * float(np.quantile(known, 0.99)))
    left = 0.0
    for phase, color in PHASES.items():
        part = one.log.column(f"{phase}_ms")
        part = part[np.isfinite(part)]
        if not len(part):
            continue
        middle = float(np.median(part))
        second.barh([0], [middle], left=left, color=color, label=f"{phase} {middle:.3g} ms")
        left += middle
    second.set_yticks([])
    second.set_ylim(-0.8, 1.6)
    second.set_title("a step: medians of its phases", fontsize=10)
    second.set_xlabel("ms")
    second.grid(visible=False)
    second.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    return save(figure, path)


def temperature(one: Followed, path: Path) -> Path:
    figure, (panel,) = axes(1, 7.0, 2.6)
    line(panel, one, "temperature", {"color": COLORS[0]})
    dress(panel, [one], "temperature")
    return save(figure, path)


def flow(one: Followed, path: Path) -> Path:
    """Gradient norms by block over the steps that were looked at."""
    rows = [row for row in one.log.records["logger"] if row.get("grad_norms")]
    rows = [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, 200).astype(int))]
    blocks = list(rows[-1]["grad_norms"])
    norm = np.array([[number(row["grad_norms"].get(block)) for row in rows] for block in blocks])
    figure, (panel,) = axes(1, 8.0, 1.2 + 0.22 * len(blocks))
    shown = np.log10(np.where(norm > 0, norm, np.nan))
    drawn = panel.imshow(shown, aspect="auto", cmap="cividis", interpolation="nearest")
    panel.set_yticks(range(len(blocks)), blocks, fontsize=8)
    places = np.unique(np.linspace(0, len(rows) - 1, min(8, len(rows))).astype(int))
    panel.set_xticks(places, [f"{rows[place]['step']:,}" for place in places])
    panel.set_xlabel("step")
    panel.grid(visible=False)
    bar = figure.colorbar(drawn, ax=panel, format=FuncFormatter(lambda value, _: f"{10**value:.2g}"))
    bar.set_label("gradient norm")
    return save(figure, path)


def retrievals(queries: Sequence[dict[str, Any]], shown: dict[str, Any], path: Path) -> Path:
    """A row for each caption: the images found first, the true one framed, or last if not among them."""
    wide = 1 + max(len(query["top"]) for query in queries)
    figure, panels = axes(wide * len(queries), 1.4, 1.75, wide)
    for panel in panels:
        panel.set_axis_off()
    for row, query in enumerate(queries):
        hits = list(query["top"])
        if query["rank"] > len(hits):
            hits.append({"row": query["truth"], "score": query["true_score"]})
        words = query["text"] if len(query["text"]) < 100 else query["text"][:97] + "…"
        for place, hit in enumerate(hits):
            panel, true = panels[row * wide + place], hit["row"] == query["truth"]
            note = "true" if true else "same words" if hit.get("same_caption") else ""
            note = f"{query['rank'] if true else place + 1}. {hit['score']:.3f} {note}"
            panel.set_title(f"\n{note}", fontsize=8, loc="left")
            if place == 0:  # the caption reaches over its neighbours
                panel.text(0, 1.17, words, transform=panel.transAxes, fontsize=8).set_in_layout(False)
            image = decoded(shown.get(str(hit["row"]), {}).get("jpeg"))
            if image is None:
                panel.text(0.5, 0.5, "no image", ha="center", transform=panel.transAxes, fontsize=8)
                continue
            panel.imshow(image)
            panel.set_axis_on()
            panel.tick_params(bottom=False, left=False, labelbottom=False, labelleft=False)
            panel.grid(visible=False)
            panel.spines[:].set(visible=True, color=COLORS[2] if true else "#cccccc", linewidth=3 if true else 1)
    return save(figure, path)


def decoded(jpeg: str | None) -> Any:
    try:
        return Image.open(io.BytesIO(base64.b64decode(jpeg or "", validate=True))).convert("RGB")
    except (OSError, ValueError):
        return None


def together(runs: Sequence[Followed], path: Path) -> Path:
    """Loss over steps, loss and validation recall over minutes, temperature: several runs in each."""
    shown = (("loss", "step"), ("loss", "minutes"), ("mean_r1", "minutes"), ("temperature", "step"))
    figure, panels = axes(len(shown), 5.6, 2.9, most=2)
    for panel, (key, over) in zip(panels, shown, strict=True):
        for place, one in enumerate(runs):
            style = {"color": COLORS[place % 6], "ls": "-" if place < 6 else ":", "label": one.name}
            line(panel, one, key, style, over)
        dress(panel, runs, key, over)
    legend(figure, panels[:1])
    return save(figure, path)
