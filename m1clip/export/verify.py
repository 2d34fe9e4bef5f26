"""The gate of an export: every file is loaded again and run on real images and captions beside torch.

Shapes: N images, K distinct captions, M captions, B items of a batch, L tokens, C colors, H W pixels, E embedding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from m1clip.data.index import ProgressFactory, no_progress
from m1clip.data.splits import Split
from m1clip.errors import short_error
from m1clip.evals.embed import Embedder
from m1clip.evals.retrieval import Relevance, Retrieval, retrieval
from m1clip.format import percent, wilson_interval
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import clean_white_space
from m1clip.onnx_model import OnnxSession, graph_bytes

Array = NDArray[Any]
Encode = Callable[[Array], Array]  # a batch of normalized pixels or token ids to unit vectors
Tower = Literal["vision", "text"]
TOWERS: tuple[Tower, ...] = ("vision", "text")
BATCHES, CHUNK = (1, 3, 32), 32
SAMPLE = 64  # items that a copy of a verified graph is checked with
# An fp32 graph that is right differs by rounding only, about 1e-6. Quantized graphs are judged by their recall and, in
# case that is too low to show a loss, by the mean cosine. Where the recall of the model itself is not above chance, it
# shows nothing, and the minimum cosine has to.
MIN_COSINE = {"fp32": 0.9999, "fp16": 0.999, "int8": -1.0}
MIN_MEAN_COSINE, MIN_COSINE_WITHOUT_RECALL = 0.97, 0.95
SPEED_S, SPEED_ROUNDS = 0.2, 5  # of one timing, and timings per contestant
SLOW_S, SMALL_CHUNK = 0.03, 8  # an encoder that takes longer for one item is timed with smaller batches


class ExportFailed(RuntimeError):  # noqa: N818 - a sentence about the file, not about the program
    """A file does not compute what the model computes."""


@dataclass(frozen=True)
class Reference:
    """Images and captions with their embeddings by torch, which every exported file is compared with."""

    model: CLIP
    pairs: Split
    texts: list[str]  # distinct
    position_M: list[int]  # of each caption among them
    image_NE: Array
    text_KE: Array
    relevance: Relevance
    description: str
    is_generic: bool = False  # not images like those that the model was trained on

    @classmethod
    def encode(
        cls,
        model: CLIP,
        pairs: Split,
        description: str,
        progress: ProgressFactory = no_progress,
        is_generic: bool = False,
    ) -> "Reference":
        captions = [list(of_image) for of_image in pairs.all_captions()]
        texts, position_M = distinct_texts([text for of_image in captions for text in of_image])
        embedder = Embedder(model, progress)
        image_NE, text_KE = embedder.images(pairs).numpy(), embedder.texts(texts).numpy()
        relevance = Relevance.from_captions(captions)
        return cls(model, pairs, texts, position_M, image_NE, text_KE, relevance, description, is_generic)

    def first(self, images: int) -> "Reference":
        """The same for the first images and their captions alone."""
        if images >= len(self):
            return self
        captions = self.captions()[:images]
        texts, position_M = distinct_texts([text for of_image in captions for text in of_image])
        row_of = {text: row for row, text in enumerate(self.texts)}
        text_KE, relevance = self.text_KE[[row_of[text] for text in texts]], Relevance.from_captions(captions)
        image_NE, description = self.image_NE[:images], f"the first {images:,} of {self.description}"
        parts = (texts, position_M, image_NE, text_KE, relevance, description)
        return Reference(self.model, self.pairs, *parts)

    def __len__(self) -> int:
        return len(self.image_NE)

    def captions(self) -> list[list[str]]:
        """Of each image."""
        return [list(self.pairs.captions(row)) for row in range(len(self))]

    def expected(self, tower: Tower) -> Array:
        return self.image_NE if tower == "vision" else self.text_KE

    def images(self, start: int, stop: int) -> Array:
        """uint8 (B, H, W, C)"""
        return self.pairs.take(np.arange(start, min(stop, len(self))))[1]

    def inputs(self, tower: Tower, start: int, stop: int) -> Array:
        """Normalized pixels (B, C, H, W) or token ids (B, L)."""
        if tower == "text":
            return self.model.tokenize(self.texts[start:stop]).numpy()
        return self.model.normalize(torch.from_numpy(self.images(start, stop))).contiguous().numpy()

    @cached_property
    def recall(self) -> Retrieval:
        return self.retrieval(self.image_NE, self.text_KE)

    def retrieval(self, image_NE: Array, text_KE: Array) -> Retrieval:
        """Scores of other embeddings of the same images and texts."""
        text_ME = torch.from_numpy(np.ascontiguousarray(text_KE[self.position_M]))
        return retrieval(torch.from_numpy(np.ascontiguousarray(image_NE)), text_ME, self.relevance)

    @property
    def is_above_chance(self) -> bool:
        """Whether the model finds images and captions at all, so that a loss of recall means something."""
        low, _ = wilson_interval(self.recall.mean_r1, len(self))
        return low > 2 * self.recall.chance_r1


def distinct_texts(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The distinct texts in the order of their images, so that any sample has short and long ones, and their rows."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    return list(rows), [rows[text] for text in texts]


@dataclass(frozen=True)
class FileCheck:
    """What one encoder file computes, compared with torch on the same inputs."""

    file: str
    tower: Tower
    precision: str
    bytes: int
    min_cosine: float
    mean_cosine: float
    max_difference: float
    items: int
    cold_start_ms: float | None  # to load it and to encode the first item
    items_per_s: dict[int, float] | None = None  # by batch size
    torch_items_per_s: dict[int, float] | None = None
    checked_by: str = "onnxruntime"

    def record(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


def check_encoder(
    path: Path,
    name: str,
    tower: Tower,
    precision: str,
    load: Callable[[Path], Encode],
    reference: Reference,
    progress: ProgressFactory = no_progress,
    batches: Sequence[int] = BATCHES,
    limit: int | None = None,
) -> tuple[FileCheck, Array, Encode]:
    """Load a file, run it with batches of several sizes and on all items; its embeddings and the loaded encoder."""
    expected = reference.expected(tower)[:limit]
    started = time.perf_counter()
    encode = load(path)
    encode(reference.inputs(tower, 0, 1))
    cold_start_ms = 1e3 * (time.perf_counter() - started)
    lowest = 1.0
    for batch in batches:
        found, same = encode(repeated(reference.inputs(tower, 0, batch), batch)), repeated(expected[:batch], batch)
        require_like(found, same, f"{name}, batch {batch}")
        lowest = min(lowest, float(cosines(found, same).min()))
    found = encode_all(encode, tower, reference, len(expected), progress, f"checking {name}")
    require_like(found, expected, name)
    cosine_N = cosines(found, expected)
    size = (
        sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else graph_bytes(path)
    )
    difference = float(np.abs(found - expected).max())
    lowest, mean = min(lowest, float(cosine_N.min())), float(cosine_N.mean())
    check = FileCheck(name, tower, precision, size, lowest, mean, difference, len(found), cold_start_ms)
    return check, found, encode


def cosines(found: Array, expected: Array) -> Array:
    """Of each pair of rows; in fp16, unit vectors are not exactly of length 1."""
    lengths_N = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return (found.astype(np.float64) * expected).sum(1) / lengths_N


def check_joint(path: Path, reference: Reference, is_int8: bool) -> None:
    """Compare the logits of a graph of both encoders, for different numbers of images and texts."""
    session, (scale, bias) = OnnxSession(path).onnx, reference.model.scale_and_bias
    inputs = {"pixel_values": reference.inputs("vision", 0, 3), "input_ids": reference.inputs("text", 0, 5)}
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, inputs), strict=True))["logits_per_image"]
    cosine_BT = (found - (bias or 0.0)) / scale
    expected_BT = reference.image_NE[:3] @ reference.text_KE[:5].T
    if found.shape != expected_BT.shape or np.abs(cosine_BT - expected_BT).max() > (0.2 if is_int8 else 1e-4):
        raise ExportFailed(f"{path.name}: the logits differ from those of torch")


def require_any_length(paths: Sequence[Path]) -> None:
    for path in paths:
        length = OnnxSession(path).input.shape[1]
        if not isinstance(length, str):
            raise ExportFailed(
                f"{path.name} takes captions of {length} tokens only, and this product pads to the longest"
            )


def find_token_difference(path: Path, reference: Reference) -> str | None:
    """Why a tokenizer.json fails: it must give our tokens to all captions.

    They are compared without broken encodings, HTML entities and curly quotes: the tokenizers library cannot mend them.
    """
    model, texts = reference.model, list(map(clean_white_space, reference.texts))
    assert model.tokenizer is not None
    theirs = tokenizers.Tokenizer.from_file(str(path))
    length = model.config.text.context_length
    theirs.enable_truncation(length)
    ours = model.tokenizer.encode(texts, length)
    encoded = theirs.encode_batch(texts)
    different = [text for text, ids, found in zip(texts, ours, encoded, strict=True) if ids != found.ids]
    if not different:
        return None
    count = f"{len(different):,} of {len(texts):,} captions"
    return f"{path.name} does not give the tokens of the model to {count}, such as {different[0][:80]!r}"


def repeated(items: Array, count: int) -> Array:
    """`count` items, also of fewer."""
    return np.resize(items, (count, *items.shape[1:]))


def require_like(found: Array, expected: Array, name: str) -> None:
    if found.shape != expected.shape:
        raise ExportFailed(f"{name}: the output has shape {found.shape}, expected {expected.shape}")
    if not np.isfinite(found).all():
        raise ExportFailed(f"{name}: the embeddings are not finite")
    norms = np.linalg.norm(found, axis=1)
    if abs(norms - 1).max() > 1e-2:
        raise ExportFailed(f"{name}: the embeddings are not unit vectors ({norms.min():.3g} to {norms.max():.3g})")


def encode_all(
    encode: Encode, tower: Tower, reference: Reference, count: int, progress: ProgressFactory, label: str
) -> Array:
    """Embeddings of the first `count` items."""
    parts = list[Array]()
    with progress(label, count) as advance:
        for start in range(0, count, CHUNK):
            parts.append(encode(reference.inputs(tower, start, min(count, start + CHUNK))))
            advance(len(parts[-1]))
    return np.concatenate(parts)


def find_difference(check: FileCheck, reference: Reference) -> str | None:
    """Why a file fails by its cosine alone; None if it does not."""
    lowest = MIN_COSINE[check.precision]
    lowest = lowest if reference.is_above_chance else max(lowest, MIN_COSINE_WITHOUT_RECALL)
    if check.min_cosine < lowest:
        return f"{check.file}: the minimum cosine to torch is {check.min_cosine:.4f}, below {lowest}"
    if check.mean_cosine < MIN_MEAN_COSINE:
        return f"{check.file}: the mean cosine to torch is {check.mean_cosine:.4f}, below {MIN_MEAN_COSINE}"
    return None


def find_loss(after: Retrieval, reference: Reference, max_loss: float) -> str | None:
    """Why a pair of encoders fails by its recall; None if it does not, or if recall says nothing about this model."""
    before = reference.recall
    loss = 100 * (before.mean_r1 - after.mean_r1)
    one_query = 100 / (2 * len(reference))  # of few images, one that is lost is more than any sensible limit
    if loss <= max(max_loss, one_query) + 1e-9 or not reference.is_above_chance:
        return None
    values = f"{percent(before.mean_r1)} → {percent(after.mean_r1)}"
    return f"R@1 falls from {values}, more than --max-loss {max_loss:g} points"


def compare_speed(encoders: dict[str, Encode], tower: Tower, reference: Reference) -> dict[str, dict[int, float]]:
    """Items per second by contestant and batch size: alternating, the median of several timings."""
    speeds: dict[str, dict[int, float]] = {name: {} for name in encoders}
    single = reference.inputs(tower, 0, 1)
    slowest = max(timed(encode, single, 2) for encode in encoders.values())
    for batch in (1, CHUNK if slowest < SLOW_S else SMALL_CHUNK):
        inputs = repeated(reference.inputs(tower, 0, batch), batch)
        samples: dict[str, list[float]] = {name: [] for name in encoders}
        repeats = {name: max(1, round(SPEED_S / timed(encode, inputs, 2))) for name, encode in encoders.items()}
        for _ in range(SPEED_ROUNDS):
            for name, encode in encoders.items():
                samples[name].append(timed(encode, inputs, repeats[name]))
        for name in encoders:
            speeds[name][batch] = batch / median(samples[name])
    return speeds


def timed(encode: Encode, inputs: Array, repeats: int) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    for _ in range(repeats):
        encode(inputs)
    return (time.perf_counter() - started) / repeats


def torch_encoder(model: CLIP, tower: Tower) -> Encode:
    """The model as it is without an export: eager PyTorch on the CPU."""
    embed = model.embed_images if tower == "vision" else model.embed_tokens

    @torch.inference_mode()
    def encode(batch: Array) -> Array:
        return embed(torch.from_numpy(batch)).numpy()

    return encode


def load_session(path: Path, pad_id: int = 0, width: int | None = None) -> Encode:
    """An ONNX file as a function, with the options that a shipped model runs with; its batch must be symbolic.

    Of embeddings that are padded with zeros, only `width` numbers are returned.
    """
    try:
        session = OnnxSession(path)
        node = session.input
    except Exception as error:  # its errors have no common class
        raise ExportFailed(f"{path.name} cannot be loaded: {short_error(error)[:200]}") from None
    if not isinstance(node.shape[0], str):
        raise ExportFailed(f"{path.name} has a fixed batch of {node.shape[0]}")
    length = node.shape[1] if len(node.shape) == 2 and isinstance(node.shape[1], int) else 0

    def encode(batch: Array) -> Array:
        if length > batch.shape[1]:
            batch = np.pad(batch, ((0, 0), (0, length - batch.shape[1])), constant_values=pad_id)
        try:
            found_BE = session.run(batch)
        except Exception as error:
            raise ExportFailed(f"{path.name} fails with a batch of {len(batch)}: {short_error(error)[:200]}") from None
        if width and found_BE[:, width:].any():
            raise ExportFailed(f"{path.name}: the embeddings are longer than {width}, and not filled with zeros")
        return found_BE[:, :width]

    return encode
