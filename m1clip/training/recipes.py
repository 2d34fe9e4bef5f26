"""The initial model, the parameters that are trained, and which recipe suits data, init and budget."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from m1clip import devices
from m1clip.config import RECIPES, Recipe, TrainConfig, override
from m1clip.data.batches import BatchStream
from m1clip.data.sources import Source
from m1clip.devices import Plan
from m1clip.format import duration
from m1clip.model.clip import CLIP, load
from m1clip.model.pretrained import HFText, TimmVision, load_hf_text, load_timm
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run

OVERFIT_BELOW, FULL_FROM = 10_000, 200_000
"""Images below which whole towers overfit, and from which training all weights pays."""
FEATURE_VIEWS = 3  # augmented views encoded per image when the vision tower is frozen; the first is not augmented
STEP_COST = 3.0  # of a training step relative to a forward pass
TRIAL_SIZE = 8
CALIBRATION_PAIRS, CALIBRATION_ROWS = 64, 20_000


@dataclass(frozen=True)
class InitModel:
    clip: CLIP | None = None
    vision: TimmVision | None = None
    text: HFText | None = None
    tokenizer: Tokenizer | None = None  # where the text tower brings one
    random_vision: bool = False  # the vision tower has no pretrained weights
    note: str = ""  # what had to be guessed about the checkpoint

    @property
    def pretrained(self) -> tuple[str, ...]:
        """Names of the towers with pretrained weights."""
        if self.clip is not None:
            return ("vision", "text")
        towers = {"vision": None if self.random_vision else self.vision, "text": self.text}
        return tuple(name for name, tower in towers.items() if tower is not None)

    def __bool__(self) -> bool:
        return bool(self.clip or self.vision or self.text)


def load_init(config: TrainConfig, resumed: Run | None) -> tuple[TrainConfig, InitModel]:
    """Load what the config names, and the config with that model's shape."""
    torch.manual_seed(config.seed)  # new heads depend on the seed alone
    if resumed and (resumed.path / "start").is_dir():  # a run keeps its initial model
        clip = load(resumed.path / "start")
        return config, InitModel(clip, tokenizer=clip.tokenizer)
    if resumed or not config.is_pretrained:
        return config, InitModel()
    if config.init:
        from m1clip.model.interop import import_clip

        requested = config.model
        clip, note = import_clip(config.init, config.tokenizer, requested.activation == "quick_gelu")
        if requested.loss == "sigmoid" and clip.config.loss == "softmax":
            raise ValueError("--init was trained with the softmax loss; --model.loss sigmoid cannot continue it")
        if requested.head != "linear" and clip.config.head == "linear":
            clip = replace_heads(clip, requested.head, requested.head_hidden)
        return replace(config, model=clip.config), InitModel(clip, tokenizer=clip.tokenizer, note=note)
    vision = load_timm(config.vision) if config.vision else None
    text, tokenizer = load_hf_text(config.text) if config.text else (None, None)
    towers = {"vision": vision, "text": text}
    shape: dict[str, Any] = {name: tower.config for name, tower in towers.items() if tower is not None}
    init = InitModel(None, vision, text, tokenizer, random_vision=config.vision.endswith("?weights=none"))
    return replace(config, model=replace(config.model, **shape)), init


def build_model(config: TrainConfig, init: InitModel, tokenizer: Tokenizer | None) -> CLIP:
    """The model before the first step; new parameters depend on the seed alone."""
    if init.clip is not None:
        return init.clip
    torch.manual_seed(config.seed)
    model = CLIP(config.model, tokenizer)
    for tower, weights in ((model.vision, init.vision), (model.text, init.text)):
        if weights is not None:
            tower.load_state_dict(weights.state_dict())
    return model


def replace_heads(clip: CLIP, kind: Literal["standardized", "mlp"], hidden: int) -> CLIP:
    """The same model with larger projection heads, which compute the same until they are trained."""
    model = CLIP(replace(clip.config, head=kind, head_hidden=hidden), clip.tokenizer)
    weights = clip.state_dict()
    for name in ("vision_projection", "text_projection"):
        matrix_ED = weights.pop(f"{name}.weight")
        weights |= {f"{name}.linear.weight": matrix_ED, f"{name}.linear.bias": matrix_ED.new_zeros(len(matrix_ED))}
    model.load_state_dict(weights, strict=False)
    return model.eval()


@dataclass(frozen=True)
class EncodingCost:
    """Seconds per image and per caption on this machine, from a short trial."""

    image_s: float
    caption_s: float

    def frozen_s(self, images: int, captions: int) -> float:
        """Encoding everything once."""
        return images * FEATURE_VIEWS * self.image_s + captions * self.caption_s

    def finetuning_s(self, epochs: int, images: int) -> float:
        return epochs * images * STEP_COST * (self.image_s + self.caption_s)


def choose_recipe(config: TrainConfig, init: InitModel, sources: Sequence[Source]) -> tuple[Recipe, str]:
    """The recipe for --recipe auto, and the reason."""
    images = sum(len(source.train) for source in sources)
    counts = [len(source.train.captions(row)) for source in sources for row in range(min(100, len(source.train)))]
    return decide_recipe(config, init, images, round(fmean(counts) * images), measure_encoding(config, init))


def decide_recipe(
    config: TrainConfig, init: InitModel, images: int, captions: int, cost: EncodingCost
) -> tuple[Recipe, str]:
    """Choose by pretrained towers, number of images, and measured cost against the budget."""
    if len(init.pretrained) < 2:
        only = f"only the {init.pretrained[0]} tower is pretrained"
        return "frozen", f"{only}: it is frozen, and the other one is trained to match it"
    encoding = f"{images:,} images; encoding them once takes about {duration(cost.frozen_s(images, captions))}"
    if init.clip is None:
        apart = "the encoders were not trained together, so only the projection heads are trained"
        return "frozen", f"{apart}: {encoding}"
    recipe: Recipe = "full" if images >= FULL_FROM else "lora"
    seconds = cost.finetuning_s(override(config, RECIPES[recipe]).epochs, images)
    about = f"about {duration(seconds)}"
    if config.budget_s is not None and seconds > config.budget_s:
        return "frozen", f"{encoding}; {recipe} would take {about} of the {duration(config.budget_s)}"
    if recipe == "full":
        return recipe, f"{images:,} images are enough to train all weights ({about})"
    few = "few enough to overfit" if images < OVERFIT_BELOW else "too few to train all weights"
    return recipe, f"{images:,} images are {few}: LoRA changes and forgets less ({about})"


def measure_encoding(config: TrainConfig, init: InitModel) -> EncodingCost:
    """Time forward passes of a few blank images and short captions, after a warm-up."""
    model = build_model(config, init, init.tokenizer)
    size = model.config.vision.image_size
    images_BHWC = torch.zeros((TRIAL_SIZE, size, size, 3), dtype=torch.uint8)
    tokens_BL = torch.ones(TRIAL_SIZE, min(16, model.config.text.context_length), dtype=torch.long)

    def time_per_item(forward: Callable[[], Tensor]) -> float:
        with torch.inference_mode():
            forward().cpu()
            started = time.perf_counter()
            forward().cpu()
        return (time.perf_counter() - started) / TRIAL_SIZE

    plan = Plan(str(devices.default_device("auto")[0])) if config.device == "auto" else Plan(config.device)
    vision, text = plan.devices
    model.to_devices(vision, text)
    image_s = time_per_item(lambda: model.vision(model.normalize(images_BHWC.to(vision))))
    return EncodingCost(image_s, time_per_item(lambda: model.text(tokens_BL.to(text))))


def frozen_towers(config: TrainConfig, init: InitModel) -> tuple[str, ...]:
    """The frozen towers, whose features are encoded once."""
    if config.recipe == "scratch" or (config.recipe != "frozen" and config.freeze == "auto"):
        return ()
    towers = {"both": ("vision", "text"), "vision": ("vision",), "text": ("text",), "auto": init.pretrained}
    return towers[config.freeze]


def set_trainable(model: CLIP, config: TrainConfig, frozen: tuple[str, ...]) -> None:
    """Freeze what the recipe does not train; its gradients are never computed."""
    trained = [name for name in ("vision", "text") if name not in frozen]
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    if config.recipe == "lora":
        from m1clip.model.lora import add_lora

        torch.manual_seed(config.seed)
        add_lora(model, trained, config.lora_rank)
    if config.recipe == "full" and config.unfreeze:
        for name in trained:
            tower = model.get_submodule(name)
            for key, weight in tower.named_parameters():
                weight.requires_grad_(int(tower.layers_from_top(key)) <= config.unfreeze)  # type: ignore[operator]


@torch.no_grad()
def calibrate_heads(model: CLIP, init: InitModel, batches: BatchStream) -> None:
    """Standardize the inputs of new heads by the mean and deviation of their features."""
    if init.clip is not None or model.config.head == "linear":
        return
    batch, tables = batches.batch(0).split(CALIBRATION_PAIRS)[0].to(*model.devices), batches.features
    inputs = {
        "vision": tables.images.views[0] if tables.images else model.vision(model.normalize(batch.image[0])),
        "text": tables.captions.features_MD if tables.captions else model.text(batch.text[0].flatten(0, 1)),
    }
    for tower, features in inputs.items():
        sample = features[:: -(-len(features) // CALIBRATION_ROWS)]
        sample = sample if isinstance(sample, Tensor) else torch.from_numpy(np.array(sample))
        model.get_submodule(f"{tower}_projection").calibrate(sample)  # type: ignore[operator]


def check_recipe(config: TrainConfig, init: InitModel) -> None:
    """Refuse combinations that make no sense."""
    if config.wise_ft < 1 and (not init or config.vision or config.text):
        raise ValueError("--wise-ft averages a CLIP given by --init with its fine-tuned weights; there is no --init")
    if config.recipe == "scratch" and init:
        raise ValueError("--recipe scratch starts from random weights; leave out --init, --vision and --text")
    if config.recipe != "scratch" and not init:
        examples = "--init CLIP, or --vision timm:NAME and --text hf:NAME"
        raise ValueError(f"--recipe {config.recipe} needs pretrained weights: {examples}")
    for flag in ("patch_dropout", "grad_checkpointing"):
        if getattr(config, flag) and not config.model.is_native:
            raise ValueError(f"--{flag.replace('_', '-')} is not available for timm and transformers towers")
    if config.recipe == "frozen" and not frozen_towers(config, init):
        raise ValueError("--recipe frozen needs a pretrained tower")
