"""m1clip advise: the fastest plan to train a model on this machine, from its measurements."""

import json
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import tyro

from m1clip.commands.flags import parse_flags
from m1clip.config import check_config, get_preset, require
from m1clip.console import command, loading, show_rows


@dataclass(frozen=True)
class Args:
    """Device, placement, precision, compile and threads for a model, with chunk, memory and time of a run.

    m1clip advise                                   for the nano preset
    m1clip advise --preset small --batch-size 64 --pairs 30000 --epochs 10

    Uses the timings of `m1clip bench`, or times the model for a few seconds if there are none. `m1clip train`
    decides in the same way for flags left at auto.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """Model; `m1clip info` lists the presets."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Contrastive batch size; 0 is that of the preset."""
    pairs: Annotated[int, tyro.conf.arg(metavar="N")] = 12000
    """Pairs of an epoch."""
    epochs: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Epochs of the run, in which compiling has to pay off; 0 is those of the preset."""
    measure: bool = True
    """Time the model for a few seconds if it was not measured before."""
    json: bool = False
    """Print one line of JSON."""


def parse(program: str, argv: list[str]) -> Args:
    args = parse_flags(Args, program, argv)
    config = get_preset(args.preset)
    args = replace(args, batch_size=args.batch_size or config.batch_size, epochs=args.epochs or config.epochs)
    check_config(replace(config, batch_size=args.batch_size, epochs=args.epochs))
    sizes = f"--batch-size {args.batch_size:,} is larger than --pairs {args.pairs:,}"
    require(args.batch_size <= args.pairs, sizes)
    return args


def main(args: Args) -> int:
    with loading():
        from m1clip import devices
        from m1clip.console import Console
        from m1clip.training import memory, timing
        from m1clip.training.advice import advise, predict_run
        from m1clip.training.device_plan import measure_missing
        from m1clip.training.timing import open_store

    config, store = replace(get_preset(args.preset), batch_size=args.batch_size), open_store()
    tokens, rows = config.model.text.context_length, store.steps()
    cost = timing.step_cost(config, args.batch_size, tokens, store)
    if args.measure:
        batch = timing.random_batch(config, args.batch_size, tokens)
        rows = measure_missing(config, batch, cost, store, Console())
    advice = advise(cost, rows, devices.available(), {}, args.epochs * (args.pairs // args.batch_size))
    predictions = predict_run(cost, advice, rows, memory.free_gb(advice.plan.devices[0]), args.pairs)
    columns = ("setting", "value", "confidence", "reason")
    if args.json:
        run = [dict(zip(columns, row, strict=True)) for row in predictions]
        print(json.dumps({"cost": asdict(cost), **asdict(advice), "run": run}))
        return 0
    plan = advice.plan
    table = [("plan", str(plan), advice.confidence, advice.reason), *predictions]
    show_rows(f"{args.preset}, batch size {args.batch_size:,}", columns, table)
    if advice.rejected:
        print("\nother plans", *(f"{plan}: {reason}" for plan, reason in advice.rejected.items()), sep="\n  ")
    if advice.step is None or advice.step.confidence == "low":
        bench = command("bench", "--presets", args.preset, "--batch-sizes", args.batch_size)
        print(f"\nmeasure it:  {bench}")
    chosen = ["--device", plan.device, "--precision", plan.precision] + ["--compile", "on"] * plan.compile
    chosen += ["--threads", str(plan.threads)] if plan.threads else []
    model = ("--preset", args.preset, "--batch-size", args.batch_size)
    print(f"\nnext:  {command('train', *model, *chosen)}")
    return 0
