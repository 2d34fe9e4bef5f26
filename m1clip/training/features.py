"""Features of frozen towers: every image and caption is encoded once, into memory-mapped files that runs share.

The key of such a file is made of the tower's weights and of the data. An interrupted encoding continues.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from statistics import median

import numpy as np
import torch
from torch import Tensor

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data import batches
from m1clip.data.batches import Augmentation, BatchStream, CaptionFeatureTable, FeatureTables, ImageFeatureTable
from m1clip.data.index import ProgressFactory, RowIndices
from m1clip.data.pixel_cache import Notes, RowStore
from m1clip.data.splits import Split
from m1clip.evals.embed import CPU_CHUNK, GPU_CHUNK, digest, inference_tower, split_digest, tower_digest
from m1clip.files import cache_folder
from m1clip.format import duration, file_size
from m1clip.model.clip import CLIP
from m1clip.training.device_plan import check_parity, default_plan
from m1clip.training.memory import retain_freed_memory
from m1clip.training.setup import FEATURE_VIEWS, Setup, sample_captions

TRIALS, MAX_TRIAL_S = 3, 3.0  # timed encodings of a chunk
FP16_MAX = 65504.0
MIN_IMAGES = 200  # encoded however short a budget is: fewer teach nothing
HEAD_TIME = 0.1  # of a budget, reserved for training heads on encoded features
Encode = Callable[[RowIndices], tuple[Tensor, Notes]]


def plan_encoding(setup: Setup, model: CLIP, console: Console) -> Setup:
    """Print how long encoding takes; with a budget, keep as many images as can be encoded in time."""
    splits, config, towers = setup.splits, setup.config, setup.frozen
    encoder = FeatureEncoder(model.to_devices(*default_plan(config).plan.devices), config, console.progress)
    if encoder.is_cached(splits.train, towers):
        return setup
    image_s, caption_s = time_encoding(model, list(islice(sample_captions(splits.train), CPU_CHUNK)))
    image_s, caption_s = image_s * ("vision" in towers), caption_s * ("text" in towers)
    images, captions = len(splits.train) + len(splits.val), 0
    if caption_s:
        captions = sum(len(one) for split in (splits.train, splits.val) for one in split.all_captions())
    views = setup.views or (FEATURE_VIEWS if image_s and encoder.augmentation != Augmentation() else 1)
    first_s = images * image_s + captions * caption_s
    all_s = first_s + (views - 1) * len(splits.train) * image_s
    counts = [f"{images:,} images ({views} views)"] * bool(image_s) + [f"{captions:,} captions"] * bool(captions)
    console.print(f"encoding {' and '.join(counts)}: about {duration(all_s)}")
    if setup.deadline is None or setup.checkpoint:
        return setup
    available_s = setup.deadline - HEAD_TIME * (config.budget_s or 0.0) - time.monotonic()
    every = min(max(2, len(splits.train) // MIN_IMAGES), math.ceil(first_s / max(available_s, 1e-3)))
    if every < 2:
        return setup
    console.warn(f"--budget {config.budget} is too short for {duration(first_s)}: 1 of {every:,} images is used")
    return setup.with_every(every)


def time_encoding(model: CLIP, captions: Sequence[str]) -> tuple[float, float]:
    """Seconds per image and per caption."""
    length = min(16, model.config.text.context_length)
    tokens_BL = model.tokenize(captions) if model.tokenizer else torch.ones(CPU_CHUNK, length, dtype=torch.long)
    return time_images(model), time_per_item(model.text, tokens_BL, model.devices[1])


def time_images(model: CLIP) -> float:
    """Seconds per image as it will be encoded: in chunks of the same size, with folded batch norms."""
    size, tower = model.config.vision.image_size, inference_tower(model.vision)
    images_BHWC = torch.zeros((CPU_CHUNK, size, size, 3), dtype=torch.uint8)
    return time_per_item(lambda chunk: tower(model.normalize(chunk)), images_BHWC, model.devices[0])


@torch.inference_mode()
def time_per_item(encode: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device) -> float:
    seconds = list[float]()
    while len(seconds) <= TRIALS and sum(seconds) < MAX_TRIAL_S:
        started = time.perf_counter()
        encode_chunks(encode, inputs, device).cpu()
        seconds.append(time.perf_counter() - started)
    return median(seconds[1:] or seconds) / len(inputs)  # the first is warm-up


def encode_frozen(
    setup: Setup, model: CLIP, stream: BatchStream, console: Console
) -> tuple[BatchStream, FeatureTables, Setup]:
    """Features of the frozen towers: batches of training features, validation features, those of --zeroshot."""
    config, splits, deadline = setup.config, setup.splits, None
    retain_freed_memory()
    choice = check_parity(default_plan(config), model, stream.batch(0).split(CPU_CHUNK)[0], console, config)
    model.to_devices(*choice.plan.devices)
    encoder = FeatureEncoder(model, config, console.progress)
    val_features = encoder.encode(splits.val, setup.frozen, views=1)
    if setup.deadline is not None and not setup.views:  # a resumed run keeps its views
        deadline = setup.deadline - HEAD_TIME * (config.budget_s or 0.0)
    features = encoder.encode(splits.train, setup.frozen, setup.views or FEATURE_VIEWS, deadline)
    views = len(features.images.views) if features.images else 0
    if deadline is not None and 0 < views < FEATURE_VIEWS:
        console.print(f"{views} of {FEATURE_VIEWS} views per image: the budget allows no more")
    if setup.zeroshot and "vision" in setup.frozen:
        images = encoder.encode(setup.zeroshot.pairs, ["vision"], views=1).images
        setup = replace(setup, zeroshot=replace(setup.zeroshot, features=images.views[0] if images else None))
    return replace(stream, features=features), val_features, setup


@dataclass(frozen=True)
class FeatureEncoder:
    model: CLIP
    config: TrainConfig
    progress: ProgressFactory

    def encode(self, pairs: Split, towers: Sequence[str], views: int, deadline: float | None = None) -> FeatureTables:
        """Features of a split for each frozen tower; after the first, views only while there is time."""
        captions = self._encode_captions(pairs) if "text" in towers else None
        images = self._encode_images(pairs, views, deadline) if "vision" in towers else None
        return FeatureTables(images, captions)

    @property
    def augmentation(self) -> Augmentation:
        return Augmentation(self.config.crop_scale, self.config.hflip, self.config.color_jitter)

    @cached_property
    def vision_digest(self) -> str:
        return tower_digest(self.model, "vision")

    def image_key(self, pairs: Split, view: int) -> str:
        variant = (self.config.seed, view, self.augmentation) if view else ()
        stored = batches.stored_size(self.model.config.vision.image_size, self.config.crop_scale)
        return digest("images", self.vision_digest, split_digest(pairs), variant, stored)

    def caption_key(self, captions: Sequence[str]) -> str:
        assert self.model.tokenizer is not None
        return digest("captions", tower_digest(self.model, "text"), self.model.tokenizer.core.to_str(), *captions)

    def is_cached(self, pairs: Split, towers: Sequence[str]) -> bool:
        """Whether the first view of all images, or else all captions, have been encoded."""
        model = self.model.config
        if "vision" in towers:
            return not feature_store(self.image_key(pairs, 0), len(pairs), model.vision.width).missing_bytes
        captions = [caption for of_image in pairs.all_captions() for caption in of_image]
        return not feature_store(self.caption_key(captions), len(captions), model.text.width).missing_bytes

    def _encode_images(self, pairs: Split, views: int, deadline: float | None) -> ImageFeatureTable:
        model, config = self.model, self.config
        size, width, device = model.config.vision.image_size, model.config.vision.width, model.devices[0]
        views = views if self.augmentation != Augmentation() else 1  # all views would be equal
        tower = inference_tower(model.vision)

        def encode_view(view: int) -> RowStore:
            augmentation = self.augmentation if view else Augmentation()

            def encode(rows: RowIndices) -> tuple[Tensor, Notes]:
                decoded_rows, pixels = pairs.take(rows)
                replaced = {str(row): int(other) for row, other in zip(rows, decoded_rows, strict=True) if row != other}
                images_BHWC = batches.augment_images(pixels, augmentation, size, config.seed, view, rows)
                return encode_chunks(lambda chunk: tower(model.normalize(chunk)), images_BHWC, device), replaced

            label = "encoding images" + (f", view {view + 1} of {views}" if views > 1 else "")
            return self._build_store(self.image_key(pairs, view), len(pairs), width, encode, label)

        stores, longest_s = list[RowStore](), 0.0 if deadline is None else len(pairs) * time_images(model)
        for view in range(views):
            started = time.monotonic()
            if view and deadline is not None and started + longest_s > deadline:
                break
            stores.append(encode_view(view))
            longest_s = max(longest_s, time.monotonic() - started)  # a cached view takes no time
        arrays = [store.memmap(np.float16, width) for store in stores]
        source_row_N = np.arange(len(pairs))
        for entry in stores[0].entries().values():
            for row, other in entry["notes"].items():
                source_row_N[int(row)] = other
        image_id_N = batches.group_ids([blake2b(row.tobytes(), digest_size=16).digest() for row in arrays[0]])
        return ImageFeatureTable(arrays, image_id_N, source_row_N)

    def _encode_captions(self, pairs: Split) -> CaptionFeatureTable:
        model = self.model
        width, by_image = model.config.text.width, list(pairs.all_captions())
        captions = [caption for of_image in by_image for caption in of_image]
        order_M = np.argsort([len(caption) for caption in captions], kind="stable")  # similar lengths: little padding

        def encode(rows: RowIndices) -> tuple[Tensor, Notes]:
            tokens_BL = model.tokenize([captions[order_M[row]] for row in rows])
            return encode_chunks(model.text, tokens_BL, model.devices[1]), {}

        store = self._build_store(self.caption_key(captions), len(captions), width, encode, "encoding captions")
        position_M = np.argsort(order_M)  # the inverse permutation
        start_N = np.cumsum([0, *map(len, by_image)])
        return CaptionFeatureTable(store.memmap(np.float16, width), position_M, start_N, batches.group_ids(captions))

    def _build_store(self, key: str, rows: int, width: int, encode: Encode, label: str) -> RowStore:
        store = feature_store(key, rows, width)

        def produce(chunks: list[range]) -> Iterable[tuple[bytes, Notes]]:
            for chunk in chunks:
                features, notes = encode(np.array(chunk))
                if not features.isfinite().all():
                    raise FloatingPointError("the features are not finite; this tower's weights are broken")
                yield features.float().cpu().clamp(-FP16_MAX, FP16_MAX).half().numpy().tobytes(), notes

        with self.progress(label, rows) as advance, torch.inference_mode():
            if not store.build(produce, self.config.cache_gb * 1e9, advance, "features"):
                need = f"the features need {file_size(rows * 2 * width)} beside the decoded images"
                raise OSError(f"{need}; --cache-gb {self.config.cache_gb:g} is too small")
        return store


def feature_store(key: str, rows: int, width: int) -> RowStore:
    return RowStore(cache_folder() / f"features-{key}", rows, 2 * width)


def encode_chunks(tower: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device) -> Tensor:
    """Encode in chunks of a fixed size: rounding depends on it, so it must not depend on a timing."""
    size = GPU_CHUNK if devices.is_async(device) else CPU_CHUNK
    return torch.cat([tower(devices.copy_to(chunk, device)) for chunk in torch.split(inputs, size)])
