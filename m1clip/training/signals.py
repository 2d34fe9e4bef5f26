"""Ctrl-C as a requested: the step in hand is finished and the state saved. A second one means at once."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    def __init__(self, say: Callable[[str], None]):
        self.say, self.asked, self.heard_at = say, False, 0.0
        self.before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        heard = [
            number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN
        ]  # as by nohup
        self.before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked:
            if (
                now - self.heard_at < 1
            ):  # one requested, sent twice: by a shell to its group, and by `timeout`
                return
            raise KeyboardInterrupt
        self.asked, self.heard_at = True, now
        self.say(f"{signal.Signals(number).name}: finishing this step and saving; once more to stop at once")
