"""m1clip train: flags to a configuration and a run folder, then the loop, then what was learned."""

import itertools
import json
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip import run as runs
from m1clip.commands import flags, tables
from m1clip.config import PRESETS, RECIPES, TrainConfig, from_json, get_preset, override, recipe_defaults
from m1clip.format import duration

if TYPE_CHECKING:  # it brings torch
    from m1clip.console import Console
    from m1clip.training.loop import Result

# What the order of the data, the weights and the optimizer's memory depend on.
FIXED = (
    *(
        "model",
        "data",
        "val_size",
        "image_column",
        "caption_column",
        "template",
        "allow",
        "seed",
        "batch_size",
    ),
    *(
        "captions_per_image",
        "crop_scale",
        "hflip",
        "color_jitter",
        "tokenizer",
        "optimizer",
        "ema",
        "best_metric",
    ),
    *("recipe", "init", "vision", "text", "freeze", "lora_rank"),
)
LENGTHS = ("--epochs", "--steps")
SHAPES = ("--model.vision", "--model.text", "--model.embed-dim")
COMPATIBLE = {("--overwrite", "--config"), ("--overwrite", "--preset")}


@dataclass(frozen=True)
class Args:
    """Train a CLIP model. Each run is a folder; the last lines say what was learned and what to type next.

    m1clip train                                    the nano preset on built-in data
    m1clip train --preset small --data synthetic:50000 --name mine
    m1clip train --resume                           go on with the newest run
    m1clip train --background                       the terminal may close; m1clip stop ends it
    m1clip train --batch-size 1024 --chunk 32            a large batch in little memory
    m1clip train --config runs/mine/config.json     the same run again
    m1clip train --data photos.csv --init ViT-B-32.pt                      a known CLIP learns your images
    m1clip train --data photos.csv --vision timm:NAME --text hf:NAME       two encoders learn to meet
    """

    training: Annotated[TrainConfig, tyro.conf.arg(name="")]
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Take every default from this config.json: repeats that run."""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run's folder; by default the preset's with the next free number."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    resume: bool = False
    """Go on with the run --name (or the newest) from its last checkpoint."""
    overwrite: bool = False
    """If the run --name exists, delete it and start again."""
    background: bool = False
    """Train in a process of its own, and come back at once."""
    json: bool = False
    """Print the result as one line of JSON."""
    words: tyro.conf.Suppress[tuple[str, ...]] = ()


def parse(prog: str, words: list[str], base: TrainConfig | None = None) -> Args:
    base = base or defaults(words)
    args = flags.read(Args, prog, words, default=Args(base, words=tuple(words)))
    if base.budget and not given("--budget", words) and any(given(flag, words) for flag in LENGTHS):
        args = replace(args, training=replace(args.training, budget=""))  # the later requested counts
    changed = [key for key in FIXED if getattr(args.training, key) != getattr(base, key)]
    if args.resume and changed:
        raise ValueError(f"a resumed run keeps its {', '.join(changed)}: what is learned so far rests on it")
    return args


def defaults(words: list[str]) -> TrainConfig:
    """Where the other flags' defaults come from: a resumed run, a config.json, or a preset."""
    if "--help" in words or "-h" in words:
        name = value_of("--preset", words)
        return get_preset(name if name in PRESETS else "nano")
    for one, other in itertools.combinations(("--resume", "--overwrite", "--config", "--preset"), 2):
        if given(one, words) and given(other, words) and (one, other) not in COMPATIBLE:
            raise ValueError(f"{one} and {other} contradict each other: give one of them")
    for length in LENGTHS:
        if given("--budget", words) and given(length, words):
            raise ValueError(f"--budget decides how long it takes, and so would {length}: give one of them")
    if given("--overwrite", words) and not given("--name", words):
        raise ValueError("--overwrite starts a run again; --name says which")
    if given("--resume", words):
        run = runs.open_run(Path(value_of("--runs", words) or "runs"), value_of("--name", words))
        return from_json(TrainConfig, run.path / "config.json")
    if path := value_of("--config", words):
        return from_json(TrainConfig, Path(path))
    base = get_preset(value_of("--preset", words) or "nano")
    named = {key: value_of(f"--{key}", words) or "" for key in ("init", "vision", "text")}
    recipe: Any = value_of("--recipe", words) or "auto"
    if named["init"]:  # a preset's activation is no requested about other weights
        for word in words:
            if word.startswith(SHAPES):
                requested = word.partition("=")[0]
                raise ValueError(
                    f"--init brings a model whose shape is settled; {requested} would be another's: leave it out"
                )
        base = replace(base, model=replace(base.model, activation="gelu"))
    if not any(named.values()) or recipe not in RECIPES:
        return base
    base = replace(base, vision=named["vision"], text=named["text"])
    return override(base, recipe_defaults(base, recipe))


def given(flag: str, words: list[str]) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)


def value_of(flag: str, words: list[str]) -> str | None:
    """The last value given, as the parser proper will take it."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=False):
        if word == flag:
            found = following
        elif word.startswith(f"{flag}="):
            found = word.removeprefix(f"{flag}=")
    return found


def main(args: Args) -> int:
    began = time.monotonic()
    old = runs.open_run(args.runs, args.name) if args.resume else None
    if old is None:
        path = runs.new_path(
            args.runs, args.name, args.training.preset, args.overwrite
        )  # refused at once, if it will be
    if args.background:
        return in_background(args, old.path if old else path)
    with ExitStack() as held:
        if old is not None:
            held.enter_context(old.owned())  # before its checkpoints are looked at
        with tables.loading():
            from m1clip.console import Console
            from m1clip.training import loop  # only now: torch takes seconds to import
            from m1clip.training.setup import check
        console, why = Console(), ""
        if old is None:
            args, why = decided(args, console)
        setup = check(args.training, args.runs, old, console, why, began)
        run = old or runs.create(args.runs, args.name, args.training.preset, args.overwrite)
        if old is None:
            held.enter_context(run.owned())
        result = loop.train(setup, run, console)
    code = tell(args, run, result)
    if result.finished and setup.config.recipe == "frozen" and setup.config.unfreeze:
        return main(second(args, setup.config, run, time.monotonic() - began))
    return code


def decided(args: Args, console: "Console") -> tuple[Args, str]:
    """The same command with its recipe named, and so with that recipe's defaults."""
    from m1clip.training import recipes

    if args.training.recipe in ("auto", "scratch") and not args.training.is_pretrained:
        return within_budget(args, console)
    if args.training.recipe != "auto":
        return args, ""
    recipe, why = recipes.choose(args.training, console)
    if given("--config", list(args.words)):
        return replace(args, training=replace(args.training, recipe=recipe)), why
    return parse("m1clip train", [*args.words, "--recipe", recipe]), why


def within_budget(args: Args, console: "Console") -> tuple[Args, str]:
    """From nothing: with a budget, the defaults are what suits it, unless a preset or a file has others."""
    from m1clip.training import autoconfig

    words, why = list(args.words), ""

    def with_flags(changes: dict[str, Any]) -> Args:
        if value_of("--model.text.encoder", words) == "attention":  # which is not known to lose words
            changes = {key: value for key, value in changes.items() if key != "word_dropout"}
        return parse("m1clip train", words, replace(TrainConfig(), **changes))

    if args.training.budget_s and not given("--preset", words) and not given("--config", words):
        picked = autoconfig.pick(args.training, lambda changes: with_flags(changes).training, console)
        args, why = with_flags(picked.changes), picked.why
    return replace(args, training=replace(args.training, recipe="scratch")), why


def second(args: Args, config: TrainConfig, run: runs.Run, spent_s: float) -> Args:
    """After the heads: a run of its own, in which the last layers of the towers learn with them."""
    left = f"{max(1.0, config.budget_s - spent_s):.0f}s" if config.budget_s else ""
    tuned = {key: value for key, value in RECIPES["full"].items() if key not in ("crop", "flip")}
    heads = {"weight_decay": 0.1, "ema": 0.0, "eval_every": 1, "steps": 0}  # what was for the heads alone
    start = {"init": str(run.model), "vision": "", "vision_weights": "", "text": "", "lock": "auto"}
    rates: dict[str, Any] = {"recipe": "full", "lr": 1e-4, "tower_rate": 0.1, "layer_decay": 1.0}
    made = replace(config, **{**tuned, **heads, **start, **rates}, budget=left)
    name = f"{run.path.name}-unfrozen"
    begun = runs.is_run(run.path.parent / name)
    told = f"now the last {config.unfreeze} layers of each tower learn too, in {run.path.parent / name}"
    print(f"\n{told}\n", file=sys.stderr)
    again = begun and args.resume
    return Args(
        made, name=name, runs=run.path.parent, resume=again, overwrite=begun and not again, json=args.json
    )


def in_background(args: Args, path: Path) -> int:
    """The same command once more, by another process, with the run named."""
    from m1clip.commands.detach import detach

    words = [word for word in args.words if word != "--background"]
    if args.name is None and not args.resume:  # the number is ours from here on, whoever else starts now
        path = runs.create(args.runs, None, args.training.preset, overwrite=False).path
    return detach(words if args.name else [*words, "--name", path.name], runs.Run(path))


def tell(args: Args, run: runs.Run, result: "Result") -> int:
    if args.json:
        print(json.dumps({"run": str(run.path), **result.record()}))
    elif result.finished and result.scores:
        print()
        tables.show_retrieval(result.scores)
        print(f"\nlearned in {duration(result.seconds)}; the model is {run.model}")
        if result.best_step not in (None, result.step) and not args.training.patience:
            best = run.path / "best"
            print(
                f"step {result.best_step} scored higher by {args.training.best_metric}: it is kept as {best}"
            )
        more = ", and which words it reads" if args.training.data.startswith("synthetic") else ""
        print(f"next:  {tables.command('eval', run.path)}    the same figures{more}")
        about = "what was trained, how, and what it finds, with curves"
        print(f"       {tables.command('report', run.path)}  {about}")
    else:
        again = tables.command("train", "--resume", "--name", run.path)
        print(f"stopped and saved at step {result.step}; {again} continues")
    return 0 if result.finished else 130
