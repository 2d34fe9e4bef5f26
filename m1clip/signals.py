"""Ctrl-C is answered within two seconds, also while the main thread is inside a library. No torch.

Python runs signal handlers in the main thread between two bytecodes: not while a library trains a tokenizer, reads
gigabytes or computes gradients. A second thread receives signals too, and acts if the main thread does not.
"""

import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PROBE = signal.SIGURG  # ignored by default; asks the main thread whether it runs Python code
TWICE_S, ANSWER_S = 0.3, 1.2  # a shell and `timeout` both send a signal to their processes: it is one
SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it
_responded = threading.Event()


class Interrupt(KeyboardInterrupt):
    """A KeyboardInterrupt that knows whether it was swallowed: then nothing refers to the last one any more."""

    last: "weakref.ref[Interrupt] | None" = None

    @classmethod
    def handle(cls, number: int, frame: FrameType | None) -> NoReturn:
        error = cls(f"stopped by {signal.Signals(number).name}")
        cls.last = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # or the traceback would keep it

    @classmethod
    def is_pending(cls) -> bool:
        return cls.last is not None and cls.last() is not None


def answer_signals() -> None:
    """Treat all stop signals as Ctrl-C, so that partial files are removed; answer them even inside a library."""
    for number in handled_signals():
        signal.signal(number, Interrupt.handle)
    signal.signal(PROBE, _respond)
    receive, send = os.pipe()
    os.set_blocking(send, False)
    signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(receive,), daemon=True).start()


def handled_signals() -> list[signal.Signals]:
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP


def end_at_next_signal(code: int) -> None:
    """Let another signal end the exiting process without a traceback; one that was interrupted exits in time."""
    for number in handled_signals():
        signal.signal(number, signal.SIG_DFL)
    if code == 130:
        exit_in_time = threading.Timer(ANSWER_S, os._exit, (code,))  # worker pools and trackers may wait
        exit_in_time.daemon = True
        exit_in_time.start()


def _respond(number: int, frame: FrameType | None) -> None:
    _responded.set()


def _watch(receive: int) -> None:
    while received := os.read(receive, 1024):
        number = next(filter(SIGNALS.__contains__, received), None)
        if number is None:
            continue
        responds = _main_thread_responds()
        if select.select([receive], [], [], 0)[0]:
            os.read(receive, 1024)  # the probe, or the same signal sent twice
        handler = signal.getsignal(number)
        if not responds:
            _answer_for_main_thread(number, handler)
        elif handler == Interrupt.handle and not Interrupt.is_pending():
            _repeat(number)
        elif handler == Interrupt.handle:
            time.sleep(ANSWER_S)
            _write("stopping; press Ctrl-C again to stop at once")


def _repeat(number: int) -> None:
    """Send a signal again whose exception was swallowed, as libraries do while they are imported."""
    time.sleep(TWICE_S)
    if signal.getsignal(number) == Interrupt.handle:  # not if it was caught at the end of the command
        os.kill(os.getpid(), number)


def _main_thread_responds() -> bool:
    """Whether the main thread runs Python code now, and with it all pending handlers."""
    _responded.clear()
    signal.pthread_kill(threading.main_thread().ident or 0, PROBE)
    time.sleep(TWICE_S)
    return _responded.wait(ANSWER_S)


def _answer_for_main_thread(number: int, handler: Any) -> None:
    """Only for our handlers: others, such as the web server's, are left alone."""
    if handler != Interrupt.handle and not isinstance(getattr(handler, "__self__", None), StopSignal):
        return
    try:
        handler(number, None)
    except KeyboardInterrupt:  # without cleaning up: files are atomic, and partial ones are removed later
        _write("stopped")
        os._exit(130)


def _write(text: str) -> None:
    """Past the locks of streams and consoles, which the main thread may hold."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{text}\n".encode())


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Signals end the process inside the block, which holds the GIL for long and has nothing to clean up."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in SIGNALS if is_main and signal.getsignal(number) == Interrupt.handle]
    if numbers and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), SHOW_CURSOR.encode())
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, Interrupt.handle)


class StopSignal:
    """The first signal ends the run after the current step, another one at once."""

    def __init__(self, report: Callable[[str], None]):
        self.report, self.received, self.received_at = report, False, 0.0
        self.answered = False  # by the watching thread; the main thread's handler will still be called

    def __enter__(self) -> "StopSignal":
        self.previous = {number: signal.signal(number, self._handle) for number in handled_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        was_answered, self.answered = self.answered, frame is None
        now = time.monotonic()
        if not self.received:
            self.received, self.received_at = True, now
            name = signal.Signals(number).name
            self.report(f"{name}: finishing this step and saving; send it again to stop at once")
        elif (self.answered or not was_answered) and now - self.received_at >= 2 * TWICE_S:  # less: the same one
            raise KeyboardInterrupt
