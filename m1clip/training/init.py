"""The initial model: random, a pretrained CLIP, or pretrained towers with new projection heads."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from m1clip.config import TrainConfig
from m1clip.model.clip import CLIP, ProjectionHead, load
from m1clip.model.interop import import_clip
from m1clip.model.pretrained import HFText, TimmVision, load_hf_text, load_timm
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run


@dataclass(frozen=True)
class InitModel:
    clip: CLIP | None = None
    vision: TimmVision | None = None
    text: HFText | None = None
    tokenizer: Tokenizer | None = None
    """Where the text tower brings one."""
    random_vision: bool = False
    """The vision tower has no pretrained weights."""
    note: str = ""
    """What had to be guessed about the checkpoint."""

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
        requested = config.model
        clip, note = import_clip(config.init, config.tokenizer, requested.activation == "quick_gelu")
        if requested.loss == "sigmoid" and clip.config.loss == "softmax":
            raise ValueError("--init was trained with the softmax loss; --model.loss sigmoid cannot continue it")
        if requested.head != "linear" and clip.config.head == "linear":
            clip = replace_heads(clip, requested.head, requested.head_hidden)
        return replace(config, model=clip.config), InitModel(clip, tokenizer=clip.tokenizer, note=note)
    vision = load_timm(config.vision) if config.vision else None
    text, tokenizer = load_hf_text(config.text) if config.text else (None, None)
    shape: dict[str, Any] = {} if vision is None else {"vision": vision.config}
    shape |= {} if text is None else {"text": text.config}
    random_vision = config.vision.endswith("?weights=none")
    init = InitModel(None, vision, text, tokenizer, random_vision)
    return replace(config, model=replace(config.model, **shape)), init


def build_model(config: TrainConfig, init: InitModel, tokenizer: Tokenizer | None) -> CLIP:
    """The model before the first step; new parameters depend on the seed alone."""
    if init.clip is not None:
        return init.clip
    torch.manual_seed(config.seed)
    model = CLIP(config.model, tokenizer)
    for name in ("vision", "text"):
        tower = getattr(init, name)
        if tower is not None:
            getattr(model, name).load_state_dict(tower.state_dict())
    return model


def replace_heads(clip: CLIP, kind: Literal["standardized", "mlp"], hidden: int) -> CLIP:
    """The same model with larger projection heads, which compute the same until they are trained."""
    model = CLIP(replace(clip.config, head=kind, head_hidden=hidden), clip.tokenizer)
    weights = clip.state_dict()
    for name in ("vision_projection", "text_projection"):
        head = getattr(model, name)
        assert isinstance(head, ProjectionHead)
        head.linear.weight.data.copy_(weights.pop(f"{name}.weight"))
        head.linear.bias.data.zero_()
    model.load_state_dict(weights, strict=False)
    return model.eval()
