"""m1clip data preview: what the model will see, as one picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from m1clip.data.pairs import open_pairs
from m1clip.data.sheet import contact_sheet
from m1clip.verbs import flags


@dataclass(frozen=True)
class Args:
    """Write a contact sheet: pictures of the data, each with its caption."""

    data: str = "synthetic"
    """Which data, as in train."""
    split: Literal["train", "held-out"] = "train"
    """Which side: what is learned from, or what is kept for the test."""
    columns: int = 6
    """Pictures in a row."""
    rows: int = 4
    """Rows of pictures."""
    seed: int = 0
    """Which scenes are drawn."""
    out: Path = Path("preview.png")
    """The file to write; its ending says the format."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.read(Args, prog, words)
    if args.columns < 1 or args.rows < 1 or args.columns * args.rows > 1000:
        raise ValueError(f"a sheet has 1 to 1000 pictures, not {args.columns} × {args.rows}")
    return args


def main(args: Args) -> int:
    number = args.columns * args.rows
    train, held_out = open_pairs(args.data, number, args.seed)
    pairs = train if args.split == "train" else held_out
    sheet = contact_sheet(
        [pairs.image(i) for i in range(min(number, len(pairs)))],
        [pairs.captions(i)[0] for i in range(min(number, len(pairs)))],
        args.columns,
    )
    try:
        sheet.save(args.out)
    except ValueError:
        raise ValueError(f"cannot tell the format of {args.out}; end it with .png or .jpg") from None
    print(f"{args.out}: {min(number, len(pairs))} of the {args.split} pairs of {args.data}")
    return 0
