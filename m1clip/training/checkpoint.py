"""A checkpoint: a model folder, and beside it what training needs to go on. Whole or absent; no pickle.

config.json, model.safetensors, tokenizer.json   the model to use: with --ema, the averaged one
training.safetensors                             moments, random state and, with --ema, the moving weights
state.json                                       the position, and a checksum of every other file
"""

import errno
import json
import os
import shutil
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from m1clip import config as configs
from m1clip.config import TrainConfig
from m1clip.files import atomic_folder
from m1clip.model.lora import merged_state_dict
from m1clip.model.safe_load import load_checked, save_tensors
from m1clip.run import Run
from m1clip.training.state import TrainState

DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged one may raise
KEEP = 2
FILES = {"config.json", "model.safetensors", "tokenizer.json", "training.safetensors"}


@dataclass
class Progress:
    """Where a run stands: all that a checkpoint must remember beside tensors."""

    step: int = 0
    seconds: float = 0.0
    """Of training, in all sessions together, pauses left out."""
    joules: float | None = None
    skipped: int = 0
    """Steps passed over because something was not finite."""
    chunk: int = 0
    """PairDataset in memory at once; 0 before it has been chosen. Kept, because rounding depends on it."""
    best_score: float | None = None
    best_step: int | None = None
    stale: int = 0
    """Evaluations since the best."""
    ended_by: float | None = None
    """The budget that was over when the run ended, in seconds; more may be given later."""

    def has_ended(self, budget_s: float | None) -> bool:
        return self.ended_by is not None and budget_s is not None and budget_s <= self.ended_by


def save(run: Run, state: TrainState, progress: Progress, keep: int) -> Path:
    """Write a checkpoint, and only then remove older ones, all but the newest `keep` and the best."""
    if not all(weight.isfinite().all() for weight in state.weights.values()):
        raise FloatingPointError(f"the weights are not finite at step {progress.step}; {last_good(run)}")
    tensors = state.tensors()
    need = sum(t.nbytes for t in (*tensors.values(), *state.model.parameters()))
    if shutil.disk_usage(run.path).free < need:  # sooner known than by filling the rest of the disk
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.path))
    path = path_of(run, progress.step)
    with atomic_folder(path) as aside:
        with state.averaged() as model:
            model.write(aside)
        save_tensors(aside / "training.safetensors", tensors)
        record = {"position": asdict(progress), "files": {name: checksum(aside / name) for name in FILES}}
        (aside / "state.json").write_text(json.dumps({**record, "sum": sum_of(record)}) + "\n")
    best = path_of(run, progress.best_step) if progress.best_step is not None else None
    kept = {best, *all_of(run)[-keep:]}
    for other in (*all_of(run), *run.checkpoints.glob("damaged_step_*")):
        if other not in kept:
            shutil.rmtree(other, ignore_errors=True)
    with suppress(OSError):  # a file system without links; nothing of ours needs them
        point(run.path / "last", path)
        if best is not None and best.exists():
            point(run.path / "best", best)
    return path


def path_of(run: Run, step: int) -> Path:
    return run.checkpoints / f"step_{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def all_of(run: Run) -> list[Path]:
    """The run's checkpoints, oldest first."""
    found = [path for path in run.checkpoints.glob("step_*") if path.name[5:].isdecimal()]
    return sorted(found, key=step_of)


def newest_whole(run: Run) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint whose every byte is as written, and what is wrong with the newer ones."""
    damaged: dict[Path, str] = {}
    for path in reversed(all_of(run)):
        try:
            position(path)
            return path, damaged
        except DAMAGE as error:
            damaged[path] = str(error) or type(error).__name__
    if damaged:
        told = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
        raise ValueError(
            f"no checkpoint in {run.checkpoints} is whole ({told}); --overwrite starts the run again"
        )
    return None, damaged


def position(path: Path) -> Progress:
    """What state.json says, once the files beside it are known to be those it was written with."""
    missing = [name for name in sorted({"state.json", *FILES}) if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    try:
        state = json.loads((path / "state.json").read_text())
        intact = state.pop("sum") == sum_of(state)
    except (ValueError, KeyError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise ValueError("state.json is not as it was written")
    for name in FILES:
        if checksum(path / name) != state["files"][name]:
            raise ValueError(f"{name} is not as it was written")
    progress = configs.from_dict(Progress, state["position"])
    if path.name != f"step_{progress.step:06d}":
        raise ValueError(f"state.json says step {progress.step}")
    return progress


def load(path: Path, state: TrainState) -> Progress:
    """Put a whole checkpoint's tensors in place; where the run stood."""
    progress = position(path)
    try:
        weights = load_checked(path / "model.safetensors", merged_state_dict(state.model))
        state.load(weights, load_file(path / "training.safetensors"))
    except (ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot go on from {path}: {error}") from error
    return progress


def set_aside(path: Path) -> None:
    """Out of the count, but there to be looked at until the next checkpoint is whole."""
    with suppress(OSError):
        path.rename(path.with_name(f"damaged_{path.name}"))


def last_good(run: Run) -> str:
    """The end of a message about a run that cannot go on."""
    found = all_of(run)
    return f"the last good state is {found[-1]}" if found else "there is no earlier state"


def checksum(path: Path) -> int:
    """CRC-32 of a file: not against malice, but against a disk or a copy that failed."""
    found = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found = zlib.crc32(block, found)
    return found


def sum_of(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def point(link: Path, target: Path) -> None:
    """Make or move a relative symbolic link in one instant."""
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(target, link.parent))
    os.replace(aside, link)


def needed_bytes(model: torch.nn.Module, config: TrainConfig, there: int) -> int:
    """Room for all checkpoints to come beside those already there, and for the final model.

    Each has weights and two moments, and with an average weights twice; they are those to keep, the best, and
    a new one before an older is removed.
    """
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    return max(1, KEEP + 2 - there) * (4 if config.ema else 3) * weights + weights
