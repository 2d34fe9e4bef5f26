"""Train beside other programs: adapt while they need the CPU, without changing a bit of the results.

OpenMP threads wait for each other at the end of every operation. On an idle machine it is fastest to spin; on a loaded
one they burn the time that the thread they wait for needs (docs/log.md, "Training on a busy machine").
"""

import ctypes
import os
import platform
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import torch

from m1clip import sensors
from m1clip.training.step import TrainState

CHECK_S = 2.0
START, STOP = 0.5, 0.2  # cores used by others beyond those that our threads leave free
SHORT_SLICE_NS = 100_000  # the smallest that Linux accepts
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # system call; libc has no function for it


class ContentionPolicy:
    def __init__(self, state: TrainState, report: Callable[[str], None]):
        self.state, self.report, self.is_active, self.is_reported = state, report, False, False
        self.load, self.checked_at = sensors.BackgroundLoad(), time.monotonic()

    def update(self) -> None:
        """Call this after each step: it measures the load every few seconds."""
        if time.monotonic() - self.checked_at < CHECK_S:
            return
        share, cores, threads = self.load.share(), os.cpu_count() or 1, torch.get_num_threads()
        self.load, self.checked_at = sensors.BackgroundLoad(), time.monotonic()
        contended = share * cores - (cores - threads)
        plan = self.state.plan
        is_applicable = plan.device == "cpu" and not plan.compile and threads > 1
        if contended > START and is_applicable and not self.is_active:
            self.activate()
            if not self.is_reported:
                load = f"other processes use {share:.0%} of the CPU"
                self.report(f"{load}: both towers run at once, waiting threads sleep")
                self.is_reported = True
        elif contended < STOP:
            self.close()

    def activate(self) -> None:
        """One tower computes while the other waits. With more threads than cores, libgomp lets waiting ones sleep."""
        self.is_active = True
        self.state.run_towers_at_once(True)
        set_time_slice(SHORT_SLICE_NS)

    def close(self) -> None:
        """Run the towers one after the other again."""
        if self.is_active:
            self.is_active = False
            self.state.run_towers_at_once(False)
            set_time_slice(0)


def set_time_slice(nanoseconds: int) -> None:
    """Ask Linux 6.12 or newer for shorter but earlier turns of this process's threads; 0 is the default."""
    system_call = SCHED_SETATTR.get(platform.machine())
    if sys.platform != "linux" or system_call is None:
        return
    libc = ctypes.CDLL(None)
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(OSError):  # it has ended
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                nice = os.getpriority(os.PRIO_PROCESS, thread)
                attributes = struct.pack("IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0)
                libc.syscall(system_call, thread, attributes, 0)
