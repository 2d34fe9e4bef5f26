"""Rows of a source as readers list them, and their on-disk index: pairs with random access. No torch.

A reader is a generator of rows, and the index is memory-mapped: a million rows use disk, not memory.
Rows that name the same image become one entry with several captions.
"""

import json
import operator
import os
import re
import stat
import time
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from io import BytesIO
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from m1clip.config import DataConfig
from m1clip.data.caption_text import remove_html
from m1clip.decode import MAX_BYTES, BadImage, decode
from m1clip.files import PARTIAL, atomic_write, cache_folder, remove_partial
from m1clip.format import percent, unescape_html

RowIndices = NDArray[np.int64]
ARROW_BATCH = 8192
SPLIT_CODES = {"": 0, "train": 1, "val": 2, "test": 3, "unlisted": 4, "unknown": 5}
NUMBERS = {"offset": pa.int64(), "length": pa.int64(), "line": pa.int32()}
CODES = {"container": pa.int32(), "table": pa.int32(), "split": pa.int8()}
TEXTS = {"image": pa.string(), "label": pa.string(), "group": pa.string()}
SCHEMA = pa.schema({**TEXTS, **NUMBERS, **CODES, "captions": pa.list_(pa.string())})
TIMEOUT_S, ATTEMPTS = 20, 2  # of downloads
MAX_CAPTION_BYTES = 10_000  # the rest of a longer caption is not read
MAX_CAPTION_FILE_BYTES = 1_000_000  # likewise, of a text file with the captions of one image
MAX_NAME = 4096  # characters of a path or URL
BY_LINES = (".csv", ".tsv", ".jsonl", ".txt", ".token")  # other tables have rows
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
    def label(self, index: int) -> str: ...  # empty for an image without one
    def label_names(self) -> Collection[str]: ...
    def location(self, index: int) -> str: ...


class BadRow(NamedTuple):
    kind: str
    location: str
    reason: str

    def __str__(self) -> str:
        return f"{self.location}: {self.reason}"


class Note(NamedTuple):
    """What a reader guessed or changed: printed once, after its count if it has one."""

    text: str
    occurrences: int = 0


def table_location(table: str, line: int) -> str:
    return f"{table} {'line' if table.lower().endswith(BY_LINES) else 'row'} {line}"


class Row(NamedTuple):
    image: str  # path relative to the listing's root, name inside `container`, or URL
    captions: Sequence[str]
    line: int = 0  # in `table`, from 1; 0 if no table lists the image
    table: str = ""
    split: str = ""  # in the source's own words, such as val2017
    container: str = ""  # file that contains the image, as `length` bytes at `offset`: a tar shard or an Arrow file
    offset: int = 0
    length: int = 0
    label: str = ""  # class of the image, if it has one
    group: str = ""  # value of the column that --group-by names

    def location(self, root: str) -> str:
        if self.line:
            return table_location(self.table, self.line)
        image = self.image.encode(errors="replace").decode()
        return f"{self.container}: {image}" if self.container else os.path.join(root, image)

    def validated(self, allow: Collection[str], root: str) -> "Row | BadRow":
        """The row with its usable captions only, or the reason why it cannot be used."""
        if not self.image or "\0" in self.image:
            return BadRow("broken line", self.location(root), "names no image")
        if len(self.image) > MAX_NAME:
            reason = f"{self.image[:80]}… is no path: it has {len(self.image):,} characters"
            return BadRow("broken line", self.location(root), reason)
        if re.search(
            "[\ud800-\udfff]", "".join((self.image, self.label, self.group, *self.captions))
        ):  # made by surrogateescape
            return BadRow("not UTF-8", self.location(root), "the text is not UTF-8; save the file as UTF-8")
        texts = (caption.strip() for caption in self.captions)
        captions = [text for text in texts if text and ("&" not in text or unescape_html(text).strip())]
        if not captions:
            return BadRow("no caption", self.location(root), "the caption is empty")
        if "://" in self.image and not self.image.startswith(("http://", "https://")):
            return BadRow("refused", self.location(root), f"{self.image[:80]} is not an http or https URL")
        if "://" in self.image and "urls" not in allow:
            return BadRow("refused", self.location(root), f"{self.image[:80]} is a URL; --allow urls downloads it")
        return self if captions == self.captions else self._replace(captions=captions)


Listed = Row | BadRow | Note


class Listing(NamedTuple):
    root: str
    rows: Iterator[Listed]

    def with_note(self, text: str) -> "Listing":
        return Listing(self.root, chain([Note(text)], self.rows))

    def relative_to(self, root: str, split: str = "") -> Iterator[Listed]:
        """The rows relative to another root, with a default split."""
        prefix = os.path.relpath(self.root, root)
        for row in self.rows:
            if isinstance(row, Row) and not row.container:
                image = row.image if "://" in row.image else os.path.normpath(os.path.join(prefix, row.image))
                row = row._replace(image=image, split=row.split or split)
            yield row


@dataclass
class BadRows:
    """Unusable rows of a source, counted by kind, and the first of them as examples; notes about the others."""

    rows: int = 0  # all, usable or not: lines of a table, or images
    images: int = 0  # distinct ones among them
    lost_images: int = 0  # bad rows that cost an image, not just one line of a table
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)  # 0 if a note is not counted

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
        examples, notes = (self.examples + other.examples)[:MAX_EXAMPLES], self.notes.copy()
        notes.update(other.notes)  # `+` would drop those that are not counted
        return BadRows(*totals, self.counts + other.counts, examples, notes)

    @property
    def fraction(self) -> float:
        """Fraction of the data that is lost: bad lines of all lines, plus lost images of all images."""
        lines = len(self) - self.lost_images
        return lines / max(1, self.rows) + self.lost_images / max(1, self.images + lines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in self.counts.most_common())
        first = "; ".join(map(str, self.examples[:3]))
        return f"{len(self):,} of {self.rows:,} rows are unusable ({kinds}), such as {first}"

    def note_lines(self) -> list[str]:
        return [f"{count:,} {text}" if count else text for text, count in self.notes.items()]

    def record(self, examples: int = MAX_EXAMPLES) -> dict[str, Any]:
        listed, kinds = [row._asdict() for row in self.examples[:examples]], dict(self.counts.most_common())
        return {"count": len(self), "fraction": self.fraction, "kinds": kinds, "examples": listed}

    def require_at_most(self, max_fraction: float, advice: str = "") -> None:
        if self.fraction > max_fraction:
            allowed = f"--max-bad-rows allows {percent(max_fraction)}, `m1clip data check` lists all"
            raise ValueError(f"{self}; {allowed}{advice}")


@lru_cache
def normalize_split(word: str) -> str:
    """train, val, test or unlisted for a source's own word, such as val2017 or testA; otherwise unknown."""
    word = word.strip().lower()
    stems = (re.sub(r"\W?\d+$", "", word), word.removeprefix("mini"), re.split(r"[-_. ]", word)[0], word[:4])
    known = (SPLIT_WORDS.get(stem) for stem in (word, *stems))
    return "unlisted" if word == "unlisted" else next(filter(None, known), "unknown")


def truncate(caption: str) -> str:
    """The caption if it is not too long, else its first MAX_CAPTION_BYTES."""
    if 4 * len(caption) <= MAX_CAPTION_BYTES:  # a character has at most four bytes
        return caption
    data = caption.strip().encode(errors="surrogatepass")
    return caption if len(data) <= MAX_CAPTION_BYTES else data[:MAX_CAPTION_BYTES].decode(errors="ignore")


class IndexWriter:
    def __init__(self, listing: Listing, config: DataConfig, bad_rows: BadRows):
        self.listing, self.allow, self.bad_rows = listing, config.allow, bad_rows
        self.containers, self.tables = {"": 0}, {"": 0}  # names that many rows share, stored as numbers
        self.root, self.real_root = os.path.abspath(listing.root), os.path.realpath(listing.root)
        self.leaves_root = lru_cache(None)(self._leaves_root)  # realpath is slow

    def write(self, folder: Path, progress: Advance) -> None:
        keys, labels = self._write_rows(folder / "rows.arrow", progress)
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        first_row = first[group]
        if several := len(set(group[labels != labels[first_row]].tolist())):
            self.bad_rows.notes["images with several labels, of which the first is used"] += several
        order = np.argsort(first_row, kind="stable")  # rows grouped by image, in the order of each image's first row
        starts = np.append(np.flatnonzero(np.diff(first_row[order], prepend=-1)), len(order))  # of each group
        sizes, first_rows = np.diff(starts), order[starts[:-1]]  # of each image, in ascending order
        self.bad_rows.rows += len(order)
        self.bad_rows.images += len(first_rows)
        usable, fingerprint, identity = self._check_images(folder / "rows.arrow", first_rows)
        (folder / "order.npy").write_bytes(array_file(order[np.repeat(usable, sizes)]))
        (folder / "starts.npy").write_bytes(array_file(np.concatenate([[0], np.cumsum(sizes[usable])])))
        names = {"root": self.root, "containers": list(self.containers), "tables": list(self.tables)}
        (folder / "facts.json").write_text(json.dumps({**names, "fingerprint": fingerprint, "identity": identity}))

    def _write_rows(self, path: Path, progress: Advance) -> tuple[RowIndices, RowIndices]:
        """Write the rows in their order; return keys that are equal for rows of one image, and of one label."""
        keys, labels, rows = array("q"), array("q"), self._usable_rows()
        with pa.ipc.new_file(str(path), SCHEMA) as writer:
            while batch := list(islice(rows, ARROW_BATCH)):
                keys.extend(hash((row.container, row.offset, row.image)) for row in batch)
                labels.extend(hash(row.label) for row in batch)
                columns = {name: [getattr(row, name) for row in batch] for name in (*TEXTS, *NUMBERS, "captions")}
                for name, numbers in (("container", self.containers), ("table", self.tables)):
                    columns[name] = [numbers.setdefault(getattr(row, name), len(numbers)) for row in batch]
                columns["split"] = [SPLIT_CODES[normalize_split(row.split[:100]) if row.split else ""] for row in batch]
                writer.write_batch(pa.record_batch([columns[name] for name in SCHEMA.names], SCHEMA))
                progress(len(batch))
        return np.array(keys, np.int64), np.array(labels, np.int64)

    def _usable_rows(self) -> Iterator[Row]:
        """Valid rows; consecutive rows of one image are merged here already."""
        rows = filter(None, map(self._validate, self.listing.rows))
        for _, group in groupby(rows, operator.attrgetter("container", "offset", "image", "label")):
            first, *others = group
            self.bad_rows.rows += len(others)
            yield first._replace(captions=[caption for row in (first, *others) for caption in row.captions])

    def _validate(self, row: Listed) -> Row | None:
        if isinstance(row, Note):
            self.bad_rows.notes[row.text] += row.occurrences
            return None
        if isinstance(row, Row):
            row = self._without_html(self._truncated(row)).validated(self.allow, self.root)
        if isinstance(row, Row):
            return row
        self.bad_rows.add(row)
        self.bad_rows.rows += 1
        return None

    def _truncated(self, row: Row) -> Row:
        """The row with captions of bounded length: tokenizers and regular expressions are slow on others."""
        captions = [truncate(caption) for caption in row.captions]
        if cut := sum(map(operator.is_not, captions, row.captions)):
            self.bad_rows.notes[f"captions longer than {MAX_CAPTION_BYTES:,} bytes, which are truncated"] += cut
            return row._replace(captions=captions)
        return row

    def _without_html(self, row: Row) -> Row:
        captions = list(map(remove_html, row.captions))
        if changed := sum(new != old for new, old in zip(captions, row.captions, strict=True)):
            self.bad_rows.notes["captions with HTML tags or entities, which are removed"] += changed
        return row._replace(captions=captions)

    def _check_images(self, path: Path, first_rows: RowIndices) -> tuple[NDArray[np.bool_], str, str]:
        """Which images are usable, and hashes of their files and of all names and captions."""
        fingerprint, identity = blake2b(self.root.encode(), digest_size=16), blake2b(digest_size=16)
        for container in list(self.containers)[1:]:
            status = os.stat(container)
            fingerprint.update(f"{os.path.abspath(container)}/{status.st_size}/{status.st_mtime_ns}".encode())
        usable, tables, start = np.ones(len(first_rows), bool), list(self.tables), 0
        for batch in pa.ipc.open_file(pa.memory_map(str(path))).read_all().to_batches():
            columns = {name: batch[name].to_pylist() for name in ("image", "container", "line", "table")}
            identity.update("\n".join([*columns["image"], *batch["captions"].flatten().to_pylist()]).encode())
            fingerprint.update(batch["offset"].to_numpy().tobytes() + batch["length"].to_numpy().tobytes())
            for entry in range(*np.searchsorted(first_rows, (start, start + len(batch)))):
                i = first_rows[entry] - start
                image, container, line, table = (column[i] for column in columns.values())
                stamp = image if container or "://" in image else self._file_stamp(image)
                if isinstance(stamp, BadRow):
                    usable[entry] = False
                    location = table_location(tables[table], line) if line else stamp.location
                    self.bad_rows.add(stamp._replace(location=location), image=True)
                fingerprint.update(str(stamp).encode())
            start += len(batch)
        return usable, fingerprint.hexdigest(), identity.hexdigest()

    def _file_stamp(self, image: str) -> str | BadRow:
        """Name, size and time of a file, or why it cannot be used."""
        path, name = os.path.join(self.root, image), image[:80]
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode) or self.leaves_root(os.path.dirname(path)):
                target = os.path.realpath(path)
                if "links" not in self.allow and not target.startswith(self.real_root + os.sep):
                    return BadRow("refused", path, f"{name} links to {target}; --allow links follows it")
                status = os.stat(path)
        except (OSError, ValueError):
            return BadRow("missing file", path, f"there is no {name}")
        if not stat.S_ISREG(status.st_mode):
            return BadRow("missing file", path, f"{name} is not a file")
        return f"{image}/{status.st_size}/{status.st_mtime_ns}"

    def _leaves_root(self, folder: str) -> bool:
        """Whether a folder below the root is really elsewhere, through a symlink."""
        is_below = os.path.normpath(folder).startswith(self.root + os.sep)
        return is_below and not os.path.realpath(folder).startswith(self.real_root + os.sep)


def array_file(array: NDArray[Any]) -> memoryview:
    """The content of a .npy file: on a full disk np.save raises an error without a reason."""
    buffer = BytesIO()
    np.save(buffer, array)
    return buffer.getbuffer()


@lru_cache
def open_index(folder: Path) -> tuple[pa.Table, RowIndices, RowIndices, dict[str, Any]]:
    table = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()
    order, starts = (np.load(folder / name, mmap_mode="r") for name in ("order.npy", "starts.npy"))
    return table, order, starts, json.loads((folder / "facts.json").read_text())


class IndexedPairs:
    def __init__(self, folder: Path, rows: RowIndices | None = None):
        # `order` has the rows of the table grouped by image, `starts` the position there of each image's first row.
        self.folder, (self.table, self.order, self.starts, self.facts) = folder, open_index(folder)
        self.rows = np.arange(len(self.starts) - 1) if rows is None else rows
        digest = blake2b(self.rows.tobytes(), digest_size=8).hexdigest()
        self.fingerprint, self.identity = (f"{self.facts[key]}/{digest}" for key in ("fingerprint", "identity"))

    def __reduce__(self) -> Any:  # a worker process opens the files again
        return IndexedPairs, (self.folder, self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: RowIndices) -> "IndexedPairs":
        return IndexedPairs(self.folder, self.rows[rows])

    def column(self, name: str) -> NDArray[Any]:
        """A column of numbers, one value per image."""
        values: NDArray[Any] = self.table[name].to_numpy()
        return values[self.order[self.starts[self.rows]]]

    def splits(self) -> NDArray[np.str_]:
        return np.array([*SPLIT_CODES]).take(self.column("split"))

    def value(self, name: str, index: int) -> Any:
        return self.table[name][int(self.order[self.starts[self.rows[index]]])].as_py()

    def captions(self, index: int) -> list[str]:
        start, end = self.starts[self.rows[index] : self.rows[index] + 2]
        return [caption for row in self.order[start:end].tolist() for caption in self.table["captions"][row].as_py()]

    def label(self, index: int) -> str:
        return str(self.value("label", index))

    def label_names(self) -> set[str]:
        return {*filter(None, self.texts("label"))}

    def texts(self, name: str) -> list[str]:
        """A column of text, one value per image."""
        values: list[str] = self.table[name].take(self.order[self.starts[self.rows]]).to_pylist()
        return values

    def location(self, index: int) -> str:
        image, line, table, container = (self.value(name, index) for name in ("image", "line", "table", "container"))
        row = Row(image, (), line, self.facts["tables"][table], container=self.facts["containers"][container])
        return row.location(self.facts["root"]) + (f" ({image})" if line else "")

    def read(self, index: int) -> bytes:
        """The undecoded image file."""
        image, container = self.value("image", index), self.facts["containers"][self.value("container", index)]
        try:
            path = container or (download_image(image) if "://" in image else os.path.join(self.facts["root"], image))
            with open(path, "rb") as file:
                size = self.value("length", index) or os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise BadImage("refused", f"{size:,} bytes are too many for an image")
                file.seek(self.value("offset", index))
                return file.read(size)
        except FileNotFoundError:
            raise BadImage("missing file", "there is no such file") from None
        except OSError as error:
            raise BadImage("cannot be read", f"cannot be read ({error.strerror})") from None

    def image(self, index: int, min_size: int = 0) -> Image.Image:
        return decode(self.read(index), min_size)


def download_image(url: str) -> Path:
    """The file of a URL, downloaded once and kept in the cache."""
    path = downloads_folder(cache_folder()) / blake2b(url.encode(), digest_size=32).hexdigest()
    if not path.exists():
        atomic_write(path, _fetch(url), durable=False)
    return path


@lru_cache
def downloads_folder(cache: Path) -> Path:
    """Once per process: the folder, without what killed processes left in it."""
    folder = cache / "downloads"
    folder.mkdir(parents=True, exist_ok=True)
    for partial in filter(None, map(PARTIAL.fullmatch, os.listdir(folder))):
        remove_partial(folder, partial[1])
    return folder


def _fetch(url: str) -> bytes:
    """The body of a response, limited in size and time; redirects are followed to http and https only."""
    import httpx2 as httpx

    headers, reason = {"User-Agent": "m1clip", "Accept-Encoding": "identity"}, ""
    for _ in range(ATTEMPTS):
        data, deadline = b"", time.monotonic() + 3 * TIMEOUT_S
        try:
            with httpx.stream("GET", url, follow_redirects=True, timeout=TIMEOUT_S, headers=headers) as response:
                response.raise_for_status()
                for part in response.iter_bytes():
                    data += part
                    if len(data) > MAX_BYTES:
                        raise BadImage("refused", f"the response is larger than {MAX_BYTES:,} bytes")
                    if time.monotonic() > deadline:
                        raise httpx.ReadTimeout(f"it took longer than {3 * TIMEOUT_S} s")
                return data
        except httpx.HTTPStatusError as error:
            status = f"{error.response.status_code} {error.response.reason_phrase}"
            raise BadImage("missing file", f"{url[:80]} answers {status}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = " ".join(str(error).split())
    raise BadImage("missing file", f"{url[:80]} cannot be downloaded ({reason})")
