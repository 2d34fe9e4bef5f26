"""A disk that fails: the n-th operation that writes below a folder raises ENOSPC or EIO, or writes only a part.

Python's own files and os functions are replaced while the block runs. What libraries write by themselves (safetensors,
Arrow, Parquet) fails as they do: part of the file is written, and their own error is raised.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import SafetensorError

from m1clip.model import safe_load

NEED_NO_SPACE = ("rename", "replace", "truncate", "chmod", "utime")
ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "short": 0}


class FaultyDisk:
    """`full`: the n-th operation fails and all later ones that need space; `broken`: only the n-th; `short`: it writes
    half of its bytes."""

    def __init__(self, folder: Path, fault: str = "full", at: int | None = None):
        self.folder, self.fault, self.at = str(folder), fault, at
        self.operations = list[str]()  # their kinds and files, in order
        self.paths = dict[int, str]()  # of file descriptors that os.open returned

    def has(self, path: Any) -> bool:
        return not isinstance(path, int) and os.path.abspath(os.fspath(path)).startswith(self.folder + os.sep)

    def fails(self, kind: str, path: Any) -> bool:
        """Count an operation; whether it is one that fails."""
        self.operations.append(f"{kind} {os.path.relpath(path, self.folder)}")
        number, stays_full = len(self.operations) - 1, self.fault == "full" and kind not in NEED_NO_SPACE
        return self.at is not None and (number == self.at or (number > self.at and stays_full))

    def check(self, kind: str, path: Any) -> None:
        if self.fails(kind, path) and self.fault != "short":
            raise self.error(path)

    def error(self, path: Any = None) -> OSError:
        code = ERRORS[self.fault]
        return OSError(code, os.strerror(code), *([] if path is None else [str(path)]))

    def write(self, write: Callable[[Any], int], data: Any, path: str) -> int:
        """Write the data, or half of it and then fail; without a file name, as the system does."""
        data = memoryview(data).cast("B")
        if not self.fails("write", path):
            return write(data)
        written = write(data[: max(1, len(data) // 2)])
        if self.fault == "short":
            return written
        raise self.error()


class FaultyFile(io.FileIO):
    """The lowest layer of an open file: buffers and text are Python's own."""

    def __init__(self, disk: FaultyDisk, path: Any, mode: str):
        disk.check("open", path)
        self.disk = disk
        super().__init__(path, mode)

    def write(self, data: Any) -> int:
        return self.disk.write(super().write, data, str(self.name))

    def truncate(self, size: int | None = None) -> int:
        self.disk.check("truncate", self.name)
        return super().truncate(size)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self.disk.check("close", self.name)


def faulty_open(disk: FaultyDisk, real_open: Callable[..., Any]) -> Callable[..., Any]:
    def open_file(
        file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if not set(mode) & set("wax+") or not disk.has(file):
            return real_open(file, mode, buffering, encoding, *rest, **named)
        raw = FaultyFile(disk, file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        buffer = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(
            buffer, encoding or "utf-8", *rest, **{k: v for k, v in named.items() if k != "closefd"}
        )

    return open_file


def faulty_save_file(disk: FaultyDisk, save_file: Callable[..., None]) -> Callable[..., None]:
    """safetensors writes in Rust, and raises no OSError."""

    def save(tensors: Any, path: Path, metadata: Any = None) -> None:
        save_file(tensors, path, metadata)
        if disk.has(path) and disk.fails("save_file", path) and disk.fault != "short":
            os.truncate(path, path.stat().st_size // 2)
            raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(ERRORS[disk.fault])}")

    return save


@contextmanager
def faulty(disk: FaultyDisk) -> Iterator[FaultyDisk]:
    """Inside the block, everything below the disk's folder is written by it."""
    with pytest.MonkeyPatch.context() as patch:
        patch_natives(disk, patch)  # first: they use the real functions
        patch_descriptors(disk, patch)
        for name in ("rename", "replace", "symlink"):
            patch_checked(disk, patch, name, lambda args: args[1])
        for name in ("mkdir", "truncate", "chmod", "utime"):
            patch_checked(disk, patch, name, lambda args: args[0])
        open_file = faulty_open(disk, builtins.open)
        patch.setattr(builtins, "open", open_file)
        patch.setattr(io, "open", open_file)
        try:
            yield disk
        finally:
            for handle in list(disk.paths):  # locks of caches, which are held until the process ends
                os.close(handle)


def patch_checked(disk: FaultyDisk, patch: pytest.MonkeyPatch, name: str, path_of: Callable[[Any], Any]) -> None:
    real = getattr(os, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        path = path_of(args)
        if disk.has(path) and not (name == "mkdir" and os.path.exists(path)):  # which the system says first
            disk.check(name, path)
        return real(*args, **kwargs)

    patch.setattr(os, name, checked)


def patch_descriptors(disk: FaultyDisk, patch: pytest.MonkeyPatch) -> None:
    real_open, real_write, real_close = os.open, os.write, os.close
    is_writable = dict[int, bool]()

    def open_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        below = "dir_fd" not in kwargs and disk.has(path)
        if below and flags & (os.O_WRONLY | os.O_RDWR):
            disk.check("open", path)
        handle = real_open(path, flags, *args, **kwargs)
        if below and not flags & os.O_NONBLOCK:  # which a file object will close
            disk.paths[handle], is_writable[handle] = str(path), bool(flags & (os.O_WRONLY | os.O_RDWR))
        return handle

    def write(handle: int, data: Any) -> int:
        if handle not in disk.paths:
            return real_write(handle, data)
        return disk.write(lambda part: real_write(handle, part), data, disk.paths[handle])

    def fsync(handle: int) -> None:  # no power cut is tested: the real one would only take time
        if handle in disk.paths:
            disk.check("fsync", disk.paths[handle])

    def close(handle: int) -> None:
        real_close(handle)
        path = disk.paths.pop(handle, None)
        if path is not None and is_writable[handle]:
            disk.check("close", path)

    for name, function in (("open", open_descriptor), ("write", write), ("fsync", fsync), ("close", close)):
        patch.setattr(os, name, function)


def patch_natives(disk: FaultyDisk, patch: pytest.MonkeyPatch) -> None:
    """Arrow and Parquet are given a Python file, whose errors they pass on."""
    new_file, write_table = pa.ipc.new_file, pq.write_table

    @contextmanager
    def new_arrow_file(path: str, *args: Any) -> Iterator[Any]:
        with open(path, "wb") as file, new_file(file, *args) as writer:
            yield writer

    def write_parquet(table: pa.Table, path: Path, **options: Any) -> None:
        try:
            with open(path, "wb") as file:
                write_table(table, file, **options)
        except OSError:
            with suppress(OSError):
                os.unlink(path)
            raise

    patch.setattr(safe_load, "save_file", faulty_save_file(disk, safe_load.save_file))
    patch.setattr(pa.ipc, "new_file", new_arrow_file)
    patch.setattr(pq, "write_table", write_parquet)
