"""Are false negatives worth masking? Scenes told by one word or two, so that batches are full of twins.

    python benchmarks/twins.py --out /tmp/twins --seeds 0 1

Trains `nano` on the same pictures with and without the mask, and scores how many held-out pictures find their
words among all that occur.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from m1clip import run as runs
from m1clip.config import preset
from m1clip.console import Screen
from m1clip.data.rows import Faults
from m1clip.data.splits import Side, open_part
from m1clip.data.synthetic.scenes import Synthetic
from m1clip.evals.embed import embed_captions, embed_pictures
from m1clip.model.clip import load
from m1clip.training import loop
from m1clip.training.setup import check


@dataclass(frozen=True)
class Labelled(Synthetic):
    """The same pictures, of which only the subject, or its colour too, is told."""

    words: int = 1

    def captions(self, index: int) -> list[str]:
        look = self.look(index)
        return [f"a {look.colour} {look.subject}" if self.words == 2 else f"a {look.subject}"]

    def edits(self, index: int) -> Iterator[tuple[str, str]]:
        return iter(())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--words", type=int, choices=[1, 2], default=1, help="told of each picture")
    args = parser.parse_args()
    print("| mask_twins | seed | right words | chance |\n|---|---|---|---|")
    for seed in args.seeds:
        for mask in (True, False):
            right, kinds = measure(args, seed, mask)
            print(f"| {mask} | {seed} | {right:.1%} | {1 / kinds:.1%} |", flush=True)


def measure(args: argparse.Namespace, seed: int, mask: bool) -> tuple[float, int]:
    config = replace(preset("nano"), seed=seed, epochs=args.epochs, count_twins=not mask)
    pairs = Labelled(12000, seed, words=args.words), Labelled(1000, seed, "held-out", words=args.words)
    screen, size = Screen(), config.model.vision.image_size
    train, held_out = (Side([open_part(one, size, config, Faults(), screen.working)]) for one in pairs)
    setup = check(config, args.out, None, screen)
    setup = replace(setup, data=replace(setup.data, train=train, held_out=held_out))
    run = runs.create(args.out, f"{args.words}-{mask}-{seed}", "nano", fresh=False)
    with run.owned():
        loop.train(setup, run, screen)
    model = load(run.path)
    words = sorted({caption for row in range(len(held_out)) for caption in held_out.captions(row)})
    image_NE = embed_pictures(model, held_out)
    chosen = (image_NE @ embed_captions(model, words).T).argmax(1).tolist()
    right = sum(words[word] in held_out.captions(row) for row, word in enumerate(chosen))
    return right / len(chosen), len(words)


if __name__ == "__main__":
    main()
