"""The evaluator of retrieval and embedding statistics. Training and `m1clip eval` use it.

Shapes: N images, M captions, B of a chunk, D features, E embedding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from m1clip.data.batches import FeatureTables
from m1clip.data.splits import Split, TrainCaptions, caption_key
from m1clip.evals.embed import CHUNK, embed_captions, embed_feature_rows, embed_split_images
from m1clip.evals.embeddings import accuracy_by_difficulty, embedding_statistics
from m1clip.evals.examples import example_queries
from m1clip.evals.retrieval import LabelAccuracy, Relevance, Retrieval, label_accuracy, retrieval
from m1clip.model.clip import CLIP

if TYPE_CHECKING:  # loaded only with --zeroshot
    from m1clip.evals.zeroshot import ZeroShot


@dataclass(frozen=True)
class Evaluation:
    """Retrieval scores of one model on one split, and the embeddings they come from."""

    scores: Retrieval
    image_NE: Tensor
    text_ME: Tensor
    relevance: Relevance
    pairs: Split
    zeroshot: "ZeroShot | None" = None  # on other images, with --zeroshot

    @property
    def first_text_NE(self) -> Tensor:
        """The first caption of each image."""
        return self.text_ME[torch.searchsorted(self.relevance.owner_M, torch.arange(len(self.image_NE)))]

    def metrics(self) -> dict[str, Any]:
        """The scores by which a best checkpoint can be selected."""
        return {**self.scores.record(), **(self.zeroshot.record() if self.zeroshot else {})}

    def record(self) -> dict[str, Any]:
        first_captions = [self.pairs.captions(row)[0] for row in range(len(self.pairs))]
        return {
            **self.metrics(),
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
    return score_embeddings(model, pairs, image_NE, text_ME, train_captions)


def score_embeddings(
    model: CLIP, pairs: Split, image_NE: Tensor, text_ME: Tensor, train_captions: TrainCaptions | None = None
) -> Evaluation:
    """Evaluate retrieval of a split from its embeddings, captions in the order of their images."""
    captions = list(pairs.all_captions())
    texts = [text for of_image in captions for text in of_image]
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
