"""m1clip.evaluate: every task that the data allows, on the data of a run or on other data."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np
import torch

from m1clip import devices
from m1clip.api import use_device
from m1clip.config import TrainConfig, requested_config
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.data.caption_text import label_caption
from m1clip.data.choices import is_choice_spec, known_choices, open_choices
from m1clip.data.index import BadRows, PairDataset
from m1clip.data.splits import (
    Source,
    Split,
    TrainCaptions,
    open_eval_split,
    open_sources,
    parse_spec,
    validation_subset,
)
from m1clip.evals.edits import EditScore
from m1clip.evals.embed import Embedder
from m1clip.evals.page import write_page
from m1clip.evals.probe import MAX_TRAIN, Probe
from m1clip.evals.retrieval import Retrieval
from m1clip.evals.robustness import Robustness
from m1clip.evals.tasks import EvalData, Task, TaskResults, TaskRunner
from m1clip.evals.zeroshot import ZeroShot
from m1clip.inference import load_clip
from m1clip.model.clip import CLIP
from m1clip.prompts import Prompts, parse_labels, parse_prompts
from m1clip.run import Run, find_model, is_run
from m1clip.settings import DataSettings


@dataclass(frozen=True)
class EvalResult:
    """What was measured, on which images; tasks that the data does not allow are None or empty."""

    model: Path
    data: str
    split: str
    images: int
    results: TaskResults

    @property
    def scores(self) -> Retrieval | None:
        """R@1/5/10 and median ranks in both directions, with chance."""
        return self.results.retrieval

    @property
    def zeroshot(self) -> ZeroShot | None:
        return self.results.zeroshot

    @property
    def probe(self) -> Probe | None:
        return self.results.probe

    @property
    def edits(self) -> list[EditScore]:
        """Accuracy against captions with one word changed, by the kind of word."""
        return self.results.edits

    @property
    def robustness(self) -> Robustness | None:
        return self.results.robustness

    def record(self) -> dict[str, Any]:
        """Everything, ready for JSON; the first keys are those of CLIP_benchmark."""
        metrics = self.results.metrics()
        merged = {name: value for scores in metrics.values() for name, value in scores.items()}
        names = {"dataset": self.data, "model": str(self.model), "pretrained": "m1clip", "task": ",".join(metrics)}
        facts = {"split": self.split, "images": self.images}
        return {**names, "metrics": merged, "language": "en", **facts, **self.results.details()}

    def write(self, folder: str | Path) -> Path:
        """Write eval.html, eval.md, eval.json, predictions.csv, figures, and a file per task for CLIP_benchmark."""
        return write_page(self.record(), self.results.metrics(), self.results.errors, Path(folder))


def evaluate(
    model: str | Path | None = None,
    *,
    tasks: Sequence[Task] = (),
    split: Literal["auto", "val", "test", "all"] = "auto",
    templates: Sequence[str] = (),
    device: str = "auto",
    runs: str | Path = "runs",
    console: Console | None = None,
    **settings: Unpack[DataSettings],
) -> EvalResult:
    """Evaluate a model on the data of its run or on other `data`: every task that the data allows.

    Args:
        model: as in m1clip.load; by default the newest run.
        tasks: some of retrieval, zeroshot, probe, edits, robustness; by default all that are possible.
        split: validation or test split, or every image; auto is validation, or every image of other data without
            splits of its own.
        templates: prompts of zero-shot classification, as in CLIP.classify.
        device: auto, cpu, cuda or mps.
        runs: the folder of runs.
        console: where progress is printed; by default stderr.
        settings: fields of DataConfig; by default those of the model's run. `labels` are the labels to choose from.

    Returns:
        The results of each task, with chance; `results.skipped` has the reasons of tasks that were not possible.

    Raises:
        ValueError: a setting is unknown or out of range, or the data has no such split, or not what a task needs.
        FileNotFoundError: the model or the data is missing.

    Example:
        print(m1clip.evaluate("nano-1", data="photos/", tasks=["zeroshot"]).zeroshot.accuracy)
    """
    console, prompts = console or Console(), parse_prompts(templates)
    folder = find_model(Path(runs), None if model is None else str(model))
    trained = trained_config(folder, "data" in settings, console)
    # Of what the run was trained on, only the validation split says something.
    is_other = "data" in settings and not (folder and is_part_of(str(settings["data"]), trained.data))
    config = eval_config(trained, settings, is_other)
    devices.default_device(device)  # an unknown name is refused before anything is decoded
    clip = load_clip(folder, str(model), runs)
    if is_choice_spec(config.data):
        data, split_text, batch = open_choice_data(config, clip, console), "all", None
    else:
        data, split_text = open_eval_data(config, trained, is_other, "val_size" in settings, split, clip, console)
        batch = first_pairs(clip, data.pairs)
    use_device(clip, device, console, batch)
    labels = parse_labels(config.labels) if "labels" in settings else ()
    if not templates and not is_other and are_made_of_labels(data, config.template):
        prompts = Prompts((re.sub(r"\ba \{\}", "{an}", config.template),), name="the template of the training captions")
    embedder = Embedder(clip, console.progress, config.cache_gb)
    results = TaskRunner(embedder, data, prompts, labels, config.seed, console.progress).run(tasks)
    return EvalResult(folder or Path(str(model)), config.data, split_text, len(data.pairs), results)


def are_made_of_labels(data: EvalData, template: str) -> bool:
    """Whether the captions, also those of training, are labels in this template."""
    if data.train_captions is None or not data.train_captions.labels:
        return False
    return data.pairs.captions(0)[0] == label_caption(data.pairs.labels()[0], template)


def eval_config(trained: TrainConfig, settings: DataSettings, is_other: bool) -> TrainConfig:
    """The settings with the run's as defaults; of other data, the column names and the split need not be the run's."""
    if not is_other:
        return requested_config(settings, trained)
    other: dict[str, Any] = {"template": TrainConfig().template, "val_size": "auto", "group_by": "none", "labels": ""}
    other |= dict.fromkeys(("image_column", "caption_column", "label_column", "caption_from"), "auto")
    return requested_config(settings, replace(trained, **other))


def is_part_of(given: str, trained: str) -> bool:
    """Whether all sources of a spec are among those of another one."""
    specs = ([os.path.expanduser(spec) for spec, _ in parse_spec(data)] for data in (given, trained))
    given_sources, trained_sources = ({os.path.realpath(spec) for spec in sources} for sources in specs)
    return given_sources <= trained_sources


def open_eval_data(
    config: TrainConfig,
    trained: TrainConfig,
    is_other: bool,
    has_val_size: bool,
    split: str,
    clip: CLIP,
    console: Console,
) -> tuple[EvalData, str]:
    """The images to evaluate on, and which split they are. `trained` is the config of the model's run."""
    sources = open_sources(config, console.progress)
    if not is_other and has_val_size:
        sources = keep_trained_split(sources, open_sources(trained, console.progress))
    splits = [split if split != "auto" else default_split(source, is_other) for source in sources]
    split = splits[0] if len(set(splits)) == 1 else "/".join(splits)
    datasets = [select_split(source, one, config, is_other) for source, one in zip(sources, splits, strict=True)]
    bad_rows, seen = sum((source.bad_rows for source in sources), BadRows()), clip.config.vision.preprocess
    pairs = open_eval_split(datasets, seen, config, bad_rows, console.progress)
    bad_rows.require_at_most(config.max_bad_rows)
    if not len(pairs):
        raise ValueError(f"{config.data}: no image can be decoded; see `m1clip data check`")
    for line in bad_rows.note_lines():
        console.print_fact("notes", line)
    if bad_rows:
        console.warn(f"{bad_rows}; they are left out")
    train_captions = None
    if not is_other and split != "all":  # otherwise the training captions are unknown, or all of them
        captions = (source.train.captions(row) for source in sources for row in range(len(source.train)))
        train_captions = TrainCaptions.compare(captions, list(pairs.all_captions()))

    def open_train() -> Split:
        parts = [validation_subset(source.train, replace(config, val_size=MAX_TRAIN)) for source in sources]
        if (used := sum(map(len, parts))) < (total := sum(len(source.train) for source in sources)):
            console.print_fact("probe", f"{used:,} of {total:,} training images are used")
        bad_train = BadRows(used, used)
        train = open_eval_split(parts, seen, config, bad_train, console.progress)
        bad_train.require_at_most(config.max_bad_rows)
        if bad_train:
            console.warn(f"{bad_train}; they are left out")
        return train

    scenes, edits = datasets[0], None
    if len(datasets) == 1 and hasattr(scenes, "edits"):  # synthetic scenes can change a word of a caption themselves
        edits = [(row, kind, text) for row in range(len(scenes)) for kind, text in scenes.edits(row)]
    reasons = "; ".join(dict.fromkeys(source.split_reason for source in sources))
    split_text = split if split == "all" else f"{split} ({reasons})"
    labels = sorted({label for source in sources for label in source.all.label_names()})
    return EvalData(pairs, None if "all" in splits else open_train, train_captions, labels, edits), split_text


def default_split(source: Source, is_other: bool) -> str:
    return "all" if is_other and not source.has_own_splits else "val"


def open_choice_data(config: TrainConfig, clip: CLIP, console: Console) -> EvalData:
    images, choices = open_choices(config.data)
    bad_rows = BadRows(len(images), len(images))
    pairs = open_eval_split([images], clip.config.vision.preprocess, config, bad_rows, console.progress)
    bad_rows.require_at_most(config.max_bad_rows)
    kept = known_choices(choices, pairs.parts[0].rows.tolist())
    if len(kept) < len(choices):
        console.warn(f"{bad_rows}; {len(choices) - len(kept):,} of {len(choices):,} choices are left out")
    return EvalData(pairs, choices=kept)


def keep_trained_split(requested: list[Source], trained: list[Source]) -> list[Source]:
    """The sources as the run was trained on them: a larger validation split would contain training images."""
    for new, old in zip(requested, trained, strict=True):
        if not new.has_own_splits and len(new.val) > len(old.val):
            raise ValueError(
                f"the run has {len(old.val)} validation images; --val-size {len(new.val)} adds training images"
            )
    return [new if new.has_own_splits else old for new, old in zip(requested, trained, strict=True)]


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


def select_split(source: Source, split: str, config: TrainConfig, is_other: bool) -> PairDataset:
    if split == "all":
        return source.all if config.val_size == "auto" else validation_subset(source.all, config)
    if split == "val":  # at most MAX_VAL images of the run's own data, as in training
        return source.val if is_other and config.val_size == "auto" else validation_subset(source.val, config)
    if source.test is None:
        raise ValueError(f"{source.spec} has no test split; --split all uses every pair")
    return source.test


def first_pairs(model: CLIP, pairs: Split) -> Batch:
    """A few pairs, to compare a device with the CPU."""
    rows, pixels = pairs.take(np.arange(min(8, len(pairs))))
    tokens_BL = model.tokenize([pairs.captions(int(row))[0] for row in rows])
    return Batch(Images(torch.from_numpy(pixels)), Tokens(tokens_BL[:, None]), torch.from_numpy(rows), None, rows)
