"""The two contrastive losses, as functions of the logits: pictures in rows, captions in columns, truth on
the diagonal (B pairs). Knows nothing of models or devices.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_loss(logit_BB: Tensor) -> Tensor:
    """CLIP: each picture picks its caption among B, each caption its picture. Chance is ln B."""
    true_B = torch.arange(len(logit_BB), device=logit_BB.device)
    return (F.cross_entropy(logit_BB, true_B) + F.cross_entropy(logit_BB.T, true_B)) / 2


def sigmoid_loss(logit_BB: Tensor) -> Tensor:
    """SigLIP: each of the B x B couples is judged on its own. The logits already hold the bias."""
    sign_BB = 2 * torch.eye(len(logit_BB), device=logit_BB.device, dtype=logit_BB.dtype) - 1
    return -F.logsigmoid(sign_BB * logit_BB).sum() / len(logit_BB)


def chance(kind: str, batch: int) -> float:
    """The loss of a model that has learned nothing but how many pairs match: 1 of `batch`."""
    if kind == "softmax":
        return math.log(batch)
    return math.log(batch) + (batch - 1) * math.log(batch / (batch - 1))


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def accuracy(logit_BB: Tensor) -> Tensor:
    """Part of the batch matched right, mean of both directions. Chance is 1 / B."""
    true_B = torch.arange(len(logit_BB), device=logit_BB.device)
    return ((logit_BB.argmax(1) == true_B).float().mean() + (logit_BB.argmax(0) == true_B).float().mean()) / 2
