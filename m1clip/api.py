"""The Python API: m1clip.train; m1clip.load is in inference.py, m1clip.evaluate in evaluation.py."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from m1clip import devices
from m1clip.config import RECIPES, TrainConfig, check_exclusive, requested_config, select_settings
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.devices import Plan
from m1clip.inference import load as load  # so that m1clip.api has it, too
from m1clip.model.clip import CLIP
from m1clip.run import Run, create_run, is_run, new_run_path, open_run
from m1clip.settings import TrainSettings
from m1clip.training import memory
from m1clip.training.device_plan import PlanChoice, check_parity
from m1clip.training.loop import TrainResult, fit
from m1clip.training.setup import prepare


def train(
    *,
    config: TrainConfig | str | Path | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train a CLIP model in a new run folder; Ctrl-C stops it with a checkpoint.

    Args:
        config: where defaults come from: a TrainConfig or a config.json; by default the settings' `preset`.
        name: name of the run; by default the preset with the next free number.
        runs: the folder of runs.
        resume: continue the run `name`, by default the newest, from its last checkpoint.
        overwrite: if the run `name` exists, delete it and start again.
        console: where progress is printed; by default stderr.
        settings: fields of TrainConfig, the flags of `m1clip train`. Nested ones have dotted names:
            **{"model.vision.width": 256}.

    Returns:
        Paths of the run and its model, validation scores, steps and seconds. `finished` is False after Ctrl-C.

    Raises:
        ValueError: a setting is unknown or out of range, or settings contradict each other.
        FileExistsError: the run exists.
        FileNotFoundError: data, pretrained weights or a run to resume are missing.

    Example:
        result = m1clip.train(data="photos.csv", epochs=2, batch_size=16)
        model = m1clip.load(result.model)
    """
    started, console, runs = time.monotonic(), console or Console(), Path(runs)
    options = {**settings, "config": config, "resume": resume, "overwrite": overwrite}
    check_exclusive({option for option, value in options.items() if value})
    resumed = open_run(runs, name) if resume else None
    with resumed.locked() if resumed else nullcontext():  # before its checkpoints are read
        before, note = resumed.read_config() if resumed else (None, "")
        requested = requested_config(settings, config, before)
        if note:
            console.warn(note)
        if not resumed:
            new_run_path(runs, name, requested.preset, overwrite)  # refused at once if it will be
        given = select_settings(requested, settings)
        setup = prepare(requested, given, runs, resumed, console, started, is_final=config is not None)
        run = resumed or create_run(runs, name, setup.config.preset, overwrite)
        with nullcontext() if resumed else run.locked():
            result = fit(setup, run, console)
    if result.finished and setup.config.recipe == "frozen" and setup.config.unfreeze:
        return train_unfrozen(setup.config, run, resume, time.monotonic() - started, console)
    return result


def train_unfrozen(config: TrainConfig, run: Run, resume: bool, elapsed_s: float, console: Console) -> TrainResult:
    """After --recipe frozen: a second run that also trains the last layers of the towers."""
    budget = f"{max(1.0, config.budget_s - elapsed_s):.0f}s" if config.budget_s else ""
    second = replace(config, **{**RECIPES["full"], "crop_scale": config.crop_scale, "hflip": config.hflip})
    second = replace(second, weight_decay=0.1, ema=0.0, eval_every=1, steps=0, budget=budget)
    second = replace(
        second, init=str(run.model), model_name="", vision="", text="", freeze="auto", recipe="full", lr=2e-5
    )
    name, runs = f"{run.name}-unfrozen", run.path.parent
    exists = is_run(runs / name)
    console.print(f"\nnow training the last {config.unfreeze} layers of each tower in {runs / name}\n")
    if exists and resume:
        return train(name=name, runs=runs, resume=True, console=console)
    return train(config=second, name=name, runs=runs, overwrite=exists, console=console)


def use_device(clip: CLIP, device: str, console: Console, batch: Batch | None = None) -> CLIP:
    """Move a model to a device if its results agree with the CPU's, on the batch or on noise."""
    chosen, reason = devices.default_device(device)
    choice = check_parity(PlanChoice(Plan(str(chosen)), reason), clip, batch or noise_batch(clip), console)
    memory.retain_freed_memory()
    return clip.to_devices(*choice.plan.devices)


def noise_batch(clip: CLIP) -> Batch:
    rng, size, rows = torch.Generator().manual_seed(0), clip.config.vision.image_size, np.arange(8)
    images_BHWC = torch.randint(0, 256, (8, size, size, 3), generator=rng, dtype=torch.uint8)
    tokens_BL = clip.tokenize([f"a photo of {number}" for number in range(8)])
    return Batch(Images(images_BHWC), Tokens(tokens_BL[:, None]), torch.from_numpy(rows), None, rows)
