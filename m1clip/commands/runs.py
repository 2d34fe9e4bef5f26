"""m1clip runs: list all runs."""

import json
from dataclasses import dataclass

from rich.markup import escape

from m1clip.commands import RunsFolder
from m1clip.console import command, show_rows
from m1clip.format import UNKNOWN, ago, duration, percent, printable
from m1clip.run import run_summaries

STATE_MARKUP = {"running": "[green]{}[/]", "dead": "[red]{}[/]", "failed": "[red]{}[/]"}


@dataclass(frozen=True)
class Args(RunsFolder):
    """List all runs with state, progress, best validation score and device; the newest last.

    m1clip runs                     a dead process, a full disk, a suspended process or a damaged file is shown
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
        text = f"{run['state']}, {run['warning']}" if run["warning"] else run["state"]
        markup = STATE_MARKUP.get(run["state"], "{}") if not run["warning"] else "[red]{}[/]"
        name, state = escape(printable(run["run"])), markup.format(escape(printable(text)))
        progress = (f"{run['step']:,}", percent(run["step"] / run["total"] if run["total"] else None))
        best = (percent(run["best_score"]), run["best_metric"] or UNKNOWN)
        device = escape(run["device"] or UNKNOWN)
        rows.append((name, state, *progress, duration(run["eta_s"]), *best, device, ago(run["time"])))
    columns = ("run", "state", "step", "done", "left", "best", "metric", "device", "updated")
    show_rows(f"{args.runs}/", columns, rows)
    for run in runs:
        if run["problem"]:
            print(printable(f"{run['run']}: {run['problem']}"))
        if run["state"] in ("dead", "failed"):
            resume = command("train", "--resume", "--name", args.runs / run["run"])
            print(printable(f"{run['run']}: {run['reason']}; resume: {resume}"))
