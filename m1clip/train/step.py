"""The training step: what the loop runs and what the benchmark times. There is no second one.

Shapes: B pairs, E embedding.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from m1clip import losses
from m1clip.data.batches import Batch
from m1clip.model.clip import CLIP
from m1clip.train.learner import Learner

# What a step reports, in this order, as one tensor that stays on the device until somebody reads it.
STATS = ("loss", "i2t_accuracy", "t2i_accuracy", "grad_norm", "temperature")


def train_step(
    learner: Learner, batch: Batch, mark: Callable[[str], None] = lambda phase: None
) -> tuple[Tensor, Tensor, Tensor]:
    """One update from one batch on the learner's device: its STATS, and the embeddings it saw.

    A batch larger than the learner's chunk is divided, and still every pair is told from all others: the
    embeddings are made without a graph, the loss gives their gradients, and each chunk is then embedded once
    more, with a graph, to take its share of them to the weights (GradCache, Gao et al. 2021). Noise belongs
    to the rows, so both passes see the same.
    """
    model, config = learner.model, learner.config
    learner.zero_grad()  # first, so that old gradients do not add to the peak of the forward pass
    chunks = batch.split(learner.chunk)
    whole = len(chunks) == 1
    with torch.set_grad_enabled(whole):
        image_BE = torch.cat([embed_pictures(model, chunk) for chunk in chunks])
        text_BE = torch.cat([embed_captions(model, chunk) for chunk in chunks])
    if not whole:
        image_BE.requires_grad_()
        text_BE.requires_grad_()
    logit_BB = model.logits(image_BE, text_BE)
    loss = losses.LOSSES[model.config.loss](logit_BB, batch.twin_BB, config.label_smoothing)
    mark("forward")

    loss.backward()  # type: ignore[no-untyped-call]
    if not whole:
        for embed, made_BE in ((embed_pictures, image_BE), (embed_captions, text_BE)):
            assert made_BE.grad is not None
            for chunk, grad_bE in zip(chunks, torch.split(made_BE.grad, learner.chunk), strict=True):
                torch.autograd.backward(embed(model, chunk), grad_bE)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    mark("backward")

    with torch.no_grad():
        learner.update(bad=~(loss + grad_norm).isfinite())
        right = losses.accuracies(logit_BB, batch.twin_BB)
        stats = torch.stack([loss.detach(), *right, grad_norm, (-model.logit_scale).exp()])
    mark("optimiser")
    return stats, image_BE.detach(), text_BE.detach()


def embed_pictures(model: CLIP, batch: Batch) -> Tensor:
    return model.embed_pixels(model.normalise(batch.bytes_BSSC), batch.key_B)


def embed_captions(model: CLIP, batch: Batch) -> Tensor:
    return model.embed_tokens(batch.tokens_BL, batch.key_B)
