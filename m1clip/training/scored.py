"""The validation side of a run, and how well a model finds its pairs.

Shapes: N images, M captions, E embedding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from m1clip.data.features import Features
from m1clip.data.splits import Split
from m1clip.evals.embed import embed_captions, embed_images
from m1clip.evals.examples import examples
from m1clip.evals.hard_negatives import by_difficulty
from m1clip.evals.health import health
from m1clip.evals.retrieval import Retrieval, retrieval
from m1clip.model.clip import CLIP, load
from m1clip.run import Run
from m1clip.training import features
from m1clip.training.logger import Logger
from m1clip.training.state import TrainState


@dataclass(frozen=True)
class Scored:
    """The validation side: its pairs, and their features where towers are locked."""

    pairs: Split
    features: Features = Features()

    def evaluate(self, state: TrainState, logger: Logger | None = None) -> Retrieval:
        """validation retrieval of the weights that would be kept."""
        with state.averaged() as model:
            image_NE, text_ME, owner_M = self.embedded(model, 4 * state.chunk)  # no graph is kept
        scores = retrieval(image_NE, text_ME, owner_M)
        if logger:
            first_N = torch.searchsorted(owner_M, torch.arange(len(image_NE)))  # each image's first caption
            first_NE, words = (
                text_ME[first_N],
                [self.pairs.captions(row)[0] for row in range(len(self.pairs))],
            )
            negatives = by_difficulty(image_NE, first_NE, words)
            logger.scores(scores, {**health(image_NE, first_NE), "negatives": negatives})
            logger.examples(examples(text_ME, image_NE, owner_M, self.pairs))
        return scores

    def embedded(self, model: CLIP, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Images, captions, and whose each caption is; from their features where there are any."""
        known, captions = self.features, [self.pairs.captions(row) for row in range(len(self.pairs))]
        owner_M = torch.tensor([row for row, some in enumerate(captions) for _ in some])
        if known.views:
            image_NE = features.embed_features(model, "vision", known.views[0])
        else:
            image_NE = embed_images(model, self.pairs, most)
        if known.texts is not None:
            text_ME = features.embed_features(model, "text", known.of_captions(np.arange(len(owner_M))))
        else:
            text_ME = embed_captions(model, [caption for some in captions for caption in some], most)
        return image_NE, text_ME, owner_M

    def halfway(self, run: Run, state: TrainState, step: int) -> Retrieval:
        """The scores of the model that was kept, between the start and what was learned."""
        kept = load(run.model).to_devices(*state.model.devices)
        scores = retrieval(*self.embedded(kept, 4 * state.chunk))
        run.log("event", step, event="wise-ft", part=state.config.wise_ft, **scores.record())
        return scores
