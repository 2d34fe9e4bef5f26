"""What `m1clip bench` measures, in a session that can be resumed: single operations, comparisons of plans."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m1clip import devices, sensors
from m1clip.config import TrainConfig, get_preset
from m1clip.console import Console
from m1clip.devices import Plan
from m1clip.errors import short_error
from m1clip.files import lock_folder
from m1clip.training import memory, timing
from m1clip.training.device_plan import MeasurementStore, StepCost, open_store
from m1clip.training.timing import split_plans

RESUME_S = 24 * 3600  # an older unfinished sweep is not resumed
MATMULS, QUICK_MATMULS = (64, 128, 256, 512, 1024, 2048, 4096), (64, 256, 1024, 2048)
SWEEP: dict[str, tuple[int, ...]] = {"nano": (4, 16, 64, 256, 1024), "tiny": (4, 16, 64), "small": (4, 16)}
SWEEP |= {"vit-b16-char": (4,), "base": (4,)}
QUICK_SWEEP: dict[str, tuple[int, ...]] = {"nano": (4, 32, 256), "tiny": (8,)}
COMPILED = {("nano", 256), ("tiny", 16)}  # compiling takes half a minute per model
LARGE_GFLOP = 150  # larger steps are not repeated with other thread counts
USABLE_MEMORY = 0.85  # fraction of what is free
OperationRow = dict[str, Any]
Precisions = Mapping[str, Sequence[str]]  # by device, in addition to fp32
Comparison = tuple[TrainConfig, Sequence[Plan]]  # a model with its batch size, and the plans to compare


@dataclass(frozen=True)
class Operation:
    name: str
    size: str
    gflop: float
    elements: int  # read and written, each counted once
    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]


def operations(sizes: Sequence[int]) -> list[Operation]:
    """An empty call, matrix products, and the other operations of a training step."""
    attend, norm = partial(devices.attention, causal=False), partial(F.layer_norm, normalized_shape=(768,))
    every = [Operation("empty call", "1", 0.0, 2, ((1,),), lambda x: x + 1)]
    for n in sizes:
        every.append(Operation("matmul", f"{n}²", 2e-9 * n**3, 3 * n * n, ((n, n), (n, n)), torch.matmul))
    for shape in ((64, 2, 17, 64), (16, 12, 197, 64)):  # nano at batch size 64, ViT-B/16 at 16
        count, name = math.prod(shape), "×".join(map(str, shape))
        every.append(Operation("attention", name, 4e-9 * count * shape[2], 4 * count, 3 * (shape,), attend))
    every.append(Operation("layer norm", "3152×768", 0.0, 2 * 3152 * 768, ((3152, 768),), norm))
    every.append(Operation("AdamW", "10 M", 0.0, 7 * 10**7, ((10**7,),), adamw))
    every.append(Operation("copy", "16 M", 0.0, 2 * 2**24, 2 * ((2**24,),), Tensor.copy_))
    return every


def adamw(x: Tensor) -> None:
    """The fused update; the optimizer is made at the first call and kept with its tensor."""
    if x.grad is None:
        x.grad = torch.ones_like(x)
        x.optimizer = torch.optim.AdamW([x], lr=1e-5, fused=True)  # type: ignore[attr-defined]
    x.optimizer.step()  # type: ignore[attr-defined]


@torch.no_grad()
def time_operation(operation: Operation, name: str, precision: str, seconds: float) -> OperationRow:
    """Time per queued call; on a GPU also of a call with a synchronize, and of copying its inputs there."""
    device, dtype = devices.torch_device(name), devices.DTYPES[precision]
    host = [torch.randn(shape).to(dtype) for shape in operation.shapes]

    def run_alone() -> None:
        operation.call(*inputs)
        devices.synchronize(device)

    from torch.utils.benchmark import Timer  # warns of a CUDA compiler without a GPU

    def time_calls(call: Callable[[], Any]) -> Any:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return timer.blocked_autorange(min_run_time=seconds)

    inputs = [devices.copy_to(x, device) for x in host]
    queued, gb = time_calls(lambda: operation.call(*inputs)), operation.elements * dtype.itemsize / 1e9
    launch_ms = transfer_ms = None
    if devices.is_async(device):  # a CPU has no queue: the call is the computation
        launch_ms = 1e3 * max(0.0, time_calls(run_alone).median - queued.median)
        transfer_ms = 1e3 * time_calls(lambda: [devices.copy_to(x, device) for x in host]).median
    return {
        **{"launch_ms": launch_ms, "transfer_ms": transfer_ms, "compute_ms": 1e3 * queued.median},
        **{"gb_per_s": gb / queued.median, "flop_per_byte": operation.gflop / gb},
        "gflops": operation.gflop / queued.median if operation.gflop else None,
        "best_gflops": operation.gflop / min(queued.times) if operation.gflop else None,
    }


def peak_gflops(rows: Sequence[OperationRow]) -> dict[tuple[str, str], float]:
    """GFLOP/s of the fastest matrix product, by device and precision."""
    peaks: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["operation"] == "matmul" and isinstance(row.get("best_gflops"), float):
            key = row["device"], row["precision"]
            peaks[key] = max(peaks.get(key, 0.0), row["best_gflops"])
    return peaks


def make_plans(names: Sequence[str], precisions: Precisions, threads: Sequence[int]) -> list[Plan]:
    """The plain plan of each device, placements, and plans that change a plain one in one setting."""
    single = [name for name in names if "=" not in name]
    plans = [Plan(name) for name in names] + (split_plans(single) if single == list(names) else [])
    if not threads:  # worth trying beside PyTorch's default: 1, the performance cores, all cores
        counts = {1, sensors.fast_cores() or 1, sensors.machine()["cores"], os.cpu_count() or 1}
        threads = sorted(counts - {devices.DEFAULT_THREADS})
    plans += [Plan("cpu", threads=count) for count in threads if "cpu" in single]
    return plans + [Plan(name, precision) for name in single for precision in precisions[name]]


def make_comparison(preset: str, batch_size: int, plans: Sequence[Plan], compile: bool) -> Comparison:
    plain = [plan for plan in plans if compile and plan == Plan(plan.device) and not plan.is_split]
    compiled = [replace(plan, compile=True) for plan in plain if devices.can_compile(plan.devices[0])[0]]
    return replace(get_preset(preset), batch_size=batch_size), (*plans, *compiled)


@dataclass(frozen=True)
class SweepSession:
    """One sweep. What it has stored before it was interrupted is not measured again."""

    store: MeasurementStore
    name: str

    def run_operations(self, sizes: Sequence[int], precisions: Precisions, seconds: float) -> None:
        """Time all operations on the devices of `precisions`."""
        pairs = list(itertools.product(operations(sizes), precisions))
        with Console().progress_items(len(pairs)) as show:
            for operation, device in pairs:
                item = f"{operation.name} {operation.size} on {device}"
                show(item)
                for precision in ("fp32", *(precisions[device] if operation.name != "AdamW" else ())):
                    key = {"session": self.name, "operation": operation.name, "size": operation.size}
                    key |= {"device": device, "precision": precision}
                    if self.store.rows("operation", **key) or self.store.rows("skipped", **key):
                        continue
                    try:
                        row = time_operation(operation, device, precision, seconds)
                        self.store.add("operation", **key, **row)
                    except devices.DEVICE_ERRORS as error:
                        self.store.add("skipped", **key, item=item, reason=short_error(error))

    def run_comparisons(self, comparisons: Sequence[Comparison], seconds: float) -> list[StepCost]:
        """Time all comparisons that fit into memory, `seconds` per plan; return the cost of all."""
        costs = []
        with Console().progress_items(len(comparisons)) as show:
            for config, plans in comparisons:
                item = f"{config.preset}, batch size {config.batch_size:,}"
                show(item)
                tokens = config.model.text.context_length
                cost = timing.step_cost(config, config.batch_size, tokens, self.store)
                costs.append(cost)
                key = {"session": self.name, "preset": config.preset, "batch_size": config.batch_size}
                if self.store.rows("step", **key) or self.store.rows("skipped", **key):
                    continue
                states = len({plan.device for plan in plans})  # one TrainState per device or placement
                need_gb = states * cost.state_gb + memory.PEAK * cost.activation_gb * config.batch_size
                usable_gb = USABLE_MEMORY * sensors.available_gb()
                if need_gb > usable_gb:
                    reason = f"needs {need_gb:.1f} GB, {usable_gb:.1f} GB are usable"
                    self.store.add("skipped", **key, item=item, reason=reason)
                    continue
                chosen = [plan for plan in plans if cost.step_gflop < LARGE_GFLOP or not plan.threads]
                batch = timing.random_batch(config, config.batch_size, tokens)
                timings = timing.time_plans(config, chosen, batch, seconds)
                timing.add_comparison(self.store, cost, timings, self.name)
        return costs


@contextmanager
def open_session(command: str, settings: dict[str, Any], restart: bool, out: Path) -> Iterator[SweepSession]:
    """A new session, or the last one if it was interrupted and had the same settings."""
    store = open_store()
    for folder in (out, store.folder):  # fails before anything is measured
        folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(store.folder) as locked:
        if not locked:
            raise RuntimeError("another m1clip bench is running here, and would disturb the timings")
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        last = next(reversed(store.rows("session", command=command)), None)
        if last and not restart and last["settings"] == settings and time.time() - last["time"] < RESUME_S:
            name = name if store.rows("finished", session=last["session"]) else last["session"]
        store.add("session", session=name, command=command, settings=settings)
        yield SweepSession(store, name)
        store.add("finished", session=name)
