"""The training step: what the loop runs and what the benchmark times. There is no second one.

Shapes: B pairs, L tokens, C colours, S pixels a side.
"""

import torch
from torch import Tensor

from m1clip import losses
from m1clip.model.clip import CLIP

# What a step reports, in this order, as one tensor that stays on the device until somebody reads it.
STATS = ("loss", "accuracy", "grad_norm", "temperature")


def train_step(
    model: CLIP, optimizer: torch.optim.Optimizer, bytes_BSSC: Tensor, tokens_BL: Tensor, *, clip_norm: float
) -> Tensor:
    """One update from one batch, already on the model's device."""
    optimizer.zero_grad()  # first, so that old gradients do not add to the peak of the forward pass
    logit_BB = model(model.normalise(bytes_BSSC), tokens_BL)
    loss = losses.LOSSES[model.config.loss](logit_BB)
    loss.backward()  # type: ignore[no-untyped-call]
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    model.clamp_scale()
    with torch.no_grad():
        return torch.stack([loss, losses.accuracy(logit_BB), grad_norm, (-model.logit_scale).exp()])
