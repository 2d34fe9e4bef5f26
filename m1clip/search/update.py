"""Bring the index of a folder up to date: read what is new or changed, forget what is gone.

Worker processes read and decode files, this one encodes images. Every second what is done is committed, so an update
that is killed goes on where it stopped.
"""

import hashlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from PIL import Image

from m1clip.config import Preprocess
from m1clip.console import Console
from m1clip.decode import (
    DECODE_ERRORS,
    MAX_BYTES,
    RAW_SUFFIX,
    BadImage,
    decode,
    decode_raw,
    quiet_pillow,
    read_header,
    supports_heic,
    supports_raw,
)
from m1clip.files import open_regular
from m1clip.images import Pixels, preprocess
from m1clip.onnx_model import OnnxCLIP
from m1clip.perceptual_hash import HASH, perceptual_hash
from m1clip.search.index import FileRecord, Floats, ImageFacts, Index
from m1clip.search.scan import Found, Version, scan_folder
from m1clip.workers import WorkerDied, WorkerPool, usable_cores

DECODE_SCALE = 2  # large JPEGs are decoded at this multiple of the image size or more
FILES_PER_TASK = 8
BATCH, COMMIT_S = 16, 1.0  # ViT-B/32 in INT8: 22 ms CPU an image and 362 MB; batches of 32 take 24 ms and 456 MB
EXIF_IFD, TAKEN = 0x8769, 0x9003  # DateTimeOriginal
TOO_LARGE = f"it has {{:,.0f}} MB; files of more than {MAX_BYTES / 1e6:,.0f} MB are not read"
UNREADABLE, CRASH = "cannot be read", "crash"  # kinds of bad files, beside those of BadImage


class ReadFile(NamedTuple):
    """What is in a file: a new image, a known one, or the reason why it is none."""

    path: bytes
    version: Version
    content: bytes = b""  # hash of its bytes
    facts: ImageFacts | None = None  # of a new image
    pixels: Pixels | None = None
    kind: str | None = None  # of a bad file
    reason: str | None = None


Read = Callable[[Sequence[bytes]], list[ReadFile | None]]


@dataclass
class Changes:
    """What an update did, in files."""

    added: int = 0  # new content, which was encoded
    known: int = 0  # moved, copied or touched: their content was in the index
    removed: int = 0
    vanished: int = 0  # removed or changed while they were read
    bad: dict[str, str] = field(default_factory=dict)  # new bad files with their reasons
    found: Found = field(default_factory=Found)


def scan_images(folder: Path, exclude: Sequence[str] = (), follow_links: bool = False) -> Found:
    """The image files of a folder, which must have some."""
    found = scan_folder(folder, exclude, follow_links)
    if reason := found.unreadable.get(os.fsencode(folder)):
        raise OSError(f"{folder} cannot be read: {reason}")
    if not found.files:
        hint = f" ({found.placeholders:,} are only in iCloud)" if found.placeholders else ""
        raise ValueError(f"{folder} has no images{hint or (' that are not excluded' if exclude else '')}")
    return found


def update_index(
    index: Index,
    folder: Path,
    model: OnnxCLIP,
    console: Console,
    exclude: Sequence[str] = (),
    follow_links: bool = False,
    workers: int = 0,
) -> Changes:
    """Index all images below a folder. The index must be locked."""
    found = scan_images(folder, exclude, follow_links)
    known, changes = index.files_below(folder), Changes(found=found)
    gone = [path for path in known if path not in found.files and not is_below_any(path, found.unreadable)]
    changed = sorted(path for path, version in found.files.items() if needs_reading(known.get(path), version))
    if gone:
        index.remove_files(gone)
        changes.removed = len(gone)
    if changed:
        writer = Writer(index, model, changes)
        read = partial(read_files, index.folder / "files.sqlite", model.config.vision.preprocess)
        with console.progress("indexing images", len(changed), "images/s") as advance:
            for files in read_in_workers(changed, read, workers):
                for file in files:
                    writer.add(file)
                advance(len(files))
            writer.commit()
    if gone or changed:
        index.compact()
    index.remove_leftovers()
    return changes


def needs_reading(record: FileRecord | None, version: Version) -> bool:
    """Whether a file is new or has changed, or what its reading needed may be there by now."""
    if record is None or record.version != version:
        return True
    return (
        record.kind == UNREADABLE
        or (record.kind == "HEIC" and supports_heic())
        or (record.kind == "RAW" and supports_raw())
    )


def is_below_any(path: bytes, folders: dict[bytes, str]) -> bool:
    return any(path.startswith(folder + b"/") for folder in folders)


class Writer:
    """Encodes new images in batches, and commits them with their files."""

    def __init__(self, index: Index, model: OnnxCLIP, changes: Changes):
        self.index, self.model, self.changes = index, model, changes
        self.rows = dict[bytes, int]()  # by content, of images that are not committed yet
        self.facts, self.vectors, self.files = list[ImageFacts](), list[Floats](), list[ReadFile]()
        self.batch = list[Pixels]()  # not encoded yet
        self.committed_at = time.monotonic()

    def add(self, file: ReadFile | None) -> None:
        if file is None:
            self.changes.vanished += 1
            return
        # Copies may have been read at the same time, or before the first of them was committed.
        if file.facts and file.pixels is not None and self.row_of(file.content) is None:
            self.rows[file.content] = self.index.row_count + len(self.facts)
            self.facts.append(file.facts)
            self.batch.append(file.pixels)
        self.files.append(file._replace(pixels=None))
        if len(self.batch) >= BATCH:
            self.encode()
        if time.monotonic() - self.committed_at > COMMIT_S:
            self.commit()

    def row_of(self, content: bytes) -> int | None:
        row = self.rows.get(content)
        return self.index.row_of(content) if row is None else row

    def encode(self) -> None:
        if not self.batch:
            return
        vectors_BE = self.model.embed_pixels(np.stack(self.batch))
        if not np.isfinite(vectors_BE).all():
            raise ValueError("the model's image embeddings are not finite numbers")
        self.vectors.append(vectors_BE)
        self.batch = []

    def commit(self) -> None:
        self.encode()
        vectors_NE = np.concatenate([np.empty((0, self.index.width), np.float32), *self.vectors])
        records = [self.record(file) for file in self.files]
        self.index.add(self.facts, vectors_NE, records)
        self.changes.added += len(self.facts)
        self.changes.known += sum(record.row is not None for record in records) - len(self.facts)
        self.changes.bad |= {os.fsdecode(one.path): one.reason for one in records if one.reason}
        self.rows, self.facts, self.vectors, self.files = {}, [], [], []
        self.committed_at = time.monotonic()

    def record(self, file: ReadFile) -> FileRecord:
        row = None if file.kind else self.row_of(file.content)
        return FileRecord(file.path, file.version, row, file.kind, file.reason)


def read_in_workers(paths: Sequence[bytes], read: Read, workers: int) -> Iterator[list[ReadFile | None]]:
    """Results in order. A file whose decoder crashes its process is a bad file, and the others are read again.

    `workers=1` reads in this process.
    """
    tasks = [paths[start : start + FILES_PER_TASK] for start in range(0, len(paths), FILES_PER_TASK)]
    if workers == 1:
        yield from map(read, tasks)
        return
    done = 0
    while done < len(tasks):
        with closing(WorkerPool(read, min(workers or usable_cores(), len(tasks)))) as pool:
            try:
                for result in pool.map(tasks[done:]):
                    done += 1
                    yield result
            except WorkerDied:  # in this task or in one behind it
                for path in tasks[done]:
                    yield [read_alone(path, read)]
                done += 1


def read_alone(path: bytes, read: Read) -> ReadFile | None:
    with closing(WorkerPool(read, 1)) as pool, suppress(WorkerDied):
        return next(pool.map([[path]]))[0]
    with closing(WorkerPool(read, 1)) as pool:
        try:
            next(pool.map([[b""]]))  # there is no such file
        except WorkerDied:
            reason = "processes that decode images end at once, probably for lack of memory; --workers 1 needs none"
            raise MemoryError(reason) from None
    with suppress(FileNotFoundError):
        version, reason = Version.of(os.stat(path)), "decoding it crashes or needs more memory than there is"
        return ReadFile(path, version, kind=CRASH, reason=reason)
    return None


def read_files(database: Path, settings: Preprocess, paths: Sequence[bytes]) -> list[ReadFile | None]:
    """Read and decode files in a worker; None for those that vanish or change meanwhile."""
    address = f"file:{quote(os.fsencode(database))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=60)) as connection:
            return [read_image_file(path, settings, connection) for path in paths]
    except sqlite3.Error as error:
        raise OSError(f"the index {database} cannot be read: {error}") from None


def read_image_file(path: bytes, settings: Preprocess, index: sqlite3.Connection) -> ReadFile | None:
    try:
        with open_regular(Path(os.fsdecode(path))) as file:
            version = Version.of(os.fstat(file.fileno()))
            if version.size > MAX_BYTES:
                return ReadFile(path, version, kind="refused", reason=TOO_LARGE.format(version.size / 1e6))
            data = file.read(version.size + 1)
            if len(data) != version.size or Version.of(os.fstat(file.fileno())) != version:
                return None
    except FileNotFoundError:
        return None
    except OSError as error:
        with suppress(FileNotFoundError):
            return ReadFile(path, Version.of(os.stat(path)), kind=UNREADABLE, reason=error.strerror or str(error))
        return None
    content = hashlib.blake2b(data, digest_size=16).digest()
    if index.execute("SELECT 1 FROM image WHERE content = ?", (content,)).fetchone():
        return ReadFile(path, version, content)
    try:
        facts, pixels = examine(data, content, settings, bool(RAW_SUFFIX.search(os.fsdecode(path))))
    except BadImage as error:
        return ReadFile(path, version, content, kind=error.kind, reason=" ".join(str(error).split()))
    return ReadFile(path, version, content, facts, pixels)


def examine(data: bytes, content: bytes, settings: Preprocess, is_raw: bool) -> tuple[ImageFacts, Pixels]:
    """The facts of an image, and its pixels as the model sees them."""
    image = (decode_raw if is_raw else decode)(data, DECODE_SCALE * settings.size)
    width, height, taken = *image.size, None
    if not is_raw:
        header = read_header(data)
        is_turned = (header.width > header.height) != (width > height)
        width, height = header.size[::-1] if is_turned else header.size
        taken = taken_at(header)
    found = np.zeros(1, HASH)
    found[0] = perceptual_hash(image)
    return ImageFacts(content, width, height, taken, found.tobytes()), preprocess(image, settings)


def taken_at(header: Image.Image) -> float | None:
    """When a photo was taken, by the camera's clock, as if that showed UTC."""
    with suppress(*DECODE_ERRORS), quiet_pillow():
        text = str(header.getexif().get_ifd(EXIF_IFD).get(TAKEN, ""))
        return datetime.strptime(text.strip("\0 "), "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    return None
