"""Retrieval scores from two matrices of unit vectors. Knows nothing of models, devices or files.

Shapes: N images, M captions, K distinct captions, U distinct captions of each image, Q queries, T targets,
E embedding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb

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
    chance_image_to_text: Direction  # scores of a random ranking
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
        directions = {"i2t": self.image_to_text, "t2i": self.text_to_image}
        directions |= {"chance_i2t": self.chance_image_to_text, "chance_t2i": self.chance_text_to_image}
        flat = {f"{name}_{key}": value for name, one in directions.items() for key, value in asdict(one).items()}
        counts = {"images": self.images, "captions": self.captions}
        return {**flat, "mean_r1": self.mean_r1, "chance_r1": self.chance_r1, **counts}


@dataclass(frozen=True)
class Relevance:
    """Which captions are correct for which images: an image's own, and equal captions of other images."""

    owner_M: Tensor  # the image of each caption
    key_M: Tensor  # equal for equal captions
    images: int

    @classmethod
    def from_captions(cls, captions: Sequence[Sequence[str]]) -> "Relevance":
        """From the captions of each image, as training compares them: without case and outer spaces."""
        keys: dict[str, int] = {}
        key_M = [keys.setdefault(text.strip().lower(), len(keys)) for of_image in captions for text in of_image]
        owner_M = [image for image, of_image in enumerate(captions) for _ in of_image]
        return cls(torch.tensor(owner_M), torch.tensor(key_M), len(captions))

    def captions_of(self, start: int, stop: int) -> Tensor:
        """(q, M) of the images start to stop: whether each caption is correct."""
        inside_M = (start <= self.owner_M) & (self.owner_M < stop)
        has_qK = torch.zeros(min(stop, self.images) - start, int(self.key_M.max()) + 1, dtype=torch.bool)
        has_qK[self.owner_M[inside_M] - start, self.key_M[inside_M]] = True
        return has_qK[:, self.key_M]

    def images_of(self, start: int, stop: int) -> Tensor:
        """(q, N) of the captions start to stop: whether each image is correct."""
        keys, inverse_q = torch.unique(self.key_M[start:stop], return_inverse=True)
        index_K = torch.full((int(self.key_M.max()) + 1,), -1)
        index_K[keys] = torch.arange(len(keys))
        index_M = index_K[self.key_M]
        has_kN = torch.zeros(len(keys), self.images, dtype=torch.bool)
        has_kN[index_M[index_M >= 0], self.owner_M[index_M >= 0]] = True
        return has_kN[inverse_q]


def retrieval(image_NE: Tensor, text_ME: Tensor, relevance: Relevance) -> Retrieval:
    """Both directions; a query is answered when any correct target is among the first k."""
    if not (image_NE.isfinite().all() and text_ME.isfinite().all()):
        # NaN is neither above nor below anything: unnoticed, it would rank first everywhere.
        raise FloatingPointError("the embeddings are not finite; this model is broken")
    i2t = direction(ranks(image_NE, text_ME, relevance.captions_of))
    t2i = direction(ranks(text_ME, image_NE, relevance.images_of))
    return Retrieval(i2t, t2i, *chance_scores(relevance), len(image_NE), len(text_ME))


def ranks(query_QE: Tensor, target_TE: Tensor, correct: Callable[[int, int], Tensor]) -> Tensor:
    """Rank of the best correct target of each query, from 1.

    Ties share the mean of their ranks: otherwise a collapsed model would have perfect scores.
    """
    best_ranks = []
    for start in range(0, len(query_QE), CHUNK):
        score_qT = query_QE[start : start + CHUNK] @ target_TE.T
        correct_qT = correct(start, start + CHUNK)
        best_q1 = score_qT.masked_fill(~correct_qT, float("-inf")).amax(1, keepdim=True)
        better_q = ((score_qT > best_q1) & ~correct_qT).sum(1)
        equal_q = ((score_qT == best_q1) & ~correct_qT).sum(1)
        best_ranks.append(1 + better_q + equal_q / 2)
    return torch.cat(best_ranks)


def direction(rank_Q: Tensor) -> Direction:
    r1, r5, r10 = ((rank_Q <= k).float().mean().item() for k in TOP_K)
    return Direction(r1, r5, r10, rank_Q.quantile(0.5).item())


def chance_scores(relevance: Relevance) -> tuple[Direction, Direction]:
    """Expected scores of a random ranking, image to text and text to image."""
    owner_U, key_U = torch.unique(torch.stack([relevance.owner_M, relevance.key_M]), dim=1)
    captions_K, images_K = relevance.key_M.bincount(), key_U.bincount()  # with each distinct caption
    captions_N = torch.zeros(relevance.images, dtype=torch.long).index_add(0, owner_U, captions_K[key_U])
    i2t = chance_direction(len(relevance.key_M), captions_N)
    return i2t, chance_direction(relevance.images, images_K[relevance.key_M])


def chance_direction(targets: int, correct_Q: Tensor) -> Direction:
    """Expected scores of a random ranking, for queries with so many correct targets."""
    counts = Counter(correct_Q.tolist())

    def recall(k: int) -> float:
        """Probability that k random targets include a correct one, averaged over the queries."""
        draws = comb(targets, k)
        hits = ((draws - comb(targets - correct, k)) / draws * queries for correct, queries in counts.items())
        return sum(hits) / len(correct_Q)

    r1, r5, r10 = (recall(min(k, targets)) for k in TOP_K)
    return Direction(r1, r5, r10, _random_median_rank(targets, counts))


def _random_median_rank(targets: int, counts: Counter[int]) -> float:
    """Median rank of the first correct target in random order; `counts` has the queries by correct targets."""
    correct_C, queries_C = torch.tensor([*counts.items()], dtype=torch.float64).T
    missed_CT = (1 - correct_C[:, None] / torch.arange(targets, 0, -1)).clamp(min=0).cumprod(1)
    found_T = 1 - queries_C / queries_C.sum() @ missed_CT  # probability that it is among the first 1, 2, 3 …
    before = int((found_T < 0.5 - 1e-9).sum())
    is_between = bool(found_T[before] < 0.5 + 1e-9)  # half of the ranks are this or less, half are more
    return before + (1.5 if is_between else 1.0)
