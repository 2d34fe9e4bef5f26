"""How far a run is: by its steps, or by the clock where it has a budget."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

UNKNOWN = 0.02  # of the budget, kept for the last evaluation and the last save until one of each was timed


class Pace:
    """With a deadline the rate follows the time and not the steps: it has come down when the time is over,
    however fast the machine was meanwhile. The number of steps is then a guess that becomes better."""

    def __init__(
        self, total: int, deadline: float | None = None, budget_s: float = 0.0, at_most: int | None = None
    ):
        """`deadline` is a time of time.monotonic, the end of everything; `total` the steps, or a first guess.
        More than `at_most` steps are not taken, however much time is left."""
        self.total, self.deadline, self.at_most = total, deadline, at_most
        self.first: float | None = None
        self.taken: dict[str, float] = {"unknown": UNKNOWN * budget_s}
        self.steps, self.pauses = 0, 0.0

    @property
    def end(self) -> float:
        """When the last step has to be done, so that there is time for what follows it."""
        assert self.deadline is not None
        known = [seconds for name, seconds in self.taken.items() if name != "unknown"]
        return self.deadline - (sum(known) if len(known) == 2 else max(self.taken.values()) + sum(known))

    @contextmanager
    def aside(self, what: str) -> Iterator[None]:
        """Something that will be done once more at the end: how long it takes is remembered."""
        began = time.monotonic()
        yield
        self.taken[what] = time.monotonic() - began
        self.pauses += self.taken[what]

    @property
    def must_try(self) -> bool:
        """At half time, if nobody knows yet how long the last evaluation and the last save will take."""
        if self.deadline is None or self.first is None or "evaluating" in self.taken:
            return False
        return time.monotonic() > (self.first + self.end) / 2

    def last_step(self) -> int:
        """That is taken in any case; none with a clock."""
        return self.total if self.deadline is None else self.at_most or sys.maxsize

    def place(self, step: int) -> tuple[float, float]:
        """How far, of how much: in steps, or in seconds."""
        if self.deadline is None:
            return step, self.total
        now = time.monotonic()
        self.first = self.first or now
        done, whole = min(now, self.end) - self.first, max(1e-3, self.end - self.first)
        if self.at_most and step / self.at_most > done / whole:
            return step, self.at_most
        return done, whole

    def count(self, step: int) -> bool:
        """A step is done; whether it was the last. The next must fit, by half at least."""
        if self.deadline is None:
            return step == self.total
        assert self.first is not None
        self.steps += 1
        now = time.monotonic()
        each = (now - self.first - self.pauses) / self.steps
        left = max(0.0, self.end - now) / each
        self.total = min(step + round(left), self.at_most or sys.maxsize)
        return left < 0.5 or step == self.at_most
