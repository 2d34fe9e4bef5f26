"""Retrieval scores from two matrices of unit vectors. Knows nothing of models and devices.

Shapes: N images, M captions, K distinct captions, U distinct captions of each image, Q queries, T targets,
E embedding.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.data.splits import caption_key

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
class LabelAccuracy:
    """Classification of images that have one of a few captions: which caption is the closest?"""

    label_accuracy: float
    label_top5: float
    labels: int
    chance_label: float  # accuracy of a random label
    most_frequent_label: float  # accuracy of always the same label


@dataclass(frozen=True)
class SeenRecall:
    """R@1 of captions that also occur in training, and of the others; image to text by whether an image has one.

    None where there are none.
    """

    seen_captions: int
    seen_i2t_r1: float | None
    seen_t2i_r1: float | None
    unseen_captions: int
    unseen_i2t_r1: float | None
    unseen_t2i_r1: float | None


@dataclass(frozen=True)
class Retrieval:
    image_to_text: Direction
    text_to_image: Direction
    chance_image_to_text: Direction  # scores of a random ranking
    chance_text_to_image: Direction
    images: int
    captions: int
    distinct_captions: int
    labels: LabelAccuracy | None = None  # where the captions are labels
    seen: SeenRecall | None = None  # where the training captions are known

    @property
    def mean_r1(self) -> float:
        return (self.image_to_text.r1 + self.text_to_image.r1) / 2

    @property
    def chance_r1(self) -> float:
        return (self.chance_image_to_text.r1 + self.chance_text_to_image.r1) / 2

    def record(self) -> dict[str, Any]:
        """Flat, for a log line: i2t_r1 … t2i_median_rank, chance_i2t_r1 …, mean_r1, chance_r1, label_accuracy …"""
        directions = {"i2t": self.image_to_text, "t2i": self.text_to_image}
        directions |= {"chance_i2t": self.chance_image_to_text, "chance_t2i": self.chance_text_to_image}
        flat = {f"{name}_{key}": value for name, one in directions.items() for key, value in asdict(one).items()}
        counts = {name: getattr(self, name) for name in ("images", "captions", "distinct_captions")}
        parts = [asdict(part) for part in (self.labels, self.seen) if part]
        means = {"mean_r1": self.mean_r1, "chance_r1": self.chance_r1}
        return {**flat, **means, **counts, **{key: value for part in parts for key, value in part.items()}}


@dataclass(frozen=True)
class Relevance:
    """Which captions are correct for which images: an image's own, and equal captions of other images."""

    owner_M: Tensor  # the image of each caption
    key_M: Tensor  # number of its distinct caption, in the order of first occurrence
    images: int

    @classmethod
    def from_captions(cls, captions: Sequence[Sequence[str]]) -> "Relevance":
        """From the captions of each image."""
        keys: dict[str, int] = {}
        key_M = [keys.setdefault(caption_key(text), len(keys)) for of_image in captions for text in of_image]
        owner_M = [image for image, of_image in enumerate(captions) for _ in of_image]
        return cls(torch.tensor(owner_M), torch.tensor(key_M), len(captions))

    @property
    def first_K(self) -> Tensor:
        """The first occurrence of each distinct caption."""
        return torch.searchsorted(self.key_M.cummax(0).values, torch.arange(int(self.key_M.max()) + 1))

    def captions_of(self, start: int, stop: int) -> Tensor:
        """(q, K) of the images start to stop: whether each distinct caption is correct."""
        inside_M = (start <= self.owner_M) & (self.owner_M < stop)
        has_qK = torch.zeros(min(stop, self.images) - start, int(self.key_M.max()) + 1, dtype=torch.bool)
        has_qK[self.owner_M[inside_M] - start, self.key_M[inside_M]] = True
        return has_qK

    def images_of(self, start: int, stop: int) -> Tensor:
        """(q, N) of the captions start to stop: whether each image is correct."""
        keys, inverse_q = torch.unique(self.key_M[start:stop], return_inverse=True)
        index_K = torch.full((int(self.key_M.max()) + 1,), -1)
        index_K[keys] = torch.arange(len(keys))
        index_M = index_K[self.key_M]
        has_kN = torch.zeros(len(keys), self.images, dtype=torch.bool)
        has_kN[index_M[index_M >= 0], self.owner_M[index_M >= 0]] = True
        return has_kN[inverse_q]


def retrieval(image_NE: Tensor, text_ME: Tensor, relevance: Relevance, seen_M: Tensor | None = None) -> Retrieval:
    """Both directions; a query is answered when any correct target is among the first k.

    Equal captions are one target: otherwise the copies of one wrong label would fill the first ranks.
    """
    if not (image_NE.isfinite().all() and text_ME.isfinite().all()):
        # NaN is neither above nor below anything: unnoticed, it would rank first everywhere.
        raise FloatingPointError("the embeddings are not finite; this model is broken")
    first_K = relevance.first_K
    i2t_N = ranks(image_NE, text_ME[first_K], relevance.captions_of)
    t2i_M = ranks(text_ME, image_NE, relevance.images_of)
    seen = None if seen_M is None else seen_recall(i2t_N, t2i_M, relevance, seen_M)
    counts = (len(image_NE), len(text_ME), len(first_K))
    return Retrieval(direction(i2t_N), direction(t2i_M), *chance_scores(relevance), *counts, seen=seen)


def seen_recall(i2t_N: Tensor, t2i_M: Tensor, relevance: Relevance, seen_M: Tensor) -> SeenRecall:
    seen_N = torch.zeros(relevance.images, dtype=torch.bool)
    seen_N[relevance.owner_M[seen_M]] = True

    def recalls(captions_M: Tensor, images_N: Tensor) -> tuple[int, float | None, float | None]:
        ranks_of = (i2t_N[images_N], t2i_M[captions_M])
        i2t, t2i = ((rank <= 1).float().mean().item() if len(rank) else None for rank in ranks_of)
        return int(captions_M.sum()), i2t, t2i

    return SeenRecall(*recalls(seen_M, seen_N), *recalls(~seen_M, ~seen_N))


def label_accuracy(image_NE: Tensor, label_KE: Tensor, truth_N: Tensor) -> LabelAccuracy:
    """Accuracy of the closest label, and how often the correct one is among the five closest."""
    labels = len(label_KE)
    rank_N = ranks(image_NE, label_KE, lambda start, stop: F.one_hot(truth_N[start:stop], labels).bool())
    top1, top5 = ((rank_N <= k).float().mean().item() for k in (1, 5))
    return LabelAccuracy(top1, top5, labels, 1 / labels, int(truth_N.bincount().max()) / len(truth_N))


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
    images_K = key_U.bincount()  # with each distinct caption
    i2t = chance_direction(len(images_K), owner_U.bincount(minlength=relevance.images))
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
