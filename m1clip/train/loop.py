"""One training run, top to bottom: check, set up, step until done, keep what was learned.

What a person sees goes through `Screen`; what lasts goes through `Run`.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.data.batches import Batches
from m1clip.data.cache import pixels
from m1clip.data.pairs import Pairs, open_pairs
from m1clip.evals.embed import embed_pairs
from m1clip.evals.retrieval import Retrieval, retrieval
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.model.tokenizer import make as make_tokenizer
from m1clip.pictures import Pixels
from m1clip.run import Run, write_whole
from m1clip.train import checkpoint
from m1clip.train.meter import Meter
from m1clip.train.optim import make_optimizer, rate
from m1clip.train.screen import Screen
from m1clip.train.step import train_step
from m1clip.train.stop import Stop


@dataclass(frozen=True)
class Setup:
    """What a configuration comes to on this machine."""

    device: torch.device
    why: str
    pairs: Pairs
    held_out: Pairs
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Result:
    finished: bool
    step: int
    seconds: float
    scores: Retrieval | None

    def record(self) -> dict[str, Any]:
        """Flat, for a line of JSON."""
        scores = self.scores.record() if self.scores else {}
        return {"finished": self.finished, "step": self.step, "seconds": round(self.seconds, 2), **scores}


def check(config: TrainConfig, runs: Path) -> Setup:
    """Everything that can be refused at once, before anything is written."""
    device, why = devices.choose(config.device)
    pairs, held_out = open_pairs(config.data, config.held_out, config.seed)
    if config.batch > len(pairs):
        raise ValueError(
            f"batch {config.batch} is larger than the {len(pairs)} training pairs of {config.data}"
        )
    words = make_tokenizer(config.tokenizer, captions(pairs), config.model.text.vocab)
    with torch.device("meta"):
        need = checkpoint.needed_bytes(CLIP(config.model, words))
    there = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need:
        raise OSError(
            f"{there} has {free / 1e9:.2f} GB free; checkpoints of this model need {need / 1e9:.2f} GB"
        )
    return Setup(device, why, pairs, held_out, words)


def train(config: TrainConfig, setup: Setup, run: Run, screen: Screen) -> Result:
    """Start the run, or go on from its last checkpoint if it has one."""
    device, pairs, held_out = setup.device, setup.pairs, setup.held_out
    write_whole(run.path / "config.json", to_json(config))
    run.write("machine.json", machine(setup))
    run.status("running", 0)
    devices.prepare(device, config.threads)
    torch.manual_seed(config.seed)

    side, length = config.model.vision.image_size, config.model.text.length
    with screen.drawing(len(pairs) + len(held_out)) as drawn:
        train_pixels, held_pixels = (pixels(some, side, drawn) for some in (pairs, held_out))
    model = CLIP(config.model, setup.tokenizer).to(device)
    optimizer = make_optimizer(model, config)
    tokenize = partial(setup.tokenizer, length=length)
    batches = Batches(pairs, train_pixels, tokenize, config.batch, config.seed, config.shift)
    total = config.epochs * batches.per_epoch
    step = checkpoint.resume(run, model, optimizer)
    run.log("event", step, event="start" if step == 0 else "resume")
    screen.start(
        facts(run, setup, model, step, total), math.log(config.batch), 1 / config.batch, 1 / len(held_out)
    )

    meter = Meter(config.batch, step, total)
    scores = None
    with Stop(screen.say) as stop, screen.training(step, total):
        for batch in batches.stream(step, total):
            lr = set_rate(optimizer, rate(step, total, config))
            bytes_BSSC, tokens_BL = (
                devices.copy(batch.bytes_BSSC, device),
                devices.copy(batch.tokens_BL, device),
            )
            meter.add(train_step(model, optimizer, bytes_BSSC, tokens_BL, config.clip_norm))
            step += 1
            epoch, into_epoch = divmod(step, batches.per_epoch)
            if step % config.log_every == 0 or into_epoch == 0 or stop.asked:
                values = meter.read(step)
                refuse_non_finite(values["loss"], step, run)
                run.log("step", step, lr=lr, mem_gb=sensors.memory_gb(), **values)
                run.status("running", step, total=total, eta_s=values["eta_s"])
                screen.step(step, values)
            if into_epoch == 0:
                scores = None
                if due(epoch, config.eval_every, config.epochs):
                    with meter.paused():
                        scores = evaluate(model, held_out, held_pixels)
                    run.log("eval", step, epoch=epoch, **scores.record())
                summary = meter.epoch()
                run.log("epoch", step, epoch=epoch, **summary)
                screen.epoch(epoch, config.epochs, summary, scores)
            if stop.asked or step == total or meter.minutes_since_save >= config.save_minutes:
                with meter.paused():
                    checkpoint.save(run, step, model, optimizer)
                meter.saved()
            if stop.asked:
                break
    finished = step == total
    if finished:
        scores = scores or evaluate(
            model, held_out, held_pixels
        )  # a resumed run may have had nothing left to do
        model.save(run.model)
    run.status("finished" if finished else "stopped", step, total=total)
    return Result(finished, step, meter.seconds, scores)


def captions(pairs: Pairs) -> Iterator[str]:
    return (caption for row in range(len(pairs)) for caption in pairs.captions(row))


def due(now: int, every: int, last: int) -> bool:
    return now % every == 0 or now == last


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def evaluate(model: CLIP, pairs: Pairs, pictures: Pixels) -> Retrieval:
    model.eval()
    scores = retrieval(*embed_pairs(model, pairs, pictures))
    model.train()
    return scores


def refuse_non_finite(loss: float, step: int, run: Run) -> None:
    if math.isfinite(loss):
        return
    last = checkpoint.last(run)
    where = f"the last good state is {last}" if last else "there is no earlier state"
    raise FloatingPointError(f"the loss is {loss} at step {step}; {where}. A lower --lr usually helps")


def facts(run: Run, setup: Setup, model: CLIP, step: int, total: int) -> dict[str, str]:
    """What a person wants to know before it starts."""
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    return {
        "run": f"{run.path}, {f'step {step:,} of ' if step else ''}{total:,} steps",
        "device": f"{setup.device}: {setup.why}; {torch.get_num_threads()} CPU threads",
        "model": f"{millions:.2f} M parameters, pictures of {model.config.vision.image_size} px",
        "data": f"{len(setup.pairs):,} pairs to learn from, {len(setup.held_out):,} held out",
    }


def machine(setup: Setup) -> dict[str, Any]:
    return {
        **sensors.machine(),
        "torch": torch.__version__,
        "device": str(setup.device),
        "why": setup.why,
        "cpu_threads": torch.get_num_threads(),
        "m1clip": __version__,
    }
