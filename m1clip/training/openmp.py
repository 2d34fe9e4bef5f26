"""Let waiting OpenMP threads sleep while other programs need the CPU, and spin while the machine is idle.

Between two parallel regions OpenMP threads spin, which is fastest on an idle machine. On a loaded one they burn the
time slices that the thread they wait for needs. The wait policy does not change a result; the number of threads would.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from m1clip import devices, sensors

CHECK_S = 2.0
HIGH_LOAD, LOW_LOAD = 0.3, 0.1  # of all cores, used by other programs


class WaitPolicy:
    """Watches the load of other programs and switches between spinning and sleeping."""

    def __init__(self, report: Callable[[str], None]):
        self.report, self.reported = report, False
        self.load, self.checked_at = sensors.BackgroundLoad(), time.monotonic()
        self.sleeping: threading.Event | None = None

    def update(self) -> None:
        """Call this now and then; it costs a tenth of a millisecond every few seconds."""
        if time.monotonic() - self.checked_at < CHECK_S:
            return
        share = self.load.share()
        self.load, self.checked_at = sensors.BackgroundLoad(), time.monotonic()
        if share > HIGH_LOAD and self.sleeping is None:
            self.sleeping = sleep_while_waiting()
            if not self.reported:
                self.report(f"other programs use {share:.0%} of the CPU: waiting threads sleep instead of spinning")
                self.reported = True
        elif share < LOW_LOAD:
            self.close()

    def close(self) -> None:
        """Spin again."""
        if self.sleeping is not None:
            self.sleeping.set()
            self.sleeping = None


def sleep_while_waiting() -> threading.Event:
    """Make waiting OpenMP threads sleep until the returned event is set."""
    stop, started = threading.Event(), threading.Event()
    set_blocktime = None
    if sys.platform == "darwin":  # LLVM's OpenMP has a function for it
        with suppress(OSError, AttributeError):
            set_blocktime = ctypes.CDLL("libomp.dylib").kmp_set_blocktime

    def hold_second_pool() -> None:
        # libgomp stops spinning while it manages more threads than there are cores (`gomp_managed_threads` in its
        # wait.h): a parallel region in another thread makes a second pool, which ends with that thread.
        torch.set_num_threads(devices.DEFAULT_THREADS)
        torch.ones(1 << 18).add_(1)
        started.set()
        stop.wait()

    if set_blocktime is None:
        threading.Thread(target=hold_second_pool, daemon=True, name="openmp").start()
        started.wait()
    else:
        default_ms = 200
        set_blocktime(0)
        threading.Thread(target=lambda: (stop.wait(), set_blocktime(default_ms)), daemon=True).start()
    return stop
