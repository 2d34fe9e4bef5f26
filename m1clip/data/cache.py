"""Decoded pixels: every picture once, as bytes in a memory-mapped file that runs share.

Written part by part, each with its checksum in a journal: a build that is killed goes on where it was, and
what the disk has damaged is noticed and decoded again. No torch.
"""

import fcntl
import json
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from m1clip import pictures
from m1clip.data import decode
from m1clip.data.disk import make_room
from m1clip.data.pairs import Advance, Pairs
from m1clip.data.rows import Fault
from m1clip.data.workers import Decoded, Workers, decode_rows, parts_of
from m1clip.pictures import Pixels
from m1clip.run import cache_folder

PART = 256  # pictures
PASSING = ("HEIC", "missing file", "cannot be read")
"""Kinds of faults that another day may mend: they are tried again."""


def unheard(done: int) -> None:
    pass


class Store:
    """The pictures of a source at one size. Whole once `fill` has returned."""

    def __init__(self, pairs: Pairs, size: int):
        self.pairs, self.size = pairs, size
        # A picture decoded or squared otherwise is another picture.
        how = "".join(Path(str(module.__file__)).read_text() for module in (pictures, decode))
        name = sha256(f"{pairs.fingerprint}/{len(pairs)}/{size}/{how}".encode()).hexdigest()[:16]
        self.folder = cache_folder() / f"pixels-{name}"
        self.bytes, self.journal = self.folder / "pixels.bin", self.folder / "journal.jsonl"
        self.parts = parts_of(len(pairs), PART)

    @property
    def need(self) -> int:
        """Bytes still to be written."""
        there = self.bytes.stat().st_size if self.bytes.exists() else 0
        return max(0, len(self.pairs) * self.size**2 * 3 - there)

    def claim(self) -> None:
        """Ours alone while it is made; shared where others only read it; else wait for who makes it."""
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
            for how in (fcntl.LOCK_EX, fcntl.LOCK_SH):
                with suppress(BlockingIOError):
                    fcntl.flock(self._lock, how | fcntl.LOCK_NB)
                    with suppress(FileNotFoundError):  # it may have been removed while we waited
                        if os.stat(self.folder).st_ino == os.fstat(self._lock).st_ino:
                            os.utime(self.folder)  # in use: not the oldest
                            return
                    break
            os.close(self._lock)
            time.sleep(0.2)

    def fill(self, workers: int, progress: Advance = unheard) -> None:
        """Make it whole: what is there is verified, what is missing or damaged is decoded."""
        entries = self._entries()
        sound = self._verified(entries, progress)
        if len(sound) < len(self.parts):
            self._decode([k for k in range(len(self.parts)) if k not in sound], workers, progress)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # kept while we live: what is in use is not removed

    def close(self) -> None:
        """From here on it may be removed to make room."""
        os.close(self._lock)

    def _entries(self) -> dict[int, dict[str, Any]]:
        """The journal: checksum and faults of each part; a line cut by a crash is void."""
        entries: dict[int, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            for line in self.journal.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    if isinstance(entry["crc"], int) and isinstance(entry["bad"], dict):
                        entries[int(entry["part"])] = entry
        return entries

    def _verified(self, entries: dict[int, dict[str, Any]], progress: Advance) -> set[int]:
        """The parts whose bytes are those that were written."""

        def check(k: int) -> int | None:
            part = self.parts[k]
            with open(self.bytes, "rb") as file:
                file.seek(part.start * self.size**2 * 3)
                found = zlib.crc32(file.read(len(part) * self.size**2 * 3))
            mendable = any(kind in PASSING for kind, _ in entries[k]["bad"].values())
            sound = found == entries[k]["crc"] and not mendable
            progress(len(part) if sound else 0)
            return k if sound else None

        if not entries or not self.bytes.exists():
            return set()
        with ThreadPoolExecutor() as pool:  # the checksum lets other threads run
            return {k for k in pool.map(check, (k for k in entries if k < len(self.parts))) if k is not None}

    def _decode(self, missing: list[int], workers: int, progress: Advance) -> None:
        self.bytes.touch()
        with open(self.bytes, "r+b") as file, open(self.journal, "ab") as journal:
            parts = [self.parts[k] for k in missing]
            journal.write(b"\n")  # ends a line that a crash may have cut
            for k, done in zip(missing, _decode(self.pairs, self.size, parts, workers), strict=True):
                # Written, not mapped: on a full disk a write fails with an error, a mapped page kills us.
                data = done.pixels.tobytes()
                file.seek(self.parts[k].start * self.size**2 * 3)
                file.write(data)
                file.flush()  # before the journal speaks of it
                entry = {"part": k, "crc": zlib.crc32(data), "bad": done.bad}
                journal.write(json.dumps(entry).encode() + b"\n")
                journal.flush()
                progress(len(done.pixels))

    def pixels(self) -> Pixels:
        shape = (len(self.pairs), self.size, self.size, 3)
        return np.memmap(self.bytes, np.uint8, "r", shape=shape)

    def bad(self) -> dict[int, Fault]:
        """Rows whose pictures could not be decoded."""
        found: dict[int, Fault] = {}
        for entry in self._entries().values():
            for row, (kind, what) in dict(entry["bad"]).items():
                found[int(row)] = Fault(kind, self.pairs.row(int(row)), what)
        return dict(sorted(found.items()))


def _decode(pairs: Pairs, size: int, parts: Sequence[range], workers: int) -> Iterator[Decoded]:
    if len(parts) == 1 or workers == 1:
        yield from (decode_rows(pairs, size, part) for part in parts)
        return
    with Workers(partial(decode_rows, pairs, size), workers) as pool:
        yield from pool.map(parts)


def decoded(pairs: Pairs, size: int, workers: int, progress: Advance = unheard) -> Decoded:
    """All of them, in memory."""
    done = []
    for part in _decode(pairs, size, parts_of(len(pairs), PART), workers):
        done.append(part)
        progress(len(part.pixels))
    bad = {row: what for part in done for row, what in part.bad.items()}
    return Decoded(np.concatenate([part.pixels for part in done]), bad)


def stored(
    pairs: Pairs, size: int, most_gb: float, workers: int, progress: Advance = unheard
) -> Store | None:
    """The whole store, or None where it would not fit into the cache."""
    if len(pairs) * size**2 * 3 > most_gb * 1e9:
        return None
    store = Store(pairs, size)
    store.claim()
    try:
        if store.need and not make_room(store.need, most_gb * 1e9, store.folder):
            store.close()
            with suppress(OSError):
                store.folder.rmdir()
            return None
        store.fill(workers, progress)
    except BaseException:
        store.close()
        raise
    return store
