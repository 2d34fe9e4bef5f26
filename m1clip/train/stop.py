"""Ctrl-C as a wish: the step in hand is finished and the state saved. A second one means at once."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    def __init__(self, say: Callable[[str], None]):
        self.say, self.asked = say, False
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
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.say(f"{signal.Signals(number).name}: finishing this step and saving; once more to stop at once")
