"""m1clip data convert: any data as WebDataset shards or Parquet."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.commands import flags, tables
from m1clip.config import DataConfig


@dataclass(frozen=True)
class Args(DataConfig):
    """Write pairs as WebDataset shards or Parquet, with their sides kept: train-…, val-…, test-….

    m1clip data convert coco:~/coco shards/
    m1clip data convert photos/ parquet/ --to parquet
    Images are copied as they are, bad ones are left out and counted. Broken off, it goes on where it was;
    manifest.jsonl has the SHA-256 of each file.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")] = ""
    """A folder, a .csv, .tsv, .jsonl or .parquet, coco:DIR, flickr30k:DIR, flickr8k:DIR, shards/{00..99}.tar,
    hf:NAME or synthetic:N, as train --data has it."""
    out: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")] = None
    """The folder to write to."""
    to: Literal["shards", "parquet"] = "shards"
    """shards is WebDataset (tar), as open_clip and img2dataset have it."""
    per_file: int = 1000
    """PairDataset in one file."""
    json: bool = False
    """Print what was done as one line of JSON."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.read(Args, prog, words)
    if not args.data or args.out is None:
        raise ValueError("data convert needs a SPEC and a folder OUT; m1clip data convert --help")
    if not 1 <= args.per_file <= 1_000_000:
        raise ValueError(f"--per-file must be 1 to 1,000,000, not {args.per_file}")
    return args


def main(args: Args) -> int:
    from m1clip.console import Console
    from m1clip.data.convert import convert
    from m1clip.data.sources import open_sources

    assert args.out is not None
    console = Console()
    sources = open_sources(args, console.working)
    done = convert(sources, args.out, args.to, args.per_file, args.max_bad_rows, console.working)
    if args.json:
        print(json.dumps(done))
        return 0
    for fault in done["named"][:10]:
        console.warn(f"left out: {fault['where']}: {fault['what']}")
    size, left = f"{done['bytes'] / 1e6:,.1f} MB", f"{done['skipped']:,} left out"
    print(f"{args.out}: {done['pairs']:,} pairs in {done['files']:,} files, {size}; {left}")
    spec = args.out / ("*.tar" if args.to == "shards" else "*.parquet")
    print(f"next:  {tables.command('train', '--data', spec)}")
    return 0
