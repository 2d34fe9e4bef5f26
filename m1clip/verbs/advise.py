"""m1clip advise: how to train a model on this machine, from what was measured on it."""

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m1clip import measurements
from m1clip.config import TrainConfig, preset
from m1clip.verbs import flags, tables

if TYPE_CHECKING:  # they bring torch
    from m1clip.advisor import Advice, Choice, Work
    from m1clip.measurements import Measurements


@dataclass(frozen=True)
class Args:
    """Device, placement, chunk, precision, compile and threads for a model and batch: what and why.

    m1clip advise                                   for the nano preset
    m1clip advise --preset small --batch 64 --pairs 30000 --epochs 10
    m1clip advise --preset seed --policy seed       what the documents' rule says, and whether it is right

    Goes by what `m1clip bench` has measured; a model it has not, it tries for a few seconds, and says
    where it only extrapolates. `m1clip train` does the same where its flags are left at auto.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """The model; m1clip info lists them."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Pairs in a batch; by default the preset's."""
    pairs: Annotated[int, tyro.conf.arg(metavar="N")] = 12000
    """Pairs of an epoch, for its time."""
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
    args = flags.read(Args, prog, words)
    preset(args.preset)
    for key in ("pairs", "epochs"):
        value = getattr(args, key)
        if value is not None and value < 1:
            raise ValueError(f"{key} must be at least 1, not {value}")
    if args.tokens < 0 or args.tokens in (1, 2):
        raise ValueError(f"tokens must be 0 or at least 3 (start, one symbol, end), not {args.tokens}")
    if args.batch is not None:
        replace(preset(args.preset), batch=args.batch)  # refuses what training would
    return args


def main(args: Args) -> int:
    tables.without_fallback()
    with tables.loading():
        from m1clip import advisor, devices
        from m1clip.train import place, timing
        from m1clip.train.screen import Screen

    config = preset(args.preset)
    config = replace(config, batch=args.batch or config.batch, epochs=args.epochs or config.epochs)
    tokens = min(args.tokens or config.model.text.length, config.model.text.length)
    known, here = measurements.here(), devices.available()
    work = place.work_of(config, config.batch, tokens, known)
    rows = known.rows("step")
    if not args.no_measure and not place.measured(rows, here, work):
        batch = timing.some_batch(config, config.batch, tokens)
        rows = place.try_now(config, batch, work, known, here, Screen())
    steps = config.epochs * max(1, args.pairs // config.batch)
    advice = advisor.advise(work, rows, here, steps=steps)
    rest = the_rest(args, work, advice, rows)
    rule = seed_policy(config, work, tokens, advice, here)
    if args.json:
        told = {**advisor.as_json(advice), "rest": [asdict(one) for one in rest], "seed_policy": rule}
        print(json.dumps({"preset": args.preset, "batch": config.batch, "tokens": tokens, **told}))
        return 0
    show(args, config, advice, rest, rule, known, bool(rows))
    return 0


def needed_gb(work: "Work", pairs: int | None = None) -> float:
    from m1clip.train.memory import PEAK

    return work.state_gb + PEAK * work.activation_gb * (pairs or work.batch)


def free_gb() -> float:
    from m1clip import sensors

    return sensors.available_gb()


def the_rest(args: Args, work: "Work", advice: "Advice", rows: list[dict[str, Any]]) -> list["Choice"]:
    """What follows from the plan: how much at once, how much memory, how long."""
    from m1clip.advisor import Choice, spoken
    from m1clip.train.memory import PEAK, SHARE, power_of_two

    free, made = free_gb(), []
    room = SHARE * free - work.state_gb
    whole = PEAK * work.activation_gb * work.batch <= room
    counted = f"{1e3 * work.activation_gb:.3g} MB kept a pair, {free:.1f} GB free"
    if room <= 0:
        made.append(
            Choice(
                "chunk", "–", f"weights, gradients and moments need {work.state_gb:.1f} GB; {counted}", "high"
            )
        )
        chunk = 1
    else:
        chunk = work.batch if whole else power_of_two(room / (PEAK * work.activation_gb))
        told = "the whole batch" if whole else f"{chunk:,} at once"
        made.append(Choice("chunk", told, counted, "high"))
    held = [
        row for row in rows if row["model"] == work.model and row["batch"] == work.batch and row["peak_gb"]
    ]
    if held:
        made.append(Choice("memory", f"{held[-1]['peak_gb']:.2f} GB", "measured at this batch", "high"))
    else:
        need = needed_gb(work, chunk)
        made.append(
            Choice(
                "memory", f"{need:.2f} GB", "weights, gradients, moments and activations, counted", "medium"
            )
        )
    if advice.step is None:
        made.append(Choice("step", "–", "nothing like it was measured: m1clip bench does", "–"))
        return made
    step = advice.step
    slower = 1.0 if whole else 4 / 3  # a divided batch is embedded twice
    made.append(
        Choice(
            "step",
            spoken(step.ms * slower),
            f"{step.basis}; {spoken(step.low * slower)} to {spoken(step.high * slower)}",
            step.confidence,
        )
    )
    count = max(1, args.pairs // work.batch)
    seconds = [count * ms * slower / 1e3 for ms in (step.ms, step.low, step.high)]
    told, low, high = map(tables.clock, seconds)
    why = f"{count:,} steps for {args.pairs:,} pairs; {low} to {high}; without evaluation and saving"
    made.append(Choice("epoch", told, why, step.confidence))
    return made


def seed_policy(
    config: TrainConfig, work: "Work", tokens: int, advice: "Advice", here: list[str]
) -> dict[str, Any]:
    """The documents' rule for the same question, and what measuring says of it."""
    from m1clip.advisor import seed_rule

    towers = ((config.model.vision.tokens, config.model.vision.width), (tokens, config.model.text.width))
    largest = max(length * 4 * width for length, width in towers) * config.batch
    gpu, why = seed_rule(work.parameters, config.batch, largest)
    names = [name for name in here if name != "cpu"]
    answer = names[-1] if gpu and names else "a GPU" if gpu else "cpu"
    told: dict[str, Any] = {"answer": answer, "why": why, "verdict": None, "lost": None}
    if not names:
        wrong = "not to be followed" if gpu else "right, for want of another"
        told["verdict"] = f"{wrong}: there is no GPU here"
        return told
    times = {name: one.ms for name, one in advice.by_device.items()}
    if answer not in times or len(times) < 2:
        told["verdict"] = "not known: the devices were not all measured"
        return told
    lost = times[answer] / min(times.values())
    told["lost"] = lost
    sure = all(one.confidence != "low" for one in advice.by_device.values())
    told["verdict"] = (
        "right"
        if lost == 1
        else f"WRONG: {lost:.2f} times as slow" + ("" if sure else ", by an uncertain estimate")
    )
    return told


def show(
    args: Args,
    config: TrainConfig,
    advice: "Advice",
    rest: list["Choice"],
    rule: dict[str, Any],
    known: "Measurements",
    any_rows: bool,
) -> None:
    made = tables.table("", "", "sure", "because")
    made.columns[1].justify = made.columns[2].justify = made.columns[3].justify = "left"
    choices = [*advice.choices, *rest]
    if args.policy == "seed":
        choices = [
            tables_choice(choices[0], rule["answer"], f"the documents' rule: {rule['why']}"),
            *choices[1:],
        ]
    for one in choices:
        made.add_row(one.name, one.value, one.confidence, one.why)
    tables.show(f"{args.preset}, batch {config.batch:,}", made)
    print(f"\nthe documents' rule (should_use_mps) says {rule['answer']}: {rule['why']}")
    print(f"  measured: {advice.plan.device}; the rule is {rule['verdict']}")
    if not any_rows:
        print("\nnothing was measured on this machine yet: m1clip bench --quick takes a minute")
    plan = advice.plan
    words = ["--preset", args.preset, "--batch", config.batch, "--device", plan.device]
    words += ["--precision", plan.precision] if plan.precision != "fp32" else []
    words += ["--compile", "on"] if plan.compile else []
    words += ["--threads", plan.threads] if plan.threads else []
    print(f"\nnext:  {tables.command('train', *words)}")


def tables_choice(one: "Choice", value: str, why: str) -> "Choice":
    return replace(one, value=value, why=why, confidence="–")
