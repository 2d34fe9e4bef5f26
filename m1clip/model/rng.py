"""Counter-based random numbers: a function of the row's key, so equal however a batch is split or resumed.

There is no generator, so a checkpoint has no random state to keep. Shapes: B rows, N numbers, L tokens.
"""

from functools import lru_cache

import torch
from torch import Tensor

UINT32 = 0xFFFFFFFF
MASKS = 1021  # dropout masks in the table; a prime, so that keys with a common factor still reach all of them


def uniform(key_B: Tensor, salt: int, count: int) -> Tensor:
    """(B, count) uniform numbers in [0, 1): a hash of the key, the salt and the index."""
    bits_BN = _hash(_seed(key_B, salt)[:, None] ^ _hash(torch.arange(count, device=key_B.device)))
    return (bits_BN / 2.0**32).float()


def _seed(key_B: Tensor, salt: int) -> Tensor:
    return _hash((key_B + salt * 0x9E3779B9) & UINT32)


def _hash(x: Tensor) -> Tensor:
    """MurmurHash3's finalizer, on 32 bits stored in int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & UINT32
    return x ^ (x >> 16)


def dropout_mask(width: int, rate: float, key_B: Tensor, salt: int) -> Tensor:
    """(B, width) factors, 0 or 1 / (1 - rate): each row's key picks one mask of a table."""
    # Hashing every element, as `uniform` does, would cost more than the matrix product that follows. The salt
    # is hashed with the key, or an image and its caption would share the index of their masks.
    return _mask_table(width, rate, salt, key_B.device)[_seed(key_B, salt) % MASKS]


@lru_cache(8)
def _mask_table(width: int, rate: float, salt: int, device: torch.device) -> Tensor:
    random = torch.rand(MASKS, width, generator=torch.Generator().manual_seed(salt))
    return ((random >= rate) / (1 - rate)).to(device)


def drop_tokens(x_BLD: Tensor, rate: float, key_B: Tensor, salt: int) -> Tensor:
    """Keep a random subset of each row's tokens, in order; at least one token."""
    B, L, D = x_BLD.shape
    keep = max(1, round(L * (1 - rate)))
    kept_BK = uniform(key_B, salt, L).topk(keep, dim=1).indices.sort(dim=1).values
    return x_BLD.gather(1, kept_BK[:, :, None].expand(B, keep, D))
