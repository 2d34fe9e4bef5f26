"""A document of headings, paragraphs, tables and pictures, as Markdown and as one HTML file. No torch."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from m1clip.run import write_whole

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
th { color: var(--soft); font-weight: 500; } th:first-child, td:first-child { text-align: left; }
td.words { text-align: left; white-space: normal; min-width: 18rem; }
img { max-width: 100%; height: auto; background: white; border-radius: 4px; }
code { font-size: .92em; } p.note { color: var(--soft); }
"""


@dataclass
class Page:
    title: str
    markdown: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.markdown.append(f"## {text}")
        self.body.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, note: bool = False) -> None:
        self.markdown.append(text)
        self.body.append(f"<p{' class=note' if note else ''}>{html.escape(text)}</p>")

    def points(self, points: Sequence[str]) -> None:
        self.markdown.append("\n".join(f"- {point}" for point in points))
        self.body.append("<ul>" + "".join(f"<li>{html.escape(point)}</li>" for point in points) + "</ul>")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        lines = [columns, ["---"] + ["---:"] * (len(columns) - 1), *rows]
        self.markdown.append("\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines))
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join("<tr>" + "".join(_td(cell) for cell in row) + "</tr>" for row in rows)
        self.body.append(
            f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def picture(self, path: Path, words: str) -> None:
        """Beside the Markdown, inside the HTML."""
        self.markdown.append(f"![{words}]({path.name})")
        data = base64.b64encode(path.read_bytes()).decode()
        self.body.append(f'<p><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"></p>')

    def write(self, folder: Path, name: str) -> Path:
        """Both files; the path of the HTML one."""
        write_whole(
            folder / f"{name}.md", f"# {self.title}\n\n" + "\n\n".join(self.markdown) + "\n", durable=False
        )
        head = (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(self.title)}</title>"
            f'<meta name=viewport content="width=device-width, initial-scale=1"><style>{STYLE}</style>'
        )
        whole = f"{head}<h1>{html.escape(self.title)}</h1>\n" + "\n".join(self.body) + "</html>\n"
        write_whole(folder / f"{name}.html", whole, durable=False)
        return folder / f"{name}.html"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _td(text: str) -> str:
    return f"<td{' class=words' if len(text) > 40 else ''}>{html.escape(text)}</td>"
