"""Embeddings of a whole split, a chunk at a time. Results are on the CPU.

Shapes: N images, M captions, B of a chunk, D features, E embedding.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m1clip import devices
from m1clip.data.splits import Split
from m1clip.model.clip import CLIP

CHUNK = 256
FEATURE_CHUNK = 4096


@torch.inference_mode()
def embed_split_images(model: CLIP, pairs: Split, chunk: int = CHUNK) -> Tensor:
    """(N, E)"""
    outputs = []
    for start in range(0, len(pairs), chunk):
        _, pixels = pairs.take(np.arange(start, min(start + chunk, len(pairs))))
        images_BHWC = devices.copy_to(torch.from_numpy(pixels), model.devices[0])
        outputs.append(model.embed_images(model.normalize(images_BHWC)).cpu())
    return torch.cat(outputs)


@torch.inference_mode()
def embed_captions(model: CLIP, captions: Sequence[str], chunk: int = CHUNK) -> Tensor:
    """(M, E)"""
    outputs = []
    for start in range(0, len(captions), chunk):
        tokens_BL = devices.copy_to(model.tokenize(captions[start : start + chunk]), model.devices[1])
        outputs.append(model.embed_tokens(tokens_BL).cpu())
    return torch.cat(outputs)


@torch.inference_mode()
def embed_feature_rows(model: CLIP, tower: str, features_ND: NDArray[Any]) -> Tensor:
    """(N, E) of stored features of a frozen tower."""
    device = model.devices[0] if tower == "vision" else model.devices[1]
    outputs = []
    for start in range(0, len(features_ND), FEATURE_CHUNK):
        features_BD = torch.from_numpy(np.array(features_ND[start : start + FEATURE_CHUNK])).float()
        outputs.append(model.embed_features(tower, devices.copy_to(features_BD, device)).cpu())
    return torch.cat(outputs)
