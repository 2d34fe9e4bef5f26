"""A search page as a folder that any web server can host: vectors, thumbnails, and a text encoder for the browser.

Shapes: N images, F files, E embedding.
"""

import contextlib
import gzip
import io
import json
import logging
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import m1clip
from m1clip.config import require
from m1clip.console import Console
from m1clip.decode import BadImage
from m1clip.errors import short_error
from m1clip.files import atomic_folder, read_json
from m1clip.format import file_size, plural
from m1clip.model.tokenizer import HFTokenizer
from m1clip.onnx_model import EXPORT, OnnxCLIP, OnnxGraph
from m1clip.search.browser_runtime import BrowserRuntime, browser_runtime
from m1clip.search.catalog import Catalog
from m1clip.search.index import Floats
from m1clip.search.query import Library, best_first, unknown_ids
from m1clip.search.shared import describe_library, version_of
from m1clip.search.thumbnails import is_unchanged, make_thumbnail, read_unchanged
from m1clip.workers import usable_cores

FORMAT, SETTINGS = 1, "settings.json"
PACKAGE = Path(__file__).parent.parent
PAGES = (PACKAGE / "web" / "page", PACKAGE / "search" / "page", PACKAGE / "search" / "static_page")  # later ones win
TEXT_MODEL, RUNTIME = "text_model.onnx", ("ort.js", "ort.wasm.gz", "tokenizers.js")
SIZE = 512  # of thumbnails; larger than those of the server, because the full-screen view shows them, too
MATRICES = ("MatMul", "Gemm", "Gather")  # what is INT8; see export/quantize.py
MIN_COSINE = 0.99  # of the INT8 text encoder
TEXTS = (
    *("a dog", "two people", "a red car in the street", "food", "a bicycle", "the sea", "a cat on a sofa", "snow"),
    *("a plate with vegetables and meat on a wooden table", "a man and a woman who smile into the camera"),
    *("a black and white photo", "a building at night", "children play in a park", "a bird in the sky", "flowers", "x"),
)
TOP_K = 10


def check_static(out: Path, overwrite: bool, library: Path, console: Console) -> None:
    """Whether a page can be written there, and what it runs in the browser is here; else an error."""
    check_target(out.expanduser().absolute(), overwrite, library)
    browser_runtime(console)


def write_static(model: OnnxCLIP, library: Library, out: Path, overwrite: bool, console: Console) -> None:
    """Write the page; it is complete or absent."""
    out = out.expanduser().absolute()
    check_target(out, overwrite, library.folder)
    runtime, catalog = browser_runtime(console), Catalog(library)
    with atomic_folder(out) as folder:
        copy_page(folder, runtime)
        precision = write_text_encoder(model, folder, console)
        images = write_thumbnails(catalog, folder, out, console)
        require(bool(images), f"all images of {library.folder} are gone or have changed: search without --no-update")
        write_vectors(vectors_of(catalog, images), folder / "vectors.bin")
        if model.reference_RE is not None:
            write_vectors(model.reference_RE, folder / "reference.bin")
        write_items(catalog, images, folder / "items.json")
        (folder / SETTINGS).write_text(json.dumps(page_settings(model, catalog, images, folder), indent=2))
        share = verify_static(model, catalog, images, folder)
    report_static(out, precision, len(images), share, console)


def check_target(out: Path, overwrite: bool, library: Path) -> None:
    if out.resolve().is_relative_to(library):
        raise ValueError(f"--static {out} is inside of {library}: later searches would find its thumbnails")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not is_static(out):
        raise FileExistsError(f"{out} exists, and is not a page of m1clip search --static: choose another folder")
    if not overwrite:
        raise FileExistsError(f"{out} exists; --overwrite replaces it")


def is_static(folder: Path) -> bool:
    return (folder / SETTINGS).is_file() and "static_format" in read_json(folder / SETTINGS)


def copy_page(folder: Path, runtime: BrowserRuntime) -> None:
    """The page of the server, with another source.js, and what that imports."""
    for page in PAGES:
        for file in page.iterdir():
            shutil.copyfile(file, folder / file.name)
    (folder / "ort.js").write_bytes(runtime.ort_js)
    # Smaller on the disk and on the way, on any host: 3.7 MB instead of 14.2. The page unpacks it.
    (folder / "ort.wasm.gz").write_bytes(gzip.compress(runtime.ort_wasm, mtime=0))
    (folder / "tokenizers.js").write_bytes(runtime.tokenizers_js)
    (folder / "LICENSES.txt").write_text(runtime.licenses)


# The text encoder


def write_text_encoder(model: OnnxCLIP, folder: Path, console: Console) -> str:
    """As INT8 if that works, else as it is, with its tokenizer. Returns the precision."""
    tokenizer, target = model.tokenizer, folder / TEXT_MODEL
    state = json.loads(tokenizer.core.to_str()) if isinstance(tokenizer, HFTokenizer) else tokenizer.to_clip_json()
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")
    precision = recorded_precision(model)
    if precision == "fp32":
        problem = quantize_text(model, target)
        if not problem:
            return "int8"
        console.warn(f"the text encoder is fp32, four times as large as INT8: {problem}")
    if len(model.text.files) > 1:
        raise ValueError(f"{model.text.path} has its weights in a second file: it is too large for a browser")
    shutil.copyfile(model.text.path, target)
    return precision


def recorded_precision(model: OnnxCLIP) -> str:
    """Of the text encoder, as export.json says it."""
    checks = read_json(model.folder / EXPORT).get("checks")
    found = [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    return next((str(one.get("precision")) for one in found if one.get("file") == model.text.path.name), "fp32")


def quantize_text(model: OnnxCLIP, target: Path) -> str | None:
    """Write the text encoder with INT8 matrices and embeddings; returns why that cannot be used."""
    if find_spec("onnx") is None:
        return "pip install 'm1clip[export]'"
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    options: dict[str, Any] = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    try:
        graph = onnx.load(model.text.path)
        del graph.graph.value_info[:]  # shapes of the exporter that contradict those that onnx infers
        with quiet_quantization():
            quantize_dynamic(graph, target, op_types_to_quantize=list(MATRICES), **options)
        cosine = min(compare_texts(model, target))
    except Exception as error:  # neither the quantizer's nor the runtime's errors have a common class
        return short_error(error)
    return None if cosine >= MIN_COSINE else f"its minimum cosine to fp32 is {cosine:.4f}, {MIN_COSINE} is required"


@contextlib.contextmanager
def quiet_quantization() -> Iterator[None]:
    """Its advice on preprocessing goes to the root logger, and to standard output."""
    level = logging.getLogger().level
    try:
        logging.getLogger().setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.getLogger().setLevel(level)


def with_text_encoder(model: OnnxCLIP, path: Path) -> OnnxCLIP:
    """The same model with another file of its text encoder."""
    other = copy(model)
    other.text = OnnxGraph(path.parent, path.name, {}, model.text.shape, model.text.width, model.text.threads)
    return other


def encode_each(model: OnnxCLIP) -> Floats:
    """Vectors of TEXTS, one by one as in the browser: INT8 ranges depend on the batch and its padding."""
    return np.stack([model.encode_text(text)[0] for text in TEXTS])


def compare_texts(model: OnnxCLIP, path: Path) -> list[float]:
    """Cosines of an encoder's vectors to those of the model."""
    ours, theirs = encode_each(model), encode_each(with_text_encoder(model, path))
    cosines: list[float] = ((ours * theirs).sum(1) / np.linalg.norm(theirs, axis=1)).tolist()
    return cosines


# Data


def write_thumbnails(catalog: Catalog, folder: Path, earlier: Path, console: Console) -> list[int]:
    """One file for each image, named by its content, so that an export to the same host changes few files.

    Returns the positions of the images that have one: others are gone or have changed since they were indexed.
    """
    positions, pool = range(len(catalog)), ThreadPoolExecutor(usable_cores())
    reusable = earlier if is_static(earlier) and read_json(earlier / SETTINGS).get("thumbnail_size") == SIZE else None
    for first in {version_of(content)[:2] for content in catalog.contents}:
        (folder / "thumbnails" / first).mkdir(parents=True)
    try:
        with console.progress("thumbnails", len(positions), "images/s") as advance:
            written = list[bool]()
            for is_written in pool.map(partial(write_thumbnail, catalog, folder, reusable), positions):
                written.append(is_written)
                advance(1)
    finally:
        pool.shutdown(cancel_futures=True)
    if missing := written.count(False):
        console.warn(f"{plural(missing, 'image')} left out: gone, changed or unreadable since they were indexed")
    return [position for position in positions if written[position]]


def write_thumbnail(catalog: Catalog, folder: Path, reusable: Path | None, position: int) -> bool:
    content = catalog.contents[position]
    name = thumbnail_name(version_of(content))
    for file in catalog.files(position):
        path = catalog.path(file)
        is_same = reusable and is_unchanged(path, catalog.sizes[file], catalog.mtimes_ns[file])
        if reusable and is_same and (reusable / name).is_file():
            shutil.copyfile(reusable / name, folder / name)
            return True
        data = read_unchanged(path, content)
        with suppress(BadImage):
            if data is not None:
                (folder / name).write_bytes(make_thumbnail(path, data, SIZE))
                return True
    return False


def thumbnail_name(version: str) -> str:
    return f"thumbnails/{version[:2]}/{version}.jpg"


def quantize_vectors(vectors_NE: Floats) -> tuple[Floats, NDArray[np.int8]]:
    """Scales (N,) and int8 vectors: a quarter of the size, and the same order of all but near ties."""
    scale_N = np.abs(vectors_NE).max(1) / 127
    return scale_N, np.rint(vectors_NE / np.maximum(scale_N, 1e-12)[:, None]).astype(np.int8)


def vectors_of(catalog: Catalog, images: Sequence[int]) -> Floats:
    library = catalog.library
    return np.asarray(library.vectors_RE[library.rows_N[list(images)]])


def write_vectors(vectors_NE: Floats, path: Path) -> None:
    """Scales (N,) in float32, then int8 vectors (N, E)."""
    scale_N, int8_NE = quantize_vectors(vectors_NE)
    path.write_bytes(scale_N.tobytes() + int8_NE.tobytes())


def write_items(catalog: Catalog, images: Sequence[int], path: Path) -> None:
    """Columns of files, and of the images that they show."""
    files = [(image, file) for image, position in enumerate(images) for file in catalog.files(position)]
    columns = {
        "images": [image for image, _ in files],
        "names": [catalog.name(file) for _, file in files],
        "dates": [round(catalog.date_F[file]) for _, file in files],
        "bytes": [catalog.sizes[file] for _, file in files],
        "versions": [version_of(catalog.contents[position]) for position in images],
        "widths": [catalog.shapes[position][0] for position in images],
        "heights": [catalog.shapes[position][1] for position in images],
    }
    path.write_text(json.dumps(columns, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")


def page_settings(model: OnnxCLIP, catalog: Catalog, images: Sequence[int], folder: Path) -> dict[str, Any]:
    tokenizer, calibration = model.tokenizer.settings, model.calibration
    is_clip = not isinstance(model.tokenizer, HFTokenizer)
    text = {
        "file": TEXT_MODEL,
        "download_bytes": sum((folder / name).stat().st_size for name in (*RUNTIME, TEXT_MODEL, "tokenizer.json")),
        "type": model.text.session().input.type,
        "context_length": model.config.text.context_length,
        "fixed_length": model.text.length or (model.config.text.context_length if tokenizer.fixed_length else None),
        "pad_id": tokenizer.pad_id,
        "pad_left": tokenizer.pad_left,
        "clean": "lower" if is_clip else tokenizer.clean,
        "zeroed_id": None if is_clip else tokenizer.zeroed_id,
        "unknown_ids": sorted(unknown_ids(model)),
    }
    return {
        "static_format": FORMAT,
        "created_by": f"m1clip {m1clip.__version__}",
        "library": asdict(replace(describe_library(catalog, model), images=len(images))),
        "embed_dim": model.config.embed_dim,
        "thumbnail_size": SIZE,
        "text": text,
        "calibration": calibration.record() if calibration and model.reference_RE is not None else None,
    }


def verify_static(model: OnnxCLIP, catalog: Catalog, images: Sequence[int], folder: Path) -> float:
    """Search with the files that were written; returns which share of the best images is that of the model."""
    count, width = len(images), model.config.embed_dim
    data, head = (folder / "vectors.bin").read_bytes(), 4 * len(images)
    scale_N = np.frombuffer(data, np.float32, count)
    int8_NE = np.frombuffer(data, np.int8, count * width, head).reshape(count, width)
    shipped = with_text_encoder(model, folder / TEXT_MODEL)
    shares, vectors_NE = list[float](), vectors_of(catalog, images)
    for ours_E, theirs_E in zip(encode_each(model), encode_each(shipped), strict=True):
        best = {*best_first(vectors_NE @ ours_E, TOP_K).tolist()}
        found = {*best_first((int8_NE @ theirs_E) * scale_N, TOP_K).tolist()}
        shares.append(len(best & found) / len(best))
    return float(np.mean(shares))


def report_static(out: Path, precision: str, images: int, share: float, console: Console) -> None:
    total = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    first = sum((out / name).stat().st_size for name in (*RUNTIME, TEXT_MODEL, "vectors.bin", "items.json"))
    sizes = f"{file_size(total)}, of which a browser loads {file_size(first)} before the first answer"
    console.print_fact("page", f"{plural(images, 'image')} in {out}: {sizes}")
    console.print_fact(
        "verified", f"{precision} text encoder and int8 vectors find {share:.0%} of the same {TOP_K} best"
    )
    console.print_fact("try it", f"python3 -m http.server -d {shlex.quote(str(out))}")
