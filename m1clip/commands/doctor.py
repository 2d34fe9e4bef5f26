"""m1clip doctor: check versions, memory, disk, power, heat, load and devices, each with a remedy."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import psutil
import tyro

from m1clip import sensors
from m1clip.commands.flags import parse_flags
from m1clip.config import get_preset
from m1clip.console import loading, show, table
from m1clip.files import cache_folder

KNOWN_BUGS = {  # of PyTorch on macOS
    "2.8.0": ("fail", "attention on MPS gives wrong results (pytorch#163597)", "pip install -U torch"),
    "2.13.0": ("warn", "torch.compile on MPS is 9 times slower (pytorch#192551)", "leave --compile at auto"),
}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Args:
    """Check whether this machine is ready to train: versions, memory, disk, power, heat, load, devices.

    m1clip doctor                                   exit code 1 if a check fails
    m1clip doctor --preset small --json             one line, for a bug report

    Every GPU is compared with the CPU: outputs, loss and gradients of the model.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """Model on which devices are compared."""
    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True)
class Check:
    name: str
    status: str
    """ok, warn or fail."""
    result: str
    remedy: str = ""


def parse(program: str, argv: list[str]) -> Args:
    args = parse_flags(Args, program, argv)
    get_preset(args.preset)
    return args


def main(args: Args) -> int:
    with loading("checking the machine and its devices"):
        checks = [*check_versions(), *check_machine(), *check_devices(args.preset)]
    failed = any(check.status == "fail" for check in checks)
    if args.json:
        result = {"ok": not failed, "machine": sensors.machine(), "checks": [asdict(check) for check in checks]}
        print(json.dumps(result))
        return int(failed)
    rows = table("", "", "")
    rows.show_header = False
    for column in rows.columns:
        column.justify = "left"
    for check in checks:
        remedy = f"\n→ {check.remedy}" if check.remedy and check.status != "ok" else ""
        rows.add_row(f"[{STYLES[check.status]}]{check.status}[/]", check.name, check.result + remedy)
    show("this machine", rows)
    counts = {status: sum(check.status == status for check in checks) for status in STYLES}
    print("\n" + ", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return int(failed)


def check_versions() -> Iterator[Check]:
    python, torch = f"Python {platform.python_version()}, {platform.machine()}", sensors.machine()["torch"]
    is_rosetta = sys.platform == "darwin" and platform.machine() == "x86_64" and "Apple" in (sensors.chip() or "")
    python += ", translated by Rosetta: no GPU, half the speed" if is_rosetta else ""
    yield Check("python", "fail" if is_rosetta else "ok", python, "install an arm64 Python: brew, python.org or uv")
    status, bug, remedy = "ok", "no known bug that matters here", "pip install -U torch"
    number = (torch or "0.0").partition("+")[0]
    if number in KNOWN_BUGS and sys.platform == "darwin":
        status, bug, remedy = KNOWN_BUGS[number]
    elif tuple(int(part) for part in number.split(".")[:2]) < (2, 9):
        status, bug = "fail", "m1clip needs 2.9"
    yield Check("torch", status, f"PyTorch {torch}: {bug}", remedy)
    numpy = version("numpy")
    status = "ok" if int(numpy.partition(".")[0]) >= 2 else "warn"
    yield Check("numpy", status, f"NumPy {numpy}; m1clip is tested with 2", "pip install -U numpy")


def check_machine() -> Iterator[Check]:
    free_gb, swap_gb = sensors.available_gb(), psutil.swap_memory().used / 1e9
    text = f"{free_gb:.1f} of {psutil.virtual_memory().total / 1e9:.0f} GB free, {swap_gb:.1f} GB swapped out"
    status = "fail" if free_gb < 2 else "warn" if free_gb < 4 or swap_gb > 2 else "ok"
    yield Check("memory", status, text, "close other programs, or use a small preset and --chunk; nano needs 1 GB")

    disks = {folder: shutil.disk_usage(folder).free / 1e9 for folder in (Path.cwd(), cache_folder())}
    text = ", ".join(f"{gb:.0f} GB free in {folder}" for folder, gb in disks.items())
    status = "ok" if min(disks.values()) >= 10 else "warn" if min(disks.values()) >= 2 else "fail"
    yield Check("disk", status, text, "free some space, or move the cache of decoded images with M1CLIP_CACHE")

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    on_battery = battery is not None and battery.power_plugged is False
    text = "no battery" if battery is None else f"battery {battery.percent:.0f} %"
    text += ", not charging" if on_battery else ""
    yield Check("power", "warn" if on_battery else "ok", text, "connect the power adapter: training is faster")

    celsius, limit = sensors.temperature_c(), sensors.speed_limit()
    is_hot = (limit or 100) < 100 or (celsius or 0) >= 90
    text = "temperature unknown" if celsius is None else f"{celsius:.0f} °C"
    text += f", macOS limits the CPU to {limit} % of its speed" if limit else ""
    yield Check("heat", "warn" if is_hot else "ok", text, "let the machine cool down before comparing speeds")

    used = psutil.cpu_percent(interval=1.0)
    remedy = "close other programs before comparing speeds"
    yield Check("load", "ok" if used <= 25 else "warn", f"{used:.0f} % of the CPU is in use", remedy)


def check_devices(preset: str) -> Iterator[Check]:
    from m1clip import devices
    from m1clip.devices import Plan
    from m1clip.model.clip import CLIP
    from m1clip.training.device_plan import compare_with_cpu
    from m1clip.training.measurements import open_store
    from m1clip.training.timing import random_batch

    config, available = get_preset(preset), devices.available()
    fast, threads = sensors.fast_cores(), devices.DEFAULT_THREADS
    cores = f"{sensors.machine()['cores']} cores" + (f", {fast} of them performance cores" if fast else "")
    status = "warn" if fast and threads > fast else "ok"
    yield Check("threads", status, f"{threads} threads on {cores}", f"--threads {fast}, or m1clip bench")
    possible, reason = devices.can_compile(devices.torch_device("cpu"))
    remedy = "xcode-select --install, or install g++"
    yield Check("compile", "ok" if possible else "warn", f"torch.compile on the CPU: {reason}", remedy)
    if len(available) == 1:
        yield Check("gpu", "ok", "PyTorch finds no GPU; training uses the CPU")
    for name in available[1:]:
        batch = random_batch(config, 8, config.model.text.context_length)
        result = compare_with_cpu(CLIP(config.model), batch, Plan(name), config)
        text = f"{result}; {devices.limit_gb(devices.torch_device(name)) or 0:.1f} GB for PyTorch"
        yield Check(name, "ok" if result.ok else "fail", text, "use --device cpu (auto does), and report this")
    rows = open_store().steps()
    text, remedy = f"{len(rows)} timings of training steps", "m1clip bench --quick, for --device auto"
    yield Check("measurements", "ok" if rows else "warn", text, remedy)
