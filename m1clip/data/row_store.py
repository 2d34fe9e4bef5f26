"""Rows of equal size in one file, made part by part: whole or gone on with, never trusted unseen.

Each part has its checksum in a journal: what was killed goes on where it was, and what the disk has damaged
is noticed and made again. Runs share it. No torch.
"""

import fcntl
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.data.pairs import Advance
from m1clip.data.workers import parts_of

PART = 256  # rows
Notes = dict[Any, Any]


def unheard(done: int) -> None:
    pass


class Store:
    """Whole once `fill` has returned."""

    def __init__(self, folder: Path, rows: int, row_bytes: int):
        self.folder, self.rows, self.row_bytes = folder, rows, row_bytes
        self.bytes, self.journal = folder / "rows.bin", folder / "journal.jsonl"
        self.parts = parts_of(rows, PART)

    @property
    def need(self) -> int:
        """Bytes still to be written."""
        there = self.bytes.stat().st_size if self.bytes.exists() else 0
        return max(0, self.rows * self.row_bytes - there)

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

    def fill(
        self, make: Callable[[list[range]], Iterable[tuple[bytes, Notes]]], progress: Advance = unheard
    ) -> None:
        """Make it whole: what is there is verified, what is missing or damaged is made, in order."""
        entries = self.entries()
        sound = self._verified(entries, progress)
        missing = [k for k in range(len(self.parts)) if k not in sound]
        if missing:
            self._write(missing, make([self.parts[k] for k in missing]), progress)
        fcntl.flock(self._lock, fcntl.LOCK_SH)  # kept while we live: what is in use is not removed

    def close(self) -> None:
        """From here on it may be removed to make room."""
        os.close(self._lock)

    def entries(self) -> dict[int, Notes]:
        """The journal: checksum of each part, and what was noted of it; a line cut by a crash is void."""
        entries: dict[int, Notes] = {}
        with suppress(FileNotFoundError):
            for line in self.journal.read_bytes().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    if isinstance(entry["crc"], int) and isinstance(entry["bad"], dict):
                        entries[int(entry["part"])] = entry
        return entries

    def is_final(self, entry: Notes) -> bool:
        """Whether a part that is as it was written need not be made again."""
        return True

    def _verified(self, entries: dict[int, Notes], progress: Advance) -> set[int]:
        """The parts whose bytes are those that were written."""

        def check(k: int) -> int | None:
            part = self.parts[k]
            with open(self.bytes, "rb") as file:
                file.seek(part.start * self.row_bytes)
                found = zlib.crc32(file.read(len(part) * self.row_bytes))
            sound = found == entries[k]["crc"] and self.is_final(entries[k])
            progress(len(part) if sound else 0)
            return k if sound else None

        if not entries or not self.bytes.exists():
            return set()
        with ThreadPoolExecutor() as pool:  # the checksum lets other threads run
            return {k for k in pool.map(check, (k for k in entries if k < len(self.parts))) if k is not None}

    def _write(self, missing: list[int], made: Iterable[tuple[bytes, Notes]], progress: Advance) -> None:
        self.bytes.touch()
        with open(self.bytes, "r+b") as file, open(self.journal, "ab") as journal:
            journal.write(b"\n")  # ends a line that a crash may have cut
            for k, (data, notes) in zip(missing, made, strict=True):
                # Written, not mapped: on a full disk a write fails with an error, a mapped page kills us.
                file.seek(self.parts[k].start * self.row_bytes)
                file.write(data)
                file.flush()  # before the journal speaks of it
                entry = {"part": k, "crc": zlib.crc32(data), "bad": notes}
                journal.write(json.dumps(entry).encode() + b"\n")
                journal.flush()
                progress(len(self.parts[k]))

    def mapped(self, dtype: type[np.generic], *shape: int) -> NDArray[Any]:
        """All rows, each of `shape`, read as they are touched."""
        return np.memmap(self.bytes, dtype, "r", shape=(self.rows, *shape))
