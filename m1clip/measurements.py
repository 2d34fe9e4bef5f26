"""What was measured on this machine: lines of JSON in the cache folder, a folder for each machine. No torch.

Another torch or other memory is another machine: its figures are not to be mixed with these.
"""

import json
import os
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from m1clip import sensors
from m1clip.files import cache_folder, json_safe, read_jsonl

Row = dict[str, Any]
NEEDED = {
    "step": {
        *("time", "time_plans", "model", "preset", "batch", "tokens", "parameters", "gflop", "activation_gb"),
        *("device", "precision", "compile", "threads", "step_ms", "low_ms", "high_ms", "samples_ms"),
        *("phases_ms", "setup_s", "peak_gb", "watts", "pairs_per_s", "pairs_per_joule"),
    },
    "cost": {"model", "tokens", "parameters", "gflop", "activation_gb"},
    "session": {"time", "session", "of", "settings"},
    "time_plans": {"session", "group"},
    "operation": {
        "session",
        "operation",
        "size",
        "device",
        "precision",
        "compute_ms",
        "best_gflops",
        "gb_per_s",
    },
    "skipped": {"session", "preset", "batch", "reason"},
}
POSITIVE = (
    "batch",
    "parameters",
    "gflop",
    "activation_gb",
    "step_ms",
    "low_ms",
    "high_ms",
    "time",
    "pairs_per_s",
)


class Measurements:
    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "measurements-2.jsonl"  # another if rows change, or steps
        self.here: list[Row] = []
        self.unkept: str | None = None

    def add(self, kind: str, **values: Any) -> Row:
        """Append a line. Where that fails the row is known to this process, and `unkept` says why."""
        row = json_safe({"kind": kind, "time": round(time.time(), 1), **values})
        try:
            self._append(json.dumps(row, allow_nan=False) + "\n")
        except OSError as error:
            self.unkept = str(error)
            self.here.append(row)
        return dict(row)

    def _append(self, line: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"  # by a process that was killed
            data = (("\n" if torn else "") + line).encode()
            if os.write(handle, data) < len(data):
                raise OSError("the disk is full")
        finally:
            os.close(handle)

    def rows(self, kind: str, **same: Any) -> list[Row]:
        """Oldest first, those that agree with every given value. A row that lacks something is none."""
        return [
            row
            for row in (*read_jsonl(self.path), *self.here)
            if row.get("kind") == kind and is_whole(row) and all(row.get(key) == value for key, value in same.items())
        ]


def is_whole(row: Row) -> bool:
    """Whether it has what others rely on: the file may be older, newer, or mended by hand."""
    numbers = [row[key] for key in POSITIVE if key in row]
    samples = row.get("samples_ms", [1])
    return (
        row.keys() >= NEEDED.get(row["kind"], set())
        and all(isinstance(one, int | float) and 0 < one < 1e12 for one in numbers)
        and isinstance(samples, list)
        and bool(samples)
        and all(isinstance(one, int | float) for one in samples)
    )


def here() -> Measurements:
    """Those of this machine as it is now."""
    machine = {**sensors.machine(), "torch": torch_version()}
    words = (machine["chip"], f"{machine['cores']} cores", f"{machine['ram_gb']:.0f} GB", machine["torch"])
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, words)).lower())
    return Measurements(cache_folder() / "machines" / name)


def torch_version() -> str | None:
    try:
        return version("torch")
    except PackageNotFoundError:
        return None
