"""Prepare a run: validate the config, open the data and the initial model once, and settle what was left open."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from m1clip import sensors
from m1clip.config import TrainConfig, check_config, recipe_defaults, with_defaults
from m1clip.console import Console
from m1clip.data.batches import stored_size
from m1clip.data.sources import Source, open_sources
from m1clip.data.splits import Split, Splits, open_splits
from m1clip.devices import Plan
from m1clip.format import file_size
from m1clip.model.clip import CLIP, load_tokenizer
from m1clip.model.tokenizer import Tokenizer, check_tokenizer, make_tokenizer
from m1clip.run import Run
from m1clip.training import checkpoint
from m1clip.training.device_plan import requested_plan
from m1clip.training.recipes import InitModel, check_recipe, choose_recipe, frozen_towers, load_init

TOKENIZER_CAPTIONS = 50_000  # captions a tokenizer is trained on, at most about
Given = Mapping[str, Any]


@dataclass(frozen=True)
class Setup:
    """Everything a run needs before its model is placed on a device."""

    config: TrainConfig
    """Final: nothing is left at auto but what is measured (chunk, device, precision, compile, threads)."""
    reason: str  # why this recipe or model was chosen
    init: InitModel
    splits: Splits
    tokenizer: Tokenizer
    total: int  # steps of the whole run; an estimate with a budget
    imported: sensors.MemoryUse
    """Memory before any data or model was loaded."""
    deadline: float | None  # when a budget ends, by time.monotonic
    checkpoint: Path | None  # the checkpoint to resume from
    damaged: dict[Path, str]  # newer checkpoints that cannot be used, and why
    resumed_plan: Plan | None = None
    views: int = 0  # encoded views per image so far; 0 for a new run

    @property
    def frozen(self) -> tuple[str, ...]:
        return frozen_towers(self.config, self.init)


def prepare(
    config: TrainConfig,
    given: Given,
    runs: Path,
    resumed: Run | None,
    console: Console,
    started: float,
    is_final: bool = False,
) -> Setup:
    """Validate and open everything before the run folder is written.

    `given` are the user's own settings, which defaults of recipes and budgets leave alone; `is_final` says that
    the config comes from a file and gets no other defaults. A budget counts from `started` (time.monotonic).
    """
    imported, reason = sensors.memory_use(), ""
    check_config(config)
    requested_plan(config)
    if config.track != "none":
        from m1clip.training.trackers import check_tracker

        check_tracker(config.track)
    if not resumed:  # a resumed run has its tokenizer
        check_tokenizer(config.tokenizer)
    config, init = load_init(config, resumed)
    sources = open_sources(config, console.progress)
    if not resumed:
        config, reason = choose_settings(config, given, is_final, init, sources, console)
    check_recipe(config, init)
    check_disk_space(config, runs, resumed)
    record = resumed.read("data.json") if resumed and (resumed.path / "data.json").exists() else {}
    size = config.model.vision.image_size
    stored, on_the_fly = stored_size(size, config.crop_scale), record.get("on_the_fly", ())
    splits = open_splits(sources, config, size, stored, console.progress, on_the_fly)
    pairs, identity = splits.train.pairs_per_epoch, splits.train.identity
    config = settle(config, init, pairs)
    if config.batch_size > pairs:
        raise ValueError(f"batch_size {config.batch_size} is larger than the {pairs} training pairs")
    if resumed and record.get("identity", identity) != identity:
        changed = f"the data of {resumed.path} has changed (rows, captions or their order)"
        raise ValueError(f"{changed}; restore it, or start a new run")
    total = config.steps or config.epochs * (pairs // config.batch_size)
    start, damaged = checkpoint.newest_intact(resumed) if resumed else (None, {})
    tokenizer, deadline = open_tokenizer(config, start, init, splits.train), None
    if config.budget_s is not None:
        elapsed_s = checkpoint.read_progress(start).seconds if start else 0.0
        deadline = started + max(0.0, config.budget_s - elapsed_s)
    setup = Setup(config, reason, init, splits, tokenizer, total, imported, deadline, start, damaged)
    return resumed_setup(setup, resumed, record.get("views", 0)) if resumed and start else setup


def resumed_setup(setup: Setup, resumed: Run, views: int) -> Setup:
    """With the plan and the views of the interrupted run."""
    config, total, start, plan = setup.config, setup.total, setup.checkpoint, None
    if start and checkpoint.step_of(start) > total and not config.budget_s:
        requested = f"--steps {config.steps}" if config.steps else f"{config.epochs} epochs"
        raise ValueError(f"{start.parent} is at step {checkpoint.step_of(start)}; {requested} end at step {total}")
    with suppress(OSError, ValueError, KeyError, TypeError):
        plan = Plan(**resumed.read("machine.json")["plan"])
    return replace(setup, resumed_plan=plan, views=views)


def open_tokenizer(config: TrainConfig, start: Path | None, init: InitModel, pairs: Split) -> Tokenizer:
    if start:
        return load_tokenizer(config.model, start / "tokenizer.json")
    return init.tokenizer or make_tokenizer(config.tokenizer, sample_captions(pairs), config.model.text.vocab_size)


def choose_settings(
    config: TrainConfig, given: Given, is_final: bool, init: InitModel, sources: Sequence[Source], console: Console
) -> tuple[TrainConfig, str]:
    """The config with its recipe decided and with the defaults of that recipe or budget; and the reason."""
    recipe, reason = config.recipe, ""
    if not config.is_pretrained and recipe in ("auto", "scratch"):
        if config.budget_s and not is_final and "preset" not in given:
            from m1clip.training.autoconfig import fit_budget

            config, reason = fit_budget(config, given, sources, console)
        return replace(config, recipe="scratch"), reason
    if recipe == "auto":
        recipe, reason = choose_recipe(config, init, sources)
    if not is_final:
        config = with_defaults(config, recipe_defaults(config, recipe), given)
    return replace(config, recipe=recipe), reason


def settle(config: TrainConfig, init: InitModel, pairs: int) -> TrainConfig:
    """Write down which towers are frozen, for a resumed run; fine-tuning on a small set is one batch."""
    towers = frozen_towers(config, init)
    freeze: Any = config.freeze if not towers else "both" if len(towers) == 2 else towers[0]
    batch_size = config.batch_size if config.recipe == "scratch" else min(config.batch_size, pairs)
    return replace(config, freeze=freeze, batch_size=max(2, batch_size))


def check_disk_space(config: TrainConfig, runs: Path, resumed: Run | None) -> None:
    """Require space for the final model, the newest KEEP checkpoints, the best, and one more before the oldest goes.

    Each checkpoint has weights and two moments, with EMA the weights twice.
    """
    existing = len(checkpoint.list_checkpoints(resumed)) if resumed else 0
    with torch.device("meta"):
        weights = sum(weight.nbytes for weight in CLIP(config.model).parameters())
    need = weights + max(1, checkpoint.KEEP + 2 - existing) * (4 if config.ema else 3) * weights
    folder = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{folder} has {file_size(free)} free; checkpoints need {file_size(need)}")


def sample_captions(pairs: Split) -> Iterator[str]:
    """All captions; of very many, those of evenly spaced images."""
    sample = evenly_spaced(len(pairs), 100)
    per_image = sum(len(pairs.captions(row)) for row in sample) / len(sample)
    rows = evenly_spaced(len(pairs), max(1, int(TOKENIZER_CAPTIONS / per_image)))
    return (caption for row in rows for caption in islice(pairs.captions(row), 20))


def evenly_spaced(count: int, limit: int) -> range:
    """At most `limit` of the numbers below `count`."""
    return range(0, count, -(-count // limit))
