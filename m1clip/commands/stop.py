"""m1clip stop: ask a run of another process to save a checkpoint and end."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

from m1clip.commands import RunName, RunsFolder
from m1clip.console import command, loading
from m1clip.run import Run, all_runs, open_run
from m1clip.status import is_elsewhere, process_of


@dataclass(frozen=True)
class Args(RunsFolder):
    """Ask a run to finish its step, save a checkpoint and end, and wait until it has.

    m1clip stop                     the run that is running
    m1clip stop nano-3
    """

    run: RunName = None
    """Name or path of the run; default: the only one that is running."""
    wait: float = 300.0
    """Seconds to wait; a long step or a large checkpoint takes time."""


def main(args: Args) -> int:
    run = open_run(args.runs, args.run) if args.run else find_running(args)
    status = run.read_status()
    if status["state"] != "running":
        raise ValueError(f"{run.path} is not running: it is {status['state']} at step {status['step']}")
    os.kill(training_pid(run, status), signal.SIGTERM)
    deadline = time.monotonic() + args.wait
    with loading(f"waiting for {run.name} to finish its step and save"):
        while run.is_alive:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{run.path} was asked to end, but is still running after {args.wait:.0f} s")
            time.sleep(0.1)
    status = run.read_status()
    print(f"{run.path} is {status['state']} at step {status['step']}")
    if status["state"] == "stopped":
        print(f"resume: {command('train', '--resume', '--name', run.path)}")
    return 0 if status["state"] in ("stopped", "finished") else 1


def find_running(args: Args) -> Run:
    running = [run for run in all_runs(args.runs) if run.is_alive]
    if not running:
        raise ValueError(f"no run is running in {args.runs}/")
    if len(running) > 1:
        names = ", ".join(run.name for run in running)
        raise ValueError(f"several runs are running in {args.runs}/: {names}; name one")
    return running[0]


def training_pid(run: Run, status: dict[str, Any]) -> int:
    """The process that trains the run; an error if that is not certain."""
    if is_elsewhere(status):
        raise ValueError(f"{run.path} is being trained on {status['host']}: stop it there")
    if pid := process_of(status):
        return pid
    raise RuntimeError(f"{run.path} is still starting; try again in a moment")
