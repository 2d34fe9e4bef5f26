"""The only file that names a backend: which devices there are, and how each has to be treated.

The rules for MPS come from PyTorch issues, whose numbers are given.
"""

import ctypes
import gc
import logging
import os
import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Plan:
    """How a training step runs on this machine."""

    device: str = "cpu"
    """A device, or a placement of the towers: vision=A,text=B."""
    precision: str = "fp32"
    """Autocast precision of the towers; weights, loss and updates are always fp32."""
    compile: bool = False
    threads: int = 0
    """CPU threads; 0 is PyTorch's default."""

    @property
    def is_split(self) -> bool:
        return "=" in self.device

    @property
    def devices(self) -> tuple[torch.device, torch.device]:
        """Where the vision tower works, and where the text tower does. The loss is with the first."""
        names = tower_devices(self.device)
        return torch_device(names[0]), torch_device(names[1])

    def __str__(self) -> str:
        parts = [self.device] + ([self.precision] if self.precision != "fp32" else [])
        parts += ["compiled"] if self.compile else []
        parts += [f"{self.threads} thread{'s' if self.threads > 1 else ''}"] if self.threads else []
        return ", ".join(parts)


def torch_device(name: str) -> torch.device:
    return torch.device(name)


def tower_devices(requested: str) -> tuple[str, str]:
    """Devices of the vision and the text tower; a device that this machine lacks is an error."""
    placement = requested if "=" in requested else f"vision={requested},text={requested}"
    names = dict(part.strip().split("=", 1) for part in placement.split(",") if "=" in part)
    if set(names) != {"vision", "text"} or placement.count(",") != 1:
        raise ValueError(f"a placement is vision=DEVICE,text=DEVICE, not {requested!r}")
    found = available()
    for name in names.values():
        kind, _, number = name.partition(":")
        if kind not in ("cpu", "cuda", "mps"):
            raise ValueError(f"no device {name!r}; choose from cpu, cuda, mps or vision=A,text=B")
        if kind not in found:
            raise ValueError(f"PyTorch {torch.__version__} finds no {kind} on this machine, only {', '.join(found)}")
        count = torch.cuda.device_count() if kind == "cuda" else 1
        if number and not (number.isdecimal() and int(number) < count):
            raise ValueError(f"no device {name!r}; PyTorch finds {count} {kind} device{'s' * (count != 1)}")
    return names["vision"], names["text"]


def available() -> list[str]:
    names = ["cpu"]
    if torch.cuda.is_available():
        names.append("cuda")
    if torch.backends.mps.is_available():
        with suppress(RuntimeError):  # a virtual Mac has a GPU that cannot allocate memory (actions/runner-images#9918)
            torch.zeros(1, device="mps")
            names.append("mps")
    return names


def default_device(requested: str) -> tuple[torch.device, str]:
    """A device without measuring any, and the reason: the requested one, or a GPU if there is one."""
    if requested == "auto":
        name = available()[-1]
        return torch_device(name), "PyTorch finds no GPU" if name == "cpu" else "the GPU; --device cpu uses the CPU"
    if "=" in requested:
        raise ValueError(f"{requested!r} is a placement for training; name one device here")
    return torch_device(tower_devices(requested)[0]), f"requested with --device {requested}"


DEFAULT_THREADS = torch.get_num_threads()  # on Apple silicon the performance cores (pytorch#123038)


def retain_freed_memory() -> None:
    """Make malloc keep freed memory for the next step instead of returning it to the system.

    Returned memory costs page faults when it is allocated again. With glibc on 2 cores, a step of nano took a
    tenth longer, a forward pass of EfficientNet-lite0 at batch size 32 three times as long (November 2026).
    """
    with suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        if library.mallopt(-3, 1 << 30) or library.mallopt(-3, 1 << 25):  # M_MMAP_THRESHOLD; older glibc
            library.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def give_memory_back() -> None:
    """Undo retain_freed_memory: memory kept for one size cannot be used for another, and hides later growth."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_zone_pressure_relief"):  # macOS
        library.malloc_zone_pressure_relief(None, 0)
    with suppress(AttributeError):  # glibc
        library.mallopt(-3, 128 * 1024)
        library.mallopt(-1, 128 * 1024)
        library.malloc_trim(0)


def apply_plan(plan: Plan) -> None:
    """Apply the settings of the whole process; two towers on the CPU get half of the threads each."""
    threads = plan.threads or DEFAULT_THREADS
    both_on_cpu = plan.is_split and all(device.type == "cpu" for device in plan.devices)
    torch.set_num_threads(max(1, threads - threads // 2) if both_on_cpu else threads)
    for device in plan.devices:
        if device.type == "mps":
            # The default, 1.7 x the working set, is more than the RAM: it swaps before it raises an error.
            torch.mps.set_per_process_memory_fraction(1.0)


def second_thread(plan: Plan) -> None:
    """Set the number of threads in the Python thread that runs the text tower: the setting is per thread."""
    if all(device.type == "cpu" for device in plan.devices):
        torch.set_num_threads(max(1, (plan.threads or DEFAULT_THREADS) // 2))


def synchronize(device: torch.device) -> None:
    """Wait until all queued work is done; without it a timer measures the queueing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if device.type == "mps":
        torch.mps.synchronize()


def is_async(device: torch.device) -> bool:
    """Whether a call returns before its work is done."""
    return device.type != "cpu"


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def precisions(device: torch.device) -> list[str]:
    """Precisions that PyTorch can train in; which of them are faster has to be measured."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return ["fp32", "fp16"]
    # fp16 on a CPU overflows and is emulated nearly everywhere; bf16 on an M1 or M2 GPU is emulated too.
    return ["fp32", "bf16"] if device.type == "cpu" else ["fp32", "bf16", "fp16"]


def matmul_gflops(device: torch.device, precision: str) -> float:
    """A quick measurement of matrix products, which shows whether a precision is emulated."""
    size, count = (1024, 8) if is_async(device) else (256, 1)  # large enough to hide the launches
    a_NN, times = torch.randn(size, size, device=device).to(DTYPES[precision]), []
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            a_NN @ a_NN
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2e-9 * count * size**3 / min(times)


def compile_module(module: torch.nn.Module) -> None:
    """Compile the module with torch.compile at its next call."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # warns about a missing CUDA
    # All blocks share their code object: beyond the default limit of 8 they would silently run uncompiled.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    module.compile()


def can_compile(device: torch.device) -> tuple[bool, str]:
    """Whether torch.compile is worth trying, and the reason."""
    if device.type == "mps":
        return False, "torch.compile made training on MPS 9 times slower in PyTorch 2.13 (pytorch#192551)"
    if device.type == "cuda":
        found = find_spec("triton") is not None
        return found, "triton is installed" if found else "triton is not installed"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    return compiler is not None, f"with {compiler}" if compiler else "no C++ compiler was found"


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; asynchronously only where that is safe."""
    # Asynchronous copies to MPS corrupt data (pytorch#139550, #189690).
    return tensor.to(device, non_blocking=device.type == "cuda")


def supports_found_inf(device: torch.device) -> bool:
    """Whether fused AdamW skips the update when `found_inf` is set.

    On MPS its kernels never receive that flag, so it has to be read before each update.
    """
    return device.type in ("cpu", "cuda")


# Errors of a device, its compiler or its memory; MPS raises TypeError for dtypes that it does not support.
DEVICE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, MemoryError)


def release(device: torch.device) -> None:
    """Return cached memory of the allocator to the system."""
    gc.collect()
    if device.type == "cpu":
        give_memory_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if device.type == "mps":
        torch.mps.empty_cache()
        # MPS keeps a compiled graph for every shape (pytorch#181485).
        getattr(torch.mps, "clear_graph_cache", lambda: None)()


def has_event_timer(device: torch.device) -> bool:
    """Whether timestamps can be taken in every step.

    MPS events hang when read twice and can be out of order (pytorch#193578, #196395), so on MPS the host
    takes timestamps after a synchronize, which is too slow for every step.
    """
    return device.type in ("cpu", "cuda")


def timestamp(device: torch.device) -> Any:
    """A timestamp in the queue of the device; only on MPS this waits for the queue."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds between two timestamps; on CUDA, after both have been reached."""
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def memory_gb(device: torch.device) -> float | None:
    """Memory that PyTorch has allocated on a GPU; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return None


def limit_gb(device: torch.device) -> float | None:
    """Memory of a GPU that PyTorch may use; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    if device.type == "mps":
        return torch.mps.recommended_max_memory() / 1e9
    return None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def shares_memory(device: torch.device) -> bool:
    """Whether the device uses the memory of the machine."""
    return device.type != "cuda"


def peak_gb(device: torch.device) -> float | None:
    """Peak memory of PyTorch on a GPU; on MPS, which does not record a peak, what the driver has now."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else memory_gb(device)


def free_gb(device: torch.device) -> float | None:
    """Memory that can still be allocated on a GPU; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 1e9
    if device.type == "mps":
        return (torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) / 1e9
    return None


def to_channels_last(pixels_BCHW: Tensor) -> Tensor:
    """Channels last for convolutions: 1.5 times as fast on CPUs; not measured on MPS."""
    if pixels_BCHW.device.type == "mps":
        return pixels_BCHW
    return pixels_BCHW.contiguous(memory_format=torch.channels_last)


def attention_kind() -> str:
    """Attention implementation for towers of other libraries: not SDPA on MPS, for the reasons below."""
    return "eager" if "mps" in available() else "sdpa"


def attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    # On MPS, strided q, k, v give wrong results (pytorch#181133, #163597), and so do 8 or fewer tokens.
    if q_BHLd.device.type == "mps":
        q_BHLd, k_BHLd, v_BHLd = q_BHLd.contiguous(), k_BHLd.contiguous(), v_BHLd.contiguous()
        if q_BHLd.shape[2] <= 8:
            return plain_attention(q_BHLd, k_BHLd, v_BHLd, causal)
    return F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=causal)


def plain_attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    score_BHLL = q_BHLd * q_BHLd.shape[-1] ** -0.5 @ k_BHLd.transpose(-2, -1)
    if causal:
        score_BHLL = score_BHLL.masked_fill(score_BHLL.new_ones(score_BHLL.shape[-2:]).triu(1) > 0, float("-inf"))
    return torch.softmax(score_BHLL, dim=-1) @ v_BHLd
