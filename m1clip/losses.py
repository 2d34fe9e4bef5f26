"""The two contrastive losses, as functions of the logits: images in rows, captions in columns, truth on
the diagonal (B pairs). Knows nothing of models or devices.

`duplicate_BB` marks couples that are no pair and yet would be one: the same caption, or the same image, twice
in a batch (it is symmetric). They are left out. `smoothing` is the part of
the target that is spread evenly.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_loss(logit_BB: Tensor, duplicate_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """CLIP: each image picks its caption among B, each caption its image. Chance is ln B."""
    return (_pick(logit_BB, duplicate_BB, smoothing) + _pick(logit_BB.T, duplicate_BB, smoothing)) / 2


def _pick(logit_BB: Tensor, duplicate_BB: Tensor | None, smoothing: float) -> Tensor:
    if duplicate_BB is None:
        true_B = torch.arange(len(logit_BB), device=logit_BB.device)
        return F.cross_entropy(logit_BB, true_B, label_smoothing=smoothing)
    log_BB = F.log_softmax(logit_BB.masked_fill(duplicate_BB, -torch.inf), dim=1)
    spread_B = log_BB.masked_fill(duplicate_BB, 0).sum(1) / (~duplicate_BB).sum(1)
    return -((1 - smoothing) * log_BB.diagonal() + smoothing * spread_B).mean()


def sigmoid_loss(logit_BB: Tensor, duplicate_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """SigLIP: each of the B x B couples is judged on its own. The logits already hold the bias."""
    target_BB = torch.eye(len(logit_BB), device=logit_BB.device, dtype=logit_BB.dtype)
    if smoothing:
        target_BB = target_BB * (1 - smoothing) + smoothing / len(logit_BB)
    counted = None if duplicate_BB is None else (~duplicate_BB).to(logit_BB.dtype)
    loss = F.binary_cross_entropy_with_logits(logit_BB, target_BB, weight=counted, reduction="sum")
    return loss / len(logit_BB)


def chance(kind: str, batch: int) -> float:
    """The loss of a model that has learned nothing but how many pairs match: 1 of `batch`."""
    if kind == "softmax":
        return math.log(batch)
    return math.log(batch) + (batch - 1) * math.log(batch / (batch - 1))


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def accuracies(logit_BB: Tensor, duplicate_BB: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Part of the batch matched right: image to caption, caption to image. Chance is 1 / B."""
    if duplicate_BB is not None:
        logit_BB = logit_BB.masked_fill(duplicate_BB, -torch.inf)
    true_B = torch.arange(len(logit_BB), device=logit_BB.device)
    return (logit_BB.argmax(1) == true_B).float().mean(), (logit_BB.argmax(0) == true_B).float().mean()
