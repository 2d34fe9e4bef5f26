"""Training in the background: the same command again, in a process that outlives the terminal."""

import shlex
import subprocess
import sys
import time
from pathlib import Path

from m1clip import run as folders
from m1clip.commands import tables

LOG = "output.log"


def detach(words: list[str], run: folders.Run) -> int:
    """Start `m1clip train WORDS` detached; back once it trains, or with its words and code if it fails."""
    resumed = folders.is_run(run.path) and "--overwrite" not in words
    run.path.parent.mkdir(parents=True, exist_ok=True)
    # The folder is the child's to make; until it has, its words wait beside it.
    log = run.path / LOG if resumed else run.path.parent / f".{run.name}.log"
    with open(log, "ab" if resumed else "wb") as file:
        begin = file.tell()
        child = subprocess.Popen(
            [sys.executable, "-m", "m1clip", "train", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        with tables.loading("starting"):
            while child.poll() is None and not begun(run, child.pid):
                time.sleep(0.1)
    except KeyboardInterrupt:  # also a closed terminal: it has not begun, so it need not
        child.terminate()
        child.wait()
        raise
    finally:
        if not resumed and begun(run, child.pid):
            log = log.rename(run.path / LOG)
    if child.poll() not in (None, 0):
        sys.stderr.write(log.read_text(errors="replace")[begin:])
        if log.parent != run.path:
            log.unlink()
        if run.path.is_dir() and folders.is_empty(run.path):
            run.path.rmdir()
        return child.returncode
    state = "is being trained in the background" if child.poll() is None else "is trained already"
    print(f"{run.path} {state}, process {child.pid}")
    for what, line in {
        "logger": tables.command("monitor", run.path),
        "output": f"tail -f {shlex.quote(str(log))}",
        "list": tables.command(
            "runs", *([] if run.path.parent == Path("runs") else ["--runs", run.path.parent])
        ),
        "stop": tables.command("stop", run.path),
    }.items():
        print(f"{what + ':':8}{line}")
    return 0


def begun(run: folders.Run, pid: int) -> bool:
    """Whether the child has taken over the run: from here on what goes wrong is in its status."""
    return folders.is_run(run.path) and run.state().get("pid") == pid
