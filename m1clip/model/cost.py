"""What a model costs, computed on tensors without contents: a billion weights take no memory here."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from m1clip import losses
from m1clip.config import ModelConfig
from m1clip.model.clip import CLIP

FLOAT32 = 4


@dataclass(frozen=True)
class Cost:
    parameters: dict[str, int]
    forward_gflop: float
    """Per pair."""
    step_gflop: float
    """Per pair, forward and backward."""
    activation_mb: float
    """Per pair: what the backward pass needs kept."""

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def memory_gb(self, batch: int) -> dict[str, float]:
        """Of a training step in float32; AdamW keeps two moments of each parameter."""
        weights = self.total * FLOAT32 / 1e9
        return {
            "parameters": weights,
            "gradients": weights,
            "optimizer": 2 * weights,
            "activations": batch * self.activation_mb / 1e3,
        }


def cost(config: ModelConfig, pairs: int = 2, tokens: int | None = None, captions: int = 1) -> Cost:
    """With captions of `tokens`, or as long as the model reads; so many of them in a pair."""
    side = config.vision.image_size
    with FakeTensorMode() if config.is_native else nullcontext():  # others' nets look at their numbers
        model = CLIP(config)
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        kept: dict[int, int] = {}
        alive: list[Tensor] = []  # or an address might be used, and counted, twice

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:  # a layer also keeps a view of its weight
                kept[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        pixels_BCHW = torch.empty(pairs, 3, side, side)
        tokens_BL = torch.zeros(pairs, tokens or config.text.context_length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, saved_tensors_hooks(keep, lambda tensor: tensor):
            told_BE = torch.stack([model.embed_tokens(tokens_BL) for _ in range(captions)]).mean(0)
            loss = losses.softmax_loss(model.logits(model.embed_images(pixels_BCHW), told_BE))
            forward = counter.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]
    parts = {
        "vision": count(model.vision),
        "text": count(model.text),
        "projections": count(model.vision_projection) + count(model.text_projection),
    }
    parts["temperature"] = count(model) - sum(parts.values())
    step = counter.get_total_flops()
    return Cost(parts, forward / pairs / 1e9, step / pairs / 1e9, sum(kept.values()) / pairs / 1e6)


def count(module: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())
