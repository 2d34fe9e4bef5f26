"""m1clip runs: list all runs."""

import json
from dataclasses import dataclass

from rich.markup import escape

from m1clip.commands.flags import RunsFolder
from m1clip.console import command, show, table
from m1clip.format import UNKNOWN, ago, duration, percent
from m1clip.run import run_summaries

STATE_MARKUP = {"running": "[green]{}[/]", "dead": "[red]{}[/]", "failed": "[red]{}[/]"}


@dataclass(frozen=True)
class Args(RunsFolder):
    """List all runs with state, progress, best validation score and device; the newest last.

    m1clip runs                     a run whose process died is shown as dead
    m1clip runs --json              one JSON object per line
    """

    json: bool = False
    """Print one JSON object per line."""


def main(args: Args) -> int:
    rows = run_summaries(args.runs)
    if args.json:
        print("".join(json.dumps(row) + "\n" for row in rows), end="")
        return 0
    if not rows:
        print(f"no runs in {args.runs}/; {command('train')} starts one")
        return 0
    listing = table("run", "state", "step", "done", "left", "best", "metric", "device", "updated")
    for row in rows:
        name, state = escape(row["run"]), STATE_MARKUP.get(row["state"], "{}").format(escape(row["state"]))
        progress = (f"{row['step']:,}", percent(row["step"] / row["total"] if row["total"] else None))
        best = (percent(row["best_score"]), row["best_metric"] or UNKNOWN)
        device = escape(row["device"] or UNKNOWN)
        listing.add_row(name, state, *progress, duration(row["eta_s"]), *best, device, ago(row["time"]))
    show(f"{args.runs}/", listing)
    for row in rows:
        if row["problem"]:
            print(f"{row['run']}: {row['problem']}")
        if row["state"] in ("dead", "failed"):
            resume = command("train", "--resume", "--name", args.runs / row["run"])
            print(f"{row['run']}: {row['reason']}; resume: {resume}")
    return 0
