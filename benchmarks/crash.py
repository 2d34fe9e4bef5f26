"""Kill and resume every mode of training and conversion: python benchmarks/crash.py --kills 200 [--modes lora shards]

Each run is killed (SIGKILL) up to five times, then left to end, and compared with one that was never killed: weights,
optimizer state, position, model folder and log, or the converted files, bit for bit. A third of the attempts are
`python -m m1clip`, the others are forks of this process, which has imported torch but computed nothing. Lost steps are
those logged but in no checkpoint when a run is killed; of a conversion, files that are not in its manifest. Prints a
table by mode; the exit code is 1 if a bit differs, an attempt fails, or a run cannot be continued.

moments:  clock  any time of the run          early  the first two seconds
          or in a function, such as evaluation, checkpoint, final-save, tokenizer, index, cache, fsync
"""

import argparse
import atexit
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

# Imported once, for all forks; a command imports them itself.
import datasets  # noqa: F401
import pandas  # noqa: F401
import peft  # noqa: F401
import PIL.Image
import torch._dynamo  # noqa: F401
import tyro  # noqa: F401
import webdataset  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import crash_modes
from crash_modes import MODES, PHASES, SAVE_EVERY, Mode, forked
from m1clip import api, cli, devices  # noqa: F401
from m1clip.model.clip import load

PIL.Image.init()
KILLS_PER_RUN = 5
TIMEOUT_S = 300.0
CONVERT_MOMENTS = {"index", "shard", "append", "fsync", "replace"}


@dataclass
class Result:
    """What happened in one mode."""

    mode: str
    runs: int = 0
    kills: int = 0
    bits: int = 0
    lost: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self) -> list[str]:
        lost = (f"{fmean(self.lost):.2f}", str(max(self.lost))) if self.lost else ("–", "–")
        bits = str(self.bits) if MODES[self.mode].is_exact else "by the clock"
        return [self.mode, str(self.runs), str(self.kills), bits, *lost, str(len(self.failures))]


class Crasher:
    def __init__(self, folder: Path, rng: random.Random, commands: float, moments: list[str]):
        self.folder, self.rng, self.commands, self.moments = folder, rng, commands, moments
        self.killed_at = Counter[str]()
        wait_for(forked(lambda: crash_modes.prepare_data(folder), folder / "prepare.log"))

    def start(self, mode: Mode, folder: Path, as_command: bool, moment: str = "", seconds: float = 0.0) -> int:
        """Start an attempt; its process id. A fork kills itself at the moment, so that it can be inside a function."""
        argv, log, seed = mode.argv(folder), folder / "output.log", self.rng.random()
        if as_command:
            environment = {**os.environ, "M1CLIP_CACHE": str(folder / "cache")}
            command = [sys.executable, "-m", "m1clip", *argv]
            with open(log, "ab") as file:
                child = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
            child.returncode = 0  # it is waited for by its process id
            return child.pid

        def attempt() -> int:
            os.chdir(folder)
            os.environ["M1CLIP_CACHE"] = str(folder / "cache")
            devices.DEFAULT_THREADS = 1
            if moment:
                crash_modes.arm(moment, random.Random(seed), seconds)
            code = cli.run_command(argv)
            atexit._run_exitfuncs()  # os._exit would leave the index behind
            return code

        return forked(attempt, log)

    def unbroken(self, name: str, as_command: bool) -> tuple[Path, float]:
        """A run that is not killed, and its seconds."""
        folder, mode = self.folder / f"{name}-unbroken-{int(as_command)}", MODES[name]
        mode.prepare(folder)
        started = time.monotonic()
        ended = wait_for(self.start(mode, folder, as_command))
        if ended != "exit 0":
            sys.exit(f"{name} fails without a kill: {ended}\n{(folder / 'output.log').read_text()[-2000:]}")
        return folder, time.monotonic() - started

    def crash_mode(self, name: str, kills: int) -> Result:
        mode, result = MODES[name], Result(name)
        reference, fork_s = self.unbroken(name, as_command=False)
        expected, command_s = crash_modes.outputs(mode, reference), 0.0
        if self.commands:
            other, command_s = self.unbroken(name, as_command=True)
            self.compare(mode, other, expected, result)
        while result.kills < kills and not result.failures:
            self.crash_run(mode, (fork_s, command_s), expected, result, kills)
        return result

    def crash_run(
        self, mode: Mode, seconds: tuple[float, float], expected: dict[str, bytes], result: Result, kills: int
    ) -> None:
        """One run: killed a few times, then left to end, and compared."""
        folder = self.folder / f"{result.mode}-{result.runs}"
        mode.prepare(folder)
        result.runs += 1
        for _ in range(min(KILLS_PER_RUN, kills - result.kills)):
            as_command, moment = self.rng.random() < self.commands, self.rng.choice(self.moments_of(mode))
            ended = self.attempt(mode, folder, as_command, moment, seconds[as_command])
            if ended != "killed":
                break
            result.kills += 1
            self.killed_at[moment if not as_command or moment == "early" else "clock"] += 1
            result.lost.append(crash_modes.lost_work(mode, folder))
        else:
            ended = wait_for(self.start(mode, folder, as_command=False))
        if ended != "exit 0":
            result.failures.append(f"{folder}: {ended}; {(folder / 'output.log').read_text()[-2000:]}")
            return
        self.compare(mode, folder, expected, result)

    def moments_of(self, mode: Mode) -> list[str]:
        return [name for name in self.moments if name not in PHASES or not mode.convert_to or name in CONVERT_MOMENTS]

    def attempt(self, mode: Mode, folder: Path, as_command: bool, moment: str, seconds: float) -> str:
        """Start, kill at the moment, and how it ended."""
        seconds = min(2.0, seconds) if moment == "early" else seconds
        pid = self.start(mode, folder, as_command, moment, seconds)
        if as_command:  # a command is killed from outside
            return wait_for(pid, kill_after=self.rng.uniform(0, seconds))
        return wait_for(pid)

    def compare(self, mode: Mode, folder: Path, expected: dict[str, bytes], result: Result) -> None:
        problems = crash_modes.check_end(mode, folder)
        if mode.is_exact:
            bits = crash_modes.differing_bits(expected, crash_modes.outputs(mode, folder))
            result.bits += sum(bits.values())
            problems += [f"{count} bits of {name} differ" for name, count in bits.items()]
        else:
            model = folder / "runs" / "r" / "model"
            loads = wait_for(forked(lambda: load(model) is None, folder / "output.log")) == "exit 0"
            problems += [] if loads else ["its model cannot be loaded"]
        most, limit = max(result.lost, default=0), 1 if mode.convert_to else SAVE_EVERY
        problems += [f"a kill lost {most} steps"] * (most > limit)
        result.failures += [f"{folder}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(folder)


def wait_for(pid: int, kill_after: float | None = None) -> str:
    """How a process ended: "exit N" or "killed"; one that hangs is killed and reported."""
    started = time.monotonic()
    deadline, is_sent = started + TIMEOUT_S, False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        if ended:
            signalled = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
            return "hung" if now > deadline else "killed" if signalled else f"exit {os.waitstatus_to_exitcode(status)}"
        if not is_sent and (now > deadline or (kill_after is not None and now - started >= kill_after)):
            os.kill(pid, signal.SIGKILL)
            is_sent = True
        time.sleep(0.002)


def print_table(results: list[Result], killed_at: Counter[str], seconds: float) -> None:
    columns = ["mode", "runs", "kills", "differing bits", "lost steps: mean", "max", "failures"]
    rows = [columns, *(result.row() for result in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    kills, bits = sum(result.kills for result in results), sum(result.bits for result in results)
    lost = [steps for result in results for steps in result.lost]
    mean = fmean(lost) if lost else 0.0
    print(f"\n{kills} kills, {bits} differing bits, {mean:.2f} lost steps per kill (at most {max(lost, default=0)})")
    print(f"killed at: {', '.join(f'{moment} {count}' for moment, count in killed_at.most_common())}; {seconds:.0f} s")
    for failure in (failure for result in results for failure in result.failures):
        print(failure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    moments = ["clock", "early", *PHASES]
    parser.add_argument("--moments", nargs="+", choices=moments, default=6 * ["clock"] + moments)
    parser.add_argument("--commands", type=float, default=1 / 3, help="fraction of attempts that are commands")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    started, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="m1clip-crash-"))
    crasher, results = Crasher(folder, random.Random(args.seed), args.commands, args.moments), []
    for index, name in enumerate(args.modes):
        left = args.kills - sum(result.kills for result in results)
        results.append(crasher.crash_mode(name, round(left / (len(args.modes) - index))))
        print(f"{name}: {results[-1].kills} kills, {len(results[-1].failures)} failures", file=sys.stderr)
    print_table(results, crasher.killed_at, time.monotonic() - started)
    if args.out:
        args.out.write_text(json.dumps([vars(result) for result in results], indent=2) + "\n")
    failed = any(result.failures for result in results)
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
