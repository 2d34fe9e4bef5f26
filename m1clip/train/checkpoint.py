"""A checkpoint: a model folder with the optimiser and the position beside it. Whole or absent; no pickle."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from m1clip.model.clip import CLIP, read_weights, write_tensors
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run, replacing_folder


def save(run: Run, step: int, model: CLIP, optimizer: torch.optim.Optimizer) -> Path:
    path = run.checkpoints / f"step_{step:06d}"
    with replacing_folder(path) as aside:
        model.write(aside)
        write_tensors(aside / "optimizer.safetensors", optimizer_tensors(model, optimizer))
        (aside / "state.json").write_text(json.dumps({"step": step}) + "\n")
    point(run.path / "last", path)
    return path


def last(run: Run) -> Path | None:
    """The checkpoint of the highest step; one that is there is whole, and the link `last` is for people."""
    return max(run.checkpoints.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)


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
    if Tokenizer.load(path / "tokenizer.json") != model.tokenizer:
        raise ValueError("it was made with another tokenizer; the data or --tokenizer has changed since")
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
        # AdamW's step count, the one scalar, stays on the CPU.
        optimizer.state[weight] = {
            moment: value.to(weight.device) if value.ndim else value
            for moment, value in moments[name].items()
        }
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
    """Room for the next checkpoint beside the last, and the final model: weights and two moments of each."""
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    return 2 * 3 * weights + weights
