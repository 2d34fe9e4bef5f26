"""CLIP's softmax and SigLIP's sigmoid contrastive loss, as functions of the logits (images in rows, captions
in columns, B pairs on the diagonal).

`duplicate_BB` (symmetric) marks false negatives, which are left out: pairs off the diagonal whose captions or
images are equal. `smoothing` is label smoothing.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_loss(logit_BB: Tensor, duplicate_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """CLIP: cross-entropy of images over captions and of captions over images. Chance is ln B."""
    return (_cross_entropy(logit_BB, duplicate_BB, smoothing) + _cross_entropy(logit_BB.T, duplicate_BB, smoothing)) / 2


def _cross_entropy(logit_BB: Tensor, duplicate_BB: Tensor | None, smoothing: float) -> Tensor:
    if duplicate_BB is None:
        target_B = torch.arange(len(logit_BB), device=logit_BB.device)
        return F.cross_entropy(logit_BB, target_B, label_smoothing=smoothing)
    logprob_BB = F.log_softmax(logit_BB.masked_fill(duplicate_BB, -torch.inf), dim=1)
    mean_B = logprob_BB.masked_fill(duplicate_BB, 0).sum(1) / (~duplicate_BB).sum(1)
    return -((1 - smoothing) * logprob_BB.diagonal() + smoothing * mean_B).mean()


def sigmoid_loss(logit_BB: Tensor, duplicate_BB: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """SigLIP: binary cross-entropy of each of the B x B pairs. The logits include the bias."""
    target_BB = torch.eye(len(logit_BB), device=logit_BB.device, dtype=logit_BB.dtype)
    if smoothing:
        target_BB = target_BB * (1 - smoothing) + smoothing / len(logit_BB)
    weight_BB = None if duplicate_BB is None else (~duplicate_BB).to(logit_BB.dtype)
    loss = F.binary_cross_entropy_with_logits(logit_BB, target_BB, weight=weight_BB, reduction="sum")
    return loss / len(logit_BB)


def chance(kind: str, batch: int, duplicate_BB: Tensor | None = None) -> float:
    """The loss of the best constant logits: one of `batch` pairs, without duplicates, matches."""
    candidates_B = torch.full((batch,), float(batch)) if duplicate_BB is None else (~duplicate_BB).sum(1).cpu().double()
    if kind == "softmax":
        return candidates_B.log().mean().item()
    mean = candidates_B.mean().item()
    if mean == 1:  # all pairs are duplicates
        return 0.0
    return math.log(mean) + (mean - 1) * math.log(mean / (mean - 1))


def chance_accuracy(batch: int, duplicate_BB: Tensor | None = None) -> float | None:
    """Accuracy of random embeddings, the mean of both directions; equal captions have equal embeddings.

    Only pairs with a negative count; None if there is none.
    """
    if duplicate_BB is None:
        return 1 / batch
    duplicates_B = duplicate_BB.sum(1).cpu().double()
    candidates_B = (batch - duplicates_B)[duplicates_B < batch - 1]
    groups = (1 / (1 + duplicates_B)).sum()
    return ((1 / groups + (1 / candidates_B).mean()) / 2).item() if len(candidates_B) else None


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def accuracies(
    logit_BB: Tensor, duplicate_BB: Tensor | None = None, has_negative_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Top-1 accuracy in the batch: image to caption, caption to image. Chance is 1 / B.

    A pair without a negative, which could not be wrong, does not count; NaN if no pair has one.
    """
    if duplicate_BB is not None:
        logit_BB = logit_BB.masked_fill(duplicate_BB, -torch.inf)
    target_B = torch.arange(len(logit_BB), device=logit_BB.device)
    i2t_B, t2i_B = (logit_BB.argmax(1) == target_B).float(), (logit_BB.argmax(0) == target_B).float()
    if has_negative_B is None:
        return i2t_B.mean(), t2i_B.mean()
    return (i2t_B * has_negative_B).sum() / has_negative_B.sum(), (t2i_B * has_negative_B).sum() / has_negative_B.sum()
