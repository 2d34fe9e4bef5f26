"""Wall time to a validation score on this machine: m1clip, open_clip and transformers on the same data.

    python benchmarks/race.py flickr8k:DIR [--minutes 20] [--seeds 3] [--only NAME …] [--out DIR]

Needs m1clip[bench]. Two tracks. *scratch*: open_clip's trainer with its defaults and tuned, transformers'
CLIPModel in its Trainer, tuned, and `m1clip train --budget`. *pretrained*: the same frozen EfficientNet-lite0
and MiniLM for all: a plain loop that encodes every batch again, transformers' VisionTextDualEncoder, and
`--recipe frozen`.

One trainer runs at a time, all with the same number of threads; seeds are the outer loop, so that a slow hour
affects all alike. Time is wall time from the start of the process: imports, decoding, saving and our own
evaluations count. The peers' images are prepared beforehand in the size of their model, which does not count;
ours are decoded from the originals within the time, with an empty cache. The peers' scores come from weights
saved at chosen times; ours are the logged ones, and the last is that of the saved model. The length of a
peer's schedule is set by a one-minute trial, so that it ends with the time too.

Results are stored in results.json, and an interrupted race continues.
"""

import csv
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from finetune import encoder_flags, mean_score, run_with_peak_memory
from peers import list_snapshots
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from m1clip.config import Preprocess, TrainConfig, from_json
from m1clip.data.splits import open_sources, open_splits
from m1clip.model.clip import load
from m1clip.training.step import TrainState, train_step
from m1clip.training.timing import random_batch

PEERS = str(Path(__file__).parent / "peers.py")
TRIAL_S = 60.0
SCHEDULE_MARGIN = 0.97  # of the extrapolated steps, so that a peer's schedule ends in time
CAPTION_TOKENS = 14  # typical
RETAIN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
"""What m1clip sets for glibc by itself. Without it the peers' convolutions take three times as long."""
SNAPSHOT_MINUTES = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 12.5, 15, 17.5)
Result = dict[str, Any]


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Data spec, such as flickr8k:DIR; scores are those of the validation split."""
    minutes: float = 20.0
    seeds: int = 3
    """Seeds of m1clip; peers run with one."""
    track: Literal["both", "scratch", "pretrained"] = "both"
    only: tuple[str, ...] = ()
    """Names of trainers; default all."""
    threads: int = os.cpu_count() or 1
    out: Path = Path("bench/race")


@dataclass(frozen=True)
class Entry:
    name: str
    track: str
    peer: str = ""
    """A key of PEERS in peers.py; empty for m1clip."""
    image_size: int = 0
    """Size of the JPEGs prepared for a peer."""
    flags: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    batch_size: int = 64
    length_flag: str = ""
    """The flag with the number of steps of its schedule; `rows` if only the length of its table sets it."""
    argv: tuple[str, ...] = ()
    """Flags of `m1clip train`."""


IMAGES = {"image_size": 64, "patch_size": 16}
OPEN_CLIP_NANO: dict[str, Any] = {
    "embed_dim": 128,
    "vision_cfg": {**IMAGES, "layers": 4, "width": 128, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 2},
}
TRANSFORMERS_NANO: dict[str, Any] = {
    "projection_dim": 128,
    "vision_config": {
        **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2},
        **IMAGES,
    },
    "text_config": {
        **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"max_position_embeddings": 32, "vocab_size": 49408, "eos_token_id": 49407},
    },
}


def entries(args: Args) -> list[Entry]:
    """docs/benchmarks.md describes how the tuned settings were chosen."""
    workers = args.threads
    trainer = {"dataloader_num_workers": workers, "adam_beta2": 0.98, "warmup_steps": 0.1}  # a fraction
    augmentation = {"aug-cfg": "scale=(0.4,1.0) color_jitter=(0.2,0.2,0.2,0.05) color_jitter_prob=0.8"}
    return [
        Entry(f"m1clip, {args.minutes:g} minutes", "scratch", argv=("--budget", f"{args.minutes:g}m")),
        Entry("m1clip, 2 minutes", "scratch", argv=("--budget", "2m")),
        Entry(
            "open_clip, tuned",
            "scratch",
            "open_clip",
            image_size=80,
            flags={"batch-size": 256, "lr": 1e-3, "wd": 0.3, "warmup": 100, "workers": workers, **augmentation},
            shape=OPEN_CLIP_NANO,
            batch_size=256,
            length_flag="rows",
        ),
        Entry(
            "transformers, tuned",
            "scratch",
            "transformers",
            image_size=80,
            flags={"per_device_train_batch_size": 128, "learning_rate": 1e-3, "weight_decay": 0.1, **trainer},
            shape=TRANSFORMERS_NANO,
            batch_size=128,
            length_flag="max_steps",
        ),
        Entry(
            "open_clip, defaults", "scratch", "open_clip", image_size=256, flags={"workers": 4}, model="ViT-S-32-alt"
        ),
        Entry("m1clip, frozen", "pretrained", argv=(*encoder_flags(), "--recipe", "frozen")),
        Entry(
            "re-encoding loop",
            "pretrained",
            "re-encoding loop",
            image_size=256,
            flags={"batch_size": 64, "lr": 1e-3, "wd": 0.1, "workers": workers},
            length_flag="steps",
        ),
        Entry(
            "transformers, dual encoder",
            "pretrained",
            "dual encoder",
            image_size=256,
            flags={"per_device_train_batch_size": 64, "learning_rate": 1e-3, "weight_decay": 0.1, **trainer},
            length_flag="max_steps",
        ),
    ]


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "results.json"
    results: list[Result] = json.loads(path.read_text()) if path.exists() else []
    for seed in range(args.seeds):
        for entry in entries(args):
            is_selected = args.track in ("both", entry.track) and (not args.only or entry.name in args.only)
            is_done = any(row["name"] == entry.name and row["seed"] == seed for row in results)
            if not is_selected or is_done or (seed and entry.peer):
                continue
            print(f"{entry.name}, seed {seed} …", flush=True)
            try:
                result = run_peer(entry, seed, args) if entry.peer else run_m1clip(entry, seed, args)
            except (RuntimeError, ValueError, LookupError) as error:  # the others continue
                print(error, flush=True)
                continue
            results.append(result)
            path.write_text(json.dumps(results, indent=1))
            print(f"  {result['points'][-1]}  {result['memory_gb']} GB", flush=True)
    for track in ("scratch", "pretrained"):
        rows = [row for row in results if row["track"] == track]
        if rows:
            plot(rows, args.out / f"{track}.png", args.minutes)
            print(f"\n{track}\n\n{table(rows, args.minutes)}")


def run_m1clip(entry: Entry, seed: int, args: Args) -> Result:
    """`m1clip train` from the original images with an empty cache; scores and times come from its log."""
    folder = new_folder(args, entry, seed)
    argv = ["train", "--data", args.data, "--runs", str(folder), "--name", "run", "--seed", str(seed)]
    argv += ["--device", "cpu", "--threads", str(args.threads), "--json", *entry.argv]
    start = time.time()
    memory_gb, stdout = run_with_peak_memory(
        [sys.executable, "-m", "m1clip", *argv], {"M1CLIP_CACHE": str(folder / "cache")}
    )
    wall_s, final = time.time() - start, json.loads(stdout.splitlines()[-1])
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first_step_s = min(record["time"] for record in records if record["kind"] == "step") - start
    scored = [(record["time"] - start, record) for record in records if record["kind"] == "eval"]
    config = from_json(TrainConfig, folder / "run" / "config.json")
    steps = json.loads((folder / "run" / "status.json").read_text())["step"]
    shutil.rmtree(folder / "cache", ignore_errors=True)
    points = [
        {"seconds": round(seconds, 1), "score": mean_score(record)} for seconds, record in [*scored, (wall_s, final)]
    ]
    return {
        **{"name": entry.name, "track": entry.track, "seed": seed, "wall_s": round(wall_s, 1)},
        **{"points": points, "first_step_s": round(first_step_s, 1), "memory_gb": memory_gb},
        "pairs": steps * config.batch_size,
        "tflop": m1clip_gflop(folder / "run", config, steps) / 1e3,
    }


def m1clip_gflop(run: Path, config: TrainConfig, steps: int) -> float:
    """Matmuls and convolutions of all steps, the optimizer's too; if frozen, of encoding and the heads."""
    model = load(run / "model")
    if config.recipe != "frozen":
        batch = random_batch(config, config.batch_size, CAPTION_TOKENS)
        state = TrainState(model.train(), config)
        return steps * count_gflop(lambda: train_step(state, batch))
    size = model.config.vision.image_size
    with torch.inference_mode():
        image = count_gflop(lambda: model.vision(torch.zeros(1, 3, size, size)))
        tokens = model.tokenize("a dog runs over the grass after a red ball")
        caption = count_gflop(lambda: model.text(tokens))
    projections = [weight for name, weight in model.named_parameters() if "projection" in name]
    heads = sum(weight.numel() for weight in projections) * 2 / 1e9
    data = json.loads((run / "data.json").read_text())
    images, captions = data["train"] * data["views"] + data["val"], data["rows"]
    return images * image + captions * caption + 3 * steps * config.batch_size * heads


def count_gflop(call: Callable[[], Any]) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return float(counter.get_total_flops() / 1e9)


def run_peer(entry: Entry, seed: int, args: Args) -> Result:
    """A short trial that sets the length of the schedule, then the run, then the scores of its snapshots."""
    folder, seconds = new_folder(args, entry, seed), args.minutes * 60
    files, flags = prepare_files(args, entry.image_size), dict(entry.flags)
    settings = {"shape": entry.shape, "model": entry.model, "flags": flags}
    job = {"peer": entry.peer, **files, "threads": args.threads, "seed": seed, "settings": settings}

    def write_job(name: str, seconds: float, snapshot_s: tuple[float, ...]) -> str:
        out, path = folder / name, folder / f"{name}.json"
        out.mkdir(parents=True)
        path.write_text(json.dumps({**job, "out": str(out), "seconds": seconds, "snapshot_s": snapshot_s}))
        return str(path)

    def train(path: str) -> float:
        return run_with_peak_memory([sys.executable, PEERS, "train", path], RETAIN_FREED_MEMORY)[0]

    if entry.length_flag:
        set_schedule(entry, files, job, 3_000, folder)
        train(write_job("trial", TRIAL_S, (TRIAL_S / 2,)))
        snapshots = list_snapshots(str(folder / "trial"))
        last_s, last_steps, _ = snapshots[-1]
        first_s, first_steps = snapshots[0][:2] if len(snapshots) > 1 else (0.0, 0)
        steps_per_s = (last_steps - first_steps) / (last_s - first_s)
        steps = first_steps + steps_per_s * (seconds - first_s)
        set_schedule(entry, files, job, int(SCHEDULE_MARGIN * steps), folder)
    minutes = (minute for minute in SNAPSHOT_MINUTES if minute < args.minutes)
    path = write_job("run", seconds, tuple(60 * minute for minute in minutes))
    memory_gb = train(path)
    _, stdout = run_with_peak_memory([sys.executable, PEERS, "score", path])
    scores = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    steps = scores[-1]["steps"]
    if flags.get(entry.length_flag, 0) > steps:
        print(f"  its schedule was not finished: step {steps} of {flags[entry.length_flag]}", flush=True)
    factor = 1.0 if entry.track == "pretrained" else 3.0  # frozen towers have no backward pass
    pairs = steps * entry.batch_size
    return {
        **{"name": entry.name, "track": entry.track, "seed": seed, "wall_s": scores[-1]["seconds"]},
        "points": [{"seconds": row["seconds"], "score": mean_score(row)} for row in scores],
        **{"memory_gb": memory_gb, "pairs": pairs, "flags": flags},
        "tflop": factor * pairs * scores[-1]["forward_gflop"] / 1e3,
    }


def set_schedule(entry: Entry, files: dict[str, str], job: dict[str, Any], steps: int, folder: Path) -> None:
    """Set the number of steps. open_clip counts epochs: it gets one, of a table that repeats the rows."""
    flags = job["settings"]["flags"]
    if entry.length_flag != "rows":
        flags[entry.length_flag] = steps
        return
    header, *rows = Path(files["train"]).read_text().strip().split("\n")
    rng, count = random.Random(0), steps * entry.batch_size
    repeated = [row for _ in range(-(-count // len(rows))) for row in rng.sample(rows, len(rows))]
    job["train"] = str(folder / "rows.tsv")
    Path(job["train"]).write_text("\n".join([header, *repeated[:count]]) + "\n")
    flags["epochs"] = 1


def new_folder(args: Args, entry: Entry, seed: int) -> Path:
    """Empty, with an absolute path: trainers change their working directory."""
    name = f"{entry.name.replace(',', '').replace(' ', '-')}-{seed}"
    folder = args.out.absolute() / "runs" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def prepare_files(args: Args, image_size: int) -> dict[str, str]:
    """Both splits as files for the peers: JPEGs of one size, a table for training, a list for validation."""
    folder = args.out.absolute() / f"images-{image_size}"
    files = {"train": str(folder / "train.tsv"), "val": str(folder / "val.json")}
    if Path(files["val"]).exists():
        return files
    config = TrainConfig(data=args.data)
    data = open_splits(open_sources(config), config, Preprocess(image_size), Preprocess(image_size))
    rows: dict[str, list[tuple[str, list[str]]]] = {"train": [], "val": []}
    for name, split in (("train", data.train), ("val", data.val)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for row in range(len(split)):
            path = folder / name / f"{row}.jpg"
            _, images_NHWC = split.take(np.array([row]))
            Image.fromarray(images_NHWC[0]).save(path, quality=95, subsampling=0)
            rows[name].append((str(path), list(split.captions(row))))
    with open(files["train"], "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t")
        writer.writerow(("filepath", "title"))
        writer.writerows((path, caption) for path, captions in rows["train"] for caption in captions)
    Path(files["val"]).write_text(json.dumps(rows["val"]))
    return files


def best_score(result: Result, seconds: float) -> float | None:
    """The best score up to a time; None before the first evaluation."""
    scores = [point["score"] for point in result["points"] if point["seconds"] <= 1.03 * seconds]
    return max(scores, default=None)


def time_to_score(result: Result, score: float) -> float | None:
    return next((point["seconds"] for point in result["points"] if point["score"] >= score), None)


def table(results: list[Result], minutes: float) -> str:
    """One row per trainer; with several seeds the mean and the range."""
    names = list(dict.fromkeys(result["name"] for result in results))
    times = [m for m in (2, 5, 10, 20) if m <= minutes] or [minutes]
    columns = ["trainer", *(f"{m:g} min" for m in times), "memory", "pairs", "TFLOP"]
    peers = [result for result in results if not result["name"].startswith("m1clip")]
    columns += [f"time to {peer['name']}'s best" for peer in peers]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in names:
        seeds = [result for result in results if result["name"] == name]
        cells = [mean_and_range([best_score(row, 60 * m) for row in seeds], "{:.1f}") for m in times]
        cells.append(mean_and_range([row["memory_gb"] for row in seeds], "{:.1f} GB"))
        cells.append(mean_and_range([row["pairs"] / 1e3 for row in seeds], "{:,.0f} k"))
        cells.append(mean_and_range([row["tflop"] for row in seeds], "{:.3g}"))
        for peer in peers:
            best = max(point["score"] for point in peer["points"])
            cells.append(mean_and_range([time_to_score(row, best) for row in seeds], "{:.0f} s"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean_and_range(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = form.format(sum(known) / len(known))
    if len(values) == 1:
        return mean
    never = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return f"{mean} ({form.format(min(known))} to {form.format(max(known))}{never})"


def plot(results: list[Result], path: Path, minutes: float) -> None:
    """Score over wall time, with a logarithmic time axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(result["name"] for result in results))
    labelled = set[str]()
    for result in results:
        name = result["name"]
        x = [point["seconds"] / 60 for point in result["points"]]
        y = [point["score"] for point in result["points"]]
        is_ours = name.startswith("m1clip")
        style = {"marker": "o" if is_ours else ".", "ms": 4, "lw": 1.8 if is_ours else 1.2}
        axes.plot(x, y, f"C{names.index(name)}", label=None if name in labelled else name, **style)
        labelled.add(name)
    axes.set_xscale("log")
    ticks = [m for m in (0.5, 1, 2, 5, 10, 20, 60) if m <= minutes]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("wall time, minutes")
    axes.set_ylabel("validation score: mean of R@1/5/10, both directions")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
