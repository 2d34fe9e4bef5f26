"""m1clip monitor: follow a run from a second process, in the terminal or in the browser."""

import json
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m1clip.commands import RunName, RunsFolder, ServerFlags
from m1clip.config import require
from m1clip.console import Console, command
from m1clip.files import json_safe
from m1clip.run import Run, open_run

if TYPE_CHECKING:
    from m1clip.monitor.log import RunView

# Replacements where the terminal knows only ASCII.
ASCII = dict.fromkeys(range(0x2801, 0x2900), "*") | dict.fromkeys(range(0x2580, 0x2590), "#")
ASCII |= {ord(char): plain for char, plain in {"–": "-", "→": ">", "…": "~", "°": " ", "━": "-"}.items()}


@dataclass(frozen=True)
class Args(ServerFlags, RunsFolder):
    """Follow a run, without disturbing it.

    m1clip monitor                  the newest run, in the terminal; keys: 5 all runs, space compare, q quit
    m1clip monitor --web            in the browser: all runs, zoom, retrieved images
    m1clip monitor nano-3 --once    print a snapshot as text
    """

    run: RunName = None
    """Name or path of a run; default: the newest."""
    once: bool = False
    """Print a snapshot and exit."""
    json: bool = False
    """With --once: print the state and the last record of each kind as one line of JSON."""
    web: bool = False
    """Serve a web page; --host, --port, --token and --open say where and to whom."""

    def check(self) -> None:
        require(self.once or not self.json, "--json needs --once")
        exclusive = "--once and --web exclude each other: --once prints text, --web serves a page"
        require(not (self.once and self.web), exclusive)
        self.check_server("your runs and images", self.web)


def main(args: Args) -> None:
    if args.web:
        from m1clip.monitor import web

        start = open_run(args.runs, args.run) if args.run else None
        web.serve(args.runs, start, args.address)
        return
    run = open_run(args.runs, args.run)
    if args.once:
        print_snapshot(run, args.json)
        return
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # Textual draws on stderr
        raise ValueError("the monitor needs a terminal; --once prints a snapshot, --web serves a page")
    from m1clip.monitor.terminal import Monitor

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # end with the terminal
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which asyncio replaces by its own
    app = Monitor(run.path.parent, run)
    app.run()
    if app.error is not None:
        raise app.error


def read_log(view: "RunView") -> None:
    """Read the whole log of a run, with a progress bar if it is long."""
    from m1clip.monitor.log import PART_BYTES

    view.refresh(PART_BYTES)
    if view.fraction_read == 1:
        return
    with Console().progress("reading metrics.jsonl, MB", view.whole_log.size // 10**6) as advance:
        while view.fraction_read < 1:
            before = view.whole_log.offset // 10**6
            view.refresh(PART_BYTES)
            advance(view.whole_log.offset // 10**6 - before)


def print_snapshot(run: Run, as_json: bool) -> None:
    from rich.console import Console as RichConsole

    from m1clip.monitor.log import RECORD_KINDS, RunView
    from m1clip.monitor.terminal_views import snapshot

    view = RunView(run)
    read_log(view)
    if as_json:
        step = {name: view.log.recent_mean(name, 1) for name in view.log.columns} | {"step": view.log.last_step}
        records = {kind: view.log.last(kind) or None for kind in RECORD_KINDS}
        state = {**view.summary, "last_step": step, **records, "events": view.log.events[-20:]}
        state["bad_lines"] = view.log.bad_line_count
        print(json.dumps(json_safe(state)))
        return
    console = RichConsole(highlight=False)
    console.width = console.width if console.is_terminal else 100
    with console.capture() as capture:
        console.print(snapshot(view, console.width), soft_wrap=True)
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    print(capture.get() if is_unicode else capture.get().translate(ASCII), end="")
    if view.summary["state"] in ("dead", "failed"):
        print(f"\nresume: {command('train', '--resume', '--name', run.path)}")
