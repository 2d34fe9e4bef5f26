"""Is it worth it? One training option at a time against the preset as it is, several seeds, one table.

    python benchmarks/merits.py --out /tmp/merits --seeds 0 1 2

Seeds are the outer loop, so every option meets the same state of the machine, and it may be interrupted: what
is done is kept in OUT and not done again. The score is mean R@1 on validation scenes; CPU seconds are those of
the whole process, which other work on the machine disturbs less than the clock.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import fmean

OPTIONS = {
    "as it is": "",
    "AdamW, rate 1e-3": "--optimizer adamw --lr 1e-3",
    "rate 3e-3": "--lr 3e-3",
    "ema 0.99": "--ema 0.99",
    "layer decay 0.8": "--layer-decay 0.8",
    "label smoothing 0.1": "--label-smoothing 0.1",
    "dropout 0.1": "--dropout 0.1",
    "drop a quarter of the tokens": "--patch-dropout 0.25",
    "images from 32 px up": "--start-size 32",
    "the same, a third more epochs": "--start-size 32 --epochs 4",
    "crop 0.6": "--crop-scale 0.6",
    "sigmoid loss": "--model.loss sigmoid",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where runs and results are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--val-size", type=int, default=1000)
    parser.add_argument("--flags", default="", help="more flags for every contestant")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for name in OPTIONS:
            done = args.out / f"{name.replace(' ', '_')}-{seed}.json"
            if not done.exists():
                result = measure(name, seed, args)
                done.write_text(json.dumps(result))
                print(
                    f"seed {seed}  {name:30} {result['mean_r1']:.1%}  {result['cpu_s']:.0f} s",
                    file=sys.stderr,
                )
    table(args)


def measure(name: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "m1clip", "train", "--json", "--runs", str(args.out / "runs")]
    command += ["--epochs", str(args.epochs), "--val-size", str(args.val_size), "--seed", str(seed)]
    words = [*command, *args.flags.split(), *OPTIONS[name].split()]
    output = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(output.stdout), "cpu_s": cpu_s}


def table(args: argparse.Namespace) -> None:
    print("| option | R@1 by seed | mean | against as it is | CPU s |\n|---|---|---|---|---|")
    base: list[float] = []
    for name in OPTIONS:
        files = [args.out / f"{name.replace(' ', '_')}-{seed}.json" for seed in args.seeds]
        rows = [json.loads(file.read_text()) for file in files]
        scores = [100 * row["mean_r1"] for row in rows]
        base = base or scores
        gain = fmean(a - b for a, b in zip(scores, base, strict=True))
        cells = (
            name,
            ", ".join(f"{score:.1f}" for score in scores),
            f"{fmean(scores):.1f} %",
            f"{gain:+.1f}",
            f"{fmean(row['cpu_s'] for row in rows):.0f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
