"""Images decoded by worker processes into memory-mapped files that runs share, and their disk space. No torch."""

import atexit
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from errno import ENOSPC
from functools import partial
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m1clip import decode, images
from m1clip.config import Preprocess
from m1clip.data.index import Advance, BadImages, PairDataset
from m1clip.files import cache_folder, lock_folder, naming, read_jsonl, remove_irregular
from m1clip.format import file_size
from m1clip.images import Pixels, preprocess
from m1clip.workers import Rows, map_chunks, row_chunks

CHUNK_ROWS = 256
# Cache entries that can be built again.
PREFIXES = ("pixels-", "index-", "content-", "hashes-", "features-", "embeddings-", "onnx-")
RESERVED_BYTES = 1e9  # never used of a disk, or a twentieth of a small one
RETRIED = ("HEIC", "missing file", "cannot be read")  # kinds whose cause may be gone by the next run
UNUSED = fcntl.LOCK_EX | fcntl.LOCK_NB  # the lock that only an entry without users gives
Notes = dict[Any, Any]
Produce = Callable[[list[range]], Iterable[tuple[bytes, Notes]]]


class Decoded(NamedTuple):
    pixels: Pixels  # (rows, height, width, 3); black where an image cannot be decoded
    bad: BadImages


def decode_rows(pairs: PairDataset, settings: Preprocess, rows: Rows, exact: bool = False) -> Decoded:
    """`exact` decodes large images at their full size, so that the pixels are those of other libraries."""
    min_size = 0 if exact else 2 * settings.size
    pixels, bad = np.zeros((len(rows), settings.size, settings.size, 3), np.uint8), BadImages()
    for i, row in enumerate(rows):
        try:
            pixels[i] = preprocess(pairs.image(row, min_size), settings)
        except decode.BadImage as error:
            bad[row] = (error.kind, str(error))
    return Decoded(pixels, bad)


class RowStore:
    """Rows of equal size in one file, written chunk by chunk.

    A journal has the checksum of each chunk: an interrupted build continues, and damage is repaired.
    """

    def __init__(self, folder: Path, rows: int, row_bytes: int):
        self.folder, self.rows, self.row_bytes = folder, rows, row_bytes
        self.data, self.journal = folder / "rows.bin", folder / "journal.jsonl"
        self.chunks = row_chunks(rows, CHUNK_ROWS)

    @property
    def missing_bytes(self) -> int:
        written = self.data.stat().st_size if self.data.exists() else 0
        return max(0, self.rows * self.row_bytes - written)

    def build(self, produce: Produce, max_bytes: float, progress: Advance, contents: str = "decoded images") -> bool:
        """Verify what exists and produce the missing chunks; False if a cache of `max_bytes` is too small."""
        self._lock_folder()
        for path in (self.data, self.journal):
            remove_irregular(path)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            if self.missing_bytes and not free_space(self.missing_bytes, max_bytes, self.folder, contents):
                return False
            with explain_full_disk(self.folder):
                self._complete(produce, progress)
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # held while we run: an entry in use is not removed
            on_failure.pop_all()
        return True

    def _lock_folder(self) -> None:
        """Lock exclusively to build, shared if others only read; wait while another process builds."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            for mode in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                with suppress(BlockingIOError, FileNotFoundError):
                    fcntl.flock(self._lock, mode | fcntl.LOCK_NB)
                    if os.stat(self.folder).st_ino == os.fstat(self._lock).st_ino:  # not removed while we waited
                        os.utime(self.folder)  # the oldest entries are removed first
                        return
            os.close(self._lock)
            time.sleep(0.2)

    def close(self) -> None:
        """Release the lock; from now on the store may be removed to free space."""
        with suppress(OSError):  # it has chunks
            self.folder.rmdir()
        os.close(self._lock)

    def entries(self) -> dict[int, Notes]:
        """The journal by chunk: its checksum and notes. A chunk whose line is damaged is produced again."""
        return {entry["chunk"]: entry for entry in read_jsonl(self.journal, is_valid=self._is_entry)}

    def _is_entry(self, entry: Any) -> bool:
        k, notes = (entry.get("chunk"), entry.get("notes")) if isinstance(entry, dict) else (None, None)
        if type(k) is not int or not 0 <= k < len(self.chunks) or not isinstance(notes, dict):
            return False
        has_rows = all(row.isdecimal() and len(row) < 20 and int(row) in self.chunks[k] for row in notes)
        return type(entry.get("crc")) is int and has_rows and all(map(self.is_note, notes.values()))

    def is_note(self, note: Any) -> bool:
        """Whether a note on a row is a row: the one that is used instead."""
        return type(note) is int and 0 <= note < self.rows

    def is_final(self, entry: Notes) -> bool:
        """Whether an intact chunk need not be produced again."""
        return True

    def _complete(self, produce: Produce, progress: Advance) -> None:
        intact = self._intact_chunks(progress) if self.data.exists() else set()
        missing = [k for k in range(len(self.chunks)) if k not in intact]
        if not missing:
            return
        self.data.touch()
        with open(self.data, "r+b") as file, open(self.journal, "ab") as journal:
            journal.write(b"\n")  # ends a line that a crash may have cut
            for k, (data, notes) in zip(missing, produce([self.chunks[k] for k in missing]), strict=True):
                # write(), not the memory map: on a full disk write() raises, a mapped page kills the process.
                file.seek(self.chunks[k].start * self.row_bytes)
                file.write(data)
                file.flush()  # before the journal mentions it
                entry = {"chunk": k, "crc": zlib.crc32(data), "notes": notes}
                journal.write(json.dumps(entry).encode() + b"\n")
                journal.flush()
                progress(len(self.chunks[k]))

    def _intact_chunks(self, progress: Advance) -> set[int]:
        entries = self.entries()

        def is_intact(k: int) -> bool:
            with open(self.data, "rb") as file:
                file.seek(self.chunks[k].start * self.row_bytes)
                crc = zlib.crc32(file.read(len(self.chunks[k]) * self.row_bytes))
            intact = crc == entries[k]["crc"] and self.is_final(entries[k])
            progress(len(self.chunks[k]) if intact else 0)
            return intact

        with ThreadPoolExecutor() as pool:  # crc32 releases the GIL
            return {k for k, intact in zip(entries, pool.map(is_intact, entries), strict=True) if intact}

    def memmap(self, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
        return np.memmap(self.data, dtype, "r", shape=(self.rows, *shape))


def decoder_code() -> str:
    """Part of the keys of what is made from images: other code makes other pixels."""
    return "".join(Path(str(module.__file__)).read_text() for module in (images, decode))


class PixelCache(RowStore):
    def __init__(self, pairs: PairDataset, settings: Preprocess, exact: bool = False):
        self.image_size = settings.size
        contents = f"{pairs.fingerprint}/{len(pairs)}/{settings}/{exact}/{decoder_code()}"
        key = sha256(contents.encode()).hexdigest()[:16]
        super().__init__(cache_folder() / f"pixels-{key}", len(pairs), settings.size**2 * 3)

    def is_note(self, note: Any) -> bool:
        """Whether a note is why an image is bad: kind and reason."""
        return isinstance(note, list) and len(note) == 2 and all(isinstance(text, str) for text in note)

    def is_final(self, entry: Notes) -> bool:
        return not any(kind in RETRIED for kind, _ in entry["notes"].values())

    def pixels(self) -> Pixels:
        return self.memmap(np.uint8, self.image_size, self.image_size, 3)

    def bad_images(self) -> BadImages:
        notes = (note for entry in self.entries().values() for note in entry["notes"].items())
        return dict(sorted((int(row), tuple(reason)) for row, reason in notes))


def build_pixel_cache(
    pairs: PairDataset,
    settings: Preprocess,
    max_gb: float,
    workers: int,
    progress: Advance = lambda done: None,
    exact: bool = False,
) -> PixelCache | None:
    """The complete cache, or None if it would exceed the size limit."""
    if len(pairs) * settings.size**2 * 3 > max_gb * 1e9:
        return None
    cache = PixelCache(pairs, settings, exact)

    def produce(chunks: list[range]) -> Iterator[tuple[bytes, Notes]]:
        for decoded in map_chunks(partial(decode_rows, pairs, settings, exact=exact), chunks, workers):
            yield decoded.pixels.tobytes(), decoded.bad

    return cache if cache.build(produce, max_gb * 1e9, progress) else None


def decode_to_memory(
    pairs: PairDataset, settings: Preprocess, workers: int, progress: Advance, exact: bool = False
) -> Decoded:
    pixels, bad, rows = list[Pixels](), BadImages(), row_chunks(len(pairs), CHUNK_ROWS)
    for chunk in map_chunks(partial(decode_rows, pairs, settings, exact=exact), rows, workers):
        pixels.append(chunk.pixels)
        bad |= chunk.bad
        progress(len(chunk.pixels))
    return Decoded(np.concatenate(pixels), bad)


# Disk space. A process holds a lock on every entry that it uses.
def free_space(needed: int, max_bytes: float, keep: Path, contents: str) -> bool:
    """Remove the oldest unused entries until `needed` bytes fit; False if the cache limit is too small.

    A disk without space is an error: what fits the limit was promised.
    """
    folder, used, unused = cache_folder(), 0, list[tuple[float, int, Path]]()
    with ExitStack() as locks:
        for entry in (path for path in folder.iterdir() if path.name.startswith(PREFIXES)):
            with suppress(OSError):  # another process may remove it
                size = sum(file.stat().st_size for file in (entry, *entry.rglob("*")) if file.is_file())
                used += size
                if entry != keep and locks.enter_context(lock_folder(entry, UNUSED)):
                    unused.append((entry.stat().st_mtime, size, entry))
        unused.sort(reverse=True)
        if used - sum(size for _, size, _ in unused) + needed > max_bytes:
            return False
        while unused and (used + needed > max_bytes or needed > free_bytes(folder)):
            _, size, entry = unused.pop()
            entry.unlink(missing_ok=True) if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
            used -= size
    if needed > (free := free_bytes(folder)):
        raise OSError(
            f"{folder} has {file_size(max(0, free))} free, the {contents} need {file_size(needed)}; "
            "set M1CLIP_CACHE to a folder on another disk"
            + (", or --cache-gb 0 to decode on the fly" if contents == "decoded images" else "")
        )
    return True


def free_bytes(folder: Path) -> int:
    usage = shutil.disk_usage(folder)
    return int(usage.free - min(RESERVED_BYTES, usage.total / 20))


def temporary_cache(prefix: str) -> Path:
    """A cache folder that is removed when this process exits; folders of killed processes are removed now."""
    for leftover in cache_folder().glob(f"{prefix}*"):
        with suppress(OSError), lock_folder(leftover, UNUSED) as is_unused:
            if is_unused:
                shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(mkdtemp(prefix=prefix, dir=cache_folder()))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    try:
        with naming(folder):
            yield
    except OSError as error:
        if error.errno == ENOSPC or "No space left" in str(error):
            raise OSError(f"the disk of {folder.parent} is full; set M1CLIP_CACHE to another disk") from None
        raise
