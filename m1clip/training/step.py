"""The training step: what the loop runs and what the benchmark times. There is no second one.

Shapes: B pairs, b pairs of a chunk, E embedding.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from m1clip import devices, losses
from m1clip.data.batches import Batch, ImageFeatures, Images, TextFeatures, Tokens
from m1clip.model.clip import CLIP
from m1clip.training.state import TrainState

# What a step reports, in this order, as one tensor that stays on the device until somebody reads it.
KEYS = 0x2545F491  # between the keys of an image's captions, so that their noise differs
STATS = ("loss", "i2t_accuracy", "t2i_accuracy", "grad_norm", "temperature")
Embed = Callable[[TrainState, Batch], Tensor]


def train_step(
    state: TrainState, batch: Batch, mark: Callable[[str], None] = lambda phase: None
) -> tuple[Tensor, Tensor, Tensor]:
    """One update from one batch, already where the state wants it: its STATS, and the embeddings it saw.

    The loss gives the gradients of the embeddings, and each tower takes its own to its weights: so the towers
    may be on two devices and work at once. A batch larger than the state's chunk is divided, and still
    every pair is told from all others: the embeddings are made without a graph, and each chunk is
    embedded once more with one (GradCache, Gao et al. 2021). Noise belongs to the rows: both passes see the
    same.
    """
    model, config = state.model, state.config
    state.zero_grad()  # first, so that old gradients do not add to the peak of the forward pass
    chunks = batch.split(state.chunk)
    towers = (embed_images, embed_captions)
    made = state.at_once(*(partial(embed_all, state, embed, chunks) for embed in towers))
    image_BE, text_BE = (one_BE.detach().to(state.device).requires_grad_() for one_BE in made)
    told = text_BE.unbind(1)  # each of an image's captions, in turn
    logits = [model.logits(image_BE, one_BE) for one_BE in told]
    judge = partial(
        losses.LOSSES[model.config.loss], duplicate_BB=batch.duplicate_BB, smoothing=config.label_smoothing
    )
    loss = torch.stack([judge(logit_BB) for logit_BB in logits]).mean()
    mark("forward")

    (loss * state.loss_scale).backward()  # type: ignore[no-untyped-call]
    back = [
        partial(take_back, state, embed, chunks, one_BE, met_BE.grad)
        for embed, one_BE, met_BE in zip(towers, made, (image_BE, text_BE), strict=True)
    ]
    state.at_once(*back)
    state.unscale()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).to(state.device)
    mark("backward")

    with torch.no_grad():
        state.update(bad=~(loss + grad_norm).isfinite())
        right = losses.accuracies(logits[0], batch.duplicate_BB)
        stats = torch.stack([loss.detach(), *right, grad_norm, (-model.logit_scale).exp()])
    mark("optimizer")
    return stats, image_BE.detach(), told[0].detach()


def embed_all(state: TrainState, embed: Embed, chunks: list[Batch]) -> Tensor:
    """Every chunk through one tower; with a graph where there is only one."""
    with torch.set_grad_enabled(len(chunks) == 1):  # here, as each thread has a setting of its own
        made = [embed(state, chunk) for chunk in chunks]
        return made[0] if len(made) == 1 else torch.cat(made)


def take_back(state: TrainState, embed: Embed, chunks: list[Batch], made_BE: Tensor, grad_BE: Tensor) -> None:
    """The gradient of a tower's embeddings to its weights."""
    grad_BE = grad_BE.to(made_BE.device)
    if len(chunks) == 1:
        return torch.autograd.backward(made_BE, grad_BE)
    for chunk, grad_bE in zip(chunks, torch.split(grad_BE, state.chunk), strict=True):
        torch.autograd.backward(embed(state, chunk), grad_bE)


def embed_images(state: TrainState, batch: Batch) -> Tensor:
    device = batch.image[0].device
    with devices.autocast(device, state.plan.precision):
        return of_images(state.model, batch.image, devices.copy_to(batch.key_B, device)).float()


def embed_captions(state: TrainState, batch: Batch) -> Tensor:
    device = batch.text[0].device
    with devices.autocast(device, state.plan.precision):
        return of_captions(state.model, batch.text, devices.copy_to(batch.key_B, device)).float()


def of_images(model: CLIP, image: Images | ImageFeatures, key_B: Tensor | None = None) -> Tensor:
    """Embeddings (B, E) of images, or of the features that a frozen tower made of them."""
    if isinstance(image, ImageFeatures):
        return model.embed_features("vision", image.features_BD, key_B)
    return model.embed_images(model.normalize(image.images_BHWC), key_B)


def of_captions(model: CLIP, text: Tokens | TextFeatures, key_B: Tensor | None = None) -> Tensor:
    """Embeddings (B, K, E) of K captions per image, or of the features that a frozen tower made of them."""
    B, K = text[0].shape[:2]
    if key_B is not None:
        key_B = (key_B[:, None] + KEYS * torch.arange(K, device=key_B.device)).flatten()
    if isinstance(text, TextFeatures):
        return model.embed_features("text", text.features_BKD.flatten(0, 1), key_B).view(B, K, -1)
    return model.embed_tokens(text.tokens_BKL.flatten(0, 1), key_B).view(B, K, -1)
