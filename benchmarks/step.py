"""Equal mathematics: one training step of the same model on the same batch by m1clip, open_clip and
transformers.

    python benchmarks/step.py flickr8k:DIR [--rounds 7] [--only NAME …]

Needs m1clip[bench]. All have the same weights (by `m1clip export`), images and captions; their losses are
compared first. Each library runs in its own process, and their steps alternate. Captions are real: m1clip
pads a batch to its longest caption, open_clip's trainer and transformers' run_clip.py pad every caption to
the context length. m1clip starts from uint8 images, as in training; the peers get normalized pixels.
Optimizer: AdamW, as each library's trainer creates it. Memory is the peak RSS above what the process held
before it created the model. GFLOP are matmuls counted in a real step. Utilization is relative to 2048 x 2048
matmuls in the second before each round, because the speed of a machine changes from minute to minute.
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
from typing import Annotated

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from m1clip import devices, sensors
from m1clip.config import PRESETS, Preprocess, TrainConfig, VisionConfig
from m1clip.data.batches import Batch, BatchStream, Images, Tokens
from m1clip.data.splits import open_sources, open_splits
from m1clip.devices import Plan
from m1clip.model.clip import CLIP, load
from m1clip.model.interop import export_clip
from m1clip.model.tokenizer import make_tokenizer
from m1clip.training.memory import retain_freed_memory
from m1clip.training.setup import sample_captions
from m1clip.training.step import TrainState, train_step

BATCH_SIZES = {"vit-b16-char": 12, "small": 64, "nano": 256}
LIBRARIES = ("m1clip", "open_clip", "transformers")
COLUMNS = ("model", "batch size", "library", "ms", "pairs/s", "m1clip is", "memory, GB", "m1clip / other")
Tensors = dict[str, Tensor]
Step = Callable[[bool], float]
"""A training step that returns the loss; without an update if its argument is true."""


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Data spec, such as flickr8k:DIR."""
    rounds: int = 7
    only: tuple[str, ...] = tuple(BATCH_SIZES)
    """Presets."""
    threads: int = devices.DEFAULT_THREADS


def main(args: Args) -> None:
    devices.apply_plan(Plan("cpu", threads=args.threads))
    columns = (*COLUMNS, "GFLOP", "of peak")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for preset in args.only:
        for cells in measure(preset, BATCH_SIZES[preset], args):
            print(f"| {' | '.join(cells)} |", flush=True)


def measure(preset: str, batch_size: int, args: Args) -> list[list[str]]:
    """Rows of the table for one model."""
    config = replace(PRESETS[preset], data=args.data, val_size="auto", batch_size=batch_size, optimizer="adamw")
    assert isinstance(config.model.vision, VisionConfig)
    vision = replace(config.model.vision, stem="patch", pool="class")  # what all three libraries have
    config = replace(config, model=replace(config.model, vision=vision))
    with tempfile.TemporaryDirectory() as folder:
        write_models_and_batch(config, Path(folder))
        workers = {library: start_worker(library, folder, args.threads) for library in LIBRARIES}
        losses = {library: ask(worker, "loss")["loss"] for library, worker in workers.items()}
        assert max(losses.values()) - min(losses.values()) < 1e-3, losses
        for worker in workers.values():
            ask(worker, "step")  # warm-up: allocates the moments
        seconds: dict[str, list[float]] = {library: [] for library in LIBRARIES}
        peak_gflops: list[float] = []
        for round_number in range(args.rounds):
            peak_gflops.append(matmul_gflops())
            for library in LIBRARIES if round_number % 2 else LIBRARIES[::-1]:
                seconds[library].append(ask(workers[library], "step")["seconds"])
        memory_gb = {library: ask(worker, "peak")["gb"] for library, worker in workers.items()}
        gflop = {library: ask(worker, "gflop")["gflop"] for library, worker in workers.items()}
        for worker in workers.values():
            worker.kill()
    rows = []
    for library in LIBRARIES:
        step_s = median(seconds[library])
        ratios = list(map(truediv, seconds[library], seconds["m1clip"]))
        utilization = [gflop[library] / s / peak for s, peak in zip(seconds[library], peak_gflops, strict=True)]
        is_ours = library == "m1clip"
        rows.append(
            [
                *(preset, str(batch_size), library, f"{1e3 * step_s:.0f}", f"{batch_size / step_s:.1f}"),
                "" if is_ours else f"{median(ratios):.2f} × as fast",
                f"{memory_gb[library]:.2f}",
                "" if is_ours else f"{memory_gb['m1clip'] / memory_gb[library]:.2f}",
                f"{gflop[library]:.0f}",
                f"{median(utilization):.0%}",
            ]
        )
    return rows


def write_models_and_batch(config: TrainConfig, folder: Path) -> None:
    """The same model in the format of each library, and one batch of real pairs."""
    size, length = config.model.vision.image_size, config.model.text.context_length
    train = open_splits(open_sources(config), config, Preprocess(size), Preprocess(size)).train
    tokenizer = make_tokenizer(config.tokenizer, sample_captions(train), config.model.text.vocab_size)
    torch.manual_seed(0)
    model = CLIP(config.model, tokenizer)
    model.save(folder / "m1clip")
    for library in LIBRARIES[1:]:
        export_clip(model, library, folder / library)
    stream = BatchStream(train, lambda texts: tokenizer(texts, length), config.batch_size, 0, size)
    batch = stream.batch(0)
    texts = [train.captions(int(row))[0] for row in batch.rows]
    (folder / "captions.json").write_text(json.dumps(texts))
    torch.save({"images": batch.image[0], "tokens": model.tokenize(texts)}, folder / "batch.pt")
    settings = {"preset": config.preset, "batch_size": config.batch_size}
    (folder / "config.json").write_text(json.dumps(settings))


def start_worker(library: str, folder: str, threads: int) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, "--worker", library, folder, str(threads)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: "subprocess.Popen[str]", request: str) -> dict[str, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(request + "\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("{"):
            answer: dict[str, float] = json.loads(line)
            return answer
    sys.exit("a worker process has died")


def run_worker(library: str, folder: str, threads: int) -> None:
    """Answers requests from stdin: loss, step, peak, gflop."""
    devices.apply_plan(Plan("cpu", threads=threads))
    # Imported by every worker, so that imports do not count as memory of a step.
    import open_clip  # noqa: F401
    from transformers import AutoTokenizer, CLIPModel  # noqa: F401

    retain_freed_memory()  # for all libraries
    before_gb = sensors.memory_use().rss_gb
    tensors = torch.load(Path(folder) / "batch.pt")
    create = {"m1clip": m1clip_step, "open_clip": open_clip_step, "transformers": transformers_step}[library]
    step = create(Path(folder), tensors)
    for line in sys.stdin:
        request = line.strip()
        if request == "peak":
            answer = {"gb": sensors.peak_gb() - before_gb}
        elif request == "gflop":
            with FlopCounterMode(display=False) as counter:
                step(True)
            answer = {"gflop": counter.get_total_flops() / 1e9}
        else:
            start = time.perf_counter()
            answer = {"loss": step(request == "loss"), "seconds": time.perf_counter() - start}
        print(json.dumps(answer), flush=True)


def m1clip_step(folder: Path, tensors: Tensors) -> Step:
    settings = json.loads((folder / "config.json").read_text())
    preset, batch_size = PRESETS[settings["preset"]], settings["batch_size"]
    state = TrainState(load(folder / "m1clip").train(), replace(preset, batch_size=batch_size, optimizer="adamw"))
    rows = np.arange(batch_size)
    images, tokens = Images(tensors["images"]), Tokens(tensors["tokens"][:, None])
    batch = Batch(images, tokens, torch.from_numpy(rows), None, rows)

    def step(loss_only: bool) -> float:
        state.set_lr(0.0 if loss_only else 1e-5)
        return train_step(state, state.to_device(batch))[0][0].item()

    return step


def open_clip_step(folder: Path, tensors: Tensors) -> Step:
    """With the optimizer (not fused) and the step of open_clip_train."""
    import open_clip

    name = f"local-dir:{folder / 'open_clip'}"
    pixels_BCHW = load(folder / "m1clip").normalize(tensors["images"])
    model, _, _ = open_clip.create_model_and_transforms(name)
    tokens_BL = open_clip.get_tokenizer(name)(json.loads((folder / "captions.json").read_text()))
    no_decay = [w for name, w in model.named_parameters() if w.ndim < 2 or "bn" in name or "ln" in name]
    no_decay_ids = {id(weight) for weight in no_decay}
    decay = [weight for weight in model.parameters() if id(weight) not in no_decay_ids]
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.98), eps=1e-6)
    clip_loss = open_clip.ClipLoss()
    model.train()

    def step(loss_only: bool) -> float:
        optimizer.zero_grad()
        loss = clip_loss(*model(pixels_BCHW, tokens_BL)[:3])
        loss.backward()
        if not loss_only:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, 4.6052)
        return float(loss.item())

    return step


def transformers_step(folder: Path, tensors: Tensors) -> Step:
    """With the fused AdamW and the gradient clipping of its Trainer."""
    from transformers import AutoTokenizer, CLIPModel

    pixels_BCHW = load(folder / "m1clip").normalize(tensors["images"])
    model = CLIPModel.from_pretrained(folder / "transformers").train()
    tokenizer = AutoTokenizer.from_pretrained(folder / "transformers")
    length = model.config.text_config.max_position_embeddings
    texts = json.loads((folder / "captions.json").read_text())
    tokens = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.1, fused=True)
    inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}

    def step(loss_only: bool) -> float:
        optimizer.zero_grad()
        loss = model(pixel_values=pixels_BCHW, return_loss=True, **inputs).loss
        loss.backward()
        if not loss_only:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return float(loss.item())

    return step


def matmul_gflops(seconds: float = 1.0) -> float:
    """GFLOP/s of 2048 x 2048 matmuls, back to back."""
    a, b, count, start = torch.randn(2048, 2048), torch.randn(2048, 2048), 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        torch.mm(a, b)
        count += 1
    return float(count * 2 * 2048**3 / (time.perf_counter() - start) / 1e9)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main(tyro.cli(Args, description=__doc__))
