"""What every source is read as: rows, each the place of an image and its captions, or a fault in its stead.

Knows no formats. A reader is a generator of these, so a million rows need no memory.
"""

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MOST_TEXT = 1_000_000  # bytes of captions of one image
NAMED = 10_000  # faults kept with their names; beyond these they are only counted


class Row(NamedTuple):
    image: str
    """Path of the image from the listing's root, or its name inside `file`, or its address on the net."""
    captions: Sequence[str]
    line: int = 0
    """Where in `table` it stands, from 1; 0 where no table lists it."""
    table: str = ""
    split: str = ""
    """The side it is on, in the source's own words."""
    file: str = ""
    """The file that holds the image among others: `length` bytes from `offset`."""
    offset: int = 0
    length: int = 0


class BadRow(NamedTuple):
    kind: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class Listing(NamedTuple):
    root: str
    rows: Iterator[Row | BadRow]


@dataclass
class BadRows:
    """How many of how many rows are unusable, by kind, and the first of them by name."""

    rows: int = 0
    """All of them, the good ones too: lines of a table, or images."""
    images: int = 0
    """Different images among them."""
    of_images: int = 0
    """BadRows that cost an image, and not a line of a table."""
    counts: Counter[str] = field(default_factory=Counter)
    named: list[BadRow] = field(default_factory=list)

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, fault: BadRow, image: bool = False) -> None:
        self.of_images += image
        self.counts[fault.kind] += 1
        if len(self.named) < NAMED:
            self.named.append(fault)

    def __add__(self, other: "BadRows") -> "BadRows":
        named = (self.named + other.named)[:NAMED]
        images, of_images = self.images + other.images, self.of_images + other.of_images
        return BadRows(self.rows + other.rows, images, of_images, self.counts + other.counts, named)

    @property
    def share(self) -> float:
        """Part of the data that is lost: of the lines, and of the images, which may have several lines."""
        lines = len(self) - self.of_images
        return lines / max(1, self.rows) + self.of_images / max(1, self.images + lines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        first = "; ".join(str(fault) for fault in self.named[:3])
        return f"{len(self):,} of {self.rows:,} rows are unusable ({kinds}); first {first}"

    def require_few(self, most: float) -> None:
        """Refuses data of which more than the part `most` is unusable."""
        if self.share <= most:
            return
        raise ValueError(f"{self}; --max-bad-rows allows {most:.2%}, and m1clip data check names them all")


def meaningful(captions: Iterable[object]) -> list[str]:
    """The captions that say something, without the spaces around them."""
    texts = (caption.strip() for caption in captions if isinstance(caption, str))
    return [text for text in texts if text and ("&" not in text or html.unescape(text).strip())]


def is_utf8(text: str) -> bool:
    """Whether a text read with surrogateescape came from proper UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked(row: Row) -> Row | BadRow:
    """The row with the captions that can be used; a fault where it cannot be."""
    if not row.image or "\0" in row.image:
        return BadRow("broken line", place(row), "no image is named")
    if not is_utf8(row.image) or not all(map(is_utf8, row.captions)):
        return BadRow("not UTF-8", place(row), "the text is not UTF-8: save it as such")
    captions = meaningful(row.captions)
    if not captions:
        return BadRow("no caption", place(row), "the caption is empty")
    return row if captions == row.captions else row._replace(captions=captions)


def place(row: Row) -> str:
    """Where a person finds the row."""
    image = row.image.encode(errors="replace").decode()
    if row.line:
        return f"{row.table} line {row.line}"
    return f"{row.file}: {image}" if row.file else image
