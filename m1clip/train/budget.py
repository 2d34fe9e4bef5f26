"""What to train from nothing in the time there is: by the number of pictures and by how fast this machine is.

The rungs were found by experiment (docs/race.md). Each has the number of looks at every picture from which it
beats the one below; how many looks the time allows is measured here, by real steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from m1clip import devices
from m1clip.config import PRESETS, TrainConfig
from m1clip.data.sources import open_sources
from m1clip.devices import Plan
from m1clip.shapes import ModelConfig, TextConfig, VisionConfig
from m1clip.train.screen import Screen
from m1clip.train.timing import contest, some_batch
from m1clip.words import clock

MANY = 50_000
"""Pictures from which captions are worth reading in the order of their words."""
TOKENS = 16
TRIAL_S = 0.3
EVALUATIONS = 6
PREPARING = 0.1  # of the time, for reading, decoding, evaluating


@dataclass(frozen=True)
class Rung:
    name: str
    looks: float
    """At each picture: with fewer, the rung below learns more."""
    changes: dict[str, Any]
    """Of the configuration."""


def _bag(size: int, patch: int, width: int, depth: int, words: int, embed: int) -> ModelConfig:
    """Few patches, few and wide blocks behind convolutions, and a caption as the mean of its words."""
    vision = VisionConfig(size, patch, width, depth, width // 64, pool="mean", stem="conv")
    return ModelConfig(vision, TextConfig(4096, 48, words, 1, 4, 2 * words, mix="bag"), embed, head="linear")


_SOON: dict[str, Any] = {"optimizer": "muon", "lr": 8e-3, "batch": 128, "captions": 5, "label_smoothing": 0.1}
_SOON |= {"weight_decay": 0.1, "clip_norm": 5.0, "flip": True, "save_epochs": 0}
_MUCH = {**_SOON, "lr": 6e-3, "weight_decay": 0.3, "crop": 0.4, "colour": 0.2, "drop_words": 0.5}
FEW_PICTURES: list[Rung] = [
    Rung("a glance", 0, {**_SOON, "model": _bag(32, 8, 192, 2, 256, 256), "crop": 0.8, "drop_words": 0.1}),
    Rung("a look", 6, {**_SOON, "model": _bag(48, 8, 192, 2, 256, 256), "crop": 0.6, "drop_words": 0.3}),
    Rung("a long look", 15, {**_MUCH, "model": _bag(48, 8, 192, 3, 256, 256), "head_dropout": 0.2}),
]
MANY_PICTURES = [
    Rung(name, looks, {**vars(PRESETS[name]), "crop": 0.6, "flip": True, "save_epochs": 0})
    for name, looks in (("nano", 0.0), ("tiny", 4.0), ("small", 8.0))
]


@dataclass(frozen=True)
class Picked:
    changes: dict[str, Any]
    why: str


def pick(config: TrainConfig, screen: Screen) -> Picked:
    """The defaults for this budget, and why these."""
    assert config.budget_s is not None
    sources = open_sources(config, screen.working)
    pictures = sum(len(one.train) for one in sources)
    captions = max(len(one.train.captions(row)) for one in sources for row in range(min(20, len(one.train))))
    rungs = MANY_PICTURES if pictures >= MANY or "synthetic:" in config.data else FEW_PICTURES
    rungs = [fitted(rung, pictures, captions) for rung in rungs]
    speeds: list[float] = []
    with screen.working("timing models of several sizes", len(rungs)) as advance:
        for rung in rungs:
            speeds.append(pairs_per_second(replace(config, **rung.changes)))
            advance(1)
            if looks(config.budget_s, speeds[-1], pictures) < rung.looks:
                break  # larger ones are slower still
    return decide(config.budget_s, pictures, rungs, speeds)


def fitted(rung: Rung, pictures: int, captions: int) -> Rung:
    """The same for so many pictures with so many captions each."""
    batch = max(2, min(rung.changes["batch"], pictures // 4))
    return replace(
        rung, changes={**rung.changes, "captions": min(captions, rung.changes["captions"]), "batch": batch}
    )


def looks(budget_s: float, speed: float, pictures: int) -> float:
    return (1 - PREPARING) * budget_s * speed / pictures


def pairs_per_second(config: TrainConfig) -> float:
    """Of real steps of this model, on random pictures and captions."""
    plan = Plan(str(devices.choose("auto")[0]) if config.device == "auto" else config.device)
    plan = replace(plan, threads=config.threads)
    batch = some_batch(config, config.batch, TOKENS)
    if config.captions > 1:
        batch = replace(batch, tokens_BL=batch.tokens_BL[:, None].repeat(1, config.captions, 1))
    timing = contest(config, [plan], batch, TRIAL_S)[0]
    if timing.failed:
        return 0.0
    return 1e3 * config.batch / min(timing.step_ms)


def decide(budget_s: float, pictures: int, rungs: Sequence[Rung], speeds: Sequence[float]) -> Picked:
    """Pure: the highest rung that gets the looks it needs, or else the lowest."""
    seen = [looks(budget_s, speed, pictures) for speed in speeds]
    fits = [number for number, rung in enumerate(rungs[: len(seen)]) if seen[number] >= rung.looks]
    best = max(fits, default=0)
    rung, epochs = rungs[best], max(1, round(seen[best]))
    why = f"{clock(budget_s)} are about {seen[best]:.3g} looks at each of {pictures:,} pictures"
    why += f" at {speeds[best]:,.0f} a second"
    if best + 1 < len(seen):
        above = rungs[best + 1]
        why += f"; the next larger model would get {seen[best + 1]:.2g} and wants {above.looks:g}"
    every = max(1, epochs // EVALUATIONS)
    return Picked({**rung.changes, "epochs": epochs, "eval_every": every}, why)
