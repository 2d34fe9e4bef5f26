"""The machine and its sensors: memory, load, temperature, energy. None, never 0, if unreadable. No torch."""

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import psutil

CGROUP = Path("/sys/fs/cgroup")
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal")  # Intel, AMD, AMD, ARM boards


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
    return next((package.version for package in distributions(name="torch")), None)


def _macos_output(*command: str) -> str | None:
    """What a macOS command prints; None on other systems."""
    return subprocess.run(command, capture_output=True, text=True).stdout if sys.platform == "darwin" else None


def chip() -> str | None:
    """Name of the processor, such as Apple M1."""
    if sysctl := _macos_output("sysctl", "-n", "machdep.cpu.brand_string"):
        return sysctl.strip()
    with suppress(OSError):
        if name := re.search(r"^model name\s*:(.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return name[1].strip()
    return platform.processor() or platform.machine() or None


def cpu_flags() -> list[str]:
    """Instructions that decide how fast INT8 is, and whether it saturates."""
    names = (*(f"avx{kind}" for kind in ("", "2", "512f", "512_vnni", "_vnni")), "amx_int8", "asimddp", "i8mm")
    found = set((_macos_output("sysctl", "hw.optional") or "").lower().replace("feat_", "").split())
    with suppress(OSError):
        found |= set(Path("/proc/cpuinfo").read_text().split())
    return [name for name in names if name in found]


def fast_cores() -> int | None:
    """Performance cores of Apple silicon; None on other machines."""
    cores = (_macos_output("sysctl", "-n", "hw.perflevel0.physicalcpu") or "").strip()
    return int(cores) if cores.isdecimal() else None


class MemoryUse(NamedTuple):
    rss_gb: float  # resident memory of this process
    mapped_gb: float | None  # the part of it that is memory-mapped files; only Linux reports it


def memory_use() -> MemoryUse:
    info = psutil.Process().memory_info()
    mapped = getattr(info, "shared", None)
    return MemoryUse(info.rss / 1e9, None if mapped is None else mapped / 1e9)


def peak_gb() -> float:
    """Peak resident memory of this process since its start."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak * (1 if sys.platform == "darwin" else 1024) / 1e9, 3)


def memory_limit_gb() -> float:
    """Memory of the machine, or of the container or ulimit if that is less."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):
        total = min(total, int((CGROUP / "memory.max").read_text()))
    address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
    return (total if address_space == resource.RLIM_INFINITY else min(total, address_space)) / 1e9


def available_gb() -> float:
    """Memory available without swapping: of the machine, or of the container or ulimit if that is less."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit: "max"
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
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


class PeakMemory:
    """Peak growth of resident memory inside the block, sampled every 2 ms."""

    gb = 0.0

    def __enter__(self) -> "PeakMemory":
        self.start_gb, self.stopped = memory_use().rss_gb, threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.stopped.wait(0.002)
            self.gb = max(self.gb, memory_use().rss_gb - self.start_gb)

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()


def readings(folder: Path) -> dict[str, Any]:
    """Current memory, load, temperature and disk space; CPU use is since the last call."""
    swap = psutil.swap_memory()
    return {
        "rss_gb": round(memory_use().rss_gb, 3),
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
    sensors = psutil.sensors_temperatures() if hasattr(psutil, "sensors_temperatures") else {}
    return max((entry.current for name in CPU_SENSORS for entry in sensors.get(name, [])), default=None)


def speed_limit() -> int | None:
    """CPU speed in percent that macOS allows at the current temperature; None on other systems."""
    output = _macos_output("pmset", "-g", "therm")
    limit = re.search(r"CPU_Speed_Limit\s*=\s*(\d+)", output or "")
    return None if output is None else int(limit[1]) if limit else 100


class EnergyMeter:
    """Joules used since construction, of every counter that zeus can read; None without a counter.

    Needs m1clip[energy]; on Linux also permission to read the CPU's counters (mostly root).
    """

    def __init__(self) -> None:
        self.counters = list(_counters())
        self.start = sum(counter() for counter in self.counters)

    def joules(self) -> float | None:
        used = sum(counter() for counter in self.counters) - self.start
        return used / 1e3 if self.counters else None


def _counters() -> Iterable[Callable[[], float]]:
    """Functions that return millijoules; each is tried once, and unreadable ones are left out."""
    try:
        from zeus.device import get_cpus, get_gpus, get_soc
        from zeus.device.exception import ZeusBaseError
    except ImportError:
        return
    for find in (get_soc, get_cpus, get_gpus):
        with suppress(ZeusBaseError, OSError):
            found = find()
            for device in [found] if find is get_soc else found.cpus if find is get_cpus else found.gpus:
                counter = partial(_millijoules, device.get_total_energy_consumption)
                counter()
                yield counter


def _millijoules(read: Callable[[], Any]) -> float:
    """A plain number, or the sum over a chip's parts; its total already includes cores and clusters."""
    reading = read()
    if isinstance(reading, int | float):
        return float(reading)
    parts = [getattr(reading, field.name) for field in fields(reading) if field.name.count("_") < 3]
    return float(sum(part for part in parts if isinstance(part, int | float)))
