"""A run is a folder: create, open, append, read. No torch, so monitoring one is instant and cannot disturb it."""

import errno
import fcntl
import json
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from m1clip.config import TrainConfig, check_config, from_dict
from m1clip.files import (
    PARTIAL,
    append_lines,
    atomic_write,
    fsync,
    json_safe,
    lock_folder,
    naming,
    read_json_object,
    read_jsonl,
    remove_folder,
    remove_partial,
)
from m1clip.status import BEAT_S, Status, find_problem, read_fallback, remove_fallback, time_of, write_fallback
from m1clip.status import number_or_unknown as _number

COPIED = ("config.json", "data.json")  # that every checkpoint has a copy of
RUN_FILES = (*COPIED, "status.json", "machine.json", "metrics.jsonl", "checkpoints")
MAX_NAME = 200  # bytes of a run's name; file systems allow 255, and temporary names are longer


class Run:
    def __init__(self, path: Path):
        self.path, self.name = path, path.name
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.step: int | None = None  # known once this process has written a status
        self.status_fields: dict[str, Any] = {}  # the rest of that status: total, best score
        self.on_record: Callable[[dict[str, Any]], None] | None = None  # receives every record, for trackers
        self.copies: dict[str, Any] = {}  # what this process has written of COPIED
        self.failures: dict[str, tuple[str, float]] = {}  # what cannot be written now: the reason, and since when
        self.phase, self.progress_at = "starting", time.time()  # "" while steps are taken; when it last progressed
        self._unwritten, self._status, self._writing = b"", Status(), threading.RLock()
        self._may_have_fallback = True

    def log(self, kind: str, step: int, **values: Any) -> None:
        """Append one line to metrics.jsonl; unknown values are None."""
        record = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._unwritten += (json.dumps(json_safe(record), allow_nan=False) + "\n").encode()
        with self.reported("metrics.jsonl"):  # on a full disk the line is kept and written with the next one
            self._append()
        if self.on_record is not None:
            self.on_record(record)

    def _append(self) -> None:
        if self._unwritten:
            append_lines(self.path / "metrics.jsonl", self._unwritten)
            self._unwritten = b""

    def sync(self) -> None:
        """Flush the log to disk: a checkpoint must not survive a crash that its log did not."""
        with suppress(OSError):
            self._append()
            fsync(self.path / "metrics.jsonl")

    @contextmanager
    def reported(self, part: str) -> Iterator[None]:
        """Note in the status since when a part of the run cannot be written, instead of raising an OSError."""
        try:
            yield
            self.failures.pop(part, None)
        except OSError as error:
            self.note_failure(part, error)

    def note_failure(self, part: str, error: OSError) -> None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "disk full" if is_full else f"cannot write {part}: {error.strerror or error}"
        self.failures[part] = (reason, self.failures.get(part, ("", time.time()))[1])

    def records(self, kind: str | None = None, skipped: list[int] | None = None) -> Iterator[dict[str, Any]]:
        rows = read_jsonl(self.path / "metrics.jsonl", skipped, is_record)
        return (row for row in rows if kind in (None, row["kind"]))

    def truncate_log(self, step: int) -> int:
        """Remove records after `step`, which will be repeated; events stay. Return how many lines were no records."""
        skipped = list[int]()
        records = self.records(skipped=skipped)
        lines = [json.dumps(record) for record in records if record["step"] <= step or record["kind"] == "event"]
        atomic_write(self.path / "metrics.jsonl", "".join(line + "\n" for line in lines))
        return len(skipped)

    def write_status(self, state: str, step: int, **values: Any) -> None:
        """Write the status: running, finished, stopped or failed. On a full disk, outside of the run folder."""
        with self._writing:
            self.step, self.status_fields, self.progress_at = step, values, time.time()
            self._status = {"state": state, "step": step, "pid": os.getpid(), "host": socket.gethostname(), **values}
            self._write_status()

    def _write_status(self) -> None:
        status = {**self._status, "time": time.time(), "progress_time": self.progress_at, "phase": self.phase}
        before = self.failures.pop("status.json", None)
        try:
            self.write("status.json", {**status, **self._problem()}, durable=status["state"] != "running")
            if before or self._may_have_fallback:
                remove_fallback(self.path)
            self._may_have_fallback = False
        except OSError as error:
            self.note_failure("status.json", error)
            self.failures["status.json"] = before or self.failures["status.json"]
            write_fallback(self.path, {**status, **self._problem()})
        self._status["time"] = status["time"]

    def _problem(self) -> dict[str, Any]:
        """The oldest failure, if there is any."""
        failures = list(self.failures.values())  # a copy: another thread may change them
        first = min(failures, key=lambda failure: failure[1], default=None)
        return {"problem": first[0], "problem_since": first[1]} if first else {}

    @contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Inside the block, a thread writes the status again whenever nobody else has: in evaluations and long steps.

        It says that the process is alive, not that it progresses: `progress_time` stays what it is.
        """
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                with self._writing:
                    if self._status.get("state") == "running" and time.time() - self._status["time"] >= BEAT_S:
                        self._write_status()

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT_S)  # not for ever: its disk may hang

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Name in the status what a run does that takes no steps and may take long."""
        self.phase, self.progress_at = name, time.time()
        try:
            yield
        finally:
            self.phase, self.progress_at = "", time.time()

    @property
    def is_alive(self) -> bool:
        """Whether a process is training it now: the lock disappears with the process."""
        with lock_folder(self.path, fcntl.LOCK_SH) as free:  # shared: two readers do not see each other
            return not free

    def read_status(self) -> Status:
        """The newest status, corrected by the lock: a run that claims to run without a process is dead."""
        return correct_state(self._newest_status(), self.is_alive)

    def _newest_status(self) -> Status:
        found: list[Status] = [self.read_or_empty("status.json"), read_fallback(self.path)]
        newest: Status = max(found, key=time_of)
        state = newest.get("state")
        return {"step": 0, **newest, "state": state if isinstance(state, str) else "unknown"}

    def summary(self) -> dict[str, Any]:
        """One row of a table of runs: progress, best score, device, why it ended, and what is wrong with it."""
        written, is_alive = self._newest_status(), self.is_alive
        status = {**correct_state(written, is_alive), "run": self.name}
        status["device"] = self.read_or_empty("machine.json").get("device")
        if status["state"] == "dead":
            status["reason"] = f"its process {status.get('pid')} is gone"
        if not is_alive:
            status |= {"pid": None, "eta_s": None}
        last_step = next((step_of(path) for path in reversed(list_checkpoints(self))), None)
        found = [find_problem(written, self.path, last_step)] if is_alive else []
        found += [("damaged", f"{damage}; {self._repair(name)}") for name, damage in self.damaged_files().items()]
        problems = [problem for problem in found if problem]
        status["warning"] = ", ".join(dict.fromkeys(short for short, _ in problems)) or None
        status["problem"] = "; ".join(sentence for _, sentence in problems) or None
        keys = ("run", "state", "reason", "warning", "problem", "best_metric", "device")
        texts = {key: None if status.get(key) is None else str(status[key]) for key in keys}
        numbers = {key: _number(status.get(key)) for key in ("total", "eta_s", "best_score", "time")}
        return {**texts, **numbers, "step": int(_number(status["step"]) or 0), "pid": status.get("pid")}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the run inside the block; an exception that ends the block is written to the status."""
        with lock_folder(self.path) as acquired:
            if not acquired:
                raise RuntimeError(f"{self.path} is being trained by another process")
            if os.path.lexists(self.checkpoints) and not self.checkpoints.is_dir():
                raise FileExistsError(f"{self.checkpoints} is not a folder; move it away")
            remove_partial(self.path)
            remove_partial(self.checkpoints)
            try:
                with naming(self.path), self.heartbeat():
                    yield
            except BaseException as error:
                state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                if self.step is not None:
                    reason = str(error) or type(error).__name__
                    with suppress(OSError):  # or it would hide the error
                        self.write_status(state, self.step, **{**self.status_fields, "reason": reason, "eta_s": None})
                with suppress(OSError):  # unless something was written
                    self.path.rmdir()
                raise

    def write(self, name: str, value: Any, durable: bool = True) -> None:
        if name in COPIED:
            self.copies[name] = value
        atomic_write(self.path / name, json.dumps(value, indent=2) + "\n", durable)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the run that holds one object."""
        return read_json_object(self.path / name)

    def read_or_empty(self, name: str) -> dict[str, Any]:
        """The same; {} if the file is missing or damaged."""
        try:
            return self.read(name)
        except (OSError, ValueError):
            return {}

    def damaged_files(self) -> dict[str, str]:
        """What is wrong with the files of the run, by name."""
        damage = {name: file_damage(self.path / name, file_version(self.path / name)) for name in RUN_FILES[:-1]}
        return {name: reason for name, reason in damage.items() if reason}

    def _repair(self, name: str) -> str:
        """What to do about a damaged file."""
        if (self.path / name).is_dir() or name == "metrics.jsonl":
            return "move it away"
        if name not in COPIED:
            return "it is written again when the run is resumed"
        if self.find_copy(name):
            return "m1clip train --resume restores it from a checkpoint"
        return "no checkpoint has a copy: restore it from a backup"

    def find_copy(self, name: str) -> tuple[dict[str, Any], Path] | None:
        """config.json or data.json as the newest intact checkpoint has it, and that checkpoint."""
        for path in reversed(list_checkpoints(self)):
            with suppress(OSError, ValueError, AttributeError):
                if isinstance(copy := read_state(path).get("run", {}).get(name), dict):
                    return copy, path
        return None

    def read_or_copy(self, name: str) -> tuple[dict[str, Any], str]:
        """config.json or data.json; if it is missing or damaged, its copy in a checkpoint and a sentence about that."""
        reason = self.damaged_files().get(name)
        try:
            if reason is None:
                return self.read(name), ""
        except (OSError, ValueError) as error:
            reason = f"{self.path / name} is missing" if isinstance(error, FileNotFoundError) else str(error)
        if found := self.find_copy(name):
            return found[0], f"{reason}; using the copy in {found[1]}"
        raise ValueError(f"{reason}; {self._repair(name)}")

    def read_config(self) -> tuple[TrainConfig, str]:
        """The training config, and a sentence if it had to be read from a checkpoint."""
        values, note = self.read_or_copy("config.json")
        try:
            return check_config(from_dict(TrainConfig, values)), note
        except (ValueError, TypeError) as error:
            found = self.find_copy("config.json")
            repair = f"; if you delete it, the copy in {found[1]} is used" if found else ""
            raise ValueError(f"{self.path / 'config.json'}: {error}{repair}") from None


def correct_state(status: Status, is_alive: bool) -> Status:
    if is_alive:
        return {**status, "state": "running"}
    return {**status, "state": "dead"} if status["state"] == "running" else status


def is_record(value: Any) -> bool:
    """Whether a value is a record of metrics.jsonl: an object with a kind and a step."""
    kind, step = (value.get("kind"), value.get("step")) if isinstance(value, dict) else (None, None)
    return isinstance(kind, str) and type(step) is int and 0 <= step < 2**53


def file_version(path: Path) -> tuple[int, ...] | None:
    """Changes when a file is replaced or written; None without a file."""
    with suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return None


@lru_cache(maxsize=4096)
def file_damage(path: Path, version: tuple[int, ...] | None) -> str | None:
    """Why a file of a run cannot be used; None if it can, or is not there. Read once for each version of it."""
    if version is None:
        return f"{path} is missing" if path.name == "config.json" else None
    try:
        if path.suffix == ".json":
            is_known = "epochs" in read_json_object(path) or path.name != "config.json"
            return None if is_known else f"{path} is damaged: it is not a training config"
        if not path.is_file():
            return f"{path} is not a regular file"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except ValueError as error:
        return str(error)
    return None


# Checkpoints as far as no tensor is read.
def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run: Run) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted((path for path in run.checkpoints.glob("step_*") if path.name[5:].isdecimal()), key=step_of)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """state.json of a checkpoint, with its own checksum verified."""
    with suppress(ValueError):
        record = read_json_object(checkpoint / "state.json")
        if record.pop("sum", None) == record_checksum(record):
            return record
    raise ValueError("state.json is damaged")


def record_checksum(record: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def new_run_path(runs: Path, name: str | None, preset: str, overwrite: bool) -> Path:
    """Folder of a new run: its name, or the preset with the next free number (nano-1, nano-2, …).

    An existing folder is refused, unless it is a run and `overwrite` is set.
    """
    name = next_name(runs, preset) if name is None else name
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise ValueError(f"--name must be a plain folder name, not {name!r}; --runs sets the parent folder")
    if len(name.encode(errors="replace")) > MAX_NAME or not name.isprintable():
        raise ValueError(f"--name must have at most {MAX_NAME} bytes, all printable, not {name[:50]!r}…")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path.parent, path.name)
    if is_run(path):
        with lock_folder(path) as acquired:
            if acquired:
                remove_folder(path)
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
    for path in runs.glob("[!.]*"):
        with suppress(OSError):  # a run that is being deleted
            if is_run(path):
                version = file_version(path / "config.json")
                found.append((version[2] if version else path.stat().st_mtime_ns, path))
    return [Run(path) for _, path in sorted(found)]


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
    for folder in (run.model, run.path / "last", *reversed(list_checkpoints(run))):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"{run.path} has no model yet; it is saved at the end, and checkpoints before")


def is_run(path: Path) -> bool:
    """Whether a training config is there, the first file a run writes; a model folder has another config.

    A run whose config is lost is known by its other files.
    """
    if "epochs" in Run(path).read_or_empty("config.json"):
        return True
    return sum(os.path.lexists(path / name) for name in RUN_FILES[1:]) >= 3


def is_empty(folder: Path) -> bool:
    """Whether nothing is there but partial files of a killed process."""
    return all(PARTIAL.fullmatch(path.name) for path in folder.iterdir())


def next_name(runs: Path, stem: str) -> str:
    numbers = [path.name.removeprefix(f"{stem}-") for path in runs.glob(f"{stem}-*")]
    return f"{stem}-{max((int(n) for n in numbers if n.isdecimal() and len(n) < 10), default=0) + 1}"
