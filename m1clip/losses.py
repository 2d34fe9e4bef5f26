"""The two contrastive losses, as functions of the logits: pictures in rows, captions in columns, truth on
the diagonal (B pairs). Knows nothing of models or devices.

`twin_BB` marks couples that are no pair and yet would be one: the same caption, or the same picture, twice
in a batch (it is symmetric). They are left out. `smoothing` is the part of
the target that is spread evenly.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_loss(logit_BB: Tensor, twin_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """CLIP: each picture picks its caption among B, each caption its picture. Chance is ln B."""
    return (_pick(logit_BB, twin_BB, smoothing) + _pick(logit_BB.T, twin_BB, smoothing)) / 2


def _pick(logit_BB: Tensor, twin_BB: Tensor | None, smoothing: float) -> Tensor:
    if twin_BB is None:
        true_B = torch.arange(len(logit_BB), device=logit_BB.device)
        return F.cross_entropy(logit_BB, true_B, label_smoothing=smoothing)
    log_BB = F.log_softmax(logit_BB.masked_fill(twin_BB, -torch.inf), dim=1)
    spread_B = log_BB.masked_fill(twin_BB, 0).sum(1) / (~twin_BB).sum(1)
    return -((1 - smoothing) * log_BB.diagonal() + smoothing * spread_B).mean()


def sigmoid_loss(logit_BB: Tensor, twin_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """SigLIP: each of the B x B couples is judged on its own. The logits already hold the bias."""
    target_BB = torch.eye(len(logit_BB), device=logit_BB.device, dtype=logit_BB.dtype)
    if smoothing:
        target_BB = target_BB * (1 - smoothing) + smoothing / len(logit_BB)
    counted = None if twin_BB is None else (~twin_BB).to(logit_BB.dtype)
    loss = F.binary_cross_entropy_with_logits(logit_BB, target_BB, weight=counted, reduction="sum")
    return loss / len(logit_BB)


def chance(kind: str, batch: int) -> float:
    """The loss of a model that has learned nothing but how many pairs match: 1 of `batch`."""
    if kind == "softmax":
        return math.log(batch)
    return math.log(batch) + (batch - 1) * math.log(batch / (batch - 1))


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def accuracies(logit_BB: Tensor, twin_BB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Part of the batch matched right: picture to caption, caption to picture. Chance is 1 / B."""
    if twin_BB is not None:
        logit_BB = logit_BB.masked_fill(twin_BB, -torch.inf)
    true_B = torch.arange(len(logit_BB), device=logit_BB.device)
    return (logit_BB.argmax(1) == true_B).float().mean(), (logit_BB.argmax(0) == true_B).float().mean()
