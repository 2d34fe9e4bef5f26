"""The pictures of a sweep, from its rows alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from m1clip.advisor import plan_of
from m1clip.bench.crossover import Crossing
from m1clip.bench.sweep import peaks
from m1clip.devices import Plan

Row = dict[str, Any]
# Told apart also by those who see few colours (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#000000")
PHASES = {"copy": "#7A7A7A", "forward": "#56B4E9", "backward": "#0072B2", "optimiser": "#E69F00"}
TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 20)  # times as fast
plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def axes(columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    figure, made = plt.subplots(1, columns, figsize=(width, height), constrained_layout=True, squeeze=False)
    for one in made[0]:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(made[0])


def log_axis(one: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    axis = one.xaxis if which == "x" else one.yaxis
    (one.set_xscale if which == "x" else one.set_yscale)("log")
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    if ticks is not None:
        axis.set_ticks(list(ticks))
        axis.set_minor_locator(NullLocator())
        (one.set_xlim if which == "x" else one.set_ylim)(min(ticks) / 1.5, max(ticks) * 1.5)


def by_size(rows: Sequence[Row]) -> list[str]:
    sizes = {row["preset"]: row["parameters"] for row in rows}
    return sorted(sizes, key=lambda name: sizes[name])


def colours(rows: Sequence[Row]) -> dict[Plan, str]:
    plans = dict.fromkeys(plan_of(row) for row in rows)
    return {plan: COLOURS[i % len(COLOURS)] for i, plan in enumerate(plans)}


def throughput(rows: Sequence[Row], path: Path) -> Path:
    """Pairs a second over the batch, a panel for each model and a line for each plan."""
    presets, colour = by_size(rows), colours(rows)
    figure, panels = axes(len(presets), 1.6 + 2.9 * len(presets), 3.9)
    for panel, name in zip(panels, presets, strict=True):
        mine = [row for row in rows if row["preset"] == name]
        for plan in dict.fromkeys(plan_of(row) for row in mine):
            line = sorted((row for row in mine if plan_of(row) == plan), key=lambda row: row["batch"])
            x = np.array([row["batch"] for row in line])
            y = np.array([row["pairs_per_s"] for row in line])
            spread = [
                y - [1e3 * r["batch"] / r["high_ms"] for r in line],
                [1e3 * r["batch"] / r["low_ms"] for r in line] - y,
            ]
            panel.errorbar(
                x, y, np.abs(spread), color=colour[plan], marker="o", markersize=4, capsize=3, label=str(plan)
            )
        panel.set_title(f"{name}, {mine[0]['parameters'] / 1e6:.3g} M", fontsize=10)
        panel.set_xlabel("batch")
        log_axis(panel, "x", sorted({row["batch"] for row in mine}))
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("pairs a second")
    handles = {
        label: handle
        for one in panels
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    return save(figure, path)


def ratios(rows: Sequence[Row], found: Sequence[Crossing], path: Path) -> Path:
    """How much faster each plan is than the first of its contest, over the batch; crossings are marked."""
    presets, colour = by_size(rows), colours(rows)
    presets = [
        name for name in presets if len({r["batch"] for r in rows if r["preset"] == name}) > 1
    ] or presets
    figure, panels = axes(len(presets), 1.6 + 2.9 * len(presets), 3.9)
    for panel, name in zip(panels, presets, strict=True):
        mine = [row for row in rows if row["preset"] == name]
        first: dict[str, Row] = {}
        for row in mine:
            first.setdefault(row["contest"], row)
        base = plan_of(mine[0])
        for plan in dict.fromkeys(plan_of(row) for row in mine):
            line = sorted((row for row in mine if plan_of(row) == plan), key=lambda row: row["batch"])
            y = [first[row["contest"]]["step_ms"] / row["step_ms"] for row in line]
            panel.plot(
                [row["batch"] for row in line],
                y,
                color=colour[plan],
                marker="o",
                markersize=4,
                label=str(plan),
            )
        for one in found:
            if one.along == "batch" and one.of == name and one.at and base in (one.first, one.second):
                other = one.second if one.first == base else one.first
                panel.axvspan(one.low or one.at, one.high or one.at, color=colour[other], alpha=0.15, lw=0)
                panel.axvline(one.at, color=colour[other], ls=":", lw=1.2)
        panel.set_title(f"{name}, against {base}", fontsize=10)
        panel.set_xlabel("batch")
        log_axis(panel, "x", sorted({row["batch"] for row in mine}))
        log_axis(panel, "y")
        low, high = panel.get_ylim()
        shown = [t for t in TICKS if low <= t <= high or t == 1]
        panel.set_yticks(shown, [f"{t:g}×" for t in shown])
        panel.yaxis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("speed")
    handles = {
        label: handle
        for one in panels
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    return save(figure, path)


def phases(rows: Sequence[Row], path: Path) -> Path:
    """What a step's time is made of, for the plain plan of each device."""
    shown = [row for row in rows if plan_of(row) == Plan(row["device"]) and "=" not in row["device"]]
    shown.sort(key=lambda row: (row["device"], row["parameters"], row["batch"]))
    figure, (panel,) = axes(1, 9.5, 0.9 + 0.3 * len(shown))
    many = len({row["device"] for row in shown}) > 1
    names = [
        f"{row['preset']}, batch {row['batch']}" + (f", {row['device']}" if many else "") for row in shown
    ]
    left = np.zeros(len(shown))
    whole = np.array([sum(row["phases_ms"].values()) for row in shown])
    for phase, colour in PHASES.items():
        part = np.array([row["phases_ms"].get(phase, 0.0) for row in shown]) / whole * 100
        bars = panel.barh(names, part, left=left, color=colour, label=phase)
        words = [f"{value:.0f} %" if value >= 6 else "" for value in part]
        panel.bar_label(
            bars, words, label_type="center", fontsize=8, color="white" if phase == "backward" else "black"
        )
        left += part
    for number, row in enumerate(shown):
        panel.text(101, number, f"{row['step_ms']:,.0f} ms", va="center", fontsize=8)
    panel.set_xlim(0, 100)
    panel.invert_yaxis()
    panel.grid(visible=False)
    panel.set_xlabel("part of the step, %")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return save(figure, path)


def roofline(operations: Sequence[Row], steps: Sequence[Row], path: Path) -> Path:
    """GFLOP/s over FLOP a byte: the roofs are the best product, and the most that copying or AdamW moved."""
    best = peaks(operations)
    names = list(dict.fromkeys(row["device"] for row in operations))
    figure, panels = axes(len(names), 1.5 + 5.5 * len(names), 4.6)
    for panel, name in zip(panels, names, strict=True):
        peak = best[name, "fp32"]
        mine = [row for row in operations if row["device"] == name and row["precision"] == "fp32"]
        band = max(row["gb_per_s"] for row in mine if row["operation"] in ("copy", "AdamW"))
        x = np.geomspace(1, 3000, 200)
        panel.plot(x, np.minimum(peak, band * x), color="black", lw=1.2)
        panel.text(2500, peak * 1.12, f"best product: {peak:,.0f} GFLOP/s", ha="right", fontsize=8)
        slope: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
        panel.text(1.05, band * 1.15, f"moving: {band:.0f} GB/s", fontsize=8, **slope)
        for kind, marker, colour in (("product", "s", COLOURS[0]), ("attention", "D", COLOURS[2])):
            some = [row for row in mine if row["operation"] == kind]
            panel.plot(
                [r["flop_per_byte"] for r in some],
                [r["gflops"] for r in some],
                marker,
                color=colour,
                label=kind,
            )
            for row in some if kind == "product" else []:
                panel.annotate(
                    row["size"],
                    (row["flop_per_byte"], row["gflops"]),
                    (4, -9),
                    textcoords="offset points",
                    fontsize=7,
                )
        plain_steps = [row for row in steps if plan_of(row) == Plan(name)]
        for row, colour in zip(plain_steps, [COLOURS[1]] * len(plain_steps), strict=True):
            panel.plot(intensity(row), rate(row), "o", color=colour, markersize=5)
        for preset in by_size(plain_steps):
            row = max((r for r in plain_steps if r["preset"] == preset), key=lambda r: r["batch"])
            panel.annotate(
                f"{preset} {row['batch']}",
                (intensity(row), rate(row)),
                (5, -3),
                textcoords="offset points",
                fontsize=8,
                color=COLOURS[1],
            )
        panel.plot([], [], "o", color=COLOURS[1], label="training step")
        log_axis(panel, "x")
        log_axis(panel, "y")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("FLOP for each byte moved")
        panel.set_ylabel("GFLOP/s")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    return save(figure, path)


def intensity(row: Row) -> float:
    """FLOPs of a step for each byte that it must move: activations written and read, and the state's passes.

    The state is 16 bytes a parameter, of which weights are read twice, gradients written and read, and the
    update reads and writes nearly all: ten passes of 4 bytes.
    """
    moved = 2 * row["activation_gb"] * row["batch"] + 40e-9 * row["parameters"]
    return float(row["gflop"] * row["batch"] / moved)


def rate(row: Row) -> float:
    return float(row["gflop"] * row["batch"] / row["step_ms"] * 1e3)
