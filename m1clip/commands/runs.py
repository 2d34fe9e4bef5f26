"""m1clip runs: list all runs."""

import json
from dataclasses import dataclass

from rich.markup import escape

from m1clip.commands import RunsFolder
from m1clip.console import command, show_rows
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


def main(args: Args) -> None:
    runs, rows = run_summaries(args.runs), []
    if args.json:
        print("".join(json.dumps(run) + "\n" for run in runs), end="")
        return
    if not runs:
        print(f"no runs in {args.runs}/; {command('train')} starts one")
    for run in runs:
        name, state = escape(run["run"]), STATE_MARKUP.get(run["state"], "{}").format(escape(run["state"]))
        progress = (f"{run['step']:,}", percent(run["step"] / run["total"] if run["total"] else None))
        best = (percent(run["best_score"]), run["best_metric"] or UNKNOWN)
        device = escape(run["device"] or UNKNOWN)
        rows.append((name, state, *progress, duration(run["eta_s"]), *best, device, ago(run["time"])))
    columns = ("run", "state", "step", "done", "left", "best", "metric", "device", "updated")
    show_rows(f"{args.runs}/", columns, rows)
    for run in runs:
        if run["problem"]:
            print(f"{run['run']}: {run['problem']}")
        if run["state"] in ("dead", "failed"):
            resume = command("train", "--resume", "--name", args.runs / run["run"])
            print(f"{run['run']}: {run['reason']}; resume: {resume}")
