"""m1clip data template: the images of a folder as a table whose captions are to be filled in."""

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from m1clip.config import DataConfig, check_config
from m1clip.console import command
from m1clip.files import atomic_write


@dataclass(frozen=True)
class Args:
    """Write a CSV with a row for each image of a folder; the captions that it has are filled in.

    m1clip data template photos/
    m1clip data template photos/ --caption-from filename --out captions.csv
    Fill in the column `caption` in a text editor or spreadsheet, then train with --data captions.csv.
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of images."""
    out: Path = Path("captions.csv")
    """Output file, .csv."""
    caption_from: Literal["auto", "text", "folder", "filename"] = "auto"
    """First draft of the captions: text (.txt beside each image), folder (labels) or filename."""
    template: str = "a photo of a {}"
    """Caption of images in labelled folders."""
    overwrite: bool = False
    """Replace an existing file."""

    def check(self) -> None:
        check_config(DataConfig(template=self.template))
        if self.out.suffix.lower() != ".csv":
            raise ValueError(f"{self.out} must end in .csv")
        if self.out.exists() and not self.overwrite:
            raise FileExistsError(f"{self.out} exists; choose another --out, or replace it with --overwrite")
        if not self.folder.expanduser().is_dir():
            raise FileNotFoundError(f"there is no folder {self.folder}")
        if not self.out.absolute().parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self.out.parent} for {self.out.name}")


def main(args: Args) -> None:
    from m1clip.data.readers import caption_table

    config = DataConfig(caption_from=args.caption_from, template=args.template)
    rows = list(caption_table(args.folder.expanduser(), config))
    text, parent = io.StringIO(), args.out.absolute().parent
    written = [("image", "caption"), *((os.path.relpath(image, parent), caption) for image, caption in rows)]
    csv.writer(text, lineterminator="\n").writerows(written)
    atomic_write(args.out, "\ufeff" + text.getvalue())  # Excel takes a CSV without this mark for cp1252
    missing = sum(not caption for _, caption in rows)
    print(f"{args.out}: {len({image for image, _ in rows}):,} images, {missing:,} of them without a caption")
    print(f"next:  fill in the captions, then {command('train', '--data', args.out)}")
