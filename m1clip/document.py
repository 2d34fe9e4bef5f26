"""A document as Markdown, and the same as one HTML file with its images embedded. No torch."""

import base64
import html
import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m1clip.files import atomic_write
from m1clip.format import UNKNOWN

PACKAGE = Path(__file__).parent


class Markdown(str):
    """Text that is already Markdown."""


def write_document(folder: Path, name: str, title: str, template: str, **values: Any) -> Path:
    """Write NAME.md and NAME.html with the title and a template; return the path of the HTML file.

    Images of the template must be in the folder.
    """
    markdown = f"# {escape_markdown(title)}\n\n{render_template(template, **values)}\n"
    page = (PACKAGE / "document.html").read_text().replace("BODY", render_html(markdown, folder), 1)
    page = page.replace("TITLE", html.escape(title), 1)
    for suffix, text in (("md", markdown), ("html", page)):
        atomic_write(folder / f"{name}.{suffix}", text, durable=False)
    return folder / f"{name}.html"


def render_template(path: str, **values: Any) -> str:
    """A Jinja template of this package; values are escaped, and a dash where they are unknown.

    Text is escaped, except `code` between backticks and values of class Markdown.
    """
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
    return re.sub(r"\n{3,}", "\n\n", text).strip()


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


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Markdown:
    """A column in which a cell starts with a letter is text, aligned left; numbers are aligned right."""
    is_text = [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]
    alignment = [Markdown("---" if left else "---:") for left in is_text]
    lines = (map(escape_markdown, line) for line in (columns, alignment, *rows))
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def render_html(markdown: str, folder: Path) -> str:
    """HTML with images of the folder embedded; HTML inside the Markdown is shown as text."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    for image in (child for token in tokens for child in token.children or () if child.type == "image"):
        path = folder / str(image.attrs["src"])
        kind, data = mimetypes.guess_type(path)[0], base64.b64encode(path.read_bytes()).decode()
        image.attrs["src"] = f"data:{kind};base64,{data}"
    return str(parser.renderer.render(tokens, parser.options, {}))
