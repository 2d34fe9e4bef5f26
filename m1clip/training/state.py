"""Everything a training step changes, as named tensors: a checkpoint is these tensors and a position."""

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
from m1clip.training.optim import make_optimizers

LOSS_SCALE, GROWTH_INTERVAL = 1024.0, 1000


class TrainState:
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
        self.text_thread: ThreadPoolExecutor | None = None  # runs the text tower on its own device
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

    def run_towers(self, vision: Callable[[], Any], text: Callable[[], Any]) -> tuple[Any, Any]:
        """Results of both functions; concurrently where each tower has its own device."""
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

    def unscale_gradients(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

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
        """Restore a checkpoint."""
        tensors = dict(tensors)
        torch.set_rng_state(tensors.pop("random_state"))
        self.updates = tensors.pop("updates").to(self.device)
        loss_scale, growth_tracker = tensors.pop("loss_scale", None), tensors.pop("growth_tracker", 0)
        if self.scaler.is_enabled() and loss_scale is not None:  # the precision may have changed
            self.scaler = self._make_scaler()
            growth = {"scale": float(loss_scale), "_growth_tracker": int(growth_tracker)}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **growth})
        if not self.has_lora:  # with LoRA the base weights are frozen and already in place
            self.model.load_state_dict(weights)
        self.ema = None if self.ema is None else self._copy_weights()
        groups = ((optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups)
        optimizer_of = {weight: optimizer for optimizer, group in groups for weight in group["params"]}
        for key, value in tensors.items():
            name, _, kind = key.rpartition("/")
            weight = self.weights[name]
            if kind == "weight":
                weight.data.copy_(value)
            elif kind == "ema" and self.ema is not None:
                self.ema[name].copy_(value)
            else:
                optimizer_of[weight].state[weight][kind] = value.to(weight.device)
