"""m1clip eval: a run or a saved model, on held-out pairs."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m1clip import run as runs
from m1clip.config import TrainConfig, from_json
from m1clip.verbs import flags, tables


@dataclass(frozen=True)
class Args:
    """Held-out retrieval (R@1/5/10 both ways, with chance) and, on built-in data, one-word edits.

    m1clip eval                                     the newest run
    m1clip eval runs/mine --held-out 5000           a harder test: more pictures to choose from
    m1clip eval path/to/model --json                any saved model
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """A run (name or path) or a model folder; by default the newest run."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Whose held-out pairs: by default those of the run; for a model from elsewhere, synthetic."""
    held_out: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many pairs; by default the run's number, or 240."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Which scenes are drawn; by default the run's seed, or 0."""
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
        from m1clip.data.cache import pixels
        from m1clip.data.pairs import open_pairs
        from m1clip.evals.embed import embed_pairs
        from m1clip.evals.negatives import edit_scores, is_editable
        from m1clip.evals.retrieval import retrieval
        from m1clip.model.clip import load
        from m1clip.train.screen import Screen

    device, _ = devices.choose(args.device)
    model = load(folder).to(device)
    _, held_out = open_pairs(
        args.data or trained.data,
        trained.held_out if args.held_out is None else args.held_out,
        trained.seed if args.seed is None else args.seed,
    )
    with Screen().drawing(len(held_out)) as drawn:
        pictures = pixels(held_out, model.config.vision.image_size, drawn)
    image_NE, text_ME, owner_M = embed_pairs(model, held_out, pictures)
    scores = retrieval(image_NE, text_ME, owner_M)
    edits = edit_scores(model, held_out, image_NE, text_ME) if is_editable(held_out) else []
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
