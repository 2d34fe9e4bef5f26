"""Learning rate, the end of a run by steps or by the clock, AdamW and Muon."""

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.config import TrainConfig

RESERVE = 0.02  # of the budget, for the last evaluation and save until one of each has been timed
MIN_STEPS = 5  # taken however late it is, so that a new run always ends with a trained model
EXIT_S = 1.0  # starting Python, printing the result and exiting
BETAS, EPS = (0.9, 0.98), 1e-6
LAYER_DECAY = 0.8  # learning rate of a layer relative to the layer above it, in full fine-tuning
MOMENTUM, NEWTON_SCHULZ = 0.95, (3.4445, -4.775, 2.0315)  # of Muon
HIDDEN = ("vision.blocks.", "text.blocks.", "vision.patch.", "vision_projection.", "text_projection.")


def learning_rate(done: float, total: float, peak: float, warmup: float) -> float:
    """Linear warm-up over a fraction of the run, then cosine decay to 0."""
    warmup_steps = warmup * total
    if done < warmup_steps:
        return peak * (done + 1) / (warmup_steps + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (done - warmup_steps) / (total - warmup_steps)))


@dataclass
class Schedule:
    """With a deadline the learning rate follows elapsed time, not steps: it reaches 0 when the time is over,
    however fast the machine was. The number of steps is then an estimate that improves."""

    total: int  # steps, or their first estimate
    deadline: float | None = None  # when everything has to be done, by time.monotonic
    budget_s: float = 0.0
    max_steps: int | None = None  # a limit however much time is left
    elapsed_s: float = 0.0  # training time of earlier sessions
    final_evals: int = 1  # evaluations after the last step

    def __post_init__(self) -> None:
        self.started, self.paused_s, self.steps = time.monotonic(), 0.0, 0
        self.durations = dict[str, float]()

    @property
    def end(self) -> float:
        """When the last step has to be done, so that time is left for the evaluation and save after it."""
        if self.deadline is None:
            return math.inf
        reserve_s = RESERVE * self.budget_s
        final_s = self.final_evals * self.durations.get("eval", 0.0) + self.durations.get("save", 0.0)
        return self.deadline - min(EXIT_S, reserve_s) - final_s - (reserve_s if len(self.durations) < 2 else 0.0)

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.end

    @contextmanager
    def timed_pause(self, kind: str) -> Iterator[None]:
        """An evaluation or a save, which happens once more at the end: its duration is remembered."""
        started = time.monotonic()
        yield
        self.durations[kind] = time.monotonic() - started
        self.paused_s += self.durations[kind]

    def has_time_to_eval(self) -> bool:
        """False when the final evaluation would follow immediately."""
        return time.monotonic() + self.durations.get("eval", 0.0) < self.end

    @property
    def needs_trial_eval(self) -> bool:
        """At half time, if no evaluation has been timed yet."""
        return "eval" not in self.durations and time.monotonic() > (self.started + self.end) / 2

    def last_step(self) -> int:
        """The step after which training ends in any case; unlimited with a deadline."""
        return self.total if self.deadline is None else self.max_steps or sys.maxsize

    def progress(self, step: int) -> tuple[float, float]:
        """Position and length of the run in steps; with a deadline the position follows elapsed time."""
        if self.deadline is None:
            return step, self.total
        if not self.steps:
            self.started, self.paused_s = time.monotonic(), 0.0  # set-up time does not count
        done, whole = (self.elapsed_s + then - self.started for then in (time.monotonic(), self.end))
        fraction = min(1.0, done / whole) if whole > 0 else 1.0
        if step < MIN_STEPS:  # these are taken in any case, with a learning rate
            fraction = min(fraction, step / MIN_STEPS)
        return max(fraction, step / self.max_steps if self.max_steps else 0.0) * self.total, self.total

    def count(self, step: int) -> bool:
        """Register a finished step; whether it was the last. The next one must fit by half, but for the first few."""
        if self.deadline is None:
            return step == self.total
        self.steps += 1
        now = time.monotonic()
        steps_left = max(0.0, self.end - now) / ((now - self.started - self.paused_s) / self.steps)
        self.total = max(1, min(max(step + round(steps_left), MIN_STEPS), self.last_step()))
        return (steps_left < 0.5 and step >= MIN_STEPS) or step == self.max_steps


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for hidden matrices and AdamW for the rest.

    Matrices have weight decay; biases, norms, embeddings and the logit scale have none. Hidden matrices map features
    to features: they do not read RGB channels, and are not in a timm or HF tower.
    """
    embeddings = {id(w) for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    by_kind: dict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            is_matrix = weight.ndim >= 2 and id(weight) not in embeddings and not name.endswith("position")
            is_hidden = is_matrix and name.startswith(HIDDEN) and weight.shape[1] > 3
            lr_scale = LAYER_DECAY ** layers_from_top(name, model) if config.recipe == "full" else 1.0
            by_kind[is_hidden and config.optimizer == "muon", is_matrix, lr_scale].append(weight)
    groups: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for (use_muon, is_matrix, lr_scale), weights in by_kind.items():
        weight_decay = config.weight_decay if is_matrix else 0.0
        groups[use_muon].append({"params": weights, "weight_decay": weight_decay, "lr_scale": lr_scale})
    adamw = torch.optim.AdamW(groups[False], lr=config.lr, betas=BETAS, eps=EPS, fused=True)
    for weight in (weight for group in adamw.param_groups for weight in group["params"]):
        # AdamW would allocate these in its first step, between that step's gradients, and fragment memory.
        moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        adamw.state[weight] = {"step": weight.new_zeros(()), **moments}
    return [adamw, Muon(groups[True], config.lr)] if groups[True] else [adamw]


def layers_from_top(name: str, model: nn.Module) -> int:
    """Layers between a parameter and its tower's output; 0 outside the towers."""
    tower, _, rest = name.partition(".")
    if tower not in ("vision", "text"):
        return 0
    return int(model.get_submodule(tower).layers_from_top(rest))  # type: ignore[operator]


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in float32, for convolutions too, and skipping updates by `found_inf` like fused AdamW.

    torch's own iterates in bfloat16, which most laptops emulate: on 2 AVX2 cores it took 1.1 s for the
    matrices of `nano`, this takes 0.04 s (November 2026).
    """

    def __init__(self, groups: Any, lr: float):
        """Updates have the RMS of AdamW's, so one learning rate suits both."""
        super().__init__(groups, {"lr": lr, "weight_decay": 0.1})
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        enabled = 1.0 if found_inf is None else 1.0 - found_inf
        for group in self.param_groups:
            # Matrices of equal shape, transposed or not, on one device are stacked and updated together.
            by_shape: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                by_shape[weight.device, *sorted((len(weight), weight[0].numel()))].append(weight)
            for weights in by_shape.values():
                self._update(weights, group, enabled)

    def _update(self, weights: list[Tensor], group: dict[str, Any], enabled: Tensor | float) -> None:
        """Update matrices of one shape; `enabled` is 1, or 0 on the device to change nothing without a sync."""
        enabled = enabled.to(weights[0].device) if isinstance(enabled, Tensor) else enabled
        lr = group["lr"] * enabled
        momenta = [self._nesterov(weight, enabled) for weight in weights]
        scale = lr * 0.2 * math.sqrt(max(momenta[0].shape))
        for weight, update in zip(weights, orthogonalize(torch.stack(momenta)) * scale, strict=True):
            weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_((update if is_wide(weight) else update.T).reshape(weight.shape))

    def _nesterov(self, weight: Tensor, enabled: Tensor | float) -> Tensor:
        """The Nesterov momentum as a wide matrix."""
        grad, buffer = weight.grad, self.state[weight]["momentum_buffer"]
        assert grad is not None
        if isinstance(enabled, Tensor):
            grad = torch.where(enabled > 0, grad, buffer)  # 0 times NaN would not be 0
        buffer.lerp_(grad, 1 - MOMENTUM)
        nesterov = grad.lerp(buffer, MOMENTUM).flatten(1)  # a convolution is a matrix too
        return nesterov if is_wide(weight) else nesterov.T


def is_wide(weight: Tensor) -> bool:
    return len(weight) <= weight[0].numel()


def orthogonalize(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices with singular values of about 1, by Newton–Schulz iteration."""
    a, b, c = NEWTON_SCHULZ
    x: Tensor = matrices_NRC / matrices_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
