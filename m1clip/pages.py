"""A document of headings, paragraphs, tables and images, as Markdown and as one HTML file. No torch."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m1clip.files import atomic_write

STYLE = """
:root { color-scheme: light dark; --line: #d8dbe0; --soft: #5d6470; --back: #ffffff; --ink: #1c2128; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a404a; --soft: #9aa3b0; --back: #14171c; --ink: #e4e7ec; } }
body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; background: var(--back); color: var(--ink); }
h1 { font-size: 1.7rem; margin-bottom: .3rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; }
div.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; margin: .8rem 0; }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th { color: var(--soft); font-weight: 500; } 
th.words, td.words { text-align: left; }
img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
code { font-size: .92em; } p, li, code { overflow-wrap: anywhere; }
p.note { color: var(--soft); }
@media (max-width: 40rem) { td.words { white-space: normal; min-width: 5rem; overflow-wrap: anywhere; } }
"""


@dataclass
class Page:
    title: str
    markdown: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.markdown.append(f"## {_plain(text)}")
        self.body.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, note: bool = False) -> None:
        self.markdown.append(_plain(text))
        self.body.append(f"<p{' class=note' if note else ''}>{_inline(text)}</p>")

    def points(self, points: Sequence[str]) -> None:
        self.markdown.append("\n".join(f"- {_plain(point)}" for point in points))
        self.body.append("<ul>" + "".join(f"<li>{_inline(point)}</li>" for point in points) + "</ul>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Words to the left, numbers to the right."""
        words = worded(rows)
        marks = ["---" if word else "---:" for word in words]
        lines = ["| " + " | ".join(map(_cell, line)) + " |" for line in (columns, marks, *rows)]
        self.markdown.append("\n".join(lines))
        head = _tr("th", columns, words)
        body = "".join(_tr("td", row, words) for row in rows)
        self.body.append(f"<div class=wide><table><thead>{head}</thead><tbody>{body}</tbody></table></div>")

    def image(self, path: Path, words: str) -> None:
        """Beside the Markdown, inside the HTML."""
        self.markdown.append(f"![{words}]({path.name})")
        data = base64.b64encode(path.read_bytes()).decode()
        self.body.append(f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>')

    def write(self, folder: Path, name: str) -> Path:
        """Both files; the path of the HTML one."""
        atomic_write(folder / f"{name}.md", f"# {self.title}\n\n" + "\n\n".join(self.markdown) + "\n", durable=False)
        head = (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(self.title)}</title>"
            f'<meta name=viewport content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        )
        whole = f"{head}<h1>{html.escape(self.title)}</h1>\n" + "\n".join(self.body) + "</html>\n"
        atomic_write(folder / f"{name}.html", whole, durable=False)
        return folder / f"{name}.html"


def _inline(text: str) -> str:
    """Escaped, with what stands between backticks as code."""
    parts = html.escape(text).split("`")
    if len(parts) % 2 == 0:
        return html.escape(text)
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _plain(text: str) -> str:
    """One line of Markdown in which words from outside open no tag and no line of their own."""
    return " ".join(text.split("\n")).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _plain(text).replace("\\", "&#92;").replace("|", "\\|")


def _tr(tag: str, cells: Sequence[str], words: Sequence[bool]) -> str:
    """A row of HTML."""
    made = [
        f"<{tag}{' class=words' if word else ''}>{html.escape(cell)}</{tag}>"
        for cell, word in zip(cells, words, strict=True)
    ]
    return f"<tr>{''.join(made)}</tr>"


def worded(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold words: those in which some cell begins with a letter."""
    return [any(cell[:1].isalpha() for cell in column) for column in zip(*rows, strict=True)]
