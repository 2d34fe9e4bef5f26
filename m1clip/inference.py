"""m1clip.load: a model for inference, with PyTorch, or without it if it was exported to ONNX."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m1clip.run import Run, find_model, is_run, list_checkpoints

if TYPE_CHECKING:
    from m1clip.model.clip import CLIP


# "| Any", because a model that is not a CLIP has the same methods: callers need not ask which one they have.
def load(model: str | Path | None = None, *, runs: str | Path = "runs") -> "CLIP | Any":
    """Load a CLIP for inference, on the CPU.

    Args:
        model: what the commands take: a run (name or path; by default the newest), a model or checkpoint folder, an
            ONNX export, or a CLIP of OpenAI, OpenCLIP or transformers (file, folder or hub name).
        runs: the folder of runs.

    Returns:
        A CLIP, which is a module of PyTorch. For an ONNX export an OnnxCLIP: the same methods (encode_image,
        encode_text, similarity, classify, tokenize) with NumPy arrays instead of tensors, and torch is not imported.

    Raises:
        FileNotFoundError: there is no such run, file, folder or hub name.
        ValueError: its files are damaged, or of a model that m1clip cannot import.

    Example:
        model = m1clip.load("nano-1")
        similarity = model.encode_image("cat.jpg") @ model.encode_text(["a cat", "a bus"]).T
    """
    from m1clip.onnx_model import is_onnx, load_onnx  # training needs none of it

    folder = find_model(Path(runs), None if model is None else str(model))
    return load_onnx(folder) if folder is not None and is_onnx(folder) else load_clip(folder, str(model), runs)


def load_clip(folder: Path | None, name: str, runs: str | Path) -> "CLIP":
    """A model folder that was found, or else a CLIP of another library."""
    if folder is not None:
        return load_found(folder)
    path = Path(name).expanduser()
    if path.name != name and path.parent.is_dir() and not path.exists():  # a local path, so no name on the hub
        raise FileNotFoundError(f"there is no run or model {name!r}; {path.parent} is a folder without it")
    from m1clip.model.pretrained_clip import import_clip

    try:
        imported, note = import_clip(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no run {name!r} in {runs}/, and {error}") from None
    if note:
        warnings.warn(f"{name}: {note}", stacklevel=3)
    return imported


def load_found(folder: Path) -> "CLIP":
    """Load a model folder; if it is damaged, the error names the newest checkpoint of the run it belongs to."""
    from m1clip.model.clip import load as load_folder

    try:
        return load_folder(folder)
    except (FileNotFoundError, ValueError) as error:
        checkpoints = list_checkpoints(Run(folder.parent)) if is_run(folder.parent) else []
        others = [path for path in checkpoints if path != folder.resolve()]
        hint = f"; {others[-1]} is a checkpoint of the same run, which can be used instead" if others else ""
        raise type(error)(f"{error}{hint}") from None
