"""m1clip advise: how to train a model on this machine, from what was measured on it."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from m1clip import measurements
from m1clip.commands import flags, tables
from m1clip.config import check_train, TrainConfig, get_preset

if TYPE_CHECKING:  # they bring torch
    from m1clip.devices import Plan


@dataclass(frozen=True)
class Args:
    """Device, placement, chunk, precision, compile and threads for a model and batch: what and why.

    m1clip advise                                   for the nano preset
    m1clip advise --preset small --batch-size 64 --pairs 30000 --epochs 10
    m1clip advise --preset seed --policy seed       what the documents' rule says, and whether it is right

    Goes by what `m1clip bench` has measured; a model it has not, it tries for a few seconds, and says
    where it only extrapolates. `m1clip train` does the same where its flags are left at auto.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """The model; m1clip info lists them."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """PairDataset in a batch; by default the preset's."""
    pairs: Annotated[int, tyro.conf.arg(metavar="N")] = 12000
    """PairDataset of an epoch, for its time."""
    epochs: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Of the run: compiling has to pay within it; by default the preset's."""
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Length of the captions; 0 is the longest that the model reads."""
    policy: Literal["measured", "seed"] = "measured"
    """seed decides by the documents' should_use_mps, with the measured answer beside it."""
    no_measure: bool = False
    """Never measure now: extrapolate, or say that nothing is known."""
    json: bool = False
    """Print as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    get_preset(args.preset)
    for key in ("pairs", "epochs"):
        value = getattr(args, key)
        if value is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, not {value}")
    if args.tokens < 0 or args.tokens in (1, 2):
        raise ValueError(f"tokens must be 0 or at least 3 (start, one symbol, end), not {args.tokens}")
    config = get_preset(args.preset)
    if (args.batch or config.batch_size) > args.pairs:
        raise ValueError(f"batch {args.batch or config.batch_size:,} is larger than the {args.pairs:,} pairs (--pairs)")
    if args.tokens > config.model.text.context_length:
        raise ValueError(f"{args.preset} reads {config.model.text.context_length} tokens, not {args.tokens}")
    if args.batch is not None:
        check_train(replace(get_preset(args.preset), batch_size=args.batch))  # refuses what training would
    return args


def main(args: Args) -> int:
    with tables.loading():
        from m1clip import advisor, devices
        from m1clip.advisor import RequestedPlan
        from m1clip.bench import documents
        from m1clip.console import Console
        from m1clip.training import device_plan, timing
        from m1clip.training.outlook import outlook

    config = get_preset(args.preset)
    config = replace(config, batch_size=args.batch or config.batch_size, epochs=args.epochs or config.epochs)
    tokens = min(args.tokens or config.model.text.context_length, config.model.text.context_length)
    known, here = measurements.here(), devices.available()
    work = device_plan.work_of(config, config.batch_size, tokens, known)
    rows = known.rows("step")
    if not args.no_measure and not device_plan.measured(rows, here, work):
        batch = timing.some_batch(config, config.batch_size, tokens)
        rows = device_plan.try_now(config, batch, work, known, here, Console())
    steps = config.epochs * max(1, args.pairs // config.batch_size)
    measured = shown = advisor.advise(work, rows, here, steps=steps)
    rule = documents.judge(config.model, work, tokens, measured, here)
    if args.policy == "seed" and rule.answer in here:
        shown = advisor.advise(work, rows, here, RequestedPlan(device=rule.answer), steps)
        shown.choices[0] = replace(shown.choices[0], why=f"the documents' rule: {rule.why}", confidence="–")
    ahead = outlook(work, shown, rows, args.pairs)
    if args.json:
        told = {**advisor.as_json(shown), "outlook": asdict(ahead), "documents": asdict(rule)}
        asked = {"preset": args.preset, "batch": config.batch_size, "tokens": tokens, "policy": args.policy}
        print(json.dumps({**asked, **told, "measured_device": measured.plan.device}))
        return 0
    table = tables.table("", "", "sure", "because")
    for column in table.columns:
        column.justify = "left"
    for one in [*shown.choices, *ahead.choices]:
        table.add_row(one.name, one.value, one.confidence, one.why)
    tables.show(f"{args.preset}, batch {config.batch_size:,}", table)
    print(f"\nthe documents' rule (should_use_mps) says {rule.answer}: {rule.why}")
    print(f"  measured: {measured.plan.device}; the rule is {rule.verdict}")
    if not rows:
        print("\nnothing was measured on this machine yet: m1clip bench --quick takes a minute")
    elif ahead.step and ahead.step.confidence == "low":
        words = ("bench", "--presets", args.preset, "--batches", config.batch_size)
        print(f"\nmeasured, it would be sure:  {tables.command(*words)}")
    if shown.plan.device != "cpu":
        print("\ntraining compares it with the CPU first, and falls back if it computes something else")
    if ahead.chunk:
        print(f"\nnext:  {tables.command('train', *words_of(args, config, shown.plan))}")
    return 0


def words_of(args: Args, config: TrainConfig, plan: "Plan") -> list[object]:
    words: list[object] = [
        "--preset",
        args.preset,
        "--batch-size",
        config.batch_size,
        "--device",
        plan.device,
    ]
    words += ["--precision", plan.precision] if plan.precision != "fp32" else []
    words += ["--compile", "on"] if plan.compile else []
    return words + (["--threads", plan.threads] if plan.threads else [])
