"""Checkpoints: a model folder with the training state beside it. Complete or absent; no pickle.

config.json, model.safetensors, tokenizer.json   the model to use: with --ema, the averaged one
training.safetensors                             optimizer state, RNG state and, with --ema, the trained weights
state.json                                       the position, a checksum of every other file, and copies of the
                                                 run's config.json and data.json
"""

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from m1clip.config import from_dict
from m1clip.files import atomic_folder, remove_folder
from m1clip.model.clip import CLIP, load
from m1clip.model.lora import merged_state_dict, save_adapter
from m1clip.model.safe_load import load_checked, load_safetensors, save_tensors
from m1clip.run import Run, list_checkpoints, read_state, record_checksum, step_of
from m1clip.training.step import TrainState

KEEP = 2  # newest checkpoints kept, beside the best
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what reading a damaged one may raise
FILES = {"config.json", "model.safetensors", "tokenizer.json", "training.safetensors"}
RETRY_S = 15.0
WAIT_FOR_DISK_S = {"stopping": 10.0, "finishing": 1800.0}


@dataclass
class Progress:
    """The position of a run: all that a checkpoint holds beside tensors."""

    step: int = 0
    seconds: float = 0.0  # training time of all sessions, pauses excluded
    joules: float | None = None
    skipped: int = 0  # steps without an update because of a non-finite loss or gradient
    chunk: int = 0  # pairs in memory at once, 0 before it is chosen. Kept, because rounding depends on it
    best_score: float | None = None
    best_step: int | None = None
    evals_since_best: int = 0
    ended_budget_s: float | None = None  # the budget that ended the run; a larger one can continue it


def save_checkpoint(run: Run, state: TrainState, progress: Progress) -> Path:
    """Write a checkpoint, and only then remove all but the newest KEEP and the best."""
    if not all(weight.isfinite().all() for weight in state.weights.values()):
        raise FloatingPointError(f"non-finite weights at step {progress.step}; {last_checkpoint(run)}")
    tensors = state.tensors()
    need = sum(t.nbytes for t in (*tensors.values(), *state.model.parameters()))
    if shutil.disk_usage(run.path).free < need:  # fail before the disk is full
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.path))
    path = checkpoint_path(run, progress.step)
    with atomic_folder(path) as folder:
        with state.averaged_model() as model:
            model.write(folder)
        save_tensors(folder / "training.safetensors", tensors)
        files = {name: file_checksum(folder / name) for name in FILES}
        record = {"position": asdict(progress), "files": files, "run": json.loads(json.dumps(run.copies))}
        (folder / "state.json").write_text(json.dumps({**record, "sum": record_checksum(record)}) + "\n")
    best = None if progress.best_step is None else checkpoint_path(run, progress.best_step)
    saved = list_checkpoints(run)
    for other in {*saved, *run.checkpoints.glob("damaged_step_*")} - {best, *saved[-KEEP:]}:
        with suppress(OSError):  # removed after the next save
            remove_folder(other)
    with suppress(OSError):  # a file system without links; nothing of ours needs them
        replace_link(run.path / "last", path)
        if best and best in saved:
            replace_link(run.path / "best", best)
    return path


def checkpoint_path(run: Run, step: int) -> Path:
    return run.checkpoints / f"step_{step:06d}"


def newest_intact(run: Run) -> tuple[Path | None, dict[Path, str]]:
    """The newest checkpoint with matching checksums, and what is wrong with the newer ones."""
    damaged: dict[Path, str] = {}
    for path in reversed(list_checkpoints(run)):
        try:
            read_progress(path)
            return path, damaged
        except DAMAGED as error:
            damaged[path] = str(error) or type(error).__name__
    if damaged:
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
        raise ValueError(f"no intact checkpoint in {run.checkpoints} ({reasons}); --overwrite starts the run again")
    return None, damaged


def read_progress(path: Path) -> Progress:
    """The position in state.json, after checking the files beside it against their checksums."""
    missing = [name for name in sorted({"state.json", *FILES}) if not (path / name).is_file()]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing")
    record = read_state(path)
    for name in FILES:
        if file_checksum(path / name) != record["files"][name]:
            raise ValueError(f"{name} does not match its checksum")
    progress = from_dict(Progress, record["position"])
    if step_of(path) != progress.step:
        raise ValueError(f"state.json is of step {progress.step}")
    return progress


def load_checkpoint(path: Path, state: TrainState) -> Progress:
    progress = read_progress(path)
    try:
        weights = load_checked(path / "model.safetensors", merged_state_dict(state.model))
        state.load(weights, load_safetensors(path / "training.safetensors"))
    except (ValueError, KeyError, RuntimeError) as error:
        raise ValueError(f"cannot resume from {path}: {error}") from error
    return progress


def last_checkpoint(run: Run) -> str:
    """The end of a message about a run that cannot continue."""
    paths = list_checkpoints(run)
    return f"the last checkpoint is {paths[-1]}" if paths else "there is no earlier checkpoint"


def file_checksum(path: Path) -> int:
    """CRC-32: against failing disks and copies, not against malice."""
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum


def replace_link(link: Path, target: Path) -> None:
    """Create or move a relative symbolic link atomically."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.new")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent))
        os.replace(temporary, link)
    finally:
        temporary.unlink(missing_ok=True)


def interpolate_weights(model: CLIP, start: CLIP, weight: float) -> CLIP:
    """WiSE-FT (Wortsman et al. 2022): `start` (0) to `model` (1), in place of `start`."""
    initial, final = start.state_dict(), merged_state_dict(model)
    for name, tensor in initial.items():
        if tensor.is_floating_point():
            tensor.lerp_(final[name].cpu(), weight)
    return start


class CheckpointManager:
    """When to save, which checkpoint is the best, when to stop early, and what to do when the disk is full."""

    def __init__(self, run: Run, state: TrainState, progress: Progress, warn: Callable[[str], None]):
        self.run, self.state, self.progress, self.warn = run, state, progress, warn
        self.config = state.config
        self.saved_at, self.saved_step = time.monotonic(), progress.step
        self.retry_at: float | None = None  # set while saving fails
        self.restored = False  # the best weights have replaced the last ones
        self.new_best: tuple[float, int] | None = None  # score and step; it counts once it is saved
        if progress.best_step is not None and not self._use_best(read_progress, "the next best replaces it"):
            progress.best_score, progress.best_step, progress.evals_since_best = None, None, 0

    def _use_best(self, use: Callable[[Path], object], otherwise: str) -> bool:
        """Whether the best checkpoint is there and intact."""
        step = self.progress.best_step or 0
        try:
            use(checkpoint_path(self.run, step))
            return True
        except DAMAGED as error:
            self.warn(f"the best checkpoint, step {step:,}, cannot be used ({error}); {otherwise}")
            return False

    def is_due(self) -> bool:
        """Whether to save now: by steps or time, or to retry a failed save."""
        if self.retry_at is not None:
            return time.monotonic() >= self.retry_at
        seconds, steps = self.config.save_interval
        return self.progress.step % steps == 0 if steps else time.monotonic() - self.saved_at >= seconds

    def update_best(self, metrics: Mapping[str, Any]) -> None:
        """Compare with the best score; of equals the later is the best, though it is no progress."""
        score, now = float(metrics[self.config.best_metric]), self.progress
        improved = now.best_score is None or score > now.best_score
        now.evals_since_best = 0 if improved else now.evals_since_best + 1
        self.new_best = (score, now.step) if improved or score == now.best_score else None

    @property
    def has_new_best(self) -> bool:
        waiting = self.retry_at is not None and time.monotonic() < self.retry_at
        return self.new_best is not None and self.new_best[1] == self.progress.step and not waiting

    @property
    def out_of_patience(self) -> bool:
        return bool(self.config.patience) and self.progress.evals_since_best >= self.config.patience

    def save(self, wait_s: float = 0.0) -> bool:
        """Write a checkpoint; a disk error is reported, and training continues."""
        now, previous = self.progress, (self.progress.best_score, self.progress.best_step)
        if self.new_best and self.new_best[1] == now.step:
            now.best_score, now.best_step = self.new_best
        self.run.sync()
        with self.run.in_phase("saving"):
            error = self._retry(lambda: save_checkpoint(self.run, self.state, now), wait_s)
        if error:
            now.best_score, now.best_step = previous
            return False
        self.saved_step, self.new_best = now.step, None
        return True

    def finish(self, completed: bool) -> None:
        """Save the last checkpoint and, at the end of the run, the model; failing to do so is an error."""
        wait_s = WAIT_FOR_DISK_S["finishing" if completed else "stopping"]
        if self.saved_step != self.progress.step and not self.save(wait_s):
            raise OSError(f"step {self.progress.step} could not be saved; {last_checkpoint(self.run)}")
        if not completed:
            return
        if self.config.patience and self.progress.best_step not in (None, self.progress.step):
            # With patience, the model to keep is the best and not the last.
            self.restored = self._use_best(partial(load_checkpoint, state=self.state), "the last state is kept")
        with self.state.averaged_model() as model:
            final = model
            if self.config.wise_ft < 1:
                final = interpolate_weights(model, load(self.run.path / "start"), self.config.wise_ft)
            if error := self._retry(lambda: self._save_model(model, final), wait_s):
                raise error

    def _save_model(self, model: CLIP, final: CLIP) -> None:
        with atomic_folder(self.run.model) as folder:
            final.write(folder)
            if self.state.has_lora:
                save_adapter(model, folder / "adapter")

    def _retry(self, write: Callable[[], object], wait_s: float) -> OSError | None:
        """Try until it is written or the time is over; the last disk error, None on success."""
        end = time.monotonic() + wait_s
        while True:
            try:
                write()
            except OSError as error:
                self._report_failure(error)
                if time.monotonic() >= end:
                    return error
                time.sleep(max(0.1, min(RETRY_S, end - time.monotonic())))
                continue
            if self.retry_at is not None:
                self.run.log("event", self.progress.step, event="saved again")
                self.warn(f"saved again at step {self.progress.step:,}")
            self.retry_at, self.saved_at = None, time.monotonic()
            self.run.failures.pop("a checkpoint", None)
            return None

    def _report_failure(self, error: OSError) -> None:
        reason = error.strerror or str(error)
        self.retry_at = time.monotonic() + RETRY_S
        self.run.note_failure("a checkpoint", error)
        self.run.log("event", self.progress.step, event="save failed", reason=reason)
        self.run.write_status("running", self.progress.step, **self.run.status_fields)
        hint = " Free some disk space." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        self.warn(
            f"CANNOT SAVE step {self.progress.step:,} in {self.run.path}: {reason}. Nothing older was deleted "
            f"({last_checkpoint(self.run)}); retrying in {RETRY_S:.0f} s.{hint}"
        )
