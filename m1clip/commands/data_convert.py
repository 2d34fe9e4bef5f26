"""m1clip data convert: any dataset as WebDataset shards or Parquet files."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Le

from m1clip.config import DataConfig, check_config
from m1clip.console import Console, command
from m1clip.format import file_size


@dataclass(frozen=True)
class Args(DataConfig):
    """Write pairs as WebDataset shards or Parquet files, one set of files per split: train-…, val-…, test-….

    m1clip data convert coco:~/coco shards/
    m1clip data convert photos/ parquet/ --to parquet
    Image bytes are copied; bad rows are skipped and counted. Repeat the command to continue an interrupted
    conversion: manifest.jsonl has the SHA-256 of each file.
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPEC")] = tyro.MISSING
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")] = tyro.MISSING
    """Output folder."""
    to: Literal["shards", "parquet"] = "shards"
    """shards are WebDataset tar files, as for open_clip and img2dataset."""
    per_file: Annotated[int, Ge(1), Le(1_000_000)] = 1000
    """Pairs per file."""
    json: bool = False
    """Print a summary as one line of JSON."""

    def check(self) -> None:
        check_config(self)


def main(args: Args) -> None:
    from m1clip.data.convert import convert_dataset
    from m1clip.data.splits import open_sources

    console = Console()
    sources = open_sources(args, console.progress)
    done = convert_dataset(sources, args.out, args.to, args.per_file, args.max_bad_rows, console.progress)
    if args.json:
        print(json.dumps(done))
        return
    bad = done["bad_rows"]
    for row in bad["examples"][:10]:
        console.warn(f"skipped {row['location']}: {row['reason']}")
    files = f"{done['files']:,} files, {file_size(done['bytes'])}"
    print(f"{args.out}: {done['pairs']:,} pairs in {files}; {bad['count']:,} bad rows")
    print(f"next:  {command('train', '--data', args.out / ('*.tar' if args.to == 'shards' else '*.parquet'))}")
