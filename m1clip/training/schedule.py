"""The schedule of a run: its learning rate and its end, by steps or, with a budget, by the clock."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

RESERVE = 0.02  # of the budget, for the last evaluation and save until one of each has been timed
EXIT_S = 1.0  # starting Python, printing the result and exiting


def learning_rate(done: float, total: float, peak: float, warmup: float) -> float:
    """Linear warm-up over a fraction of the run, then cosine decay to 0."""
    warmup_steps = warmup * total
    if done < warmup_steps:
        return peak * (done + 1) / (warmup_steps + 1)
    return peak * 0.5 * (1 + math.cos(math.pi * (done - warmup_steps) / (total - warmup_steps)))


class Schedule:
    """With a deadline the learning rate follows elapsed time, not steps: it reaches 0 when the time is over,
    however fast the machine was. The number of steps is then an estimate that improves."""

    def __init__(
        self,
        total: int,
        deadline: float | None = None,
        budget_s: float = 0.0,
        max_steps: int | None = None,
        elapsed_s: float = 0.0,
        final_evals: int = 1,
    ):
        """`total` is the number of steps, or its first estimate. `deadline` is a time.monotonic value by which
        everything has to be done, `max_steps` a limit however much time is left, `elapsed_s` the training time
        of earlier sessions, `final_evals` the number of evaluations after the last step."""
        self.total, self.deadline, self.max_steps = total, deadline, max_steps
        self.reserve_s, self.exit_s = RESERVE * budget_s, min(EXIT_S, RESERVE * budget_s)
        self.elapsed_s, self.final_evals = elapsed_s, final_evals
        self.started = time.monotonic()
        self.durations = dict[str, float]()
        self.steps, self.paused_s = 0, 0.0

    @property
    def end(self) -> float:
        """When the last step has to be done, so that time is left for the evaluation and save after it."""
        assert self.deadline is not None
        final_s = self.final_evals * self.durations.get("eval", 0.0) + self.durations.get("save", 0.0)
        return self.deadline - self.exit_s - final_s - (self.reserve_s if len(self.durations) < 2 else 0.0)

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.end

    @contextmanager
    def timed_pause(self, kind: str) -> Iterator[None]:
        """An evaluation or a save, which happens once more at the end: its duration is remembered."""
        started = time.monotonic()
        yield
        self.durations[kind] = time.monotonic() - started
        self.paused_s += self.durations[kind]

    def has_time_to_eval(self) -> bool:
        """False when the final evaluation would follow immediately."""
        return self.deadline is None or time.monotonic() + self.durations.get("eval", 0.0) < self.end

    @property
    def needs_trial_eval(self) -> bool:
        """At half time, if no evaluation has been timed yet."""
        if self.deadline is None or "eval" in self.durations:
            return False
        return time.monotonic() > (self.started + self.end) / 2

    def last_step(self) -> int:
        """The step after which training ends in any case; unlimited with a deadline."""
        return self.total if self.deadline is None else self.max_steps or sys.maxsize

    def progress(self, step: int) -> tuple[float, float]:
        """Position and length of the run in steps; with a deadline the position follows elapsed time."""
        if self.deadline is None:
            return step, self.total
        if not self.steps:
            self.started, self.paused_s = time.monotonic(), 0.0  # set-up time does not count
        done, whole = (self.elapsed_s + then - self.started for then in (time.monotonic(), self.end))
        fraction = min(1.0, done / whole) if whole > 0 else 1.0
        return max(fraction, step / self.max_steps if self.max_steps else 0.0) * self.total, self.total

    def count(self, step: int) -> bool:
        """Register a finished step; whether it was the last. The next one must fit by half at least."""
        if self.deadline is None:
            return step == self.total
        self.steps += 1
        now = time.monotonic()
        steps_left = max(0.0, self.end - now) / ((now - self.started - self.paused_s) / self.steps)
        self.total = max(1, min(step + round(steps_left), self.max_steps or sys.maxsize))
        return steps_left < 0.5 or step == self.max_steps
