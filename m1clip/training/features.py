"""Features of frozen towers: every image and caption is encoded once, into memory-mapped files that runs share.

The key of such a file is made of the tower's weights and of the data. An interrupted encoding continues.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor, nn

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.data.batches import (
    Augmentation,
    CaptionFeatureTable,
    FeatureTables,
    ImageFeatureTable,
    augment_images,
    group_ids,
    stored_size,
)
from m1clip.data.index import RowIndices
from m1clip.data.pixel_cache import Notes, RowStore
from m1clip.data.rows import ProgressFactory
from m1clip.data.splits import Split
from m1clip.files import cache_folder
from m1clip.format import file_size
from m1clip.model.clip import CLIP
from m1clip.model.pretrained import TimmVision, fold_batch_norm, image_features

VERSION = 1  # raise it when the same tower gives other features
CHUNK_SIZES = (4, 16, 64)
FP16_MAX = 65504.0
Load = Callable[[RowIndices], tuple[Tensor, Notes]]
Encode = Callable[[Tensor], Tensor]


def encode_split(
    model: CLIP,
    pairs: Split,
    config: TrainConfig,
    towers: Sequence[str],
    views: int,
    progress: ProgressFactory,
    deadline: float | None = None,
) -> FeatureTables:
    """Features of a split for each frozen tower; after the first, views only while there is time."""
    captions = _encode_captions(model, pairs, config, progress) if "text" in towers else None
    images = _encode_images(model, pairs, config, views, progress, deadline) if "vision" in towers else None
    return FeatureTables(images, captions)


def _encode_images(
    model: CLIP, pairs: Split, config: TrainConfig, views: int, progress: ProgressFactory, deadline: float | None
) -> ImageFeatureTable:
    size, width, device = model.config.vision.image_size, model.config.vision.width, model.devices[0]
    tower, weights = inference_tower(model.vision).to(device), weight_digest(model.vision)
    augmented = Augmentation(config.crop_scale, config.hflip, config.color_jitter)
    views = views if augmented != Augmentation() else 1  # all views would be equal
    stores: list[RowStore] = []
    longest_s = 0.0
    for view in range(views):
        started = time.monotonic()
        if view and deadline is not None and started + longest_s > deadline:
            break
        augmentation = augmented if view else Augmentation()
        variant = (config.seed, view, augmentation) if view else ()
        shape = (tower_digest(model, "vision"), variant, stored_size(size, config.crop_scale))
        key = digest("images", weights, split_digest(pairs), *shape)

        def load(rows: RowIndices, augmentation: Augmentation = augmentation, view: int = view) -> tuple[Tensor, Notes]:
            decoded_rows, pixels = pairs.take(rows)
            replaced = {str(row): int(other) for row, other in zip(rows, decoded_rows, strict=True) if row != other}
            return augment_images(pixels, augmentation, size, config.seed, view, rows), replaced

        def encode(images_BHWC: Tensor) -> Tensor:
            features: Tensor = tower(model.normalize(devices.copy_to(images_BHWC, device)))
            return features

        label = "encoding images" + (f", view {view + 1} of {views}" if views > 1 else "")
        stores.append(_build_store(key, len(pairs), width, load, encode, label, config, progress))
        longest_s = max(longest_s, time.monotonic() - started)  # a cached view takes no time
    arrays = [store.memmap(np.float16, width) for store in stores]
    source_row_N = np.arange(len(pairs))
    for entry in stores[0].entries().values():
        for row, other in entry["notes"].items():
            source_row_N[int(row)] = other
    image_id_N = group_ids([blake2b(row.tobytes(), digest_size=16).digest() for row in arrays[0]])
    return ImageFeatureTable(arrays, image_id_N, source_row_N)


def _encode_captions(model: CLIP, pairs: Split, config: TrainConfig, progress: ProgressFactory) -> CaptionFeatureTable:
    assert model.tokenizer is not None
    device, width = model.devices[1], model.config.text.width
    by_image = [pairs.captions(row) for row in range(len(pairs))]
    captions = [caption for of_image in by_image for caption in of_image]
    order_M = np.argsort([len(caption) for caption in captions], kind="stable")  # similar lengths: little padding
    vocabulary = blake2b(model.tokenizer.core.to_str().encode(), digest_size=8).hexdigest()
    text = blake2b("\0".join(captions).encode(), digest_size=16).hexdigest()
    key = digest("captions", weight_digest(model.text), vocabulary, text, tower_digest(model, "text"))

    def load(rows: RowIndices) -> tuple[Tensor, Notes]:
        return model.tokenize([captions[order_M[row]] for row in rows]), {}

    def encode(tokens_BL: Tensor) -> Tensor:
        features: Tensor = model.text(devices.copy_to(tokens_BL, device))
        return features

    store = _build_store(key, len(captions), width, load, encode, "encoding captions", config, progress)
    position_M = np.empty(len(captions), np.int64)
    position_M[order_M] = np.arange(len(captions))
    start_N = np.cumsum([0, *map(len, by_image)])
    return CaptionFeatureTable(store.memmap(np.float16, width), position_M, start_N, group_ids(captions))


def _build_store(
    key: str,
    rows: int,
    width: int,
    load: Load,
    encode: Encode,
    label: str,
    config: TrainConfig,
    progress: ProgressFactory,
) -> RowStore:
    """The complete store of features with this key."""
    store = RowStore(cache_folder() / f"features-{key}", rows, 2 * width)
    encoder = ChunkedEncoder(encode)

    def produce(chunks: list[range]) -> Iterable[tuple[bytes, Notes]]:
        for chunk in chunks:
            inputs, notes = load(np.array(chunk))
            features = encoder(inputs).float().cpu()
            if not features.isfinite().all():
                raise FloatingPointError("the features are not finite; this tower's weights are broken")
            yield features.clamp(-FP16_MAX, FP16_MAX).half().numpy().tobytes(), notes

    with progress(label, rows) as advance, torch.inference_mode():
        if not store.build(produce, config.cache_gb * 1e9, advance, "features"):
            raise OSError(
                f"the features need {file_size(rows * 2 * width)} beside the decoded images; "
                f"--cache-gb {config.cache_gb:g} is too small"
            )
    return store


class ChunkedEncoder:
    """Encodes in chunks of the fastest size, measured on the first inputs."""

    def __init__(self, encode: Encode):
        self.encode, self.chunk_size, self.is_tuned = encode, CHUNK_SIZES[1], False

    def __call__(self, inputs: Tensor) -> Tensor:
        if not self.is_tuned and len(inputs) >= len(CHUNK_SIZES) * CHUNK_SIZES[-1]:
            return self._tune(inputs)
        return torch.cat([self.encode(chunk) for chunk in torch.split(inputs, self.chunk_size)])

    def _tune(self, inputs: Tensor) -> Tensor:
        """Encode a share of the inputs with each size, after a warm-up."""
        shares, outputs, seconds = inputs.chunk(len(CHUNK_SIZES)), [], dict[int, float]()
        self.encode(shares[0][: CHUNK_SIZES[0]])
        for size, share in zip(CHUNK_SIZES, shares, strict=True):
            started = time.perf_counter()
            outputs += [self.encode(chunk).cpu() for chunk in torch.split(share, size)]
            seconds[size] = time.perf_counter() - started
        self.chunk_size, self.is_tuned = min(seconds, key=lambda size: seconds[size]), True
        return torch.cat(outputs)


def inference_tower(tower: nn.Module) -> nn.Module:
    """The tower, or a copy with folded batch norms if it is verified to give the same features."""
    if not isinstance(tower, TimmVision):
        return tower
    device, size = next(tower.parameters()).device, tower.config.image_size
    try:
        folded = FoldedTower(fold_batch_norm(tower.net).to(device), tower.config.stages)
        pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        with torch.inference_mode():
            expected, features = tower(pixels), folded(pixels)
        return folded if (expected - features).norm() <= 1e-4 * expected.norm() else tower
    except (RuntimeError, TypeError, AttributeError):  # a network of unexpected structure
        return tower


class FoldedTower(nn.Module):
    def __init__(self, net: nn.Module, stages: Sequence[str]):
        super().__init__()
        self.net, self.stages = net, stages

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return image_features(self.net, self.stages, pixels_BCHW)


def weight_digest(tower: nn.Module) -> str:
    hash_ = blake2b(digest_size=16)
    for name, tensor in sorted(tower.state_dict().items()):
        hash_.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if tensor.ndim:
            hash_.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hash_.hexdigest()


def split_digest(pairs: Split) -> str:
    """Which images a split has, in which order."""
    hash_ = blake2b(digest_size=16)
    for part in pairs.parts:
        hash_.update(f"{part.pairs.fingerprint}/{len(part.pairs)}".encode())
        hash_.update(np.ascontiguousarray(part.rows).tobytes())
    return hash_.hexdigest()


def tower_digest(model: CLIP, tower: str) -> str:
    """What a tower computes beside its weights."""
    return f"{VERSION}/{getattr(model.config, tower)}/{model.config.activation}"


def digest(*parts: object) -> str:
    return blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()
