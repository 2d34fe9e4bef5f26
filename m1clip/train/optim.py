"""The optimiser and its rate. Matrices decay; biases, norms, embeddings and the temperature do not."""

import math

import torch
from torch import nn

from m1clip.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    embeddings = {id(w) for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        matrix = weight.ndim >= 2 and id(weight) not in embeddings and not name.endswith("position")
        (decayed if matrix else free).append(weight)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, config.beta2), eps=1e-6, fused=True)


def rate(step: int, total: int, config: TrainConfig) -> float:
    """Learning rate of a step: a straight climb, then a cosine down to zero."""
    climb = config.warmup * total
    if step < climb:
        return config.lr * (step + 1) / (climb + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - climb) / (total - climb)))
