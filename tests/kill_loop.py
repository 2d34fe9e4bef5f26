"""Kill and resume a run repeatedly: python tests/kill_loop.py CONFIG RUNS SEED KILLS

Each attempt is a forked process (torch is imported once) that resumes the run until SIGKILL ends it, at a random
time or at a chosen call inside a save. Prints how the attempts ended.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch._dynamo  # noqa: F401  imported by the optimizers at their first step: seconds in every attempt

from helpers import train_run
from m1clip import files
from m1clip.config import TrainConfig, from_json


def main(config_file: str, folder: str, seed: str, kills: str) -> None:
    config, path, rng = from_json(TrainConfig, Path(config_file)), Path(folder) / "r", random.Random(int(seed))
    ends = []
    for attempt in range(int(kills) + 1):
        method = rng.choice(["clock", "fsync", "rename", "replace", "rmtree"]) if attempt < int(kills) else "never"
        when = rng.uniform(0, 0.6) if method == "clock" else rng.randrange(1, 30 if method == "fsync" else 6)
        pid = os.fork()
        if pid == 0:
            arm(method, when)
            os._exit(0 if train_run(config, path).finished else 1)
        _, status = os.waitpid(pid, 0)
        ends.append("killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")
        if ends[-1] == "exit 0":
            break
    print(" ".join(ends))


def arm(method: str, when: float) -> None:
    """Let this process die after `when` seconds, or at that call of a function that saving uses."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if method == "clock":
        threading.Thread(target=lambda: (time.sleep(when), die()), daemon=True).start()
    elif method != "never":
        owner = {"fsync": files, "rename": Path, "replace": os, "rmtree": shutil}[method]
        count_down(owner, method, int(when), die)


def count_down(owner: object, name: str, calls: int, die: Callable[[], None]) -> None:
    """Die at the given call of a function: for odd numbers just before it does its work, for even ones after."""
    original, left = getattr(owner, name), [calls]

    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and calls % 2:
            die()
        result = original(*args, **kwargs)
        if left[0] == 0:
            die()
        return result

    setattr(owner, name, counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
