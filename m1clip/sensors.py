"""The machine and its sensors: memory, load, temperature, energy. None, never 0, if unreadable. No torch."""

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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
# Names of CPU temperature sensors: Intel, AMD, ARM boards.
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")


def machine() -> dict[str, Any]:
    return {
        "chip": chip(),
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "threads": os.cpu_count(),
        "ram_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch_version(),
    }


def torch_version() -> str | None:
    """The installed version, without importing torch."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def chip() -> str | None:
    """Name of the processor, such as Apple M1."""
    if sys.platform == "darwin":
        sysctl = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        return sysctl.stdout.strip() or None
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor() or None
    return names[0] if names else platform.machine() or None


def fast_cores() -> int | None:
    """Performance cores of Apple silicon; None on other machines."""
    if sys.platform != "darwin":
        return None
    sysctl = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True)
    return int(sysctl.stdout) if sysctl.stdout.strip().isdecimal() else None


def memory_gb() -> float:
    """Resident memory of this process."""
    return round(psutil.Process().memory_info().rss / 1e9, 3)


class MemoryUse(NamedTuple):
    rss_gb: float
    """Resident memory of this process."""
    mapped_gb: float | None
    """The part of it that is memory-mapped files; only Linux reports it."""


def memory_use() -> MemoryUse:
    info = psutil.Process().memory_info()
    mapped = getattr(info, "shared", None)
    return MemoryUse(info.rss / 1e9, None if mapped is None else mapped / 1e9)


def peak_gb() -> float:
    """Peak resident memory of this process since its start."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e9, 3)


def available_gb() -> float:
    """Memory available without swapping: of the machine, or of the container or ulimit if that is less."""
    free = psutil.virtual_memory().available
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free = min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        pass
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if address_space != resource.RLIM_INFINITY:
        free = min(free, address_space - psutil.Process().memory_info().vms)
    return max(0, free) / 1e9


class BackgroundLoad:
    """Fraction of all cores used by other programs since construction: it makes timings unreliable."""

    def __init__(self) -> None:
        self.start, self.others = time.perf_counter(), self._cpu_seconds()

    def share(self) -> float:
        seconds = max(1e-3, (time.perf_counter() - self.start) * (os.cpu_count() or 1))
        return round(min(1.0, max(0.0, (self._cpu_seconds() - self.others) / seconds)), 3)

    @staticmethod
    def _cpu_seconds() -> float:
        """CPU time of the machine without this process and the children it has waited for."""
        times, own = psutil.cpu_times(), sum(os.times()[:4])
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return float(sum(times) - idle - own)


def trim_malloc() -> None:
    """Return freed memory to the system, so that later growth is visible."""
    for name, arguments in (("malloc_trim", (0,)), ("malloc_zone_pressure_relief", (None, 0))):
        function = getattr(ctypes.CDLL(None), name, None)
        if function is not None:
            function(*arguments)


class PeakMemory:
    """Peak growth of resident memory inside the block, sampled every 2 ms."""

    gb = 0.0

    def __enter__(self) -> "PeakMemory":
        self.start, self.stopped = memory_gb(), threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while True:
            self.gb = max(self.gb, memory_gb() - self.start)
            if self.stopped.wait(0.002):
                return

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stopped.set()
        self.thread.join()
        self.gb = max(self.gb, memory_gb() - self.start)


def readings(folder: Path) -> dict[str, Any]:
    """Current memory, load, temperature and disk space; CPU use is since the last call."""
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
    """The hottest CPU sensor; macOS shows none without root."""
    read: Callable[[], dict[str, Any]] | None = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read else {}
    return max((entry.current for name in CPU_SENSORS for entry in sensors.get(name, [])), default=None)


def speed_limit() -> int | None:
    """CPU speed in percent that macOS allows at the current temperature; None on other systems."""
    if sys.platform != "darwin":
        return None
    lines = subprocess.run(["pmset", "-g", "therm"], capture_output=True, text=True).stdout.splitlines()
    limits = [line.partition("=")[2].strip() for line in lines if "CPU_Speed_Limit" in line]
    return int(limits[0]) if limits and limits[0].isdecimal() else 100


class EnergyMeter:
    """Joules used since construction, of every counter that zeus can read; None without a counter.

    Needs m1clip[energy]; on Linux also permission to read the CPU's counters (mostly root).
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
    """Functions that return millijoules; each is tried once, and unreadable ones are left out."""
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


def _millijoules(reading: Any) -> float:
    """A plain number, or the sum over a chip's parts; its total already includes cores and clusters."""
    if isinstance(reading, int | float):
        return float(reading)
    parts = [getattr(reading, field.name) for field in fields(reading) if field.name.count("_") < 3]
    return float(sum(part for part in parts if isinstance(part, int | float)))
