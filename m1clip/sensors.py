"""What the machine is and how it fares. What cannot be read is None, never 0. No torch."""

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
# What a core's sensor is called: Intel, AMD, ARM boards.
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")


def machine() -> dict[str, Any]:
    return {
        "chip": chip(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def chip() -> str | None:
    """The processor's name as its maker writes it."""
    if sys.platform == "darwin":
        asked = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return asked.stdout.strip() or None
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else platform.machine() or None


def fast_cores() -> int | None:
    """Performance cores of Apple silicon; None where all cores are alike, or nothing tells them apart."""
    if sys.platform != "darwin":
        return None
    asked = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True)
    return int(asked.stdout) if asked.stdout.strip().isdecimal() else None


def readable(size: int) -> str:
    """Bytes as people say them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def memory_gb() -> float:
    """What this process holds in RAM now."""
    return round(psutil.Process().memory_info().rss / 1e9, 3)


class MemoryUse(NamedTuple):
    rss_gb: float
    """RAM held by this process."""
    mapped_gb: float | None
    """The part of it that is memory-mapped files; only Linux reports it."""


def memory_use() -> MemoryUse:
    info = psutil.Process().memory_info()
    mapped = getattr(info, "shared", None)
    return MemoryUse(info.rss / 1e9, None if mapped is None else mapped / 1e9)


def peak_gb() -> float:
    """The most this process has ever held in RAM."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(most * (1 if sys.platform == "darwin" else 1024) / 1e9, 3)


def available_gb() -> float:
    """What can still be had without swapping: the machine's, or less where a container or ulimit says so."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free = min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        pass
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        free = min(free, most - psutil.Process().memory_info().vms)
    return max(0, free) / 1e9


class BackgroundLoad:
    """What part of all cores other programs have taken since it was made: a busy machine misleads."""

    def __init__(self) -> None:
        self.began, self.busy, self.own = time.perf_counter(), self._busy(), time.process_time()

    def share(self) -> float:
        seconds = max(1e-3, (time.perf_counter() - self.began) * (os.cpu_count() or 1))
        taken = self._busy() - self.busy - (time.process_time() - self.own)
        return round(min(1.0, max(0.0, taken / seconds)), 3)

    @staticmethod
    def _busy() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def trim_malloc() -> None:
    """Have the C library return what it keeps of freed memory, so that growth from here on can be seen."""
    for name, words in (("malloc_trim", (0,)), ("malloc_zone_pressure_relief", (None, 0))):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*words)


class PeakMemory:
    """The most RAM that the process takes in a block beyond what it had before, looked at every 2 ms."""

    gb = 0.0

    def __enter__(self) -> "PeakMemory":
        self.start, self.over = memory_gb(), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        return self

    def _look(self) -> None:
        while True:
            self.gb = max(self.gb, memory_gb() - self.start)
            if self.over.wait(0.002):
                return

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.over.set()
        self.thread.join()
        self.gb = max(self.gb, memory_gb() - self.start)


def readings(folder: Path) -> dict[str, Any]:
    """How the machine fares now; the cores' use is since the last call."""
    swap = psutil.swap_memory()
    return {
        "rss_gb": memory_gb(),
        "peak_rss_gb": peak_gb(),
        "available_gb": round(available_gb(), 3),
        "swap_used_gb": round(swap.used / 1e9, 3),
        "swapped_out_gb": round(swap.sout / 1e9, 3),
        "cpu_percent": psutil.cpu_percent(percpu=True),
        "temperature_c": temperature_c(),
        "disk_free_gb": round(shutil.disk_usage(folder).free / 1e9, 3),
    }


def temperature_c() -> float | None:
    """The hottest of the processor's sensors; macOS shows none without root."""
    read: Callable[[], dict[str, Any]] | None = getattr(psutil, "sensors_temperatures", None)
    found = read() if read else {}
    heats = [one.current for name in CPU_SENSORS for one in found.get(name, [])]
    return max(heats) if heats else None


def speed_limit() -> int | None:
    """Per cent of its speed that macOS leaves the processor, as it is warm; None where nothing tells."""
    if sys.platform != "darwin":
        return None
    asked = subprocess.run(["pmset", "-g", "therm"], capture_output=True, text=True)
    said = [line.partition("=")[2].strip() for line in asked.stdout.splitlines() if "CPU_Speed_Limit" in line]
    return int(said[0]) if said and said[0].isdecimal() else 100


class EnergyMeter:
    """Joules drawn since it was made, by every counter that zeus can read; None where there is none.

    Needs m1clip[energy]; on Linux also the right to read the processor's counters (root, mostly).
    """

    def __init__(self) -> None:
        self.counters = list(_counters())
        self.start = [counter() for counter in self.counters]

    def joules(self) -> float | None:
        if not self.counters:
            return None
        now = [counter() for counter in self.counters]
        return sum(b - a for a, b in zip(self.start, now, strict=True)) / 1e3


def _counters() -> Iterable[Callable[[], float]]:
    """Functions that return millijoules, each tried once; what cannot be read is left out."""
    try:
        from zeus.device import get_cpus, get_gpus, get_soc
        from zeus.device.exception import ZeusBaseError
    except ImportError:
        return
    for find in (get_soc, get_cpus, get_gpus):
        try:
            device = find()
            parts = [device] if find is get_soc else [*(device.cpus if find is get_cpus else device.gpus)]
            for part in parts:
                _millijoules(part.get_total_energy_consumption())
                yield partial(lambda part: _millijoules(part.get_total_energy_consumption()), part)
        except (ZeusBaseError, OSError):
            continue


def _millijoules(read: Any) -> float:
    """A plain number, or the sum of a chip's parts; single cores and clusters are in its total already."""
    if isinstance(read, int | float):
        return float(read)
    parts = [getattr(read, field.name) for field in fields(read) if field.name.count("_") < 3]
    return float(sum(part for part in parts if isinstance(part, int | float)))
