"""How results look on stdout, wherever they come from."""

from rich.console import Console
from rich.table import Table

from m1clip.evals.negatives import CHANCE, EditScore
from m1clip.evals.retrieval import AT, Retrieval


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def table(title: str, *columns: str) -> Table:
    made = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", header_style="dim")
    return made


def show(made: Table) -> None:
    Console(highlight=False).print(made)


def show_retrieval(scores: Retrieval) -> None:
    made = table(
        f"held-out retrieval: {scores.pictures:,} pictures, {scores.captions:,} captions",
        *("", "R@1", "R@5", "R@10", "median rank"),
    )
    for name, way in (("image→text", scores.image_to_text), ("text→image", scores.text_to_image)):
        made.add_row(name, percent(way.r1), percent(way.r5), percent(way.r10), f"{way.median_rank:g}")
    guess = (percent(scores.chance(at)) for at in AT)
    made.add_row("chance", *guess, f"{(scores.pictures + 1) / 2:g}", style="dim")
    show(made)


def show_edits(scores: list[EditScore]) -> None:
    made = table(
        "one word changed: does the picture prefer its true caption?", "changed word", "right", "captions"
    )
    for score in scores:
        made.add_row(score.changed, percent(score.accuracy), f"{score.edits}")
    made.add_row("chance", percent(CHANCE), "", style="dim")
    show(made)
