"""A checkpoint: a model folder with the optimiser and the position beside it. Whole or absent; no pickle."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from m1clip.model.clip import CLIP, read_weights, write_tensors
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run, replacing_folder

KEEP = 2


def save(run: Run, step: int, model: CLIP, optimizer: torch.optim.Optimizer) -> Path:
    """Write a checkpoint, then remove all but the newest; broken weights are not saved over good ones."""
    if not all(weight.isfinite().all() for weight in model.parameters()):
        raise FloatingPointError(f"the weights are not finite at step {step}; {last_good(run)}")
    path = run.checkpoints / f"step_{step:06d}"
    with replacing_folder(path) as aside:
        model.write(aside)
        write_tensors(aside / "optimizer.safetensors", optimizer_tensors(model, optimizer))
        (aside / "state.json").write_text(json.dumps({"step": step}) + "\n")
    for older in all_of(run)[:-KEEP]:
        shutil.rmtree(older)
    with suppress(OSError):  # a file system without links; nothing of ours needs it
        point(run.path / "last", path)
    return path


def all_of(run: Run) -> list[Path]:
    """The run's checkpoints, oldest first; one that is there is whole."""
    found = [path for path in run.checkpoints.glob("step_*") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def last(run: Run) -> Path | None:
    return next(reversed(all_of(run)), None)


def last_good(run: Run) -> str:
    """The end of a message about a run that cannot go on."""
    path = last(run)
    return f"the last good state is {path}" if path else "there is no earlier state"


def tokenizer(run: Run) -> Tokenizer | None:
    """What the run's captions have been read with so far."""
    path = last(run)
    return Tokenizer.load(path / "tokenizer.json") if path else None


def resume(run: Run, model: CLIP, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the run's last checkpoint; the step to go on from, 0 where there is none."""
    path = last(run)
    if path is None:
        return 0
    try:
        return load(path, model, optimizer)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"cannot go on from {path}: {error}") from error


def load(path: Path, model: CLIP, optimizer: torch.optim.Optimizer) -> int:
    """Put the checkpoint's weights, moments and random state in place; the step to go on from."""
    step = json.loads((path / "state.json").read_text())["step"]
    if type(step) is not int or step < 0:
        raise ValueError(f"state.json says step {step!r}")
    weights = read_weights(path / "model.safetensors", model)
    tensors = load_file(path / "optimizer.safetensors")
    random_state = tensors.pop("random_state")
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        moments.setdefault(name, {})[moment] = value
    names = dict(model.named_parameters())
    if moments.keys() != names.keys():
        raise ValueError("optimizer.safetensors is not of this model")
    model.load_state_dict(weights)
    for name, weight in names.items():
        optimizer.state[weight] = {moment: value.to(weight.device) for moment, value in moments[name].items()}
    torch.set_rng_state(random_state)
    return step


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name, and the generator's."""
    moments: dict[str, Any] = {
        f"{name}/{key}": value.cpu().contiguous()
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }
    return {"random_state": torch.get_rng_state(), **moments}


def point(link: Path, target: Path) -> None:
    """Make or move a relative symbolic link in one instant."""
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(target, link.parent))
    os.replace(aside, link)


def needed_bytes(model: CLIP) -> int:
    """Room for a new checkpoint beside those kept, weights and two moments each, and for the final model."""
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    return (KEEP + 1) * 3 * weights + weights
