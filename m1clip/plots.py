"""How our figures look: panels, colors, logarithms, legends. No torch."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

matplotlib.rcParams["text.parse_math"] = False  # a caption with two dollar signs is no formula
# TokenizedCaptions apart also by those who see few colors (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#000000")
PHASES = {
    "wait": "#CC79A7",
    "copy": "#7A7A7A",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#E69F00",
}
plain = FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def save(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a letter the font lacks is a box, and no news to anybody
        figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def axes(panels: int, width: float, height: float, most: int = 3) -> tuple[Figure, list[Axes]]:
    """Panels of one size, at most three, or as many as said, in a row."""
    columns = min(panels, most)
    rows = -(-panels // columns)
    size = (columns * width, rows * height)
    figure, made = plt.subplots(rows, columns, figsize=size, constrained_layout=True, squeeze=False)
    for number, one in enumerate(made.flat):
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
        one.set_visible(number < panels)
    return figure, list(made.flat)[:panels]


def log_axis(one: Axes, which: str, ticks: Sequence[float] | None = None) -> None:
    axis = one.xaxis if which == "x" else one.yaxis
    (one.set_xscale if which == "x" else one.set_yscale)("log")
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    if ticks is not None:
        axis.set_ticks(list(ticks))
        axis.set_minor_locator(NullLocator())
        (one.set_xlim if which == "x" else one.set_ylim)(min(ticks) / 1.5, max(ticks) * 1.5)


def note(panel: Axes, text: str, at: tuple[float, float], shift: tuple[float, float], **style: Any) -> None:
    panel.annotate(text, at, shift, textcoords="offset points", **{"fontsize": 8, **style})


def legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One for all panels, above them."""
    found = [zip(*panel.get_legend_handles_labels(), strict=True) for panel in panels]
    named = {label: handle for some in found for handle, label in some}
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=4, frameon=False, fontsize=9)
