"""Result tables that several commands print."""

from typing import TYPE_CHECKING

from m1clip.console import show, table
from m1clip.format import percent

if TYPE_CHECKING:  # imports torch
    from m1clip.evals.edits import EditScore
    from m1clip.evals.retrieval import Retrieval


def show_retrieval(scores: "Retrieval") -> None:
    made = table("", "R@1", "R@5", "R@10", "median rank")
    for name, way in (("image→text", scores.image_to_text), ("text→image", scores.text_to_image)):
        made.add_row(name, percent(way.r1), percent(way.r5), percent(way.r10), f"{way.median_rank:g}")
    chances = {"chance i→t": scores.chance_image_to_text, "chance t→i": scores.chance_text_to_image}
    if scores.chance_image_to_text == scores.chance_text_to_image:
        chances = {"chance": scores.chance_text_to_image}
    for name, chance in chances.items():
        recalls = (percent(chance.r1), percent(chance.r5), percent(chance.r10))
        made.add_row(name, *recalls, f"{chance.median_rank:.1f}", style="dim")
    show(f"validation retrieval: {scores.images:,} images, {scores.captions:,} captions", made)


def show_edits(scores: "list[EditScore]") -> None:
    made = table("changed word", "accuracy", "captions")
    for score in scores:
        made.add_row(score.changed, percent(score.accuracy), f"{score.edits}")
    made.add_row("chance", percent(scores[0].chance), "", style="dim")
    show("one word changed: is the original caption closer to the image?", made)
