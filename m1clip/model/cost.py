"""Parameters, FLOPs and memory of a model, computed on fake tensors, which take no memory."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from m1clip import losses
from m1clip.config import ModelConfig
from m1clip.model.clip import CLIP
from m1clip.model.fast import saved_for_backward

PARTS = {"vision": "vision", "text": "text", "vision_projection": "projections", "text_projection": "projections"}


@dataclass(frozen=True)
class ModelCost:
    parameters: dict[str, int]
    forward_gflop: float  # per pair
    step_gflop: float  # per pair, forward and backward
    activation_mb: float  # per pair, stored for the backward pass

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    def memory_gb(self, batch_size: int) -> dict[str, float]:
        """Of a float32 training step with AdamW."""
        weights = self.total * 4 / 1e9
        state = {"parameters": weights, "gradients": weights, "optimizer": 2 * weights}
        return {**state, "activations": batch_size * self.activation_mb / 1e3}


def model_cost(config: ModelConfig, pairs: int = 2, tokens: int | None = None, captions: int = 1) -> ModelCost:
    """Cost with captions of `tokens` tokens (by default the context length), `captions` of them per image."""
    size = config.vision.image_size
    # Models of timm and transformers read values of their tensors, which fake ones do not have.
    with FakeTensorMode() if config.is_native else nullcontext():
        model = CLIP(config)
        pixels_BCHW = torch.empty(pairs, 3, size, size)
        tokens_BL = torch.zeros(pairs, tokens or config.text.context_length, dtype=torch.long)
        with FlopCounterMode(display=False) as counter, saved_for_backward(model.parameters()) as saved:
            text_BE = torch.stack([model.embed_tokens(tokens_BL) for _ in range(captions)]).mean(0)
            loss = losses.softmax_loss(model.logits(model.embed_images(pixels_BCHW), text_BE))
            forward_flop = counter.get_total_flops()
            loss.backward()  # type: ignore[no-untyped-call]
    parameters = dict.fromkeys([*PARTS.values(), "temperature"], 0)
    for name, weight in model.named_parameters():
        parameters[PARTS.get(name.split(".")[0], "temperature")] += weight.numel()
    step_flop, activation_bytes = counter.get_total_flops(), sum(saved.values())
    return ModelCost(parameters, forward_flop / pairs / 1e9, step_flop / pairs / 1e9, activation_bytes / pairs / 1e6)
