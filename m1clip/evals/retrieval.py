"""Retrieval scores from two matrices of unit vectors. Knows nothing of models, devices or files.

Shapes: Q queries, T targets, E embedding.
"""

from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

CHUNK = 1024
AT = (1, 5, 10)


@dataclass(frozen=True)
class Direction:
    """Scores of one way of searching; recalls are parts of 1, ranks begin at 1."""

    r1: float
    r5: float
    r10: float
    median_rank: float


@dataclass(frozen=True)
class Retrieval:
    image_to_text: Direction
    text_to_image: Direction
    images: int
    captions: int

    @property
    def mean_r1(self) -> float:
        return (self.image_to_text.r1 + self.text_to_image.r1) / 2

    @property
    def chance(self) -> Direction:
        """What guessing among the images gives."""
        return _guess(self.images, 1)

    @property
    def chance_image_to_text(self) -> Direction:
        """What guessing among the captions gives, of which an image may have several."""
        return _guess(self.captions, self.captions / self.images)

    def record(self) -> dict[str, float | int]:
        """Flat, for a log line: i2t_r1 … t2i_median_rank, mean_r1, chance_r1."""
        ways = {"i2t": self.image_to_text, "t2i": self.text_to_image}
        flat = {
            f"{way}_{key}": value for way, scores in ways.items() for key, value in asdict(scores).items()
        }
        counts = {"images": self.images, "captions": self.captions}
        return {**flat, "mean_r1": self.mean_r1, "chance_r1": self.chance.r1, **counts}


def _guess(targets: int, right: float) -> Direction:
    """Scores of a random order of the targets, `right` of which are right."""
    if right == 1:
        r1, r5, r10 = (min(1.0, k / targets) for k in AT)
        return Direction(r1, r5, r10, (targets + 1) / 2)
    missed = (prod(max(0.0, 1 - right / (targets - i)) for i in range(min(k, targets))) for k in AT)
    r1, r5, r10 = (1 - one for one in missed)
    return Direction(r1, r5, r10, targets * (1 - 0.5 ** (1 / right)) + 0.5)


def retrieval(image_NE: Tensor, text_ME: Tensor, owner_M: Tensor | None = None) -> Retrieval:
    """Both directions; caption m belongs to image owner_M[m] (one each, in order, by default).

    An image finds its captions when any of them is among the first k.
    """
    if not (image_NE.isfinite().all() and text_ME.isfinite().all()):
        # NaN is neither above nor below anything: unnoticed, it would rank first everywhere.
        raise FloatingPointError("the embeddings are not finite; this model is broken")
    owner_M = torch.arange(len(text_ME)) if owner_M is None else owner_M
    to_image = ranks(text_ME, image_NE, owner_M, torch.arange(len(image_NE)))
    to_text = ranks(image_NE, text_ME, torch.arange(len(image_NE)), owner_M)
    return Retrieval(direction(to_text), direction(to_image), len(image_NE), len(text_ME))


def ranks(query_QE: Tensor, target_TE: Tensor, key_Q: Tensor, key_T: Tensor) -> Tensor:
    """Rank of the best target whose key is the query's, from 1; ties share the mean of their places.

    Without that, a collapsed model, to which all things look alike, would be perfect.
    """
    found = []
    for start in range(0, len(query_QE), CHUNK):
        score_qT = query_QE[start : start + CHUNK] @ target_TE.T
        true_qT = key_Q[start : start + CHUNK, None] == key_T
        best_q1 = score_qT.masked_fill(~true_qT, float("-inf")).amax(1, keepdim=True)
        better_q = ((score_qT > best_q1) & ~true_qT).sum(1)
        equal_q = ((score_qT == best_q1) & ~true_qT).sum(1)
        found.append(1 + better_q + equal_q / 2)
    return torch.cat(found)


def direction(rank_Q: Tensor) -> Direction:
    r1, r5, r10 = ((rank_Q <= k).float().mean().item() for k in AT)
    return Direction(r1, r5, r10, rank_Q.quantile(0.5).item())
