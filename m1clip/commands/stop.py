"""m1clip stop: end a run that another process is training, with a checkpoint."""

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
import tyro

from m1clip import run as folders
from m1clip.commands import flags, tables


@dataclass(frozen=True)
class Args:
    """Ask a run to finish its step, save and end, and wait until it has.

    m1clip stop                     the one that is running
    m1clip stop nano-3
    """

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Name or path of the run; by default the only one that is running."""
    runs: Path = Path("runs")
    """Where runs are kept."""
    wait: float = 300.0
    """Seconds to wait for it; a long step and a large checkpoint take their time."""


def parse(prog: str, words: list[str]) -> Args:
    return flags.parse_flags(Args, prog, words)


def main(args: Args) -> int:
    run = find(args)
    status = run.state()
    if status["state"] != "running":
        raise ValueError(f"{run.path} is not running: it is {status['state']} at step {status['step']}")
    os.kill(owner(run, status), signal.SIGTERM)
    end = time.monotonic() + args.wait
    with tables.loading(f"{run.name} finishes its step and saves"):
        while run.alive:
            if time.monotonic() > end:
                raise TimeoutError(f"{run.path} has not ended in {args.wait:.0f} s; it was asked to")
            time.sleep(0.1)
    status = run.state()
    print(f"{run.path} is {status['state']} at step {status['step']}")
    if status["state"] == "stopped":
        print(f"{tables.command('train', '--resume', '--name', run.path)} continues")
    return 0 if status["state"] in ("stopped", "finished") else 1


def find(args: Args) -> folders.Run:
    if args.run is not None:
        return folders.open_run(args.runs, args.run)
    running = [run for run in folders.all_runs(args.runs) if run.alive]
    if len(running) != 1:
        what = "several are" if running else "none is"
        names = f": {', '.join(run.name for run in running)}" if running else ""
        raise ValueError(f"which run? {what} running in {args.runs}/{names}")
    return running[0]


def owner(run: folders.Run, status: dict[str, Any]) -> int:
    """The process that trains the run, once we are sure that it is that one."""
    if status.get("host") not in (None, socket.gethostname()):
        raise ValueError(f"{run.path} is being trained on {status['host']}: stop it there")
    pid, told = status.get("pid"), status.get("time")
    try:
        began = psutil.Process(pid).create_time() if isinstance(pid, int) else None
    except psutil.NoSuchProcess:
        began = None
    # Unknown, or a number from an earlier session that was given to another program since.
    if not isinstance(pid, int) or began is None or told is None or began > told:
        raise RuntimeError(f"{run.path} is only just starting; try again in a moment")
    return pid
