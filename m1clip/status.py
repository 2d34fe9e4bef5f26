"""What the status of a run says is wrong, and where it is written if the disk of the run is full. No torch."""

import json
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from m1clip.files import atomic_write, read_json_object
from m1clip.format import clock

BEAT_S = 5.0  # between heartbeats while nothing else is written
SILENCE_S = 60.0  # without a heartbeat until a process counts as silent: a native call may hold the GIL for seconds
STALL_S, STALL_FACTOR = 600.0, 20  # without progress: seconds, and multiples of the time between the last reports
FULL_BYTES = 64 << 10  # a disk with less is full: a status needs a block or two
Status = dict[str, Any]


def number_or_unknown(value: Any) -> float | int | None:
    """A finite number of reasonable size, or None."""
    return value if type(value) in (int, float) and abs(value) < 1e15 else None


# The fallback: a private folder in memory or, where there is none, in the temporary folder.
def fallback_folders() -> list[Path]:
    roots = ("/dev/shm", os.environ.get("TMPDIR") or "/tmp", "/tmp")
    return [Path(root) / f"m1clip-{os.geteuid()}" for root in dict.fromkeys(roots)]


def _is_private(folder: Path) -> bool:
    """Whether nobody else can have put something there: others may write to the folders above."""
    status = os.lstat(folder)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _fallback_files(run: Path) -> list[Path]:
    """By device and inode, so that every path to the run leads to the same file."""
    try:
        folder = os.stat(run)
    except OSError:  # deleted, or on a disk that fails
        return []
    return [path / f"{folder.st_dev:x}-{folder.st_ino:x}.json" for path in fallback_folders()]


def write_fallback(run: Path, status: Status) -> None:
    """Write a status outside of the run's disk, in the first place that takes it; in none if all are full."""
    for file in _fallback_files(run):
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, exist_ok=True)
            if _is_private(file.parent):
                return atomic_write(file, json.dumps(status), durable=False)


def read_fallback(run: Path) -> Status:
    """The newest status of a run outside of its disk; {} if there is none."""
    found: list[Status] = [{}]
    for file in _fallback_files(run):
        with suppress(OSError, ValueError):
            if _is_private(file.parent):
                found.append(read_json_object(file))
    return max(found, key=time_of)


def remove_fallback(run: Path) -> None:
    for file in _fallback_files(run):
        with suppress(OSError):
            if _is_private(file.parent):
                file.unlink()
                file.parent.rmdir()  # unless it has the status of another run


def time_of(status: Status) -> float:
    return number_or_unknown(status.get("time")) or 0.0


def find_problem(status: Status, run: Path, saved_step: int | None) -> tuple[str, str] | None:
    """What is wrong with a run that is being trained: in a word or two, and as a sentence.

    The status may be of an earlier process, while the one that holds the lock has not written any yet.
    """
    if not is_elsewhere(status) and process_of(status) is None:
        return None
    step, total = (number_or_unknown(status.get(key)) for key in ("step", "total"))
    position = f"step {step or 0:,}" + (f" of {total:,}" if total else "")
    saved = "nothing has been saved yet" if saved_step is None else f"nothing has been saved since step {saved_step:,}"
    silence = _silence(status)
    if problem := status.get("problem"):
        since = clock(number_or_unknown(status.get("problem_since")))
        return str(problem), "; ".join(filter(None, (f"{problem} since {since}", position, saved, silence)))
    if silence and is_full(run):
        return "disk full", f"disk full; {silence}; {position}; {saved}"
    if silence:
        return "no sign of life", f"{silence}; {position}"
    stalled = _stall(status)
    return (str(status.get("phase") or "no progress"), f"{stalled}; {position}") if stalled else None


def _silence(status: Status) -> str | None:
    """That the process has not written a status for long, though it exists."""
    if status.get("state") != "running" or time.time() - time_of(status) < SILENCE_S:
        return None
    since = f"no sign of life since {clock(time_of(status))}"
    if is_elsewhere(status):
        return since
    import psutil

    with suppress(psutil.Error):
        if psutil.Process(status["pid"]).status() == psutil.STATUS_STOPPED:
            return f"{since}: process {status['pid']} is suspended; kill -CONT {status['pid']} continues it"
    return f"{since}: process {status['pid']} exists, but writes nothing"


def _stall(status: Status) -> str | None:
    """That the process is alive but has not progressed for far longer than usual."""
    since = number_or_unknown(status.get("progress_time"))
    expected = STALL_FACTOR * (number_or_unknown(status.get("report_s")) or 0.0)
    if status.get("state") != "running" or since is None or time_of(status) - since < max(STALL_S, expected):
        return None
    if phase := status.get("phase"):
        return f"{phase} since {clock(since)}"
    return f"no progress since {clock(since)}, though its process is alive"


def is_elsewhere(status: Status) -> bool:
    """Whether a process of another machine wrote a status."""
    return status.get("host") not in (None, socket.gethostname())


def process_of(status: Status) -> int | None:
    """The process on this machine that wrote a status; None if it is gone, or its id now belongs to another one."""
    import psutil

    pid = status.get("pid")
    if type(pid) is not int or not 1 < pid < 2**31:
        return None
    with suppress(psutil.Error):
        return pid if psutil.Process(pid).create_time() <= time_of(status) else None
    return None


def is_full(folder: Path) -> bool:
    with suppress(OSError):
        disk = os.statvfs(folder)
        return disk.f_bavail * disk.f_frsize < FULL_BYTES or (disk.f_files > 0 and disk.f_favail == 0)
    return False
