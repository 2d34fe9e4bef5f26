"""Random numbers that belong to a row: the same however the batch is divided, repeated or resumed.

Counter-based, so there is no generator whose state could be lost. Shapes: B rows, and any others.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
TABLE = 1021  # masks; a prime, so that keys fall on all of them


def uniform(key_B: Tensor, salt: int, shape: tuple[int, ...]) -> Tensor:
    """(B, *shape) numbers in 0…1, each a function of its row's key, the salt and its place in the shape."""
    place_N = torch.arange(math.prod(shape), device=key_B.device)
    start_B1 = _mixed((key_B + salt * 0x9E3779B9) & WORD)[:, None]
    return (_mixed(start_B1 ^ _mixed(place_N)) / 2.0**32).float().view(len(key_B), *shape)


def _mixed(x: Tensor) -> Tensor:
    """MurmurHash3's last step: 32 bits in 64, every input bit moves every output bit."""
    for turn, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> turn)) * factor) & WORD
    return x ^ (x >> 16)


def dropout(x: Tensor, part: float, key_B: Tensor | None, salt: int) -> Tensor:
    """Zeroes `part` of x and scales up the rest; nothing without keys, as outside of training."""
    if not part or key_B is None:
        return x
    kept = uniform(key_B, salt, tuple(x.shape[1:])) >= part
    return x * kept / (1 - part)


@lru_cache(8)
def _masks(width: int, part: float, salt: int, device: torch.device) -> Tensor:
    drawn = torch.rand(TABLE, width, generator=torch.Generator().manual_seed(salt))
    return ((drawn >= part) / (1 - part)).to(device)


def row_masks(width: int, part: float, key_B: Tensor, salt: int) -> Tensor:
    """(B, width) of 0 and 1 / (1 - part), for one vector a row: each row's key picks a mask from a table.

    A hash for every number, as `dropout` has it, would cost more than the matrix that follows. Which mask is
    a matter of the salt too: an image and its caption must not know each other by their masks.
    """
    which_B = _mixed((key_B + salt * 0x9E3779B9) & WORD) % TABLE
    return _masks(width, part, salt, key_B.device)[which_B]


def some_of(x_BLD: Tensor, part: float, key_B: Tensor | None, salt: int) -> Tensor:
    """Each row keeps its own choice of tokens, all but `part` of them, in their order; at least one."""
    if not part or key_B is None:
        return x_BLD
    B, L, D = x_BLD.shape
    keep = max(1, round(L * (1 - part)))
    chosen_BK = uniform(key_B, salt, (L,)).topk(keep, dim=1).indices.sort(dim=1).values
    return x_BLD.gather(1, chosen_BK[:, :, None].expand(B, keep, D))
