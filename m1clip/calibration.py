"""Whether a library has an image that fits a query at all: a threshold that is learned from validation pairs.

A cosine alone does not say it: its range depends on the model and on the query. How far the best image is above the
mean of the library does. The threshold is chosen on words of validation captions, in libraries of many sizes that have
an image whose captions contain the word, and in libraries without one.

Shapes: Q queries, N images, E embedding.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
WORD = re.compile(r"[^\W\d_]{3,}")
MAX_FREQUENCY = 0.1  # of the images; more frequent words, such as "with", are no queries
MAX_QUERIES = 1_000
MIN_QUERIES, MIN_IMAGES = 20, 50  # fewer say nothing
# Words that the model does not know, such as "another", say nothing: images with the word must rank before others.
MIN_RANKING = 0.9
LIBRARIES = 64  # simulated for each query, half of them without a fitting image
PRECISION, MIN_ANSWERS = 0.95, 20  # of "nothing like it" on the validation images; the goal on others is 0.9


@dataclass(frozen=True)
class Calibration:
    """A library has nothing like a query if its best cosine is less than `margin` above the mean of all.

    None: the model cannot say it with the required precision.
    """

    margin: float | None
    precision: float  # of the answer on the validation images
    recall: float  # of the simulated libraries without a fitting image
    queries: int
    images: int

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def is_nothing(self, best: float, mean: float) -> bool:
        return self.margin is not None and best - mean < self.margin


def read_calibration(record: Any) -> Calibration | None:
    """From an export.json, which anybody may have written; None if it has none."""
    if not isinstance(record, Mapping) or not isinstance(record.get("margin", ""), int | float | None):
        return None
    numbers = {name: record.get(name) for name in ("precision", "recall", "queries", "images")}
    if not all(isinstance(number, int | float) for number in numbers.values()):
        return None
    return Calibration(record["margin"], **numbers)  # type: ignore[arg-type]


def word_queries(captions: Sequence[Sequence[str]], seed: int = 0) -> tuple[list[str], NDArray[np.bool_]]:
    """Words, and pairs of neighboring words, of the captions of images, and which images (Q, N) have them."""
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
        if min(3, most) <= len(images) <= most and common.isdisjoint(query.split())
    ]
    chosen = np.random.default_rng(seed).permutation(len(queries))[:MAX_QUERIES]
    queries = [queries[i] for i in sorted(chosen)]
    has_QN = np.zeros((len(queries), len(captions)), np.bool_)
    for has_N, query in zip(has_QN, queries, strict=True):
        has_N[list(images_of[query])] = True
    return queries, has_QN


def ranking(score_N: Floats, has_N: NDArray[np.bool_]) -> float:
    """The probability that an image with the word ranks before one without it: the area under the ROC curve."""
    rank_N = np.argsort(np.argsort(score_N))
    with_word, without = int(has_N.sum()), int((~has_N).sum())
    return float((rank_N[has_N].sum() - with_word * (with_word - 1) / 2) / max(1, with_word * without))


def simulate_margins(
    score_QN: Floats, has_QN: NDArray[np.bool_], rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """How far the best image is above the mean of libraries of many sizes (S,), and whether they have a fitting one."""
    margins, is_present, images = list[float](), list[bool](), score_QN.shape[1]
    for score_N, has_N in zip(score_QN, has_QN, strict=True):
        others, fitting = np.flatnonzero(~has_N), np.flatnonzero(has_N)
        for number in range(LIBRARIES):
            size = int(np.exp(rng.uniform(np.log(min(30, images // 2)), np.log(images))))
            library = rng.permutation(others)[:size]
            if number % 2:
                library = np.concatenate([library, rng.permutation(fitting)[: rng.integers(1, len(fitting) + 1)]])
            margins.append(float(score_N[library].max() - score_N[library].mean()))
            is_present.append(bool(number % 2))
    return np.array(margins), np.array(is_present)


def choose_margin(margin_S: NDArray[np.float64], is_present_S: NDArray[np.bool_]) -> tuple[float | None, float, float]:
    """The largest margin below which libraries have nothing with the required precision; precision, recall."""
    order = np.argsort(margin_S)
    absent_S = np.cumsum(~is_present_S[order])
    precision_S = absent_S / np.arange(1, len(order) + 1)
    good = np.flatnonzero((precision_S >= PRECISION) & (absent_S >= MIN_ANSWERS))
    if not len(good):
        return None, 0.0, 0.0
    last = int(good[-1])
    return float(margin_S[order[last]]), float(precision_S[last]), float(absent_S[last] / (~is_present_S).sum())


def calibrate(text_QE: Floats, has_QN: NDArray[np.bool_], image_NE: Floats) -> Calibration | None:
    """From the words of validation captions that the model knows; None if there are too few."""
    score_QN = text_QE @ image_NE.T
    is_known_Q = np.array([ranking(*row) >= MIN_RANKING for row in zip(score_QN, has_QN, strict=True)], np.bool_)
    if is_known_Q.sum() < MIN_QUERIES or len(image_NE) < MIN_IMAGES:
        return None
    margins = simulate_margins(score_QN[is_known_Q], has_QN[is_known_Q], np.random.default_rng(0))
    return Calibration(*choose_margin(*margins), int(is_known_Q.sum()), len(image_NE))
