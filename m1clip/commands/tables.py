"""How results look on stdout, wherever they come from."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.status import Status
from rich.table import Table

from m1clip.format import percent
from m1clip.pages import worded

if TYPE_CHECKING:  # they bring torch, which --help must not wait for
    from m1clip.evals.edits import EditScore
    from m1clip.evals.retrieval import Retrieval


def loading(what: str = "getting ready") -> Status:
    """A sign of life while torch is imported, or something else is waited for."""
    return Console(stderr=True).status(what)


def command(*words: object) -> str:
    """A command line of this program as it can be typed here: the program may not be on the path."""
    program = ["m1clip"] if shutil.which("m1clip") else [min(os.path.relpath(sys.argv[0]), sys.argv[0], key=len)]
    if program[0].endswith("__main__.py"):
        program = ["python", "-m", "m1clip"]
    return shlex.join([*program, *map(str, words)])


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


def show(title: str, made: Table) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:  # a file has no edge
        console.width = 200
    console.print(f"[bold]{title}[/]", soft_wrap=True)
    console.print(made)


def show_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left_out: str = "–") -> None:
    """A table without the columns in which nothing is known."""
    lines = [list(row) for row in rows]
    kept = [i for i in range(len(columns)) if any(line[i] != left_out for line in lines)]
    made = table(*(columns[i] for i in kept))
    for column, word in zip(made.columns, worded([[line[i] for i in kept] for line in lines]), strict=True):
        column.justify, column.overflow = ("left", "fold") if word else ("right", "ellipsis")
    for line in lines:
        made.add_row(*(line[i] for i in kept))
    if lines:
        show(title, made)


def show_retrieval(scores: "Retrieval") -> None:
    made = table("", "R@1", "R@5", "R@10", "median rank")
    for name, way in (("image→text", scores.image_to_text), ("text→image", scores.text_to_image)):
        made.add_row(name, percent(way.r1), percent(way.r5), percent(way.r10), f"{way.median_rank:g}")
    guesses = {"chance": scores.chance}
    if scores.captions != scores.images:  # an image may find any of its captions
        guesses = {"chance i→t": scores.chance_image_to_text, "chance t→i": scores.chance}
    for name, guess in guesses.items():
        recalls = (percent(guess.r1), percent(guess.r5), percent(guess.r10))
        made.add_row(name, *recalls, f"{guess.median_rank:.1f}", style="dim")
    show(f"validation retrieval: {scores.images:,} images, {scores.captions:,} captions", made)


def show_edits(scores: "list[EditScore]") -> None:
    made = table("changed word", "right", "captions")
    for score in scores:
        made.add_row(score.changed, percent(score.accuracy), f"{score.edits}")
    made.add_row("chance", percent(scores[0].chance), "", style="dim")
    show("one word changed: does the image prefer its true caption?", made)
