"""Compare what a device computes with the CPU: loss, gradients and every module in between, tensor by tensor.

CLIP's embeddings have been silently wrong on MPS (pixeltable#1314), so every GPU is checked before its use.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

# Largest relative L2 error of outputs and of gradients. Rounding gives 1e-6 in fp32, TF32 convolutions 1e-3.
# torch.testing.assert_close compares elements: in fp16 the smallest ones of a correct gradient fail it.
TOLERANCE = {"fp32": (2e-3, 1e-2), "fp16": (1e-2, 5e-2), "bf16": (5e-2, 2e-1)}
NEGLIGIBLE = 1e-6  # gradients below this fraction of the largest are rounding errors on both devices
PARAMETER = "the gradient of "
Recording = dict[str, Tensor]  # tensors on the CPU by what they are, in the order of computation


@dataclass(frozen=True)
class Parity:
    precision: str
    worst: float  # largest error as a fraction of its tolerance
    tensors: int
    mismatch: str | None = None  # the first tensor that differs, and by how much

    def __str__(self) -> str:
        forward, backward = TOLERANCE[self.precision]
        limits = f"outputs within {forward:g}, gradients within {backward:g}"
        worst = f"largest error {self.worst:.2g} of the tolerance"
        return self.mismatch or f"{self.tensors} tensors match the CPU: {limits} ({worst})"


def compare_recordings(expected: Recording, actual: Recording, precision: str) -> Parity:
    """The first tensor beyond its tolerance is the mismatch: later ones inherit the error."""
    worst, mismatch = 0.0, None
    gradients = [float(tensor.norm()) for name, tensor in expected.items() if name.startswith(PARAMETER)]
    negligible = NEGLIGIBLE * max(gradients, default=0.0)
    for name, tensor in expected.items():
        backward = "gradient" in name
        tolerance = TOLERANCE[precision][backward]
        norm = max(float(tensor.norm()), negligible if backward else 0.0, 1e-12)
        error = float((actual[name] - tensor).norm()) / norm if name in actual else float("inf")
        error = error if error == error else float("inf")  # NaN
        worst = max(worst, error / tolerance)
        if error > tolerance and mismatch is None:
            mismatch = f"{name} differs from the CPU's by {error:.2g} of its norm (tolerance {tolerance:g})"
    return Parity(precision, worst, len(expected), mismatch)


def record(model: nn.Module, loss: Callable[[], Tensor]) -> Recording:
    """The loss, inputs and outputs of all leaf modules, forward and backward, and gradients of parameters."""
    recording: Recording = {}

    def save(name: str, index: int, module: nn.Module, *values: Any) -> None:
        value = values[index]
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            recording[name] = tensor.detach().float().cpu()

    model.zero_grad()
    with ExitStack() as hooks, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the inputs of the first layers need no gradient
        for name, leaf in model.named_modules():
            if next(leaf.children(), None) is None:
                # A wrong input is the fault of the parent: attention itself, for one, is not a module.
                source = f"{name} (computed in {name.rpartition('.')[0] or 'the model'})"
                for hook in (
                    leaf.register_forward_pre_hook(partial(save, f"the input of {source}", 0)),
                    leaf.register_forward_hook(partial(save, f"the output of {name}", 1)),
                    leaf.register_full_backward_pre_hook(partial(save, f"the output gradient of {source}", 0)),
                    leaf.register_full_backward_hook(partial(save, f"the input gradient of {name}", 0)),
                ):
                    hooks.enter_context(hook)
        value = loss()
        recording["the loss"] = value.detach().cpu()
        value.backward()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            recording[PARAMETER + name] = weight.grad.cpu()
    model.zero_grad()
    return recording
