"""Files that are complete or absent: atomic writes, folder locks, JSON lines, the cache folder. No torch."""

import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it
# A file or folder that is being written, replaced or removed: its name, the process that does it, and which it is.
PARTIAL = re.compile(r"\.(.+)\.(\d+)(\.new|\.old|\.removed)?")


def cache_folder() -> Path:
    folder = Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot use the cache folder {folder} ({error.strerror}); set M1CLIP_CACHE to another") from None
    return folder


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


def remove_partial(folder: Path, name: str | None = None) -> None:
    """Remove partial files of killed processes; restore a folder that one was about to replace.

    Without a name nobody else may be writing in the folder; with one, its files of other live processes are left alone.
    """
    for path in folder.glob(".*" if name is None else f".{escape(name)}.*"):
        partial = PARTIAL.fullmatch(path.name)
        if partial is None or (name and (partial[1] != name or not partial[3] or is_process(int(partial[2])))):
            continue
        if partial[3] == ".old" and not (folder / partial[1]).exists():
            path.rename(folder / partial[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # of another user
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the block name this path: a full disk names none, and a partial file means nothing to a user."""
    try:
        yield
    except OSError as error:
        if error.strerror and (not error.filename or PARTIAL.search(f"/{error.filename}")):
            error.filename, error.filename2 = str(path), None
        raise


def atomic_write(path: Path, data: str | bytes, durable: bool = True) -> None:
    """Replace a file atomically; `durable` also survives a power cut, and removes what a killed process left of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    if durable:
        remove_partial(path.parent, path.name)
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                fsync(temporary)
            os.replace(temporary, path)
            if durable:
                fsync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def append_lines(path: Path, lines: bytes) -> None:
    """Append whole lines: after an error none of them is there. A line that a crash has cut is ended first."""
    size = path.stat().st_size if path.exists() else 0
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if size and os.pread(handle, 1, size - 1) != b"\n":
                lines = b"\n" + lines
            while lines:
                lines = lines[os.write(handle, lines) :]
        finally:
            os.close(handle)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A new folder that replaces `path` if the block succeeds, and is removed if it does not."""
    temporary, old = (path.with_name(f".{path.name}.{os.getpid()}.{suffix}") for suffix in ("new", "old"))
    with naming(path):
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process with our process id
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            fsync(path.parent.parent)
        remove_partial(path.parent, path.name)
        try:
            temporary.mkdir()
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


@contextmanager
def replace_files(folder: Path) -> Iterator[Path]:
    """A new folder whose files, if the block succeeds, replace those of the same names in `folder`; others stay."""
    is_new, temporary = not folder.exists(), folder / f".files.{os.getpid()}.new"
    with naming(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder, "files")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            for file in sorted(temporary.rglob("*")):
                target = folder / file.relative_to(temporary)
                target.mkdir(exist_ok=True) if file.is_dir() else os.replace(file, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):  # it has files
                if is_new:
                    folder.rmdir()


def remove_folder(path: Path) -> None:
    """Remove a folder; a kill leaves no part of it under its name."""
    removed = path.with_name(f".{path.name}.{os.getpid()}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        if hasattr(fcntl, "F_FULLFSYNC"):  # macOS: fsync leaves the data in the drive's own memory
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
        else:
            os.fsync(handle)
    finally:
        os.close(handle)
