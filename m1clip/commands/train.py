"""m1clip train: flags to keyword arguments of m1clip.train, then its result."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip import console
from m1clip.commands.eval import show_retrieval
from m1clip.commands.flags import given_flags, parse_flags
from m1clip.config import TrainConfig, check_exclusive, get_preset, requested_config, select_settings
from m1clip.format import duration
from m1clip.run import Run, create_run, new_run_path, open_run

if TYPE_CHECKING:  # imports torch
    from m1clip.training.loop import TrainResult


@dataclass(frozen=True)
class Args:
    """Train a CLIP model. Each run is a folder; the last lines show the result and the next commands.

    m1clip train                                    the nano preset on synthetic data
    m1clip train --preset small --data synthetic:50000 --name mine
    m1clip train --data photos/ --budget 10m        your images, in the time you have
    m1clip train --resume                           continue the newest run
    m1clip train --background                       the terminal may be closed; m1clip stop ends it
    m1clip train --batch-size 1024 --chunk 32       a large batch in little memory
    m1clip train --config runs/mine/config.json     the same run again
    m1clip train --data photos.csv --init ViT-B-32.pt                      fine-tune a CLIP
    m1clip train --data photos.csv --vision timm:NAME --text hf:NAME       pretrained encoders
    """

    training: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Take all settings from this config.json: repeats that run."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run folder; by default the preset with the next free number."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue the run --name (or the newest) from its last checkpoint."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """If the run --name exists, delete it and start again."""
    background: tyro.conf.FlagCreatePairsOff[bool] = False
    """Train in a background process, and return at once."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result as one line of JSON."""
    argv: tyro.conf.Suppress[tuple[str, ...]] = ()


def parse(program: str, argv: list[str]) -> Args:
    args = parse_flags(Args, program, argv, default=Args(get_preset("nano"), argv=tuple(argv)))
    check_exclusive(given_flags(argv))
    if args.overwrite and args.name is None:
        raise ValueError("--overwrite starts a run again; --name says which")
    return args


def given_settings(training: TrainConfig, argv: Sequence[str]) -> dict[str, Any]:
    """The settings on the command line by dotted path; all others have their defaults elsewhere."""
    return select_settings(training, setting_paths() & given_flags(argv))


def setting_paths() -> set[str]:
    """Every setting of a TrainConfig with our own towers."""

    def paths(value: Any, prefix: str) -> set[str]:
        nested = {key: inner for key, inner in vars(value).items() if hasattr(inner, "__dataclass_fields__")}
        leaves = {prefix + key for key in vars(value).keys() - nested.keys()}
        return leaves.union(*(paths(inner, f"{prefix}{key}.") for key, inner in nested.items()))

    return paths(TrainConfig(), "")


def main(args: Args) -> int:
    settings = given_settings(args.training, args.argv)
    resumed = open_run(args.runs, args.name).path if args.resume else None
    requested = requested_config(settings, args.config, resumed)  # errors come before torch is imported
    if args.background:
        return start_background(args, requested.preset)
    with console.loading():
        from m1clip import api
    result = api.train(
        config=args.config, name=args.name, runs=args.runs, resume=args.resume, overwrite=args.overwrite, **settings
    )
    print_result(args, result)
    return 0 if result.finished else 130


def start_background(args: Args, preset: str) -> int:
    """Run the same command in another process, with the run named."""
    from m1clip.commands.background import spawn_training

    argv = [word for word in args.argv if word != "--background"]
    if args.resume:
        run = open_run(args.runs, args.name)
    elif args.name is None:  # reserve the number now
        run = create_run(args.runs, None, preset, overwrite=False)
    else:
        run = Run(new_run_path(args.runs, args.name, "", args.overwrite))
    return spawn_training(argv if args.name else [*argv, "--name", run.name], run)


def print_result(args: Args, result: "TrainResult") -> None:
    if args.json:
        print(json.dumps(result.record()))
    elif result.finished and result.scores:
        print()
        show_retrieval(result.scores)
        print(f"\ntrained in {duration(result.seconds)}; the model is {result.model}")
        if result.best_step not in (None, result.step) and not result.restored:
            print(f"step {result.best_step} scored higher; it is {result.run / 'best'}")
        print(f"next:  {console.command('eval', result.run)}    the same scores, and accuracy by word")
        print(f"       {console.command('report', result.run)}  a report with curves and examples")
    else:
        resume = console.command("train", "--resume", "--name", result.run)
        print(f"stopped and saved at step {result.step}; {resume} continues")
