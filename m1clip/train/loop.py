"""One training run, top to bottom: check, set up, step until done, keep what was learned.

What a person sees goes through `Screen`; what lasts goes through `Run`.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from m1clip import __version__, devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.data.batches import Batches
from m1clip.data.cache import pixels, require_room
from m1clip.data.pairs import Pairs, open_pairs
from m1clip.evals.embed import embed_pairs
from m1clip.evals.retrieval import Retrieval, retrieval
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.model.tokenizer import make as make_tokenizer
from m1clip.pictures import Pixels
from m1clip.run import Run, write_whole
from m1clip.sensors import readable
from m1clip.train import checkpoint
from m1clip.train.meter import Meter
from m1clip.train.optim import make_optimizer, rate
from m1clip.train.screen import Screen
from m1clip.train.step import STATS, train_step
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


def check(config: TrainConfig, runs: Path, resumed: Run | None) -> Setup:
    """Everything that can be refused at once, before anything is written."""
    device, why = devices.choose(config.device)
    pairs, held_out = open_pairs(config.data, config.held_out, config.seed)
    if config.batch > len(pairs):
        raise ValueError(f"batch {config.batch} is larger than the {len(pairs)} training pairs")
    words = checkpoint.tokenizer(resumed) if resumed else None
    words = words or make_tokenizer(config.tokenizer, captions(pairs), config.model.text.vocab)
    with torch.device("meta"):
        need = checkpoint.needed_bytes(CLIP(config.model, words))
    there = next(folder for folder in (runs, *runs.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < need:
        raise OSError(f"{there} has {readable(free)} free; checkpoints need {readable(need)}")
    require_room(config.model.vision.image_size, pairs, held_out)
    return Setup(device, why, pairs, held_out, words)


def train(config: TrainConfig, setup: Setup, run: Run, screen: Screen) -> Result:
    """Start the run, or go on from its last checkpoint if it has one."""
    device, pairs, held_out = setup.device, setup.pairs, setup.held_out
    devices.prepare(device, config.threads)
    torch.manual_seed(config.seed)
    model = CLIP(config.model, setup.tokenizer).to(device)
    optimizer = make_optimizer(model, config)
    step, total = checkpoint.resume(run, model, optimizer), config.epochs * (len(pairs) // config.batch)
    if step > total:
        raise ValueError(f"{run.path} has done {step} steps; {config.epochs} epochs are only {total}")
    introduce(run, config, setup, step)
    with screen.drawing(len(pairs) + len(held_out)) as drawn:
        side = config.model.vision.image_size
        train_pixels, held_pixels = (pixels(some, side, drawn) for some in (pairs, held_out))
    tokenize = partial(setup.tokenizer, length=config.model.text.length)
    batches = Batches(pairs, train_pixels, tokenize, config.batch, config.seed, config.shift)
    meter, scores = Meter(config.model.loss, config.batch, total), None
    screen.start(facts(run, setup, model, step, total), meter.chance, 1 / len(held_out))

    with Stop(screen.say) as stop, screen.training(step, total):
        for batch in batches.stream(step, total):
            lr = set_rate(optimizer, rate(step, total, config))
            inputs = (devices.copy(part, device) for part in (batch.bytes_BSSC, batch.tokens_BL))
            meter.add(train_step(model, optimizer, *inputs, clip_norm=config.clip_norm))
            step += 1
            epoch, into_epoch = divmod(step, batches.per_epoch)
            stopping, epoch_ends = stop.asked, into_epoch == 0
            saving = stopping or step == total or meter.minutes_since_save >= config.save_minutes
            if step % config.log_every == 0 or epoch_ends or saving:
                values = {"lr": lr, **meter.read(step)}
                refuse_non_finite(values, step, run)
                run.log("step", step, mem_gb=sensors.memory_gb(), **values)
                run.status("running", step, total=total, eta_s=values["eta_s"])
                screen.step(step, values)
            if epoch_ends:
                with meter.paused():
                    scores = evaluate(model, held_out, held_pixels) if due(epoch, config) else None
                if scores:
                    run.log("eval", step, epoch=epoch, **scores.record())
                means = meter.epoch()
                run.log("epoch", step, epoch=epoch, **means)
                screen.epoch(epoch, config.epochs, means, scores)
            if saving:
                with meter.paused():
                    checkpoint.save(run, step, model, optimizer)
                meter.saved()
            if stopping:
                break

    finished = step == total
    if finished:
        scores = scores or evaluate(model, held_out, held_pixels)  # none yet if it was finished before
        model.save(run.model)
    run.status("finished" if finished else "stopped", step, total=total)
    return Result(finished, step, meter.seconds, scores)


def introduce(run: Run, config: TrainConfig, setup: Setup, step: int) -> None:
    """What the run is, where it runs and why there. Written once the checkpoint, if any, is known to fit."""
    machine = {
        **sensors.machine(),
        "torch": torch.__version__,
        "device": str(setup.device),
        "why": setup.why,
        "cpu_threads": torch.get_num_threads(),
        "m1clip": __version__,
    }
    write_whole(run.path / "config.json", to_json(config))
    run.write("machine.json", machine)
    run.log("event", step, event="resume" if step else "start")
    run.status("running", step)


def captions(pairs: Pairs) -> Iterator[str]:
    return (caption for row in range(len(pairs)) for caption in pairs.captions(row))


def due(epoch: int, config: TrainConfig) -> bool:
    return epoch % config.eval_every == 0 or epoch == config.epochs


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> float:
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def evaluate(model: CLIP, pairs: Pairs, pictures: Pixels) -> Retrieval:
    model.eval()
    scores = retrieval(*embed_pairs(model, pairs, pictures))
    model.train()
    return scores


def refuse_non_finite(values: dict[str, float], step: int, run: Run) -> None:
    for name in STATS:
        if not math.isfinite(values[name]):
            where = checkpoint.last_good(run)
            raise FloatingPointError(f"{name} is {values[name]} at step {step}; {where}. Try a lower --lr")


def facts(run: Run, setup: Setup, model: CLIP, step: int, total: int) -> dict[str, str]:
    """What a person wants to know before it starts."""
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    return {
        "run": f"{run.path}, {f'step {step:,} of ' if step else ''}{total:,} steps",
        "device": f"{setup.device}: {setup.why}; {torch.get_num_threads()} CPU threads",
        "model": f"{millions:.2f} M parameters, pictures of {model.config.vision.image_size} px",
        "data": f"{len(setup.pairs):,} pairs to learn from, {len(setup.held_out):,} held out",
        "captions": reading(setup.tokenizer, setup.pairs, model.config.text.length),
    }


def reading(tokenizer: Tokenizer, pairs: Pairs, length: int) -> str:
    """How long captions are in tokens, from the first thousand, and whether the model sees all of them."""
    lengths = tokenizer.lengths(list(islice(captions(pairs), 1000)))
    cut = sum(one > length for one in lengths) / len(lengths)
    words = f"{len(tokenizer):,} kinds of token, up to {max(lengths)} a caption"
    return words + (f"; the model reads {length}, so {cut:.0%} are cut short" if cut else "")
