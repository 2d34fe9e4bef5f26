"""Embeddings of images and texts, cached on disk by weights and data: a second task encodes nothing again.

Shapes: N images, M texts, B of a chunk, D features, E embedding.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from m1clip import devices
from m1clip.data.index import ProgressFactory, RowIndices, no_progress
from m1clip.data.pixel_cache import Notes, RowStore, decoder_code
from m1clip.data.splits import Split
from m1clip.files import cache_folder
from m1clip.model.clip import CLIP
from m1clip.model.inputs import fold_texts
from m1clip.model.pretrained import fold_batch_norm

CHUNK, FEATURE_CHUNK = 256, 4096
CPU_CHUNK, GPU_CHUNK = 16, 64  # images of a tower of another library
VERSION = 3  # raise it when the same tower gives other features


@torch.inference_mode()
def embed_split_images(model: CLIP, pairs: Split, chunk: int = CHUNK) -> Tensor:
    """(N, E)"""
    outputs = []
    for rows_B in torch.split(torch.arange(len(pairs)), chunk):
        images_BHWC = torch.from_numpy(pairs.take(rows_B.numpy())[1])
        outputs.append(model.embed_images(model.normalize(devices.copy_to(images_BHWC, model.devices[0]))).cpu())
    return torch.cat(outputs)


def embed_captions(model: CLIP, captions: Sequence[str], chunk: int = CHUNK) -> Tensor:
    """(M, E)"""
    return model.encode_text(captions, chunk).cpu()


@torch.inference_mode()
def embed_feature_rows(model: CLIP, tower: str, features_ND: NDArray[Any]) -> Tensor:
    """(N, E) of stored features of a frozen tower."""
    device, outputs = model.devices[0 if tower == "vision" else 1], []
    for start in range(0, len(features_ND), FEATURE_CHUNK):
        features_BD = torch.from_numpy(np.array(features_ND[start : start + FEATURE_CHUNK])).float()
        outputs.append(model.embed_features(tower, devices.copy_to(features_BD, device)).cpu())
    return torch.cat(outputs)


@dataclass(frozen=True)
class Embedder:
    """Encodes for evaluation. What it has encoded is kept in the cache, and an interrupted encoding continues."""

    model: CLIP
    progress: ProgressFactory = no_progress
    cache_gb: float = 20.0

    @cached_property
    def vision_key(self) -> str:
        return digest(tower_digest(self.model, "vision"), tower_digest(self.model, "vision_projection"))

    @cached_property
    def text_key(self) -> str:
        towers = (tower_digest(self.model, name) for name in ("text", "text_projection"))
        assert self.model.tokenizer is not None
        tokenizer = (self.model.tokenizer.core.to_str(), self.model.tokenizer.settings)
        return digest(*towers, *tokenizer, self.model.config.text.context_length)

    @cached_property
    def encode_pixels(self) -> Callable[[Tensor], Tensor]:
        """(N, E) of uint8 images."""
        model, tower = self.model, inference_tower(self.model.vision)
        chunk = CHUNK if model.config.is_native else GPU_CHUNK if devices.is_async(model.devices[0]) else CPU_CHUNK

        def encode(images_NHWC: Tensor) -> Tensor:
            parts = (devices.copy_to(part, model.devices[0]) for part in torch.split(images_NHWC, chunk))
            return torch.cat([model.embed_features("vision", tower(model.normalize(part))) for part in parts])

        return encode

    def images(self, pairs: Split, label: str = "encoding images") -> Tensor:
        """(N, E)"""

        def encode(rows: RowIndices) -> Tensor:
            return self.encode_pixels(torch.from_numpy(pairs.take(rows)[1]))

        variant = (self.model.devices[0].type, decoder_code())
        return self._rows(digest("images", self.vision_key, split_digest(pairs), *variant), len(pairs), encode, label)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(M, E)"""
        distinct, position = fold_texts(texts)

        def encode(rows: RowIndices) -> Tensor:
            return self.model.encode_text([distinct[row] for row in rows])

        key = digest("texts", self.text_key, self.model.devices[1].type, *distinct)
        return self._rows(key, len(distinct), encode, "encoding texts")[position]

    def _rows(self, key: str, rows: int, encode: Callable[[RowIndices], Tensor], label: str) -> Tensor:
        width = self.model.config.embed_dim

        def produce(chunks: list[range]) -> Iterable[tuple[bytes, Notes]]:
            for chunk in chunks:
                with torch.inference_mode():
                    yield encode(np.array(chunk)).float().cpu().numpy().tobytes(), {}

        with self.progress(label, rows) as advance:
            store = RowStore(cache_folder() / f"embeddings-{key}", rows, 4 * width)
            with suppress(OSError):  # a full disk: nothing is cached
                if self.cache_gb and store.build(produce, self.cache_gb * 1e9, advance, "embeddings"):
                    found = torch.from_numpy(np.array(store.memmap(np.float32, width)))
                    store.close()
                    return found
            parts = []
            for chunk, (data, _) in zip(store.chunks, produce(store.chunks), strict=True):
                parts.append(np.frombuffer(data, np.float32).reshape(len(chunk), width))
                advance(len(chunk))
            return torch.from_numpy(np.concatenate(parts))


def inference_tower(tower: Any) -> Any:
    """The tower, or a copy with folded batch norms if it is verified to give the same features."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in tower.modules()):
        return tower
    device, size = next(tower.parameters()).device, tower.config.image_size
    try:
        folded = fold_batch_norm(tower)
        pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        with torch.inference_mode():
            expected, features = tower(pixels), folded(pixels)
        return folded if (expected - features).norm() <= 1e-4 * expected.norm() else tower
    except (RuntimeError, TypeError, AttributeError):  # a network of unexpected structure
        return tower


def tower_digest(model: CLIP, name: str) -> str:
    """What a tower or a projection head computes: its config and its weights."""
    config = getattr(model.config, name, model.config.head)
    hash_ = blake2b(f"{VERSION}/{config}/{model.config.activation}".encode(), digest_size=16)
    for key, tensor in sorted(model.get_submodule(name).state_dict().items()):
        hash_.update(f"{key}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hash_.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes())
    return hash_.hexdigest()


def split_digest(pairs: Split) -> str:
    """Which images a split has, in which order."""
    hash_ = blake2b(digest_size=16)
    for part in pairs.parts:
        hash_.update(f"{part.pairs.fingerprint}/{len(part.pairs)}".encode())
        hash_.update(np.ascontiguousarray(part.rows).tobytes())
    return hash_.hexdigest()


def digest(*parts: object) -> str:
    return blake2b("\0".join(map(str, parts)).encode(), digest_size=8).hexdigest()
