"""How far a run is: by its steps, or by the clock where it has a budget."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

UNKNOWN = 0.02  # of the budget, kept for the last evaluation and the last save until one of each was timed
OUTSIDE_S = 1.0  # until Python has started, and until it has printed the result and gone


class Schedule:
    """With a deadline the rate follows the time and not the steps: it has come down when the time is over,
    however fast the machine was meanwhile. The number of steps is then a guess that becomes better."""

    def __init__(
        self,
        total: int,
        deadline: float | None = None,
        budget_s: float = 0.0,
        at_most: int | None = None,
        spent_s: float = 0.0,
        evaluations: int = 1,
    ):
        """`total` is the number of steps, or a first guess. `deadline`, a time of time.monotonic, is the end
        of everything. More than `at_most` steps are not taken, however much time is left. `spent_s` are the
        seconds of earlier sessions, `evaluations` how many follow the last step."""
        self.total, self.deadline, self.at_most = total, deadline, at_most
        self.unknown_s, self.outside_s = UNKNOWN * budget_s, min(OUTSIDE_S, UNKNOWN * budget_s)
        self.spent_s, self.evaluations = spent_s, evaluations
        self.began = time.monotonic()
        self.taken = dict[str, float]()
        self.steps, self.pauses_s = 0, 0.0

    @property
    def end(self) -> float:
        """When the last step has to be done, so that there is time for what follows it."""
        assert self.deadline is not None
        kept = self.evaluations * self.taken.get("evaluating", 0.0) + self.taken.get("saving", 0.0)
        return self.deadline - self.outside_s - kept - (self.unknown_s if len(self.taken) < 2 else 0.0)

    @property
    def is_late(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.end

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Evaluating or saving, which will be done once more at the end: how long it takes is remembered."""
        began = time.monotonic()
        yield
        self.taken[what] = time.monotonic() - began
        self.pauses_s += self.taken[what]

    def may_evaluate(self) -> bool:
        """Not when the last evaluation would follow at once."""
        return self.deadline is None or time.monotonic() + self.taken.get("evaluating", 0.0) < self.end

    @property
    def must_try(self) -> bool:
        """At half time, if nobody knows yet how long the last evaluation and the last save will take."""
        if self.deadline is None or "evaluating" in self.taken:
            return False
        return time.monotonic() > (self.began + self.end) / 2

    def last_step(self) -> int:
        """That is taken in any case; none with a clock."""
        return self.total if self.deadline is None else self.at_most or sys.maxsize

    def place(self, step: int) -> tuple[float, float]:
        """How far, of how much: in steps, which with a clock are so many as have passed of the time."""
        if self.deadline is None:
            return step, self.total
        if not self.steps:
            self.began, self.pauses_s = time.monotonic(), 0.0  # from the first step, not what came before it
        done, whole = (self.spent_s + then - self.began for then in (time.monotonic(), self.end))
        part = min(1.0, done / whole) if whole > 0 else 1.0
        return max(part, step / self.at_most if self.at_most else 0.0) * self.total, self.total

    def count(self, step: int) -> bool:
        """A step is done; whether it was the last. The next must fit, by half at least."""
        if self.deadline is None:
            return step == self.total
        self.steps += 1
        now = time.monotonic()
        left = max(0.0, self.end - now) / ((now - self.began - self.pauses_s) / self.steps)
        self.total = max(1, min(step + round(left), self.at_most or sys.maxsize))
        return left < 0.5 or step == self.at_most
