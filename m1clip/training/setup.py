"""What a run is before it begins: what can be refused is refused here, and what was open is settled."""

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.augment import margin
from m1clip.data.splits import Split, Splits, open_splits
from m1clip.devices import Plan
from m1clip.format import file_size
from m1clip.model.clip import CLIP, load_tokenizer
from m1clip.model.tokenizer import Tokenizer, check_tokenizer, make_tokenizer
from m1clip.run import Run
from m1clip.training import checkpoint, device_plan, init, recipes, trackers
from m1clip.training.init import InitModel

MOST_READ = 50_000
"""Captions that a tokenizer is learned from, about."""


@dataclass(frozen=True)
class Setup:
    """What a configuration comes to on this machine."""

    config: TrainConfig
    """The same, with the model's shape as what it begins with has it."""
    init: InitModel
    why: str
    """Of the recipe."""
    data: Splits
    tokenizer: Tokenizer
    total: int
    """Steps of the whole run."""
    start: Path | None
    """The checkpoint to go on from."""
    damaged: dict[Path, str]
    """Newer checkpoints that cannot be used, and what is wrong with each."""
    before: Plan | None
    """How the run was trained until now."""
    deadline: float | None
    """A time of time.monotonic at which everything has to be done."""
    views: int = 0
    """Ways the images were seen until now; 0 for a new run."""

    @property
    def locked(self) -> tuple[str, ...]:
        return recipes.locked_sides(self.config, self.init)


def check(
    config: TrainConfig,
    runs: Path,
    resumed: Run | None,
    console: Console,
    why: str = "",
    began: float | None = None,
) -> Setup:
    """Everything that can be refused, before the run is written: the data is read, its images prepared.

    `why` is the reason for the recipe, where it was chosen. A budget counts from `began`, by time.monotonic.
    """
    began = time.monotonic() if began is None else began
    device_plan.requested_plan(config)  # a device that is not there is refused first
    trackers.require(config.track)
    config = replace(config, recipe="scratch") if config.recipe == "auto" else config
    config, found = init.find(config, resumed)
    recipes.require_sense(config, found)
    if not resumed:  # which has its own
        check_tokenizer(config.tokenizer)
    require_room(config, runs, resumed)
    size = config.model.vision.image_size
    was = began_with(resumed) if resumed else {}
    data = open_splits(config, size, margin(size, config.crop_scale), console.working, was.get("live", ()))
    pairs = data.train.per_epoch
    config = settled(config, found, pairs)
    if config.batch_size > pairs:
        raise ValueError(f"batch {config.batch_size} is larger than the {pairs} training pairs")
    total = config.steps or config.epochs * (pairs // config.batch_size)
    if resumed and was.get("identity", data.train.identity) != data.train.identity:
        raise ValueError(
            f"the data is not what {resumed.path} began with (rows, captions or their order have changed); "
            f"put it back, or start a new run"
        )
    start, damaged = checkpoint.newest_whole(resumed) if resumed else (None, {})
    if start and checkpoint.step_of(start) > total and not config.budget_s:
        done, asked = checkpoint.step_of(start), f"{config.epochs} epochs have"
        asked = f"--steps {config.steps} are" if config.steps else asked
        raise ValueError(f"{start.parent} is at step {done}; {asked} only {total}")
    before = planned(resumed) if start and resumed else None
    words = load_tokenizer(config.model, start / "tokenizer.json") if start else found.tokenizer
    words = words or make_tokenizer(config.tokenizer, captions(data.train), config.model.text.vocab_size)
    deadline = None
    if config.budget_s:
        spent = checkpoint.position(start).seconds if start else 0.0
        deadline = began + max(0.0, config.budget_s - spent)
    views = was.get("views", 0) if start else 0
    return Setup(config, found, why, data, words, total, start, damaged, before, deadline, views)


def settled(config: TrainConfig, found: InitModel, pairs: int) -> TrainConfig:
    """What was left open, so that a resumed run finds it decided; a small set is one batch."""
    sides = recipes.locked_sides(config, found)
    lock: Any = config.freeze if not sides else "both" if len(sides) == 2 else sides[0]
    batch = config.batch_size if config.recipe == "scratch" else min(config.batch_size, pairs)
    return replace(config, freeze=lock, batch_size=max(2, batch))


def planned(run: Run) -> Plan | None:
    """How a run was laid on the machine; None where that is not written."""
    try:
        return Plan(**run.read("machine.json")["plan"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def began_with(run: Run) -> dict[str, Any]:
    """Which data a run is of: batch k rests on its rows and their order."""
    try:
        return run.read("data.json")
    except FileNotFoundError:  # it ended before it began
        return {}


def require_room(config: TrainConfig, runs: Path, resumed: Run | None) -> None:
    held = len(checkpoint.all_of(resumed)) if resumed else 0
    with torch.device("meta"):
        need = checkpoint.needed_bytes(CLIP(config.model), config, held)
    there = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need:
        raise OSError(
            f"{there} has {file_size(free)} free; checkpoints need {file_size(need)} (--keep 1 needs less)"
        )


def captions(pairs: Split) -> Iterator[str]:
    """All of them; of very many, those of images at equal distances, from the first to the last."""
    some = spread(len(pairs), 100)
    each = sum(len(pairs.captions(row)) for row in some) / len(some)
    rows = spread(len(pairs), max(1, int(MOST_READ / each)))
    return (caption for row in rows for caption in islice(pairs.captions(row), 20))


def spread(number: int, most: int) -> range:
    """Rows at equal distances, from the first to the last."""
    return range(0, number, -(-number // most))
