"""AdamW and Muon, and which parameters each of them updates."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from m1clip.config import TrainConfig

BETAS, EPS = (0.9, 0.98), 1e-6
LAYER_DECAY = 0.8
"""Learning rate of a layer relative to the layer above it, in full fine-tuning."""
HIDDEN = ("vision.blocks.", "text.blocks.", "vision.patch.", "vision_projection.", "text_projection.")


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for hidden matrices and AdamW for the rest.

    Matrices have weight decay; biases, norms, embeddings and the logit scale have none.
    """
    embeddings = {id(w) for m in model.modules() if isinstance(m, nn.Embedding) for w in m.parameters()}
    groups: dict[tuple[bool, bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_matrix = weight.ndim >= 2 and id(weight) not in embeddings and not name.endswith("position")
        use_muon = config.optimizer == "muon" and is_matrix and is_hidden(name, weight)
        decay = LAYER_DECAY if config.recipe == "full" else 1.0
        groups[use_muon, is_matrix, decay ** layers_from_top(name, model)].append(weight)
    adamw_groups, muon_groups = (
        [
            {"params": weights, "weight_decay": config.weight_decay if is_matrix else 0.0, "lr_scale": scale}
            for (use_muon, is_matrix, scale), weights in groups.items()
            if use_muon is wanted
        ]
        for wanted in (False, True)
    )
    adamw = torch.optim.AdamW(adamw_groups, lr=config.lr, betas=BETAS, eps=EPS, fused=True)
    for weight in (weight for group in adamw.param_groups for weight in group["params"]):
        # AdamW would allocate these in its first step, between that step's gradients, and fragment memory.
        moments = {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        adamw.state[weight] = {"step": weight.new_zeros(()), **moments}
    return [adamw, Muon(muon_groups, config.lr)] if muon_groups else [adamw]


def is_hidden(name: str, weight: nn.Parameter) -> bool:
    """Whether a matrix maps features to features: not from RGB channels, not in a timm or HF tower."""
    return name.startswith(HIDDEN) and weight.shape[1] > 3


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
        newton_schulz = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}
        super().__init__(groups, {"lr": lr, "momentum": 0.95, "weight_decay": 0.1, **newton_schulz})
        for weight in (weight for group in self.param_groups for weight in group["params"]):
            self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        enabled = 1.0 if found_inf is None else 1.0 - found_inf
        for group in self.param_groups:
            for weights in group_by_shape(weight for weight in group["params"] if weight.grad is not None):
                self._update(weights, group, enabled)

    def _update(self, weights: list[Tensor], group: dict[str, Any], enabled: Tensor | float) -> None:
        """Update matrices of one shape; `enabled` is 1, or 0 on the device to change nothing without a sync."""
        enabled = enabled.to(weights[0].device) if isinstance(enabled, Tensor) else enabled
        lr = group["lr"] * enabled
        momenta = [self._nesterov(weight, group, enabled) for weight in weights]
        scale = lr * 0.2 * math.sqrt(max(momenta[0].shape))
        for weight, update in zip(weights, orthogonalize(torch.stack(momenta), group) * scale, strict=True):
            weight.mul_(1 - lr * group["weight_decay"])
            weight.sub_((update if is_wide(weight) else update.T).reshape(weight.shape))

    def _nesterov(self, weight: Tensor, group: dict[str, Any], enabled: Tensor | float) -> Tensor:
        """The Nesterov momentum as a wide matrix."""
        grad, buffer, momentum = weight.grad, self.state[weight]["momentum_buffer"], group["momentum"]
        assert grad is not None
        if isinstance(enabled, Tensor):
            grad = torch.where(enabled > 0, grad, buffer)  # 0 times NaN would not be 0
        buffer.lerp_(grad, 1 - momentum)
        nesterov = grad.lerp(buffer, momentum).flatten(1)  # a convolution is a matrix too
        return nesterov if is_wide(weight) else nesterov.T


def is_wide(weight: Tensor) -> bool:
    return len(weight) <= weight[0].numel()


def group_by_shape(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Matrices of equal shape, transposed or not, on one device: they are stacked and updated together."""
    groups: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
    for weight in weights:
        groups[weight.device, *sorted((len(weight), weight[0].numel()))].append(weight)
    return list(groups.values())


def orthogonalize(matrices_NRC: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest matrices with singular values of about 1, by Newton–Schulz iteration."""
    a, b, c = group["ns_coefficients"]
    x: Tensor = matrices_NRC / matrices_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
