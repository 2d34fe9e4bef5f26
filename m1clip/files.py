"""Files that are complete or absent: atomic writes, folder locks, untrusted JSON, the cache folder. No torch."""

import fcntl
import io
import json
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any, cast

import orjson

UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it
MAX_JSON_BYTES, MAX_LINE_BYTES = 64 << 20, 1 << 20  # of a JSON file, of a line; ours stay below a tenth of it
MAX_DEPTH = 32  # of nested lists and objects: deeper ones would exhaust the stack of whoever walks through them
MAX_LOG_BYTES = 8 << 30
# A file or folder that is being written, replaced or removed: its name, the process that does it, and which it is.
PARTIAL = re.compile(r"\.(.+)\.(\d+)\.(new|old|removed)")
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


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; anything else is refused: a FIFO would block, a device may be endless."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise io.UnsupportedOperation(f"{path} is not a regular file")  # an OSError and a ValueError
    return open(handle, "rb")


def read_file(path: Path, limit: int) -> bytes:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size / 1e6:,.1f} MB; at most {limit / 1e6:,.1f} MB are read")
        return file.read(size)


def remove_irregular(path: Path) -> None:
    """Remove what is in place of a file of ours in the cache, such as a folder, a link or a FIFO."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            shutil.rmtree(path)
        elif not stat.S_ISREG(mode):
            path.unlink()


def parse_json(data: bytes) -> Any:
    """The value of JSON text that anybody may have written; ValueError with the reason if it cannot be used."""
    if not data.strip():
        raise ValueError("it is empty")
    try:
        value = json.loads(data.decode())
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair could never be printed
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeError) else "a number has too many digits"
        raise ValueError(reason) from None
    require_shallow(data, value)
    return value


def require_shallow(data: bytes, value: Any) -> None:
    """Raise ValueError if the value of JSON text is nested too deeply; most text has few brackets anyway."""
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and not _is_within(value, MAX_DEPTH):
        raise ValueError("it is nested too deeply")


def _is_within(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    return depth > 0 and all(_is_within(item, depth - 1) for item in (value.values() if type(value) is dict else value))


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of ours; ValueError with path and reason if it is damaged, OSError if it is lost."""
    data = read_file(path, MAX_JSON_BYTES)
    try:
        value = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it is not an object")
    return value


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


def is_json_object(value: Any) -> bool:
    return isinstance(value, dict)


def read_jsonl(
    path: Path, skipped: list[int] | None = None, is_valid: Callable[[Any], bool] = is_json_object
) -> Iterator[dict[str, Any]]:
    """The valid objects of a file with one per line; none without a file. Numbers of other lines go to `skipped`."""
    with suppress(FileNotFoundError, NotADirectoryError), open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_LOG_BYTES:
            raise ValueError(f"{path} has {size / 1e9:,.1f} GB, more than any log; move it away")
        for number, line in enumerate(_bounded_lines(file), 1):
            record = None
            with suppress(ValueError):
                record = parse_json(line)
            if is_valid(record):
                yield cast(dict[str, Any], record)
            elif skipped is not None and line.strip():
                skipped.append(number)


def _bounded_lines(file: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file; of one that is too long, only its beginning."""
    while line := file.readline(MAX_LINE_BYTES):
        rest = line
        while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            line, rest = b"too long", file.readline(MAX_LINE_BYTES)
        yield line


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
        if partial is None or (name and (partial[1] != name or is_process(int(partial[2])))):
            continue
        if partial[3] == "old" and not (folder / partial[1]).exists():
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
