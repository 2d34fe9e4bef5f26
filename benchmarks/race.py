"""The race: who reaches which validation score, in how much time, on this machine.

    python benchmarks/race.py flickr8k:DIR [--minutes 20] [--seeds 3] [--only NAME …] [--out DIR]

Needs m1clip[bench]. Two tracks. *scratch*: open_clip's own trainer with its defaults and tuned,
transformers' CLIPModel in its Trainer, tuned, and `m1clip train --budget`. *pretrained*: the same frozen
EfficientNet-lite0 and MiniLM for everybody: a plain loop that encodes every batch again, transformers'
VisionTextDualEncoder, and `--recipe locked`.

One contestant at a time has the machine, all with the same number of threads; seeds go round, so that a
slow hour meets everybody. Time is the wall clock from the start of the process: imports, decoding, saving
and our own evaluations count. The peers' images are made ready before, in the size their model wants, and
that is not counted; ours are decoded from the originals within its time, with an empty cache. The peers'
scores are taken afterwards from weights that were kept at chosen minutes; ours are those it logged, and the
last is of the model it kept. The length of the peers' schedules is set by a minute's trial, so that theirs
end with the time too.

What is done is kept in results.json, so an interrupted race goes on.
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
from finetune import encoders, watched
from finetune import score as mean_score
from peers import kept
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from m1clip.config import TrainConfig, from_json
from m1clip.images import Pixels
from m1clip.model.clip import load
from m1clip.training.state import TrainState
from m1clip.training.step import train_step
from m1clip.training.timing import some_batch

PEERS = str(Path(__file__).parent / "peers.py")
TRIAL_S = 60.0
EARLY = 0.97  # of the steps that its trial extrapolates, so that the schedule of a peer is over in time
TOKENS = 14  # of a caption, about
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
"""What m1clip tells glibc: to keep freed memory. Without it the convolutions of peers take thrice as long."""
MARKS = (0.5, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 12.5, 15, 17.5)
Row = dict[str, Any]


@dataclass(frozen=True)
class Args:
    data: Annotated[str, tyro.conf.Positional]
    """Such as flickr8k:DIR; the validation side gives the scores."""
    minutes: float = 20.0
    seeds: int = 3
    """Of ours; the others run with one each, as their spread matters less than their mean is paid for."""
    track: Literal["both", "scratch", "pretrained"] = "both"
    only: tuple[str, ...] = ()
    threads: int = os.cpu_count() or 1
    out: Path = Path("bench/race")


@dataclass(frozen=True)
class Racer:
    name: str
    track: str
    peer: str
    """Of peers.py; empty is ours."""
    side: int = 0
    """Pixels of the images that are made ready for it."""
    flags: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    batch: int = 64
    length: str = ""
    """The flag that says how many steps its schedule has; `rows` where only its table can say so."""
    words: tuple[str, ...] = ()
    """Of our command."""


NANO = {"image_size": 64, "patch_size": 16}
OPEN_CLIP_NANO: Row = {
    "embed_dim": 128,
    "vision_cfg": {**NANO, "layers": 4, "width": 128, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 128, "heads": 2, "layers": 2},
}
CLIP_NANO: Row = {
    "projection_dim": 128,
    "vision_config": {
        **NANO,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
    },
    "text_config": {
        **{"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"max_position_embeddings": 32, "vocab_size": 49408, "eos_token_id": 49407},
    },
}


def racers(args: Args) -> list[Racer]:
    """docs/race.md says by what the settings of the tuned ones were chosen."""
    workers = args.threads
    hf = {"dataloader_num_workers": workers, "adam_beta2": 0.98, "warmup_steps": 0.1}  # a part of all
    seen = {"aug-cfg": "scale=(0.4,1.0) color_jitter=(0.2,0.2,0.2,0.05) color_jitter_prob=0.8"}
    budget = ("--budget", f"{args.minutes:g}m")
    return [
        Racer(f"m1clip, {args.minutes:g} minutes", "scratch", "", words=budget),
        Racer("m1clip, 2 minutes", "scratch", "", words=("--budget", "2m")),
        Racer(
            "open_clip, tuned",
            "scratch",
            "open_clip",
            side=80,
            flags={"batch-size": 256, "lr": 1e-3, "wd": 0.3, "warmup": 100, "workers": workers, **seen},
            shape=OPEN_CLIP_NANO,
            batch=256,
            length="rows",
        ),
        Racer(
            "transformers, tuned",
            "scratch",
            "transformers",
            side=80,
            flags={"per_device_train_batch_size": 128, "learning_rate": 1e-3, "weight_decay": 0.1, **hf},
            shape=CLIP_NANO,
            batch=128,
            length="max_steps",
        ),
        Racer(
            "open_clip, defaults",
            "scratch",
            "open_clip",
            side=256,
            flags={"workers": 4},
            model="ViT-S-32-alt",
        ),
        Racer("m1clip, locked", "pretrained", "", words=(*encoders(), "--recipe", "locked")),
        Racer(
            "re-encoding loop",
            "pretrained",
            "re-encoding loop",
            side=256,
            flags={"batch": 64, "lr": 1e-3, "wd": 0.1, "workers": workers},
            length="steps",
        ),
        Racer(
            "transformers, dual encoder",
            "pretrained",
            "dual encoder",
            side=256,
            flags={"per_device_train_batch_size": 64, "learning_rate": 1e-3, "weight_decay": 0.1, **hf},
            length="max_steps",
        ),
    ]


def main(args: Args) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.json"
    done: list[Row] = json.loads(results.read_text()) if results.exists() else []
    for seed in range(args.seeds):
        for racer in racers(args):
            other = args.track not in ("both", racer.track) or (args.only and racer.name not in args.only)
            ran = any(row["name"] == racer.name and row["seed"] == seed for row in done)
            if other or ran or (seed and racer.peer):
                continue
            print(f"{racer.name}, seed {seed} …", flush=True)
            try:
                row = our_run(racer, seed, args) if not racer.peer else peer_run(racer, seed, args)
            except (RuntimeError, ValueError, LookupError) as error:  # the others go on
                print(error, flush=True)
                continue
            done.append(row)
            results.write_text(json.dumps(done, indent=1))
            print(f"  {row['points'][-1]}  {row['memory_gb']} GB", flush=True)
    for track in ("scratch", "pretrained"):
        rows = [row for row in done if row["track"] == track]
        if rows:
            draw(rows, args.out / f"{track}.png", args.minutes)
            print(f"\n{track}\n\n{table(rows, args.minutes)}")


def our_run(racer: Racer, seed: int, args: Args) -> Row:
    """The command, from the original images, with an empty cache; its log tells what it scored when."""
    home = folder(args, racer, seed)
    words = ["train", "--data", args.data, "--runs", str(home), "--name", "run", "--seed", str(seed)]
    words += ["--device", "cpu", "--threads", str(args.threads), "--json", *racer.words]
    began = time.time()
    memory, out = watched([sys.executable, "-m", "m1clip", *words], {"M1CLIP_CACHE": str(home / "cache")})
    wall, result = time.time() - began, json.loads(out.splitlines()[-1])
    lines = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    first = min(line["time"] for line in lines if line["kind"] == "step") - began
    scored = [(line["time"] - began, line) for line in lines if line["kind"] == "eval"]
    config = from_json(TrainConfig, home / "run" / "config.json")
    shutil.rmtree(home / "cache", ignore_errors=True)
    return {
        **{"name": racer.name, "track": racer.track, "seed": seed, "wall_s": round(wall, 1)},
        "points": [{"seconds": round(s, 1), "score": mean_score(one)} for s, one in [*scored, (wall, result)]],
        **{"ready_s": round(first, 1), "memory_gb": memory, "pairs": result["step"] * config.batch_size},
        "pflop": our_gflop(home / "run", config, result["step"]) / 1e6,
    }


def our_gflop(run: Path, config: TrainConfig, steps: int) -> float:
    """Products of all steps, the optimizer's too; where towers are locked, of encoding and the heads."""
    model = load(run / "model")
    if config.recipe != "locked":
        batch = some_batch(config, config.batch_size, TOKENS)
        state = TrainState(model.train(), config)
        return steps * counted(lambda: train_step(state, batch))
    side = model.config.vision.image_size
    with torch.inference_mode():
        image = counted(lambda: model.vision(torch.zeros(1, 3, side, side)))
        caption = counted(lambda: model.text(model.tokenize("a dog runs over the grass after a red ball")))
    heads = sum(weight.numel() for name, weight in model.named_parameters() if "projection" in name) * 2 / 1e9
    known = json.loads((run / "data.json").read_text())
    looked, told = known["train"] * config.views + known["val"], known["rows"]
    return looked * image + told * caption + 3 * steps * config.batch_size * heads


def counted(work: Callable[[], Any]) -> float:
    """GFLOP of a call."""
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops() / 1e9)


def peer_run(racer: Racer, seed: int, args: Args) -> Row:
    """First a short trial that says how long its schedule has to be; then the run."""
    home, seconds, files = folder(args, racer, seed), args.minutes * 60, ready(args, racer.side)
    flags, batch = dict(racer.flags), racer.batch
    settings = {"shape": racer.shape, "model": racer.model, "flags": flags}
    about = {"peer": racer.peer, **files, "threads": args.threads, "seed": seed, "settings": settings}

    def job(name: str, seconds: float, marks: tuple[float, ...]) -> Path:
        out = home / name
        out.mkdir(parents=True)
        path = home / f"{name}.json"
        path.write_text(json.dumps({**about, "out": str(out), "seconds": seconds, "marks": marks}))
        return path

    if racer.length:
        lengthen(racer, files, about, 3_000, home)
        watched([sys.executable, PEERS, "train", str(job("trial", TRIAL_S, (TRIAL_S / 2,)))], KEEPING)
        *_, (late, more, _) = tried = kept(str(home / "trial"))
        early, few = tried[0][:2] if len(tried) > 1 else (0.0, 0)
        steps = few + (more - few) / (late - early) * (seconds - early)
        lengthen(racer, files, about, int(EARLY * steps), home)
    run = job("run", seconds, tuple(60 * mark for mark in MARKS if mark < args.minutes))
    memory, _ = watched([sys.executable, PEERS, "train", str(run)], KEEPING)
    _, out = watched([sys.executable, PEERS, "score", str(run)])
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if flags.get(racer.length, 0) > lines[-1]["steps"]:
        print(f"  its schedule was not over: {lines[-1]['steps']} steps of {flags[racer.length]}", flush=True)
    factor = 1.0 if racer.track == "pretrained" else 3.0  # frozen towers have no backward pass
    return {
        **{"name": racer.name, "track": racer.track, "seed": seed, "wall_s": lines[-1]["seconds"]},
        "points": [{"seconds": line["seconds"], "score": mean_score(line)} for line in lines],
        **{"memory_gb": memory, "pairs": lines[-1]["steps"] * batch, "flags": flags},
        "pflop": factor * lines[-1]["steps"] * batch * lines[-1]["forward_gflop"] / 1e6,
    }


def lengthen(racer: Racer, files: dict[str, str], about: Row, steps: int, home: Path) -> None:
    """Make its schedule so many steps long. open_clip counts in epochs: it gets one, of a table with the same
    rows as often as is needed, which its loader shuffles."""
    flags = about["settings"]["flags"]
    if racer.length != "rows":
        flags[racer.length] = steps
        return
    head, *rows = Path(files["train"]).read_text().strip().split("\n")
    rng, wanted = random.Random(0), steps * racer.batch
    many = [row for _ in range(-(-wanted // len(rows))) for row in rng.sample(rows, len(rows))]
    about["train"] = str(home / "rows.tsv")
    Path(about["train"]).write_text("\n".join([head, *many[:wanted]]) + "\n")
    flags["epochs"] = 1


def folder(args: Args, racer: Racer, seed: int) -> Path:
    """A new one, absolute: trainers change where they work."""
    home = args.out.absolute() / "runs" / f"{racer.name.replace(',', '').replace(' ', '-')}-{seed}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    return home


def ready(args: Args, side: int) -> dict[str, str]:
    """Both sides as files for the peers: JPEGs of `side` pixels, a table of captions, a list validation."""
    home = args.out.absolute() / f"images-{side}"
    tables = {"train": str(home / "train.tsv"), "val": str(home / "val.json")}
    if not (home / "val.json").exists():
        from m1clip.data.sources import open_sources
        from m1clip.data.splits import open_splits

        config = TrainConfig(data=args.data)
        data = open_splits(open_sources(config), config, side, side)
        found: dict[str, list[tuple[str, list[str]]]] = {}
        for name, pairs in (("train", data.train), ("val", data.val)):
            (home / name).mkdir(parents=True, exist_ok=True)
            found[name] = [
                (
                    write(home / name / f"{row}.jpg", pairs.take(np.array([row]))[1][0]),
                    list(pairs.captions(row)),
                )
                for row in range(len(pairs))
            ]
        with open(tables["train"], "w", newline="") as file:
            table = csv.writer(file, delimiter="\t")
            table.writerow(("filepath", "title"))
            table.writerows((path, caption) for path, some in found["train"] for caption in some)
        (home / "val.json").write_text(json.dumps(found["val"]))
    return tables


def write(path: Path, pixels: Pixels) -> str:
    Image.fromarray(pixels).save(path, quality=95, subsampling=0)
    return str(path)


def best_metric(row: Row, seconds: float) -> float | None:
    """The best score until then; None before the first."""
    until = [point["score"] for point in row["points"] if point["seconds"] <= 1.03 * seconds]
    return max(until, default=None)


def reached(row: Row, score: float) -> float | None:
    """Seconds until a score was first reached."""
    return next((point["seconds"] for point in row["points"] if point["score"] >= score), None)


def table(rows: list[Row], minutes: float) -> str:
    """One line a contestant; of several seeds the mean, and the least and the most."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    times = [m for m in (2, 5, 10, 20) if m <= minutes] or [minutes]
    heads = ["contestant", *(f"{m:g} min" for m in times), "memory", "pairs", "TFLOP"]
    rivals = [row for row in rows if not row["name"].startswith("m1clip")]
    heads += [f"time to {row['name']}'s best" for row in rivals]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in names:
        mine = [row for row in rows if row["name"] == name]
        cells = [spread([best_metric(row, 60 * m) for row in mine], "{:.1f}") for m in times]
        cells.append(spread([row["memory_gb"] for row in mine], "{:.1f} GB"))
        cells.append(spread([row["pairs"] / 1e3 for row in mine], "{:,.0f} k"))
        cells.append(spread([1e3 * row["pflop"] for row in mine], "{:.3g}"))
        for rival in rivals:
            best = max(point["score"] for point in rival["points"])
            cells.append(spread([reached(row, best) for row in mine], "{:.0f} s"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    low, high, mean = min(known), max(known), sum(known) / len(known)
    missing = f", {len(values) - len(known)} never" if len(known) < len(values) else ""
    return form.format(mean) + (f" ({form.format(low)} to {form.format(high)}{missing})" if len(values) > 1 else "")


def draw(rows: list[Row], path: Path, minutes: float) -> None:
    """Score over wall time; the time is logarithmic, as what matters happens early."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    names = list(dict.fromkeys(row["name"] for row in rows))
    for row in rows:
        number = names.index(row["name"])
        x, y = (
            [point[key] / (60 if key == "seconds" else 1) for point in row["points"]] for key in ("seconds", "score")
        )
        label = row["name"] if row["seed"] == min(r["seed"] for r in rows if r["name"] == row["name"]) else None
        ours = row["name"].startswith("m1clip")
        axes.plot(x, y, f"C{number}", marker="o" if ours else ".", ms=4, lw=1.8 if ours else 1.2, label=label)
    axes.set_xscale("log")
    ticks = [m for m in (0.5, 1, 2, 5, 10, 20, 60) if m <= minutes]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("minutes since the command was given")
    axes.set_ylabel("mean of R@1/5/10, both ways, validation")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main(tyro.cli(Args))
