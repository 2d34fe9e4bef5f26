"""Zero-shot classification: the texts of each label are a classifier of images. NumPy, so no torch is needed.

Shapes: N images, C labels, P prompts, E embedding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from m1clip.config import ModelConfig, require
from m1clip.images import Pixels
from m1clip.model.inputs import ImageInput, OnError, image_batches, is_tensor, list_images
from m1clip.prompts import NULL_PROMPTS, Prompts, check_labels, parse_labels, parse_prompts

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Classification:
    """The best labels of one image. `none_of_these`: a null prompt, which names no label, fits at least as well."""

    label: str
    probability: float
    none_of_these: bool
    top: tuple[tuple[str, float], ...]  # the best labels with their probabilities


@dataclass(frozen=True)
class Classifier:
    labels: tuple[str, ...]
    class_CE: Floats  # unit vectors
    null_PE: Floats  # unit vectors of the null prompts
    logit_scale: float
    logit_bias: float | None  # of a sigmoid model

    def logits(self, image_NE: Floats) -> Floats:
        """(N, C), scaled by the model's temperature."""
        return self._scale(image_NE @ self.class_CE.T)

    def null_logits(self, image_NE: Floats) -> Floats:
        """(N,) of the null prompt that fits best."""
        return self._scale(image_NE @ self.null_PE.T).max(1)

    def _scale(self, cosine_NX: Floats) -> Floats:
        return np.float32(self.logit_scale) * cosine_NX + np.float32(self.logit_bias or 0.0)

    def probabilities(self, logit_NC: Floats) -> Floats:
        """Softmax over the labels; for a sigmoid model the probability of each label by itself."""
        if self.logit_bias is not None:
            return np.exp(-np.logaddexp(np.float32(0), -logit_NC))
        exp_NC = np.exp(logit_NC - logit_NC.max(1, keepdims=True))
        return exp_NC / exp_NC.sum(1, keepdims=True)

    def classify(self, image_NE: Floats, top_k: int) -> list[Classification]:
        logit_NC = self.logits(image_NE)
        probability_NC = self.probabilities(logit_NC)
        best_NK = np.argsort(-probability_NC, axis=1, kind="stable")[:, :top_k]
        is_none_N = (self.null_logits(image_NE) >= logit_NC.max(1)).tolist()
        values = np.take_along_axis(probability_NC, best_NK, axis=1).tolist()
        results = []
        for indices, row, is_none in zip(best_NK.tolist(), values, is_none_N, strict=True):
            best = tuple((self.labels[index], value) for index, value in zip(indices, row, strict=True))
            results.append(Classification(*best[0], is_none, best))
        return results


class ZeroShotModel(Protocol):
    """A model that encodes images and texts, to tensors or to arrays: CLIP, OnnxCLIP."""

    config: ModelConfig

    def embed_pixels(self, images_BHWC: Pixels) -> Any:
        """Unit vectors (B, E) of preprocessed images."""

    def encode_text(self, texts: str | Iterable[str], batch_size: int = 256, progress: bool = False) -> Any:
        """Unit vectors (B, E) of texts."""

    @property
    def scale_and_bias(self) -> tuple[float, float | None]:
        """The factor of cosine similarities in the logits, and what a sigmoid model adds to them."""


def classify(
    model: ZeroShotModel,
    images: ImageInput | Iterable[ImageInput],
    labels: str | Sequence[str] | Mapping[str, Sequence[str]],
    templates: str | Sequence[str],
    top_k: int,
    batch_size: int,
) -> list[Classification]:
    """The arguments are those of CLIP.classify."""
    require(top_k >= 1, f"top_k must be at least 1, not {top_k}")
    labels = parse_labels(labels) if isinstance(labels, str) else labels
    prompts = parse_prompts([templates] if isinstance(templates, str) else templates)
    if isinstance(labels, Mapping):
        prompts = replace(prompts, descriptions=labels, templates=prompts.templates if templates else ())
    classifier = make_classifier(model, labels, prompts)
    return [result for _, result in classify_images(model, list_images(images), classifier, top_k, batch_size)]


def make_classifier(
    model: ZeroShotModel, labels: Sequence[str] | Mapping[str, Sequence[str]], prompts: Prompts
) -> Classifier:
    """The mean of the unit vectors of each label's prompts, as in the CLIP paper."""
    texts = prompt_texts(labels, prompts)
    text_PE = to_floats(model.encode_text([*chain.from_iterable(texts), *NULL_PROMPTS]))
    return combine_prompts(labels, texts, text_PE, *model.scale_and_bias)


def prompt_texts(labels: Iterable[str], prompts: Prompts) -> list[list[str]]:
    """The texts of each label."""
    labels = check_labels(list(labels))
    prompts.check(labels)
    return list(map(prompts.of, labels))


def combine_prompts(
    labels: Iterable[str], texts: Sequence[Sequence[str]], text_PE: Floats, logit_scale: float, logit_bias: float | None
) -> Classifier:
    """A classifier of the unit vectors of all texts, followed by those of the null prompts."""
    *parts, null_PE = np.split(text_PE, np.cumsum([*map(len, texts)]))
    class_CE = np.stack([part_PE.mean(0) for part_PE in parts])
    class_CE /= np.linalg.norm(class_CE, axis=1, keepdims=True).clip(min=1e-12)
    return Classifier(tuple(labels), class_CE, null_PE, logit_scale, logit_bias)


def classify_images(
    model: ZeroShotModel,
    images: Iterable[ImageInput],
    classifier: Classifier,
    top_k: int = 5,
    batch_size: int = 32,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, Classification]]:
    """Position and result of each image, in their order, as soon as its batch is encoded."""
    with closing(image_batches(images, model.config.vision.preprocess, batch_size, on_error)) as batches:
        for positions, images_BHWC in batches:
            image_BE = to_floats(model.embed_pixels(images_BHWC))
            yield from zip(positions, classifier.classify(image_BE, top_k), strict=True)


def to_floats(rows: Any) -> Floats:
    """An array of float32 from a tensor on any device, or from an array."""
    return rows.float().cpu().numpy() if is_tensor(rows) else rows
