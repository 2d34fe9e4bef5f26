"""Classifiers trained on frozen image embeddings: linear probe, k nearest neighbors, and both with few examples.

Shapes: N training and T test images, C labels, E embedding.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip.evals.zeroshot import NotApplicable
from m1clip.format import wilson_interval

# Inverse regularization strengths; embeddings are unit vectors. The larger, the slower a fit.
C_VALUES = tuple(10 ** (power / 2) for power in range(-2, 9))
DEFAULT_C = 10.0  # where there are too few images to choose
NEIGHBORS, NEIGHBOR_TEMPERATURE = (1, 5, 10, 20), 0.07  # neighbors vote by exp(similarity / temperature)
VALIDATION_PART = 0.2  # of the training images, for the choice of C and of the number of neighbors
SHOTS, DRAWS = (1, 2, 4, 8, 16), 10
MAX_TRAIN = 20_000  # training images; of larger sets evenly spaced ones
MAX_ITERATIONS = 500
SMALL_FIT = 2e8  # multiplications of one iteration that do not pay for a second thread
Labels = NDArray[np.int64]
Embeddings = NDArray[np.float32]


@dataclass(frozen=True)
class FewShot:
    shots: int
    mean: float
    std: float  # over the draws
    draws: int
    short: int  # labels with fewer images, all of which are used


@dataclass(frozen=True)
class Probe:
    """Accuracies are fractions of the test images."""

    train_images: int
    test_images: int
    labels: int
    accuracy: float
    top5: float | None
    mean_per_class: float
    c: float  # chosen inverse regularization
    knn_accuracy: float
    neighbors: int  # chosen k
    chance: float
    majority: float
    few_shot: tuple[FewShot, ...]
    notes: tuple[str, ...] = ()

    def details(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["few_shot"] = [vars(one) for one in self.few_shot]
        interval = {
            f"{key}interval": wilson_interval(values[f"{key}accuracy"], self.test_images) for key in ("", "knn_")
        }
        return {**values, **interval}


def require_sklearn() -> None:
    if find_spec("sklearn") is None:
        raise NotApplicable("scikit-learn is not installed: pip install 'm1clip[eval]'")


def split_by_label(truth_N: Tensor, keys: Sequence[Any], fraction: float) -> tuple[Tensor, Tensor]:
    """Rows for training and for testing: of each label about `fraction` for testing, in the order of the keys."""
    order = sorted((row for row in range(len(truth_N)) if truth_N[row] >= 0), key=lambda row: str(keys[row]))
    train, test = list[int](), list[int]()
    by_label: dict[int, list[int]] = {}
    for row in order:
        by_label.setdefault(int(truth_N[row]), []).append(row)
    for rows in by_label.values():
        count = max(1, round(fraction * len(rows))) if len(rows) > 1 else 0
        test += rows[:count]
        train += rows[count:]
    return torch.tensor(sorted(train), dtype=torch.long), torch.tensor(sorted(test), dtype=torch.long)


def linear_probe(
    train_NE: Tensor, train_N: Tensor, test_TE: Tensor, test_T: Tensor, seed: int, advance: Callable[[int], None]
) -> Probe:
    """Fit and score all classifiers; `advance` is called with 1 for each fit."""
    rows = np.linspace(0, len(train_N) - 1, min(MAX_TRAIN, len(train_N))).astype(int)
    x, y, x_test, y_test = train_NE.numpy()[rows], train_N.numpy()[rows], test_TE.numpy(), test_T.numpy()
    labels = np.unique(np.concatenate([train_N.numpy(), y_test]))
    if len(np.unique(y)) < 2:
        raise NotApplicable("all training images have the same label")
    notes = probe_notes(train_N.numpy(), y, y_test)
    fit, val = (part.numpy() for part in split_by_label(torch.from_numpy(y), range(len(y)), VALIDATION_PART))
    c, k = DEFAULT_C, 1
    if len(val) and len(np.unique(y[fit])) > 1:  # otherwise labels have one image each, and nothing can be chosen
        c = choose(C_VALUES, lambda c: log_likelihood(fit_logistic(x[fit], y[fit], c), x[val], y[val]), advance)
        k = choose(NEIGHBORS, lambda k: float((vote(x[fit], y[fit], x[val], k) == y[val]).mean()), advance)
    model = fit_logistic(x, y, c)
    predicted = model.predict(x_test)
    recalls = [float((predicted[y_test == label] == label).mean()) for label in np.unique(y_test)]
    top5 = None
    if len(model.classes_) >= 5:
        best = model.classes_[np.argsort(-model.decision_function(x_test), 1)[:, :5]]
        top5 = float((best == y_test[:, None]).any(1).mean())
    knn = float((vote(x, y, x_test, k) == y_test).mean())
    guesses = (1 / len(labels), float(np.bincount(y_test).max()) / len(y_test))
    shots = few_shot(x, y, x_test, y_test, c, np.random.default_rng(seed), advance)
    scores = (float((predicted == y_test).mean()), top5, float(np.mean(recalls)), c, knn, k)
    return Probe(len(y), len(y_test), len(labels), *scores, *guesses, tuple(shots), tuple(notes))


def probe_notes(all_train: Labels, train: Labels, test: Labels) -> list[str]:
    unseen, untested = np.setdiff1d(test, train), np.setdiff1d(train, test)
    wrong = int(np.isin(test, unseen).sum())
    notes = {
        f"{len(train):,} of {len(all_train):,} training images are used": len(train) < len(all_train),
        f"{len(unseen):,} labels of the test images do not occur in training: their {wrong:,} images are errors": wrong,
        f"{len(untested):,} labels have training images but no test images": len(untested),
    }
    return [note for note, is_true in notes.items() if is_true]


def choose(values: Sequence[Any], score: Callable[[Any], float], advance: Callable[[int], None]) -> Any:
    """The first of the best values; after two that are worse than the best, no more are tried."""
    scores = list[float]()
    for value in values:
        if scores and max(scores) > max(scores[-2:]):
            break
        scores.append(score(value))
        advance(1)
    advance(len(values) - len(scores))
    return values[int(np.argmax(scores))]


def fit_logistic(x: Embeddings, y: Labels, c: float) -> Any:
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    # Threads that wait for each other make a small fit ten times slower (2 AVX2 cores, 2,000 x 128, 32 labels).
    is_small = x.size * len(np.unique(y)) < SMALL_FIT
    with warnings.catch_warnings(), threadpool_limits(1 if is_small else None):
        warnings.simplefilter("ignore", UserWarning)  # no convergence with hardly any regularization; many labels
        return LogisticRegression(C=c, max_iter=MAX_ITERATIONS).fit(x, y)


def accuracy(model: Any, x: Embeddings, y: Labels) -> float:
    return float((model.predict(x) == y).mean())


def log_likelihood(model: Any, x: Embeddings, y: Labels) -> float:
    """Mean of the images whose label the model knows; with few images smoother than their accuracy."""
    known = np.isin(y, model.classes_)
    column = np.searchsorted(model.classes_, y[known])
    return float(np.log(model.predict_proba(x[known])[np.arange(len(column)), column] + 1e-12).mean())


def vote(x_NE: Embeddings, y_N: Labels, queries_TE: Embeddings, k: int) -> Labels:
    """The label with the most votes of the k nearest neighbors."""
    labels, number_N = np.unique(y_N, return_inverse=True)
    answers = []
    for start in range(0, len(queries_TE), 1024):
        similarity_tN = torch.from_numpy(queries_TE[start : start + 1024] @ x_NE.T)
        top = similarity_tN.topk(min(k, len(y_N)))
        votes_tC = torch.zeros(len(similarity_tN), len(labels))
        votes_tC.scatter_add_(1, torch.from_numpy(number_N)[top.indices], (top.values / NEIGHBOR_TEMPERATURE).exp())
        answers.append(labels[votes_tC.argmax(1).numpy()])
    return np.concatenate(answers)


def few_shot(
    x: Embeddings,
    y: Labels,
    x_test: Embeddings,
    y_test: Labels,
    c: float,
    rng: np.random.Generator,
    advance: Callable[[int], None],
) -> list[FewShot]:
    """Linear probes on k random images of each label, or on all of a label with fewer."""
    rows_of = [np.flatnonzero(y == label) for label in np.unique(y)]
    results = []
    for shots in SHOTS:
        short = sum(len(rows) < shots for rows in rows_of)
        if 2 * short <= len(rows_of):
            scores = []
            for _ in range(DRAWS):
                drawn = [rng.choice(rows, min(shots, len(rows)), replace=False) for rows in rows_of]
                rows = np.concatenate(drawn)
                scores.append(accuracy(fit_logistic(x[rows], y[rows], c), x_test, y_test))
                advance(1)
            results.append(FewShot(shots, float(np.mean(scores)), float(np.std(scores, ddof=1)), DRAWS, short))
    return results
