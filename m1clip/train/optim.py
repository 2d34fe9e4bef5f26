"""The optimisers and their rate. Matrices decay; biases, norms, embeddings and the temperature do not."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.config import TrainConfig


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices of the blocks, and AdamW for the rest."""
    embeddings = {id(w) for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        matrix = weight.ndim >= 2 and id(weight) not in embeddings and not name.endswith("position")
        turned = config.optimizer == "muon" and matrix and ".blocks." in name
        scale = config.layer_decay ** below_the_top(name, model)
        scale *= config.tower_rate if name.startswith(("vision.", "text.")) else 1.0
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
        torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, config.beta2), eps=1e-6, fused=True)
    ]
    if turned_groups:  # scaled so that AdamW's rates suit it
        made.append(Muon(turned_groups, lr=config.lr, adjust_lr_fn="match_rms_adamw"))
    return made


def below_the_top(name: str, model: nn.Module) -> int:
    """How many layers stand between a weight and its tower's output: 0 for what comes after the blocks."""
    tower, _, rest = name.partition(".")
    if tower not in ("vision", "text"):
        return 0
    return int(model.get_submodule(tower).below_top(rest))  # type: ignore[operator]


class Muon(torch.optim.Muon):
    """torch's, with its iteration in float32, and heeding `found_inf` as fused AdamW does.

    torch's own runs in bfloat16, which most laptops only emulate: on 2 AVX2 cores it took 1.1 s for the
    matrices of `nano` where this takes 0.04 s (November 2026).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        bad: Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._turn(weight, weight.grad, group, 1.0 if bad is None else 1.0 - bad)

    def _turn(self, weight: Tensor, grad: Tensor, group: dict[str, Any], live: Tensor | float) -> None:
        """`live` is 1, or 0 to leave everything as it is; on the device, so nothing waits for it."""
        live = live.to(weight.device) if isinstance(live, Tensor) else live
        state, memory, lr = self.state[weight], group["momentum"], group["lr"] * live
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        moving = state["momentum_buffer"]
        if isinstance(live, Tensor):
            grad = torch.where(live > 0, grad, moving)  # 0 times what is not finite would not be 0
        moving.lerp_(grad, 1 - memory)
        ahead = grad.lerp(moving, memory)  # Nesterov's
        weight.mul_(1 - lr * group["weight_decay"])
        weight.sub_(orthogonal(ahead, group) * (lr * 0.2 * math.sqrt(max(weight.shape))))


def orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest matrix whose singular values are all about 1, by torch's Newton–Schulz coefficients."""
    a, b, c = group["ns_coefficients"]
    x: Tensor = matrix / matrix.norm().clamp(min=group["eps"])
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(group["ns_steps"]):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def rate(done: float, total: float, config: TrainConfig) -> float:
    """Learning rate after so many steps of all, or seconds: a straight climb, then a cosine down to zero."""
    climb = config.warmup * total
    if done < climb:
        return config.lr * (done + 1) / (climb + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (done - climb) / (total - climb)))
