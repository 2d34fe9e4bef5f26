"""Equal mathematics: one step of the same model on the same batch, by us, open_clip and transformers.

    python benchmarks/step.py flickr8k:DIR [--rounds 7] [--only NAME …]

Needs m1clip[bench]. Each has the same weights (by `m1clip convert`), images and captions; that their
losses agree is checked first. Each lives in a process of its own and they take their steps in turn. The
captions are real: we cut a batch to its longest one, where open_clip's trainer and transformers'
run_clip.py fill every caption up to the length that the model can read. Ours starts from bytes, as in
training; the peers are given finished pixels. Optimizer: AdamW, as each one's trainer makes it. Memory is
the most that the process had above what it held before it made the model. GFLOP are products, counted in a
real step. The peak is what plain products of matrices make, a second of them before each round, because
what a machine can do changes from minute to minute.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

from m1clip import devices, sensors
from m1clip.config import PRESETS, TrainConfig, VisionConfig
from m1clip.data.batches import Batch, BatchStream, Images, Tokens
from m1clip.data.sources import open_sources
from m1clip.data.splits import open_splits
from m1clip.devices import Plan
from m1clip.model.clip import CLIP, load
from m1clip.model.export_clip import export_clip
from m1clip.model.tokenizer import make_tokenizer
from m1clip.training.memory import retain_freed_memory
from m1clip.training.setup import captions

CASES = {"seed": 12, "small": 64, "nano": 256}
"""Presets, and the pairs of a batch: the documents' model, ViT-S/16 at 112 pixels, and the smallest."""
NAMES = ("m1clip", "open_clip", "transformers")
Step = Callable[[], float]


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Such as flickr8k:DIR."""
    rounds: int = 7
    only: tuple[str, ...] = tuple(CASES)
    threads: int = devices.DEFAULT_THREADS


def main(args: Args) -> None:
    devices.apply_plan(Plan("cpu", threads=args.threads))
    heads = (
        "model",
        "batch",
        "who",
        "ms",
        "pairs/s",
        "ours / theirs",
        "memory GB",
        "ours / theirs",
        "GFLOP",
        "of peak",
    )
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for name in args.only:
        for line in rows(name, CASES[name], args):
            print(f"| {' | '.join(line)} |", flush=True)


def rows(name: str, size: int, args: Args) -> list[list[str]]:
    config = replace(PRESETS[name], data=args.data, val_size="auto", batch=size, optimizer="adamw")
    vision = config.model.vision
    assert isinstance(vision, VisionConfig)
    plain = replace(vision, stem="patch", pool="class")  # what all three have
    config = replace(config, model=replace(config.model, vision=plain))
    with tempfile.TemporaryDirectory() as folder:
        prepared(config, Path(folder))
        workers = {who: start(who, Path(folder), args) for who in NAMES}
        losses = {who: ask(worker, "loss")["loss"] for who, worker in workers.items()}
        assert max(losses.values()) - min(losses.values()) < 1e-3, losses
        for worker in workers.values():
            ask(worker, "step")  # moments and memory are made
        times: dict[str, list[float]] = {who: [] for who in NAMES}
        peaks: list[float] = []
        for number in range(args.rounds):
            peaks.append(products())
            for who in NAMES if number % 2 else NAMES[::-1]:
                times[who].append(ask(workers[who], "step")["seconds"])
        held = {who: ask(worker, "peak")["gb"] for who, worker in workers.items()}
        work = {who: ask(worker, "work")["gflop"] for who, worker in workers.items()}
        for worker in workers.values():
            worker.kill()
    lines = []
    for who in NAMES:
        seconds = median(times[who])
        ratios = [theirs / ours for theirs, ours in zip(times[who], times["m1clip"], strict=True)]
        ours, speeds = who == "m1clip", [work[who] / second for second in times[who]]
        lines.append(
            [
                *(name, str(size), who, f"{1e3 * seconds:.0f}", f"{size / seconds:.1f}"),
                "" if ours else f"{median(ratios):.2f} × as fast",
                f"{held[who]:.2f}",
                "" if ours else f"{held['m1clip'] / held[who]:.2f}",
                f"{work[who]:.0f}",
                f"{median(map(truediv, speeds, peaks)):.0%}",
            ]
        )
    return lines


def prepared(config: TrainConfig, folder: Path) -> None:
    """The same model as everybody reads it, and a batch of real pairs."""
    side = config.model.vision.image_size
    data = open_splits(open_sources(config), config, side, side)
    words = make_tokenizer(config.tokenizer, captions(data.train), config.model.text.vocab_size)
    torch.manual_seed(0)
    model = CLIP(config.model, words)
    model.save(folder / "m1clip")
    for library in NAMES[1:]:
        export_clip(model, library, folder / library)
    batch = BatchStream(
        data.train, lambda texts: words(texts, config.model.text.context_length), config.batch_size, 0, side
    ).batch(0)
    told = [data.train.captions(int(row))[0] for row in batch.rows]
    tokens_BL = words(told, config.model.text.context_length)
    (folder / "captions.json").write_text(json.dumps(told))
    torch.save({"bytes": batch.image[0], "tokens": tokens_BL}, folder / "batch.pt")
    (folder / "config.json").write_text(json.dumps({"preset": config.preset, "batch": config.batch_size}))


def start(who: str, folder: Path, args: Args) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--work", who, str(folder), str(args.threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: "subprocess.Popen[str]", what: str) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(what + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            found: dict[str, float] = json.loads(line)
            return found
    sys.exit("a worker has died")


def worker(who: str, where: str, threads: int) -> None:
    """Does what it is told, a line each."""
    devices.apply_plan(Plan("cpu", threads=threads))
    folder = Path(where)
    import open_clip  # noqa: F401  (what each imports is not its step's memory: everybody has everything)
    from transformers import AutoTokenizer, CLIPModel  # noqa: F401

    retain_freed_memory()  # everybody, though it is our doing
    before = sensors.memory_gb()
    held = torch.load(folder / "batch.pt")
    step = {"m1clip": ours, "open_clip": open_clips, "transformers": transformers_}[who](folder, held)
    for line in sys.stdin:
        found: dict[str, float] = {}
        if line.strip() == "peak":
            found = {"gb": sensors.peak_gb() - before}
        elif line.strip() == "work":
            with FlopCounterMode(display=False) as counter:
                step(True)
            found = {"gflop": counter.get_total_flops() / 1e9}
        else:
            began = time.perf_counter()
            found = {"loss": step(line.strip() == "loss"), "seconds": time.perf_counter() - began}
        print(json.dumps(found), flush=True)


def ours(folder: Path, held: dict[str, torch.Tensor]) -> Any:
    import numpy as np

    from m1clip.training.state import TrainState
    from m1clip.training.step import train_step

    about = json.loads((folder / "config.json").read_text())
    config = replace(PRESETS[about["preset"]], batch=about["batch"], optimizer="adamw")
    state = TrainState(load(folder / "m1clip").train(), config)
    rows_ = np.arange(len(held["bytes"]))
    image, text = Images(held["bytes"]), Tokens(held["tokens"][:, None])
    batch = Batch(image, text, torch.from_numpy(rows_), None, rows_)

    def step(only_loss: bool) -> float:
        state.set_rate(0.0 if only_loss else 1e-5)
        return train_step(state, state.take(batch))[0][0].item()

    return step


def pixels_of(folder: Path, held: dict[str, torch.Tensor]) -> torch.Tensor:
    return load(folder / "m1clip").normalize(held["bytes"])


def open_clips(folder: Path, held: dict[str, torch.Tensor]) -> Any:
    """As open_clip_train makes its optimizer (which is not fused) and takes its steps."""
    import open_clip

    pixels = pixels_of(folder, held)
    model, _, _ = open_clip.create_model_and_transforms(f"local-dir:{folder / 'open_clip'}")
    told = open_clip.get_tokenizer(f"local-dir:{folder / 'open_clip'}")(
        json.loads((folder / "captions.json").read_text())
    )
    few = [w for name, w in model.named_parameters() if w.ndim < 2 or "bn" in name or "ln" in name]
    known = {id(w) for w in few}
    rest = [w for w in model.parameters() if id(w) not in known]
    groups = [{"params": few, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.98), eps=1e-6)
    loss_of = open_clip.ClipLoss()
    model.train()

    def step(only_loss: bool) -> float:
        optimizer.zero_grad()
        loss = loss_of(*model(pixels, told)[:3])
        loss.backward()
        if not only_loss:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)
        return loss.item()

    return step


def transformers_(folder: Path, held: dict[str, torch.Tensor]) -> Any:
    """As its Trainer does: fused AdamW, the gradient cut to length 1."""
    from transformers import AutoTokenizer, CLIPModel

    pixels = pixels_of(folder, held)
    model = CLIPModel.from_pretrained(folder / "transformers").train()
    words = AutoTokenizer.from_pretrained(folder / "transformers")
    length = model.config.text_config.max_position_embeddings
    told = words(
        json.loads((folder / "captions.json").read_text()),
        padding="max_length",
        max_length=length,
        truncation=True,
        return_tensors="pt",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=True)
    inputs = {key: told[key] for key in ("input_ids", "attention_mask")}

    def step(only_loss: bool) -> float:
        optimizer.zero_grad()
        loss = model(pixel_values=pixels, return_loss=True, **inputs).loss
        loss.backward()
        if not only_loss:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return loss.item()

    return step


def products(seconds: float = 1.0) -> float:
    """GFLOP/s of products of two matrices of 2048, one after the other for so long."""
    a, b, done, began = torch.randn(2048, 2048), torch.randn(2048, 2048), 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        torch.mm(a, b)
        done += 1
    return float(done * 2 * 2048**3 / (time.perf_counter() - began) / 1e9)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(tyro.cli(Args))
