"""Images and captions of a whole set to unit vectors, a chunk at a time.

Shapes: N images, M captions, E embedding.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from m1clip import devices
from m1clip.data.splits import Split
from m1clip.model.clip import CLIP

CHUNK = 256


@torch.inference_mode()
def embed_images(model: CLIP, pairs: Split, most: int = CHUNK) -> Tensor:
    """(N, E) on the CPU."""
    device = model.devices[0]
    parts = []
    for start in range(0, len(pairs), most):
        _, pixels = pairs.take(np.arange(start, min(start + most, len(pairs))))
        images_BHWC = devices.copy_to(torch.from_numpy(pixels), device)
        parts.append(model.embed_images(model.normalize(images_BHWC)).cpu())
    return torch.cat(parts)


@torch.inference_mode()
def embed_captions(model: CLIP, captions: Sequence[str], most: int = CHUNK) -> Tensor:
    """(M, E) on the CPU."""
    parts = []
    for start in range(0, len(captions), most):
        chunk = slice(start, start + most)
        tokens_BL = model.tokenize(captions[chunk])
        parts.append(model.embed_tokens(devices.copy_to(tokens_BL, model.devices[1])).cpu())
    return torch.cat(parts)


def embed_pairs(model: CLIP, pairs: Split, most: int = CHUNK) -> tuple[Tensor, Tensor, Tensor]:
    """Images (N, E), all their captions (M, E), and which image each caption belongs to (M).

    At most `most` of them, and never more than CHUNK, are in memory at once.
    """
    most = min(most, CHUNK)
    captions = [pairs.captions(row) for row in range(len(pairs))]
    owner_M = torch.tensor([row for row, some in enumerate(captions) for _ in some])
    flat = [caption for some in captions for caption in some]
    return embed_images(model, pairs, most), embed_captions(model, flat, most), owner_M
