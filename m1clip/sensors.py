"""What the machine is and how it fares. What cannot be read is None, never 0. No torch."""

import os
import platform
import subprocess
import sys
from typing import Any

import psutil


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


def readable(size: int) -> str:
    """Bytes as people say them."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def memory_gb() -> float:
    """What this process holds in RAM now."""
    return round(psutil.Process().memory_info().rss / 1e9, 3)
