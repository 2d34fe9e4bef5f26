"""Documents: text from outside stays text, in the Markdown and in the HTML."""

import random
import re
from html.parser import HTMLParser

import pytest

from m1clip.document import PACKAGE, escape_markdown, markdown_table, render_html, render_template, write_document

PIECES = ["`", "``", "\\", "|", "*", "_", "[", "]", "(", ")", "<", ">", "&", "#", "-", "+", "=", "1.", "~", "!", "a"]
PIECES += [" ", "    ", "x_y", "&lt;", "<b>", "[x](http://y)", "![x](y)", "\n", "\u2028", "$", ":", "---"]


class Text(HTMLParser):
    def __init__(self, html):
        super().__init__()
        self.text, self.tags = "", set()
        self.feed(html)

    def handle_data(self, data):
        self.text += data

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)


def normalize(text):
    return " ".join(text.split())


@pytest.mark.parametrize("template", ["{}", "- {}", "a {} b {}", "> {}", "## {}", "table"])
def test_random_text_renders_as_itself_wherever_it_is_put(template, tmp_path):
    rng = random.Random(0)
    for _ in range(1500):
        value = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8)))
        expected = re.sub(r"(?<!`)`([^`|]+)`(?!`)", r"\1", " ".join(value.splitlines()))  # code
        if template == "table":
            markdown, expected = markdown_table(["c"], [[value]]), "c " + expected
        else:
            escaped = escape_markdown(value)
            markdown = template.replace("{}", escaped)
            expected = template.removeprefix("- ").removeprefix("> ").removeprefix("## ").replace("{}", expected)
        page = Text(render_html(markdown, tmp_path))
        assert not page.tags - {
            "p",
            "ul",
            "li",
            "code",
            "blockquote",
            "h2",
            "table",
            "thead",
            "tbody",
            "tr",
            "th",
            "td",
        }
        if template != "a {} b {}":  # there two values may form one code span
            assert normalize(page.text) == normalize(expected), value


def test_a_document_has_all_its_parts_in_both_files(tmp_path, monkeypatch):
    (tmp_path / "figure.png").write_bytes(b"PNG")
    (tmp_path / "document.html").write_text((PACKAGE / "document.html").read_text())
    parts = ["## Results", "Run `m1clip train`.", "> a note", "- one\n- {{ point }}", "{{ table(*cells) }}"]
    (tmp_path / "t.j2").write_text("\n\n".join([*parts, "![a figure](figure.png)"]))
    monkeypatch.setattr("m1clip.document.PACKAGE", tmp_path)
    cells = (["name", "value"], [["a|b", "1"], ["c", "2.5"]])
    page = write_document(tmp_path, "doc", "a <title> & more", "t.j2", point="# two", cells=cells).read_text()
    markdown = (tmp_path / "doc.md").read_text()
    assert markdown.split("\n\n") == [
        "# a &lt;title&gt; &amp; more",
        "## Results",
        "Run `m1clip train`.",
        "> a note",
        "- one\n- \\# two",
        "| name | value |\n| --- | ---: |\n| a\\|b | 1 |\n| c | 2.5 |",
        "![a figure](figure.png)\n",
    ]
    assert "<title>a &lt;title&gt; &amp; more</title>" in page
    assert "<code>m1clip train</code>" in page
    assert "<td>a|b</td>" in page
    assert '<td style="text-align:right">2.5</td>' in page
    assert 'src="data:image/png;base64,UE5H"' in page


def test_values_of_a_template_are_escaped_and_unknown_ones_are_a_dash(tmp_path, monkeypatch):
    monkeypatch.setattr("m1clip.document.PACKAGE", tmp_path)
    (tmp_path / "t.j2").write_text(
        "{{ name }}: {{ record.loss }}, {{ record.a.b }}, {{ none }}\n\n\n\n{{ table(['x'], [['1']]) }}"
    )
    text = render_template("t.j2", name="*<b>*", record={"loss": 0.5}, none=None)
    assert text == "\\*&lt;b&gt;\\*: 0.5, –, –\n\n| x |\n| ---: |\n| 1 |"
