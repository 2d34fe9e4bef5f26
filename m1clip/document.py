"""A document as Markdown, and the same as one HTML file with its images embedded. No torch."""

import base64
import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from m1clip.files import atomic_write
from m1clip.format import UNKNOWN

PACKAGE = Path(__file__).parent


class Markdown(str):
    """Text that is already Markdown."""


class Document:
    """Blocks of Markdown. Text is escaped, except `code` between backticks and values of class Markdown."""

    def __init__(self, title: str):
        self.title = title
        self.blocks = [f"# {escape_markdown(title)}"]

    def heading(self, text: str) -> None:
        self.blocks.append(f"## {escape_markdown(text)}")

    def text(self, text: str, note: bool = False) -> None:
        self.blocks.append(f"{'> ' if note else ''}{escape_markdown(text)}")

    def points(self, points: Iterable[str]) -> None:
        self.blocks.append("\n".join(f"- {escape_markdown(point)}" for point in points))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.blocks.append(markdown_table(columns, rows))

    def image(self, path: Path, alt: str) -> None:
        """The file must be in the folder that the document is written to."""
        self.blocks.append(f"![{escape_markdown(alt)}]({path.name})")

    def template(self, path: str, **values: Any) -> None:
        """Add a Jinja template of this package; values are escaped, and a dash where they are unknown."""
        import jinja2

        class Missing(jinja2.Undefined):
            """A missing key is None, as every unknown value."""

            def __new__(cls, *_: Any, **__: Any) -> None:  # type: ignore[misc]
                return None

        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(PACKAGE),
            finalize=lambda value: escape_markdown(UNKNOWN if value is None else value),
            undefined=Missing,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        text = environment.get_template(path).render(**values, table=markdown_table)
        self.blocks.append(re.sub(r"\n{3,}", "\n\n", text).strip())

    def write(self, folder: Path, name: str) -> Path:
        """Write NAME.md and NAME.html; return the path of the HTML file."""
        markdown = "\n\n".join(self.blocks) + "\n"
        page = (PACKAGE / "document.html").read_text().replace("BODY", render_html(markdown, folder), 1)
        page = page.replace("TITLE", html.escape(self.title), 1)
        atomic_write(folder / f"{name}.md", markdown, durable=False)
        atomic_write(folder / f"{name}.html", page, durable=False)
        return folder / f"{name}.html"


def escape_markdown(value: object) -> Markdown:
    """One line that renders as the same text: nothing in it is read as Markdown or HTML, except `code`."""
    if isinstance(value, Markdown):
        return value
    text = re.sub(r"^\s+", " ", " ".join(str(value).splitlines()))  # four spaces would be a code block
    code = r"(?<!`)`([^`|]+)`(?!`)"
    parts = [f"`{part}`" if index % 2 else _escape(part) for index, part in enumerate(re.split(code, text))]
    return Markdown(re.sub(r"^(\s*\d*)([+=.)-])(?=[\s=-]|$)", r"\1\\\2", "".join(parts)))  # lists, rules


def _escape(text: str) -> str:
    text = re.sub(r"[\\`*\[\]~|#]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)
    return html.escape(text, quote=False)


def text_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold text: those in which a cell starts with a letter. The others hold numbers."""
    return [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """Text is aligned left, numbers right."""
    alignment = [Markdown("---" if is_text else "---:") for is_text in text_columns(rows)]
    lines = (map(escape_markdown, line) for line in (columns, alignment, *rows))
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def render_html(markdown: str, folder: Path) -> str:
    """HTML with images of the folder embedded; HTML inside the Markdown is shown as text."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for image in (child for token in tokens for child in token.children or () if child.type == "image"):
        data = base64.b64encode((folder / str(image.attrs["src"])).read_bytes()).decode()
        image.attrs["src"] = f"data:image/png;base64,{data}"
    return str(parser.renderer.render(tokens, parser.options, {}))
