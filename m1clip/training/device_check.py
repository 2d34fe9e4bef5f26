"""Compare a CLIP's embeddings, loss, gradients and training step on a device with the CPU's."""

from dataclasses import replace

import torch
from torch import Tensor

from m1clip import devices, losses
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch
from m1clip.devices import Plan
from m1clip.errors import short_error
from m1clip.model.clip import CLIP
from m1clip.parity import PARAMETER, Parity, Recording, compare_recordings, record
from m1clip.training.step import TrainState, embed_images, embed_texts, train_step

PAIRS, EMBEDDED = 4, 256  # compared module by module, and by their embeddings alone
LARGE_MODEL = 50_000_000  # parameters; larger models are compared on fewer pairs


def compare_with_cpu(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig | None = None) -> Parity:
    """Compare modules, gradients, embeddings and, with a config, a training step. Weights do not change."""
    divisor = 1 if sum(weight.numel() for weight in model.parameters()) < LARGE_MODEL else 2
    few, many = batch.split(PAIRS // divisor)[0], batch.split(EMBEDDED // divisor**3)[0]

    def run(plan: Plan) -> Recording:
        def embed(pairs: Batch) -> list[Tensor]:
            on_device = pairs.to(*plan.devices)
            return [each(model, on_device, plan.precision, with_dropout=False) for each in (embed_images, embed_texts)]

        def contrastive_loss() -> Tensor:
            image_BE, text_BKE = embed(few)
            return losses.LOSSES[model.config.loss](model.logits(image_BE, text_BKE[:, 0].to(image_BE.device)))

        model.to_devices(*plan.devices)
        recording = record(model, contrastive_loss)
        if config:
            recording |= record_step(model, few, plan, config)
        with torch.no_grad():  # the shapes of training: some faults only show with many rows
            for kind, embeddings in zip(("images", "captions"), embed(many), strict=True):
                recording[f"the embedding of {len(many)} {kind}"] = embeddings.cpu()
        return recording

    expected = run(Plan())
    try:
        actual = run(replace(plan, compile=False))
    except devices.DEVICE_ERRORS as error:  # such as an operation that the device does not have
        return Parity(plan.precision, float("inf"), 0, f"it failed: {short_error(error)}")
    return compare_recordings(expected, actual, plan.precision)


def record_step(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig) -> Recording:
    """Loss and gradients of a real training step, with its dropout, threads and loss scaling."""
    weights = {name: tensor.cpu().clone() for name, tensor in model.state_dict().items()}
    state = TrainState(model, replace(config, ema=0.0), plan)
    state.set_lr(0.0)
    recording = {"the loss of a training step": train_step(state, state.to_device(batch))[0][0].detach().cpu()}
    for name, weight in state.weights.items():
        if weight.grad is not None:
            recording[f"{PARAMETER}{name} in a training step"] = weight.grad.cpu().clone()
    state.zero_grad()
    model.load_state_dict(weights)
    return recording
