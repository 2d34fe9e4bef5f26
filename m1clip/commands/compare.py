"""m1clip compare: the same configuration for the same steps on each device, each in a process of its own."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from m1clip import run as runs
from m1clip.commands import flags, tables, train
from m1clip.config import TrainConfig, to_json

STEPS = 60


@dataclass(frozen=True)
class Args:
    """Train the same on each device or placement: speed, memory, energy and loss curves side by side.

    m1clip compare                                  nano, 60 steps, on every device there is
    m1clip compare --on cpu mps --preset small --steps 200
    m1clip compare --on cpu vision=cpu,text=cpu --data photos/

    Takes the flags of `m1clip train`. The runs are kept in runs/compare-N with a page and an image.
    """

    training: Annotated[TrainConfig, tyro.conf.arg(name="")]
    on: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DEVICE")] = ()
    """Devices and placements (vision=A,text=B); by default all devices, and both placements of two."""
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Take every default from this config.json."""
    runs: Path = Path("runs")
    """Where the folder of this comparison goes."""
    json: bool = False
    """Print as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words, default=Args(train.defaults(words)))
    if args.training.device != "auto":
        raise ValueError("compare takes its devices with --on, not with --device")
    if len(set(args.on)) != len(args.on):
        raise ValueError("each device of --on once")
    return args


def main(args: Args) -> int:
    with tables.loading():
        from m1clip import devices
        from m1clip.bench import compare
        from m1clip.training import device_plan

    here = devices.available()
    names = args.on or (*here, *(plan.device for plan in device_plan.splits(here)))
    for name in names:
        devices.tower_devices(name)
    folder = args.runs / runs.next_name(args.runs, "compare")
    folder.mkdir(parents=True)
    config = args.training
    config = replace(config, steps=config.steps or STEPS, budget="", save_every="100h")
    # What is left to auto would be decided for each device by itself, and more than the device would differ.
    config = replace(config, precision="fp32") if config.precision == "auto" else config
    config = replace(config, compile="off") if config.compile == "auto" else config
    config = replace(config, threads=config.threads or devices.DEFAULT_THREADS)
    (folder / "training.json").write_text(to_json(config))
    contestants = [compare.Contestant(name, *trained(folder, name)) for name in names]
    if all(one.failed for one in contestants):
        raise RuntimeError(f"no device could train it: {contestants[0].failed}")
    contestants.sort(key=lambda one: one.failed is not None)  # the first is what others are compared with
    page = compare.page(contestants, folder)
    if args.json:
        print(json.dumps({"runs": [one.record(contestants[0]) for one in contestants], "page": str(page)}))
        return 0
    print()
    title = f"{config.preset}, {config.steps} steps of {config.batch_size:,} pairs"
    tables.show_rows(title, compare.COLUMNS, compare.table(contestants))
    print(f"\npage:  {page}")
    return 0


def trained(folder: Path, requested: str) -> tuple[runs.Run, dict[str, Any], str | None]:
    """One run in a process of its own, so that its memory and threads are; its scores, or why it failed."""
    name = requested.replace("=", "-").replace(",", "-").replace(":", "")
    words = [
        "train",
        "--config",
        folder / "training.json",
        "--device",
        requested,
        "--runs",
        folder,
        "--name",
        name,
    ]
    print(f"\n{requested}", file=sys.stderr)
    child = subprocess.run([sys.executable, "-m", "m1clip", *map(str, words), "--json"], stdout=subprocess.PIPE)
    run = runs.Run(folder / name)
    if child.returncode == 0:
        return run, json.loads(child.stdout), None
    if child.returncode == 130:
        raise KeyboardInterrupt
    if not run.path.exists():
        return run, {}, "it was refused, as said above"
    return run, {}, str(run.state().get("reason", f"exit code {child.returncode}"))
