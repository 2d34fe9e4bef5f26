"""m1clip runs: what has been trained and what is being trained, without disturbing any of it."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from m1clip import run as folders
from m1clip.train.screen import clock, percent
from m1clip.verbs import flags, tables


@dataclass(frozen=True)
class Args:
    """Every run with its state, progress, best held-out score and device; the newest last.

    m1clip runs                     a process that died is shown as dead, not as running
    m1clip runs --json              one object a line
    """

    runs: Path = Path("runs")
    """Where runs are kept."""
    json: bool = False
    """Print as lines of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.read(Args, prog, words)


def main(args: Args) -> int:
    found = [describe(run) for run in folders.all_runs(args.runs)]
    if args.json:
        for row in found:
            print(json.dumps(row))
        return 0
    if not found:
        print(f"no run in {args.runs}/; {tables.command('train')} makes one")
        return 0
    made = tables.table("run", "state", "step", "done", "to go", "best", "score", "device", "last sign")
    for row in found:
        part = row["step"] / row["total"] if row["total"] else None
        made.add_row(
            row["run"],
            STYLES.get(row["state"], "{}").format(row["state"]),
            f"{row['step']:,}",
            "–" if part is None else percent(part),
            "–" if row["eta_s"] is None else clock(row["eta_s"]),
            "–" if row["best_score"] is None else percent(row["best_score"]),
            row["best_by"] or "–",
            row["device"] or "–",
            ago(row["time"]),
        )
    tables.show(f"{args.runs}/", made)
    for row in found:
        if row["trouble"]:
            print(f"{row['run']}: {row['trouble']}")
        if row["state"] in ("dead", "failed"):
            again = tables.command("train", "--resume", "--name", args.runs / row["run"])
            print(f"{row['run']}: {row['reason']}; {again} goes on")
    return 0


STYLES = {"running": "[green]{}[/]", "dead": "[red]{}[/]", "failed": "[red]{}[/]"}


def describe(run: folders.Run) -> dict[str, Any]:
    state = run.state()
    try:
        device = run.read("machine.json").get("device")
    except (OSError, ValueError):
        device = None
    running, dead = state["state"] == "running", state["state"] == "dead"
    why = f"its process {state.get('pid')} is gone" if dead else state.get("reason")
    return {
        "run": run.name,
        "state": state["state"],
        "reason": why,
        "trouble": state.get("trouble") if running else None,
        "pid": state.get("pid") if running else None,
        "step": state.get("step", 0),
        "total": state.get("total"),
        "eta_s": state.get("eta_s") if running else None,
        "best_by": state.get("best_by"),
        "best_score": state.get("best_score"),
        "device": device,
        "time": state.get("time"),
    }


def ago(then: float | None) -> str:
    if then is None:
        return "–"
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
