"""What is kept of a run and when: the rhythm of checkpoints, the best of them, patience with the disk."""

import errno
import time
from collections.abc import Callable

from m1clip.evals.retrieval import Retrieval
from m1clip.model.clip import load
from m1clip.run import Run
from m1clip.training import checkpoint
from m1clip.training.checkpoint import Progress
from m1clip.training.recipes import between
from m1clip.training.state import TrainState

RETRY_S = 15.0
PATIENCE_S = {"stopping": 10.0, "finishing": 1800.0}


class CheckpointManager:
    def __init__(self, run: Run, state: TrainState, progress: Progress, warn: Callable[[str], None]):
        self.run, self.state, self.progress, self.warn = run, state, progress, warn
        self.config = state.config
        self.saved_at, self.saved_step = time.monotonic(), progress.step
        self.retry_at: float | None = None  # set while the disk refuses
        self.restored = False  # the best weights have taken the place of the last ones
        self.dethroned: tuple[float | None, int | None, int] | None = None  # by a best not yet on the disk
        self._check_best()

    def _check_best(self) -> None:
        """A best that is no longer there, or not as it was written, is none."""
        step = self.progress.best_step
        if step is None:
            return
        try:
            checkpoint.position(checkpoint.path_of(self.run, step))
        except checkpoint.DAMAGE as error:
            self.warn(f"the best checkpoint, step {step:,}, cannot be used ({error}); another will be found")
            self.progress.best_score, self.progress.best_step, self.progress.stale = None, None, 0

    def due(self, ended_epoch: int | None) -> bool:
        """Whether it is time: by steps, minutes or epochs, or to try again what the disk refused."""
        if self.retry_at is not None:
            return time.monotonic() >= self.retry_at
        seconds, steps = self.config.save_interval
        return bool(steps and self.progress.step % steps == 0) or bool(
            seconds and time.monotonic() - self.saved_at >= seconds
        )

    def judge(self, scores: Retrieval) -> None:
        """Is this the best so far? If so it is saved next, and is the best once it is on the disk."""
        self._settle()
        score, now = float(scores.record()[self.config.best_metric]), self.progress
        before = (now.best_score, now.best_step, now.stale)
        now.stale = 0 if now.best_score is None or score > now.best_score else now.stale + 1
        if now.best_score is None or score >= now.best_score:  # of equals the later, though it is no progress
            self.dethroned = before
            now.best_score, now.best_step = score, now.step

    @property
    def has_new_best(self) -> bool:
        waiting = self.retry_at is not None and time.monotonic() < self.retry_at
        return self.dethroned is not None and self.progress.best_step == self.progress.step and not waiting

    def _settle(self) -> None:
        """A best that training has left behind before the disk took it never was one."""
        now = self.progress
        if self.dethroned is not None and now.best_step != now.step:
            now.best_score, now.best_step, now.stale = self.dethroned
            self.dethroned = None

    @property
    def out_of_patience(self) -> bool:
        return bool(self.config.patience) and self.progress.stale >= self.config.patience

    def save(self, patience_s: float = 0.0) -> bool:
        """Write a checkpoint; a disk that refuses is told of, and is no reason to stop training."""
        self._settle()
        self.run.sync()
        error = self._insist(
            lambda: checkpoint.save(self.run, self.state, self.progress, checkpoint.KEEP), patience_s
        )
        if error is not None:
            return False
        self.saved_step, self.dethroned = self.progress.step, None
        return True

    def finish(self, final: bool) -> None:
        """The last checkpoint and, at the end of the run, the model; what cannot be written is an error."""
        patience_s = PATIENCE_S["finishing" if final else "stopping"]
        if self.saved_step != self.progress.step and not self.save(patience_s):
            raise OSError(f"step {self.progress.step} could not be saved; {checkpoint.last_good(self.run)}")
        if not final:
            return
        self._restore_best()
        with self.state.averaged() as model:
            if self.config.wise_ft < 1:
                model = between(model, load(self.run.path / "start"), self.config.wise_ft)
            if error := self._insist(lambda: model.save(self.run.model), patience_s):
                raise error

    def _restore_best(self) -> None:
        """Where patience decides the end, the last weights are not the ones to keep."""
        step = self.progress.best_step
        if not self.config.patience or step in (None, self.progress.step):
            return
        try:
            checkpoint.load(checkpoint.path_of(self.run, step or 0), self.state)
            self.restored = True
        except checkpoint.DAMAGE as error:
            self.warn(
                f"the best checkpoint, step {step:,}, cannot be used ({error}); the model is the last state"
            )

    def _insist(self, write: Callable[[], object], patience_s: float) -> OSError | None:
        """Try until it is written or the patience is over; what the disk said last, None if all is well."""
        end = time.monotonic() + patience_s
        while True:
            try:
                write()
            except OSError as error:
                self._refused(error)
                if time.monotonic() >= end:
                    return error
                time.sleep(max(0.1, min(RETRY_S, end - time.monotonic())))
                continue
            if self.retry_at is not None:
                self.run.log("event", self.progress.step, event="saved again")
                self.warn(f"saved again at step {self.progress.step:,}")
            self.retry_at, self.saved_at, self.run.trouble = None, time.monotonic(), None
            return None

    def _refused(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self.retry_at, self.run.trouble = time.monotonic() + RETRY_S, f"cannot save: {why}"
        self.run.log("event", self.progress.step, event="save failed", reason=why)
        self.run.status("running", self.progress.step, **self.run.standing)
        room = " Please make room." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        self.warn(
            f"CANNOT SAVE step {self.progress.step:,} in {self.run.path}: {why}. Nothing older was deleted "
            f"({checkpoint.last_good(self.run)}); it will be tried again in {RETRY_S:.0f} s.{room}"
        )
