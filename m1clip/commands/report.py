"""m1clip report: what a run was and did, as a document; of several runs, how they compare."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m1clip import run as folders
from m1clip.commands import flags, tables


@dataclass(frozen=True)
class Args:
    """A run as a document with figures: one HTML file that holds everything, and the same as Markdown.

    m1clip report                         the newest run, into its own folder
    m1clip report nano-1 nano-2           the two compared, into reports/nano-1-nano-2
    m1clip report runs/mine --out doc     somewhere else

    Only the run's own files are read; what was not measured is said to be so.
    """

    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN ...]")] = ()
    """Runs (names or paths); by default the newest."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Where the document goes; by default `report` in the run's folder, for several `reports/NAMES`."""
    json: bool = False
    """Print the paths as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    if len(set(args.run)) != len(args.run):
        raise ValueError("each run once")
    return args


def main(args: Args) -> int:
    runs = [folders.open_run(args.runs, name) for name in args.run or (None,)]
    if len({run.path.resolve() for run in runs}) != len(runs):
        raise ValueError("each run once: two of these are the same folder")
    out = args.out or (
        runs[0].path / "report" if len(runs) == 1 else Path("reports") / "-".join(run.name for run in runs)[:100]
    )
    with tables.loading("drawing"):
        from m1clip.monitor import comparison, report
        from m1clip.monitor.log import Followed

        twice = len({run.name for run in runs}) < len(runs)  # as of two machines: told apart by their folders
        followed = [Followed(run, f"{run.path.parent.name}/{run.name}" if twice else None) for run in runs]
        for one in followed:
            one.refresh()
        page = report.write(followed[0], out) if len(followed) == 1 else comparison.write(followed, out)
    markdown = page.with_suffix(".md")
    if args.json:
        print(json.dumps({"html": str(page), "markdown": str(markdown)}))
        return 0
    print(f"{page}\n{markdown}")
    return 0
