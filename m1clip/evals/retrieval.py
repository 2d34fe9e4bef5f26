"""Retrieval scores from two matrices of unit vectors. Knows nothing of models, devices or files.

Shapes: N images, M captions, K distinct captions, Q queries, T targets, E embedding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch
from torch import Tensor

CHUNK = 1024
TOP_K = (1, 5, 10)


@dataclass(frozen=True)
class Direction:
    """Scores of one direction; recalls are fractions, ranks start at 1."""

    r1: float
    r5: float
    r10: float
    median_rank: float


@dataclass(frozen=True)
class Retrieval:
    image_to_text: Direction
    text_to_image: Direction
    chance_image_to_text: Direction
    """Scores of a random ranking."""
    chance_text_to_image: Direction
    images: int
    captions: int

    @property
    def mean_r1(self) -> float:
        return (self.image_to_text.r1 + self.text_to_image.r1) / 2

    @property
    def chance_r1(self) -> float:
        return (self.chance_image_to_text.r1 + self.chance_text_to_image.r1) / 2

    def record(self) -> dict[str, float | int]:
        """Flat, for a log line: i2t_r1 … t2i_median_rank, chance_i2t_r1 …, mean_r1, chance_r1."""
        directions = {
            "i2t": self.image_to_text,
            "t2i": self.text_to_image,
            "chance_i2t": self.chance_image_to_text,
            "chance_t2i": self.chance_text_to_image,
        }
        flat = {
            f"{name}_{key}": value for name, direction in directions.items() for key, value in asdict(direction).items()
        }
        counts = {"images": self.images, "captions": self.captions}
        return {**flat, "mean_r1": self.mean_r1, "chance_r1": self.chance_r1, **counts}


@dataclass(frozen=True)
class Relevance:
    """Which captions are correct for which images: an image's own, and equal captions of other images."""

    owner_M: Tensor
    """The image of each caption."""
    key_M: Tensor
    """Equal for equal captions."""
    images: int

    @classmethod
    def from_captions(cls, captions: Sequence[Sequence[str]]) -> "Relevance":
        """From the captions of each image, as training compares them: without case and outer spaces."""
        keys: dict[str, int] = {}
        key_M = [keys.setdefault(text.strip().lower(), len(keys)) for of_image in captions for text in of_image]
        owner_M = [image for image, of_image in enumerate(captions) for _ in of_image]
        return cls(torch.tensor(owner_M), torch.tensor(key_M), len(captions))

    @classmethod
    def one_to_one(cls, pairs: int) -> "Relevance":
        return cls(torch.arange(pairs), torch.arange(pairs), pairs)

    def captions_of(self, start: int, stop: int) -> Tensor:
        """(q, M) of the images start to stop: whether each caption is correct."""
        inside_M = (start <= self.owner_M) & (self.owner_M < stop)
        has_qK = torch.zeros(min(stop, self.images) - start, int(self.key_M.max()) + 1, dtype=torch.bool)
        has_qK[self.owner_M[inside_M] - start, self.key_M[inside_M]] = True
        return has_qK[:, self.key_M]

    def images_of(self, start: int, stop: int) -> Tensor:
        """(q, N) of the captions start to stop: whether each image is correct."""
        keys, inverse_q = self.key_M[start:stop].unique(return_inverse=True)
        index_K = torch.full((int(self.key_M.max()) + 1,), -1)
        index_K[keys] = torch.arange(len(keys))
        index_M = index_K[self.key_M]
        has_kN = torch.zeros(len(keys), self.images, dtype=torch.bool)
        has_kN[index_M[index_M >= 0], self.owner_M[index_M >= 0]] = True
        return has_kN[inverse_q]


def retrieval(image_NE: Tensor, text_ME: Tensor, relevance: Relevance | None = None) -> Retrieval:
    """Both directions; by default caption i belongs to image i.

    A query is answered when any correct target is among the first k.
    """
    if not (image_NE.isfinite().all() and text_ME.isfinite().all()):
        # NaN is neither above nor below anything: unnoticed, it would rank first everywhere.
        raise FloatingPointError("the embeddings are not finite; this model is broken")
    relevance = relevance or Relevance.one_to_one(len(image_NE))
    text_ranks, text_counts = ranks(image_NE, text_ME, relevance.captions_of)
    image_ranks, image_counts = ranks(text_ME, image_NE, relevance.images_of)
    return Retrieval(
        direction(text_ranks),
        direction(image_ranks),
        chance_direction(len(text_ME), text_counts),
        chance_direction(len(image_NE), image_counts),
        len(image_NE),
        len(text_ME),
    )


def ranks(query_QE: Tensor, target_TE: Tensor, correct: Callable[[int, int], Tensor]) -> tuple[Tensor, Tensor]:
    """Rank of the best correct target of each query, from 1, and its number of correct targets.

    Ties share the mean of their ranks: otherwise a collapsed model would have perfect scores.
    """
    best_ranks, counts = [], []
    for start in range(0, len(query_QE), CHUNK):
        score_qT = query_QE[start : start + CHUNK] @ target_TE.T
        correct_qT = correct(start, start + CHUNK)
        best_q1 = score_qT.masked_fill(~correct_qT, float("-inf")).amax(1, keepdim=True)
        better_q = ((score_qT > best_q1) & ~correct_qT).sum(1)
        equal_q = ((score_qT == best_q1) & ~correct_qT).sum(1)
        best_ranks.append(1 + better_q + equal_q / 2)
        counts.append(correct_qT.sum(1))
    return torch.cat(best_ranks), torch.cat(counts)


def direction(rank_Q: Tensor) -> Direction:
    r1, r5, r10 = ((rank_Q <= k).float().mean().item() for k in TOP_K)
    return Direction(r1, r5, r10, rank_Q.quantile(0.5).item())


def chance_direction(targets: int, correct_Q: Tensor) -> Direction:
    """Expected scores of a random ranking, for queries with so many correct targets."""
    counts = Counter(correct_Q.tolist())
    scores = {count: _random_ranking(targets, count) for count in counts}

    def mean(values: Callable[[int], float]) -> float:
        return sum(values(count) * queries for count, queries in counts.items()) / len(correct_Q)

    r1, r5, r10 = (mean(lambda count, i=i: scores[count][i]) for i in range(len(TOP_K)))  # type: ignore[misc]
    return Direction(r1, r5, r10, mean(lambda count: scores[count][-1]))


def _random_ranking(targets: int, correct: int) -> tuple[float, float, float, float]:
    """R@1, R@5, R@10 and median rank of the first of `correct` among `targets` in random order."""
    if correct == 1:
        r1, r5, r10 = (min(1.0, k / targets) for k in TOP_K)
        return r1, r5, r10, (targets + 1) / 2
    missed = (prod(max(0.0, 1 - correct / (targets - i)) for i in range(min(k, targets))) for k in TOP_K)
    r1, r5, r10 = (1 - probability for probability in missed)
    return r1, r5, r10, targets * (1 - 0.5 ** (1 / correct)) + 0.5
