"""The only file that names a backend: which device and why, and what each one needs done differently.

The rules for Apple's GPU come from bug reports against PyTorch; each carries its number.
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
    """How a step is laid on the machine: what an advisor decides and a benchmark compares."""

    device: str = "cpu"
    """One device, or a placement: vision=A,text=B."""
    precision: str = "fp32"
    """Of the products inside the towers; weights, loss and updates are always fp32."""
    compile: bool = False
    threads: int = 0
    """Of the CPU; 0 is torch's own number."""

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
    """The devices of the two towers; one that does not exist here is an error."""
    if "=" not in requested:
        names = {"vision": requested, "text": requested}
    else:
        names = dict(part.strip().split("=", 1) for part in requested.split(",") if "=" in part)
        if set(names) != {"vision", "text"} or requested.count(",") != 1:
            raise ValueError(f"a placement is vision=DEVICE,text=DEVICE, not {requested!r}")
    here = available()
    for name in names.values():
        kind, _, number = name.partition(":")
        if kind not in ("cpu", "cuda", "mps"):
            raise ValueError(f"no device {name!r}; there are cpu, cuda, mps and vision=A,text=B")
        if kind not in here:
            raise ValueError(f"torch {torch.__version__} has no {kind} on this machine; it has {', '.join(here)}")
        count = torch.cuda.device_count() if kind == "cuda" else 1
        if number and not (number.isdecimal() and int(number) < count):
            raise ValueError(f"no device {name!r}; torch counts {count} of {kind}")
    return names["vision"], names["text"]


def available() -> list[str]:
    names = ["cpu"]
    if torch.cuda.is_available():
        names.append("cuda")
    if torch.backends.mps.is_available() and _mps_works():
        names.append("mps")
    return names


def _mps_works() -> bool:
    """Virtual Macs report a GPU on which nothing can be allocated (actions/runner-images#9918)."""
    try:
        torch.zeros(1, device="mps")
    except RuntimeError:
        return False
    return True


def default_device(requested: str) -> tuple[torch.device, str]:
    """One device to use without having measured any, and the reason in words."""
    here = available()
    if requested == "auto":
        if len(here) == 1:
            return torch_device("cpu"), "no GPU that torch can use was found"
        return torch_device(here[-1]), f"found beside the CPU; compare with --device cpu ({', '.join(here)})"
    if "=" in requested:
        raise ValueError(f"a placement of two towers is for training, not {requested!r} here")
    return torch_device(tower_devices(requested)[0]), f"asked for with --device {requested}"


DEFAULT_THREADS = torch.get_num_threads()
"""What torch takes by itself; on Apple silicon the fast cores (pytorch#123038)."""


def retain_freed_memory() -> None:
    """Have the C library keep freed memory for the next step, where it would give it back to the system.

    What is given back costs page faults when it is had again. With glibc on 2 cores, a step of nano took a
    tenth longer, and a forward pass of EfficientNet-lite0 at batch 32 three times as long (November 2026).
    """
    with suppress(AttributeError, OSError):  # another C library
        library = ctypes.CDLL(None)
        if library.mallopt(-3, 1 << 30) or library.mallopt(-3, 1 << 25):  # M_MMAP_THRESHOLD; the old limit
            library.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


def give_memory_back() -> None:
    """Where memory ran out: what is kept for one size lacks for another."""
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(-3, 128 * 1024)
        library.mallopt(-1, 128 * 1024)
        library.malloc_trim(0)


def apply_plan(plan: Plan) -> None:
    """Set what belongs to the whole process; where two towers share the CPU, each has half of its threads."""
    threads = plan.threads or DEFAULT_THREADS
    both_on_cpu = plan.is_split and all(place.type == "cpu" for place in plan.devices)
    torch.set_num_threads(max(1, threads - threads // 2) if both_on_cpu else threads)
    for place in plan.devices:
        if place.type == "mps":
            # The default, 1.7 x the working set, is more than the RAM: it would swap before it raised.
            torch.mps.set_per_process_memory_fraction(1.0)


def second_thread(plan: Plan) -> None:
    """What the thread that drives the text tower needs: the number of its own threads is set in it."""
    if all(place.type == "cpu" for place in plan.devices):
        torch.set_num_threads(max(1, (plan.threads or DEFAULT_THREADS) // 2))


def synchronize(device: torch.device) -> None:
    """Wait until the queue is empty: without it a clock stops when work is queued, not when it is done."""
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
    """Those that torch can train in there; which of them pays has to be measured."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return ["fp32", "fp16"]
    # fp16 on a CPU overflows and is emulated nearly everywhere; bf16 on an M1 or M2 GPU is emulated too.
    return ["fp32", "bf16"] if device.type == "cpu" else ["fp32", "bf16", "fp16"]


def matmul_gflops(device: torch.device, precision: str) -> float:
    """The rate of products of two matrices, in an instant: it tells what a chip merely emulates."""
    size, many = (1024, 8) if is_async(device) else (256, 1)  # launching must not be what is timed
    a_NN, times = torch.randn(size, size, device=device).to(DTYPES[precision]), []
    for _ in range(4):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(many):
            a_NN @ a_NN
        synchronize(device)
        times.append(time.perf_counter() - began)
    return 2e-9 * many * size**3 / min(times)


def compile_module(module: torch.nn.Module) -> None:
    """Have torch.compile do the module's work from its next call on."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it misses CUDA where nobody asked
    # All blocks are one piece of code to it: beyond the default limit of 8 they would run uncompiled, unsaid.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    module.compile()


def can_compile(device: torch.device) -> tuple[bool, str]:
    """Whether torch.compile is worth trying, and the reason."""
    if device.type == "mps":
        return False, "on MPS it made training 9 times slower in torch 2.13 (pytorch#192551)"
    if device.type == "cuda":
        found = find_spec("triton") is not None
        return found, "triton is there" if found else "it needs triton, which is not installed"
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
    return compiler is not None, f"with {compiler}" if compiler else "it needs a C++ compiler, and found none"


def copy_to(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device; asynchronous only where that is safe."""
    # Asynchronous copies to MPS corrupt data (pytorch#139550, #189690).
    return tensor.to(device, non_blocking=device.type == "cuda")


def supports_found_inf(device: torch.device) -> bool:
    """Whether the fused AdamW leaves everything as it is when `found_inf` tells it so.

    On MPS its kernels never receive that flag, so it has to be read before each update instead.
    """
    return device.type in ("cpu", "cuda")


def is_out_of_memory(error: BaseException) -> bool:
    words = (
        *("out of memory", "can't allocate memory", "bad_alloc", "not enough memory", "ALLOC_FAILED"),
        *("could not create a primitive", "could not create a memory"),  # oneDNN's
    )
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))


# What a device, its compiler or its memory answers where something cannot be done there; MPS raises a
# TypeError for types that it does not have.
DEVICE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError, MemoryError)


def short_error(error: BaseException) -> str:
    """In a few words."""
    if is_out_of_memory(error):
        return "it ran out of memory"
    said = str(error).strip().splitlines()
    return said[0] if said else type(error).__name__


def release(device: torch.device) -> None:
    """Give back what the allocator keeps for later."""
    gc.collect()
    if device.type == "cpu":
        give_memory_back()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if device.type == "mps":
        torch.mps.empty_cache()
        # Every shape it has met keeps a compiled graph (pytorch#181485).
        getattr(torch.mps, "clear_graph_cache", lambda: None)()


def has_event_timer(device: torch.device) -> bool:
    """Whether stamps may be put down at every step.

    MPS's events hang when read twice and may come in the wrong order (pytorch#193578, #196395), so there the
    clock is the host's, and exact only after waiting for the queue: for a step now and then.
    """
    return device.type in ("cpu", "cuda")


def timestamp(device: torch.device) -> Any:
    """A point in the device's own time; put down without waiting for it, but on MPS."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def elapsed_ms(start: Any, end: Any) -> float:
    """Milliseconds from one stamp to the other; on a GPU, once its queue has come past both."""
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def memory_gb(device: torch.device) -> float | None:
    """What torch holds on a GPU now; the CPU's is the process's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return None


def limit_gb(device: torch.device) -> float | None:
    """All that torch may take of a GPU's memory; None on the CPU, whose limit is the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / 1e9
    if device.type == "mps":
        return torch.mps.recommended_max_memory() / 1e9
    return None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def shares_memory(device: torch.device) -> bool:
    """Whether what the machine's other programs hold is missing on the device too."""
    return device.type != "cuda"


def peak_gb(device: torch.device) -> float | None:
    """The most torch has held on a GPU; on MPS, which does not say, what its driver holds now."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else memory_gb(device)


def free_gb(device: torch.device) -> float | None:
    """What can still be allocated on a GPU; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] / 1e9
    if device.type == "mps":
        return (torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) / 1e9
    return None


def to_channels_last(pixels_BCHW: Tensor) -> Tensor:
    """As convolutions want them: channels last, which is half as fast again on CPUs; not tried on MPS."""
    if pixels_BCHW.device.type == "mps":
        return pixels_BCHW
    return pixels_BCHW.contiguous(memory_format=torch.channels_last)


def attention_kind() -> str:
    """What other libraries' towers may use: on MPS not the fused one, for the reasons below."""
    return "eager" if "mps" in available() else "sdpa"


def attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    if q_BHLd.device.type != "mps":
        return F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=causal)
    # MPS: strided q, k, v give wrong results (pytorch#181133, #163597), and so do 8 tokens or fewer.
    q_BHLd, k_BHLd, v_BHLd = q_BHLd.contiguous(), k_BHLd.contiguous(), v_BHLd.contiguous()
    if q_BHLd.shape[2] > 8:
        return F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=causal)
    return plain_attention(q_BHLd, k_BHLd, v_BHLd, causal)


def plain_attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    score_BHLL = q_BHLd * q_BHLd.shape[-1] ** -0.5 @ k_BHLd.transpose(-2, -1)
    if causal:
        score_BHLL = score_BHLL.masked_fill(score_BHLL.new_ones(score_BHLL.shape[-2:]).triu(1) > 0, float("-inf"))
    return torch.softmax(score_BHLL, dim=-1) @ v_BHLd
