"""A run is a folder: open, append, read. No torch, so watching one is instant and cannot disturb it."""

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

from m1clip.files import PARTIAL, atomic_write, fsync, json_safe, lock_folder, read_jsonl, remove_partial


class Run:
    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.step: int | None = None  # known once this process has written a status
        self.standing: dict[str, Any] = {}  # what that status said beside: total, best score
        self.mirror: Callable[[dict[str, Any]], None] | None = None  # hears every record, for trackers
        self._unwritten = b""
        self.trouble: str | None = None  # what keeps it from saving, for whoever looks at its status

    @property
    def name(self) -> str:
        return self.path.name

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl; what is unknown is None."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._unwritten += (json.dumps(json_safe(record), allow_nan=False) + "\n").encode()
        with suppress(OSError):  # a full disk: what it refuses is kept and goes with the next line
            self._append()
        if self.mirror is not None:
            self.mirror(record)

    def _append(self) -> None:
        handle = os.open(self.path / "metrics.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        whole, done = os.fstat(handle).st_size, 0
        try:
            while done < len(self._unwritten):
                done += os.write(handle, self._unwritten[done:])
            self._unwritten = b""
        except OSError:
            os.ftruncate(handle, whole)  # the disk took half a line: none is better
            raise
        finally:
            os.close(handle)

    def sync(self) -> None:
        """The log as far as it is written survives a power cut: a checkpoint must not be newer than it."""
        with suppress(OSError):
            fsync(self.path / "metrics.jsonl")

    def records(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        lines = read_jsonl(self.path / "metrics.jsonl")
        return (record for record in lines if kind in (None, record.get("kind")))

    def rewind(self, step: int) -> None:
        """Forget what was measured after `step`, which will be done again; what happened stays known."""
        lines = [
            json.dumps(record)
            for record in self.records()
            if record["step"] <= step or record["kind"] == "event"
        ]
        atomic_write(self.path / "metrics.jsonl", "".join(line + "\n" for line in lines))

    def status(self, state: str, step: int, **values: Any) -> None:
        """The heartbeat: running, finished, stopped or failed. On a full disk the old one stays."""
        self.step, self.standing = step, values
        who = {"pid": os.getpid(), "host": socket.gethostname(), "time": time.time()}
        who |= {"trouble": self.trouble} if self.trouble else {}
        with suppress(OSError):
            text = json.dumps({"state": state, "step": step, **who, **values}, indent=2) + "\n"
            atomic_write(self.path / "status.json", text, durable=state != "running")

    @property
    def alive(self) -> bool:
        """Whether some process is training it now: the lock goes with the process."""
        with lock_folder(self.path, fcntl.LOCK_SH) as free:  # shared: two who look do not see each other
            return not free

    def state(self) -> dict[str, Any]:
        """status.json with the truth about the process: one that says it runs, and does not, is dead."""
        try:
            status = self.read("status.json")
        except (OSError, ValueError):
            status = {}
        if self.alive:
            return {"step": 0, **status, "state": "running"}
        said = status.get("state", "unknown")
        return {"step": 0, **status, "state": "dead" if said == "running" else said}

    def summary(self) -> dict[str, Any]:
        """One line of a table of runs: how far, how good, where, and why it ended if it did."""
        state = self.state()
        try:
            device = self.read("machine.json").get("device")
        except (OSError, ValueError):
            device = None
        running, dead = state["state"] == "running", state["state"] == "dead"
        why = f"its process {state.get('pid')} is gone" if dead else state.get("reason")
        return {
            "run": self.name,
            "state": str(state["state"]),
            "reason": _words(why),
            "trouble": _words(state.get("trouble")) if running else None,
            "pid": state.get("pid") if running else None,
            "step": int(_number(state.get("step")) or 0),
            "total": _number(state.get("total")),
            "eta_s": _number(state.get("eta_s")) if running else None,
            "best_metric": _words(state.get("best_metric")),
            "best_score": _number(state.get("best_score")),
            "device": _words(device),
            "time": _number(state.get("time")),
        }

    @contextmanager
    def owned(self) -> Iterator[None]:
        """The run is ours alone for the block; what ends the block early is written in the status."""
        with lock_folder(self.path) as ours:
            if not ours:
                raise RuntimeError(f"{self.path} is being trained by another process")
            remove_partial(self.path)
            remove_partial(self.checkpoints)
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
                why = str(error) or type(error).__name__
                self.status(state, self.step, **{**self.standing, "reason": why, "eta_s": None})
            raise

    def write(self, name: str, value: Any) -> None:
        atomic_write(self.path / name, json.dumps(value, indent=2) + "\n")

    def read(self, name: str) -> dict[str, Any]:
        """A file of the run that holds one object."""
        try:
            value = json.loads((self.path / name).read_text())
        except RecursionError:
            value = None
        if not isinstance(value, dict):
            raise ValueError(f"{self.path / name} is not what a run writes")
        return value


def new_path(runs: Path, name: str | None, preset: str, overwrite: bool) -> Path:
    """Where a new run goes: its name, or the preset's with the next free number (nano-1, nano-2, …).

    A folder that exists is refused, unless it is a run and `overwrite` says to start it again.
    """
    name = next_name(runs, preset) if name is None else name
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"a run's name is a plain word, not {name!r}; --runs says in which folder it goes")
    path = runs / name
    if path.is_dir() and is_empty(path):
        return path
    if path.exists() and not is_run(path):
        raise FileExistsError(f"{path} exists and is not a run; choose another --name")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path} exists; --resume continues it, --overwrite deletes it and starts again"
        )
    if path.exists():
        with lock_folder(path) as ours:
            if not ours:
                raise FileExistsError(f"{path} is being trained by another process")
    return path


def create(runs: Path, name: str | None, preset: str, overwrite: bool) -> Run:
    """The folder of a new run; nothing is ever deleted but, with `overwrite`, a run that nobody is training."""
    path = new_path(runs, name, preset, overwrite)
    if is_run(path):
        with lock_folder(path) as ours:
            if ours:
                shutil.rmtree(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir()
    except FileExistsError:
        if name is None:  # another process has just taken the number
            return create(runs, name, preset, overwrite)
        if not is_empty(path):
            raise
        remove_partial(path)
    return Run(path)


def all_runs(runs: Path) -> list[Run]:
    """Oldest first, by when they were last begun."""
    found = []
    for file in runs.glob("*/config.json"):
        with suppress(OSError):  # one that is being deleted
            found.append((file.stat().st_mtime, file.parent))
    return [Run(path) for _, path in sorted(found) if is_run(path)]


def summaries(runs: Path) -> list[dict[str, Any]]:
    """Of every run, oldest first."""
    found = []
    for run in all_runs(runs):
        with suppress(OSError):  # deleted since it was listed
            found.append(run.summary())
    return found


def open_run(runs: Path, name: str | None) -> Run:
    """An existing run by name or path; the newest where no name is given."""
    if name is None:
        found = all_runs(runs)
        if not found:
            raise FileNotFoundError(f"no run in {runs}/; `m1clip train` makes one")
        return found[-1]
    for path in (runs / name, Path(name)):
        if is_run(path):
            return Run(path if path.name else path.resolve())  # "." has no name of its own
    raise FileNotFoundError(f"no run {name!r} in {runs}/ or at that path")


def is_run(path: Path) -> bool:
    """Whether a training configuration is there, the first file that a run writes; a model's is another."""
    try:
        return "epochs" in Run(path).read("config.json")
    except (OSError, ValueError):
        return False


def is_empty(folder: Path) -> bool:
    """But for what a killed process left half-made."""
    return all(PARTIAL.fullmatch(path.name) for path in folder.iterdir())


def _number(value: Any) -> float | int | None:
    """None for what is no number that can be counted with."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return value if known else None


def _words(value: Any) -> str | None:
    return None if value is None else str(value)


def next_name(runs: Path, stem: str) -> str:
    numbers = [path.name.removeprefix(f"{stem}-") for path in runs.glob(f"{stem}-*")]
    return f"{stem}-{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"
