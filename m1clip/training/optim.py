"""The optimizers and their rate. Matrices decay; biases, norms, embeddings and the temperature do not."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.config import TrainConfig

LAYER_DECAY = 0.8
COLORS = 3
INNER = ("vision.blocks.", "text.blocks.", "vision.patch.", "vision_projection.", "text_projection.")


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices from features to features, and AdamW for the rest."""
    embeddings = {id(w) for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        matrix = weight.ndim >= 2 and id(weight) not in embeddings and not name.endswith("position")
        turned = config.optimizer == "muon" and matrix and is_inner(name, weight)
        scale = (LAYER_DECAY if config.recipe == "full" else 1.0) ** below_the_top(name, model)
        groups[turned, matrix, scale].append(weight)
    rest, turned_groups = (
        [
            {"params": weights, "weight_decay": config.weight_decay if matrix else 0.0, "scale": scale}
            for (turned, matrix, scale), weights in groups.items()
            if turned is wanted
        ]
        for wanted in (False, True)
    )
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.98), eps=1e-6, fused=True)
    ]
    for weight in (weight for group in made[0].param_groups for weight in group["params"]):
        # AdamW itself would at its first step, whose gradients would leave holes between them in memory.
        moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        made[0].state[weight] = {"step": weight.new_zeros(()), **moments}
    if turned_groups:
        made.append(Muon(turned_groups, config.lr))
    return made


def is_inner(name: str, weight: nn.Parameter) -> bool:
    """Whether a matrix leads from features to features: not from colors, and not of a borrowed tower."""
    return name.startswith(INNER) and weight.shape[1] > COLORS


def below_the_top(name: str, model: nn.Module) -> int:
    """How many layers stand between a weight and its tower's output: 0 for what comes after the blocks."""
    tower, _, rest = name.partition(".")
    if tower not in ("vision", "text"):
        return 0
    return int(model.get_submodule(tower).layers_from_top(rest))  # type: ignore[operator]


class Muon(torch.optim.Optimizer):
    """torch's, for convolutions too, its iteration in float32, heeding `found_inf` as fused AdamW does.

    torch's own runs in bfloat16, which most laptops only emulate: on 2 AVX2 cores it took 1.1 s for the
    matrices of `nano` where this takes 0.04 s (November 2026).
    """

    def __init__(self, groups: Any, lr: float):
        """Steps are as long as AdamW's, so that one rate suits both."""
        turning = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1, **turning})
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        bad: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for alike in of_one_shape(weight for weight in group["params"] if weight.grad is not None):
                self._turn(alike, group, 1.0 if bad is None else 1.0 - bad)

    def _turn(self, weights: list[Tensor], group: dict[str, Any], live: Tensor | float) -> None:
        """`live` is 1, or 0 to leave everything as it is; on the device, so nothing waits for it."""
        live = live.to(weights[0].device) if isinstance(live, Tensor) else live
        lr = group["lr"] * live
        ahead = [self._ahead(weight, group, live) for weight in weights]
        length = lr * 0.2 * math.sqrt(max(ahead[0].shape))
        for weight, turned in zip(weights, orthogonal(torch.stack(ahead), group) * length, strict=True):
            weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_((turned if is_wide(weight) else turned.T).reshape(weight.shape))

    def _ahead(self, weight: Tensor, group: dict[str, Any], live: Tensor | float) -> Tensor:
        """The moving mean of the gradients and, as Nesterov has it, a step on: a wide matrix."""
        grad, moving, memory = weight.grad, self.state[weight]["momentum_buffer"], group["momentum"]
        assert grad is not None
        if isinstance(live, Tensor):
            grad = torch.where(live > 0, grad, moving)  # 0 times what is not finite would not be 0
        moving.lerp_(grad, 1 - memory)
        ahead = grad.lerp(moving, memory).flatten(1)  # a convolution is a matrix too
        return ahead if is_wide(weight) else ahead.T


def is_wide(weight: Tensor) -> bool:
    return len(weight) <= weight[0].numel()


def of_one_shape(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those in one place that are as wide and high, turned or not: they are worked on side by side."""
    alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for weight in weights:
        alike[weight.device, *sorted((len(weight), weight[0].numel()))].append(weight)
    return list(alike.values())


def orthogonal(wide_NRC: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest matrices whose singular values are all about 1, by torch's Newton–Schulz coefficients."""
    a, b, c = group["ns_coefficients"]
    x: Tensor = wide_NRC / wide_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x


def rate(done: float, total: float, config: TrainConfig) -> float:
    """Learning rate after so many steps of all, or seconds: a straight climb, then a cosine down to zero."""
    climb = config.warmup * total
    if done < climb:
        return config.lr * (done + 1) / (climb + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (done - climb) / (total - climb)))
