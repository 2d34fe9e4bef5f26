"""Optional trackers: the same records in tensorboard, wandb or trackio. The run folder stays authoritative."""

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


def check_tracker(name: str) -> None:
    if find_spec(name) is None:
        raise ValueError(f"--track {name} needs an extra: pip install 'm1clip[{name}]'")


@contextmanager
def tracking(run: Run, config: TrainConfig, step: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, every record but events also goes to the tracker, from `step` on."""

    def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # our stdout is for results, possibly one line of JSON
                return function(*arguments)
        except Exception as error:  # whatever a tracker raises must not end the training
            run.on_record = None
            warn(f"{config.track} failed and is no longer used: {error}")

    send, close = guarded(TRACKERS[config.track], run, config, step) or (lambda *_: None, lambda: None)

    def send_record(record: dict[str, Any]) -> None:
        if record["kind"] != "event":
            values = {key: value for key, value in record.items() if key not in ("step", "time")}
            guarded(send, dict(scalars(values, record["kind"])), record["step"])

    run.on_record = send_record
    try:
        yield
    finally:
        run.on_record = None
        guarded(close)


def scalars(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Flat names grouped by kind: step/loss, diagnostics/grad_norms/vision.blocks.0."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value


def _tensorboard(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)  # later steps are repeated

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _wandb(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    import wandb

    # Without a key wandb would prompt for one, and nobody answers in a background run.
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    wandb_run = wandb.init(project="m1clip", name=run.name, dir=run.path, config=asdict(config), mode=mode)
    return lambda values, step: wandb_run.log(values, step=step), wandb_run.finish


def _trackio(run: Run, config: TrainConfig, step: int) -> tuple[Send, Close]:
    import trackio

    trackio.init(project="m1clip", name=run.name, config=asdict(config))
    return lambda values, step: trackio.log(values, step=step), trackio.finish


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
