"""m1clip data preview: what the model will see, as one image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.commands import flags
from m1clip.config import DataConfig


@dataclass(frozen=True)
class Args(DataConfig):
    """Write a contact sheet: images of the data, each with its caption.

    m1clip data preview                             the built-in scenes
    m1clip data preview photos/ --split validation    your own, the side that is kept for the test
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[SPEC]")] = "synthetic"
    """A folder, a .csv, .tsv, .jsonl or .parquet, coco:DIR, flickr30k:DIR, flickr8k:DIR, shards/{00..99}.tar,
    hf:NAME or synthetic:N, as train --data has it."""
    split: Literal["train", "val"] = "train"
    """Which side: what is learned from, or what is kept for the test."""
    columns: int = 6
    """Images in a row."""
    rows: int = 4
    """Rows of images."""
    out: Path = Path("preview.png")
    """The file to write; its ending says the format."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.read(Args, prog, words)
    if args.columns < 1 or args.rows < 1 or args.columns * args.rows > 1000:
        raise ValueError(f"a sheet has 1 to 1000 images, not {args.columns} × {args.rows}")
    require_image(args.out)
    return args


def require_image(path: Path) -> None:
    """Refuses at once what could not be written after long work."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"cannot tell the format of {path}; end it with .png or .jpg")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}")


def main(args: Args) -> int:
    from m1clip.console import Console
    from m1clip.data.contact_sheet import contact_sheet, shown
    from m1clip.data.sources import open_sources

    number, shots = args.columns * args.rows, []
    sources = open_sources(args, Console().working)
    for source in sources:
        pairs = source.train if args.split == "train" else source.val
        shots += shown(pairs, -(-number // len(sources)))
    contact_sheet(shots[:number], args.columns).save(args.out)
    print(f"{args.out}: {len(shots[:number])} of the {args.split} pairs of {args.data}")
    return 0
