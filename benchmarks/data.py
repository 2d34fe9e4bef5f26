"""Pairs per second of every kind of data, alone and with a training step.

    python benchmarks/data.py --flickr8k DIR --out /tmp/data

m1clip: from the pixel cache with and without augmentation, and on the fly from JPEG files and shards. open_clip: its
CsvDataset, transform and tokenizer in a torch DataLoader, without the normalization of pixels. All take turns; the
figures are medians of all rounds. The step is that of `nano` with 256 pairs.
"""

import argparse
import csv
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from m1clip import devices
from m1clip.config import Preprocess, TrainConfig, get_preset
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.data.convert import convert_dataset
from m1clip.data.index import no_progress
from m1clip.data.splits import open_sources, open_splits
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import make_tokenizer
from m1clip.training.loop import make_batches
from m1clip.training.setup import prepare
from m1clip.training.step import TrainState, train_step

Stream = Callable[[], Iterator[Batch]]
AUGMENTED: dict[str, Any] = {"crop_scale": 0.5, "hflip": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flickr8k", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ["M1CLIP_CACHE"] = str(args.out / "cache")
    devices.apply_plan(Plan("cpu"))

    base = replace(get_preset("nano"), data=f"flickr8k:{args.flickr8k}", device="cpu")
    sources = open_sources(base)
    if not (args.out / "shards" / "manifest.jsonl").exists():
        convert_dataset(sources, args.out / "shards", "shards", 1000, 0.01, no_progress)
    start = time.perf_counter()
    images = len(open_splits(sources, base, Preprocess(64), Preprocess(64)).train)
    print(f"decoding {images:,} JPEGs into the cache: {images / (time.perf_counter() - start):.0f} images/s\n")
    shards = replace(base, data=f"{args.out}/shards/*.tar", cache_gb=0.0)
    streams: dict[str, Stream] = {
        "cache": m1clip_stream(base),
        "cache, crop and flip": m1clip_stream(replace(base, **AUGMENTED)),
        "cache, crop, flip and color jitter": m1clip_stream(replace(base, **AUGMENTED, color_jitter=0.3)),
        "JPEG files, on the fly": m1clip_stream(replace(base, cache_gb=0.0)),
        "JPEG shards, on the fly": m1clip_stream(shards),
        "JPEG shards, on the fly, crop and flip": m1clip_stream(replace(shards, **AUGMENTED)),
        "open_clip, 2 workers": open_clip_stream(args, workers=2),
    }
    alone: dict[str, list[float]] = {name: [] for name in streams}
    wait: dict[str, list[float]] = {name: [] for name in streams}
    step: dict[str, list[float]] = {name: [] for name in streams}
    state = TrainState(CLIP(base.model, make_tokenizer("bpe", ["a dog"], base.model.text.vocab_size)), base)
    state.chunk = base.batch_size
    for _ in range(args.rounds):
        for name, stream in streams.items():
            batches = stream()
            next(batches)  # starts the workers
            start = time.perf_counter()
            for _ in range(args.steps):
                next(batches)
            alone[name].append(args.steps * base.batch_size / (time.perf_counter() - start))
            for _ in range(args.steps):
                start = time.perf_counter()
                batch = next(batches)
                wait[name].append(time.perf_counter() - start)
                train_step(state, batch)
                step[name].append(time.perf_counter() - start)
            del batches
    print("| pairs from | alone, pairs/s | step, ms | of which waiting |\n|---|---|---|---|")
    for name in streams:
        waiting = sum(wait[name]) / sum(step[name])
        print(f"| {name} | {median(alone[name]):,.0f} | {1e3 * median(step[name]):.0f} | {waiting:.2%} |")


def m1clip_stream(config: TrainConfig) -> Stream:
    setup = prepare(config, {}, Path("."), None, Console(), time.monotonic(), is_final=True)
    return lambda: make_batches(setup).stream(0, 10**6)


def open_clip_stream(args: argparse.Namespace, workers: int) -> Stream:
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
            for images_BCHW, tokens_BL in loader:
                images_BHWC = images_BCHW.permute(0, 2, 3, 1).contiguous()
                tokens_BKL = tokens_BL.clamp(max=1023)[:, None]  # our vocabulary is smaller; the work is the same
                yield Batch(Images(images_BHWC), Tokens(tokens_BKL), torch.zeros(256).long(), None, np.arange(256))

    return stream


if __name__ == "__main__":
    main()
