"""Zero-shot classification: the texts of each label are a classifier of images.

Shapes: N images, C labels, P prompts, E embedding.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip.model.inputs import ImageInput, OnError, image_batches
from m1clip.prompts import NULL_PROMPTS, Prompts, check_labels

if TYPE_CHECKING:
    from m1clip.model.clip import CLIP


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
    class_CE: Tensor  # unit vectors
    null_PE: Tensor  # unit vectors of the null prompts
    logit_scale: float
    logit_bias: float | None  # of a sigmoid model

    def logits(self, image_NE: Tensor) -> Tensor:
        """(N, C), scaled by the model's temperature."""
        return self.logit_scale * image_NE @ self.class_CE.T + (self.logit_bias or 0.0)

    def null_logits(self, image_NE: Tensor) -> Tensor:
        """(N,) of the null prompt that fits best."""
        return (self.logit_scale * image_NE @ self.null_PE.T + (self.logit_bias or 0.0)).amax(1)

    def probabilities(self, logit_NC: Tensor) -> Tensor:
        """Softmax over the labels; for a sigmoid model the probability of each label by itself."""
        return logit_NC.softmax(1) if self.logit_bias is None else logit_NC.sigmoid()

    def classify(self, image_NE: Tensor, top_k: int) -> list[Classification]:
        logit_NC = self.logits(image_NE)
        top = self.probabilities(logit_NC).topk(min(top_k, len(self.labels)))
        is_none_N = (self.null_logits(image_NE) >= logit_NC.amax(1)).tolist()
        rows = zip(top.values.tolist(), top.indices.tolist(), is_none_N, strict=True)
        results = []
        for values, indices, is_none in rows:
            best = tuple((self.labels[index], value) for index, value in zip(indices, values, strict=True))
            results.append(Classification(*best[0], is_none, best))
        return results


@torch.no_grad()
def make_classifier(model: "CLIP", labels: Sequence[str] | Mapping[str, Sequence[str]], prompts: Prompts) -> Classifier:
    """The mean of the unit vectors of each label's prompts, as in the CLIP paper."""
    labels = check_labels(list(labels))
    prompts.check(labels)
    texts = list(map(prompts.of, labels))
    text_PE = model.encode_text([*chain.from_iterable(texts), *NULL_PROMPTS]).float().cpu()
    *parts, null_PE = torch.split(text_PE, [*map(len, texts), len(NULL_PROMPTS)])
    class_CE = F.normalize(torch.stack([part_PE.mean(0) for part_PE in parts]), dim=1)
    bias = None if model.logit_bias is None else float(model.logit_bias)
    return Classifier(tuple(labels), class_CE, null_PE, float(model.logit_scale.exp()), bias)


@torch.no_grad()
def classify_images(
    model: "CLIP",
    images: Iterable[ImageInput],
    classifier: Classifier,
    top_k: int = 5,
    batch_size: int = 32,
    on_error: OnError | None = None,
) -> Iterator[tuple[int, Classification]]:
    """Position and result of each image, in their order, as soon as its batch is encoded."""
    with closing(image_batches(images, model.config.vision.preprocess, batch_size, on_error)) as batches:
        for positions, images_BHWC in batches:
            image_BE = model.embed_images(model.normalize(torch.from_numpy(images_BHWC).to(model.devices[0])))
            yield from zip(positions, classifier.classify(image_BE.float().cpu(), top_k), strict=True)
