"""m1clip runs: list all runs."""

import json
from dataclasses import dataclass
from pathlib import Path

from m1clip.commands import flags, tables
from m1clip.format import ago, duration, percent
from m1clip.run import summaries

STATE_MARKUP = {"running": "[green]{}[/]", "dead": "[red]{}[/]", "failed": "[red]{}[/]"}


@dataclass(frozen=True)
class Args:
    """List all runs with state, progress, best validation score and device; the newest last.

    m1clip runs                     a run whose process died is shown as dead
    m1clip runs --json              one JSON object per line
    """

    runs: Path = Path("runs")
    """Folder of the runs."""
    json: bool = False
    """Print one JSON object per line."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.read(Args, prog, words)


def main(args: Args) -> int:
    rows = summaries(args.runs)
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    if not rows:
        print(f"no runs in {args.runs}/; {tables.command('train')} starts one")
        return 0
    table = tables.table("run", "state", "step", "done", "left", "best", "metric", "device", "updated")
    for row in rows:
        table.add_row(
            row["run"],
            STATE_MARKUP.get(row["state"], "{}").format(row["state"]),
            f"{row['step']:,}",
            percent(row["step"] / row["total"] if row["total"] else None),
            duration(row["eta_s"]),
            percent(row["best_score"]),
            row["best_metric"] or "–",
            row["device"] or "–",
            ago(row["time"]),
        )
    tables.show(f"{args.runs}/", table)
    for row in rows:
        if row["trouble"]:
            print(f"{row['run']}: {row['trouble']}")
        if row["state"] in ("dead", "failed"):
            command = tables.command("train", "--resume", "--name", args.runs / row["run"])
            print(f"{row['run']}: {row['reason']}; resume: {command}")
    return 0
