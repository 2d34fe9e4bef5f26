"""m1clip monitor: logger a run from a second process, in the terminal or in the browser."""

import json
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from m1clip import files
from m1clip import run as folders
from m1clip.commands import flags, tables
from m1clip.monitor import LOCAL

# Curves and bars where only ASCII is spoken.
PLAIN = dict.fromkeys(range(0x2801, 0x2900), "*") | dict.fromkeys(range(0x2580, 0x2590), "#")
PLAIN |= {ord(sign): plain for sign, plain in {"–": "-", "→": ">", "…": "~", "°": " "}.items()}


@dataclass(frozen=True)
class Args:
    """Logger a run, live or dead, without disturbing it.

    m1clip monitor                  the newest run, in the terminal; 5 lists all, space compares, q quits
    m1clip monitor --web            the same and more in the browser: all runs, zoom, images found
    m1clip monitor nano-3 --once    one snapshot as text
    """

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """A run (name or path); by default the newest."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    once: bool = False
    """Print a snapshot and end."""
    json: bool = False
    """With --once: the state and the last record of each kind, as one line of JSON."""
    web: bool = False
    """Serve a page for the browser instead."""
    host: str = "127.0.0.1"
    """With --web: the address to listen at; any but this machine's own needs --token."""
    port: int = 8265
    """With --web: the port; where it is taken, one of the next."""
    token: str | None = None
    """With --web: what a visitor must know; `auto` makes one."""
    open: bool = False
    """With --web: open the browser too."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    if args.json and not args.once:
        raise ValueError("--json goes with --once")
    if args.once and args.web:
        raise ValueError("--once prints text, --web serves a page: choose one")
    if args.token is not None and not re.fullmatch(r"[!-~]+", args.token):
        raise ValueError("--token is a word of letters, digits and signs without spaces; `auto` makes one")
    asked = (args.host, args.port, args.token, args.open)
    if not args.web and asked != (Args.host, Args.port, Args.token, Args.open):
        raise ValueError("--host, --port, --token and --open go with --web")
    if args.host not in LOCAL and not args.token:
        raise ValueError(
            f"--host {args.host} lets others see your runs and images: give a --token they must know "
            "(--token auto makes one)"
        )
    if not 0 < args.port < 65536:
        raise ValueError(f"--port {args.port} is none: it is a number from 1 to 65535")
    return args


def main(args: Args) -> int:
    if args.web:
        from m1clip.monitor import web

        start = folders.open_run(args.runs, args.run) if args.run else None
        return web.serve(args.runs, start, args.host, args.port, args.token, args.open)
    run = folders.open_run(args.runs, args.run)
    if args.once:
        return once(run, args.json)
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # drawn on stderr
        raise ValueError("the monitor needs a terminal; --once prints a snapshot, --web serves a page")
    from m1clip.monitor.terminal import Monitor

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the terminal is gone, and with it whoever looked
    app = Monitor(run.path.parent, run)
    app.run()
    if app.failed is not None:
        raise app.failed
    return 0


def once(run: folders.Run, as_json: bool) -> int:
    from rich.console import Console

    from m1clip.monitor.log import Followed
    from m1clip.monitor.terminal_views import snapshot

    one = Followed(run)
    one.refresh()
    if as_json:
        step = {name: one.log.recent(name, 1) for name in one.log.columns}
        last = {kind: one.log.last(kind) for kind in ("logger", "eval", "epoch")}
        step["step"] = one.log.latest
        found = {**one.summary, "last_step": step, **last, "events": one.log.events[-20:]}
        print(json.dumps(files.json_safe(found)))
        return 0
    console = Console(highlight=False)
    width = console.width if console.is_terminal else 100
    with console.capture() as made:
        console.print(snapshot([one], width), soft_wrap=True)
    text = made.get()
    if not (sys.stdout.encoding or "").lower().startswith("utf"):
        text = text.translate(PLAIN)
    print(text, end="")
    if one.summary["state"] in ("dead", "failed"):
        print(f"\n{tables.command('train', '--resume', '--name', run.path)} goes on")
    return 0
