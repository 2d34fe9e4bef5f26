"""m1clip compare: train the same configuration on each device, each in its own process."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import tyro

from m1clip import run as runs
from m1clip import sensors
from m1clip.commands.train import TrainingArgs
from m1clip.config import override, requested_config, require, to_json
from m1clip.console import loading, show_rows
from m1clip.files import atomic_folder
from m1clip.format import number
from m1clip.status import number_or_unknown

WARMUP_STEPS = 3
COMPARE_COLUMNS = {"device": "text", "ms/step": "step_ms", "IQR": "iqr_ms", "pairs/s": "pairs_per_s"}
COMPARE_COLUMNS |= {"speed-up": "speedup", "GB": "peak_gb", "J": "joules", "W": "watts", "loss": "final_loss"}
COMPARE_COLUMNS |= {"R@1": "mean_r1", "loss difference": "max_loss_difference"}


@dataclass(frozen=True)
class Args(TrainingArgs):
    """Train the same model on each device or placement, and compare speed, memory, energy and loss.

    m1clip compare                                  nano, 60 steps, on every device of this machine
    m1clip compare --on cpu mps --preset small --steps 200
    m1clip compare --on cpu vision=cpu,text=cpu --data photos/

    Takes the flags of `m1clip train`. The runs and a page are written to runs/compare-N.
    """

    on: Annotated[tuple[str, ...], tyro.conf.arg(metavar="DEVICE")] = ()
    """Devices and placements (vision=A,text=B); all if none is given."""

    def check(self) -> None:
        require(self.training.device == "auto", "compare takes its devices from --on, not from --device")
        require(len(set(self.on)) == len(self.on), "--on names a device twice")


def main(args: Args) -> None:
    with loading():
        from m1clip import devices
        from m1clip.bench.report import load_warning, make_table
        from m1clip.training.timing import split_plans

    config, available = requested_config(args.settings(), args.config), devices.available()
    names = args.on or (*available, *(plan.device for plan in split_plans(available)))
    for name in names:
        devices.tower_devices(name)
    folder = args.runs / runs.next_name(args.runs, "compare")
    # Settings left at auto would be chosen for each device separately, and more than the device would differ.
    defaults = {"steps": 60, "precision": "fp32", "compile": "off", "threads": devices.DEFAULT_THREADS}
    left = {name: value for name, value in defaults.items() if getattr(config, name) in ("auto", 0)}
    config = override(config, {**left, "budget": "", "save_every": "100h"})
    with atomic_folder(folder) as partial:
        (partial / "training.json").write_text(to_json(config))
    records = sorted((train_on(folder, name) for name in names), key=lambda record: "error" in record)
    if "error" in records[0]:
        raise RuntimeError(f"training failed on every device: {records[0]['error']}")
    paths = [record["run"] for record in records if "error" not in record]
    page = json.loads(run_m1clip("report", *paths, "--out", folder, "--json").stdout)["html"]
    warnings = load_warning([record["background_load"] for record in records], "runs")
    first, expected = records[0]["step_ms"], records[0]["losses"]
    for record in records[: len(paths)]:
        differences = [abs(loss - expected[i]) for i, loss in record["losses"].items() if i in expected]
        record |= {"speedup": first / record["step_ms"], "max_loss_difference": max(differences, default=None)}
    if args.json:
        print(json.dumps({"runs": records, "warnings": warnings, "page": page}))
        return
    title = f"{config.preset}, {config.steps} steps, batch size {config.batch_size:,}"
    show_rows(f"\n{title}", *make_table(COMPARE_COLUMNS, records))
    failures = [f"{record['text']}: {record['error']}" for record in records if "error" in record]
    print("", *failures, *warnings, f"page:  {page}", sep="\n")


def train_on(folder: Path, requested: str) -> dict[str, Any]:
    """Train in a subprocess, which has its own memory and threads; what its metrics say, or its error."""
    from m1clip.training.timing import quartiles

    name = requested.replace("=", "-").replace(",", "-").replace(":", "")
    run, load = runs.Run(folder / name), sensors.BackgroundLoad()
    print(f"\n{requested}", file=sys.stderr)
    where = ("--device", requested, "--runs", folder, "--name", name)
    child = run_m1clip("train", "--config", folder / "training.json", *where, "--json")
    record: dict[str, Any] = {"text": requested, "run": str(run.path), "background_load": load.share()}
    if child.returncode == 130:
        raise KeyboardInterrupt
    if child.returncode:
        error = run.read_status().get("reason") if run.path.exists() else "see the message above"
        return {**record, "error": str(error or f"exit code {child.returncode}")}
    timed = ("step_ms", "between_ms")
    steps = [row for row in run.records("step") if all(number_or_unknown(row.get(key)) is not None for key in timed)]
    device = run.read("machine.json").get("device")
    if not steps:
        return {**record, "error": f"{run.path / 'metrics.jsonl'} has no steps"}
    q1_ms, step_ms, q3_ms = quartiles([row["step_ms"] for row in steps[WARMUP_STEPS:] or steps])
    diagnostics = [row for row in run.records("diagnostics") if number_or_unknown(row.get("peak_rss_gb")) is not None]
    joules = number_or_unknown(diagnostics[-1].get("joules")) if diagnostics else None
    seconds = sum(row["step_ms"] + row["between_ms"] for row in steps) / 1e3
    losses = {row["step"]: row["loss"] for row in steps if number_or_unknown(row.get("loss")) is not None}
    peaks = [max(row["peak_rss_gb"], number_or_unknown(row.get("device_gb")) or 0) for row in diagnostics]
    record |= {"text": requested if device == requested else f"{requested} → {device}", "device": device}
    record |= {"step_ms": step_ms, "iqr_ms": f"{number(q1_ms)}–{number(q3_ms)}", "losses": losses}
    batch_size = run.read_config()[0].batch_size
    record |= {"pairs_per_s": 1e3 * batch_size / step_ms, "peak_gb": max(peaks, default=None)}
    record |= {"joules": joules, "watts": None if joules is None else joules / seconds}
    record |= {"final_loss": mean([*losses.values()][-10:]) if losses else None}
    return record | {"mean_r1": json.loads(child.stdout).get("mean_r1")}


def run_m1clip(*arguments: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "m1clip", *map(str, arguments)], stdout=subprocess.PIPE)
