"""m1clip runs: list all runs."""

import json
from dataclasses import dataclass
from pathlib import Path

from m1clip.commands.flags import parse_flags
from m1clip.console import command, show, table
from m1clip.format import ago, duration, percent
from m1clip.run import run_summaries

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


def parse(program: str, argv: list[str]) -> Args:
    return parse_flags(Args, program, argv)


def main(args: Args) -> int:
    rows = run_summaries(args.runs)
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    if not rows:
        print(f"no runs in {args.runs}/; {command('train')} starts one")
        return 0
    listing = table("run", "state", "step", "done", "left", "best", "metric", "device", "updated")
    for row in rows:
        listing.add_row(
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
    show(f"{args.runs}/", listing)
    for row in rows:
        if row["problem"]:
            print(f"{row['run']}: {row['problem']}")
        if row["state"] in ("dead", "failed"):
            resume = command("train", "--resume", "--name", args.runs / row["run"])
            print(f"{row['run']}: {row['reason']}; resume: {resume}")
    return 0
