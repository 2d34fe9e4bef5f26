"""Embedding statistics: is the embedding space in use? Knows nothing of models.

Shapes: N pairs, E embedding.
"""

import torch
from torch import Tensor

MAX_PAIRS = 512


def health(image_NE: Tensor, text_NE: Tensor) -> dict[str, float]:
    """alignment        mean squared distance of a pair: 0 is perfect, 2 is that of random vectors
    uniformity       log mean exp(-2 d²) of all pairs: 0 is collapsed, about -4 is uniform on the sphere
    modality_gap     distance between the mean image and the mean text embedding, at most 2
    effective_rank   number of dimensions in use: exp of the entropy of the singular values, at most E
    """
    image_NE, text_NE = (x_NE[:MAX_PAIRS].detach().float().cpu() for x_NE in (image_NE, text_NE))
    return {
        "alignment": (image_NE - text_NE).square().sum(1).mean().item(),
        "uniformity_image": uniformity(image_NE),
        "uniformity_text": uniformity(text_NE),
        "modality_gap": (image_NE.mean(0) - text_NE.mean(0)).norm().item(),
        "effective_rank_image": effective_rank(image_NE),
        "effective_rank_text": effective_rank(text_NE),
    }


def uniformity(x_NE: Tensor) -> float:
    """Wang and Isola, 2020."""
    return torch.pdist(x_NE).square().mul(-2).exp().mean().log().item()


def effective_rank(x_NE: Tensor) -> float:
    """Roy and Vetterli, 2007, of the centered vectors; 0 where all are equal."""
    values_K = torch.linalg.svdvals(x_NE - x_NE.mean(0))
    if values_K[0] < 1e-5 * len(x_NE) ** 0.5:  # rounding error
        return 0.0
    fraction_K = values_K / values_K.sum()
    return float(torch.special.entr(fraction_K).sum().exp())
