"""What training moves: the model, its optimisers, and the running mean of its weights.

All of it as named tensors, so that a checkpoint is this and a position.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.model.clip import CLIP
from m1clip.train.optim import make_optimizers


class Learner:
    def __init__(self, model: CLIP, config: TrainConfig):
        self.model, self.config = model, config
        self.chunk = config.batch
        self.optimizers = make_optimizers(model, config)
        self.weights = dict(model.named_parameters())
        self.mean = {name: w.detach().clone() for name, w in self.weights.items()} if config.ema else None
        self.updates = torch.zeros((), device=self.device)  # on the device, as skipping is decided there
        model.practise(config.dropout, config.drop_tokens, config.recompute)

    @property
    def device(self) -> torch.device:
        return self.model.logit_scale.device

    def set_rate(self, lr: float) -> float:
        """Of the top layers; those below have their share of it."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["scale"]
        return lr

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self, bad: Tensor) -> None:
        """One step of the optimisers; none at all where `bad` says that something is not finite."""
        on_device = devices.can_skip(self.device)
        if not on_device and bad.item():
            return
        for optimizer in self.optimizers:
            optimizer.found_inf = bad.float() if on_device else None  # type: ignore[attr-defined]
            optimizer.step()
        self.model.clamp_scale()
        self.updates += ~bad
        if self.mean is not None:
            # At first the mean is of few steps, or it would remember the random start for long.
            memory = ((1 + self.updates) / (10 + self.updates)).clamp(max=self.config.ema)
            for name, weight in self.weights.items():
                self.mean[name].lerp_(weight, (1 - memory) * ~bad)

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
        if self.mean is not None:
            kept |= {f"{name}/weight": weight.detach() for name, weight in self.weights.items()}
        kept = {key: value.cpu().contiguous() for key, value in kept.items()}
        return {"random_state": torch.get_rng_state(), "updates": self.updates.cpu(), **kept}

    def load(self, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Put a checkpoint in place, once all of it is known to fit."""
        tensors = dict(tensors)
        random_state, updates = tensors.pop("random_state"), tensors.pop("updates")
        state: dict[str, dict[str, Tensor]] = {name: {} for name in self.weights}
        for key, value in tensors.items():
            name, _, what = key.rpartition("/")
            state[name][what] = value
        self.model.load_state_dict(weights)
        if self.mean is not None:
            self.mean = {name: weight.detach().clone() for name, weight in self.weights.items()}
        owner = {id(w): o for o in self.optimizers for group in o.param_groups for w in group["params"]}
        for name, weight in self.weights.items():
            moving = state[name].pop("weight", None)
            if moving is not None:
                weight.data.copy_(moving)
            optimizer = owner[id(weight)]
            optimizer.state[weight] = {key: value.to(weight.device) for key, value in state[name].items()}
        self.updates = updates.to(self.device)
        torch.set_rng_state(random_state)
