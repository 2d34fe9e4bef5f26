"""The evaluator: retrieval, embedding statistics, one-word edits. Training and `m1clip eval` use it.

Shapes: N images, M captions, B of a chunk, D features, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip import devices
from m1clip.data.batches import FeatureTables
from m1clip.data.splits import Split, TrainCaptions, caption_key
from m1clip.evals.embeddings import accuracy_by_difficulty, embedding_statistics
from m1clip.evals.examples import example_queries
from m1clip.evals.retrieval import LabelAccuracy, Relevance, Retrieval, label_accuracy, retrieval
from m1clip.model.clip import CLIP

CHUNK, FEATURE_CHUNK = 256, 4096
Edit = tuple[int, str, str]  # row, kind of the changed word, changed caption


@torch.inference_mode()
def embed_split_images(model: CLIP, pairs: Split, chunk: int = CHUNK) -> Tensor:
    """(N, E)"""
    outputs = []
    for rows_B in torch.split(torch.arange(len(pairs)), chunk):
        images_BHWC = torch.from_numpy(pairs.take(rows_B.numpy())[1])
        outputs.append(model.embed_images(model.normalize(devices.copy_to(images_BHWC, model.devices[0]))).cpu())
    return torch.cat(outputs)


def embed_captions(model: CLIP, captions: Sequence[str], chunk: int = CHUNK) -> Tensor:
    """(M, E)"""
    starts = range(0, len(captions), chunk)
    return torch.cat([model.encode_text(captions[start : start + chunk]).cpu() for start in starts])


@torch.inference_mode()
def embed_feature_rows(model: CLIP, tower: str, features_ND: NDArray[Any]) -> Tensor:
    """(N, E) of stored features of a frozen tower."""
    device, outputs = model.devices[0 if tower == "vision" else 1], []
    for start in range(0, len(features_ND), FEATURE_CHUNK):
        features_BD = torch.from_numpy(np.array(features_ND[start : start + FEATURE_CHUNK])).float()
        outputs.append(model.embed_features(tower, devices.copy_to(features_BD, device)).cpu())
    return torch.cat(outputs)


@dataclass(frozen=True)
class Evaluation:
    """Retrieval scores of one model on one split, and the embeddings they come from."""

    scores: Retrieval
    image_NE: Tensor
    text_ME: Tensor
    relevance: Relevance
    pairs: Split

    @property
    def first_text_NE(self) -> Tensor:
        """The first caption of each image."""
        return self.text_ME[torch.searchsorted(self.relevance.owner_M, torch.arange(len(self.image_NE)))]

    def record(self) -> dict[str, Any]:
        first_captions = [self.pairs.captions(row)[0] for row in range(len(self.pairs))]
        return {
            **self.scores.record(),
            **embedding_statistics(self.image_NE, self.first_text_NE),
            "hard_negatives": accuracy_by_difficulty(self.image_NE, self.first_text_NE, first_captions),
        }

    def examples(self) -> dict[str, Any]:
        """Queries with the images found for them, for people to look at."""
        return example_queries(self.text_ME, self.image_NE, self.relevance, self.pairs)


def evaluate_model(
    model: CLIP,
    pairs: Split,
    features: FeatureTables | None = None,
    chunk: int = CHUNK,
    train_captions: TrainCaptions | None = None,
) -> Evaluation:
    """Evaluate retrieval on a split, from stored features where towers are frozen."""
    features = features or FeatureTables()
    captions = list(pairs.all_captions())
    if features.images is not None:
        image_NE = embed_feature_rows(model, "vision", features.images.views[0])
    else:
        image_NE = embed_split_images(model, pairs, chunk)
    texts = [text for of_image in captions for text in of_image]
    if features.captions is not None:
        features_MD = features.captions.features_MD[features.captions.position_M]
        text_ME = embed_feature_rows(model, "text", features_MD)
    else:
        text_ME = embed_captions(model, texts, chunk)
    relevance, known = Relevance.from_captions(captions), train_captions or TrainCaptions.compare(None, captions)
    seen_M = None if known.seen is None else torch.tensor([caption_key(text) in known.seen for text in texts])
    scores = retrieval(image_NE, text_ME, relevance, seen_M)
    if known.labels:
        scores = replace(scores, labels=classify(model, image_NE, known.labels, captions))
    return Evaluation(scores, image_NE, text_ME, relevance, pairs)


def classify(model: CLIP, image_NE: Tensor, labels: Sequence[str], captions: Sequence[Sequence[str]]) -> LabelAccuracy:
    number = {caption_key(label): k for k, label in enumerate(labels)}
    truth_N = torch.tensor([number[caption_key(of_image[0])] for of_image in captions])
    return label_accuracy(image_NE, embed_captions(model, labels), truth_N)


@dataclass(frozen=True)
class EditScore:
    changed: str
    accuracy: float
    edits: int
    chance: float = 0.5


def edit_scores(model: CLIP, edits: Sequence[Edit], image_NE: Tensor, text_NE: Tensor) -> list[EditScore]:
    """How often an image prefers its caption to the same caption with one word changed, by the kind of word."""
    rows, kinds, texts = zip(*edits, strict=True)
    rows_M = torch.tensor(rows)
    margin_M = (image_NE[rows_M] * (text_NE[rows_M] - embed_captions(model, texts))).sum(1)
    won_M = (margin_M.sign() + 1) / 2  # a tie counts half, as a guess would
    scores = []
    for changed in dict.fromkeys(kinds):
        won = won_M[[kind == changed for kind in kinds]]
        scores.append(EditScore(changed, won.mean().item(), len(won)))
    return scores
