"""The style of all figures: panels, colors, log axes, legends. No torch."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

matplotlib.rcParams["text.parse_math"] = False  # a caption with two dollar signs is not a formula
# Distinguishable with color blindness (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#000000")


def save_figure(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks is drawn as a box
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def axes(count: int, width: float, height: float, columns: int = 3) -> tuple[Figure, list[Axes]]:
    """Panels of one size in inches, at most `columns` in a row."""
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (columns * width, rows * height)
    figure, grid = plt.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    for index, panel in enumerate(grid.flat):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_visible(index < count)
    return figure, list(grid.flat)[:count]


def log_axis(panel: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    axis = panel.xaxis if which == "x" else panel.yaxis
    (panel.set_xscale if which == "x" else panel.set_yscale)("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.5)))  # labels only if there are few powers of ten
    if ticks is not None:
        axis.set_ticks(list(ticks))
        axis.set_minor_locator(NullLocator())
        (panel.set_xlim if which == "x" else panel.set_ylim)(min(ticks) / 1.5, max(ticks) * 1.5)


def annotate(panel: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    panel.annotate(text, at, shift, textcoords="offset points", **{"fontsize": 8, **style})


def legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend for all panels, above them."""
    entries = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels]
    handles = {label: handle for panel_entries in entries for handle, label in panel_entries}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
