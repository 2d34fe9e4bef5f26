"""m1clip data preview: images and captions of a dataset as one contact sheet."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.config import DataConfig, check_config


@dataclass(frozen=True)
class Args(DataConfig):
    """Write a contact sheet: images of a dataset with their captions.

    m1clip data preview                         the built-in scenes
    m1clip data preview photos/ --split val     the validation split of your own data
    """

    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[SPEC]")] = "synthetic"
    split: Literal["train", "val"] = "train"
    """Which split to show."""
    columns: int = 6
    """Images per row."""
    rows: int = 4
    """Rows of images."""
    out: Path = Path("preview.png")
    """Output file, .png, .jpg or .webp."""

    def check(self) -> None:
        check_config(self)
        if self.columns < 1 or self.rows < 1 or self.columns * self.rows > 1000:
            raise ValueError(f"a contact sheet has 1 to 1000 images, not {self.columns} × {self.rows}")
        require_image_path(self.out)


def require_image_path(path: Path) -> None:
    """Fail before the work, not after it."""
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ValueError(f"{path} must end in .png, .jpg or .webp")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for {path.name}")


def main(args: Args) -> None:
    from m1clip.console import Console
    from m1clip.data.check import contact_sheet, sample_tiles, save_image
    from m1clip.data.splits import open_sources

    count, tiles = args.columns * args.rows, []
    sources = open_sources(args, Console().progress)
    for source in sources:
        pairs = source.train if args.split == "train" else source.val
        tiles += sample_tiles(pairs, -(-count // len(sources)))
    save_image(contact_sheet(tiles[:count], args.columns), args.out)
    print(f"{args.out}: {len(tiles[:count])} {args.split} pairs of {args.data}")
