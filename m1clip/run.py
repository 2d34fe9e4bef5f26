"""A run is a folder: open, append, read. No torch, so watching one is instant and cannot disturb it."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

UMASK = os.umask(0o022)
os.umask(UMASK)  # it can only be read by setting it


class Run:
    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.step: int | None = None  # known once this process has written a status

    @property
    def name(self) -> str:
        return self.path.name

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl; what is unknown is None."""
        line = json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **values})
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(line + "\n")

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a line cut by a crash is passed over."""
        metrics = self.path / "metrics.jsonl"
        if not metrics.exists():
            return
        with open(metrics) as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if kind in (None, record["kind"]):
                    yield record

    def status(self, state: str, step: int, **values: Any) -> None:
        """The heartbeat: running, finished, stopped or failed, in status.json."""
        self.step = step
        self.write(
            "status.json", {"state": state, "pid": os.getpid(), "step": step, "time": time.time(), **values}
        )

    @contextmanager
    def owned(self) -> Iterator[None]:
        """The run is ours alone for the block; what ends the block early is written in the status."""
        with locked(self.path) as ours:
            if not ours:
                raise RuntimeError(f"{self.path} is being trained by another process")
            with self._outcome():
                yield

    @contextmanager
    def _outcome(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if isinstance(error, OSError) and error.strerror and not error.filename:
                error.filename = str(self.path)  # a full disk does not say which
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            if self.step is not None:
                with suppress(OSError):  # on a full disk the old status has to do
                    self.status(state, self.step, reason=str(error) or type(error).__name__)
            raise

    def write(self, name: str, value: Any) -> None:
        write_whole(self.path / name, json.dumps(value, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / name).read_text())
        return value


def new_path(runs: Path, name: str | None, preset: str, fresh: bool) -> Path:
    """Where a new run goes: its name, or the preset's with the next free number (nano-1, nano-2, …).

    A folder that exists is refused, unless it is a run and `fresh` says to start it again.
    """
    name = next_name(runs, preset) if name is None else name
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"a run's name is a plain word, not {name!r}; --runs says in which folder it goes")
    path = runs / name
    if path.is_dir() and not any(path.iterdir()):
        return path
    if path.exists() and not is_run(path):
        raise FileExistsError(f"{path} exists and is not a run; choose another --name")
    if path.exists() and not fresh:
        raise FileExistsError(f"{path} exists; --resume continues it, --fresh deletes it and starts again")
    if path.exists():
        with locked(path) as ours:
            if not ours:
                raise FileExistsError(f"{path} is being trained by another process")
    return path


def create(runs: Path, name: str | None, preset: str, fresh: bool) -> Run:
    """The folder of a new run; nothing is ever deleted but, with `fresh`, a run that nobody is training."""
    path = new_path(runs, name, preset, fresh)
    if is_run(path):
        with locked(path) as ours:
            if ours:
                shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if name is None:  # another process has just taken the number
            return create(runs, name, preset, fresh)
        if any(path.iterdir()):
            raise
    return Run(path)


def open_run(runs: Path, name: str | None) -> Run:
    """An existing run by name or path; the newest where no name is given."""
    if name is None:
        found = sorted(runs.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
        if not found:
            raise FileNotFoundError(f"no run in {runs}/; `m1clip train` makes one")
        return Run(found[-1].parent)
    for path in (runs / name, Path(name)):
        if is_run(path):
            return Run(path)
    raise FileNotFoundError(f"no run {name!r} in {runs}/ or at that path")


def is_run(path: Path) -> bool:
    files = ("status.json", "metrics.jsonl")  # a saved model has a config.json too, but neither of these
    return (path / "config.json").is_file() and any((path / name).is_file() for name in files)


def next_name(runs: Path, stem: str) -> str:
    numbers = [path.name.removeprefix(f"{stem}-") for path in runs.glob(f"{stem}-*")]
    return f"{stem}-{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether the folder's lock could be had, held for the block. The system frees it if the process dies."""
    handle = os.open(folder, os.O_RDONLY)
    ours = True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        ours = False
    try:
        yield ours
    finally:
        os.close(handle)


def write_whole(path: Path, text: str) -> None:
    """The new file or the old one, never half of either."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(aside, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A folder to fill; it takes the place of `path` if the block ends well, and vanishes if it does not."""
    aside, old = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in ("new", "old"))
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed and had our number
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.iterdir():
            file.chmod(0o666 & ~UMASK)  # safetensors writes files that only their owner may read
            _fsync(file)
        _fsync(aside)
        if path.exists():
            path.rename(old)
        aside.rename(path)
        _fsync(path.parent)
    finally:
        if old.exists() and not path.exists():
            old.rename(path)
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
