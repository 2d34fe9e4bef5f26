"""A run whose process is killed over and over: python tests/killed.py CONFIG RUNS SEED KILLS

Each life is a forked process (torch is imported once) that goes on with the run until SIGKILL ends it, by the
clock or at the very call of a save that SEED names. Prints how the lives ended.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  the optimizers import it at their first step, which takes each life seconds

from m1clip import run as runs
from m1clip.config import TrainConfig, from_json
from trained import trained


def main(config_file: str, folder: str, seed: str, kills: str) -> None:
    config, path, rng = (
        from_json(TrainConfig, Path(config_file)),
        Path(folder) / "r",
        random.Random(int(seed)),
    )
    ends = []
    for life in range(int(kills) + 1):
        how = rng.choice(["clock", "fsync", "rename", "replace", "rmtree"]) if life < int(kills) else "never"
        when = rng.uniform(0, 0.6) if how == "clock" else rng.randrange(1, 30 if how == "fsync" else 6)
        pid = os.fork()
        if pid == 0:
            arm(how, when)
            done = trained(config, path).finished
            os._exit(0 if done else 1)
        _, status = os.waitpid(pid, 0)
        ends.append("killed" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}")
        if ends[-1] == "exit 0":
            break
    print(" ".join(ends))


def arm(how: str, when: float) -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "clock":
        threading.Thread(target=lambda: (time.sleep(when), die()), daemon=True).start()
    elif how == "fsync":
        count_down(runs, "_fsync", int(when), die)
    elif how == "rename":
        count_down(Path, "rename", int(when), die)
    elif how == "replace":
        count_down(os, "replace", int(when), die)
    elif how == "rmtree":
        count_down(shutil, "rmtree", int(when), die)


def count_down(owner: object, name: str, calls: int, die) -> None:
    """Die when the function has been called so many times; every other time just before it does its work."""
    plain, left = getattr(owner, name), [calls]

    def counted(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and calls % 2:
            die()
        result = plain(*args, **kwargs)
        if left[0] == 0:
            die()
        return result

    setattr(owner, name, counted)


if __name__ == "__main__":
    main(*sys.argv[1:])
