"""Whether a library has an image that fits a query at all: a threshold that is learned from validation pairs.

A cosine alone does not say it: its range depends on the model, on the query and on the size of the library. Four
measures of the best image do, weighted by a logistic regression: its cosine; how far that is above the other images of
the library, in standard deviations; how far above other texts for the same image; and how far the best of so many
images would be by chance. The regression is fitted on words of validation captions: libraries that have an image whose
captions contain the word, and libraries without one.

Shapes: Q queries, N images, K texts, F features, E embedding.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
FEATURES = 4
WORD = re.compile(r"[^\W\d_]{3,}")
MAX_FREQUENCY = 0.1  # of the images; more frequent words, such as "with", are no queries
MAX_QUERIES, MAX_TEXTS = 1_000, 256
MIN_QUERIES, MIN_IMAGES = 20, 50  # fewer say nothing
LIBRARIES = 8  # simulated for each query, half of them without a fitting image
PRECISION = 0.95  # of the answer "nothing like it" on the validation images; the goal on others is 0.9


@dataclass(frozen=True)
class Calibration:
    """`weights_F` and `bias` of the regression; below `threshold` a library has nothing like a query."""

    weights_F: tuple[float, ...]
    bias: float
    threshold: float | None  # None: the model cannot say it with the required precision
    text_KE: Floats  # texts that a query is compared with
    record: Mapping[str, Any]  # how it was measured

    def probability(self, score: float, mean: float, std: float, images: int, image_E: Floats) -> float:
        """That an image with this cosine fits a query whose cosines in a library have this mean and deviation."""
        text_K = self.text_KE @ image_E
        features_F = describe(score, mean, std, images, float(text_K.mean()), float(text_K.std()))
        return float(sigmoid(features_F @ np.array(self.weights_F) + self.bias))


def read_calibration(record: Mapping[str, Any], text_KE: Floats, width: int) -> Calibration:
    """From what export.json and calibration.npy have; anybody may have written them."""
    weights, bias, threshold = (record.get(name) for name in ("weights", "bias", "threshold"))
    numbers = [*weights, bias, 0 if threshold is None else threshold] if isinstance(weights, list) else []
    if len(numbers) != FEATURES + 2 or not all(isinstance(one, int | float) and abs(one) < 1e9 for one in numbers):
        raise ValueError("its calibration has no weights")
    if text_KE.ndim != 2 or text_KE.shape[1] != width or text_KE.dtype != np.float32 or not 1 < len(text_KE) < 10_000:
        raise ValueError("its calibration has no texts of the model's width")
    return Calibration(tuple(numbers[:FEATURES]), numbers[FEATURES], threshold, text_KE, record)


def describe(score: Any, mean: Any, std: Any, images: Any, text_mean: Any, text_std: Any) -> NDArray[np.float64]:
    """The four measures (…, F) of an image."""
    by_chance = np.sqrt(2 * np.log(np.maximum(images, 2)))  # deviations of the best of so many normal numbers
    above_images = (score - mean) / np.maximum(std, 1e-6)
    above_texts = (score - text_mean) / np.maximum(text_std, 1e-6)
    return np.stack(np.broadcast_arrays(score, above_images, above_texts, by_chance), -1).astype(np.float64)


def word_queries(captions: Sequence[Sequence[str]], seed: int = 0) -> tuple[list[str], NDArray[np.bool_]]:
    """Words, and pairs of neighboring words, of the captions of images, and which images (Q, N) have them.

    A word that nearly every image has is no query; one that few images have is the typical one.
    """
    images_of = dict[str, set[int]]()
    for image, texts in enumerate(captions):
        for text in texts:
            words = WORD.findall(text.lower())
            for query in (*words, *map(" ".join, pairwise(words))):
                images_of.setdefault(query, set()).add(image)
    most = max(1, MAX_FREQUENCY * len(captions))
    common = {word for word, images in images_of.items() if len(images) > most}
    queries = [
        query
        for query, images in sorted(images_of.items())
        if len(images) <= most and len(images) >= min(3, most) and common.isdisjoint(query.split())
    ]
    rng = np.random.default_rng(seed)
    queries = [queries[i] for i in sorted(rng.permutation(len(queries))[:MAX_QUERIES])]
    has_QN = np.zeros((len(queries), len(captions)), np.bool_)
    for has_N, query in zip(has_QN, queries, strict=True):
        has_N[list(images_of[query])] = True
    return queries, has_QN


def simulate(
    score_QN: Floats, has_QN: NDArray[np.bool_], text_NK: Floats, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Features (S, F) of the best image of libraries of many sizes, and whether they have a fitting one (S,)."""
    features, is_present = list[NDArray[np.float64]](), list[bool]()
    text_mean_N, text_std_N, images = text_NK.mean(1), text_NK.std(1), score_QN.shape[1]
    for score_N, has_N in zip(score_QN, has_QN, strict=True):
        others, fitting = np.flatnonzero(~has_N), np.flatnonzero(has_N)
        for number in range(LIBRARIES):
            size = int(np.exp(rng.uniform(np.log(min(30, images // 2)), np.log(images))))
            library = rng.permutation(others)[:size]
            if number % 2:
                library = np.concatenate([library, rng.permutation(fitting)[: rng.integers(1, len(fitting) + 1)]])
            best = library[score_N[library].argmax()]
            scores = score_N[library]
            arguments = (scores.mean(), scores.std(), len(library), text_mean_N[best], text_std_N[best])
            features.append(describe(score_N[best], *arguments))
            is_present.append(bool(number % 2))
    return np.array(features), np.array(is_present)


def fit_logistic(features_SF: NDArray[np.float64], label_S: NDArray[np.bool_]) -> tuple[NDArray[np.float64], float]:
    """Weights and bias by Newton's method, with a little weight decay."""
    mean_F, std_F = features_SF.mean(0), features_SF.std(0) + 1e-9
    x_SG = np.concatenate([(features_SF - mean_F) / std_F, np.ones((len(features_SF), 1))], 1)
    w_G, decay_G = np.zeros(x_SG.shape[1]), np.array([*[1.0] * features_SF.shape[1], 0.0])
    for _ in range(30):
        p_S = sigmoid(x_SG @ w_G)
        gradient_G = x_SG.T @ (p_S - label_S) + decay_G * w_G
        hessian_GG = (x_SG * (p_S * (1 - p_S))[:, None]).T @ x_SG + np.diag(decay_G + 1e-9)
        w_G -= np.linalg.solve(hessian_GG, gradient_G)
    weights_F = w_G[:-1] / std_F
    return weights_F, float(w_G[-1] - mean_F @ weights_F)


def sigmoid(x: Any) -> Any:
    return np.exp(-np.logaddexp(0, -x))


def choose_threshold(p_S: NDArray[np.float64], is_present_S: NDArray[np.bool_]) -> tuple[float | None, float, float]:
    """The highest probability below which libraries have nothing with the required precision; precision, recall.

    As many libraries have a fitting image as have none.
    """
    order = np.argsort(p_S)
    absent = np.cumsum(~is_present_S[order])
    precision = absent / np.arange(1, len(order) + 1)
    good = np.flatnonzero((precision >= PRECISION) & (np.arange(len(order)) >= MIN_QUERIES))
    if not len(good):
        return None, 0.0, 0.0
    last = int(good[-1])
    return float(p_S[order[last]]), float(precision[last]), float(absent[last] / max(1, (~is_present_S).sum()))


def calibrate(
    queries: Sequence[str], has_QN: NDArray[np.bool_], text_QE: Floats, image_NE: Floats
) -> Calibration | None:
    """Fit on the words of validation captions; None if there are too few of them. Half of the words judge the other."""
    if len(queries) < MIN_QUERIES or len(image_NE) < MIN_IMAGES:
        return None
    rng = np.random.default_rng(0)
    text_KE = text_QE[rng.permutation(len(queries))[:MAX_TEXTS]]
    score_QN, text_NK = text_QE @ image_NE.T, image_NE @ text_KE.T
    features_SF, is_present_S = simulate(score_QN, has_QN, text_NK, rng)
    weights_F, bias = fit_logistic(features_SF, is_present_S)
    threshold, precision, recall = choose_threshold(sigmoid(features_SF @ weights_F + bias), is_present_S)
    record = {"weights": weights_F.tolist(), "bias": bias, "threshold": threshold, "queries": len(queries)}
    record |= {"images": len(image_NE), "precision": precision, "recall": recall}
    return Calibration(tuple(weights_F.tolist()), bias, threshold, text_KE, record)
