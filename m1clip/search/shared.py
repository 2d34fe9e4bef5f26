"""A library that the threads of a server search, and what they answer: JSON, thumbnails and images by their rows.

Shapes: N images, F files, E embedding.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path

import numpy as np

from m1clip.files import read_json
from m1clip.onnx_model import EXPORT, OnnxCLIP
from m1clip.search.catalog import Bools, Catalog, Ints
from m1clip.search.index import Floats, Index
from m1clip.search.query import Library, Term, add_terms, best_first, parse_query, require_known_script
from m1clip.search.thumbnails import (
    THUMBNAIL_SIZE,
    ThumbnailCache,
    full_image,
    is_unchanged,
    make_thumbnail,
    read_unchanged,
)

CHECK_S, MAX_LOAD_SHARE = 1.0, 0.1  # how often the index is checked; share of the time that loading it may take
LOADS = 5  # tries, while another process writes
MAX_FOLDERS = 1_000  # that the page offers as filters
CACHED_QUERIES = 256
GONE = "the file is gone or has changed since it was indexed: start m1clip search again"


class NotInLibrary(ValueError):  # noqa: N818 - what is asked for is missing, the program is right
    """No such image or folder, or its file is gone."""


@dataclass(frozen=True)
class Filters:
    folder: str = ""
    first: str | None = None  # day
    last: str | None = None  # day, which is included

    def select(self, catalog: Catalog) -> Bools:
        """Files (F,) of the catalog."""
        try:
            first, last = (date.fromisoformat(day) if day else None for day in (self.first, self.last))
        except ValueError:
            raise ValueError("a date must be a day of the calendar, such as 2026-02-28") from None
        if self.folder not in catalog.folders:
            raise NotInLibrary("the library has no such folder")
        return catalog.select(self.folder, first, last)


@dataclass(frozen=True)
class Result:
    row: int
    version: str  # of its content
    name: str  # relative to the library's folder
    copies: list[str]  # names of other files with the same content
    width: int
    height: int
    bytes: int
    date: str  # when it was taken, or else changed
    score: float | None  # cosine similarity; None without a query


@dataclass(frozen=True)
class SearchResults:
    images: int  # that the filters select
    is_nothing: bool  # no image fits; the results are the nearest ones
    results: list[Result]  # best first, or newest first without a query


@dataclass(frozen=True)
class FolderCount:
    name: str
    files: int  # in it and below it


@dataclass(frozen=True)
class LibraryFacts:
    folder: str
    images: int
    folders: list[FolderCount]  # below the library's own; those within a folder follow it
    first: str | None  # day of the oldest file
    last: str | None
    model: str


class SharedLibrary:
    """A library as it is now. It is loaded again when another process has changed the index."""

    def __init__(self, model: OnnxCLIP, index: Index, folder: Path, clock: Callable[[], float] = time.monotonic):
        self.model, self.index, self.folder = model, index, folder
        self.clock, self.lock = clock, threading.Lock()
        self.thumbnails = ThumbnailCache(index.folder / "thumbnails.sqlite")
        self.encode_text = lru_cache(CACHED_QUERIES)(lambda text: model.encode_text(text)[0])
        self.uploads = dict[bytes, Floats]()  # vectors of images that were searched for, by their hash
        self.load()

    def load(self) -> None:
        """Vectors and files, once more if another process has written meanwhile: they belong together."""
        started = self.clock()
        for _ in range(LOADS):
            self.version = self.index.data_version
            self.catalog = Catalog(Library(self.index, self.folder))
            if self.version == self.index.data_version:
                break
        self.checked_at = self.clock()
        self.next_load = self.checked_at + (self.checked_at - started) / MAX_LOAD_SHARE

    def current(self) -> Catalog:
        """One thread at a time looks for changes; the others go on with what there is."""
        if self.clock() - self.checked_at >= CHECK_S and self.lock.acquire(blocking=False):
            try:
                self.checked_at = self.clock()
                if self.checked_at >= self.next_load and self.index.data_version != self.version:
                    self.load()
            finally:
                self.lock.release()
        return self.catalog

    def facts(self) -> LibraryFacts:
        return describe_library(self.current(), self.model)

    # Searching

    def search(
        self, text: str, like: int | None, upload: bytes | None, filters: Filters, offset: int, top_k: int
    ) -> SearchResults:
        """Images that fit a text, that look like the image of a row, or like an upload; else the newest."""
        catalog = self.current()
        is_selected_F = filters.select(catalog)
        is_image_N = catalog.images_of(is_selected_F)
        images = int(is_image_N.sum())
        query_E = self.encode(catalog, text, like, upload)
        if query_E is None:
            positions = catalog.newest[is_image_N[catalog.newest]][offset:][:top_k]
            return SearchResults(images, False, describe_results(catalog, positions, is_selected_F))
        if like is not None:
            is_image_N[catalog.position(like)] = False  # it is always most like itself
        scores_N = catalog.library.scores(query_E)
        masked_N = np.where(is_image_N, scores_N, -np.inf).astype(np.float32)
        best = best_first(masked_N, min(offset + top_k, int(is_image_N.sum())))
        found = describe_results(catalog, best[offset:], is_selected_F, scores_N)
        if like is not None or upload is not None or not len(best):
            return SearchResults(images, False, found)
        # The mean is that of the whole library: in a folder of dogs, a dog does not stand out.
        is_nothing = self.model.is_nothing(query_E, float(scores_N[best[0]]), float(scores_N.mean()))
        return SearchResults(images, is_nothing, found)

    def encode(self, catalog: Catalog, text: str, like: int | None, upload: bytes | None) -> Floats | None:
        """The vector (E,) of all that is searched for; None if that is nothing."""
        terms: Sequence[Term] = parse_query(text) if text.strip() else ()
        require_known_script(self.model, terms)
        weights, vectors = [term.weight for term in terms], [self.encode_text(term.text) for term in terms]
        if like is not None:
            if catalog.position(like) is None:
                raise NotInLibrary(f"the library has no image with row {like}")
            vectors.append(catalog.library.vectors_RE[like])
        if upload is not None:
            vectors.append(self.encode_upload(upload))
        images = len(vectors) - len(weights)
        return add_terms(weights + [1.0] * images, np.stack(vectors)) if vectors else None

    def encode_upload(self, data: bytes) -> Floats:
        """Remembered, because the page sends it again for more results."""
        key = hashlib.blake2b(data, digest_size=16).digest()
        vector_E = self.uploads.get(key)
        if vector_E is None:
            try:
                vector_E = self.model.encode_image(data)[0]
            except ValueError as error:
                raise ValueError(f"this image cannot be used: {str(error).removeprefix('image 0: ')}") from None
            if not np.isfinite(vector_E).all():
                raise ValueError("the model's embedding of this image is not finite")
            if len(self.uploads) >= CACHED_QUERIES:
                self.uploads = {}
            self.uploads[key] = vector_E
        return vector_E

    # Images

    def thumbnail(self, row: int, version: str | None) -> bytes:
        catalog, position = self.find_image(row, version)
        content = catalog.contents[position]
        cached = self.thumbnails.get(content, THUMBNAIL_SIZE)
        for file in catalog.files(position):
            path = catalog.path(file)
            if cached is not None and is_unchanged(path, catalog.sizes[file], catalog.mtimes_ns[file]):
                return cached
            if (data := read_unchanged(path, content)) is not None:
                jpeg = make_thumbnail(path, data)
                self.thumbnails.put(content, THUMBNAIL_SIZE, jpeg)
                return jpeg
        raise NotInLibrary(GONE)

    def image(self, row: int, version: str | None) -> tuple[bytes, str, str]:
        """Bytes, media type and file name."""
        catalog, position = self.find_image(row, version)
        for file in catalog.files(position):
            path, name = catalog.path(file), Path(catalog.name(file))
            if (data := read_unchanged(path, catalog.contents[position])) is not None:
                shown, media_type = full_image(path, data)
                return shown, media_type, name.name if shown is data else f"{name.stem}.jpg"
        raise NotInLibrary(GONE)

    def find_image(self, row: int, version: str | None) -> tuple[Catalog, int]:
        catalog = self.current()
        position = catalog.position(row)
        if position is None or version not in (None, version_of(catalog.contents[position])):
            raise NotInLibrary(f"the library has no image with row {row}, or another one by now")
        return catalog, position


def describe_results(
    catalog: Catalog, positions: Ints, is_selected_F: Bools, scores_N: Floats | None = None
) -> list[Result]:
    found = list[Result]()
    for position in positions.tolist():
        files = sorted(catalog.files(position), key=lambda file: not is_selected_F[file])
        width, height = catalog.shapes[position]
        result = Result(
            row=int(catalog.library.rows_N[position]),
            version=version_of(catalog.contents[position]),
            name=catalog.name(files[0]),
            copies=[catalog.name(file) for file in files[1:]],
            width=width,
            height=height,
            bytes=catalog.sizes[files[0]],
            date=catalog.date_of(files[0]).isoformat(),
            score=None if scores_N is None else round(float(scores_N[position]), 6),
        )
        found.append(result)
    return found


def describe_library(catalog: Catalog, model: OnnxCLIP) -> LibraryFacts:
    dates = catalog.date_F
    extremes = [int(dates.argmin()), int(dates.argmax())] if len(dates) else []
    first, last = [catalog.date_of(file).date().isoformat() for file in extremes] or (None, None)
    return LibraryFacts(
        folder=shown_name(catalog.library.folder),
        images=len(catalog),
        folders=list_folders(catalog),
        first=first,
        last=last,
        model=model_name(model.folder),
    )


def list_folders(catalog: Catalog) -> list[FolderCount]:
    """With their files; of too many folders, the deepest are left out."""
    counts = {name: files for name, files in catalog.count_files().items() if name}
    depth = max((name.count("/") for name in counts), default=0)
    while len(counts) > MAX_FOLDERS and depth:
        counts, depth = {name: files for name, files in counts.items() if name.count("/") < depth}, depth - 1
    return [FolderCount(name, files) for name, files in list(counts.items())[:MAX_FOLDERS]]


def shown_name(folder: Path) -> str:
    """Of a folder; bytes that are not UTF-8 are replaced."""
    return os.fsencode(folder.name or folder).decode(errors="replace")


def model_name(folder: Path) -> str:
    """Of the run or model that was exported to this folder."""
    exported = Path(str(read_json(folder / EXPORT).get("model") or folder))
    return exported.parent.name if exported.name in ("model", "last") else exported.name


def version_of(content: bytes) -> str:
    return content[:8].hex()
