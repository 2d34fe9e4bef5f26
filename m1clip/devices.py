"""The only file that names a backend: which device and why, and what each one needs done differently.

The rules for Apple's GPU come from bug reports against PyTorch; each carries its number.
"""

import gc
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


def choose(wish: str) -> tuple[torch.device, str]:
    """The device to train on, and the reason in words."""
    here = available()
    if wish == "auto":
        if len(here) == 1:
            return torch.device("cpu"), "no GPU that torch can use was found"
        return torch.device(here[-1]), f"found beside the CPU; compare with --device cpu ({', '.join(here)})"
    if wish not in ("cpu", "cuda", "mps"):
        raise ValueError(f"no device {wish!r}; there are auto, cpu, cuda and mps")
    if wish not in here:
        raise ValueError(f"torch {torch.__version__} has no {wish} on this machine; it has {', '.join(here)}")
    return torch.device(wish), f"asked for with --device {wish}"


def prepare(device: torch.device, threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)
    if device.type == "mps":
        # The default, 1.7 x the working set, is more than the machine's RAM: it would swap before it raised.
        torch.mps.set_per_process_memory_fraction(1.0)


def copy(tensor: Tensor, device: torch.device) -> Tensor:
    """To the device; asynchronous only where that is safe."""
    # Asynchronous copies to MPS corrupt data (pytorch#139550, #189690).
    return tensor.to(device, non_blocking=device.type == "cuda")


def can_skip(device: torch.device) -> bool:
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


def release(device: torch.device) -> None:
    """Give back what the allocator keeps for later."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if device.type == "mps":
        torch.mps.empty_cache()


def has_own_clock(device: torch.device) -> bool:
    """Whether stamps may be put down at every step.

    MPS's events hang when read twice and may come in the wrong order (pytorch#193578, #196395), so there the
    clock is the host's, and exact only after waiting for the queue: for a step now and then.
    """
    return device.type in ("cpu", "cuda")


def stamp(device: torch.device) -> Any:
    """A point in the device's own time; put down without waiting for it, but on MPS."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def ms_between(start: Any, end: Any) -> float:
    """Milliseconds from one stamp to the other; on a GPU, once its queue has come past both."""
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def memory_gb(device: torch.device) -> float | None:
    """What torch holds on a GPU now; the CPU's is the process's."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 1e9
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 1e9
    return None


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def shares_memory(device: torch.device) -> bool:
    """Whether what the machine's other programs hold is missing on the device too."""
    return device.type != "cuda"


def peak_gb(device: torch.device) -> float | None:
    """The most torch has held on a GPU; on MPS, which does not say, what its driver holds now."""
    return torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else memory_gb(device)


def free_gb(device: torch.device) -> float | None:
    """What can still be allocated on a GPU; None on the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info()[0] / 1e9
    if device.type == "mps":
        return (torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) / 1e9
    return None


def attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    if q_BHLd.device.type != "mps":
        return F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=causal)
    # MPS: strided q, k, v give wrong results (pytorch#181133, #163597), and so do 8 tokens or fewer.
    q_BHLd, k_BHLd, v_BHLd = q_BHLd.contiguous(), k_BHLd.contiguous(), v_BHLd.contiguous()
    if q_BHLd.shape[2] > 8:
        return F.scaled_dot_product_attention(q_BHLd, k_BHLd, v_BHLd, is_causal=causal)
    return plain_attention(q_BHLd, k_BHLd, v_BHLd, causal)


def plain_attention(q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor, causal: bool) -> Tensor:
    score_BHLL = q_BHLd @ k_BHLd.transpose(-2, -1) * q_BHLd.shape[-1] ** -0.5
    if causal:
        future_LL = torch.ones(score_BHLL.shape[-2:], dtype=torch.bool, device=q_BHLd.device).triu(1)
        score_BHLL = score_BHLL.masked_fill(future_LL, float("-inf"))
    return torch.softmax(score_BHLL, dim=-1) @ v_BHLd
