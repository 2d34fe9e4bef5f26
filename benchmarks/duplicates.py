"""Are false negatives worth masking? Scenes told by one word or two, so that batches are full of duplicates.

    python benchmarks/duplicates.py --out /tmp/duplicates --seeds 0 1

Trains `nano` on the same images with and without the mask, and scores how many validation images find their
words among all that occur.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from m1clip import run as runs
from m1clip.config import get_preset
from m1clip.console import Console
from m1clip.data.rows import BadRows
from m1clip.data.splits import Split, open_part
from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.evals.embed import embed_captions, embed_images
from m1clip.model.clip import load
from m1clip.training import loop
from m1clip.training.setup import check


@dataclass(frozen=True)
class Labelled(SyntheticScenes):
    """The same images, of which only the subject, or its color too, is told."""

    words: int = 1

    def captions(self, index: int) -> list[str]:
        look = self.look(index)
        return [f"a {look.color} {look.subject}" if self.words == 2 else f"a {look.subject}"]

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        return iter(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--words", type=int, choices=[1, 2], default=1, help="told of each image")
    args = parser.parse_args()
    print("| mask_duplicates | seed | right words | chance |\n|---|---|---|---|")
    for seed in args.seeds:
        for mask in (True, False):
            right, kinds = measure(args, seed, mask)
            print(f"| {mask} | {seed} | {right:.1%} | {1 / kinds:.1%} |", flush=True)


def measure(args: argparse.Namespace, seed: int, mask: bool) -> tuple[float, int]:
    config = replace(get_preset("nano"), seed=seed, epochs=args.epochs, count_duplicates=not mask)
    pairs = Labelled(12000, seed, words=args.words), Labelled(1000, seed, "val", words=args.words)
    console, size = Console(), config.model.vision.image_size
    train, val = (Split([open_part(one, size, config, BadRows(), console.working)]) for one in pairs)
    setup = check(config, args.out, None, console)
    setup = replace(setup, data=replace(setup.data, train=train, val=val))
    run = runs.create(args.out, f"{args.words}-{mask}-{seed}", "nano", overwrite=False)
    with run.owned():
        loop.train(setup, run, console)
    model = load(run.path)
    words = sorted({caption for row in range(len(val)) for caption in val.captions(row)})
    image_NE = embed_images(model, val)
    chosen = (image_NE @ embed_captions(model, words).T).argmax(1).tolist()
    right = sum(words[word] in val.captions(row) for row, word in enumerate(chosen))
    return right / len(chosen), len(words)


if __name__ == "__main__":
    main()
