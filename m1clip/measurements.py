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
from m1clip.run import cache_folder, finite, json_lines

Row = dict[str, Any]


class Measurements:
    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "measurements-1.jsonl"  # another number if rows change

    def add(self, kind: str, **values: Any) -> Row:
        self.folder.mkdir(parents=True, exist_ok=True)
        row = {"kind": kind, "time": round(time.time(), 1), **values}
        line = json.dumps(finite(row), allow_nan=False) + "\n"
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            torn = size and os.pread(handle, 1, size - 1) != b"\n"  # by a process that was killed
            os.write(handle, (("\n" if torn else "") + line).encode())
        finally:
            os.close(handle)
        return row

    def rows(self, kind: str | None = None, **same: Any) -> list[Row]:
        """Oldest first, those that agree with every given value."""
        return [
            row
            for row in json_lines(self.path)
            if kind in (None, row.get("kind")) and all(row.get(key) == value for key, value in same.items())
        ]


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
