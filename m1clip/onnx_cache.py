"""The ONNX export of any model, made on demand by another process, so that this one never imports torch."""

import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from m1clip.console import Console
from m1clip.files import cache_folder
from m1clip.onnx_model import is_onnx
from m1clip.run import find_model

VAL_SIZE = 1_000  # images that the export is compared with torch and calibrated on


def find_onnx(
    runs: Path, name: str | None, console: Console, before_export: Callable[[], object] = lambda: None
) -> Path:
    """The folder of an ONNX export: the model itself, or one in the cache that is made now if it is missing.

    `before_export` raises if the export, which takes a minute, would be for nothing.
    """
    folder = find_model(runs, name)
    if folder is not None and is_onnx(folder):
        return folder
    source = folder or Path(str(name)).expanduser()
    spec = str(source.resolve() if source.exists() else name)
    exported = cache_folder() / f"onnx-{source_key(spec)}"
    if not is_onnx(exported):
        before_export()
        export_in_child(spec, exported, console)
    return exported


def source_key(spec: str) -> str:
    """A hash of the path of a model and of the size and time of its files: it changes when they do."""
    path = Path(spec)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]
    return sha256(repr((spec, stats)).encode()).hexdigest()[:16]


def export_in_child(spec: str, folder: Path, console: Console) -> None:
    """Run `m1clip export`. If it fails, it has said why, and this process exits with its code."""
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise ValueError(f"{spec} has to be exported to ONNX first: pip install 'm1clip[export]'")
    console.print(f"exporting {spec} to ONNX, once")
    command = [sys.executable, "-m", "m1clip", "export", spec, "--out", str(folder), "--val-size", str(VAL_SIZE)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if not is_onnx(folder):  # another process may have made it at the same time
        raise SystemExit(done.returncode or 1)
