"""Features of locked towers: every image and caption once, into memory-mapped stores that runs share.

A store's name is made of the tower's weights and of the data, so it is found again only by the same. What was
killed goes on where it was.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.data.augment import margin
from m1clip.data.batches import Augmentation, seen
from m1clip.data.cache_space import explained_if_full, make_room
from m1clip.data.features import Features, numbered
from m1clip.data.index import Rows
from m1clip.data.pairs import ProgressFactory
from m1clip.data.row_store import Notes, Store
from m1clip.data.splits import Split
from m1clip.files import cache_folder
from m1clip.format import file_size
from m1clip.model.clip import CLIP
from m1clip.model.pretrained import TimmVision, fold_batch_norm, image_features

FORM = 1  # to be raised where the same towers are asked for other features
SIZES = (4, 16, 64)
MOST = 65504.0  # that half precision can say
Encode = Callable[[Any], Tensor]


def encoded(
    model: CLIP,
    side: Split,
    config: TrainConfig,
    locked: Sequence[str],
    views: int,
    bars: ProgressFactory,
    until: float | None = None,
) -> Features:
    """Of one side, for each of its locked towers; after the first, views only as long as there is time."""
    made: dict[str, Any] = {}
    if "text" in locked:
        made |= _captions(model, side, config, bars)
    if "vision" in locked:
        made |= _images(model, side, config, views, bars, until)
    return Features(**made)


def _images(
    model: CLIP, side: Split, config: TrainConfig, views: int, bars: ProgressFactory, until: float | None
) -> dict[str, Any]:
    size, stores = model.config.vision.image_size, []
    device = model.devices[0]
    tower = inference_form(model.vision).to(device)
    weights, stored_side = digest(model.vision), margin(size, config.crop_scale)
    views = (
        views if Augmentation(config.crop_scale, config.hflip, config.color_jitter) != Augmentation() else 1
    )  # or all were alike
    took = 0.0
    for view in range(views):
        began = time.monotonic()
        if view and until is not None and began + took > until:
            break
        how = Augmentation(config.crop_scale, config.hflip, config.color_jitter) if view else Augmentation()
        which = (config.seed, view, how) if view else ()
        name = named("images", weights, image_rows(side), shape_of(model, "vision"), which, stored_side)

        def some(rows: Rows, how: Augmentation = how, view: int = view) -> tuple[Tensor, Notes]:
            found, pixels = side.take(rows)
            moved = {str(row): int(other) for row, other in zip(rows, found, strict=True) if row != other}
            return seen(pixels, how, size, config.seed, view, rows), moved

        def encode(images_BHWC: Tensor) -> Tensor:
            made: Tensor = tower(model.normalize(devices.copy_to(images_BHWC, device)))
            return made

        told = "encoding images" + (f", view {view + 1} of {views}" if views > 1 else "")
        stores.append(_filled(name, len(side), model.config.vision.width, some, encode, told, config, bars))
        took = max(took, time.monotonic() - began)  # one that was stored takes none
    arrays = [store.mapped(np.float16, model.config.vision.width) for store in stores]
    instead = np.arange(len(side))
    for entry in stores[0].entries().values():
        for row, other in entry["bad"].items():
            instead[int(row)] = other
    return {"views": arrays, "look_N": looks(arrays[0]), "instead_N": instead}


def _captions(model: CLIP, side: Split, config: TrainConfig, bars: ProgressFactory) -> dict[str, Any]:
    device = model.devices[1]
    assert model.tokenizer is not None
    captions = [side.captions(row) for row in range(len(side))]
    flat = [caption for some in captions for caption in some]
    start_N = np.cumsum([0, *map(len, captions)])
    order_M = np.argsort([len(caption) for caption in flat], kind="stable")  # alike together: little padding
    words = blake2b(model.tokenizer.core.to_str().encode(), digest_size=8).hexdigest()
    said = blake2b("\0".join(flat).encode(), digest_size=16).hexdigest()
    name = named("captions", digest(model.text), words, said, shape_of(model, "text"))

    def some(rows: Rows) -> tuple[Tensor, Notes]:
        return model.tokenize([flat[order_M[row]] for row in rows]), {}

    def encode(tokens_BL: Tensor) -> Tensor:
        made: Tensor = model.text(devices.copy_to(tokens_BL, device))
        return made

    store = _filled(name, len(flat), model.config.text.width, some, encode, "encoding captions", config, bars)
    place_M = np.empty(len(flat), np.int64)
    place_M[order_M] = np.arange(len(flat))
    texts = store.mapped(np.float16, model.config.text.width)
    return {"texts": texts, "place_M": place_M, "start_N": start_N, "caption_M": numbered(flat)}


def _filled(
    name: str,
    rows: int,
    width: int,
    some: Callable[[Rows], tuple[Tensor, Notes]],
    encode: Encode,
    told: str,
    config: TrainConfig,
    bars: ProgressFactory,
) -> Store:
    """The store of that name, made whole."""
    store = Store(cache_folder() / f"features-{name}", rows, 2 * width)
    store.claim()
    fastest = Fastest(encode)

    def make(parts: list[range]) -> Iterator[tuple[bytes, Notes]]:
        for part in parts:
            batch, notes = some(np.array(part))
            made = fastest(batch).float().cpu()
            if not made.isfinite().all():
                raise FloatingPointError("the features are not finite; this tower's weights are broken")
            yield made.clamp(-MOST, MOST).half().numpy().tobytes(), notes

    try:
        if store.need and not make_room(store.need, config.cache_gb * 1e9, store.folder, "features"):
            raise OSError(
                f"the features need {file_size(store.need)} beside the decoded images; --cache-gb "
                f"{config.cache_gb:g} is too little"
            )
        with bars(told, rows) as advance, explained_if_full(store.folder), torch.inference_mode():
            store.fill(make, advance)
    except BaseException:
        store.close()
        raise
    return store


class Fastest:
    """Encodes in chunks of the size that was fastest here, found on the first batches themselves."""

    def __init__(self, encode: Encode):
        self.encode, self.untried, self.took = encode, list(SIZES), dict[int, float]()

    def __call__(self, batch: Tensor) -> Tensor:
        if self.untried and len(batch) >= len(SIZES) * SIZES[-1]:
            return self._trying(batch)
        size = min(self.took, key=lambda one: self.took[one]) if self.took else SIZES[1]
        return torch.cat([self.encode(chunk) for chunk in torch.split(batch, size)])

    def _trying(self, batch: Tensor) -> Tensor:
        """A part of the batch with each size, after a warm-up."""
        shares = batch.chunk(len(SIZES))
        self.encode(shares[0][: SIZES[0]])
        made = []
        for size, share in zip(SIZES, shares, strict=True):
            began = time.perf_counter()
            parts = [self.encode(chunk).cpu() for chunk in torch.split(share, size)]
            self.took[size] = time.perf_counter() - began
            made += parts
        self.untried = []
        return torch.cat(made)


def inference_form(tower: nn.Module) -> nn.Module:
    """The tower, or a faster one that gives the same; which it does is looked at, not assumed."""
    if not isinstance(tower, TimmVision):
        return tower
    device = next(tower.parameters()).device
    size = tower.config.image_size
    try:
        net = fold_batch_norm(tower.net).to(device)
        pixels = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        faster = FoldedTower(net, tower.config.stages)
        with torch.inference_mode():
            want, found = tower(pixels), faster(pixels)
        return faster if (want - found).norm() <= 1e-4 * want.norm() else tower
    except (RuntimeError, TypeError, AttributeError):  # a net that is not built as expected
        return tower


class FoldedTower(nn.Module):
    def __init__(self, net: nn.Module, stages: Sequence[str]):
        super().__init__()
        self.net, self.stages = net, stages

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        return image_features(self.net, self.stages, pixels_BCHW)


def digest(tower: nn.Module) -> str:
    """Of every weight."""
    found = blake2b(digest_size=16)
    for name, tensor in sorted(tower.state_dict().items()):
        found.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        found.update(
            tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if tensor.ndim else b""
        )
    return found.hexdigest()


def image_rows(side: Split) -> str:
    """Which images a side has, in which order."""
    found = blake2b(digest_size=16)
    for part in side.parts:
        found.update(f"{part.pairs.fingerprint}/{len(part.pairs)}".encode())
        found.update(np.ascontiguousarray(part.rows).tobytes())
    return found.hexdigest()


def shape_of(model: CLIP, side: str) -> str:
    """What a tower computes beside its weights."""
    return f"{FORM}/{getattr(model.config, side)}/{model.config.activation}"


def named(*parts: object) -> str:
    return blake2b("|".join(map(str, parts)).encode(), digest_size=8).hexdigest()


def looks(view: NDArray[Any]) -> Rows:
    """Equal for images whose features are."""
    return numbered([blake2b(row.tobytes(), digest_size=16).digest() for row in view])


def embed_features(model: CLIP, side: str, rows: NDArray[Any], most: int = 4096) -> Tensor:
    """Unit vectors (N, E) on the CPU of stored features."""
    device = model.devices[0] if side == "vision" else model.devices[1]
    made = []
    with torch.inference_mode():
        for start, end in pairwise([*range(0, len(rows), most), len(rows)]):
            x_BD = torch.from_numpy(np.array(rows[start:end])).float()
            made.append(model.embed_features(side, devices.copy_to(x_BD, device)).cpu())
    return torch.cat(made)
