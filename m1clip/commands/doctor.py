"""m1clip doctor: check versions, memory, disk, power, heat, load and devices, each with a remedy."""

import json
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil
from rich.markup import escape

from m1clip import sensors
from m1clip.config import get_preset
from m1clip.console import loading, show_rows
from m1clip.files import cache_folder

REMEDIES = {
    "python": "install an arm64 Python (brew, python.org or uv) and recreate the environment",
    "torch": "pip install -U torch, and leave --compile at auto",
    "memory": "close other programs, or use a small preset and --chunk; nano needs 1 GB",
    "disk": "free some space, or move the cache of decoded images with M1CLIP_CACHE",
    "power": "connect the power adapter: training is faster, and does not end with the battery",
    "heat": "let the machine cool down before comparing speeds",
    "load": "close other programs before comparing speeds",
    "threads": "set --threads to the performance cores, or run m1clip bench",
    "compile": "xcode-select --install, or install g++",
    "gpu": "use --device cpu (auto does), and report this",
    "measurements": "run m1clip bench --quick, for --device auto and m1clip advise",
}
KNOWN_BUGS = {  # of PyTorch on macOS
    "2.8.0": ("fail", "attention on MPS gives wrong results (pytorch#163597)"),
    "2.13.0": ("warn", "torch.compile on MPS is 9 times slower (pytorch#192551)"),
}
EXTRAS = {  # of pyproject.toml, and a module of each
    **{
        "timm": "timm",
        "hf": "transformers",
        "openclip": "open_clip",
        "lora": "peft",
        "heic": "pillow_heif",
        "raw": "rawpy",
    },
    **{"eval": "sklearn", "energy": "zeus"},
    **{
        "tensorboard": "tensorboard",
        "wandb": "wandb",
        "trackio": "trackio",
        "export": "onnxscript",
        "coreml": "coremltools",
    },
}
STATUS_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
Check = tuple[str, str, str]  # name, status (ok, warn or fail), result


@dataclass(frozen=True)
class Args:
    """Check whether this machine is ready to train: versions, memory, disk, power, heat, load, devices.

    m1clip doctor                                   exit code 1 if a check fails
    m1clip doctor --preset small --json             one line, for a bug report

    Every GPU is compared with the CPU: outputs, loss and gradients of the model.
    """

    preset: str = "nano"
    """Model on which devices are compared."""
    json: bool = False
    """Print one line of JSON."""

    def check(self) -> None:
        get_preset(self.preset)


def main(args: Args) -> int:
    checks, rows = list[dict[str, str]](), []
    with loading("checking the machine and its devices"):
        for name, status, result in (*check_versions(), *check_machine(), *check_devices(args.preset)):
            remedy = "" if status == "ok" else REMEDIES.get(name, REMEDIES["gpu"])
            checks.append({"name": name, "status": status, "result": result, "remedy": remedy})
            cell = escape(f"{result}\n→ {remedy}" if remedy else result)
            rows.append((f"[{STATUS_STYLES[status]}]{status}[/]", name, cell))
    statuses = [check["status"] for check in checks]
    if args.json:
        print(json.dumps({"ok": "fail" not in statuses, "machine": sensors.machine(), "checks": checks}))
    else:
        show_rows("this machine", ("status", "check", "result"), rows)
        counts = [f"{statuses.count(status)} {status}" for status in STATUS_STYLES if status in statuses]
        print("\n" + ", ".join(counts))
    return int("fail" in statuses)


def check_versions() -> Iterator[Check]:
    is_intel = sys.platform == "darwin" and platform.machine() == "x86_64"
    is_translated = is_intel and "Apple" in (sensors.chip() or "")
    text = "translated by Rosetta: no GPU, half the speed" if is_translated else platform.machine()
    yield "python", "fail" if is_translated else "ok", f"Python {platform.python_version()}, {text}"

    torch_version = sensors.torch_version() or "0.0"
    number = torch_version.partition("+")[0]
    status, text = KNOWN_BUGS.get(number, ("ok", "")) if sys.platform == "darwin" else ("ok", "")
    if tuple(int(part) for part in number.split(".")[:2]) < (2, 9):
        status, text = "fail", "m1clip needs 2.9"
    yield "torch", status, f"PyTorch {torch_version}: {text or 'no known bug that matters here'}"

    missing = [extra for extra, module in EXTRAS.items() if find_spec(module) is None]
    installed = ", ".join(extra for extra in EXTRAS if extra not in missing) or "none"
    text = f"; pip install 'm1clip[{','.join(missing)}]' adds the others" if missing else ""
    yield "extras", "ok", f"{installed} installed{text}"


def check_machine() -> Iterator[Check]:
    free_gb, swap_gb = sensors.available_gb(), psutil.swap_memory().used / 1e9
    text = f"{free_gb:.1f} of {psutil.virtual_memory().total / 1e9:.0f} GB free, {swap_gb:.1f} GB swapped out"
    yield "memory", "fail" if free_gb < 2 else "warn" if free_gb < 4 or swap_gb > 2 else "ok", text

    disks = {folder: shutil.disk_usage(folder).free / 1e9 for folder in (Path.cwd(), cache_folder())}
    text = " and ".join(f"{gb:.0f} GB free in {folder}" for folder, gb in disks.items())
    least_gb = min(disks.values())
    yield "disk", "ok" if least_gb >= 10 else "warn" if least_gb >= 2 else "fail", text

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    on_battery = battery is not None and battery.power_plugged is False
    text = "no battery" if battery is None else f"battery {battery.percent:.0f} %"
    yield "power", "warn" if on_battery else "ok", text + (", not charging" if on_battery else "")

    celsius, limit = sensors.temperature_c(), sensors.speed_limit()
    text = "temperature unknown" if celsius is None else f"{celsius:.0f} °C"
    text += f", macOS limits the CPU to {limit} % of its speed" if limit else ""
    yield "heat", "warn" if (limit or 100) < 100 or (celsius or 0) >= 90 else "ok", text

    used = psutil.cpu_percent(interval=1.0)
    yield "load", "ok" if used <= 25 else "warn", f"{used:.0f} % of the CPU is in use"


def check_devices(preset: str) -> Iterator[Check]:
    from m1clip import devices
    from m1clip.model.clip import CLIP
    from m1clip.training.device_check import compare_with_cpu
    from m1clip.training.device_plan import open_store
    from m1clip.training.timing import random_batch

    config, available, fast = get_preset(preset), devices.available(), sensors.fast_cores()
    text = f"{devices.DEFAULT_THREADS} threads, {sensors.machine()['cores']} cores"
    text += f" of which {fast} are performance cores" if fast else ""
    yield "threads", "warn" if fast and fast < devices.DEFAULT_THREADS else "ok", text
    possible, reason = devices.can_compile(devices.torch_device("cpu"))
    yield "compile", "ok" if possible else "warn", f"torch.compile on the CPU: {reason}"
    if len(available) == 1:
        yield "gpu", "ok", "PyTorch finds no GPU; training uses the CPU"
    for name in available[1:]:
        batch = random_batch(config, 8, config.model.text.context_length)
        result = compare_with_cpu(CLIP(config.model), batch, devices.Plan(name), config)
        limit_gb = devices.limit_gb(devices.torch_device(name)) or 0
        yield name, "fail" if result.mismatch else "ok", f"{result}; {limit_gb:.1f} GB for PyTorch"
    rows = open_store().steps()
    yield "measurements", "ok" if rows else "warn", f"{len(rows)} timings of training steps"
