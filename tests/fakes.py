"""A GPU that is not there: named mps, computed by the CPU, and with errors where a test wants them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from m1clip import devices
from m1clip.model.clip import CLIP


class WrongBackward(torch.autograd.Function):
    """Correct forward, gradients 5 % too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 1.05 * grad


def faulty(forward: Callable[[Tensor], Tensor], fault: str, x: Tensor) -> Any:
    if fault == "raises":
        raise NotImplementedError("this operation is not there\nand more lines")
    return WrongBackward.apply(forward(x)) if fault == "backward" else 1.01 * forward(x)


def fake_gpu(monkeypatch: pytest.MonkeyPatch, module: str = "", fault: str = "") -> None:
    """An mps device beside the CPU; `module` computes wrongly while the model is on it."""
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    monkeypatch.setattr(devices, "torch_device", lambda name: torch.device("cpu"))
    real = devices.Plan.devices.fget
    requested: list[str] = []

    def plan_devices(plan: devices.Plan) -> Any:
        requested.append(plan.device)
        return real(plan)

    def to_devices(model: CLIP, vision: torch.device, text: torch.device) -> CLIP:
        if module:
            part = model.get_submodule(module)
            vars(part).pop("forward", None)
            if "mps" in requested[-1]:
                part.forward = partial(faulty, part.forward, fault)
        return model

    monkeypatch.setattr(devices.Plan, "devices", property(plan_devices))
    monkeypatch.setattr(CLIP, "to_devices", to_devices)
