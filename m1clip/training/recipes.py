"""Which part of a model learns, and which way is the best for the pairs, the start and the time at hand."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from m1clip import devices
from m1clip.config import RECIPES, Recipe, TrainConfig
from m1clip.console import Console
from m1clip.data.batches import BatchStream
from m1clip.data.sources import open_sources
from m1clip.devices import Plan
from m1clip.format import duration
from m1clip.model.clip import CLIP
from m1clip.model.heads import ProjectionHead
from m1clip.model.lora import add_lora, merged_state_dict
from m1clip.model.tokenizer import Tokenizer, make_tokenizer
from m1clip.training import init
from m1clip.training.init import InitModel

FEW, MANY = 10_000, 200_000
"""Images below which whole towers are soon learned by heart, and from which all of them is worth moving."""
BACKWARD = 3.0  # a step against a forward pass
VIEWS = 3
TRIED = 8
LOOKED, MOST_LOOKED = 64, 20_000


@dataclass(frozen=True)
class Estimate:
    """Seconds on this machine, from a few images and captions that were timed just now."""

    image_s: float
    caption_s: float

    def locked(self, config: TrainConfig, images: int, captions: int) -> float:
        return images * VIEWS * self.image_s + captions * self.caption_s

    def tuned(self, config: TrainConfig, images: int) -> float:
        return config.epochs * images * BACKWARD * (self.image_s + self.caption_s)


def choose(config: TrainConfig, console: Console) -> tuple[Recipe, str]:
    """The recipe for what is at hand, and why."""
    if not config.is_pretrained:
        return "scratch", "nothing learned is at hand: --init, --vision or --text would bring it"
    sources = open_sources(config, console.working)
    images = sum(len(one.train) for one in sources)
    captions = sum(len(one.train.captions(row)) for one in sources for row in range(min(100, len(one.train))))
    captions = round(captions / sum(min(100, len(one.train)) for one in sources) * images)
    config, found = init.find(config, None)
    return decide(config, found, images, captions, measured(config, found))


def decide(
    config: TrainConfig, found: InitModel, images: int, captions: int, cost: Estimate
) -> tuple[Recipe, str]:
    """Pure: by what is at hand, how many pairs there are, and what each way would take of the budget."""
    counted, budget = f"{images:,} images", config.budget_s
    if len(found.learned) < 2:
        one = found.learned[0]
        return (
            "frozen",
            f"only the {one} tower has learned before: it stands still, and the other learns to follow",
        )
    lock_s = cost.locked(config, images, captions)
    ways = {name: cost.tuned(_with(config, name), images) for name in ("lora", "full")}
    told = f"{counted}; about {duration(lock_s)} to encode them once"
    if found.known is None:
        return "frozen", f"the towers have never met, so heads come first: {told}, then seconds"
    requested = "full" if images >= MANY else "lora"
    if budget is not None and ways[requested] > budget:
        return (
            "frozen",
            f"{told}, where {requested} would take about {duration(ways[requested])} of the {duration(budget)} you have",
        )
    if requested == "full":
        return "full", f"{counted} are enough to move every weight (about {duration(ways['full'])})"
    few = "few enough to learn by heart" if images < FEW else "not enough to move every weight"
    return (
        "lora",
        f"{counted} are {few}: adapters change less and forget less (about {duration(ways['lora'])})",
    )


def _with(config: TrainConfig, recipe: str) -> TrainConfig:
    from dataclasses import replace

    return replace(config, **RECIPES[recipe])


def measured(config: TrainConfig, found: InitModel) -> Estimate:
    """Forward passes of a few blank images and short captions, after one to warm up."""
    words: Tokenizer = found.tokenizer or make_tokenizer("char", [], 0)
    model = init.begin(config, found, words) if found.known or found.tokenizer else CLIP(config.model)
    side = model.config.vision.image_size
    images_BHWC = torch.from_numpy(np.zeros((TRIED, side, side, 3), np.uint8))
    tokens_BL = torch.ones(TRIED, min(16, model.config.text.context_length), dtype=torch.long)

    def took(work: Callable[[], torch.Tensor]) -> float:
        with torch.inference_mode():
            work().cpu()
            began = time.perf_counter()
            work().cpu()
        return (time.perf_counter() - began) / TRIED

    model.to_devices(
        *(2 * [devices.default_device("auto")[0]]) if config.device == "auto" else Plan(config.device).devices
    )
    vision, text = model.devices
    return Estimate(
        took(lambda: model.vision(model.normalize(images_BHWC.to(vision)))),
        took(lambda: model.text(tokens_BL.to(text))),
    )


def locked_sides(config: TrainConfig, found: InitModel) -> tuple[str, ...]:
    """The towers that stand still, whose features are encoded once."""
    if config.recipe == "scratch" or (config.recipe != "frozen" and config.freeze == "auto"):
        return ()
    return {"both": ("vision", "text"), "vision": ("vision",), "text": ("text",), "auto": found.learned}[
        config.freeze
    ]


def prepare(model: CLIP, config: TrainConfig, locked: tuple[str, ...]) -> None:
    """Let learn what the recipe lets learn. The rest keeps still, and its gradients are never computed."""
    free = [name for name in ("vision", "text") if name not in locked]
    for name in locked:
        model.get_submodule(name).requires_grad_(False)
    if config.recipe == "lora":
        torch.manual_seed(config.seed)
        add_lora(model, free, config.lora_rank)
    if config.recipe == "full" and config.unfreeze:
        for name in free:
            tower = model.get_submodule(name)
            for key, weight in tower.named_parameters():
                weight.requires_grad_(int(tower.layers_from_top(key)) <= config.unfreeze)  # type: ignore[operator]


@torch.no_grad()
def meet(model: CLIP, found: InitModel, batches: BatchStream) -> None:
    """Heads that are new take their features' mean and spread for 0 and 1."""
    if found.known is not None:
        return
    known, batch = batches.features, None
    for side, head in (("vision", model.vision_projection), ("text", model.text_projection)):
        if not isinstance(head, ProjectionHead):
            continue
        stored = {"vision": known.views[0] if known.views else None, "text": known.texts}[side]
        if stored is not None:
            some = stored[:: -(-len(stored) // MOST_LOOKED)]  # at equal distances
            head.calibrate(torch.from_numpy(np.array(some)))
            continue
        batch = batch or batches.at(0).split(LOOKED)[0].to(*model.devices)
        images = side == "vision"
        head.calibrate(
            model.vision(model.normalize(batch.images_BHWC))
            if images
            else model.text(batch.tokens_BL.flatten(0, -2))
        )


def between(model: CLIP, start: CLIP, part: float) -> CLIP:
    """A model between `start` (0) and `model` (1), weight by weight (WiSE-FT, Wortsman et al. 2022)."""
    first, last = start.state_dict(), merged_state_dict(model)
    for name, weight in first.items():
        if weight.is_floating_point():
            weight.lerp_(last[name].cpu(), part)  # in place: these are the weights of `start`
    return start


def require_sense(config: TrainConfig, found: InitModel) -> None:
    """What does not go together, in a sentence."""
    if config.wise_ft < 1 and (not found or config.vision or config.text):
        raise ValueError(
            "--wise-ft goes between a CLIP (--init) and what became of it; what is new has no start"
        )
    if config.recipe == "scratch":
        if found:
            raise ValueError("--recipe scratch begins with nothing; leave out --init, --vision and --text")
        return
    if not found:
        raise ValueError(
            f"--recipe {config.recipe} needs something learned: --init CLIP, or --vision timm:NAME and "
            "--text hf:NAME"
        )
    ours = {
        "patch_dropout": config.patch_dropout,
        "grad_checkpointing": config.grad_checkpointing,
    }
    for flag in ("patch_dropout", "grad_checkpointing"):
        if ours[flag] and not config.model.is_native:
            raise ValueError(f"--{flag.replace('_', '-')} is for our own towers; this model has another's")
    if config.recipe == "frozen" and not locked_sides(config, found):
        raise ValueError("--recipe locked needs a tower that has learned before")
