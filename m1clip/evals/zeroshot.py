"""Zero-shot accuracy on labelled images: by label, with confusions, calibration and what the templates gain.

Shapes: N images, C labels, E embedding.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip.data.splits import Split, TrainCaptions
from m1clip.evals.embed import embed_feature_rows, embed_split_images
from m1clip.format import plural, wilson_interval
from m1clip.model.classify import Classifier, make_classifier
from m1clip.model.clip import CLIP
from m1clip.prompts import Prompts, check_labels, label_key

BINS = 15  # of the confidence, as in Guo et al., 2017
MAX_CONFUSED = 10  # pairs of labels that are listed
MAX_CONFUSION = 2_000  # labels of a confusion matrix


@dataclass(frozen=True)
class LabelSet:
    """The labels to choose from, and the correct one of each image."""

    names: tuple[str, ...]
    truth_N: Tensor  # -1 for an image that is left out
    notes: tuple[str, ...] = ()  # what was left out or merged
    are_captions: bool = False  # the labels are whole captions, and need no template

    @property
    def rows(self) -> Tensor:
        return (self.truth_N >= 0).nonzero().flatten()


class NotApplicable(ValueError):  # noqa: N818 - the data has nothing for a task, which is no error by itself
    pass


def find_labels(pairs: Split, requested: Sequence[str] = (), others: Sequence[str] = ()) -> LabelSet:
    """The labels of a split, or its captions if they are labels.

    `requested` are the labels to choose from, and images of other labels are left out, and counted. Without them,
    `others` are labels that occur only in other splits.
    """
    labels, are_captions = pairs.labels(), False
    if not any(labels):
        captions = list(pairs.all_captions())
        if not TrainCaptions.compare(None, captions).labels:
            raise NotApplicable("the images have no labels")
        labels, are_captions = [of_image[0] for of_image in captions], True
    spellings: dict[str, str] = {}
    for label in filter(None, (*labels, *(() if are_captions else others))):
        spellings.setdefault(label_key(label), label)
    names = list(requested) or sorted(spellings.values())
    if len(names) < 2 and not requested:
        raise NotApplicable(f"all images have the same label, {names[0]!r}")
    number = {label_key(name): index for index, name in enumerate(check_labels(names))}
    truth_N = torch.tensor([number.get(label_key(label), -1) for label in labels])
    distinct = len({label_key(label) for label in filter(None, labels)})
    notes = list(label_notes(labels, truth_N, names, distinct))
    if not (truth_N >= 0).any():
        raise ValueError(f"no image has one of the labels ({_some(names)}); the data has {labels[0]!r}")
    return LabelSet(tuple(names), truth_N, tuple(notes), are_captions)


def label_notes(labels: Sequence[str], truth_N: Tensor, names: Sequence[str], distinct: int) -> list[str]:
    counts = truth_N[truth_N >= 0].bincount(minlength=len(names))
    unlabelled = sum(not label for label in labels)
    unknown = Counter(label for label, truth in zip(labels, truth_N.tolist(), strict=True) if label and truth < 0)
    empty = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    merged = len(set(filter(None, labels))) - distinct
    found = {
        f"{plural(unlabelled, 'image')} without a label left out": unlabelled,
        f"{plural(unknown.total(), 'image')} with other labels left out ({_some(unknown)})": unknown,
        f"{plural(len(empty), 'label')} without images ({_some(empty)})": empty,
        f"{plural(merged, 'label')} merged with others that differ only in case or spaces": merged,
    }
    return [note for note, is_true in found.items() if is_true]


def _some(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


@dataclass(frozen=True)
class ZeroShot:
    """Accuracies are fractions; by label in the order of `labels`, None for a label without images."""

    images: int
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    accuracy: float
    top5: float | None  # with at least five labels
    mean_per_class: float
    chance: float
    majority: float  # accuracy of always answering the most frequent label
    ece: float  # expected calibration error of the top-1 probability
    none_of_these: float  # fraction of the images that a null prompt fits at least as well
    recall: tuple[float | None, ...] = field(repr=False)
    # Rows are correct labels, columns predicted ones; empty if there are many.
    confusion: tuple[tuple[int, ...], ...] = field(repr=False)
    bins: tuple[tuple[int, float, float], ...] = field(repr=False)  # images, mean probability and accuracy
    prompts: str
    label_only: tuple[float, int, int] | None = None  # accuracy of names alone; images won and lost by the templates
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """For a log line: zeroshot_accuracy …"""
        keys = {"accuracy": self.accuracy, "top5": self.top5, "mean_per_class": self.mean_per_class}
        keys |= {"chance": self.chance, "majority": self.majority, "ece": self.ece}
        keys |= {"images": self.images, "labels": len(self.labels)}
        return {f"zeroshot_{key}": value for key, value in keys.items()}

    def details(self) -> dict[str, Any]:
        low, high = wilson_interval(self.accuracy, self.images)
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        confused = sorted(
            (
                (count, self.labels[true], self.labels[predicted])
                for true, row in enumerate(self.confusion)
                for predicted, count in enumerate(row)
                if count and true != predicted
            ),
            key=lambda item: -item[0],
        )
        return {**values, "interval": [low, high], "most_confused": confused[:MAX_CONFUSED]}


def class_logits(classifier: Classifier, image_NE: Tensor) -> Tensor:
    return torch.from_numpy(classifier.logits(image_NE.numpy()))


def zero_shot(image_NE: Tensor, labels: LabelSet, classifier: Classifier, prompts: str = "") -> ZeroShot:
    """Scores of the images that have a label."""
    rows, names = labels.rows, labels.names
    truth_N, logit_NC = labels.truth_N[rows], class_logits(classifier, image_NE[rows])
    if not logit_NC.isfinite().all():
        raise FloatingPointError("the embeddings are not finite; this model is broken")
    predicted_N = logit_NC.argmax(1)
    probability_NC = torch.from_numpy(classifier.probabilities(logit_NC.numpy()))
    null_N = torch.from_numpy(classifier.null_logits(image_NE[rows].numpy()))
    correct_N = predicted_N == truth_N
    counts_C, hits_C = (values_N.bincount(minlength=len(names)) for values_N in (truth_N, truth_N[correct_N]))
    recall = [hits / n if n else None for hits, n in zip(hits_C.tolist(), counts_C.tolist(), strict=True)]
    confusion = []
    if len(names) <= MAX_CONFUSION:
        cells = (truth_N * len(names) + predicted_N).bincount(minlength=len(names) ** 2)
        confusion = cells.view(len(names), -1).tolist()
    known = [value for value in recall if value is not None]
    top5 = (logit_NC.topk(5).indices == truth_N[:, None]).any(1) if len(names) >= 5 else None
    bins = calibration_bins(probability_NC.amax(1), correct_N)
    return ZeroShot(
        images=len(rows),
        labels=names,
        counts=tuple(counts_C.tolist()),
        accuracy=int(correct_N.sum()) / len(rows),
        top5=None if top5 is None else int(top5.sum()) / len(rows),
        mean_per_class=sum(known) / len(known),
        chance=1 / len(names),
        majority=int(counts_C.max()) / len(rows),
        ece=sum(count * abs(probability - accuracy) for count, probability, accuracy in bins) / len(rows),
        none_of_these=(null_N >= logit_NC.amax(1)).float().mean().item(),
        recall=tuple(recall),
        confusion=tuple(map(tuple, confusion)),
        bins=bins,
        prompts=prompts,
        notes=labels.notes,
    )


def calibration_bins(probability_N: Tensor, correct_N: Tensor) -> tuple[tuple[int, float, float], ...]:
    """Images, mean probability and accuracy of each of BINS equal intervals of the probability; empty ones too."""
    bin_N = (probability_N * BINS).ceil().long().clamp(1, BINS) - 1
    counts = bin_N.bincount(minlength=BINS)
    sums = (torch.zeros(BINS).index_add(0, bin_N, values.float()) for values in (probability_N, correct_N))
    means = ((total / counts.clamp(min=1)).tolist() for total in sums)
    return tuple(zip(counts.tolist(), *means, strict=True))


def evaluate_zero_shot(
    model: CLIP, image_NE: Tensor, labels: LabelSet, classifier: Classifier, prompts: Prompts
) -> ZeroShot:
    """Scores of a classifier made of the prompts, and the accuracy of the label names alone."""
    result = zero_shot(image_NE, labels, classifier, "the captions" if labels.are_captions else prompts.name)
    if labels.are_captions or (prompts.templates == ("{}",) and not prompts.descriptions):
        return result
    rows, truth_N = labels.rows, labels.truth_N[labels.rows]
    classifiers = (classifier, make_classifier(model, labels.names, Prompts(("{}",))))
    correct_N, plain_N = (class_logits(one, image_NE[rows]).argmax(1) == truth_N for one in classifiers)
    won, lost = int((correct_N & ~plain_N).sum()), int((plain_N & ~correct_N).sum())
    return replace(result, label_only=(plain_N.float().mean().item(), won, lost))


@dataclass(frozen=True)
class ZeroShotData:
    """Labelled images that training is evaluated on."""

    pairs: Split
    labels: LabelSet
    features: NDArray[Any] | None = None  # (N, D) of a frozen vision tower

    def evaluate(self, model: CLIP, chunk: int) -> ZeroShot:
        if self.features is not None:
            image_NE = embed_feature_rows(model, "vision", self.features)
        else:
            image_NE = embed_split_images(model, self.pairs, chunk)
        prompts = Prompts(("{}",)) if self.labels.are_captions else Prompts()
        return zero_shot(image_NE, self.labels, make_classifier(model, self.labels.names, prompts), prompts.name)


def gain_is_significant(won: int, lost: int) -> bool:
    """Two-sided sign test at 5 % of the images that two classifiers answer differently."""
    total = won + lost
    tail = sum(math.comb(total, k) for k in range(min(won, lost) + 1)) / 2**total if total else 1.0
    return 2 * tail < 0.05
