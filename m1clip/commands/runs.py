"""m1clip runs: what has been trained and what is being trained, without disturbing any of it."""

import json
from dataclasses import dataclass
from pathlib import Path

from m1clip import run as folders
from m1clip.commands import flags, tables
from m1clip.format import ago, duration, percent


@dataclass(frozen=True)
class Args:
    """Every run with its state, progress, best validation score and device; the newest last.

    m1clip runs                     a process that died is shown as dead, not as running
    m1clip runs --json              one object a line
    """

    runs: Path = Path("runs")
    """Where runs are kept."""
    json: bool = False
    """Print as lines of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.parse_flags(Args, prog, words)


def main(args: Args) -> int:
    found = folders.summaries(args.runs)
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
            percent(part),
            duration(row["eta_s"]),
            percent(row["best_score"]),
            row["best_metric"] or "–",
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
