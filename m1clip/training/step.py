"""The training step and its state: the loop runs it and benchmarks time it. There is no other.

Shapes: B pairs, b pairs of a chunk, K captions per image, E embedding.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from m1clip import devices, losses
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch, ImageFeatures, TextFeatures
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.training.optim import make_optimizers

STATS = ("loss", "i2t_accuracy", "t2i_accuracy", "grad_norm", "temperature")
"""What a step reports, in this order, as one tensor that stays on the device until it is read."""
CAPTION_KEY = 0x2545F491  # offset between the RNG keys of an image's captions
LOSS_SCALE, GROWTH_INTERVAL = 1024.0, 1000
Embed = Callable[[CLIP, Batch, str], Tensor]
Mark = Callable[[str], None]  # takes the name of a phase that has ended
StepOutput = tuple[Tensor, Tensor, Tensor]  # STATS, image_BE, text_BE


class TrainState:
    """Everything a step changes, as named tensors: a checkpoint is these tensors and a position."""

    def __init__(self, model: CLIP, config: TrainConfig, plan: Plan | None = None):
        """Train by `plan`, or wherever the model is."""
        self.plan = plan or Plan(str(model.logit_scale.device))
        self.model, self.config = model.to_devices(*self.plan.devices), config
        self.chunk, self.has_lora = config.batch_size, config.recipe == "lora"
        self.optimizers = make_optimizers(model, config)
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.ema = self._copy_weights() if config.ema else None
        self.updates = torch.zeros((), device=self.device)  # on the device, where skipping is decided
        self.scaler = self._make_scaler()
        self.text_thread: ThreadPoolExecutor | None = None  # runs the text tower beside the vision tower
        self.compiled: dict[torch.nn.Module, Any] = {}
        model.set_regularization(config)
        self.use_plan(self.plan)

    def _copy_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    def _make_scaler(self) -> torch.amp.GradScaler:
        is_fp16 = self.plan.precision == "fp16"
        return torch.amp.GradScaler(self.device.type, LOSS_SCALE, growth_interval=GROWTH_INTERVAL, enabled=is_fp16)

    @property
    def device(self) -> torch.device:
        """Where the loss is computed: the vision tower's device."""
        return self.model.logit_scale.device

    @property
    def parameter_counts(self) -> tuple[int, int]:
        """All parameters, LoRA included, and the trained ones."""
        everything, trained = self.model.parameters(), self.weights.values()
        return sum(weight.numel() for weight in everything), sum(weight.numel() for weight in trained)

    def use_plan(self, plan: Plan) -> None:
        """Continue with another precision, compilation or thread count on the same devices."""
        assert plan.device == self.plan.device
        previous, self.plan = self.plan, plan
        if plan.precision != previous.precision:
            self.scaler = self._make_scaler()
        for block in (*self.model.vision.blocks, *self.model.text.blocks):
            if plan.compile and block not in self.compiled:
                devices.compile_module(block)
                self.compiled[block] = block._compiled_call_impl
            block._compiled_call_impl = self.compiled[block] if plan.compile else None
        if plan.is_split and (self.text_thread is None or plan.threads != previous.threads):
            self.text_thread = ThreadPoolExecutor(1, "text", devices.second_thread, (plan,))

    def to_device(self, batch: Batch) -> Batch:
        return batch.to(*self.model.devices)

    def run_towers_at_once(self, enabled: bool) -> None:
        """Each tower keeps its number of CPU threads, so that no bit changes."""
        if self.text_thread is not None:
            self.text_thread.shutdown()
        threads = torch.get_num_threads()
        self.text_thread = ThreadPoolExecutor(1, "text", torch.set_num_threads, (threads,)) if enabled else None

    def run_towers(self, vision: Callable[[], Any], text: Callable[[], Any]) -> tuple[Any, Any]:
        """Results of both functions; concurrently if there is a thread for the text tower."""
        if self.text_thread is None:
            return vision(), text()
        future = self.text_thread.submit(text)
        try:
            result = vision()
        finally:
            wait([future])  # a step that is retried must not overlap with this one
        return result, future.result()

    def set_lr(self, lr: float) -> None:
        """Set the learning rate; lower layers have a fixed fraction of it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def discard_gradients(self) -> None:
        """Undo a step that failed before its update, so that it can be repeated."""
        self.zero_grad()
        if self.scaler.is_enabled():  # a scaler refuses to unscale twice
            state, self.scaler = self.scaler.state_dict(), self._make_scaler()
            self.scaler.load_state_dict(state)

    def update(self, nonfinite: Tensor) -> None:
        """Take one optimizer step; change nothing where `nonfinite` is set."""
        vision, text = self.model.devices
        # With two devices the flag would be copied asynchronously and read before it arrives.
        on_device = vision == text and devices.supports_found_inf(vision)
        self.scaler.update()
        if not on_device and nonfinite.item():
            return
        for optimizer in self.optimizers:
            optimizer.found_inf = nonfinite.float() if on_device else None  # type: ignore[attr-defined]
            optimizer.step()
        self.model.clamp_logit_scale()
        self.updates += ~nonfinite
        if self.ema is not None:
            # A shorter average at first, or it would remember the random initialization for long.
            decay = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.config.ema)
            rate = {device: ((1 - decay) * ~nonfinite).to(device) for device in self.model.devices}
            for name, weight in self.weights.items():
                self.ema[name].lerp_(weight, rate[weight.device])

    @contextmanager
    def averaged_model(self) -> Iterator[CLIP]:
        """The model to evaluate and save: inside the block, EMA weights replace the trained ones."""
        if self.ema is None:
            yield self.model
            return
        trained = {name: weight.data for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.data = self.ema[name]
        try:
            yield self.model
        finally:
            for name, weight in self.weights.items():
                weight.data = trained[name]

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the model's own weights, as "<parameter>/<kind>" on the CPU."""
        tensors = {
            f"{name}/{key}": value
            for name, weight in self.weights.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(weight, {}).items()
        }
        if self.ema is not None or self.has_lora:  # the model file holds averaged or merged weights
            tensors |= {f"{name}/weight": weight.detach() for name, weight in self.weights.items()}
        if self.ema is not None and self.has_lora:
            tensors |= {f"{name}/ema": average for name, average in self.ema.items()}
        if self.scaler.is_enabled():
            scaler = self.scaler.state_dict()
            tensors["loss_scale"] = torch.tensor(scaler["scale"])
            tensors["growth_tracker"] = torch.tensor(scaler["_growth_tracker"])
        tensors |= {"random_state": torch.get_rng_state(), "updates": self.updates}
        return {key: value.cpu().contiguous() for key, value in tensors.items()}

    def load(self, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        tensors = dict(tensors)
        torch.set_rng_state(tensors.pop("random_state"))
        self.updates = tensors.pop("updates").to(self.device)
        loss_scale, growth_tracker = tensors.pop("loss_scale", None), tensors.pop("growth_tracker", 0)
        if self.scaler.is_enabled() and loss_scale is not None:  # the precision may have changed
            growth = {"scale": float(loss_scale), "_growth_tracker": int(growth_tracker)}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **growth})
        if not self.has_lora:  # with LoRA the base weights are frozen and already in place
            self.model.load_state_dict(weights)
        self.ema = None if self.ema is None else self._copy_weights()
        for key, value in tensors.items():
            name, _, kind = key.rpartition("/")
            weight = self.weights[name]
            if kind == "weight":
                weight.data.copy_(value)
            elif kind == "ema" and self.ema is not None:
                self.ema[name].copy_(value)
            else:
                optimizer = next(optimizer for optimizer in self.optimizers if weight in optimizer.state)
                optimizer.state[weight][kind] = value.to(weight.device)


def train_step(state: TrainState, batch: Batch, mark: Mark = lambda phase: None) -> StepOutput:
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
    outputs = state.run_towers(*(partial(embed_chunks, state, chunks, embed) for embed in towers))
    image_BE, text_BKE = (output.detach().to(state.device).requires_grad_() for output in outputs)
    logits = [model.logits(image_BE, text_BE) for text_BE in text_BKE.unbind(1)]
    loss_of, duplicate_BB = losses.LOSSES[model.config.loss], batch.duplicate_BB
    loss = torch.stack([loss_of(logits_BB, duplicate_BB, config.label_smoothing) for logits_BB in logits]).mean()
    mark("forward")

    state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    parts = zip(towers, outputs, (image_BE.grad, text_BKE.grad), strict=True)
    state.run_towers(*(partial(backward_chunks, state, chunks, *part) for part in parts))
    for optimizer in state.optimizers:
        state.scaler.unscale_(optimizer)
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip).to(state.device)
    mark("backward")

    with torch.no_grad():
        state.update(nonfinite=~(loss + grad_norm).isfinite())
        accuracies = losses.accuracies(logits[0], duplicate_BB, batch.has_negative_B)
        stats = torch.stack([loss.detach(), *accuracies, grad_norm, (-model.logit_scale).exp()])
    mark("optimizer")
    return stats, image_BE.detach(), text_BKE[:, 0].detach()


def embed_chunks(state: TrainState, chunks: list[Batch], embed: Embed) -> Tensor:
    """Embeddings of all chunks by one tower; with a graph if there is only one chunk."""
    with torch.set_grad_enabled(len(chunks) == 1):  # set here: the setting is per thread
        outputs = [embed(state.model, chunk, state.plan.precision) for chunk in chunks]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def backward_chunks(state: TrainState, chunks: list[Batch], embed: Embed, output: Tensor, gradient: Tensor) -> None:
    """Backpropagate the gradient of a tower's embeddings to its weights."""
    gradient = gradient.to(output.device)
    if len(chunks) == 1:
        return torch.autograd.backward(output, gradient)
    for chunk, chunk_gradient in zip(chunks, torch.split(gradient, state.chunk), strict=True):
        torch.autograd.backward(embed(state.model, chunk, state.plan.precision), chunk_gradient)


def embed_images(model: CLIP, batch: Batch, precision: str, with_dropout: bool = True) -> Tensor:
    """Unit vectors (B, E) of images, or of a frozen tower's features."""
    inputs, device = batch.image, batch.image[0].device
    key_B = devices.copy_to(batch.key_B, device) if with_dropout else None
    with devices.autocast(device, precision):
        if isinstance(inputs, ImageFeatures):
            return model.embed_features("vision", inputs.features_BD, key_B).float()
        return model.embed_images(model.normalize(inputs.images_BHWC), key_B).float()


def embed_texts(model: CLIP, batch: Batch, precision: str, with_dropout: bool = True) -> Tensor:
    """Unit vectors (B, K, E) of token ids, or of a frozen tower's features."""
    inputs, device, key = batch.text[0].flatten(0, 1), batch.text[0].device, None
    B, K = batch.text[0].shape[:2]
    if with_dropout:  # each caption of an image has its own
        key_B = devices.copy_to(batch.key_B, device)
        key = (key_B[:, None] + CAPTION_KEY * torch.arange(K, device=device)).flatten()
    with devices.autocast(device, precision):
        is_frozen = isinstance(batch.text, TextFeatures)
        embeddings = model.embed_features("text", inputs, key) if is_frozen else model.embed_tokens(inputs, key)
    return embeddings.float().view(B, K, -1)
