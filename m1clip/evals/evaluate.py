"""The evaluator: training, `m1clip eval` and reports all use it.

Shapes: N images, M captions, E embedding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1clip.data.batches import FeatureTables
from m1clip.data.splits import Split
from m1clip.evals.embed import CHUNK, embed_captions, embed_feature_rows, embed_split_images
from m1clip.evals.examples import example_queries
from m1clip.evals.hard_negatives import accuracy_by_difficulty
from m1clip.evals.health import health
from m1clip.evals.retrieval import Relevance, Retrieval, retrieval
from m1clip.model.clip import CLIP


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
        """Everything of an evaluation that is logged."""
        first_captions = [self.pairs.captions(row)[0] for row in range(len(self.pairs))]
        return {
            **self.scores.record(),
            **health(self.image_NE, self.first_text_NE),
            "hard_negatives": accuracy_by_difficulty(self.image_NE, self.first_text_NE, first_captions),
        }

    def examples(self) -> dict[str, Any]:
        """Queries with the images found for them, for people to look at."""
        return example_queries(self.text_ME, self.image_NE, self.relevance, self.pairs)


def split_relevance(pairs: Split) -> Relevance:
    return Relevance.from_captions([pairs.captions(row) for row in range(len(pairs))])


def evaluate_model(model: CLIP, pairs: Split, features: FeatureTables | None = None, chunk: int = CHUNK) -> Evaluation:
    """Evaluate retrieval on a split, from stored features where towers are frozen."""
    features = features or FeatureTables()
    relevance = split_relevance(pairs)
    if features.images is not None:
        image_NE = embed_feature_rows(model, "vision", features.images.views[0])
    else:
        image_NE = embed_split_images(model, pairs, chunk)
    if features.captions is not None:
        features_MD = features.captions.features_MD[features.captions.position_M]
        text_ME = embed_feature_rows(model, "text", features_MD)
    else:
        captions = [text for row in range(len(pairs)) for text in pairs.captions(row)]
        text_ME = embed_captions(model, captions, chunk)
    return Evaluation(retrieval(image_NE, text_ME, relevance), image_NE, text_ME, relevance, pairs)
