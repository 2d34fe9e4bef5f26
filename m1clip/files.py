"""Files that are complete or absent: atomic writes, folder locks, JSON lines, the cache folder. No torch."""

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it
PARTIAL = re.compile(r"\.(.+)\.\d+(\.new|\.old)?")
"""Name of a file or folder that is still being written, or that is being replaced."""


def cache_folder() -> Path:
    folder = Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"{folder} cannot be the cache ({error.strerror}); M1CLIP_CACHE names another"
        ) from None
    return folder


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line; a line cut by a crash is passed over."""
    if not path.exists():
        return
    with open(path, errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def json_safe(value: Any) -> Any:
    """The same, with None for every number that JSON cannot say."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(one) for key, one in value.items()}
    return [json_safe(one) for one in value] if isinstance(value, list | tuple) else value


@contextmanager
def lock_folder(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[bool]:
    """Whether the folder's lock could be had, held for the block. The system frees it if the process dies.

    To own it, we wait a little: somebody who only looks has it for an instant.
    """
    handle = os.open(folder, os.O_RDONLY)
    end = time.monotonic() + (0.5 if how == fcntl.LOCK_EX else 0.0)
    ours = False
    try:
        while not ours:
            try:
                fcntl.flock(handle, how | fcntl.LOCK_NB)
                ours = True
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(0.05)
        yield ours
    finally:
        os.close(handle)


def remove_partial(folder: Path) -> None:
    """Remove what a killed process left half-made; put back what it had only moved out of the way."""
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
    """The new file or the old one, never half of either; `durable` means even if the power goes."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w") as file:
            file.write(text)
        if durable:
            fsync(aside)
        os.replace(aside, path)
        if durable:
            fsync(path.parent)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` if the block ends well, and vanishes if it does not."""
    aside, old = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed and had our number
    if not path.parent.exists():
        path.parent.mkdir(parents=True)
        fsync(path.parent.parent)
    aside.mkdir()
    try:
        yield aside
        for file in aside.rglob("*"):
            if file.is_file():
                file.chmod(0o666 & ~UMASK)  # safetensors writes files that only their owner may read
            fsync(file)
        fsync(aside)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        fsync(path.parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(aside, ignore_errors=True)
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
