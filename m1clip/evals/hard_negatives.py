"""How hard a wrong caption is, by its words alone, and how often it deceives the model at each difficulty.

Shapes: N pairs, E embedding, V words.
"""

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

MOST = 1000
"""PairDataset that are compared with each other; of more, the first."""
TIERS = {"easy": (0.0, 0.5), "medium": (0.5, 0.9), "hard": (0.9, 1.0)}
"""Which part of a pair's negatives, from the most different to the most similar."""
OTHERS = 10
LONGEST = 77
"""Words of a caption that count: about as many as models read."""
# Where words are not parted by spaces, each sign is one.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def by_difficulty(
    image_NE: Tensor, text_NE: Tensor, captions: Sequence[str]
) -> dict[str, dict[str, float | int]]:
    """For each tier how often the true caption or image wins, both ways.

    {} where there are too few pairs, or no words in common by which some would be harder than others.

    pairwise   against one such negative (chance a half)
    first      against `among` - 1 of them at once, as in a batch of that size (chance 1 / among)
    """
    captions = captions[:MOST]
    score_NN = (image_NE[:MOST].float() @ text_NE[:MOST].float().T).numpy()
    alike_NN = similarity(captions)
    part_NN = places(captions, alike_NN)
    true_N = score_NN.diagonal()
    lost = [true_N[:, None] <= way for way in (score_NN, score_NN.T)]
    inside = {name: (low <= part_NN) & (part_NN < high) for name, (low, high) in TIERS.items()}
    others = min(OTHERS, *(int(mask.sum(1).min(initial=OTHERS)) for mask in inside.values()))
    if others < 1 or not alike_NN[inside["hard"]].any():
        return {}
    found = {}
    for name, mask in inside.items():
        beaten = [(mask & way).sum(1) for way in lost]
        found[name] = {
            "similarity": float(alike_NN[mask].mean()),
            "negatives": int(mask.sum()),
            "pairwise": float(1 - np.mean([way.sum() / mask.sum() for way in beaten])),
            "first": float(np.mean([none_of(others, way, mask.sum(1)) for way in beaten])),
            "among": others + 1,
            "pairs": len(captions),
        }
    return found


def similarity(captions: Sequence[str]) -> NDArray[np.float32]:
    """(N, N) cosines of the captions' words, each weighted by how rare it is (tf-idf)."""
    words = [Counter(WORD.findall(caption.lower())[:LONGEST]) for caption in captions]
    seen = Counter(word for one in words for word in one)
    column = {word: number for number, word in enumerate(seen)}
    count_NV = np.zeros((len(captions), len(column)), np.float32)
    for row, one in enumerate(words):
        for word, count in one.items():
            count_NV[row, column[word]] = count * np.log((1 + len(captions)) / seen[word])
    length_N = np.linalg.norm(count_NV, axis=1, keepdims=True)
    unit_NV = count_NV / np.maximum(length_N, 1e-9)
    alike: NDArray[np.float32] = unit_NV @ unit_NV.T
    return alike


def places(captions: Sequence[str], alike_NN: NDArray[np.float32]) -> NDArray[np.float64]:
    """(N, N) where each negative of a pair stands among all of them, from 0 (most different) to 1.

    NaN for what is no negative: the pair itself, and those with the very same caption.
    """
    _, same = np.unique([caption.strip().lower() for caption in captions], return_inverse=True)
    negative_NN = same[:, None] != same
    rank_NN = np.where(negative_NN, alike_NN, -1).argsort(1, kind="stable").argsort(1, kind="stable")
    count_N1 = negative_NN.sum(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.where(negative_NN, (rank_NN - (len(captions) - count_N1) + 0.5) / count_N1, np.nan)


def none_of(others: int, bad_N: NDArray[np.int64], all_N: NDArray[np.int64]) -> float:
    """The chance that `others` drawn from all, without putting back, hold none of the bad; the mean of N."""
    each = [np.maximum(0, all_N - bad_N - k) / (all_N - k) for k in range(others)]
    return float(np.prod(each, axis=0).mean())
