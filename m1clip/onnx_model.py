"""A CLIP that was exported to ONNX: the methods of CLIP with NumPy arrays. No torch.

Shapes: B items, L tokens, C colors, H W pixels, E embedding.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.calibration import SEARCH_REFERENCE, find_peak, read_calibration, read_reference
from m1clip.config import ModelConfig, from_json
from m1clip.errors import untrusted_input
from m1clip.files import open_regular, read_json
from m1clip.images import Pixels
from m1clip.model.classify import Classification, Floats, classify
from m1clip.model.inputs import ImageInput, encode_images, encode_texts
from m1clip.model.tokenizer import TokenArray, Tokenizer, load_tokenizer
from m1clip.workers import usable_cores

EXPORT = "export.json"
AGAIN = "export it again"
SMALL_GRAPH, SMALL_BATCH = 8_000_000, 4  # bytes and items
DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


class OnnxGraph:
    """One encoder of an export. Its files are verified and loaded when it is first run.

    `shape` is that of its input, with None where any size is accepted.
    """

    def __init__(
        self, folder: Path, name: str, files: Mapping[str, Any], shape: tuple[int | None, ...], width: int, threads: int
    ):
        self.path, self.shape, self.width, self.threads = folder / name, shape, width, threads
        # Beside the graph itself, weights that do not fit into it: vision_model.onnx.data.
        self.files = {folder / file: files[file] for file in files if file.startswith(name)}
        self._session: OnnxSession | None = None
        self._loading = Lock()

    def session(self, batch: int = 1) -> "OnnxSession":
        """Loaded for a first batch of this size."""
        with self._loading:  # or two threads would load it twice
            self._session = self._session or self._load(batch)
            return self._session

    def unload(self) -> None:
        """Free its memory; it is loaded again when it is run."""
        with self._loading:
            self._session = None

    def check_files(self) -> None:
        for path, record in self.files.items():
            check_file(path, record)

    def _load(self, batch: int) -> "OnnxSession":
        self.check_files()
        with untrusted_input(f"{self.path} cannot be loaded, {AGAIN}"):
            session = OnnxSession(self.path, self.threads, batch)
            inputs = session.onnx.get_inputs()
        shape = inputs[0].shape if len(inputs) == 1 and inputs[0].type in DTYPES else []
        sizes = zip(shape, self.shape, strict=False)
        if len(shape) != len(self.shape) or any(isinstance(a, int) and b and a != b for a, b in sizes):
            found = ", ".join(f"{one.name} {one.type} {one.shape}" for one in inputs)
            raise ValueError(f"{self.path} does not fit config.json: its input is {found}; {AGAIN}")
        return session

    @property
    def length(self) -> int | None:
        """The only number of tokens that it accepts; None if it accepts any."""
        length = self.session().input.shape[1]
        return length if isinstance(length, int) else None

    def __call__(self, batch: NDArray[Any]) -> Floats:
        session = self.session(len(batch))
        with untrusted_input(f"{self.path} cannot be run, {AGAIN}"):
            values = np.asarray(session.run(batch), np.float32)
        if values.shape != (len(batch), self.width):
            expected = f"({len(batch)}, {self.width})"
            raise ValueError(f"{self.path} does not fit config.json: its output is {values.shape}, not {expected}")
        return values


class OnnxCLIP:
    def __init__(
        self, folder: Path, config: ModelConfig, tokenizer: Tokenizer, export: Mapping[str, Any], threads: int
    ):
        self.folder, self.config, self.tokenizer = folder, config, tokenizer
        size, width, files = config.vision.image_size, config.embed_dim, export["files"]
        self.vision = OnnxGraph(folder, export["vision"], files, (None, 3, size, size), width, threads)
        self.text = OnnxGraph(folder, export["text"], files, (None, None), width, threads)
        colors = (np.array(color, np.float32).reshape(3, 1, 1) for color in (config.vision.mean, config.vision.std))
        self.mean_C11, self.std_C11 = (np.float32(255) * color_C11 for color_C11 in colors)  # in units of bytes
        # Of what image embeddings depend on: weights that do not fit into the graph are in a file of their own.
        self.vision_key = "".join(str(files[path.name].get("sha256", "")) for path in self.vision.files)
        self.calibration = read_calibration(export.get("calibration"))  # of search
        self.reference_file: Mapping[str, Any] = files.get(SEARCH_REFERENCE) or {}
        self.scale_and_bias: tuple[float, float | None] = export["logit_scale"], export.get("logit_bias")

    def check_files(self) -> None:
        """Verify the encoders before they are used."""
        for graph in (self.vision, self.text):
            graph.check_files()

    def embed_pixels(self, images_BHWC: Pixels) -> Floats:
        """Unit vectors of preprocessed images."""
        pixels_BCHW = images_BHWC.transpose(0, 3, 1, 2).astype(np.float32, order="C")
        pixels_BCHW -= self.mean_C11
        pixels_BCHW /= self.std_C11
        return self.vision(pixels_BCHW)

    def embed_texts(self, texts: list[str]) -> Floats:
        return self.embed_ids(self.tokenizer.encode(texts, self.config.text.context_length))

    def embed_ids(self, ids: Sequence[Sequence[int]]) -> Floats:
        """Unit vectors of token ids, which include those of start and end, and fit the context length."""
        settings = self.tokenizer.settings
        # Not to the lengths of MPS: of 12 tokens, the 4 to 16 would take a quarter of the time.
        length = self.config.text.context_length if settings.fixed_length else max(map(len, ids), default=0)
        tokens_BL = self.tokenizer.pad(ids, length)
        missing = (self.text.length or 0) - tokens_BL.shape[1]
        if missing > 0:
            padding = (missing, 0) if settings.pad_left else (0, missing)
            tokens_BL = np.pad(tokens_BL, ((0, 0), padding), constant_values=settings.pad_id)
        return self.text(tokens_BL)

    def encode_image(
        self, images: ImageInput | Iterable[ImageInput], batch_size: int = 32, progress: bool = False
    ) -> Floats:
        """Unit vectors (B, E) of images of any size, which are given as in CLIP.encode_image."""
        parts = encode_images(images, self.embed_pixels, self.config.vision.preprocess, batch_size, progress)
        return np.concatenate([self._empty_0E, *parts])

    def encode_text(self, texts: str | Iterable[str], batch_size: int = 256, progress: bool = False) -> Floats:
        """Unit vectors (B, E) of texts, which are given as in CLIP.encode_text."""
        parts, rows = encode_texts(texts, self.embed_texts, batch_size, progress)
        return np.concatenate([self._empty_0E, *parts])[rows]

    @property
    def _empty_0E(self) -> Floats:
        return np.empty((0, self.config.embed_dim), np.float32)

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> Floats:
        """Cosine similarities (B, T) of images, in rows, and texts."""
        return self.encode_image(images) @ self.encode_text(texts).T

    def classify(
        self,
        images: ImageInput | Iterable[ImageInput],
        labels: str | Sequence[str] | Mapping[str, Sequence[str]],
        templates: str | Sequence[str] = (),
        top_k: int = 5,
        batch_size: int = 32,
    ) -> list[Classification]:
        """Zero-shot classification with the arguments of CLIP.classify."""
        return classify(self, images, labels, templates, top_k, batch_size)

    @cached_property
    def reference_RE(self) -> Floats | None:
        """Embeddings of validation images; None if the model has no rule for "nothing like it"."""
        if self.calibration is None or not self.calibration.has_rule:
            return None
        path = self.folder / SEARCH_REFERENCE
        check_file(path, self.reference_file)
        with untrusted_input(f"{path} cannot be loaded, {AGAIN}"):
            return read_reference(path, self.config.embed_dim)

    def is_nothing(self, text_E: Floats, best: float, mean: float) -> bool:
        """Whether a library has nothing like a text, by its best cosine and the mean of all."""
        if self.calibration is None or self.reference_RE is None:
            return False
        return self.calibration.is_nothing(find_peak(text_E, self.reference_RE), best, mean)

    def tokenize(self, texts: str | Iterable[str]) -> TokenArray:
        """Token ids (B, L)."""
        return self.tokenizer([texts] if isinstance(texts, str) else list(texts), self.config.text.context_length)


def is_onnx(folder: Path) -> bool:
    """Whether a folder is a model exported to ONNX."""
    return (folder / EXPORT).is_file() and read_json(folder / EXPORT).get("format") == "onnx"


def load_onnx(folder: Path, threads: int | None = None) -> OnnxCLIP:
    """Load a folder that `m1clip export` wrote; each encoder is read when it is first used.

    `threads` of a large batch: by default as many as there are cores.
    """
    export = check_export(folder / EXPORT, read_json(folder / EXPORT))
    for name in ("config.json", "tokenizer.json"):
        check_file(folder / name, export["files"].get(name) or {})
    config = from_json(ModelConfig, folder / "config.json")
    tokenizer = load_tokenizer(config, folder / "tokenizer.json")
    return OnnxCLIP(folder, config, tokenizer, export, threads or usable_cores())


def check_export(path: Path, export: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is read from an export.json; anybody may have written it."""

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and abs(value) < 1e6

    files = export.get("files")
    names = [export.get("vision"), export.get("text"), *(files if isinstance(files, dict) else ())]
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name in (".", ".."):
            raise ValueError(f"{path} is damaged: {name!r} is not the name of a file in its folder; {AGAIN}")
        if not isinstance(files, dict) or not isinstance(files.get(name), dict):
            raise ValueError(f"{path} is damaged: it has no checksum of {name}; {AGAIN}")
    scale, bias = export.get("logit_scale"), export.get("logit_bias")
    if not is_number(scale) or not (bias is None or is_number(bias)):
        raise ValueError(f"{path} is damaged: its logit_scale or logit_bias is not a number; {AGAIN}")
    return export


def check_file(path: Path, record: Mapping[str, Any]) -> None:
    """Compare a file with its size and SHA-256 in export.json."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != record.get("bytes"):
                raise ValueError(
                    f"{path} is damaged: it has {size:,} bytes, not {str(record.get('bytes'))[:20]}; {AGAIN}"
                )
            if hashlib.file_digest(file, "sha256").hexdigest() != record.get("sha256"):
                raise ValueError(f"{path} is damaged: its content does not match {EXPORT}; {AGAIN}")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: {AGAIN}") from None


class OnnxSession:
    """A graph of one input, in onnxruntime.

    Threads inside of an operation wait for each other. So a batch is split into parts that run beside each other, on
    one thread each (2 cores, 32 images of 64 px: 0.33 instead of 0.52 ms an image). Only a large graph whose first
    batch has fewer items than there are threads runs on all of them: it is loaded once.
    """

    def __init__(self, path: Path, threads: int | None = None, batch: int = 1):
        self.threads = threads or usable_cores()
        self.is_split = self.threads > 1 and (graph_bytes(path) < SMALL_GRAPH or batch >= self.threads)
        self.onnx = make_session(path, 1 if self.is_split else self.threads)

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.threads)

    @property
    def input(self) -> Any:
        return self.onnx.get_inputs()[0]

    def run(self, batch: NDArray[Any]) -> NDArray[Any]:
        """The first output."""
        output, declared = self.onnx.get_outputs()[0].name, self.input
        batch = np.ascontiguousarray(batch, DTYPES[declared.type])
        size = max(1, len(batch))
        if self.is_split and len(batch) > SMALL_BATCH:
            size = -(-len(batch) // (2 * self.threads))  # two for each thread, because not all are equally fast
        parts = [batch[start : start + size] for start in range(0, len(batch), size)]
        if len(parts) < 2:
            return np.asarray(self.onnx.run([output], {declared.name: batch})[0])
        return np.concatenate([*self.pool.map(lambda part: self.onnx.run([output], {declared.name: part})[0], parts)])


def graph_bytes(path: Path) -> int:
    """The size of a graph with its weights, which are in a second file if they are large."""
    return sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}.data")) if file.exists())


def make_session(path: Path, threads: int) -> Any:
    import onnxruntime  # slow to import, and most models of a process are not ONNX

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Threads that wait by spinning take the cores of others: under load, 40 queries took 90 s.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # its errors are raised, too
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
