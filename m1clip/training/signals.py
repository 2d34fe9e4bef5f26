"""Ctrl-C, SIGTERM and SIGHUP finish the current step and save; a second signal stops at once."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    def __init__(self, report: Callable[[str], None]):
        self.report, self.received, self.received_at = report, False, 0.0
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        self.previous = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received:
            if now - self.received_at < 1:  # one signal sent twice: by a shell to its group, and by `timeout`
                return
            raise KeyboardInterrupt
        self.received, self.received_at = True, now
        name = signal.Signals(number).name
        self.report(f"{name}: finishing this step and saving; send it again to stop at once")
