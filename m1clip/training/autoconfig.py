"""What to train from nothing in the time there is: by the number of images and by how fast this machine is.

The candidates were found by experiment (docs/race.md). How large a model pays is a matter of the pairs that it
gets to see; how much it must be kept from learning by heart, of the looks at each image. How many there
will be is measured here, by real steps.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import Any

from m1clip import devices
from m1clip.config import PRESETS, ModelConfig, TextConfig, TrainConfig, VisionConfig
from m1clip.console import Console
from m1clip.data.augment import stored_size
from m1clip.data.pixel_cache import PixelCache
from m1clip.data.sources import Source, open_sources
from m1clip.data.workers import decode_rows
from m1clip.devices import Plan
from m1clip.format import duration
from m1clip.training.setup import spread
from m1clip.training.timing import some_batch, time_plans

MANY = 50_000
"""Images from which, if they are seen often, captions are worth reading in the order of their words."""
TRIAL_S = 0.3
EVALUATIONS = 6
PREPARING = 0.1  # of the time, for reading, evaluating and saving
MOST_DECODING = 0.2  # of the time; where it would take more, images are decoded as they are seen
SAMPLE = 100  # images, whose captions are looked at
SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)
SAYS_SIDES = 0.02  # of the captions: images are not mirrored then
HOPE = 2.0  # a larger model may be so much faster than its products say


@dataclass(frozen=True)
class Candidate:
    name: str
    pairs: float
    """To be seen in the time: with fewer, the candidate below learns more."""
    changes: dict[str, Any]
    """Of the configuration."""
    regularization: tuple[tuple[float, dict[str, Any]], ...] = ()
    """Further changes, from so many looks at each image on: against learning by heart."""


def _bag(size: int, patch: int, width: int, depth: int, words: int, embed: int) -> ModelConfig:
    """Few patches, few and wide blocks behind convolutions, and a caption as the mean of its words."""
    vision = VisionConfig(size, patch, width, depth, width // 64, pool="mean", stem="conv")
    return ModelConfig(
        vision,
        TextConfig(4096, 48, words, 1, 4, 2 * words, encoder="bag_of_words"),
        embed,
        head="standardized",
    )


def changes_of(preset: TrainConfig) -> dict[str, Any]:
    """What it has otherwise than the defaults."""
    plain = vars(TrainConfig())
    return {key: value for key, value in vars(preset).items() if value != plain[key]}


_SOON: dict[str, Any] = {
    "optimizer": "muon",
    "lr": 8e-3,
    "batch_size": 128,
    "captions_per_image": 5,
    "label_smoothing": 0.1,
}
_SOON |= {"weight_decay": 0.1, "grad_clip": 5.0, "hflip": True, "preset": "budget"}
# Patience without end, which keeps the best state for the case that all is learned by heart after all.
_ENOUGH = {"patience": 10**6, "best_metric": "t2i_r10"}
_CARE: tuple[tuple[float, dict[str, Any]], ...] = (
    (0, {"crop_scale": 0.8, "word_dropout": 0.1}),
    (10, {"crop_scale": 0.6, "word_dropout": 0.3}),
    (
        15,
        {
            "crop_scale": 0.4,
            "color_jitter": 0.2,
            "word_dropout": 0.5,
            "weight_decay": 0.3,
            "head_dropout": 0.2,
            **_ENOUGH,
        },
    ),
)
BAGS: list[Candidate] = [
    Candidate("a glance", 0, {**_SOON, "model": _bag(32, 8, 192, 2, 256, 256)}, _CARE),
    Candidate("a look", 45_000, {**_SOON, "model": _bag(48, 8, 192, 2, 256, 256)}, _CARE),
    Candidate("a long look", 110_000, {**_SOON, "model": _bag(48, 8, 192, 3, 256, 256), "lr": 6e-3}, _CARE),
]
_WHOLE = {"crop_scale": 0.6, "hflip": True}
READERS = [
    Candidate(name, pairs, {**changes_of(PRESETS[name]), **_WHOLE})
    for name, pairs in (("tiny", 3e6), ("small", 2e7))
]
SCENES = [Candidate("nano", 0.0, changes_of(PRESETS["nano"]))]  # their captions say left and right: no flip


@dataclass(frozen=True)
class TokenizedCaptions:
    """What is to be learned from, by a sample."""

    images: int
    captions: int
    """Of an image."""
    words: float
    """Of a caption."""
    sides: float
    """Captions that say left or right, as a part of all."""
    drawn: bool

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "TokenizedCaptions":
        largest = max((one.train for one in sources), key=len)
        told = [largest.captions(row) for row in spread(len(largest), SAMPLE)]
        every = [caption for some in told for caption in some]
        return cls(
            images=round(sum(one.weight * len(one.train) for one in sources)),
            captions=median_high(len(some) for some in told),
            words=median(len(caption.split()) for caption in every),
            sides=sum(bool(SIDES.search(caption)) for caption in every) / len(every),
            drawn=all(one.spec.startswith("synthetic:") for one in sources),
        )


@dataclass(frozen=True)
class Time:
    """A budget, and how much of it is for steps."""

    budget_s: float
    images: int
    decode_s: float
    """For all images that are not in the cache."""

    @property
    def is_live(self) -> bool:
        """Whether images are better decoded as they are seen."""
        return self.decode_s > MOST_DECODING * self.budget_s

    def pairs(self, speed: float) -> float:
        """That are seen, at so many a second."""
        seconds = (1 - PREPARING) * self.budget_s
        if self.is_live:
            return seconds / (1 / speed + self.decode_s / self.images)
        return (seconds - self.decode_s) * speed


@dataclass(frozen=True)
class Picked:
    changes: dict[str, Any]
    why: str


def pick(
    config: TrainConfig, with_flags: Callable[[dict[str, Any]], TrainConfig], console: Console
) -> Picked:
    """The defaults for this budget, and why these. `with_flags` has what was asked for besides."""
    assert config.budget_s is not None
    sources = open_sources(config, console.working)
    told = TokenizedCaptions.of(sources)
    candidates = SCENES if told.drawn else [*BAGS, *READERS] if told.images >= MANY else BAGS
    candidates = [fitted(candidate, told) for candidate in candidates]
    least = with_flags({**candidates[0].changes, **dict(candidates[0].regularization).get(0, {})})
    there = Time(config.budget_s, told.images, decode_s(sources, least))
    speeds: list[float] = []
    sizes: list[int] = []
    with console.working("timing models of several sizes", len(candidates)) as advance:
        for candidate in candidates:
            wished = with_flags(candidate.changes)
            sizes.append(size_of(wished))
            hope = HOPE * speeds[-1] * sizes[-2] / sizes[-1] if speeds else float("inf")
            if there.pairs(hope) < candidate.pairs:
                break  # it and all larger ones are too slow
            try:
                speeds.append(pairs_per_second(wished, round(1.3 * told.words) + 2))
            except ValueError:
                if not speeds:
                    raise
                break  # the smaller ones can
            advance(1)
    picked = decide(there, candidates, speeds)
    mirror = "" if told.sides <= SAYS_SIDES else "; captions say left and right, so nothing is mirrored"
    return replace(picked, why=picked.why + mirror)


def fitted(candidate: Candidate, told: TokenizedCaptions) -> Candidate:
    """The same for so many images with such captions."""
    plain = TrainConfig()
    changes = dict(candidate.changes)
    changes["batch_size"] = max(2, min(changes.get("batch_size", plain.batch_size), told.images // 4))
    changes["captions_per_image"] = min(
        told.captions, changes.get("captions_per_image", plain.captions_per_image)
    )
    if told.sides > SAYS_SIDES:
        changes["hflip"] = False
    return replace(candidate, changes=changes)


def decode_s(sources: Sequence[Source], config: TrainConfig) -> float:
    """Seconds to decode what the cache does not have, by a few of the images."""
    side = stored_size(config.model.vision.image_size, config.crop_scale)
    missing = [one for one in sources if PixelCache(one.train, side).missing_bytes]
    if not missing:
        return 0.0
    largest = max((one.train for one in missing), key=len)
    rows = list(spread(len(largest), SAMPLE // 2))
    decode_rows(largest, side, rows[:2])  # what is imported when first needed
    began = time.perf_counter()
    decode_rows(largest, side, rows)
    each = (time.perf_counter() - began) / len(rows) / (config.workers or os.cpu_count() or 1)
    return each * sum(len(one.train) for one in missing)


def size_of(config: TrainConfig) -> int:
    """Products of an image, in proportion: for candidates that are not timed."""
    vision = config.model.vision
    assert isinstance(vision, VisionConfig)
    return vision.tokens * vision.layers * vision.width**2


def pairs_per_second(config: TrainConfig, tokens: int) -> float:
    """Of real steps of this model, on random images and captions."""
    plan = Plan(str(devices.default_device("auto")[0]) if config.device == "auto" else config.device)
    plan = replace(plan, threads=config.threads)
    batch = some_batch(config, config.batch_size, max(3, min(tokens, config.model.text.context_length)))
    timing = time_plans(config, [plan], batch, TRIAL_S)[0]
    if timing.failed:
        raise ValueError(
            f"no step of {config.batch_size} pairs could be taken on {plan.device}: {timing.failed}"
        )
    return 1e3 * config.batch_size / min(timing.step_ms)


def decide(there: Time, candidates: Sequence[Candidate], speeds: Sequence[float]) -> Picked:
    """Pure: the highest candidate that gets to see the pairs it needs, or else the lowest."""
    seen = [there.pairs(speed) for speed in speeds]
    best = max((number for number, pairs in enumerate(seen) if pairs >= candidates[number].pairs), default=0)
    candidate, looks = candidates[best], seen[best] / there.images
    regularization = [changes for least, changes in candidate.regularization if looks >= least]
    often = f"{looks:.1f}" if looks < 10 else f"{looks:,.0f}"
    why = f"{candidate.name}; {duration(there.budget_s)} are about {often} looks at each of {there.images:,} images"
    why += f" at {speeds[best]:,.0f} a second"
    if best + 1 < len(seen):
        above = candidates[best + 1].pairs
        why += f"; the next larger model would see {rounded(seen[best + 1])} pairs and wants {rounded(above)}"
    epochs = max(1, round(looks))
    changes = {**candidate.changes, **(regularization or [{}])[-1], "epochs": epochs}
    if there.is_live:
        changes["cache_gb"] = 0.0
        why += f"; to decode all would take {duration(there.decode_s)}, so they are when they are seen"
    return Picked({**changes, "eval_every": max(1, epochs // EVALUATIONS)}, why)


def rounded(number: float) -> str:
    """To two figures."""
    return f"{float(f'{number:.2g}'):,.0f}"
