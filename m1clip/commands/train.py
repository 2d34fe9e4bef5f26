"""m1clip train: flags to keyword arguments of m1clip.train, then its result; or the same in the background."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip import console
from m1clip.commands import RunsFolder
from m1clip.config import PRESETS, TrainConfig, check_exclusive, requested_config, require, select_settings
from m1clip.format import duration
from m1clip.run import Run, create_run, is_empty, is_run, new_run_path, open_run

if TYPE_CHECKING:  # imports torch
    from m1clip.training.loop import TrainResult

LOG = "output.log"


@dataclass(frozen=True)
class TrainingArgs(RunsFolder):
    training: Annotated[TrainConfig, tyro.conf.arg(name="")] = PRESETS["nano"]
    config: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Take all settings from this config.json: repeats that run."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print the result as one line of JSON."""
    argv: tyro.conf.Suppress[tuple[str, ...]] = ()

    def settings(self) -> dict[str, Any]:
        """The settings on the command line by dotted path; all others have their defaults elsewhere."""
        names = {field.name for field in fields(TrainConfig)}
        paths = {path for path in given_flags(self.argv) if path.partition(".")[0] in names}
        return select_settings(self.training, paths)


def given_flags(argv: Sequence[str]) -> set[str]:
    """Names of the flags on a command line as field paths: --no-hflip is hflip, --model.head is model.head."""
    names = {word.partition("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


@dataclass(frozen=True)
class Args(TrainingArgs):
    """Train a CLIP model. Each run is a folder; the last lines show the result and the next commands.

    m1clip train                                    the nano preset on synthetic data
    m1clip train --preset small --data synthetic:50000 --name mine
    m1clip train --data photos/ --budget 10m        your images, in the time you have
    m1clip train --resume                           continue the newest run
    m1clip train --background                       the terminal may be closed; m1clip stop ends it
    m1clip train --batch-size 1024 --chunk 32       a large batch in little memory
    m1clip train --config runs/mine/config.json     the same run again
    m1clip train --data photos.csv --init ViT-B-32.pt                      fine-tune a CLIP
    m1clip train --data photos.csv --vision timm:NAME --text hf:NAME       pretrained encoders
    """

    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the run folder; by default the preset with the next free number."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Continue the run --name (or the newest) from its last checkpoint."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """If the run --name exists, delete it and start again."""
    background: tyro.conf.FlagCreatePairsOff[bool] = False
    """Train in a background process, and return at once."""

    def check(self) -> None:
        check_exclusive(given_flags(self.argv))
        require(not self.overwrite or self.name is not None, "--overwrite starts a run again; --name says which")


def main(args: Args) -> int:
    settings = args.settings()
    resumed = open_run(args.runs, args.name) if args.resume else None
    # Before torch is imported, so that an error comes at once.
    requested = requested_config(settings, args.config, resumed.read_config()[0] if resumed else None)
    if not resumed:
        new_run_path(args.runs, args.name, requested.preset, args.overwrite)
    if args.background:
        return start_background(args, resumed, requested.preset)
    with console.loading():
        from m1clip import api
    options = {name: getattr(args, name) for name in ("config", "name", "runs", "resume", "overwrite")}
    result = api.train(**options, **settings)
    print_result(args, result)
    return 0 if result.finished else 130


def start_background(args: Args, resumed: Run | None, preset: str) -> int:
    """Run the same command in another process, with the run named."""
    argv, had_runs = [word for word in args.argv if word != "--background"], args.runs.exists()
    if args.name is not None:
        run = resumed or Run(new_run_path(args.runs, args.name, "", args.overwrite))
    else:
        run = resumed or create_run(args.runs, None, preset, overwrite=False)  # reserves the number now
        argv += ["--name", run.name]
    code = spawn_training(argv, run)
    if code and not had_runs:
        with suppress(OSError):  # another process has started a run
            args.runs.rmdir()
    return code


def print_result(args: Args, result: "TrainResult") -> None:
    if args.json:
        print(json.dumps(result.record()))
    elif result.finished and result.scores:
        print()
        near_duplicates = Run(result.run).read_or_empty("data.json").get("val_near_duplicates")
        console.show_retrieval(result.scores.record(), near_duplicates)
        print(f"\ntrained in {duration(result.seconds)}; the model is {result.model}")
        if result.best_step not in (None, result.step) and not result.restored:
            print(f"step {result.best_step} scored higher; it is {result.run / 'best'}")
        print(f"next:  {console.command('eval', result.run)}    zero-shot accuracy, probes, accuracy by word")
        print(f"       {console.command('report', result.run)}  a report with curves and examples")
    else:
        resume = console.command("train", "--resume", "--name", result.run)
        print(f"stopped and saved at step {result.step}; {resume} continues")


def spawn_training(argv: list[str], run: Run) -> int:
    """Start `m1clip train ARGV` detached; return once it trains, or with its output and exit code if it fails."""
    resumed = is_run(run.path) and "--overwrite" not in argv
    run.path.parent.mkdir(parents=True, exist_ok=True)
    # The child creates the run folder; until then its output waits beside it.
    log = run.path / LOG if resumed else run.path.parent / f".{run.name}.log"
    with open(log, "ab" if resumed else "wb") as file:
        log_start, program = file.tell(), [sys.executable, "-m", "m1clip", "train", *argv]
        child = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        with console.loading("starting"):
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
        sys.stderr.write(log.read_bytes()[log_start:].decode(errors="replace"))
        if log.parent != run.path:
            log.unlink()
        if run.path.is_dir() and is_empty(run.path):
            run.path.rmdir()
        return child.returncode
    state = "is training in the background" if child.poll() is None else "has finished"
    print(f"{run.path} {state}, process {child.pid}")
    runs = [] if run.path.parent == Path("runs") else ["--runs", run.path.parent]
    print(f"watch:  {console.command('monitor', run.path)}\noutput: tail -f {shlex.quote(str(log))}")
    print(f"list:   {console.command('runs', *runs)}\nstop:   {console.command('stop', run.path)}")
    return 0


def has_started(run: Run, pid: int) -> bool:
    """Whether the child owns the run: from here on errors are in its status."""
    return is_run(run.path) and run.read_status().get("pid") == pid
