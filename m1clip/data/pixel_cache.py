"""Decoded images in a memory-mapped file that runs share, and the disk space of all such caches. No torch."""

import atexit
import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from errno import ENOSPC
from functools import partial
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from tempfile import mkdtemp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip import images
from m1clip.data import decode
from m1clip.data.rows import Advance, BadImages, PairDataset
from m1clip.data.workers import Decoded, decode_rows, map_chunks, row_chunks
from m1clip.files import cache_folder, read_jsonl
from m1clip.format import file_size
from m1clip.images import Pixels

CHUNK_ROWS = 256
PREFIXES = ("pixels-", "index-", "content-", "features-")  # cache entries that can be built again
RESERVED_BYTES = 1e9  # never used of a disk, or a twentieth of a small one
RETRIED = ("HEIC", "missing file", "cannot be read")  # kinds whose cause may be gone by the next run
Notes = dict[Any, Any]
Produce = Callable[[list[range]], Iterable[tuple[bytes, Notes]]]


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
        try:
            fits = not self.missing_bytes or free_space(self.missing_bytes, max_bytes, self.folder, contents)
            if fits:
                with explain_full_disk(self.folder):
                    self._complete(produce, progress)
                fcntl.flock(self._lock, fcntl.LOCK_SH)  # held while we run: an entry in use is not removed
        except BaseException:
            self.close()
            raise
        if not fits:
            self.close()
            with suppress(OSError):
                self.folder.rmdir()
        return fits

    def _lock_folder(self) -> None:
        """Lock exclusively to build, shared if others only read; wait while another process builds."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            for mode in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                with suppress(BlockingIOError):
                    fcntl.flock(self._lock, mode | fcntl.LOCK_NB)
                    with suppress(FileNotFoundError):  # it may have been removed while we waited
                        if os.stat(self.folder).st_ino == os.fstat(self._lock).st_ino:
                            os.utime(self.folder)  # the oldest entries are removed first
                            return
                    break
            os.close(self._lock)
            time.sleep(0.2)

    def close(self) -> None:
        """Release the lock; from now on the store may be removed to free space."""
        os.close(self._lock)

    def entries(self) -> dict[int, Notes]:
        """The journal by chunk: its checksum and notes."""
        entries: dict[int, Notes] = {}
        for entry in read_jsonl(self.journal):
            match entry:
                case {"chunk": int(chunk), "crc": int(), "notes": dict()}:
                    entries[chunk] = entry
        return entries

    def is_final(self, entry: Notes) -> bool:
        """Whether an intact chunk need not be produced again."""
        return True

    def _complete(self, produce: Produce, progress: Advance) -> None:
        intact = self._intact_chunks(progress)
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
        entries = {k: entry for k, entry in self.entries().items() if k < len(self.chunks)}
        if not entries or not self.data.exists():
            return set()

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


class PixelCache(RowStore):
    """All images of a dataset, decoded at one size."""

    def __init__(self, pairs: PairDataset, image_size: int):
        self.image_size = image_size
        # The key includes the decoding code: other code makes other pixels.
        code = "".join(Path(str(module.__file__)).read_text() for module in (images, decode))
        key = sha256(f"{pairs.fingerprint}/{len(pairs)}/{image_size}/{code}".encode()).hexdigest()[:16]
        super().__init__(cache_folder() / f"pixels-{key}", len(pairs), image_size**2 * 3)

    def is_final(self, entry: Notes) -> bool:
        return not any(kind in RETRIED for kind, _ in entry["notes"].values())

    def pixels(self) -> Pixels:
        return self.memmap(np.uint8, self.image_size, self.image_size, 3)

    def bad_images(self) -> BadImages:
        notes = (note for entry in self.entries().values() for note in entry["notes"].items())
        return dict(sorted((int(row), tuple(reason)) for row, reason in notes))


def build_pixel_cache(
    pairs: PairDataset, image_size: int, max_gb: float, workers: int, progress: Advance = lambda done: None
) -> PixelCache | None:
    """The complete cache, or None if it would exceed the size limit."""
    if len(pairs) * image_size**2 * 3 > max_gb * 1e9:
        return None
    cache = PixelCache(pairs, image_size)

    def produce(chunks: list[range]) -> Iterator[tuple[bytes, Notes]]:
        for decoded in map_chunks(partial(decode_rows, pairs, image_size), chunks, workers):
            yield decoded.pixels.tobytes(), decoded.bad

    return cache if cache.build(produce, max_gb * 1e9, progress) else None


def decode_to_memory(pairs: PairDataset, image_size: int, workers: int, progress: Advance) -> Decoded:
    pixels, bad, rows = list[Pixels](), BadImages(), row_chunks(len(pairs), CHUNK_ROWS)
    for chunk in map_chunks(partial(decode_rows, pairs, image_size), rows, workers):
        pixels.append(chunk.pixels)
        bad |= chunk.bad
        progress(len(chunk.pixels))
    return Decoded(np.concatenate(pixels), bad)


# Disk space. A process holds a lock on every entry that it uses.
def free_space(needed: int, max_bytes: float, keep: Path, contents: str) -> bool:
    """Remove the oldest unused entries until `needed` bytes fit; False if the cache limit is too small.

    A disk without space is an error: what fits the limit was promised.
    """
    folder = cache_folder()
    entries = [path for path in folder.iterdir() if path.name.startswith(PREFIXES)]
    files = {entry: _file_stats(entry) for entry in entries}
    entries.sort(key=lambda entry: files[entry][0].st_mtime if files[entry] else 0.0)
    sizes = {entry: sum(file.st_size for file in files[entry] if S_ISREG(file.st_mode)) for entry in entries}
    locks = {entry: _try_lock(entry) for entry in entries if entry != keep}
    unused = [entry for entry, lock in locks.items() if lock is not None]
    used = sum(sizes.values())
    try:
        if used - sum(sizes[entry] for entry in unused) + needed > max_bytes:
            return False
        while unused and (used + needed > max_bytes or needed > free_bytes(folder)):
            entry = unused.pop(0)
            _remove(entry)
            used -= sizes[entry]
    finally:
        for lock in locks.values():
            if lock is not None:
                os.close(lock)
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
        if (lock := _try_lock(leftover)) is not None:
            _remove(leftover)
            os.close(lock)
    folder = Path(mkdtemp(prefix=prefix, dir=cache_folder()))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def explain_full_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == ENOSPC or "No space left" in str(error):
            raise OSError(f"the disk of {folder.parent} is full; set M1CLIP_CACHE to another disk") from None
        raise


def _file_stats(path: Path) -> list[os.stat_result]:
    """Of the entry and everything below it that another process does not remove meanwhile."""
    stats = []
    for file in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            stats.append(file.lstat())
    return stats


def _try_lock(path: Path) -> int | None:
    """A file descriptor with an exclusive lock, or None if the entry is in use or gone."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except BlockingIOError:
        os.close(handle)
        return None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
