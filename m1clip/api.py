"""The Python API: m1clip.train, m1clip.evaluate and m1clip.load. The commands of the same names are thin callers."""

import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import torch

from m1clip import devices
from m1clip.config import RECIPES, TrainConfig, check_exclusive, requested_config, select_settings
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.data.index import BadRows, PairDataset
from m1clip.data.splits import Source, Split, TrainCaptions, open_eval_split, open_sources, validation_subset
from m1clip.devices import Plan
from m1clip.evals.evaluate import EditScore, edit_scores, evaluate_model
from m1clip.evals.retrieval import Retrieval
from m1clip.model.clip import CLIP
from m1clip.model.clip import load as load_folder
from m1clip.run import Run, create_run, find_model, is_run, list_checkpoints, new_run_path, open_run
from m1clip.settings import DataSettings, TrainSettings
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


@dataclass(frozen=True)
class EvalResult:
    model: Path
    scores: Retrieval
    edits: list[EditScore]  # accuracy against one-word edits, for the synthetic data


def evaluate(
    model: str | Path | None = None,
    *,
    split: Literal["val", "test", "all"] = "val",
    device: str = "auto",
    runs: str | Path = "runs",
    console: Console | None = None,
    **settings: Unpack[DataSettings],
) -> EvalResult:
    """Validation retrieval of a model, on the data of its run or on other `data`.

    Args:
        model: as in m1clip.load; by default the newest run.
        split: validation or test split, or every pair.
        device: auto, cpu, cuda or mps.
        runs: the folder of runs.
        console: where progress is printed; by default stderr.
        settings: fields of DataConfig; by default those of the model's run.

    Returns:
        R@1/5/10 and median ranks in both directions with chance; on synthetic data also accuracy by changed word.

    Raises:
        ValueError: a setting is unknown or out of range, or the data has no such split.
        FileNotFoundError: the model or the data is missing.

    Example:
        print(m1clip.evaluate("nano-1", data="photos.csv", split="all").scores.mean_r1)
    """
    console = console or Console()
    folder = find_model(Path(runs), None if model is None else str(model))
    config = trained_config(folder, "data" in settings, console)
    if "data" in settings:  # column names and split need not be the run's
        config = replace(config, image_column="auto", caption_column="auto", val_size="auto", group_by="none")
        config = replace(config, caption_from="auto", template=TrainConfig().template)
    requested = requested_config(settings, config)
    chosen, reason = devices.default_device(device)
    clip = load_found(folder) if folder else load(model, runs=runs)
    sources = open_sources(requested, console.progress)
    if "data" not in settings and "val_size" in settings:
        sources = keep_trained_split(sources, open_sources(config, console.progress))
    config = requested
    datasets = [select_split(source, split, config) for source in sources]
    bad_rows = sum((source.bad_rows for source in sources), BadRows())
    pairs = open_eval_split(datasets, clip.config.vision.preprocess, config, bad_rows, console.progress)
    bad_rows.require_at_most(config.max_bad_rows)
    choice = check_parity(PlanChoice(Plan(str(chosen)), reason), clip, first_pairs(clip, pairs), console)
    known = None
    if "data" not in settings and split != "all":  # otherwise the training captions are unknown, or all of them
        train = (source.train.captions(row) for source in sources for row in range(len(source.train)))
        known = TrainCaptions.compare(train, list(pairs.all_captions()))
    evaluation = evaluate_model(clip.to_devices(*choice.plan.devices), pairs, train_captions=known)
    scenes, edits = datasets[0], list[EditScore]()
    if len(datasets) == 1 and hasattr(scenes, "edits"):  # only synthetic scenes can change a word of a caption
        changed = [(row, kind, text) for row in range(len(scenes)) for kind, text in scenes.edits(row)]
        edits = edit_scores(clip, changed, evaluation.image_NE, evaluation.first_text_NE)
    return EvalResult(folder or Path(str(model)), evaluation.scores, edits)


def keep_trained_split(requested: list[Source], trained: list[Source]) -> list[Source]:
    """The sources as the run was trained on them: a larger validation split would contain training images."""
    for new, old in zip(requested, trained, strict=True):
        if not new.has_own_splits and len(new.val) > len(old.val):
            raise ValueError(
                f"the run has {len(old.val)} validation images; --val-size {len(new.val)} adds training images"
            )
    return [new if new.has_own_splits else old for new, old in zip(requested, trained, strict=True)]


def load(model: str | Path | None = None, *, runs: str | Path = "runs") -> CLIP:
    """Load a CLIP for inference, on the CPU.

    Args:
        model: what the commands take: a run (name or path; by default the newest), a model or checkpoint folder, or
            a CLIP of OpenAI, OpenCLIP or transformers (file, folder or hub name).
        runs: the folder of runs.

    Raises:
        FileNotFoundError: there is no such run, file, folder or hub name.
        ValueError: its files are damaged, or of a model that m1clip cannot import.

    Example:
        model = m1clip.load("nano-1")
        similarity = model.encode_image("cat.jpg") @ model.encode_text(["a cat", "a bus"]).T
    """
    name = None if model is None else str(model)
    folder = find_model(Path(runs), name)
    if folder is not None:
        return load_found(folder)
    path = Path(str(name)).expanduser()
    if path.name != str(name) and path.parent.is_dir() and not path.exists():  # a local path, so no name on the hub
        raise FileNotFoundError(f"there is no run or model {name!r}; {path.parent} is a folder without it")
    from m1clip.model.pretrained_clip import import_clip

    try:
        imported, note = import_clip(str(name))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no run {name!r} in {runs}/, and {error}") from None
    if note:
        warnings.warn(f"{name}: {note}", stacklevel=2)
    return imported


def load_found(folder: Path) -> CLIP:
    """Load a model folder; if it is damaged, the error names the newest checkpoint of the run it belongs to."""
    try:
        return load_folder(folder)
    except (FileNotFoundError, ValueError) as error:
        checkpoints = list_checkpoints(Run(folder.parent)) if is_run(folder.parent) else []
        others = [path for path in checkpoints if path != folder.resolve()]
        hint = f"; {others[-1]} is a checkpoint of the same run, which can be used instead" if others else ""
        raise type(error)(f"{error}{hint}") from None


def trained_config(folder: Path | None, has_data: bool, console: Console) -> TrainConfig:
    """The config of the run that a model or checkpoint folder belongs to.

    The defaults if it belongs to none, or if the config is lost and not needed, as other data is given.
    """
    parents = folder.resolve().parents[:2] if folder else ()
    run = next((Run(parent) for parent in parents if is_run(parent)), None)
    if run is None:
        return TrainConfig()
    try:
        config, note = run.read_config()
    except ValueError as error:
        if not has_data:
            raise ValueError(f"{error}; --data names the data to evaluate on") from None
        config, note = TrainConfig(), f"{error}; not needed with --data"
    if note:
        console.warn(note)
    return config


def select_split(source: Source, split: str, config: TrainConfig) -> PairDataset:
    if split != "test":
        return source.all if split == "all" else validation_subset(source.val, config)
    if source.test is None:
        raise ValueError(f"{source.spec} has no test split; --split all uses every pair")
    return source.test


def first_pairs(model: CLIP, pairs: Split) -> Batch:
    """A few pairs, to compare a device with the CPU."""
    rows, pixels = pairs.take(np.arange(min(8, len(pairs))))
    tokens_BL = model.tokenize([pairs.captions(int(row))[0] for row in rows])
    return Batch(Images(torch.from_numpy(pixels)), Tokens(tokens_BL[:, None]), torch.from_numpy(rows), None, rows)
