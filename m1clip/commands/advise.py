"""m1clip advise: the fastest plan to train a model on this machine, from its measurements."""

import json
from dataclasses import asdict, dataclass

from m1clip.config import TrainConfig, requested_config, require
from m1clip.console import Console, command, loading, show_rows


@dataclass(frozen=True)
class Args:
    """Device, placement, precision, compile and threads for a model, with chunk, memory and time of a run.

    m1clip advise                                   for the nano preset
    m1clip advise --preset small --batch-size 64 --pairs 30000 --epochs 10

    Uses the timings of `m1clip bench`, or times the model for a few seconds if there are none. `m1clip train`
    decides in the same way for flags left at auto.
    """

    preset: str = "nano"
    """Model; `m1clip info` lists the presets."""
    batch_size: int = 0
    """Contrastive batch size; 0 is that of the preset."""
    pairs: int = 12000
    """Pairs of an epoch."""
    epochs: int = 0
    """Epochs of the run, in which compiling has to pay off; 0 is those of the preset."""
    measure: bool = True
    """Time the model for a few seconds if it was not measured before."""
    json: bool = False
    """Print one line of JSON."""

    def config(self) -> TrainConfig:
        given = {"preset": self.preset, "batch_size": self.batch_size, "epochs": self.epochs}
        return requested_config({name: value for name, value in given.items() if value})

    def check(self) -> None:
        batch_size = self.config().batch_size
        require(batch_size <= self.pairs, f"--batch-size {batch_size:,} is larger than --pairs {self.pairs:,}")


def main(args: Args) -> None:
    with loading():
        from m1clip import devices
        from m1clip.training import memory, timing
        from m1clip.training.advice import advise, predict_run
        from m1clip.training.device_plan import measure_missing

    config, store = args.config(), timing.open_store()
    batch_size, tokens, rows = config.batch_size, config.model.text.context_length, store.steps()
    cost = timing.step_cost(config, batch_size, tokens, store)
    if args.measure:
        batch = timing.random_batch(config, batch_size, tokens)
        rows = measure_missing(config, batch, cost, store, Console())
    advice = advise(cost, rows, devices.available(), {}, config.epochs * (args.pairs // batch_size))
    predictions = predict_run(cost, advice, rows, memory.free_gb(advice.plan.devices[0]), args.pairs)
    columns = ("setting", "value", "confidence", "reason")
    if args.json:
        run = [dict(zip(columns, row, strict=True)) for row in predictions]
        print(json.dumps({"cost": asdict(cost), **asdict(advice), "run": run}))
        return
    plan = advice.plan
    table = [("plan", str(plan), advice.confidence, advice.reason), *predictions]
    show_rows(f"{args.preset}, batch size {batch_size:,}", columns, table)
    if advice.rejected:
        print("\nother plans", *(f"{plan}: {reason}" for plan, reason in advice.rejected.items()), sep="\n  ")
    if advice.step is None or advice.step.confidence == "low":
        print(f"\nmeasure it:  {command('bench', '--presets', args.preset, '--batch-sizes', batch_size)}")
    chosen = ["--device", plan.device, "--precision", plan.precision] + ["--compile", "on"] * plan.compile
    chosen += ["--threads", str(plan.threads)] if plan.threads else []
    print(f"\nnext:  {command('train', '--preset', args.preset, '--batch-size', batch_size, *chosen)}")
