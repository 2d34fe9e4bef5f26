"""A device that is not there: named mps, made of the CPU, and as wrong as a test wants it to be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from m1clip import devices
from m1clip.model.clip import CLIP


class WrongBackward(torch.autograd.Function):
    """Right on the way there, a twentieth too large on the way back."""

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
    """An "mps" beside the CPU. Where a module is named, it is at fault whenever the model is moved there."""
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    monkeypatch.setattr(devices, "torch_device", lambda name: torch.device("cpu"))
    real = devices.Plan.devices.fget
    asked: list[str] = []

    def plan_devices(plan: devices.Plan) -> Any:
        asked.append(plan.device)
        return real(plan)

    def to_devices(model: CLIP, vision: torch.device, text: torch.device) -> CLIP:
        if module:
            part = model.get_submodule(module)
            vars(part).pop("forward", None)
            if "mps" in asked[-1]:  # the same weights, and worked on wrongly
                part.forward = partial(faulty, part.forward, fault)
        return model

    monkeypatch.setattr(devices.Plan, "devices", property(plan_devices))
    monkeypatch.setattr(CLIP, "to_devices", to_devices)
