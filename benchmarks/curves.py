"""The curves of runs as one picture, from their metrics alone (needs matplotlib).

python benchmarks/curves.py runs/a runs/b --out curves.png
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from m1clip.run import Run

SMOOTH = 23


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, (losses, recalls) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for number, path in enumerate(args.runs):
        run, colour = Run(path), f"C{number}"
        steps = [row for row in run.records("step") if row["loss"] is not None]
        evals = list(run.records("eval"))
        per_epoch = evals[-1]["step"] / evals[-1]["epoch"]
        smooth = np.convolve([row["loss"] for row in steps], np.ones(SMOOTH) / SMOOTH, "valid")
        epochs = [row["step"] / per_epoch for row in steps][SMOOTH - 1 :]
        losses.plot(epochs, smooth, colour, label=path.name)
        for way, style, word in (("i2t", "-", "image→text"), ("t2i", "--", "text→image")):
            scores = [100 * row[f"{way}_r10"] for row in evals]
            recalls.plot(
                [row["epoch"] for row in evals], scores, style, color=colour, label=f"{path.name}, {word}"
            )
    losses.axhline(steps[-1]["chance_loss"], color="grey", linestyle=":", label="chance")
    recalls.axhline(1000 * evals[-1]["chance_r1"], color="grey", linestyle=":", label="chance")
    losses.set(xlabel="epoch", ylabel=f"loss, mean of {SMOOTH} steps", ylim=(0, None))
    recalls.set(
        xlabel="epoch",
        ylabel=f"held-out R@10 of {evals[-1]['pictures']:,} pictures, %",
        ylim=(0, None),
    )
    losses.legend(frameon=False, fontsize=8)
    recalls.legend(frameon=False, fontsize=8, loc="center right", bbox_to_anchor=(1, 0.4))
    for axes in (losses, recalls):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
