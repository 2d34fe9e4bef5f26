"""The held-out side of a run, and how well a model finds its pairs.

Shapes: N pictures, M captions, E embedding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1clip.data.features import Features
from m1clip.data.splits import Side
from m1clip.evals.embed import embed_captions, embed_pictures
from m1clip.evals.examples import examples
from m1clip.evals.hard_negatives import by_difficulty
from m1clip.evals.health import health
from m1clip.evals.retrieval import Retrieval, retrieval
from m1clip.model.clip import CLIP, load
from m1clip.run import Run
from m1clip.training import features
from m1clip.training.logger import Watch
from m1clip.training.state import Learner


@dataclass(frozen=True)
class Scored:
    """The held-out side: its pairs, and their features where towers are locked."""

    pairs: Side
    features: Features = Features()

    def evaluate(self, learner: Learner, watch: Watch | None = None) -> Retrieval:
        """Held-out retrieval of the weights that would be kept."""
        with learner.averaged() as model:
            image_NE, text_ME, owner_M = self.embedded(model, 4 * learner.chunk)  # no graph is kept
        scores = retrieval(image_NE, text_ME, owner_M)
        if watch:
            first_N = torch.searchsorted(owner_M, torch.arange(len(image_NE)))  # each picture's first caption
            first_NE, words = (
                text_ME[first_N],
                [self.pairs.captions(row)[0] for row in range(len(self.pairs))],
            )
            negatives = by_difficulty(image_NE, first_NE, words)
            watch.scores(scores, {**health(image_NE, first_NE), "negatives": negatives})
            watch.examples(examples(text_ME, image_NE, owner_M, self.pairs))
        return scores

    def embedded(self, model: CLIP, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures, captions, and whose each caption is; from their features where there are any."""
        known, captions = self.features, [self.pairs.captions(row) for row in range(len(self.pairs))]
        owner_M = torch.tensor([row for row, some in enumerate(captions) for _ in some])
        if known.views:
            image_NE = features.embed_features(model, "vision", known.views[0])
        else:
            image_NE = embed_pictures(model, self.pairs, most)
        if known.texts is not None:
            text_ME = features.embed_features(model, "text", known.of_captions(np.arange(len(owner_M))))
        else:
            text_ME = embed_captions(model, [caption for some in captions for caption in some], most)
        return image_NE, text_ME, owner_M

    def halfway(self, run: Run, learner: Learner, step: int) -> Retrieval:
        """The scores of the model that was kept, between the start and what was learned."""
        kept = load(run.model).place(*learner.model.places)
        scores = retrieval(*self.embedded(kept, 4 * learner.chunk))
        run.log("event", step, event="wise-ft", part=learner.config.wise_ft, **scores.record())
        return scores
