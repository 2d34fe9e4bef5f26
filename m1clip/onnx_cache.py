"""The ONNX export of a run or model. No torch."""

from pathlib import Path

from m1clip.console import Console
from m1clip.onnx_model import is_onnx
from m1clip.run import find_model


def find_onnx(runs: Path, name: str | None, console: Console) -> Path:
    """The folder of a model that was exported to ONNX."""
    folder = find_model(runs, name)
    if folder is None or not is_onnx(folder):
        raise ValueError(f"{name or folder} is not an ONNX export: m1clip export {name or 'RUN'} --out DIR")
    return folder
