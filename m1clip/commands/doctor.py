"""m1clip doctor: is this machine fit to train, and are its devices to be trusted? Findings with remedies."""

import json
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import psutil
import tyro

from m1clip import measurements, sensors
from m1clip.commands import flags, tables
from m1clip.config import get_preset
from m1clip.files import cache_folder

# Versions that are known to compute wrongly or crawl, and where. From bug reports against PyTorch.
KNOWN_BUGS = {
    "2.8.0": ("darwin", "attention on MPS gives wrong results (pytorch#163597)", "pip install -U torch"),
    "2.13.0": (
        "darwin",
        "torch.compile on MPS is 9 times slower (pytorch#192551)",
        "leave --compile at auto or off",
    ),
}
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True)
class Args:
    """The checklist for a run that can be repeated: versions, memory, disk, power, heat, load, devices.

    m1clip doctor                                   everything; exit code 1 if something fails
    m1clip doctor --preset small                    compare devices by this model
    m1clip doctor --json                            one line, for a bug report

    Every GPU is compared with the CPU: forward, loss and gradients of the actual model on drawn scenes.
    """

    preset: Annotated[str, tyro.conf.arg(metavar="NAME")] = "nano"
    """The model by which devices are compared."""
    json: bool = False
    """Print as one line of JSON."""


@dataclass(frozen=True)
class Finding:
    about: str
    state: str
    """ok, warn or fail."""
    found: str
    remedy: str = ""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    get_preset(args.preset)
    return args


def main(args: Args) -> int:
    found = [check() for check in (python, torch_, numpy, memory, disk, power, heat, load)]
    with tables.loading("looking at the devices"):
        found += devices(args.preset)
    failed = any(one.state == "fail" for one in found)
    if args.json:
        machine = {**sensors.machine(), "torch": measurements.torch_version()}
        print(json.dumps({"ok": not failed, "machine": machine, "checks": [asdict(one) for one in found]}))
        return int(failed)
    made = tables.table("", "", "")
    made.show_header = False
    for column in made.columns:
        column.justify = "left"
    for one in found:
        told = one.found + (f"\n→ {one.remedy}" if one.remedy and one.state != "ok" else "")
        made.add_row(f"[{STYLES[one.state]}]{one.state}[/]", one.about, told)
    tables.show("this machine", made)
    counts = {state: sum(one.state == state for one in found) for state in STYLES}
    print("\n" + ", ".join(f"{count} {state}" for state, count in counts.items() if count))
    return int(failed)


def python() -> Finding:
    told = f"Python {platform.python_version()}"
    if sys.platform == "darwin" and platform.machine() == "x86_64" and "Apple" in (sensors.chip() or ""):
        return Finding(
            "python",
            "fail",
            f"{told} for Intel, translated by Rosetta: no GPU, half the speed",
            "install an arm64 Python (brew, python.org, or uv) and make the environment anew",
        )
    return Finding("python", "ok", f"{told}, {platform.machine()}")


def torch_() -> Finding:
    found = measurements.torch_version()
    if found is None:
        return Finding("torch", "fail", "torch is not installed", "pip install m1clip")
    number = found.split("+")[0]
    where, what, remedy = KNOWN_BUGS.get(number, ("", "", ""))
    if where == sys.platform:
        return Finding("torch", "fail" if "wrong" in what else "warn", f"torch {found}: {what}", remedy)
    if tuple(int(part) for part in number.split(".")[:2]) < (2, 9):
        return Finding("torch", "fail", f"torch {found}: m1clip needs 2.9 or newer", "pip install -U torch")
    return Finding("torch", "ok", f"torch {found}: no bug known here that matters")


def numpy() -> Finding:
    try:
        found = version("numpy")
    except PackageNotFoundError:
        return Finding("numpy", "fail", "NumPy is not installed", "pip install m1clip")
    if int(found.split(".")[0]) < 2:
        return Finding("numpy", "warn", f"NumPy {found}; m1clip is tested with 2", "pip install -U numpy")
    return Finding("numpy", "ok", f"NumPy {found} (the documents' NumPy < 2 was for torch 2.2)")


def memory() -> Finding:
    total, free = psutil.virtual_memory().total / 1e9, sensors.available_gb()
    told = f"{free:.1f} of {total:.0f} GB are free"
    swapped = psutil.swap_memory().used / 1e9
    if free < 2:
        return Finding("memory", "fail", told, "close other programs; nano needs about 1 GB, seed 5 GB")
    if free < 4 or swapped > 2:
        more = f", {swapped:.1f} GB are swapped out" if swapped > 2 else ""
        return Finding("memory", "warn", told + more, "close other programs, or use a small preset and --chunk")
    return Finding("memory", "ok", told)


def disk() -> Finding:
    free = {place: shutil.disk_usage(place).free / 1e9 for place in (Path.cwd(), cache_folder())}
    told = " and ".join(f"{size:.0f} GB free in {place}" for place, size in free.items())
    least = min(free.values())
    remedy = "make room; --keep 1 needs less for checkpoints, M1CLIP_CACHE moves decoded images elsewhere"
    return Finding("disk", "ok" if least >= 10 else "warn" if least >= 2 else "fail", told, remedy)


def power() -> Finding:
    read: Callable[[], object] | None = getattr(psutil, "sensors_battery", None)
    battery = read() if read else None
    if battery is None:
        return Finding("power", "ok", "no battery that could run out")
    percent, plugged = battery.percent, battery.power_plugged  # type: ignore[attr-defined]
    if plugged is False:
        return Finding(
            "power",
            "warn",
            f"on battery, {percent:.0f} %",
            "connect the power adapter: it is faster, and lasts",
        )
    return Finding("power", "ok", f"power adapter connected, battery {percent:.0f} %")


def heat() -> Finding:
    degrees, limit = sensors.temperature_c(), sensors.speed_limit()
    if limit is not None and limit < 100:
        return Finding(
            "heat",
            "warn",
            f"macOS has slowed the processor to {limit} %",
            "let it cool: air below it, no lap",
        )
    if degrees is not None and degrees >= 90:
        return Finding("heat", "warn", f"{degrees:.0f} °C", "let it cool before comparing speeds")
    told = f"{degrees:.0f} °C" if degrees is not None else "not slowed by heat" if limit else "cannot be read here"
    return Finding("heat", "ok", told)


def load() -> Finding:
    psutil.cpu_percent()
    used = psutil.cpu_percent(interval=1.0)
    told = f"{used:.0f} % of the cores are busy"
    remedy = "close other programs before comparing speeds: figures of a busy machine mislead"
    return Finding("load", "ok" if used <= 25 else "warn", told, remedy)


def devices(name: str) -> Iterator[Finding]:
    """What torch can use, and whether each computes what the CPU does."""
    import torch

    from m1clip import devices as here
    from m1clip.devices import Plan
    from m1clip.training import parity

    names = here.available()
    fast = sensors.fast_cores()
    told = f"{torch.get_num_threads()} threads on {sensors.machine()['cores']} cores"
    told += f", {fast} of them fast" if fast else ""
    slow = bool(fast) and torch.get_num_threads() > (fast or 0)
    yield Finding(
        "threads",
        "warn" if slow else "ok",
        told,
        f"--threads {fast or 0}, or m1clip bench measures what is best",
    )
    able, why = here.can_compile(here.torch_device("cpu"))
    yield Finding(
        "compile",
        "ok" if able else "warn",
        f"torch.compile on the CPU: {why}",
        "xcode-select --install, or install g++",
    )
    if len(names) == 1:
        yield Finding("gpu", "ok", "none that torch can use; training is on the CPU")
    for one in names[1:]:
        yield Finding(
            f"{one} memory", "ok", f"torch may take {here.limit_gb(here.torch_device(one)) or 0:.1f} GB of it"
        )
        found = parity.on_scenes(get_preset(name), Plan(one))
        remedy = f"train with --device cpu (auto does), and report it with torch {torch.__version__}"
        yield Finding(one, "ok" if found else "fail", str(found), remedy)
    rows = measurements.here().rows("step")
    yield Finding(
        "measured",
        "ok" if rows else "warn",
        f"{len(rows)} timings of steps are kept for this machine" if rows else "nothing yet",
        "m1clip bench --quick, so that --device auto and m1clip advise know",
    )
