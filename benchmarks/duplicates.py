"""What masking false negatives gains: scenes with captions of one or two words, so that batches are full of duplicates.

    python benchmarks/duplicates.py --out /tmp/duplicates --seeds 0 1

Trains `nano` on the same images with and without the mask, and counts the validation images whose own caption scores
highest among all captions.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from m1clip.config import Preprocess, get_preset
from m1clip.console import Console
from m1clip.data.batches import BatchStream
from m1clip.data.index import BadRows
from m1clip.data.splits import open_eval_split
from m1clip.data.synthetic import SyntheticScenes
from m1clip.evals.evaluate import embed_captions, embed_split_images
from m1clip.model.clip import load
from m1clip.run import create_run
from m1clip.training import loop
from m1clip.training.setup import prepare


@dataclass(frozen=True)
class LabeledScenes(SyntheticScenes):
    """The same images with the subject, or its color and subject, as caption."""

    words: int = 1

    def captions(self, index: int) -> list[str]:
        scene = self.scene(index)
        return [f"a {scene.color} {scene.subject}" if self.words == 2 else f"a {scene.subject}"]

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        return iter(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--words", type=int, choices=[1, 2], default=1, help="words per caption")
    args = parser.parse_args()
    print("| mask_duplicates | seed | accuracy | chance |\n|---|---|---|---|")
    for seed in args.seeds:
        for mask in (True, False):
            accuracy, labels = measure(args, seed, mask)
            print(f"| {mask} | {seed} | {accuracy:.1%} | {1 / labels:.1%} |", flush=True)


def measure(args: argparse.Namespace, seed: int, mask: bool) -> tuple[float, int]:
    """Zero-shot accuracy and the number of labels."""
    config = replace(get_preset("nano"), seed=seed, epochs=args.epochs)
    console, size = Console(), config.model.vision.image_size
    train, val = (
        open_eval_split([pairs], Preprocess(size), config, BadRows(), console.progress)
        for pairs in (LabeledScenes(12000, seed, words=args.words), LabeledScenes(1000, seed, "val", args.words))
    )
    setup = prepare(config, {}, args.out, None, console, time.monotonic(), is_final=True)
    setup = replace(setup, splits=replace(setup.splits, train=train, val=val))
    loop.BatchStream = partial(BatchStream, mask_duplicates=mask)  # type: ignore[misc, assignment]
    run = create_run(args.out, f"{args.words}-{mask}-{seed}", "nano", overwrite=False)
    with run.locked():
        loop.fit(setup, run, console)
    model = load(run.path)
    labels = sorted({caption for row in range(len(val)) for caption in val.captions(row)})
    best = (embed_split_images(model, val) @ embed_captions(model, labels).T).argmax(1).tolist()
    correct = sum(labels[label] in val.captions(row) for row, label in enumerate(best))
    return correct / len(best), len(labels)


if __name__ == "__main__":
    main()
