"""Trackers: the same records in tensorboard, wandb or trackio. The run's own files stay the truth."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from m1clip.config import TrainConfig
from m1clip.run import Run

Send = Callable[[dict[str, float], int], Any]
Close = Callable[[], Any]


def require(kind: str) -> None:
    if kind != "none" and find_spec(kind) is None:
        raise ValueError(f"--track {kind} needs an extra: pip install 'm1clip[{kind}]'")


@contextmanager
def mirrored(run: Run, config: TrainConfig, step: int, warn: Callable[[str], None]) -> Iterator[None]:
    """For the block, every record of the run but its events goes to the tracker too, from `step` on."""
    if config.track == "none":
        yield
        return
    tracker: list[tuple[Send, Close]] = []

    @contextmanager
    def careful() -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr):  # our own stdout is for results, and may be one line of JSON
                yield
        # Whatever a tracker raises (a service gone, a disk full), it is no reason to lose a night's training.
        except Exception as error:
            run.mirror = None
            warn(f"{config.track} failed and is left out from here on: {error}")

    def mirror(record: dict[str, Any]) -> None:
        if tracker and record["kind"] != "event":
            with careful():
                tracker[0][0](dict(numbers(record)), record["step"])

    with careful():
        tracker.append(OPEN[config.track](run, config, step))
        run.mirror = mirror
    try:
        yield
    finally:
        run.mirror = None
        with careful():
            for _, close in tracker:
                close()


def numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Flat names, the kind first, as trackers group by it: step/loss, logger/grad_norms/vision.blocks.0."""
    flat = {key: value for key, value in record.items() if key not in ("step", "time")}
    yield from ((f"{record['kind']}/{key}", value) for key, value in _leaves(flat))


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from ((f"{key}/{name}", one) for name, one in _leaves(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _tensorboard(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)  # later ones are done again

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _wandb(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    import wandb

    # Without a key wandb would ask for one, and a run in the background has nobody to ask.
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    made = wandb.init(project="m1clip", name=run.name, dir=run.path, config=asdict(config), mode=mode)
    return lambda values, step: made.log(values, step=step), made.finish


def _trackio(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    import trackio

    trackio.init(project="m1clip", name=run.name, config=asdict(config))
    return lambda values, step: trackio.log(values, step=step), trackio.finish


OPEN = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
