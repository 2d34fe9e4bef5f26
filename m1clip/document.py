"""Reports: a document as Markdown and as one HTML file with its images embedded, and the style of figures. No torch."""

import base64
import html
import mimetypes
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from markdown_it import MarkdownIt

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

from m1clip.format import UNKNOWN

PACKAGE = Path(__file__).parent
SPECIAL = re.compile(r"[\\`*\[\]~|#]|(?<![^\W_])_|_(?![^\W_])")  # read as Markdown
matplotlib.rcdefaults()  # a matplotlibrc in the current folder could even run LaTeX
matplotlib.rcParams["text.parse_math"] = False  # a caption with two dollar signs is not a formula
# Distinguishable with color blindness (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A", "#000000")


class Markdown(str):
    """Text that is already Markdown."""


class MissingValue(jinja2.Undefined):
    """A missing key is None, as every unknown value."""

    def __new__(cls, *_: Any, **__: Any) -> None:  # type: ignore[misc]
        return None


def write_document(folder: Path, name: str, title: str, template: str, **values: Any) -> Path:
    """Write NAME.md and NAME.html with the title and a template; return the path of the HTML file.

    Images of the template must be in the folder, which `replace_files` then makes final.
    """
    markdown = f"# {escape_markdown(title)}\n\n{render_template(template, **values)}\n"
    page = (PACKAGE / "document.html").read_text().replace("BODY", render_html(markdown, folder), 1)
    page = page.replace("TITLE", html.escape(title), 1)
    for suffix, text in (("md", markdown), ("html", page)):
        (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8")
    return folder / f"{name}.html"


def render_template(path: str, **values: Any) -> str:
    """A Jinja template of this package; values are escaped, and a dash where they are unknown.

    Text is escaped, except `code` between backticks and values of class Markdown.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(PACKAGE),
        finalize=lambda value: escape_markdown(UNKNOWN if value is None else value),
        undefined=MissingValue,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template(path).render(**values, table=markdown_table)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def escape_markdown(value: object) -> Markdown:
    """One line that renders as the same text: nothing in it is read as Markdown or HTML, except `code`."""
    if isinstance(value, Markdown):
        return value
    text = re.sub(r"^\s+", " ", " ".join(str(value).splitlines()))  # four spaces would be a code block
    parts = re.split(r"(?<!`)(`[^`|]+`)(?!`)", text)  # every second one is code
    parts[::2] = [html.escape(SPECIAL.sub(r"\\\g<0>", part), quote=False) for part in parts[::2]]
    return Markdown(re.sub(r"^(\s*\d*)([+=.)-])(?=[\s=-]|$)", r"\1\\\2", "".join(parts)))  # lists, rules


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """A column in which a cell starts with a letter is text, aligned left; numbers are aligned right."""
    is_text = [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]
    alignment = [Markdown("---" if left else "---:") for left in is_text]
    lines = (map(escape_markdown, line) for line in (columns, alignment, *rows))
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def render_html(markdown: str, folder: Path) -> str:
    """HTML with images of the folder embedded; HTML inside the Markdown is shown as text."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for image in (child for token in tokens for child in token.children or () if child.type == "image"):
        path = folder / str(image.attrs["src"])
        kind, data = mimetypes.guess_type(path)[0], base64.b64encode(path.read_bytes()).decode()
        image.attrs["src"] = f"data:{kind};base64,{data}"
    return str(parser.renderer.render(tokens, parser.options, {}))


def save_figure(figure: Figure, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a character that the font lacks is drawn as a box
        figure.savefig(path, dpi=130)
    plt.close(figure)


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
