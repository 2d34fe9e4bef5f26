"""m1clip report: a document about a run, or a comparison of several."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m1clip.commands import RunsFolder
from m1clip.console import loading
from m1clip.run import open_run


@dataclass(frozen=True)
class Args(RunsFolder):
    """Write a report with figures: one HTML file with everything, and the same as Markdown.

    m1clip report                         the newest run, into its own folder
    m1clip report nano-1 nano-2           compare two runs, into reports/nano-1-nano-2
    m1clip report runs/mine --out doc     into another folder

    Only the files of the runs are read; what was not measured is reported as such.
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Names or paths of runs; default: the newest."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Output folder; default: `report` in the run's folder, or `reports/NAMES` for several runs."""
    json: bool = False
    """Print the paths as one line of JSON."""


def main(args: Args) -> None:
    runs = [open_run(args.runs, name) for name in args.run or (None,)]
    if len({run.path.resolve() for run in runs}) != len(runs):
        raise ValueError(f"a run is named twice: {', '.join(args.run)}")
    with loading("writing the report"):
        from m1clip.monitor.log import RunView
        from m1clip.monitor.report import write_comparison, write_report

        # Runs of two machines may have the same name: their folders tell them apart.
        same_names = len({run.name for run in runs}) < len(runs)
        views = [RunView(run, f"{run.path.parent.name}/{run.name}" if same_names else None) for run in runs]
        for view in views:
            view.refresh()
        if len(runs) == 1:
            page = write_report(views[0], args.out or runs[0].path / "report")
        else:
            page = write_comparison(views, args.out or Path("reports") / "-".join(run.name for run in runs)[:100])
    paths = {"html": str(page), "markdown": str(page.with_suffix(".md"))}
    print(json.dumps(paths) if args.json else "\n".join(paths.values()))
