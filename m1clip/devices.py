"""The only file that names a backend: which device and why, and what each one needs done differently.

The rules for Apple's GPU come from bug reports against PyTorch; each carries its number.
"""

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
