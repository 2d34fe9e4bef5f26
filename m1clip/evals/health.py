"""Is the space in use? Four figures about two matrices of unit vectors, pair by pair. Knows no models.

Shapes: N pairs, E embedding.
"""

import torch
from torch import Tensor

MOST = 512


def health(image_NE: Tensor, text_NE: Tensor) -> dict[str, float]:
    """alignment        mean squared distance of a pair: 0 is perfect, 2 is what strangers have
    uniformity       log mean exp(-2 d²) over strangers: 0 is collapsed, about -4 is spread over the sphere
    modality_gap     distance between the mean image and the mean caption, at most 2
    effective_rank   how many directions are in use: exp of the entropy of the singular values, at most E
    """
    image_NE, text_NE = (side[:MOST].detach().float().cpu() for side in (image_NE, text_NE))
    return {
        "alignment": (image_NE - text_NE).square().sum(1).mean().item(),
        "uniformity_image": uniformity(image_NE),
        "uniformity_text": uniformity(text_NE),
        "modality_gap": (image_NE.mean(0) - text_NE.mean(0)).norm().item(),
        "effective_rank_image": effective_rank(image_NE),
        "effective_rank_text": effective_rank(text_NE),
    }


def uniformity(x_NE: Tensor) -> float:
    """Wang and Isola's, 2020."""
    return torch.pdist(x_NE).square().mul(-2).exp().mean().log().item()


def effective_rank(x_NE: Tensor) -> float:
    """Roy and Vetterli's, 2007, of the centred vectors; 0 where all are one point."""
    size_K = torch.linalg.svdvals(x_NE - x_NE.mean(0))
    if size_K[0] < 1e-5 * len(x_NE) ** 0.5:  # what rounding leaves
        return 0.0
    share_K = size_K / size_K.sum()
    return float(torch.special.entr(share_K).sum().exp())
