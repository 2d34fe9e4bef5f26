"""A folder of images with all that a search page has to cope with, and a tiny model that has indexed it."""

import io
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import QuietConsole
from m1clip.calibration import SEARCH_REFERENCE, Calibration, find_peak, read_reference, write_reference
from m1clip.export.export import file_record
from m1clip.onnx_model import load_onnx
from m1clip.search.index import Index, index_of
from m1clip.search.query import Library
from m1clip.search.scan import existing_folder
from m1clip.search.shared import SharedLibrary
from m1clip.search.update import update_index
from photos import jpeg, write_photos

NOON, NOON_2019 = " 12:00:00", 1_577_016_000  # the second one of 22 December, UTC
ROTATE_90 = 6  # EXIF orientation of a camera that was held upright


def with_exif(number: int, size: tuple[int, int], day: str, orientation: int = 1) -> bytes:
    """A scene as a JPEG that was taken at noon of a day such as 2024:05:17."""
    exif, file = Image.Exif(), io.BytesIO()
    exif.get_ifd(0x8769)[0x9003], exif[0x0112] = day + NOON, orientation
    Image.open(io.BytesIO(jpeg(number, 96))).resize(size).save(file, "JPEG", exif=exif)
    return file.getvalue()


def write_library(folder: Path) -> Path:
    """24 images: 20 in two folders, of two years; one with a copy, a turned one, a TIFF, and one with an odd name."""
    for number in range(20):
        path = folder / ("cats" if number % 2 else "dogs/big") / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(with_exif(number, (64, 48), f"{2023 + number // 10}:05:{number + 1:02d}"))
    write_photos(folder, 1, start=30)
    shutil.copy(folder / "0030.jpg", folder / "cats" / "copy.jpg")
    (folder / "turned.jpg").write_bytes(with_exif(31, (64, 48), "2020:01:01", ROTATE_90))
    Image.open(io.BytesIO(jpeg(32))).save(folder / "scan.tiff")
    (folder / "<img src=x onerror=alert(1)>.jpg").write_bytes(jpeg(33))
    for number, path in enumerate(sorted(folder.rglob("*.*"))):
        os.utime(path, (NOON_2019 + number, NOON_2019 + number))
    return folder


def add_odd_name(folder: Path, number: int = 34) -> Path | None:
    """A name that is not UTF-8, where the file system allows it."""
    with suppress(OSError):
        path = os.fsencode(folder) + b"/\xff\xfe.jpg"
        Path(os.fsdecode(path)).write_bytes(jpeg(number))
        return Path(os.fsdecode(path))
    return None


def build_index(model: Path, folder: Path) -> tuple[Index, Path]:
    """The index in the cache, and the folder by its own name."""
    loaded, folder = load_onnx(model), existing_folder(folder)
    index = index_of(loaded)
    with index.locked(wait=True):
        update_index(index, folder, loaded, QuietConsole(), workers=1)
    return index, folder


def open_shared(model: Path, folder: Path, **options) -> SharedLibrary:
    index, folder = build_index(model, folder)
    return SharedLibrary(load_onnx(model), index, folder, **options)


def open_plain(model: Path, folder: Path) -> Library:
    return Library(*build_index(model, folder))


def calibrate_between(source: Path, library: Library, texts: Sequence[str], folder: Path) -> tuple[str, str]:
    """A copy of a model with a rule by which the library has nothing like the first of two texts; both are returned."""
    shutil.copytree(source, folder)
    model = load_onnx(source)
    image_NE = np.random.default_rng(0).standard_normal((200, model.config.embed_dim)).astype(np.float32)
    write_reference(folder / SEARCH_REFERENCE, image_NE / np.linalg.norm(image_NE, axis=1, keepdims=True))
    reference_RE, ratio = read_reference(folder / SEARCH_REFERENCE, model.config.embed_dim), dict[str, float]()
    for text in texts:
        text_E = model.encode_text(text)[0]
        score_N, peak = library.scores(text_E), find_peak(text_E, reference_RE)
        ratio[text] = float(score_N.max() - min(score_N.mean(), peak.mean)) / peak.height
    low, *_, high = sorted(ratio, key=lambda text: ratio[text])
    rule = Calibration((ratio[low] + ratio[high]) / 2, 1.0, 0.95, 0.5, 100, 200)
    export = json.loads((folder / "export.json").read_text())
    export |= {"calibration": rule.record()}
    export["files"][SEARCH_REFERENCE] = file_record(folder / SEARCH_REFERENCE)
    (folder / "export.json").write_text(json.dumps(export))
    return low, high
