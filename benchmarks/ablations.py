"""Ablations: one training option at a time against the preset's defaults, several seeds, one table.

    python benchmarks/ablations.py --out /tmp/ablations --seeds 0 1 2

Seeds are the outer loop, so that a slow hour of the machine affects all options alike. Results are stored in
OUT, and an interrupted run continues. The score is mean R@1 on validation scenes. CPU seconds are those of
the whole process; other jobs disturb them less than wall time.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

OPTIONS = {
    "baseline": "",
    "AdamW, lr 1e-3": "--optimizer adamw --lr 1e-3",
    "lr 2e-3": "--lr 2e-3",
    "EMA 0.99": "--ema 0.99",
    "label smoothing 0.1": "--label-smoothing 0.1",
    "patch dropout 0.25": "--patch-dropout 0.25",
    "crop scale 0.6": "--crop-scale 0.6",
    "sigmoid loss": "--model.loss sigmoid",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--val-size", type=int, default=1000)
    parser.add_argument("--flags", default="", help="flags added to every run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for option in OPTIONS:
            path = result_path(args.out, option, seed)
            if not path.exists():
                result = train(option, seed, args)
                path.write_text(json.dumps(result))
                progress = f"seed {seed}  {option:24} {result['mean_r1']:.1%}  {result['cpu_s']:.0f} s"
                print(progress, file=sys.stderr)
    print_table(args.out, args.seeds)


def result_path(out: Path, option: str, seed: int) -> Path:
    return out / f"{option.replace(' ', '_')}-{seed}.json"


def train(option: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "m1clip", "train", "--json", "--runs", str(args.out / "runs")]
    command += ["--epochs", str(args.epochs), "--val-size", str(args.val_size), "--seed", str(seed)]
    command += [*args.flags.split(), *OPTIONS[option].split()]
    process = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(process.stdout), "cpu_s": cpu_s}


def print_table(out: Path, seeds: list[int]) -> None:
    print("| option | R@1 by seed | mean | change | CPU s |\n|---|---|---|---|---|")
    baseline: list[float] = []
    for option in OPTIONS:
        results = [json.loads(result_path(out, option, seed).read_text()) for seed in seeds]
        scores = [100 * result["mean_r1"] for result in results]
        baseline = baseline or scores
        change = fmean(score - base for score, base in zip(scores, baseline, strict=True))
        cells = (
            option,
            ", ".join(f"{score:.1f}" for score in scores),
            f"{fmean(scores):.1f} %",
            f"{change:+.1f}",
            f"{fmean(result['cpu_s'] for result in results):.0f}",
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
