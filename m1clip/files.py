"""Files that are complete or absent: atomic writes, folder locks, JSON lines, the cache folder. No torch."""

import fcntl
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import orjson

UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it
PARTIAL = re.compile(r"\.(.+)\.\d+(\.new|\.old)?")  # a file or folder that is being written or replaced
# Bounds of files from outside. A config.json has some kB; one with the names of 21,841 classes has 1.5 MB.
JSON_BYTES = 4_000_000
BYTES_PER_ITEM = 16  # in a JSON file as large as its bound; a list of empty lists has 1.5


def cache_folder() -> Path:
    folder = Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot use the cache folder {folder} ({error.strerror}); set M1CLIP_CACHE to another") from None
    return folder


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A file from outside; a pipe or device, which might block or never end, is refused."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path} is not a regular file")
        with open(handle, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(handle)


def read_file(path: Path, limit: int) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size / 1e6:,.1f} MB; at most {limit / 1e6:,.1f} MB are read")
        return file.read(size)


def read_json(path: Path, limit: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file from outside; its size, depth and number of items are bounded."""
    data = read_file(path, limit)
    try:
        # A list of empty lists takes 27 times as much memory as its text.
        if sum(map(data.count, (b",", b"[", b"{"))) > limit / BYTES_PER_ITEM:
            raise ValueError("it has too many items")
        value = orjson.loads(data)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return value


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; none without a file. A line cut by a crash is skipped."""
    with suppress(FileNotFoundError, NotADirectoryError), open(path, errors="replace") as file:
        for line in file:
            with suppress(ValueError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def json_safe(value: Any) -> Any:
    """The same value with None for NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list | tuple) else value


@contextmanager
def lock_folder(folder: Path, mode: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Lock a folder for the block; yields whether that worked. The system frees the lock of a dead process.

    An exclusive lock waits half a second: a reader that checks the state holds it for an instant.
    """
    handle, acquired = os.open(folder, os.O_RDONLY), False
    try:
        for delay in (0.0, *[0.05] * (10 if mode == fcntl.LOCK_EX else 0)):
            time.sleep(delay)
            with suppress(BlockingIOError):
                fcntl.flock(handle, mode | fcntl.LOCK_NB)
                acquired = True
                break
        yield acquired
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove partial files of a killed process; restore a folder it was about to replace."""
    for path in folder.glob(".*"):
        partial = PARTIAL.fullmatch(path.name)
        if partial is None:
            continue
        if partial[2] == ".old" and not (folder / partial[1]).exists():
            path.rename(folder / partial[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def atomic_write(path: Path, text: str, durable: bool = True) -> None:
    """Replace a file atomically; `durable` also survives a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w") as file:
            file.write(text)
        if durable:
            fsync(temporary)
        os.replace(temporary, path)
        if durable:
            fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder that replaces `path` if the block succeeds, and is removed if it does not."""
    temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{suffix}") for suffix in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with our process id
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        fsync(path.parent.parent)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(0o666 & ~UMASK)  # safetensors writes files that only their owner may read
            fsync(file)
        fsync(temporary)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        fsync(path.parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the data in the drive's own memory
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)
    finally:
        os.close(handle)
