"""--budget: choose what to train from scratch by the number of images and by steps timed on this machine.

The candidates were found by experiment (docs/benchmarks.md). The model size that pays depends on the number of
pairs seen in training, the regularization it needs on the number of epochs; both are predicted from timed steps.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import Any

import torch

from m1clip import devices
from m1clip.config import PRESETS, ModelConfig, TextConfig, TrainConfig, VisionConfig, check_config, with_defaults
from m1clip.console import Console
from m1clip.data.batches import stored_size
from m1clip.data.pixel_cache import PixelCache, decode_rows
from m1clip.data.splits import Source
from m1clip.devices import Plan
from m1clip.errors import short_error
from m1clip.format import duration
from m1clip.model.clip import CLIP
from m1clip.training.device_plan import default_plan
from m1clip.training.setup import evenly_spaced
from m1clip.training.step import TrainState
from m1clip.training.timing import random_batch, time_step

TRANSFORMER_FROM = 50_000  # images from which a text transformer is worth its time, if they are seen often
TRIAL, TRIAL_STEPS = 0.02, 8  # of the budget, and steps, for timing one model
SAMPLE, EVALUATIONS = 100, 6
MAX_SAMPLE_S = 2.0  # decoding a sample
OVERHEAD = 0.1  # of the budget: listing data, evaluating, saving
MAX_DECODING = 0.2  # of the budget; if decoding up front takes more, images are decoded on the fly
LEFT_RIGHT = re.compile(r"\b(left|right)\b", re.IGNORECASE)
MAX_LEFT_RIGHT = 0.02  # of the captions; with more, images are not flipped
OPTIMISM = 2.0  # a larger model may be this much faster than its FLOPs suggest
Settings = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    name: str
    min_pairs: float  # to be seen in training for this model to beat the next smaller one
    settings: Settings
    regularization: tuple[tuple[float, Settings], ...] = ()  # additional settings from so many epochs on


_FEW_PAIRS: Settings = {
    **{"optimizer": "muon", "lr": 8e-3, "batch_size": 128, "captions_per_image": 5, "label_smoothing": 0.1},
    **{"weight_decay": 0.1, "grad_clip": 5.0, "hflip": True, "preset": "budget"},
}
_STRONG = {"crop_scale": 0.4, "color_jitter": 0.2, "word_dropout": 0.5, "weight_decay": 0.3, "head_dropout": 0.2}
# Unlimited patience: the best state is kept in case the model overfits after all.
_KEEP_BEST: Settings = {"patience": 10**6, "best_metric": "t2i_r10"}
_REGULARIZATION: tuple[tuple[float, Settings], ...] = (
    (0, {"crop_scale": 0.8, "word_dropout": 0.1}),
    (10, {"crop_scale": 0.6, "word_dropout": 0.3}),
    (15, {**_STRONG, **_KEEP_BEST}),
)


def _bag_of_words(size: int, layers: int, min_pairs: float, **settings: Any) -> Candidate:
    """A conv stem with few wide blocks, and the mean of token embeddings as text tower."""
    vision = VisionConfig(size, 8, 192, layers, 3, pool="mean", stem="conv")
    text = TextConfig(4096, 48, 256, 1, 4, 512, encoder="bag_of_words")
    settings = {**_FEW_PAIRS, "model": ModelConfig(vision, text, 256, head="standardized"), **settings}
    return Candidate(f"{size} px, {layers} layers", min_pairs, settings, _REGULARIZATION)


def _preset(name: str, min_pairs: float, **settings: Any) -> Candidate:
    """The settings in which a preset differs from the defaults, and more."""
    defaults = vars(TrainConfig())
    changed = {key: value for key, value in vars(PRESETS[name]).items() if value != defaults[key]}
    return Candidate(name, min_pairs, {**changed, **settings})


BAG_OF_WORDS = [_bag_of_words(32, 2, 0), _bag_of_words(48, 2, 45_000), _bag_of_words(48, 3, 110_000, lr=6e-3)]
TRANSFORMERS = [_preset(name, pairs, crop_scale=0.6, hflip=True) for name, pairs in (("tiny", 3e6), ("small", 2e7))]
SYNTHETIC = [_preset("nano", 0)]  # its captions say left and right: no flip


@dataclass(frozen=True)
class DataSummary:
    """What the training data looks like, from a sample."""

    images: int
    captions_per_image: int
    words_per_caption: float
    left_right: float  # fraction of captions that say left or right
    is_synthetic: bool

    @classmethod
    def from_sources(cls, sources: Sequence[Source]) -> "DataSummary":
        largest = max((source.train for source in sources), key=len)
        sampled = [largest.captions(row) for row in evenly_spaced(len(largest), SAMPLE)]
        captions = [caption for of_image in sampled for caption in of_image]
        return cls(
            images=round(sum(source.weight * len(source.train) for source in sources)),
            captions_per_image=median_high(len(of_image) for of_image in sampled),
            words_per_caption=median(len(caption.split()) for caption in captions),
            left_right=sum(bool(LEFT_RIGHT.search(caption)) for caption in captions) / len(captions),
            is_synthetic=all(source.spec.startswith("synthetic:") for source in sources),
        )


@dataclass(frozen=True)
class TimeBudget:
    budget_s: float
    images: int
    decode_s: float  # for all images that are not cached

    @property
    def decodes_on_the_fly(self) -> bool:
        return self.decode_s > MAX_DECODING * self.budget_s

    def pairs(self, pairs_per_s: float) -> float:
        """Pairs seen in training at this speed."""
        seconds = (1 - OVERHEAD) * self.budget_s
        if self.decodes_on_the_fly:
            return seconds / (1 / pairs_per_s + self.decode_s / self.images)
        return (seconds - self.decode_s) * pairs_per_s


def fit_budget(
    config: TrainConfig, given: Mapping[str, Any], sources: Sequence[Source], console: Console
) -> tuple[TrainConfig, str]:
    """The config that suits the budget, with the user's own settings; and the reason."""
    assert config.budget_s is not None
    data = DataSummary.from_sources(sources)
    natural = BAG_OF_WORDS + (TRANSFORMERS if data.images >= TRANSFORMER_FROM else [])
    candidates = [adapt_to_data(candidate, data) for candidate in (SYNTHETIC if data.is_synthetic else natural)]

    def configured(settings: Settings) -> TrainConfig:
        if given.get("model.text.encoder") == "transformer":  # has no word dropout
            settings = {key: value for key, value in settings.items() if key != "word_dropout"}
        return check_config(with_defaults(TrainConfig(), settings, given))

    smallest = configured({**candidates[0].settings, **dict(candidates[0].regularization).get(0, {})})
    budget = TimeBudget(config.budget_s, data.images, decoding_time(sources, smallest))
    speeds, flops = list[float](), list[int]()
    with console.progress("timing models of several sizes", len(candidates)) as advance:
        for candidate in candidates:
            trial = configured(candidate.settings)
            vision: Any = trial.model.vision
            flops.append(vision.tokens * vision.layers * vision.width**2)  # of an image, up to a constant
            fastest = OPTIMISM * speeds[-1] * flops[-2] / flops[-1] if speeds else float("inf")
            if budget.pairs(fastest) < candidate.min_pairs:
                break  # this and all larger models are too slow
            try:
                speeds.append(training_speed(trial, round(1.3 * data.words_per_caption) + 2, TRIAL * config.budget_s))
            except ValueError:
                if not speeds:
                    raise
                break  # smaller models can be trained
            advance(1)
    settings, reason = choose_candidate(budget, candidates, speeds)
    if data.left_right > MAX_LEFT_RIGHT:
        reason += "; captions say left and right, so images are not flipped"
    return configured(settings), reason


def adapt_to_data(candidate: Candidate, data: DataSummary) -> Candidate:
    """Limit batch size and captions to the data; no flips where captions say left or right."""
    defaults, settings = TrainConfig(), dict(candidate.settings)
    settings["batch_size"] = max(2, min(settings.get("batch_size", defaults.batch_size), data.images // 4))
    limit = settings.get("captions_per_image", defaults.captions_per_image)
    settings["captions_per_image"] = min(data.captions_per_image, limit)
    if data.left_right > MAX_LEFT_RIGHT:
        settings["hflip"] = False
    return replace(candidate, settings=settings)


def decoding_time(sources: Sequence[Source], config: TrainConfig) -> float:
    """Seconds to decode all images that are not cached, from a sample."""
    seen = config.model.vision.preprocess
    stored = replace(seen, size=stored_size(seen.size, config.crop_scale))
    missing = [source for source in sources if PixelCache(source.train, stored).missing_bytes]
    if not missing:
        return 0.0
    largest = max((source.train for source in missing), key=len)
    rows = list(evenly_spaced(len(largest), SAMPLE // 2))
    decode_rows(largest, stored, rows[:1])  # warm-up: lazy imports
    started, seconds, decoded = time.perf_counter(), 0.0, 0
    while decoded < len(rows) and seconds < MAX_SAMPLE_S:
        decode_rows(largest, stored, [rows[decoded]])
        decoded, seconds = decoded + 1, time.perf_counter() - started
    per_image = seconds / decoded / (config.workers or os.cpu_count() or 1)
    return per_image * sum(len(source.train) for source in missing)


def decodes_on_the_fly(sources: Sequence[Source], config: TrainConfig, console: Console) -> tuple[bool, ...]:
    """For each source whether its images are decoded on the fly, as decoding all first would use up the budget."""
    assert config.budget_s is not None
    budget = TimeBudget(config.budget_s, 0, decoding_time(sources, config))
    if not config.cache_gb or not budget.decodes_on_the_fly:
        return ()
    up_front = f"decoding everything up front would take about {duration(budget.decode_s)}"
    console.print(f"{up_front} of --budget {config.budget}, so images are decoded on the fly")
    return (True,) * len(sources)


def training_speed(config: TrainConfig, tokens: int, max_s: float) -> float:
    """Pairs per second of real training steps on random images and captions, timed for at most about `max_s`."""
    plan, samples_ms = default_plan(config).plan, list[float]()
    batch = random_batch(config, config.batch_size, max(3, min(tokens, config.model.text.context_length)))
    try:
        with torch.random.fork_rng(devices=[]):  # the run has its own random state
            state = TrainState(CLIP(config.model), config, replace(plan, compile=False))
        while len(samples_ms) < TRIAL_STEPS and sum(samples_ms) < 1e3 * max_s:
            samples_ms.append(time_step(state, plan, batch)[0])
    except devices.DEVICE_ERRORS as error:
        reason = short_error(error)
        raise ValueError(f"a batch of {config.batch_size} pairs does not run on {plan.device}: {reason}") from None
    finally:
        devices.apply_plan(Plan())
    return 1e3 * config.batch_size / min(samples_ms)


def choose_candidate(
    budget: TimeBudget, candidates: Sequence[Candidate], speeds: Sequence[float]
) -> tuple[Settings, str]:
    """The largest candidate that sees the pairs it needs, or else the smallest; and the reason."""
    pairs = [budget.pairs(speed) for speed in speeds]
    best = max((i for i, seen in enumerate(pairs) if seen >= candidates[i].min_pairs), default=0)
    candidate, epochs = candidates[best], pairs[best] / budget.images
    length = f"{duration(budget.budget_s)} are about {epochs:,.{1 if epochs < 10 else 0}f} epochs"
    reason = f"{candidate.name}; {length} of {budget.images:,} images at {speeds[best]:,.0f} pairs/s"
    if best + 1 < len(pairs):
        seen, needed = (f"{float(f'{n:.2g}'):,.0f}" for n in (pairs[best + 1], candidates[best + 1].min_pairs))
        reason += f"; the next larger model would see {seen} pairs and needs {needed}"
    regularization = [settings for from_epochs, settings in candidate.regularization if epochs >= from_epochs]
    settings = {**candidate.settings, **(regularization or [{}])[-1], "epochs": max(1, round(epochs))}
    if budget.decodes_on_the_fly:
        settings["cache_gb"] = 0.0
        up_front = f"decoding everything up front would take {duration(budget.decode_s)}"
        reason += f"; {up_front}, so images are decoded on the fly"
    return {**settings, "eval_every": max(1, round(epochs) // EVALUATIONS)}, reason
