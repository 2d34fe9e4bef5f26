"""A checkpoint: a model folder with the optimiser and the position beside it. Whole or absent; no pickle."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from m1clip.model.clip import CLIP, read_weights
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run, replacing_folder


def save(run: Run, step: int, model: CLIP, optimizer: torch.optim.Optimizer) -> Path:
    path = run.checkpoints / f"step_{step:06d}"
    with replacing_folder(path) as aside:
        model.write(aside)
        save_file(optimizer_tensors(model, optimizer), aside / "optimizer.safetensors")
        (aside / "state.json").write_text(json.dumps({"step": step}) + "\n")
    point(run.path / "last", path)
    return path


def resume(run: Run, model: CLIP, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the run's last checkpoint; the step to go on from, 0 where there is none."""
    path = last(run)
    return load(path, model, optimizer) if path else 0


def load(path: Path, model: CLIP, optimizer: torch.optim.Optimizer) -> int:
    """Put the checkpoint's weights, moments and random state in place; the step to go on from."""
    if Tokenizer.load(path / "tokenizer.json") != model.tokenizer:
        raise ValueError(f"{path} was made with another tokenizer: its data or --tokenizer has changed since")
    model.load_state_dict(read_weights(path / "model.safetensors", model))
    tensors = load_file(path / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("random_state"))
    for name, weight in model.named_parameters():
        moments = {
            key.removeprefix(f"{name}/"): value.to(weight.device if value.ndim else "cpu")
            for key, value in tensors.items()
            if key.startswith(f"{name}/")
        }
        optimizer.state[weight] = moments
    step: int = json.loads((path / "state.json").read_text())["step"]
    return step


def optimizer_tensors(model: CLIP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's state by parameter name, and the generator's."""
    moments: dict[str, Any] = {
        f"{name}/{key}": value.cpu().contiguous()
        for name, weight in model.named_parameters()
        for key, value in optimizer.state[weight].items()
    }
    return {"random_state": torch.get_rng_state(), **moments}


def last(run: Run) -> Path | None:
    link = run.path / "last"
    return link.resolve() if (link / "state.json").is_file() else None


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
