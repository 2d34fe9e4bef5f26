"""What to train from nothing in the time there is: by the number of pictures and by how fast this machine is.

The rungs were found by experiment (docs/race.md). How large a model pays is a matter of the pairs that it
gets to see; how much it must be kept from learning by heart, of the looks at each picture. How many there
will be is measured here, by real steps.
"""

from collections.abc import Callable, Sequence
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
"""Pictures from which, if they are seen often, captions are worth reading in the order of their words."""
TOKENS = 16
TRIAL_S = 0.3
EVALUATIONS = 6
PREPARING = 0.1  # of the time, for reading, decoding, evaluating
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
_CARE: tuple[tuple[float, dict[str, Any]], ...] = (
    (0, {"crop": 0.8, "drop_words": 0.1}),
    (10, {"crop": 0.6, "drop_words": 0.3}),
    (15, {"crop": 0.4, "colour": 0.2, "drop_words": 0.5, "weight_decay": 0.3, "head_dropout": 0.2}),
)
BAGS: list[Rung] = [
    Rung("a glance", 0, {**_SOON, "model": _bag(32, 8, 192, 2, 256, 256)}, _CARE),
    Rung("a look", 36_000, {**_SOON, "model": _bag(48, 8, 192, 2, 256, 256)}, _CARE),
    Rung("a long look", 90_000, {**_SOON, "model": _bag(48, 8, 192, 3, 256, 256), "lr": 6e-3}, _CARE),
]
_WHOLE = {"crop": 0.6, "flip": True, "save_epochs": 0}
READERS = [
    Rung(name, pairs, {**changes_of(PRESETS[name]), **_WHOLE})
    for name, pairs in (("tiny", 3e6), ("small", 2e7))
]
SCENES = [Rung("nano", 0.0, changes_of(PRESETS["nano"]))]  # their captions say left and right: no flip


@dataclass(frozen=True)
class Picked:
    changes: dict[str, Any]
    why: str


def pick(config: TrainConfig, with_flags: Callable[[dict[str, Any]], TrainConfig], screen: Screen) -> Picked:
    """The defaults for this budget, and why these. `with_flags` has what was asked for besides."""
    assert config.budget_s is not None
    sources = open_sources(config, screen.working)
    pictures = round(sum(one.weight * len(one.train) for one in sources))
    captions = max(len(one.train.captions(row)) for one in sources for row in range(min(20, len(one.train))))
    drawn = all(one.spec.startswith("synthetic:") for one in sources)
    rungs = SCENES if drawn else [*BAGS, *READERS] if pictures >= MANY else BAGS
    rungs = [fitted(rung, pictures, captions) for rung in rungs]
    speeds: list[float] = []
    sizes: list[int] = []
    with screen.working("timing models of several sizes", len(rungs)) as advance:
        for rung in rungs:
            wished = with_flags(rung.changes)
            sizes.append(size_of(wished))
            hope = HOPE * speeds[-1] * sizes[-2] / sizes[-1] if speeds else float("inf")
            if seen_in(config.budget_s, hope) < rung.pairs:
                break  # it and all larger ones are too slow
            speeds.append(pairs_per_second(wished))
            advance(1)
    return decide(config.budget_s, pictures, rungs, speeds)


def fitted(rung: Rung, pictures: int, captions: int) -> Rung:
    """The same for so many pictures with so many captions each."""
    plain = TrainConfig()
    batch = max(2, min(rung.changes.get("batch", plain.batch), pictures // 4))
    told = min(captions, rung.changes.get("captions", plain.captions))
    return replace(rung, changes={**rung.changes, "captions": told, "batch": batch})


def seen_in(budget_s: float, speed: float) -> float:
    """Pairs, at so many a second."""
    return (1 - PREPARING) * budget_s * speed


def size_of(config: TrainConfig) -> int:
    """Products of a picture, in proportion: for rungs that are not timed."""
    vision = config.model.vision
    assert isinstance(vision, VisionConfig)
    return vision.tokens * vision.depth * vision.width**2


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
    """Pure: the highest rung that gets to see the pairs it needs, or else the lowest."""
    seen = [seen_in(budget_s, speed) for speed in speeds]
    best = max((number for number, pairs in enumerate(seen) if pairs >= rungs[number].pairs), default=0)
    rung, looks = rungs[best], seen[best] / pictures
    care = [changes for least, changes in rung.care if looks >= least]
    often = f"{looks:.1f}" if looks < 10 else f"{looks:,.0f}"
    why = f"{rung.name}; {clock(budget_s)} are about {often} looks at each of {pictures:,} pictures"
    why += f" at {speeds[best]:,.0f} a second"
    if best + 1 < len(seen):
        above = rungs[best + 1].pairs
        why += f"; the next larger model would see {rounded(seen[best + 1])} pairs and wants {rounded(above)}"
    epochs = max(1, round(looks))
    changes = {**rung.changes, **(care or [{}])[-1], "epochs": epochs}
    if looks < 1:
        changes["cache_gb"] = 0.0
        why += "; as not all will be seen, they are decoded when they are"
    return Picked({**changes, "eval_every": max(1, epochs // EVALUATIONS)}, why)


def rounded(number: float) -> str:
    """To two figures."""
    return f"{float(f'{number:.2g}'):,.0f}"
