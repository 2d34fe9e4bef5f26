"""m1clip eval: a run or a saved model, on validation pairs."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from m1clip import run as runs
from m1clip.commands import flags, tables
from m1clip.config import TrainConfig, from_json

if TYPE_CHECKING:
    from m1clip.data.batches import Batch
    from m1clip.data.rows import PairDataset
    from m1clip.data.sources import Source
    from m1clip.data.splits import Split
    from m1clip.model.clip import CLIP


@dataclass(frozen=True)
class Args:
    """validation retrieval (R@1/5/10 both ways, with chance) and, on built-in data, one-word edits.

    m1clip eval                                     the newest run
    m1clip eval runs/mine --val-size 5000           a harder test: more images to choose from
    m1clip eval path/to/model --json                any saved model
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """A run (name or path) or a model folder; by default the newest run."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Whose validation pairs: by default those of the run; for a model from elsewhere, synthetic."""
    val: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many pairs; by default the run's number, or 240."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Which scenes are drawn; by default the run's seed, or 0."""
    split: Literal["val", "test", "all"] = "val"
    """Which side: what the run validation, the test list where the data has one, or every pair."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The column of a table that names the image; by default as for the run, or guessed."""
    caption_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The column that holds the caption."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    json: bool = False
    """Print the figures as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.read(Args, prog, words)


def main(args: Args) -> int:
    folder, trained = find(args)
    with tables.loading():
        from m1clip import devices
        from m1clip.console import Console
        from m1clip.data.rows import BadRows
        from m1clip.data.sources import open_sources, validation_subset
        from m1clip.data.splits import Split, open_eval_split
        from m1clip.devices import Plan
        from m1clip.evals.edits import edit_scores, is_editable
        from m1clip.evals.embed import embed_pairs
        from m1clip.evals.retrieval import retrieval
        from m1clip.model.clip import load
        from m1clip.training.device_plan import PlanChoice, trusted

    device, why = devices.default_device(args.device)
    model = load(folder)
    console, config, faults = Console(), reading(args, trained), BadRows()
    size = model.config.vision.image_size
    sides: list[PairDataset] = []
    for source in open_sources(config, console.working):
        side = side_of(source, args.split)
        sides.append(validation_subset(side, config) if args.split == "val" else side)
        faults += source.bad_rows
    pairs = Split([open_eval_split(side, size, config, faults, console.working) for side in sides])
    faults.require_at_most(config.max_bad_rows)
    choice = trusted(PlanChoice(Plan(str(device)), why), model, first_pairs(model, pairs), console)
    model.place(*choice.plan.places)
    image_NE, text_ME, owner_M = embed_pairs(model, pairs)
    scores = retrieval(image_NE, text_ME, owner_M)
    first = sides[0]
    edits = edit_scores(model, first, image_NE, text_ME) if len(sides) == 1 and is_editable(first) else []
    if args.json:
        print(
            json.dumps({"model": str(folder), **scores.record(), "edits": [asdict(edit) for edit in edits]})
        )
        return 0
    print(f"{folder}\n")
    tables.show_retrieval(scores)
    if edits:
        print()
        tables.show_edits(edits)
    return 0


def first_pairs(model: "CLIP", pairs: "Split") -> "Batch":
    """A few, by which a device is compared with the CPU."""
    import numpy as np
    import torch

    from m1clip.data.batches import Batch, Images, Tokens

    rows, pixels = pairs.take(np.arange(min(8, len(pairs))))
    tokens_BL = model.tokenize([pairs.captions(int(row))[0] for row in rows])
    image, text = Images(torch.from_numpy(pixels)), Tokens(tokens_BL[:, None])
    return Batch(image, text, torch.from_numpy(rows), None, rows)


def reading(args: Args, trained: TrainConfig) -> TrainConfig:
    """The run's own way of reading its data, and what the flags say otherwise."""
    names = ("data", "val", "seed", "image_column", "caption_column")
    said = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if "data" in said:  # its columns need not be called the same
        trained = replace(trained, image_column="auto", caption_column="auto", val_size="auto")
    return replace(trained, **said)


def side_of(source: "Source", split: str) -> "PairDataset":
    if split == "test" and source.test is None:
        raise ValueError(f"{source.spec} has no test split; --split all takes every pair")
    return {"val": source.val, "test": source.test or source.all, "all": source.all}[split]


def find(args: Args) -> tuple[Path, TrainConfig]:
    """The model's folder, and the configuration it was trained with where it is a run's."""
    if args.model and (Path(args.model) / "model.safetensors").is_file():
        above = Path(args.model).resolve().parents[:2]  # a run's own model, or one of its checkpoints
        run = next((runs.Run(folder) for folder in above if runs.is_run(folder)), None)
        return Path(args.model), from_json(TrainConfig, run.path / "config.json") if run else TrainConfig()
    run = runs.open_run(args.runs, args.model)
    folder = run.model if run.model.is_dir() else run.path / "last"
    if not folder.exists():
        raise FileNotFoundError(
            f"{run.path} has no model yet; it is saved at the end, and checkpoints before"
        )
    return folder, from_json(TrainConfig, run.path / "config.json")
