"""Whether a library has an image that fits a text at all: a rule that is learned from validation images.

A cosine alone does not say it: its range depends on the model and on the text. The export carries the embeddings of
validation images, the reference. If a text clearly fits some of them, and fits no image of the library nearly as well,
the library has nothing like it. Texts without such a peak in the reference are not judged: the model may not know them.

Shapes: Q queries, N images of a library, R of the reference, S simulated libraries, E embedding.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
SEARCH_REFERENCE = "search_reference.npy"  # the file of an export
WORD = re.compile(r"[^\W\d_]{3,}")
MAX_FREQUENCY = 0.1  # of the images; more frequent words, such as "with", are no queries
MAX_QUERIES, MAX_REFERENCE = 1_000, 1_000
MIN_QUERIES, MIN_IMAGES = 20, 100  # fewer say nothing
TOP_SHARE = 0.01  # of the reference: the images that a text fits best
SPLITS = 4  # of the images into reference and library, each used both ways
LIBRARIES = 16  # simulated for each query and split, half of them with a fitting image
MIN_LIBRARY = 30
PRECISION, MIN_RECALL = 0.9, 0.01  # of "nothing like it" on the validation images


class Peak(NamedTuple):
    """How a text fits the reference: the mean cosine, that of its best images above it, and the standard deviation."""

    mean: float
    height: float
    std: float


@dataclass(frozen=True)
class Calibration:
    """A library has nothing like a text if its best image is less than `ratio` times as far above the mean as the
    text's best images of the reference, and these are at least `min_peak` standard deviations above it.

    None: no rule has the required precision.
    """

    ratio: float | None
    min_peak: float | None
    precision: float  # of the answer, in libraries simulated from the validation images
    recall: float  # of the libraries without a fitting image
    queries: int
    images: int

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def has_rule(self) -> bool:
        return self.ratio is not None and self.min_peak is not None

    def is_nothing(self, peak: Peak, best: float, mean: float) -> bool:
        """From the best cosine of the library and the mean of all."""
        if self.ratio is None or self.min_peak is None:
            return False
        # In a library of dogs, all are above the reference's mean for "dog"; among other kinds of images than those of
        # the reference, all are below it.
        above = best - min(mean, peak.mean)
        return peak.height >= self.min_peak * peak.std and above < self.ratio * peak.height


def find_peak(text_E: Floats, reference_RE: Floats) -> Peak:
    mean, height, std = find_peaks(text_E[None] @ reference_RE.T)
    return Peak(float(mean[0]), float(height[0]), float(std[0]))


def find_peaks(score_QR: Floats) -> tuple[Floats, Floats, Floats]:
    """Means, heights and standard deviations (Q,) of peaks."""
    count = max(1, round(TOP_SHARE * score_QR.shape[1]))
    top_QR = np.partition(score_QR, -count, axis=1)[:, -count:]
    mean_Q = score_QR.mean(1)
    return mean_Q, top_QR.mean(1) - mean_Q, score_QR.std(1)


def read_calibration(record: Any) -> Calibration | None:
    """From an export.json, which anybody may have written; None if it has none."""
    if not isinstance(record, Mapping):
        return None
    rule = {name: record.get(name) for name in ("ratio", "min_peak")}
    figures = {name: record.get(name) for name in ("precision", "recall", "queries", "images")}
    if not all(isinstance(number, int | float) for number in figures.values()):
        return None
    if not all(number is None or isinstance(number, int | float) for number in rule.values()):
        return None
    return Calibration(**rule, **figures)  # type: ignore[arg-type]


@dataclass(frozen=True)
class WordQueries:
    """Words of captions as queries; which images (Q, N) fit them, and which do not. Others are not used."""

    texts: list[str]
    is_fitting_QN: Bools
    is_other_QN: Bools


def word_queries(captions: Sequence[Sequence[str]], seed: int = 0) -> WordQueries:
    """Words, and pairs of neighboring words, of the captions of images.

    An image with three captions or more fits a word of at least two of them. What one person of five mentions is often
    hardly visible.
    """
    counts = dict[str, dict[int, int]]()  # captions by word and image
    for image, texts in enumerate(captions):
        for text in texts:
            words = WORD.findall(text.lower())
            for query in {*words, *map(" ".join, pairwise(words))}:
                of_query = counts.setdefault(query, {})
                of_query[image] = of_query.get(image, 0) + 1
    most = max(1, MAX_FREQUENCY * len(captions))
    common = {word for word, images in counts.items() if len(images) > most}
    fitting = {
        query: [image for image, count in images.items() if count >= (2 if len(captions[image]) > 2 else 1)]
        for query, images in sorted(counts.items())
        if len(images) <= most and common.isdisjoint(query.split())
    }
    queries = [query for query, images in fitting.items() if len(images) >= 2]
    queries = sorted(np.random.default_rng(seed).permutation(queries)[:MAX_QUERIES].tolist())
    is_fitting_QN = np.zeros((len(queries), len(captions)), np.bool_)
    is_other_QN = np.ones((len(queries), len(captions)), np.bool_)
    for row, query in enumerate(queries):
        is_fitting_QN[row, fitting[query]] = True
        is_other_QN[row, list(counts[query])] = False
    return WordQueries(queries, is_fitting_QN, is_other_QN)


class Simulated(NamedTuple):
    """Of each simulated library (S,): how far its best image is above the mean and how high the text's peak is, in
    the units of the rule, and whether it has a fitting image.
    """

    ratio: NDArray[np.float64]
    peak: NDArray[np.float64]
    is_present: Bools


def write_reference(path: Path, image_NE: Floats) -> None:
    chosen = np.sort(np.random.default_rng(0).permutation(len(image_NE))[:MAX_REFERENCE])
    np.save(path, image_NE[chosen].astype(np.float16))


def read_reference(path: Path, width: int) -> Floats:
    """The embeddings (R, E) of a file that anybody may have written."""
    reference_RE = np.load(path, mmap_mode="r", allow_pickle=False)
    count, *rest = reference_RE.shape or (0,)
    if reference_RE.dtype != np.float16 or not 0 < count <= MAX_REFERENCE or rest != [width]:
        raise ValueError(f"{path} is damaged: it has {reference_RE.dtype} of shape {reference_RE.shape}")
    return np.asarray(reference_RE, np.float32)


def calibrate(
    encode: Callable[[list[str]], Floats], queries: WordQueries, image_NE: Floats, seed: int = 0
) -> Calibration | None:
    """From words of validation captions, which `encode` embeds; None if there are too few."""
    if len(queries.texts) < MIN_QUERIES or len(image_NE) < MIN_IMAGES:
        return None
    score_QN, rng, parts = encode(queries.texts) @ image_NE.T, np.random.default_rng(seed), list[Simulated]()
    for _ in range(SPLITS):
        first, second = np.array_split(rng.permutation(len(image_NE)), 2)
        parts += [simulate(score_QN, queries, *halves, rng) for halves in ((first, second), (second, first))]
    libraries = Simulated(*map(np.concatenate, zip(*parts, strict=True)))
    return Calibration(*choose_rule(libraries), len(queries.texts), len(image_NE))


def simulate(
    score_QN: Floats, queries: WordQueries, reference: NDArray[Any], images: NDArray[Any], rng: np.random.Generator
) -> Simulated:
    """Libraries of many sizes from some images, half of them with images that fit; others are the reference."""
    peaks = zip(*find_peaks(score_QN[:, reference]), strict=True)
    rows = list[tuple[float, float, bool]]()
    for query, (mean, height, std) in enumerate(peaks):
        score_N = score_QN[query]
        fitting = images[queries.is_fitting_QN[query, images]]
        others = images[queries.is_other_QN[query, images]]
        for number in range(LIBRARIES if len(fitting) and height > 0 else 0):
            size = int(np.exp(rng.uniform(np.log(min(MIN_LIBRARY, len(images))), np.log(len(images)))))
            library, is_present = rng.permutation(others)[:size], bool(number % 2)
            if is_present:
                library = np.concatenate([library, rng.permutation(fitting)[: rng.integers(1, len(fitting) + 1)]])
            above = score_N[library].max() - min(score_N[library].mean(), mean)
            rows.append((above / height, height / max(std, 1e-6), is_present))
    ratio_S, peak_S, is_present_S = map(np.array, zip(*rows, strict=True))
    return Simulated(ratio_S, peak_S, is_present_S)


def choose_rule(libraries: Simulated) -> tuple[float | None, float | None, float, float]:
    """The rule that recognizes most libraries without a fitting image, with the required precision; both figures."""
    absent = int((~libraries.is_present).sum())
    best: tuple[float | None, float | None, float, float] = (None, None, 0.0, 0.0)
    for min_peak in np.quantile(libraries.peak, np.arange(0, 0.98, 0.04)):
        chosen = libraries.peak >= min_peak
        order = np.argsort(libraries.ratio[chosen])
        right_S = np.cumsum(~libraries.is_present[chosen][order])
        precision_S = right_S / np.arange(1, len(order) + 1)
        good = np.flatnonzero((precision_S >= PRECISION) & (right_S >= MIN_RECALL * absent))
        if len(good) and right_S[good[-1]] / absent > best[3]:
            last = good[-1]
            ratio = float(libraries.ratio[chosen][order][last])
            best = (ratio, float(min_peak), float(precision_S[last]), float(right_S[last] / absent))
    return best
