"""A run that never was: a folder with a long log, as a night and some accidents leave it."""

import json
import math
import random
from pathlib import Path

START = 1_790_000_000.0
MS = 480.0


def write_run(
    folder: Path,
    steps: int = 100_000,
    gap: tuple[int, int] = (40_000, 42_000),
    nan_at: tuple[int, ...] = (30_000, 30_001, 55_555),
    again_from: int | None = 70_000,
    half: bool = True,
    seed: int = 0,
) -> Path:
    """`gap` has no lines; the steps from `again_from` on, a thousand of them, stand there twice, as after a
    restart; the last line is half written; a line in the middle is no JSON, and one holds a bare NaN."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    config = {"preset": "nano", "data": "synthetic:12000", "epochs": 100, "batch": 256, "seed": seed}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "machine.json").write_text(json.dumps({"chip": "a chip", "device": "cpu", "why": "it is a test"}))
    status = {"state": "running", "step": steps, "total": steps, "pid": 1, "host": "h", "time": START}
    (folder / "status.json").write_text(json.dumps(status | {"best_metric": "mean_r1", "best_score": 0.9}))
    order = [step for step in range(1, steps + 1) if not gap[0] <= step < gap[1]]
    if again_from is not None:
        at = order.index(again_from + 1000) if again_from + 1000 in order else len(order)
        order = order[:at] + [step for step in order if again_from <= step < again_from + 1000] + order[at:]
    with open(folder / "metrics.jsonl", "w") as file:
        put(file, "event", 0, event="start", skipped_rows=0, of_rows=12_240)
        for count, step in enumerate(order):
            write_step(file, step, steps, None if step in nan_at else rng.gauss(0, 0.05))
            if step % 50 == 0:
                write_watch(file, step, rng)
            if step % 1000 == 0:
                write_eval(file, step, steps)
            if count == len(order) // 3:
                file.write("this is no JSON\n")
                file.write(f'{{"kind": "step", "step": {step}, "loss": NaN, "step_ms": 1}}\n')
        put(file, "event", steps, event="diagnosis", about="throttling", text="steps take 1.5 times as long")
        if half:
            file.write('{"kind": "step", "step": 100001, "lo')
    return folder


def put(file, kind, step, **values):
    file.write(json.dumps({"kind": kind, "step": step, "time": START + step * MS / 1e3, **values}) + "\n")


def write_step(file, step, steps, noise):
    loss = None if noise is None else max(0.01, 0.05 + 5.5 * math.exp(-6 * step / steps) + noise)
    right = None if noise is None else min(1.0, max(0.0, 1 - math.exp(-6 * step / steps) + noise / 5))
    values = {
        "loss": loss,
        "accuracy_image": right,
        "accuracy_text": right,
        "temperature": 0.07 - 0.02 * step / steps,
        "grad_norm": None if noise is None else 1.0 + abs(noise),
        "accuracy": right,
        "chance_loss": math.log(256),
        "chance_accuracy": 1 / 256,
        "lr": 3e-3 * (1 - step / steps),
        "side": 64,
        "chunk": 256,
        "step_ms": MS,
        "wait_ms": 0.1,
        "copy_ms": 0.2,
        "forward_ms": 150.0,
        "backward_ms": 300.0,
        "optimizer_ms": 29.7,
        "between_ms": 0.3,
        "pairs_per_s": 533.0,
    }
    put(file, "step", step, **values, **({"skipped": True, "rows": [1, 2]} if noise is None else {}))


def write_watch(file, step, rng):
    blocks = [f"{tower}.blocks.{n}" for tower in ("vision", "text") for n in range(4)]
    norms = {name: 10 ** rng.uniform(-2, 0) for name in (*blocks, "logit_scale")}
    values = {
        "grad_norms": norms,
        "weight_norms": dict.fromkeys(norms, 10.0),
        "alignment": 0.5,
        "uniformity_image": -3.5,
        "uniformity_text": -3.4,
        "modality_gap": 0.3,
        "effective_rank_image": 60.0,
        "effective_rank_text": 55.0,
        "memory_gb": {"weights": 0.006, "gradients": 0.006, "moments": 0.006, "activations": 0.28},
        "power_w": None,
        "joules": None,
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
    put(file, "logger", step, **values)


def write_eval(file, step, steps):
    epoch = step // 1000
    score = 1 - math.exp(-8 * step / steps)
    ways = {
        f"{way}_{key}": min(1.0, score * more)
        for way in ("i2t", "t2i")
        for key, more in (("r1", 1), ("r5", 1.2), ("r10", 1.3))
    }
    ranks = {"i2t_median_rank": 1.0, "t2i_median_rank": 1.0}
    sizes = {"mean_r1": score, "chance_r1": 1 / 240, "images": 240, "captions": 240}
    tiers = {
        name: {"similarity": alike, "negatives": 9000, "pairwise": score, "first": score, "among": 11}
        for name, alike in (("easy", 0.1), ("medium", 0.3), ("hard", 0.6))
    }
    put(file, "eval", step, epoch=epoch, **ways, **ranks, **sizes, negatives=tiers)
    means = {"loss": 1.0, "accuracy": score, "temperature": 0.06, "seconds": 480.0, "pairs_per_s": 533.0}
    phases = {"wait_ms": 0.1, "copy_ms": 0.2, "forward_ms": 150.0, "backward_ms": 300.0, "optimizer_ms": 29.7}
    put(file, "epoch", step, epoch=epoch, **means, **phases, step_ms=MS, joules=None)
