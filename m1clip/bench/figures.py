"""The images of a sweep, from its rows alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from m1clip.bench.crossover import Crossing
from m1clip.bench.sweep import peaks
from m1clip.devices import Plan
from m1clip.estimates import plan_of
from m1clip.plots import COLORS, PHASES, axes, legend, log_axis, note, save

Row = dict[str, Any]
TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2, 3, 5, 10, 20)  # times as fast


def lines_of(rows: Sequence[Row]) -> dict[Plan, list[Row]]:
    """The rows of each plan, by batch."""
    plans = dict.fromkeys(plan_of(row) for row in rows)
    return {
        plan: sorted((row for row in rows if plan_of(row) == plan), key=lambda row: int(row["batch"])) for plan in plans
    }


def by_size(rows: Sequence[Row]) -> list[str]:
    sizes = {row["preset"]: row["parameters"] for row in rows}
    return sorted(sizes, key=lambda name: sizes[name])


def colors(rows: Sequence[Row]) -> dict[Plan, str]:
    plans = dict.fromkeys(plan_of(row) for row in rows)
    return {plan: COLORS[i % len(COLORS)] for i, plan in enumerate(plans)}


def throughput(rows: Sequence[Row], path: Path) -> Path:
    """PairDataset a second over the batch, a panel for each model and a line for each plan."""
    presets, color = by_size(rows), colors(rows)
    figure, panels = axes(len(presets), 3.6 if len(presets) > 1 else 5.5, 3.3)
    for panel, name in zip(panels, presets, strict=True):
        mine = [row for row in rows if row["preset"] == name]
        for plan, line in lines_of(mine).items():
            batch, speed = (np.array([row[key] for row in line]) for key in ("batch", "pairs_per_s"))
            slow, fast = (1e3 * batch / [row[key] for row in line] for key in ("high_ms", "low_ms"))
            spread = np.abs([speed - slow, fast - speed])
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "color": color[plan]}
            panel.errorbar(batch, speed, spread, label=str(plan), **style)
        panel.set_title(f"{name}, {mine[0]['parameters'] / 1e6:.3g} M", fontsize=10)
        panel.set_xlabel("batch")
        log_axis(panel, "x", sorted({row["batch"] for row in mine}))
        panel.set_ylim(bottom=0)
    for panel in panels[::3]:
        panel.set_ylabel("pairs a second")
    legend(figure, panels)
    return save(figure, path)


def ratios(rows: Sequence[Row], found: Sequence[Crossing], path: Path) -> Path:
    """How much faster each plan is than the first of its time_plans, over the batch; crossings are marked."""
    several = [name for name in by_size(rows) if len({r["batch"] for r in rows if r["preset"] == name}) > 1]
    presets, color = several or by_size(rows), colors(rows)
    figure, panels = axes(len(presets), 3.6 if len(presets) > 1 else 5.5, 3.3)
    for panel, name in zip(panels, presets, strict=True):
        mine = [row for row in rows if row["preset"] == name]
        base = plan_of(mine[0])
        first = {row["time_plans"]: row["step_ms"] for row in mine if plan_of(row) == base}
        for plan, line in lines_of(mine).items():
            line = [row for row in line if row["time_plans"] in first]  # the plain plan may have failed in one
            speed = [first[row["time_plans"]] / row["step_ms"] for row in line]
            panel.plot([row["batch"] for row in line], speed, "o-", color=color[plan], ms=4, label=str(plan))
        for one in found:
            if one.along == "batch" and one.of == name and one.at and base in (one.first, one.second):
                other = one.second if one.first == base else one.first
                panel.axvspan(one.low or one.at, one.high or one.at, color=color[other], alpha=0.15, lw=0)
                panel.axvline(one.at, color=color[other], ls=":", lw=1.2)
        panel.set_title(f"{name}, against {base}", fontsize=10)
        panel.set_xlabel("batch")
        log_axis(panel, "x", sorted({row["batch"] for row in mine}))
        log_axis(panel, "y")
        low, high = panel.get_ylim()
        shown = [tick for tick in TICKS if low <= tick <= high or tick == 1]
        panel.set_yticks(shown, [f"{tick:g}×" for tick in shown])
        panel.yaxis.set_minor_locator(NullLocator())
    for panel in panels[::3]:
        panel.set_ylabel("speed")
    legend(figure, panels)
    return save(figure, path)


def phases(rows: Sequence[Row], path: Path) -> Path:
    """What a step's time is made of, for the plain plan of each device."""
    shown = [row for row in rows if plan_of(row) == Plan(row["device"]) and "=" not in row["device"]]
    shown.sort(key=lambda row: (row["device"], row["parameters"], row["batch"]))
    figure, (panel,) = axes(1, 9.5, 1.6 + 0.3 * len(shown))
    many = len({row["device"] for row in shown}) > 1
    names = [f"{row['preset']}, batch {row['batch']}" + (f", {row['device']}" if many else "") for row in shown]
    left = np.zeros(len(shown))
    whole = np.array([sum(row["phases_ms"].values()) for row in shown])
    for phase, color in PHASES.items():
        if not any(phase in row["phases_ms"] for row in shown):
            continue
        part = np.array([row["phases_ms"].get(phase, 0.0) for row in shown]) / whole * 100
        bars = panel.barh(names, part, left=left, color=color, label=phase)
        words = [f"{value:.0f} %" if value >= 6 else "" for value in part]
        panel.bar_label(bars, words, label_type="center", fontsize=8, color="white" if phase == "backward" else "black")
        left += part
    for number, row in enumerate(shown):
        panel.text(101, number, f"{row['step_ms']:,.0f} ms", va="center", fontsize=8)
    panel.set_xlim(0, 100)
    panel.invert_yaxis()
    panel.grid(visible=False)
    panel.set_xlabel("part of the step, %: the plain plan of each device")
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return save(figure, path)


def roofline(operations: Sequence[Row], steps: Sequence[Row], path: Path) -> Path:
    """GFLOP/s over FLOP a byte: the roofs are the best product, and the most that copying or AdamW moved."""
    best = peaks(operations)
    names = [name for name, precision in best if precision == "fp32"]
    figure, panels = axes(len(names), 7.0, 4.6)
    for panel, name in zip(panels, names, strict=True):
        mine = [row for row in operations if row["device"] == name and row["precision"] == "fp32"]
        moved = [row["gb_per_s"] for row in mine if row["operation"] in ("copy", "AdamW")]
        draw_roofs(panel, best[name, "fp32"], max(moved, default=0.0))
        for kind, marker, color in (("product", "s", COLORS[0]), ("attention", "D", COLORS[2])):
            some = [(row["flop_per_byte"], row["gflops"]) for row in mine if row["operation"] == kind]
            panel.plot(*zip(*some, strict=True), marker, color=color, label=kind) if some else None
        for row in mine:
            if row["operation"] == "product":
                note(panel, row["size"], (row["flop_per_byte"], row["gflops"]), (4, -9), fontsize=7)
        plain_steps = lines_of(steps).get(Plan(name), [])
        points = [(intensity(row), rate(row)) for row in plain_steps]
        panel.plot(*zip(*points, strict=True), "o", color=COLORS[1], ms=5, label="step") if points else None
        for preset in by_size(plain_steps):  # the largest batch of each
            row = [row for row in plain_steps if row["preset"] == preset][-1]
            note(panel, f"{preset} {row['batch']}", (intensity(row), rate(row)), (5, -3), color=COLORS[1])
        log_axis(panel, "x")
        log_axis(panel, "y")
        panel.set_title(name, fontsize=10)
        panel.set_xlabel("FLOP for each byte moved")
        panel.set_ylabel("GFLOP/s")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    return save(figure, path)


def draw_roofs(panel: Axes, peak: float, band: float) -> None:
    panel.text(2500, peak * 1.1, f"best product: {peak:,.0f} GFLOP/s", ha="right", fontsize=8, in_layout=False)
    if not band:
        return
    x = np.geomspace(1, 3000, 200)
    panel.plot(x, np.minimum(peak, band * x), color="black", lw=1.2)
    panel.text(1.4, band * 1.1, f"moving: {band:.0f} GB/s", fontsize=8, in_layout=False)


def intensity(row: Row) -> float:
    """FLOPs of a step for each byte that it must move: activations written and read, and the state's passes.

    The state is 16 bytes a parameter, of which weights are read twice, gradients written and read, and the
    update reads and writes nearly all: ten passes of 4 bytes.
    """
    moved = 2 * row["activation_gb"] * row["batch"] + 40e-9 * row["parameters"]
    return float(row["gflop"] * row["batch"] / moved)


def rate(row: Row) -> float:
    return float(row["gflop"] * row["batch"] / row["step_ms"] * 1e3)
