"""The common form of all data: rows of a source as they are read, and pairs with random access. No torch.

A reader is a generator of rows, so a million rows need no memory.
"""

import html
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from PIL import Image

from m1clip.format import percent

MAX_CAPTION_BYTES = 1_000_000  # captions of one image
MAX_EXAMPLES = 10_000  # bad rows that are listed; further ones are only counted
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "held-out", "held_out"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
Advance = Callable[[int], None]
# Opens a progress bar from a label and a total, if known; the returned function advances it.
ProgressFactory = Callable[[str, int | None], AbstractContextManager[Advance]]
BadImages = dict[int, tuple[str, str]]  # kind and reason of the images that cannot be decoded, by row


@contextmanager
def no_progress(label: str, total: int | None) -> Iterator[Advance]:
    yield lambda done: None


class PairDataset(Protocol):
    """Images and captions by row; light enough to be sent to a worker process."""

    @property
    def fingerprint(self) -> str: ...  # of the images and their order: the key of cached pixels
    @property
    def identity(self) -> str: ...  # of the pairs and their order: compared when a run is resumed
    def __len__(self) -> int: ...
    def image(self, index: int, min_size: int = 0) -> Image.Image: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def location(self, index: int) -> str: ...


class BadRow(NamedTuple):
    kind: str
    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class Row(NamedTuple):
    image: str  # path relative to the listing's root, name inside `container`, or URL
    captions: Sequence[str]
    line: int = 0  # in `table`, from 1; 0 if no table lists the image
    table: str = ""
    split: str = ""  # in the source's own words, such as val2017
    container: str = ""  # file that contains the image, as `length` bytes at `offset`: a tar shard or an Arrow file
    offset: int = 0
    length: int = 0

    def location(self, root: str) -> str:
        if self.line:
            return f"{self.table} line {self.line}"
        image = self.image.encode(errors="replace").decode()
        return f"{self.container}: {image}" if self.container else os.path.join(root, image)

    def validated(self, allow: Collection[str], root: str) -> "Row | BadRow":
        """The row with its usable captions only, or the reason why it cannot be used."""
        if not self.image or "\0" in self.image:
            return BadRow("broken line", self.location(root), "names no image")
        if re.search("[\ud800-\udfff]", "".join((self.image, *self.captions))):  # made by surrogateescape
            return BadRow("not UTF-8", self.location(root), "the text is not UTF-8; save the file as UTF-8")
        texts = (caption.strip() for caption in self.captions)
        captions = [text for text in texts if text and ("&" not in text or html.unescape(text).strip())]
        if not captions:
            return BadRow("no caption", self.location(root), "the caption is empty")
        if "://" in self.image and not self.image.startswith(("http://", "https://")):
            return BadRow("refused", self.location(root), f"{self.image[:80]} is not an http or https URL")
        if "://" in self.image and "urls" not in allow:
            return BadRow("refused", self.location(root), f"{self.image[:80]} is a URL; --allow urls downloads it")
        return self if captions == self.captions else self._replace(captions=captions)


class Listing(NamedTuple):
    root: str
    rows: Iterator[Row | BadRow]

    def relative_to(self, root: str, split: str = "") -> Iterator[Row | BadRow]:
        """The rows relative to another root, with a default split."""
        prefix = os.path.relpath(self.root, root)
        for row in self.rows:
            if isinstance(row, Row) and not row.container:
                image = row.image if "://" in row.image else os.path.normpath(os.path.join(prefix, row.image))
                row = row._replace(image=image, split=row.split or split)
            yield row


@dataclass
class BadRows:
    """Unusable rows of a source, counted by kind, and the first of them as examples."""

    rows: int = 0  # all, usable or not: lines of a table, or images
    images: int = 0  # distinct ones among them
    lost_images: int = 0  # bad rows that cost an image, not just one line of a table
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, row: BadRow, image: bool = False) -> None:
        self.lost_images += image
        self.counts[row.kind] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(row)

    def add_images(self, pairs: PairDataset, bad: BadImages) -> None:
        for row, (kind, reason) in bad.items():
            self.add(BadRow(kind, pairs.location(row), reason), image=True)

    def __add__(self, other: "BadRows") -> "BadRows":
        totals = self.rows + other.rows, self.images + other.images, self.lost_images + other.lost_images
        return BadRows(*totals, self.counts + other.counts, (self.examples + other.examples)[:MAX_EXAMPLES])

    @property
    def fraction(self) -> float:
        """Fraction of the data that is lost: bad lines of all lines, plus lost images of all images."""
        lines = len(self) - self.lost_images
        return lines / max(1, self.rows) + self.lost_images / max(1, self.images + lines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        first = "; ".join(map(str, self.examples[:3]))
        return f"{len(self):,} of {self.rows:,} rows are unusable ({kinds}), such as {first}"

    def record(self, examples: int = MAX_EXAMPLES) -> dict[str, Any]:
        listed, kinds = [row._asdict() for row in self.examples[:examples]], dict(self.counts.most_common())
        return {"count": len(self), "fraction": self.fraction, "kinds": kinds, "examples": listed}

    def require_at_most(self, max_fraction: float) -> None:
        if self.fraction > max_fraction:
            raise ValueError(f"{self}; --max-bad-rows allows {percent(max_fraction)}, `m1clip data check` lists all")


@lru_cache
def normalize_split(word: str) -> str:
    """train, val, test or unlisted for a source's own word, such as val2017 or testA; otherwise unknown."""
    word = word.strip().lower()
    stems = (re.sub(r"\W?\d+$", "", word), word.removeprefix("mini"), re.split(r"[-_. ]", word)[0], word[:4])
    known = (SPLIT_WORDS.get(stem) for stem in (word, *stems))
    return "unlisted" if word == "unlisted" else next(filter(None, known), "unknown")
