"""What recall does not show: is the embedding space in use, and are similar captions distinguished?

Shapes: N pairs, E embedding, K singular values, V vocabulary.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_STATISTICS_PAIRS, MAX_PAIRS = 512, 1000  # of embedding_statistics and accuracy_by_difficulty
TIERS = {"easy": (0.0, 0.5), "medium": (0.5, 0.9), "hard": (0.9, 1.0)}  # quantiles of the negatives by similarity
NEGATIVES = 10
MAX_WORDS = 77
# In scripts without spaces each character is a word.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def embedding_statistics(image_NE: Tensor, text_NE: Tensor) -> dict[str, float]:
    """alignment        mean squared distance of a pair: 0 is perfect, 2 is that of random vectors
    uniformity       log mean exp(-2 d²) of all pairs: 0 is collapsed, about -4 is uniform on the sphere
    modality_gap     distance between the mean image and the mean text embedding, at most 2
    effective_rank   number of dimensions in use: exp of the entropy of the singular values, at most E
    """
    image_NE, text_NE = (x_NE[:MAX_STATISTICS_PAIRS].detach().float().cpu() for x_NE in (image_NE, text_NE))
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


def accuracy_by_difficulty(image_NE: Tensor, text_NE: Tensor, captions: Sequence[str]) -> dict[str, dict[str, float]]:
    """How often the correct caption or image wins, in both directions, by the tf-idf similarity of the negatives.

    pairwise   against one negative (chance 1/2)
    first      against `among` - 1 negatives at once, as in a batch of that size (chance 1 / among)

    Empty with too few pairs, or if no captions share a word.
    """
    captions = captions[:MAX_PAIRS]
    score_NN = (image_NE[:MAX_PAIRS].float() @ text_NE[:MAX_PAIRS].float().T).numpy()
    similarity_NN = tfidf_similarity(captions)
    quantile_NN = similarity_quantiles(captions, similarity_NN)
    correct_N = score_NN.diagonal()
    losing = [correct_N[:, None] <= scores for scores in (score_NN, score_NN.T)]
    tiers = {name: (low <= quantile_NN) & (quantile_NN < high) for name, (low, high) in TIERS.items()}
    negatives = min(NEGATIVES, *(int(mask.sum(1).min(initial=NEGATIVES)) for mask in tiers.values()))
    if negatives < 1 or not similarity_NN[tiers["hard"]].any():
        return {}
    results = {}
    for name, mask in tiers.items():
        losses = [(mask & direction).sum(1) for direction in losing]
        results[name] = {
            "similarity": float(similarity_NN[mask].mean()),
            "negatives": int(mask.sum()),
            "pairwise": float(1 - np.mean([lost.sum() / mask.sum() for lost in losses])),
            "first": float(np.mean([win_probability(negatives, lost, mask.sum(1)) for lost in losses])),
            "among": negatives + 1,
            "pairs": len(captions),
        }
    return results


def tfidf_similarity(captions: Sequence[str]) -> NDArray[np.float32]:
    """(N, N) cosine similarities of the captions' tf-idf vectors."""
    counts = [Counter(WORD.findall(caption.lower())[:MAX_WORDS]) for caption in captions]
    documents = Counter(word for count in counts for word in count)
    column = {word: number for number, word in enumerate(documents)}
    tfidf_NV = np.zeros((len(captions), len(column)), np.float32)
    for row, count in enumerate(counts):
        for word, times in count.items():
            tfidf_NV[row, column[word]] = times * np.log((1 + len(captions)) / documents[word])
    unit_NV = tfidf_NV / np.maximum(np.linalg.norm(tfidf_NV, axis=1, keepdims=True), 1e-9)
    similarity: NDArray[np.float32] = unit_NV @ unit_NV.T
    return similarity


def similarity_quantiles(captions: Sequence[str], similarity_NN: NDArray[np.float32]) -> NDArray[np.float64]:
    """(N, N) quantile of each negative among all negatives of a pair, from 0 (least similar) to 1.

    NaN where there is no negative: the pair itself, and pairs with the same caption.
    """
    _, key = np.unique([caption.strip().lower() for caption in captions], return_inverse=True)
    negative_NN = key[:, None] != key
    rank_NN = np.where(negative_NN, similarity_NN, -1).argsort(1, kind="stable").argsort(1, kind="stable")
    count_N1 = negative_NN.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.where(negative_NN, (rank_NN - (len(captions) - count_N1) + 0.5) / count_N1, np.nan)


def win_probability(negatives: int, better_N: NDArray[np.int64], all_N: NDArray[np.int64]) -> float:
    """Probability that `negatives` drawn without replacement contain none of the better ones; mean over N."""
    factors = [np.maximum(0, all_N - better_N - k) / (all_N - k) for k in range(negatives)]
    return float(np.prod(factors, axis=0).mean())
