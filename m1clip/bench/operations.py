"""Single operations of a training step: what they compute and move, and what it costs to ask for them."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip import devices

Call = Callable[[], Any]
SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PARAMETERS = 10_000_000


@dataclass(frozen=True)
class Operation:
    name: str
    size: str
    gflop: float
    inputs: tuple[tuple[int, ...], ...]
    """Shapes of what it takes; made on the host, and copied."""
    moved: int
    """Numbers read and written, each once."""
    call: Callable[[list[Tensor]], Call]


def operations(sizes: tuple[int, ...]) -> list[Operation]:
    """The seeds' products of all sizes, and what else a step is made of."""
    made = [Operation("nothing", "1 number", 0.0, ((1,),), 2, lambda t: lambda: t[0] + 1)]
    made += [
        Operation("product", f"{n}²", 2e-9 * n**3, ((n, n), (n, n)), 3 * n * n, lambda t: lambda: t[0] @ t[1])
        for n in sizes
    ]
    for shape in ((64, 2, 17, 64), (16, 12, 197, 64)):  # of nano at batch 64, of seed at batch 16
        B, H, L, d = shape
        size = f"{B}×{H}×{L}×{d}"
        count = B * H * L * d
        made.append(
            Operation(
                "attention",
                size,
                4e-9 * B * H * L * L * d,
                3 * (shape,),
                4 * count,
                lambda t: lambda: _attend(t),
            )
        )
    rows, width = 3152, 768
    made.append(Operation("layer norm", f"{rows}×{width}", 0.0, ((rows, width),), 2 * rows * width, _norm))
    made.append(Operation("AdamW", "10 M", 0.0, ((PARAMETERS,),), 7 * PARAMETERS, _adamw))
    made.append(Operation("copy", "16 M", 0.0, ((16_000_000,),), 32_000_000, _copy))
    return made


def _attend(t: list[Tensor]) -> Tensor:
    return devices.attention(t[0], t[1], t[2], causal=False)


def _copy(t: list[Tensor]) -> Call:
    there = torch.empty_like(t[0])
    return lambda: there.copy_(t[0])


def _norm(t: list[Tensor]) -> Call:
    weight, bias = torch.ones_like(t[0][0]), torch.zeros_like(t[0][0])
    return lambda: F.layer_norm(t[0], weight.shape, weight, bias)


def _adamw(t: list[Tensor]) -> Call:
    """The update alone, of one large tensor, by the fused kernel that training uses."""
    weight = torch.nn.Parameter(t[0])
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-5, fused=True)
    return optimizer.step


@torch.no_grad()
def measure(operation: Operation, name: str, precision: str, seconds: float) -> dict[str, Any]:
    """Times of one call: on its own with a wait at its end, without one, and among many in a row."""
    device, dtype = devices.torch_device(name), devices.DTYPES[precision]
    host = [torch.randn(shape).to(dtype) for shape in operation.inputs]
    if operation.name == "AdamW":
        host = [one.float() for one in host]
    call = operation.call([devices.copy_to(one, device) for one in host])
    call()
    alone = row = list(repeated(call, device, seconds / 2))
    transfer, issued, many, queued = [0.0], [0.0], 1, devices.is_async(device)
    if queued:
        transfer = list(repeated(lambda: [devices.copy_to(one, device) for one in host], device, seconds / 4))
        issued = list(repeated(call, device, seconds / 4, waited=False))
        many = max(1, min(100, int(seconds / 8 / median(alone))))
        row = list(repeated(lambda: [call() for _ in range(many)], device, seconds / 4))
    compute_s = median(row) / many
    return {
        "operation": operation.name,
        "size": operation.size,
        "device": name,
        "precision": precision,
        "alone_ms": 1e3 * median(alone),
        "issued_ms": 1e3 * median(issued) if queued else None,
        "compute_ms": 1e3 * compute_s,
        "launch_ms": 1e3 * max(0.0, median(alone) - compute_s) if queued else None,
        "transfer_ms": 1e3 * median(transfer) if queued else None,
        "gflop": operation.gflop,
        "gflops": operation.gflop / compute_s if operation.gflop else None,
        "best_gflops": operation.gflop * many / min(row) if operation.gflop else None,
        "gb_per_s": operation.moved * BYTES[precision] / compute_s / 1e9,
        "flop_per_byte": 1e9 * operation.gflop / (operation.moved * BYTES[precision]),
    }


def repeated(call: Call, device: torch.device, seconds: float, waited: bool = True) -> Iterator[float]:
    """Seconds of each of several calls, at least three; without the wait, until the call has returned."""
    end, count = time.perf_counter() + seconds, 0
    while count < 3 or (time.perf_counter() < end and count < 200):
        devices.synchronize(device)
        began = time.perf_counter()
        call()
        if waited:
            devices.synchronize(device)
        yield time.perf_counter() - began
        count += 1
