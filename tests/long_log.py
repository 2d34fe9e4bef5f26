"""Writes the folder of a run with a long log, as a night of training with crashes leaves it."""

import json
import math
import random
from pathlib import Path

START_TIME = 1_790_000_000.0
STEP_MS = 480.0
BLOCKS = [f"{tower}.blocks.{block}" for tower in ("vision", "text") for block in range(4)]
MEMORY_GB = {
    **{"parameters": 0.006, "gradients": 0.006, "optimizer": 0.007, "ema": 0.0, "activations": 0.28},
    **{"batch": 0.003, "libraries": 0.62, "data": 0.15, "allocator": 0.128},
}


def write_run(
    folder: Path,
    steps: int = 100_000,
    gap: tuple[int, int] = (40_000, 42_000),
    nan_steps: tuple[int, ...] = (30_000, 30_001, 55_555),
    repeated_from: int | None = 70_000,
    partial_line: bool = True,
    seed: int = 0,
    watts: float | None = None,
) -> Path:
    """A dead run. The steps of `gap` are missing, 1,000 steps from `repeated_from` on are there twice, one
    line is not JSON, one has a bare NaN, and the last line is incomplete."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    config = {"preset": "nano", "data": "synthetic:12000", "epochs": 100, "batch_size": 256, "seed": seed}
    machine = {"chip": "a chip", "device": "cpu", "why": "it is a test"}
    status = {"state": "running", "step": steps, "total": steps, "pid": 1, "host": "h", "time": START_TIME}
    status |= {"best_metric": "mean_r1", "best_score": 0.9}
    for name, content in (("config", config), ("machine", machine), ("status", status)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    order = [step for step in range(1, steps + 1) if not gap[0] <= step < gap[1]]
    if repeated_from is not None:
        repeated = [step for step in order if repeated_from <= step < repeated_from + 1000]
        end = order.index(repeated_from + 1000) if repeated_from + 1000 in order else len(order)
        order = order[:end] + repeated + order[end:]
    with open(folder / "metrics.jsonl", "w") as file:
        write_record(file, "event", 0, event="start", skipped_rows=0, rows=12_240)
        for count, step in enumerate(order):
            write_step(file, step, steps, None if step in nan_steps else rng.gauss(0, 0.05))
            if step % 50 == 0:
                write_diagnostics(file, step, rng, watts)
            if step % 1000 == 0:
                write_eval(file, step, steps, watts)
            if count == len(order) // 3:
                file.write("this is not JSON\n")
                file.write(f'{{"kind": "step", "step": {step}, "loss": NaN, "step_ms": 1}}\n')
        write_record(file, "event", steps, event="diagnosis", about="throttling", text="steps take 1.5x as long")
        if partial_line:
            file.write('{"kind": "step", "step": 100001, "lo')
    return folder


def write_record(file, kind, step, **values):
    time = START_TIME + step * STEP_MS / 1e3
    file.write(json.dumps({"kind": kind, "step": step, "time": time, **values}) + "\n")


def write_step(file, step, steps, noise):
    """`noise` None is a skipped step with a non-finite loss."""
    loss = None if noise is None else max(0.01, 0.05 + 5.5 * math.exp(-6 * step / steps) + noise)
    accuracy = None if noise is None else min(1.0, max(0.0, 1 - math.exp(-6 * step / steps) + noise / 5))
    values = {
        "loss": loss,
        "accuracy": accuracy,
        "temperature": 0.07 - 0.02 * step / steps,
        "grad_norm": None if noise is None else 1.0 + abs(noise),
        "chance_loss": math.log(256),
        "chance_accuracy": 1 / 256,
        "lr": 3e-3 * (1 - step / steps),
        "image_size": 64,
        "chunk": 256,
        "step_ms": STEP_MS,
        "data_ms": 0.1,
        "copy_ms": 0.2,
        "forward_ms": 150.0,
        "backward_ms": 300.0,
        "optimizer_ms": 29.7,
        "between_ms": 0.3,
        "pairs_per_s": 533.0,
    }
    write_record(file, "step", step, **values, **({"skipped": True, "rows": [1, 2]} if noise is None else {}))


def write_diagnostics(file, step, rng, watts=None):
    norms = {name: 10 ** rng.uniform(-2, 0) for name in (*BLOCKS, "logit_scale")}
    values = {
        "grad_norms": norms,
        "weight_norms": dict.fromkeys(norms, 10.0),
        "alignment": 0.5,
        "uniformity_image": -3.5,
        "uniformity_text": -3.4,
        "modality_gap": 0.3,
        "effective_rank_image": 60.0,
        "effective_rank_text": 55.0,
        "memory_gb": MEMORY_GB,
        "power_w": watts,
        "joules": joules(step, watts),
        "device_gb": None,
        "rss_gb": 1.2,
        "peak_rss_gb": 1.5,
        "available_gb": 20.0,
        "swap_used_gb": 0.0,
        "swapped_out_gb": 0.0,
        "cpu_percent": [97.0, 95.0],
        "temperature_c": None,
        "disk_free_gb": 100.0,
    }
    write_record(file, "diagnostics", step, **values)


def joules(steps, watts):
    return None if watts is None else watts * steps * STEP_MS / 1e3


def write_eval(file, step, steps, watts=None):
    """An evaluation at the end of an epoch of 1,000 steps, and the record of the epoch."""
    epoch, score = step // 1000, 1 - math.exp(-8 * step / steps)
    recalls = {"mean_r1": score, "chance_r1": 1 / 240, "images": 240, "captions": 240}
    for direction in ("i2t", "t2i"):
        for k, factor in ((1, 1.0), (5, 1.2), (10, 1.3)):
            recalls[f"{direction}_r{k}"] = min(1.0, score * factor)
            recalls[f"chance_{direction}_r{k}"] = k / 240
        recalls |= {f"{direction}_median_rank": 1.0, f"chance_{direction}_median_rank": 120.5}
    tiers = {
        name: {"similarity": similarity, "negatives": 9000, "pairwise": score, "first": score, "among": 11}
        for name, similarity in (("easy", 0.1), ("medium", 0.3), ("hard", 0.6))
    }
    write_record(file, "eval", step, epoch=epoch, **recalls, hard_negatives=tiers)
    means = {"loss": 1.0, "accuracy": score, "temperature": 0.06, "seconds": 480.0, "pairs_per_s": 533.0}
    wh = None if watts is None else joules(step, watts) / 3600
    energy = {"joules": joules(1000, watts), "wh_so_far": wh, "mean_r1_per_wh": score / wh if wh else None}
    write_record(file, "epoch", step, epoch=epoch, **means, step_ms=STEP_MS, **energy)
