"""What to train from nothing in the time there is: by the number of pictures and by how fast this machine is.

The rungs were found by experiment (docs/race.md). How large a model pays is a matter of the pairs that it
gets to see; how much it must be kept from learning by heart, of the looks at each picture. How many there
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
from m1clip.config import PRESETS, TrainConfig
from m1clip.console import Screen
from m1clip.data.augment import margin
from m1clip.data.pixel_cache import Store
from m1clip.data.sources import Source, open_sources
from m1clip.data.workers import decode_rows
from m1clip.devices import Plan
from m1clip.format import clock
from m1clip.shapes import ModelConfig, TextConfig, VisionConfig
from m1clip.training.setup import spread
from m1clip.training.timing import contest, some_batch

MANY = 50_000
"""Pictures from which, if they are seen often, captions are worth reading in the order of their words."""
TRIAL_S = 0.3
EVALUATIONS = 6
PREPARING = 0.1  # of the time, for reading, evaluating and saving
MOST_DECODING = 0.2  # of the time; where it would take more, pictures are decoded as they are seen
SAMPLE = 100  # pictures, whose captions are looked at
SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)
SAYS_SIDES = 0.02  # of the captions: pictures are not mirrored then
HOPE = 2.0  # a larger model may be so much faster than its products say


@dataclass(frozen=True)
class Rung:
    name: str
    pairs: float
    """To be seen in the time: with fewer, the rung below learns more."""
    changes: dict[str, Any]
    """Of the configuration."""
    care: tuple[tuple[float, dict[str, Any]], ...] = ()
    """Further changes, from so many looks at each picture on: against learning by heart."""


def _bag(size: int, patch: int, width: int, depth: int, words: int, embed: int) -> ModelConfig:
    """Few patches, few and wide blocks behind convolutions, and a caption as the mean of its words."""
    vision = VisionConfig(size, patch, width, depth, width // 64, pool="mean", stem="conv")
    return ModelConfig(vision, TextConfig(4096, 48, words, 1, 4, 2 * words, mix="bag"), embed, head="linear")


def changes_of(preset: TrainConfig) -> dict[str, Any]:
    """What it has otherwise than the defaults."""
    plain = vars(TrainConfig())
    return {key: value for key, value in vars(preset).items() if value != plain[key]}


_SOON: dict[str, Any] = {"optimizer": "muon", "lr": 8e-3, "batch": 128, "captions": 5, "label_smoothing": 0.1}
_SOON |= {"weight_decay": 0.1, "clip_norm": 5.0, "flip": True, "save_epochs": 0, "preset": "budget"}
# Patience without end, which keeps the best state for the case that all is learned by heart after all.
_ENOUGH = {"patience": 10**6, "best_by": "t2i_r10"}
_CARE: tuple[tuple[float, dict[str, Any]], ...] = (
    (0, {"crop": 0.8, "drop_words": 0.1}),
    (10, {"crop": 0.6, "drop_words": 0.3}),
    (
        15,
        {"crop": 0.4, "colour": 0.2, "drop_words": 0.5, "weight_decay": 0.3, "head_dropout": 0.2, **_ENOUGH},
    ),
)
BAGS: list[Rung] = [
    Rung("a glance", 0, {**_SOON, "model": _bag(32, 8, 192, 2, 256, 256)}, _CARE),
    Rung("a look", 45_000, {**_SOON, "model": _bag(48, 8, 192, 2, 256, 256)}, _CARE),
    Rung("a long look", 110_000, {**_SOON, "model": _bag(48, 8, 192, 3, 256, 256), "lr": 6e-3}, _CARE),
]
_WHOLE = {"crop": 0.6, "flip": True, "save_epochs": 0}
READERS = [
    Rung(name, pairs, {**changes_of(PRESETS[name]), **_WHOLE})
    for name, pairs in (("tiny", 3e6), ("small", 2e7))
]
SCENES = [Rung("nano", 0.0, changes_of(PRESETS["nano"]))]  # their captions say left and right: no flip


@dataclass(frozen=True)
class Told:
    """What is to be learned from, by a sample."""

    pictures: int
    captions: int
    """Of a picture."""
    words: float
    """Of a caption."""
    sides: float
    """Captions that say left or right, as a part of all."""
    drawn: bool

    @classmethod
    def of(cls, sources: Sequence[Source]) -> "Told":
        largest = max((one.train for one in sources), key=len)
        told = [largest.captions(row) for row in spread(len(largest), SAMPLE)]
        every = [caption for some in told for caption in some]
        return cls(
            pictures=round(sum(one.weight * len(one.train) for one in sources)),
            captions=median_high(len(some) for some in told),
            words=median(len(caption.split()) for caption in every),
            sides=sum(bool(SIDES.search(caption)) for caption in every) / len(every),
            drawn=all(one.spec.startswith("synthetic:") for one in sources),
        )


@dataclass(frozen=True)
class Time:
    """A budget, and how much of it is for steps."""

    budget_s: float
    pictures: int
    decode_s: float
    """For all pictures that are not in the cache."""

    @property
    def is_live(self) -> bool:
        """Whether pictures are better decoded as they are seen."""
        return self.decode_s > MOST_DECODING * self.budget_s

    def pairs(self, speed: float) -> float:
        """That are seen, at so many a second."""
        seconds = (1 - PREPARING) * self.budget_s
        if self.is_live:
            return seconds / (1 / speed + self.decode_s / self.pictures)
        return (seconds - self.decode_s) * speed


@dataclass(frozen=True)
class Picked:
    changes: dict[str, Any]
    why: str


def pick(config: TrainConfig, with_flags: Callable[[dict[str, Any]], TrainConfig], screen: Screen) -> Picked:
    """The defaults for this budget, and why these. `with_flags` has what was asked for besides."""
    assert config.budget_s is not None
    sources = open_sources(config, screen.working)
    told = Told.of(sources)
    rungs = SCENES if told.drawn else [*BAGS, *READERS] if told.pictures >= MANY else BAGS
    rungs = [fitted(rung, told) for rung in rungs]
    least = with_flags({**rungs[0].changes, **dict(rungs[0].care).get(0, {})})
    there = Time(config.budget_s, told.pictures, decode_s(sources, least))
    speeds: list[float] = []
    sizes: list[int] = []
    with screen.working("timing models of several sizes", len(rungs)) as advance:
        for rung in rungs:
            wished = with_flags(rung.changes)
            sizes.append(size_of(wished))
            hope = HOPE * speeds[-1] * sizes[-2] / sizes[-1] if speeds else float("inf")
            if there.pairs(hope) < rung.pairs:
                break  # it and all larger ones are too slow
            try:
                speeds.append(pairs_per_second(wished, round(1.3 * told.words) + 2))
            except ValueError:
                if not speeds:
                    raise
                break  # the smaller ones can
            advance(1)
    picked = decide(there, rungs, speeds)
    mirror = "" if told.sides <= SAYS_SIDES else "; captions say left and right, so nothing is mirrored"
    return replace(picked, why=picked.why + mirror)


def fitted(rung: Rung, told: Told) -> Rung:
    """The same for so many pictures with such captions."""
    plain = TrainConfig()
    changes = dict(rung.changes)
    changes["batch"] = max(2, min(changes.get("batch", plain.batch), told.pictures // 4))
    changes["captions"] = min(told.captions, changes.get("captions", plain.captions))
    if told.sides > SAYS_SIDES:
        changes["flip"] = False
    return replace(rung, changes=changes)


def decode_s(sources: Sequence[Source], config: TrainConfig) -> float:
    """Seconds to decode what the cache does not have, by a few of the pictures."""
    side = margin(config.model.vision.image_size, config.crop)
    missing = [one for one in sources if Store(one.train, side).need]
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
    """Products of a picture, in proportion: for rungs that are not timed."""
    vision = config.model.vision
    assert isinstance(vision, VisionConfig)
    return vision.tokens * vision.depth * vision.width**2


def pairs_per_second(config: TrainConfig, tokens: int) -> float:
    """Of real steps of this model, on random pictures and captions."""
    plan = Plan(str(devices.choose("auto")[0]) if config.device == "auto" else config.device)
    plan = replace(plan, threads=config.threads)
    batch = some_batch(config, config.batch, max(3, min(tokens, config.model.text.length)))
    timing = contest(config, [plan], batch, TRIAL_S)[0]
    if timing.failed:
        raise ValueError(f"no step of {config.batch} pairs could be taken on {plan.device}: {timing.failed}")
    return 1e3 * config.batch / min(timing.step_ms)


def decide(there: Time, rungs: Sequence[Rung], speeds: Sequence[float]) -> Picked:
    """Pure: the highest rung that gets to see the pairs it needs, or else the lowest."""
    seen = [there.pairs(speed) for speed in speeds]
    best = max((number for number, pairs in enumerate(seen) if pairs >= rungs[number].pairs), default=0)
    rung, looks = rungs[best], seen[best] / there.pictures
    care = [changes for least, changes in rung.care if looks >= least]
    often = f"{looks:.1f}" if looks < 10 else f"{looks:,.0f}"
    why = (
        f"{rung.name}; {clock(there.budget_s)} are about {often} looks at each of {there.pictures:,} pictures"
    )
    why += f" at {speeds[best]:,.0f} a second"
    if best + 1 < len(seen):
        above = rungs[best + 1].pairs
        why += f"; the next larger model would see {rounded(seen[best + 1])} pairs and wants {rounded(above)}"
    epochs = max(1, round(looks))
    changes = {**rung.changes, **(care or [{}])[-1], "epochs": epochs}
    if there.is_live:
        changes["cache_gb"] = 0.0
        why += f"; to decode all would take {clock(there.decode_s)}, so they are when they are seen"
    return Picked({**changes, "eval_every": max(1, epochs // EVALUATIONS)}, why)


def rounded(number: float) -> str:
    """To two figures."""
    return f"{float(f'{number:.2g}'):,.0f}"
