"""What benchmarks/crash.py kills: a command line for every way to train or convert, and what must be equal after it.

No tensor is computed here: the process that imports this is forked, which does not work once OpenMP has threads.
"""

import csv
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from conftest import tiny_config, tiny_run_config
from m1clip import files
from m1clip.config import TrainConfig, to_json
from m1clip.data.convert import Manifest
from m1clip.data.index import IndexWriter
from m1clip.data.pixel_cache import RowStore
from m1clip.files import read_jsonl
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run
from m1clip.training import checkpoint, loop, setup
from m1clip.training.checkpoint import CheckpointManager
from photos import write_photos

PHOTOS, SAVE_EVERY = 300, 2  # two chunks of a cache; steps between checkpoints
TIMINGS = {"seconds", "joules"}
COMPARED = ("loss", "accuracy", "i2t_accuracy", "t2i_accuracy", "temperature", "lr", "grad_norm", "grad_norms")
COMPARED += ("weight_norms", "mean_r1", "i2t_r1", "t2i_r10", "effective_rank_image", "chunk", "epoch")
# Functions in which a process can be killed: before, while or after one of their calls.
PHASES: dict[str, tuple[Any, str]] = {
    "evaluation": (loop, "evaluate_on_val"),
    "checkpoint": (checkpoint, "save_checkpoint"),
    "final-save": (CheckpointManager, "_save_model"),
    "tokenizer": (setup, "make_tokenizer"),
    "index": (IndexWriter, "write"),
    "cache": (RowStore, "_complete"),
    "shard": (Manifest, "write"),
    "append": (files, "append_lines"),
    "fsync": (files, "fsync"),
    "rename": (Path, "rename"),
    "replace": (os, "replace"),
    "rmtree": (shutil, "rmtree"),
}
FREQUENT = {"append": 60, "fsync": 60, "rename": 12, "replace": 40, "rmtree": 20, "checkpoint": 12, "evaluation": 6}


@dataclass(frozen=True)
class Mode:
    """A command that is killed and repeated until it ends."""

    settings: dict[str, Any] = field(default_factory=dict)  # of the training
    convert_to: str = ""  # for a conversion
    is_exact: bool = True

    def config(self, data: str, init: Path) -> TrainConfig:
        config = replace(
            tiny_run_config(tiny_config()), data=data, epochs=8, eval_every=2, threads=1, workers=1, log_every=1
        )
        pretrained = {"init": str(init)} if "recipe" in self.settings else {}
        return replace(config, batch_size=64, save_every=str(SAVE_EVERY), **{**pretrained, **self.settings})

    def argv(self, folder: Path) -> list[str]:
        """The command for what is in the folder: a new run, or one to be resumed."""
        if self.convert_to:
            return ["data", "convert", "../photos.csv", "out", "--to", self.convert_to, "--per-file", "16"]
        if (folder / "runs" / "r" / "config.json").exists():
            return ["train", "--resume", "--name", "r"]
        return ["train", "--config", "config.json", "--name", "r"]

    def prepare(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "cache").mkdir()
        data = self.settings.get("data", "../photos.csv")
        (folder / "config.json").write_text(to_json(self.config(data, folder.parent / "pretrained")))


AUGMENTED = {"crop_scale": 0.6, "hflip": True}
MODES = {
    "adamw": Mode(),
    "muon-ema": Mode({"optimizer": "muon", "ema": 0.9, "data": "synthetic:256", "patch_dropout": 0.2, **AUGMENTED}),
    "chunks": Mode({"chunk": 20, "patch_dropout": 0.2, **AUGMENTED}),
    "frozen": Mode({"recipe": "frozen", "lr": 1e-2, **AUGMENTED}),
    "lora": Mode({"recipe": "lora", "lr": 1e-2, "lora_rank": 4}),
    "full": Mode({"recipe": "full", "wise_ft": 0.5}),
    "budget": Mode({"budget": "3s"}, is_exact=False),
    "shards": Mode(convert_to="shards"),
    "parquet": Mode(convert_to="parquet"),
}


def prepare_data(folder: Path) -> None:
    """Photos with captions, and a CLIP in place of a pretrained one. Computes, so it needs a process of its own."""
    import torch

    names = write_photos(folder / "photos", PHOTOS)
    with open(folder / "photos.csv", "w", newline="") as file:
        rows = ((f"photos/{name}", f"a photo of {i} and {i % 7}") for i, name in enumerate(names))
        csv.writer(file).writerows([("image", "caption"), *rows])
    torch.manual_seed(3)
    CLIP(tiny_config(), Tokenizer.characters()).save(folder / "pretrained")


def arm(moment: str, rng: random.Random, seconds: float) -> None:
    """Let this process be killed: at a random time below `seconds`, or at a random call of a function."""
    if moment not in PHASES:
        die_later(rng.uniform(0, seconds))
        return
    owner, name = PHASES[moment]
    original, calls_left = getattr(owner, name), rng.randint(1, FREQUENT.get(moment, 2))
    when, delay_s = rng.choice(["before", "while", "after"]), rng.uniform(0, 0.01)

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls_left
        calls_left -= 1
        if calls_left == 0 and when != "after":
            die_later(delay_s if when == "while" else 0.0)
        result = original(*args, **kwargs)
        if calls_left == 0 and when == "after":
            die_later(0.0)
        return result

    setattr(owner, name, counted)


def die_later(seconds: float) -> None:
    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start() if seconds else die()


def lost_work(mode: Mode, folder: Path) -> int:
    """Steps that are logged but in no checkpoint, or files of a conversion that are not in its manifest."""
    if mode.convert_to:
        listed = {entry.get("file") for entry in read_jsonl(folder / "out" / "manifest.jsonl")}
        return sum(path.name not in listed for path in (folder / "out").glob("[!.m]*"))
    run = Run(folder / "runs" / "r")
    last = max((record["step"] for record in run.records("step")), default=0)
    path, damaged = checkpoint.newest_intact(run)
    assert not damaged, f"damaged checkpoints: {damaged}"
    return last - (checkpoint.step_of(path) if path else 0)


def outputs(mode: Mode, folder: Path) -> dict[str, bytes]:
    """Everything whose bits must be those of an unbroken run, by name; timings are left out."""
    if mode.convert_to:
        return {path.name: path.read_bytes() for path in (folder / "out").iterdir()}
    run = Run(folder / "runs" / "r")
    last = checkpoint.list_checkpoints(run)[-1]
    tensors = {f"{last.name}/{path.name}": path.read_bytes() for path in last.glob("*.safetensors")}
    model = {str(path.relative_to(run.path)): path.read_bytes() for path in run.model.rglob("*") if path.is_file()}
    position = json.loads((last / "state.json").read_text())["position"]
    position = {key: value for key, value in position.items() if key not in TIMINGS}
    names = " ".join(sorted(path.name for path in run.checkpoints.iterdir()))
    log = {f"log/{kind}": json.dumps(list(log_values(run, kind))).encode() for kind in ("step", "eval", "epoch")}
    return {**tensors, **model, **log, "position": json.dumps(position).encode(), "checkpoints": names.encode()}


def log_values(run: Run, kind: str) -> Iterator[list[Any]]:
    for record in run.records(kind):
        yield [record["step"], *(record.get(name) for name in COMPARED)]


def differing_bits(one: dict[str, bytes], other: dict[str, bytes]) -> dict[str, int]:
    """By name, where there are any; what only one of them has differs in all its bits."""
    counts = {}
    for name in one.keys() | other.keys():
        a, b = one.get(name, b""), other.get(name, b"")
        if a != b:
            common = min(len(a), len(b))
            bits = np.bitwise_xor(np.frombuffer(a[:common], np.uint8), np.frombuffer(b[:common], np.uint8))
            counts[name] = int(np.unpackbits(bits).sum()) + 8 * (max(len(a), len(b)) - common)
    return counts


def check_end(mode: Mode, folder: Path) -> list[str]:
    """What is wrong with a finished run beside its bits."""
    problems = [f"left behind: {path.relative_to(folder)}" for path in folder.rglob(".*")]
    leftovers = [path.name for path in (folder / "cache").glob("index-*")]
    problems += [f"left behind in the cache: {leftovers}"] * bool(leftovers)
    if not mode.convert_to:
        run = Run(folder / "runs" / "r")
        state = run.read_status()["state"]
        problems += [f"its state is {state}"] * (state != "finished")
        steps = [record["step"] for record in run.records("step")]
        problems += ["steps are missing from its log, or twice in it"] * (steps != [*range(1, len(steps) + 1)])
    return problems


def forked(function: Callable[[], Any], log: Path) -> int:
    """Start a process that runs the function with its output in a file; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = function() or 0
    finally:
        os._exit(code)
