"""What training moves: the model, its optimizers, and the running mean of its weights.

All of it as named tensors, so that a checkpoint is this and a position.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.lora import has_lora
from m1clip.training.optim import make_optimizers

# fp16 has no numbers for the smallest gradients: the loss is multiplied before the backward pass, and the
# gradients are divided after it. Halved where that overflows, doubled after as many good steps.
LOSS_SCALE, GROWS_AFTER = 1024.0, 1000


class TrainState:
    def __init__(self, model: CLIP, config: TrainConfig, plan: Plan | None = None):
        """By `plan` if there is one, or else wherever the model is."""
        self.plan = plan or Plan(str(model.logit_scale.device))
        self.model, self.config = model.to_devices(*self.plan.devices), config
        self.chunk = config.batch_size
        self.optimizers = make_optimizers(model, config)
        self.weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
        self.adapted = has_lora(model)
        self.mean = {name: w.detach().clone() for name, w in self.weights.items()} if config.ema else None
        self.updates = torch.zeros((), device=self.device)  # on the device, as skipping is decided there
        half = self.plan.precision == "fp16"
        self.loss_scale = torch.tensor(LOSS_SCALE if half else 1.0, device=self.device)
        self.second: ThreadPoolExecutor | None = None  # drives the text tower
        self.second_threads = 0
        self.translated: dict[torch.nn.Module, Any] = {}
        model.set_regularization(
            config.patch_dropout, config.word_dropout, config.head_dropout, config.grad_checkpointing
        )
        self.use(self.plan)

    @property
    def device(self) -> torch.device:
        """Where the loss is, and the images."""
        return self.model.logit_scale.device

    @property
    def size(self) -> tuple[int, int]:
        """Parameters of the model, adapters included, and how many of them learn."""
        every, moving = (
            sum(weight.numel() for weight in some)
            for some in (self.model.parameters(), self.weights.values())
        )
        return every, moving

    def use(self, plan: Plan) -> None:
        """Go on with another precision, compiled or not, with other threads; on the same devices."""
        assert plan.device == self.plan.device
        self.plan = plan
        for block in (*self.model.vision.blocks, *self.model.text.blocks):
            if plan.compile and block not in self.translated:
                devices.compile_module(block)
                self.translated[block] = block._compiled_call_impl
            block._compiled_call_impl = self.translated[block] if plan.compile else None
        if plan.is_split and (self.second is None or plan.threads != self.second_threads):
            self.second = ThreadPoolExecutor(1, "text", devices.second_thread, (plan,))
            self.second_threads = plan.threads

    def take(self, batch: Batch) -> Batch:
        """The batch where the towers are."""
        return batch.to(*self.model.devices)

    def at_once(self, images: Callable[[], Any], captions: Callable[[], Any]) -> tuple[Any, Any]:
        """Both results; where each tower has a device of its own, both work at the same time."""
        if self.second is None:
            return images(), captions()
        ahead = self.second.submit(captions)
        try:
            made = images()
        finally:
            wait([ahead])  # or what is tried again would meet what still runs
        return made, ahead.result()

    def set_rate(self, lr: float) -> float:
        """Of the top layers; those below have their share of it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        return lr

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def unscale(self) -> None:
        """Give the gradients their true length again."""
        if self.plan.precision != "fp16":
            return
        scale = {place: self.loss_scale.to(place) for place in self.model.devices}
        for weight in self.weights.values():
            if weight.grad is not None:
                weight.grad /= scale[weight.device]

    def update(self, bad: Tensor) -> None:
        """One step of the optimizers; none at all where `bad` says that something is not finite."""
        vision, text = self.model.devices
        # On two devices the flag would be copied in the background, and read before it is there.
        on_device = vision == text and devices.supports_found_inf(vision)
        if self.plan.precision == "fp16":
            grown = torch.where((self.updates + 1) % GROWS_AFTER == 0, 2.0, 1.0)
            self.loss_scale *= torch.where(bad, 0.5, grown)
        if not on_device and bad.item():
            return
        for optimizer in self.optimizers:
            optimizer.found_inf = bad.float() if on_device else None  # type: ignore[attr-defined]
            optimizer.step()
        self.model.clamp_logit_scale()
        self.updates += ~bad
        if self.mean is not None:
            # At first the mean is of few steps, or it would remember the random start for long.
            memory = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.config.ema)
            part = {place: ((1 - memory) * ~bad).to(place) for place in self.model.devices}
            for name, weight in self.weights.items():
                self.mean[name].lerp_(weight, part[weight.device])

    @contextmanager
    def averaged(self) -> Iterator[CLIP]:
        """The model to score and to keep: for the block, the mean takes the place of the weights."""
        if self.mean is None:
            yield self.model
            return
        moving = {name: weight.data for name, weight in self.weights.items()}
        for name, weight in self.weights.items():
            weight.data = self.mean[name]
        try:
            yield self.model
        finally:
            for name, weight in self.weights.items():
                weight.data = moving[name]

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the averaged weights, under "<parameter>/<what>"."""
        kept = {
            f"{name}/{key}": value
            for name, weight in self.weights.items()
            for optimizer in self.optimizers
            for key, value in optimizer.state.get(weight, {}).items()
        }
        if self.mean is not None or self.adapted:  # the model of a checkpoint is averaged, or merged
            kept |= {f"{name}/weight": weight.detach() for name, weight in self.weights.items()}
        if self.mean is not None and self.adapted:
            kept |= {f"{name}/mean": mean for name, mean in self.mean.items()}
        kept = {key: value.cpu().contiguous() for key, value in kept.items()}
        scale = {"loss_scale": self.loss_scale.cpu()} if self.plan.precision == "fp16" else {}
        return {"random_state": torch.get_rng_state(), "updates": self.updates.cpu(), **scale, **kept}

    def load(self, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Put a checkpoint in place, once all of it is known to fit."""
        tensors = dict(tensors)
        random_state, updates = tensors.pop("random_state"), tensors.pop("updates")
        loss_scale = tensors.pop("loss_scale", None)
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self.weights}
        for key, value in tensors.items():
            name, _, what = key.rpartition("/")
            state[name][what] = value
        if not self.adapted:  # its weights stand still, as they are
            self.model.load_state_dict(weights)
        if self.mean is not None:
            self.mean = {name: weight.detach().clone() for name, weight in self.weights.items()}
        owner = {id(w): o for o in self.optimizers for group in o.param_groups for w in group["params"]}
        for name, weight in self.weights.items():
            moving = state[name].pop("weight", None)
            if moving is not None:
                weight.data.copy_(moving)
            mean = state[name].pop("mean", None)
            if self.mean is not None and mean is not None:
                self.mean[name].copy_(mean)
            optimizer = owner[id(weight)]
            optimizer.state[weight] = {key: value.to(weight.device) for key, value in state[name].items()}
        self.updates = updates.to(self.device)
        if self.plan.precision == "fp16" and loss_scale is not None:  # it may have been trained in another
            self.loss_scale = loss_scale.to(self.device)
        torch.set_rng_state(random_state)
