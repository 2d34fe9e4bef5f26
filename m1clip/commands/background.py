"""Background training: the same command in a process that outlives the terminal."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from m1clip.console import command, loading
from m1clip.run import Run, is_empty, is_run

LOG = "output.log"


def spawn_training(argv: list[str], run: Run) -> int:
    """Start `m1clip train ARGV` detached; return once it trains, or with its output and exit code if it fails."""
    resumed = is_run(run.path) and "--overwrite" not in argv
    run.path.parent.mkdir(parents=True, exist_ok=True)
    # The child creates the run folder; until then its output waits beside it.
    log = run.path / LOG if resumed else run.path.parent / f".{run.name}.log"
    with open(log, "ab" if resumed else "wb") as file:
        log_start = file.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "m1clip", "train", *argv],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        with loading("starting"):
            while child.poll() is None and not has_started(run, child.pid):
                time.sleep(0.1)
    except KeyboardInterrupt:  # or a closed terminal: nothing has been trained yet
        child.terminate()
        child.wait()
        raise
    finally:
        if not resumed and has_started(run, child.pid):
            log = log.rename(run.path / LOG)
    if child.poll() not in (None, 0):
        sys.stderr.write(log.read_text(errors="replace")[log_start:])
        if log.parent != run.path:
            log.unlink()
        if run.path.is_dir() and is_empty(run.path):
            run.path.rmdir()
        return child.returncode
    state = "is training in the background" if child.poll() is None else "has finished"
    print(f"{run.path} {state}, process {child.pid}")
    runs = [] if run.path.parent == Path("runs") else ["--runs", run.path.parent]
    for label, line in {
        "watch": command("monitor", run.path),
        "output": f"tail -f {shlex.quote(str(log))}",
        "list": command("runs", *runs),
        "stop": command("stop", run.path),
    }.items():
        print(f"{label + ':':8}{line}")
    return 0


def has_started(run: Run, pid: int) -> bool:
    """Whether the child owns the run: from here on errors are in its status."""
    return is_run(run.path) and run.read_status().get("pid") == pid
