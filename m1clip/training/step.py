"""The training step: the loop runs it and benchmarks time it. There is no other.

Shapes: B pairs, b pairs of a chunk, K captions per image, E embedding.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from m1clip import devices, losses
from m1clip.data.batches import Batch, ImageFeatures, Images, TextFeatures, Tokens
from m1clip.model.clip import CLIP
from m1clip.training.state import TrainState

STATS = ("loss", "i2t_accuracy", "t2i_accuracy", "grad_norm", "temperature")
"""What a step reports, in this order, as one tensor that stays on the device until it is read."""
CAPTION_KEY = 0x2545F491  # offset between the RNG keys of an image's captions
Embed = Callable[[TrainState, Batch], Tensor]


def train_step(
    state: TrainState, batch: Batch, mark: Callable[[str], None] = lambda phase: None
) -> tuple[Tensor, Tensor, Tensor]:
    """One update from a batch on the state's devices: its STATS, and the embeddings of its pairs.

    The step is cut at the embeddings: the loss gives their gradients, and each tower backpropagates its own.
    So towers can be on two devices. A batch larger than the chunk is embedded without a graph, and each
    chunk is embedded again with one (GradCache, Gao et al. 2021); every pair still has the whole batch as
    negatives. Dropout masks are keyed by row, so both passes see the same.
    """
    model, config = state.model, state.config
    state.zero_grad()  # first, so that old gradients do not add to the peak of the forward pass
    chunks = batch.split(state.chunk)
    towers = (embed_images, embed_texts)
    outputs = state.run_towers(*(partial(embed_chunks, state, embed, chunks) for embed in towers))
    image_BE, text_BKE = (output.detach().to(state.device).requires_grad_() for output in outputs)
    logits = [model.logits(image_BE, text_BE) for text_BE in text_BKE.unbind(1)]
    loss_of = partial(
        losses.LOSSES[model.config.loss], duplicate_BB=batch.duplicate_BB, smoothing=config.label_smoothing
    )
    loss = torch.stack([loss_of(logits_BB) for logits_BB in logits]).mean()
    mark("forward")

    state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    state.run_towers(
        *(
            partial(backward_chunks, state, embed, chunks, output, leaf.grad)
            for embed, output, leaf in zip(towers, outputs, (image_BE, text_BKE), strict=True)
        )
    )
    state.unscale_gradients()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).to(state.device)
    mark("backward")

    with torch.no_grad():
        state.update(nonfinite=~(loss + grad_norm).isfinite())
        accuracies = losses.accuracies(logits[0], batch.duplicate_BB)
        stats = torch.stack([loss.detach(), *accuracies, grad_norm, (-model.logit_scale).exp()])
    mark("optimizer")
    return stats, image_BE.detach(), text_BKE[:, 0].detach()


def embed_chunks(state: TrainState, embed: Embed, chunks: list[Batch]) -> Tensor:
    """Embeddings of all chunks by one tower; with a graph if there is only one chunk."""
    with torch.set_grad_enabled(len(chunks) == 1):  # set here: the setting is per thread
        outputs = [embed(state, chunk) for chunk in chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def backward_chunks(state: TrainState, embed: Embed, chunks: list[Batch], output: Tensor, gradient: Tensor) -> None:
    """Backpropagate the gradient of a tower's embeddings to its weights."""
    gradient = gradient.to(output.device)
    if len(chunks) == 1:
        return torch.autograd.backward(output, gradient)
    for chunk, chunk_gradient in zip(chunks, torch.split(gradient, state.chunk), strict=True):
        torch.autograd.backward(embed(state, chunk), chunk_gradient)


def embed_images(state: TrainState, batch: Batch) -> Tensor:
    """(B, E)"""
    device = batch.image[0].device
    with devices.autocast(device, state.plan.precision):
        return image_embeddings(state.model, batch.image, devices.copy_to(batch.key_B, device)).float()


def embed_texts(state: TrainState, batch: Batch) -> Tensor:
    """(B, K, E)"""
    device = batch.text[0].device
    with devices.autocast(device, state.plan.precision):
        return text_embeddings(state.model, batch.text, devices.copy_to(batch.key_B, device)).float()


def image_embeddings(model: CLIP, image: Images | ImageFeatures, key_B: Tensor | None = None) -> Tensor:
    """Unit vectors (B, E) of images, or of a frozen tower's features."""
    if isinstance(image, ImageFeatures):
        return model.embed_features("vision", image.features_BD, key_B)
    return model.embed_images(model.normalize(image.images_BHWC), key_B)


def text_embeddings(model: CLIP, text: Tokens | TextFeatures, key_B: Tensor | None = None) -> Tensor:
    """Unit vectors (B, K, E) of token ids, or of a frozen tower's features."""
    x = text[0]
    B, K = x.shape[:2]
    if key_B is not None:  # each caption of an image has its own dropout
        key_B = (key_B[:, None] + CAPTION_KEY * torch.arange(K, device=x.device)).flatten()
    x = x.flatten(0, 1)
    frozen = isinstance(text, TextFeatures)
    embeddings = model.embed_features("text", x, key_B) if frozen else model.embed_tokens(x, key_B)
    return embeddings.view(B, K, -1)
