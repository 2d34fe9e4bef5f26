"""How fast pairs come, by every way they can, alone and in front of a training step.

    python benchmarks/data.py --flickr8k DIR --out /tmp/data

Ours: from the cache, with and without augmentation; live from JPEG files; live from JPEG shards. Theirs:
open_clip's own CsvDataset, transform and tokenizer in a torch DataLoader. Contestants take turns; medians of
all rounds. The step is that of `nano` on 256 pairs; theirs is spared the normalising of pixels in the loader.
"""

import argparse
import csv
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from m1clip import devices
from m1clip.config import TrainConfig, get_preset
from m1clip.console import Console
from m1clip.data.batches import Batch
from m1clip.data.convert import convert
from m1clip.data.pairs import no_progress
from m1clip.data.sources import open_sources
from m1clip.data.splits import open_splits
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import make_tokenizer
from m1clip.training import loop
from m1clip.training.setup import check
from m1clip.training.state import TrainState
from m1clip.training.step import train_step

Stream = Callable[[], Iterator[Batch]]
AUGMENTED = {"crop": 0.5, "flip": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flickr8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["M1CLIP_CACHE"] = str(args.out / "cache")
    devices.apply_plan(Plan("cpu"))

    files = f"flickr8k:{args.flickr8k}"
    base = replace(get_preset("nano"), data=files, device="cpu")
    if not (args.out / "shards" / "manifest.jsonl").exists():
        convert(open_sources(base), args.out / "shards", "shards", 1000, 0.01, no_progress)
    began = time.perf_counter()
    open_splits(base, 64, 64)
    print(f"decoding 7,000 JPEGs into the cache: {7000 / (time.perf_counter() - began):.0f} images/s\n")
    shards = f"{args.out}/shards/*.tar"
    ways: dict[str, Stream] = {
        "cache": ours(base),
        "cache, crop and flip": ours(replace(base, **AUGMENTED)),
        "cache, crop, flip and color": ours(replace(base, **AUGMENTED, color=0.3)),
        "JPEG files, live": ours(replace(base, cache_gb=0.0)),
        "JPEG shards, live": ours(replace(base, data=shards, cache_gb=0.0)),
        "JPEG shards, live, crop and flip": ours(replace(base, data=shards, cache_gb=0.0, **AUGMENTED)),
        "open_clip's, 2 workers": theirs(args, workers=2),
    }
    alone: dict[str, list[float]] = {name: [] for name in ways}
    wait: dict[str, list[float]] = {name: [] for name in ways}
    step: dict[str, list[float]] = {name: [] for name in ways}
    state = TrainState(CLIP(base.model, make_tokenizer("bpe", ["a dog"], base.model.text.vocab_size)), base)
    state.chunk = base.batch_size
    for _ in range(args.rounds):
        for name, stream in ways.items():
            batches = stream()
            next(batches)  # workers have started
            began = time.perf_counter()
            for _ in range(args.steps):
                next(batches)
            alone[name].append(args.steps * base.batch_size / (time.perf_counter() - began))
            for _ in range(args.steps):
                began = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter()
                train_step(state, batch)
                wait[name].append(waited - began)
                step[name].append(time.perf_counter() - began)
            del batches
    print("| pairs come from | alone, pairs/s | step, ms | of which waiting |\n|---|---|---|---|")
    for name in ways:
        share = sum(wait[name]) / sum(step[name])
        print(f"| {name} | {median(alone[name]):,.0f} | {1e3 * median(step[name]):.0f} | {share:.2%} |")


def ours(config: TrainConfig) -> Stream:
    setup = check(config, Path("."), None, Console())
    return lambda: loop.prepare(setup.config, setup).stream(0, 10**6)


def theirs(args: argparse.Namespace, workers: int) -> Stream:
    import open_clip
    from open_clip_train.data import CsvDataset
    from torchvision.transforms import v2

    train = set((args.flickr8k / "train.txt").read_text().split())
    table = args.out / "open_clip.csv"
    with open(args.flickr8k / "captions.txt") as file, open(table, "w") as out:
        writer = csv.writer(out, delimiter="\t")
        writer.writerow(("filepath", "title"))
        for row in csv.DictReader(file):
            if row["image"] in train:
                writer.writerow((args.flickr8k / "images" / row["image"], row["caption"]))
    transform = open_clip.image_transform(64, is_train=True)
    transform.transforms[-2:] = [v2.PILToTensor()]  # without ToTensor and Normalize
    tokenizer = open_clip.SimpleTokenizer(context_length=32)
    data = CsvDataset(str(table), transform, "filepath", "title", tokenizer=tokenizer)
    loader = torch.utils.data.DataLoader(
        data, 256, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
    )

    def stream() -> Iterator[Batch]:
        while True:
            for pixels_BCHW, tokens_BL in loader:
                tokens_BL = tokens_BL.clamp(max=1023)  # ours has a smaller table; the work is the same
                yield Batch(
                    pixels_BCHW.permute(0, 2, 3, 1).contiguous(),
                    tokens_BL,
                    torch.zeros(256).long(),
                    None,
                    np.arange(256),
                )

    return stream


if __name__ == "__main__":
    main()
