"""m1clip eval: retrieval scores of a run or a saved model."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from m1clip.commands import RunsFolder
from m1clip.console import loading, show_retrieval, show_rows
from m1clip.format import percent
from m1clip.run import Run


@dataclass(frozen=True)
class Args(RunsFolder):
    """Retrieval (R@1/5/10 in both directions, with chance) and, on synthetic data, accuracy by changed word.

    m1clip eval                                     the newest run
    m1clip eval --val-size 5000                     synthetic data: more scenes to choose from
    m1clip eval path/to/model --json                any saved model
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """A run (name or path) or a model folder; by default the newest run."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Data to evaluate on; by default the run's own, or synthetic."""
    val_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of images; by default as in training."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of synthetic scenes; by default the run's."""
    split: Literal["val", "test", "all"] = "val"
    """Validation split, test split if the data has one, or every pair."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Table column with the image; by default as in training, or guessed."""
    caption_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Table column with the caption."""
    caption_from: Literal["auto", "text", "folder", "filename"] | None = None
    """Captions of a folder: .txt files beside the images, folder names, or file names."""
    template: Annotated[str | None, tyro.conf.arg(metavar="TEXT")] = None
    """Caption of images in labelled folders, such as 'a photo of a {}'."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the scores as one line of JSON."""


def main(args: Args) -> None:
    with loading():
        from m1clip import api

    names = ("data", "val_size", "seed", "image_column", "caption_column", "caption_from", "template")
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    result = api.evaluate(args.model, split=args.split, device=args.device, runs=args.runs, **settings)
    scores, edits = result.scores.record(), [asdict(edit) for edit in result.edits]
    if args.json:
        print(json.dumps({"model": str(result.model), **scores, "edits": edits}))
        return
    print(f"{result.model}\n")
    is_own_split = args.split == "val" and not settings  # which the run has compared with its training images
    data = Run(result.model.parent).read_or_empty("data.json") if is_own_split else {}
    show_retrieval(scores, data.get("val_near_duplicates"))
    if result.edits:
        rows = [(edit.changed, percent(edit.accuracy), str(edit.edits)) for edit in result.edits]
        rows.append(("chance", percent(result.edits[0].chance), ""))
        title = "\none word changed: is the original caption closer to the image?"
        show_rows(title, ("changed word", "accuracy", "captions"), rows)
