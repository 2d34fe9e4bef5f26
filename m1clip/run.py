"""A run is a folder: create, open, append, read. No torch, so monitoring one is instant and cannot disturb it."""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from m1clip.files import (
    JSON_BYTES,
    PARTIAL,
    atomic_write,
    fsync,
    json_safe,
    lock_folder,
    read_file,
    read_jsonl,
    remove_partial,
)


class Run:
    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.step: int | None = None  # known once this process has written a status
        self.status_fields: dict[str, Any] = {}  # the rest of that status: total, best score
        self.on_record: Callable[[dict[str, Any]], None] | None = None  # receives every record, for trackers
        self.problem: str | None = None  # what keeps it from saving, shown in its status
        self._unwritten = b""

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl; unknown values are None."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._unwritten += (json.dumps(json_safe(record), allow_nan=False) + "\n").encode()
        with suppress(OSError):  # a full disk: the line is kept and written with the next one
            self._append()
        if self.on_record is not None:
            self.on_record(record)

    def _append(self) -> None:
        handle = os.open(self.path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        size, written = os.fstat(handle).st_size, 0
        try:
            while written < len(self._unwritten):
                written += os.write(handle, self._unwritten[written:])
            self._unwritten = b""
        except OSError:
            os.ftruncate(handle, size)  # no partial lines
            raise
        finally:
            os.close(handle)

    def sync(self) -> None:
        """Flush the log to disk: a checkpoint must not survive a power cut that its log did not."""
        with suppress(OSError):
            fsync(self.path / "metrics.jsonl")

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        return (row for row in read_jsonl(self.path / "metrics.jsonl") if kind in (None, row.get("kind")))

    def truncate_log(self, step: int) -> None:
        """Remove records after `step`, which will be repeated; events stay."""
        lines = [json.dumps(record) for record in self.records() if record["step"] <= step or record["kind"] == "event"]
        atomic_write(self.path / "metrics.jsonl", "".join(line + "\n" for line in lines))

    def write_status(self, state: str, step: int, **values: Any) -> None:
        """Write the heartbeat: running, finished, stopped or failed. On a full disk the old one stays."""
        self.step, self.status_fields = step, values
        status = {"state": state, "step": step, "pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        status |= {"problem": self.problem, **values} if self.problem else values
        with suppress(OSError):
            self.write("status.json", status, durable=state != "running")

    @property
    def is_alive(self) -> bool:
        """Whether a process is training it now: the lock disappears with the process."""
        with lock_folder(self.path, fcntl.LOCK_SH) as free:  # shared: two readers do not see each other
            return not free

    def read_status(self) -> dict[str, Any]:
        """status.json, corrected by the lock: a run that claims to run without a process is dead."""
        status = {"step": 0, "state": "unknown", **self.read_or_empty("status.json")}
        is_alive = self.is_alive
        if is_alive or status["state"] == "running":
            status["state"] = "running" if is_alive else "dead"
        return status

    def summary(self) -> dict[str, Any]:
        """One row of a table of runs: progress, best score, device, and why it ended."""
        status = {**self.read_status(), "run": self.name, "device": self.read_or_empty("machine.json").get("device")}
        if status["state"] == "dead":
            status["reason"] = f"its process {status.get('pid')} is gone"
        if status["state"] != "running":
            status |= {"problem": None, "pid": None, "eta_s": None}
        texts = {key: status.get(key) for key in ("run", "state", "reason", "problem", "best_metric", "device")}
        texts = {key: None if text is None else str(text) for key, text in texts.items()}
        numbers = {key: _number(status.get(key)) for key in ("total", "eta_s", "best_score", "time")}
        return {**texts, **numbers, "step": int(_number(status["step"]) or 0), "pid": status.get("pid")}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the run inside the block; an exception that ends the block is written to the status."""
        with lock_folder(self.path) as acquired:
            if not acquired:
                raise RuntimeError(f"{self.path} is being trained by another process")
            remove_partial(self.path)
            remove_partial(self.checkpoints)
            try:
                yield
            except BaseException as error:
                if isinstance(error, OSError) and error.strerror and not error.filename:
                    error.filename = str(self.path)  # a full disk does not say which
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                if self.step is not None:
                    reason = str(error) or type(error).__name__
                    self.write_status(state, self.step, **{**self.status_fields, "reason": reason, "eta_s": None})
                raise

    def write(self, name: str, value: Any, durable: bool = True) -> None:
        atomic_write(self.path / name, json.dumps(value, indent=2) + "\n", durable)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run that holds one object."""
        with suppress(RecursionError):
            value = json.loads(read_file(self.path / name, JSON_BYTES))
            if isinstance(value, dict):
                return value
        raise ValueError(f"{self.path / name} is not a file written by m1clip")

    def read_or_empty(self, name: str) -> dict[str, Any]:
        """The same; {} if the file is missing or damaged."""
        try:
            return self.read(name)
        except (OSError, ValueError):
            return {}


def new_run_path(runs: Path, name: str | None, preset: str, overwrite: bool) -> Path:
    """Folder of a new run: its name, or the preset with the next free number (nano-1, nano-2, …).

    An existing folder is refused, unless it is a run and `overwrite` is set.
    """
    name = next_name(runs, preset) if name is None else name
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"--name must be a plain folder name, not {name!r}; --runs sets the parent folder")
    path = runs / name
    if not path.exists() or (path.is_dir() and is_empty(path)):
        return path
    if not is_run(path):
        raise FileExistsError(f"{path} exists and is not a run; choose another --name")
    if not overwrite:
        raise FileExistsError(f"{path} exists; --resume continues it, --overwrite deletes it and starts again")
    with lock_folder(path) as acquired:
        if not acquired:
            raise FileExistsError(f"{path} is being trained by another process")
    return path


def create_run(runs: Path, name: str | None, preset: str, overwrite: bool) -> Run:
    """Create a run folder; the only thing ever deleted is, with `overwrite`, a run that is not being trained."""
    path = new_run_path(runs, name, preset, overwrite)
    if is_run(path):
        with lock_folder(path) as acquired:
            if acquired:
                shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if name is None:  # another process has just taken the number
            return create_run(runs, name, preset, overwrite)
        if not is_empty(path):
            raise
        remove_partial(path)
    return Run(path)


def all_runs(runs: Path) -> list[Run]:
    """Oldest first, by when they were last started."""
    found = []
    for file in runs.glob("*/config.json"):
        with suppress(OSError):  # a run that is being deleted
            found.append((file.stat().st_mtime, file.parent))
    return [Run(path) for _, path in sorted(found) if is_run(path)]


def run_summaries(runs: Path) -> list[dict[str, Any]]:
    summaries = []
    for run in all_runs(runs):
        with suppress(OSError):  # deleted since it was listed
            summaries.append(run.summary())
    return summaries


def open_run(runs: Path, name: str | None) -> Run:
    """An existing run by name or path; by default the newest."""
    if name is None:
        found = all_runs(runs)
        if not found:
            raise FileNotFoundError(f"no run in {runs}/; `m1clip train` creates one")
        return found[-1]
    run = find_run(runs, name)
    if run is None:
        raise FileNotFoundError(f"no run {name!r} in {runs}/ or at that path")
    return run


def find_run(runs: Path, name: str) -> Run | None:
    """A run by name or path."""
    for path in (runs / name, Path(name).expanduser()):
        if is_run(path):
            return Run(path if path.name else path.resolve())  # "." has no name of its own
    return None


def find_model(runs: Path, name: str | None) -> Path | None:
    """The model folder of a run (by default of the newest), or a model or checkpoint folder; None if it is none."""
    run = open_run(runs, None) if name is None else find_run(runs, name)
    if run is None:
        path = Path(str(name)).expanduser()
        return path if {"embed_dim", "vision", "text"} <= Run(path).read_or_empty("config.json").keys() else None
    for folder in (run.model, run.path / "last"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{run.path} has no model yet; it is saved at the end, and checkpoints before")


def is_run(path: Path) -> bool:
    """Whether a training config is there, the first file a run writes; a model folder has another config."""
    return "epochs" in Run(path).read_or_empty("config.json")


def is_empty(folder: Path) -> bool:
    """Whether nothing is there but partial files of a killed process."""
    return all(PARTIAL.fullmatch(path.name) for path in folder.iterdir())


def next_name(runs: Path, stem: str) -> str:
    numbers = [path.name.removeprefix(f"{stem}-") for path in runs.glob(f"{stem}-*")]
    return f"{stem}-{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"


def _number(value: Any) -> float | int | None:
    """A finite number of reasonable size, or None."""
    return value if type(value) in (int, float) and abs(value) < 1e15 else None
