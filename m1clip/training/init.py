"""What a run begins with: nothing, a known CLIP, or towers from the field with heads that are new."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from m1clip.config import TrainConfig
from m1clip.model.clip import CLIP, load
from m1clip.model.heads import ProjectionHead
from m1clip.model.interop import import_clip
from m1clip.model.pretrained import HFText, TimmVision, load_hf_text, load_timm
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run


@dataclass(frozen=True)
class InitModel:
    known: CLIP | None = None
    vision: TimmVision | None = None
    text: HFText | None = None
    tokenizer: Tokenizer | None = None
    """Where it comes with the text tower."""
    blank: bool = False
    """The image tower is only a shape, without weights."""
    told: str = ""
    """What had to be guessed about it."""

    @property
    def learned(self) -> tuple[str, ...]:
        """The towers that have been trained before."""
        if self.known is not None:
            return ("vision", "text")
        towers = {"vision": None if self.blank else self.vision, "text": self.text}
        return tuple(name for name, tower in towers.items() if tower is not None)

    def __bool__(self) -> bool:
        return bool(self.known or self.vision or self.text)


def find(config: TrainConfig, resumed: Run | None) -> tuple[TrainConfig, InitModel]:
    """What is at hand, and the configuration with the model's shape as that has it."""
    torch.manual_seed(config.seed)  # what is new in it is a function of the seed
    if resumed and (resumed.path / "start").is_dir():  # what it began with is its own
        known = load(resumed.path / "start")
        return config, InitModel(known, tokenizer=known.tokenizer)
    if resumed or not config.is_pretrained:
        return config, InitModel()
    if config.init:
        requested = config.model
        known, told = import_clip(config.init, config.tokenizer, requested.activation == "quick_gelu")
        if requested.loss == "sigmoid" and known.config.loss == "softmax":
            raise ValueError(
                "--init is a CLIP of the softmax loss; --model.loss sigmoid cannot go on with it"
            )
        if requested.head != "linear" and known.config.head == "linear":
            known = with_head(known, requested.head, requested.head_hidden)
        return replace(config, model=known.config), InitModel(known, tokenizer=known.tokenizer, told=told)
    vision = load_timm(config.vision) if config.vision else None
    text, words = load_hf_text(config.text) if config.text else (None, None)
    shape: dict[str, Any] = {} if vision is None else {"vision": vision.config}
    shape |= {} if text is None else {"text": text.config}
    blank = config.vision.endswith("?weights=none")
    return replace(config, model=replace(config.model, **shape)), InitModel(None, vision, text, words, blank)


def begin(config: TrainConfig, init: InitModel, tokenizer: Tokenizer) -> CLIP:
    """The model as it is before the first step; what is new in it is a function of the seed."""
    if init.known is not None:
        return init.known
    torch.manual_seed(config.seed)
    model = CLIP(config.model, tokenizer)
    for name in ("vision", "text"):
        tower = getattr(init, name)
        if tower is not None:
            getattr(model, name).load_state_dict(tower.state_dict())
    return model


def with_head(known: CLIP, kind: Literal["standardized", "mlp"], inside: int) -> CLIP:
    """The same model with heads that can learn more; until they do, they are the matrices they replace."""
    config = replace(known.config, head=kind, head_hidden=inside)
    model = CLIP(config, known.tokenizer)
    state = known.state_dict()
    for name in ("vision_projection", "text_projection"):
        head = getattr(model, name)
        assert isinstance(head, ProjectionHead)
        head.linear.weight.data.copy_(state.pop(f"{name}.weight"))
        head.linear.bias.data.zero_()
    model.load_state_dict(state, strict=False)
    return model.eval()
