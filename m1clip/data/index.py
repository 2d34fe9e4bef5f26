"""The index of a source: where each image lies and what is said of it, in memory-mapped files.

An image that many rows name is one entry with many captions. A million rows cost the disk, not the memory.
"""

import json
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from m1clip.config import DataConfig
from m1clip.data.decode import MOST_BYTES, BadImage, decode
from m1clip.data.download import fetched
from m1clip.data.folders import SIDES
from m1clip.data.rows import BadRow, BadRows, Listing, Row, checked, place

Rows = NDArray[np.int64]
BATCH = 8192
NO_SIDE, TRAIN, VAL, TEST, UNLISTED, UNKNOWN = range(6)
CODES = {"train": TRAIN, "val": VAL, "test": TEST, "unlisted": UNLISTED}
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("file", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("table", pa.int32()),
        ("line", pa.int32()),
        ("side", pa.int8()),
        ("many", pa.int32()),
        ("captions", pa.list_(pa.string())),
    ]
)


class Entry(NamedTuple):
    """A row of the index; `file` and `table` are numbers of names kept once."""

    name: str
    file: int
    offset: int
    length: int
    table: int
    line: int
    side: int
    many: int
    """Captions; counted when the entry is written."""
    captions: list[str]


class Names:
    """Few names that many rows share, as numbers; no name is -1."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {"": -1}

    def number(self, name: str) -> int:
        return self.known.setdefault(name, len(self.known) - 1)

    def name(self, number: int) -> str:
        return self.all()[number]

    def all(self) -> list[str]:
        return list(self.known)[1:]


def code_of(word: str) -> int:
    """The side that a word means: train, val2017, testA …"""
    word = word.strip().lower()
    for name in (
        word,
        re.sub(r"\W?\d+$", "", word),
        word.removeprefix("mini"),
        re.split(r"[-_. ]", word)[0],
        word[:4],
    ):
        if name in CODES or name in SIDES:
            return CODES[SIDES.get(name, name)]
    return UNKNOWN


class Builder:
    """Rows in, an index out; what cannot be used goes to `faults`."""

    def __init__(self, listing: Listing, config: DataConfig, faults: BadRows):
        self.listing, self.allow, self.faults = listing, config.allow, faults
        self.files, self.tables = Names(), Names()
        self.root = os.path.abspath(listing.root)
        self.real_root = os.path.realpath(listing.root)
        self.known_folders: dict[str, bool] = {}

    def write(self, folder: Path, progress: Callable[[int], None]) -> None:
        keys = self._write_rows(folder / "rows.arrow", progress)
        order, starts = _grouped(keys)
        with pa.memory_map(str(folder / "rows.arrow")) as source:
            there, fingerprint, identity = self._look_up(pa.ipc.open_file(source), order, starts)
        sizes = np.diff(starts)[there]
        np.save(folder / "order.npy", order[np.repeat(there, np.diff(starts))])
        np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(sizes)]))
        facts = {
            "root": self.root,
            "files": self.files.all(),
            "tables": self.tables.all(),
            "fingerprint": fingerprint,
            "identity": identity,
        }
        (folder / "facts.json").write_text(json.dumps(facts))

    def _write_rows(self, path: Path, progress: Callable[[int], None]) -> NDArray[np.int64]:
        """The rows in the order they come; the answer has equal numbers for those of the same image."""
        keys = array("q")
        with pa.ipc.new_file(str(path), SCHEMA) as writer:
            batch: list[Entry] = []
            for entry in self._entries():
                if len(batch) == BATCH:
                    writer.write_batch(_columns(batch))
                    progress(len(batch))
                    batch = []
                batch.append(entry)
                keys.append(hash((entry.file, entry.offset, entry.name)))
            writer.write_batch(_columns(batch))
            progress(len(batch))
        return np.frombuffer(keys, np.int64) if keys else np.empty(0, np.int64)

    def _entries(self) -> Iterator[Entry]:
        """Rows that follow each other and name the same image become one here already."""
        last: Entry | None = None
        for row in self.listing.rows:
            row = row if isinstance(row, BadRow) else self._allowed(checked(row))
            if isinstance(row, BadRow):
                lone = not os.path.exists(row.where) and os.path.exists(os.path.join(self.root, row.where))
                self.faults.rows += 1
                self.faults.add(
                    row._replace(where=os.path.join(self.listing.root, row.where)) if lone else row
                )
            elif last and last.name == row.image and last.offset == row.offset and not row.file:
                last.captions.extend(row.captions)
                self.faults.rows += 1
            else:
                if last:
                    yield last
                side = code_of(row.split) if row.split else NO_SIDE
                file, table = self.files.number(row.file), self.tables.number(row.table)
                said = list(row.captions)
                last = Entry(row.image, file, row.offset, row.length, table, row.line, side, 0, said)
        if last:
            yield last

    def _allowed(self, row: Row | BadRow) -> Row | BadRow:
        if isinstance(row, BadRow) or "://" not in row.image:
            return row
        if not row.image.startswith(("http://", "https://")):
            return BadRow(
                "refused", place(row), f"{row.image[:80]} is an address of a kind that is never fetched"
            )
        if "urls" not in self.allow:
            return BadRow(
                "refused", place(row), f"{row.image[:80]} is on the net; --allow urls would fetch it"
            )
        return row

    def _look_up(
        self, rows: pa.RecordBatchFileReader, order: Rows, starts: Rows
    ) -> tuple[NDArray[np.bool_], str, str]:
        """Which images are there; a fingerprint of their files, and one of names and captions."""
        same, said = blake2b(self.root.encode(), digest_size=16), blake2b(digest_size=16)
        for file in self.files.all():
            about = os.stat(file)
            same.update(f"{os.path.abspath(file)}/{about.st_size}/{about.st_mtime_ns}".encode())
        heads = order[starts[:-1]]  # where each image is first named: in the order of the rows
        there = np.ones(len(heads), bool)
        self.faults.rows += len(order)
        self.faults.images += len(heads)
        at, begin = 0, 0
        for k in range(rows.num_record_batches):
            batch = rows.get_batch(k)
            names, inside, lines, tables = (
                batch[key].to_pylist() for key in ("name", "file", "line", "table")
            )
            said.update("\n".join([*names, *batch["captions"].flatten().to_pylist()]).encode())
            same.update(batch["offset"].to_numpy().tobytes() + batch["length"].to_numpy().tobytes())
            while at < len(heads) and heads[at] < begin + len(batch):
                i = int(heads[at]) - begin
                stamp = names[i] if inside[i] >= 0 else self._stamp(names[i])
                if isinstance(stamp, BadRow):
                    there[at] = False
                    where = f"{self.tables.name(tables[i])} line {lines[i]}" if lines[i] else stamp.where
                    self.faults.add(stamp._replace(where=where), image=True)
                same.update(str(stamp).encode())
                at += 1
            begin += len(batch)
        return there, same.hexdigest(), said.hexdigest()

    def _stamp(self, name: str) -> str | BadRow:
        """What tells a file from an earlier one of the same name; a fault if it cannot be used."""
        if "://" in name:
            return name
        path, short = os.path.join(self.root, name), name[:80]
        try:
            about = os.lstat(path)
            if stat.S_ISLNK(about.st_mode) or self._leads_out(os.path.dirname(path)):
                real = os.path.realpath(path)
                if "links" not in self.allow and not real.startswith(self.real_root + os.sep):
                    return BadRow(
                        "refused", path, f"{short} is a link that leads out, to {real} (--allow links)"
                    )
                about = os.stat(path)
        except (OSError, ValueError):
            return BadRow("missing file", path, f"there is no {short}")
        if not stat.S_ISREG(about.st_mode):
            return BadRow("missing file", path, f"{short} is not a file")
        return f"{name}/{about.st_size}/{about.st_mtime_ns}"

    def _leads_out(self, folder: str) -> bool:
        """Whether a folder that is named as one below the root is elsewhere: a link is on the way."""
        if folder not in self.known_folders:
            below = os.path.normpath(folder).startswith(self.root + os.sep)
            out = not os.path.realpath(folder).startswith(self.real_root + os.sep)
            self.known_folders[folder] = below and out
        return self.known_folders[folder]


def _columns(batch: Sequence[Entry]) -> pa.RecordBatch:
    counted = [entry._replace(many=len(entry.captions)) for entry in batch]
    columns = zip(*counted, strict=True) if batch else [()] * len(SCHEMA)
    return pa.record_batch(
        [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA
    )


def _grouped(keys: NDArray[np.int64]) -> tuple[Rows, Rows]:
    """Row numbers, those of an image together, images in the order they are first named; the cuts."""
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) == len(keys):
        return np.arange(len(keys)), np.arange(len(keys) + 1)
    owner = first[group]  # for each row, the first of its image
    order = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    return order, np.append(starts, len(order))


class Indexed:
    """PairDataset of an index, all or some of them. What is opened is opened anew in each process."""

    def __init__(self, folder: Path, rows: Rows | None = None):
        self.folder = folder
        self.rows = np.arange(len(self._starts) - 1) if rows is None else rows

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "rows": self.rows}

    def take(self, rows: Rows) -> "Indexed":
        return Indexed(self.folder, self.rows[rows])

    @property
    def fingerprint(self) -> str:
        return f"{self._facts['fingerprint']}/{blake2b(self.rows.tobytes(), digest_size=8).hexdigest()}"

    @property
    def identity(self) -> str:
        return f"{self._facts['identity']}/{blake2b(self.rows.tobytes(), digest_size=8).hexdigest()}"

    @cached_property
    def _table(self) -> pa.Table:
        return pa.ipc.open_file(pa.memory_map(str(self.folder / "rows.arrow"))).read_all()

    @cached_property
    def _order(self) -> Rows:
        order: Rows = np.load(self.folder / "order.npy", mmap_mode="r")
        return order

    @cached_property
    def _starts(self) -> Rows:
        starts: Rows = np.load(self.folder / "starts.npy", mmap_mode="r")
        return starts

    @cached_property
    def _counts(self) -> NDArray[np.int32]:
        counts: NDArray[np.int32] = self._table["many"].to_numpy()
        return counts

    @cached_property
    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads((self.folder / "facts.json").read_text())
        return facts

    def column(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._table[name].to_numpy()
        return values[self._order[self._starts[self.rows]]]

    def _value(self, name: str, index: int) -> Any:
        chunk, place = divmod(int(self._order[self._starts[self.rows[index]]]), BATCH)
        return self._table[name].chunk(chunk)[place].as_py()

    def __len__(self) -> int:
        return len(self.rows)

    def captions(self, index: int) -> Sequence[str]:
        row = self.rows[index]
        lines = self._order[self._starts[row] : self._starts[row + 1]]
        return Captions(self._table["captions"], lines, np.cumsum(self._counts[lines]))

    def row(self, index: int) -> str:
        """Where a person finds it."""
        name, line = self._value("name", index), self._value("line", index)
        if line:
            return f"{self._facts['tables'][self._value('table', index)]} line {line} ({name})"
        file = self._value("file", index)
        return (
            f"{self._facts['files'][file]}: {name}" if file >= 0 else os.path.join(self._facts["root"], name)
        )

    def container(self) -> NDArray[np.int32]:
        """The number of the file that holds each image among others; -1 where it is a file itself."""
        return self.column("file")

    def read(self, index: int) -> bytes:
        """The image's bytes as they lie on the disk."""
        name, file = self._value("name", index), self._value("file", index)
        try:
            if file >= 0:
                path = self._facts["files"][file]
            else:
                path = fetched(name) if "://" in name else os.path.join(self._facts["root"], name)
            with open(path, "rb") as handle:
                size = self._value("length", index) or os.fstat(handle.fileno()).st_size
                if size > MOST_BYTES:
                    raise BadImage("refused", f"{size:,} bytes are too many for an image")
                handle.seek(self._value("offset", index))
                return handle.read(size)
        except FileNotFoundError:
            raise BadImage("missing file", "there is no such file") from None
        except OSError as error:
            raise BadImage("cannot be read", f"cannot be read ({error.strerror})") from None

    def image(self, index: int, least: int = 0) -> Image.Image:
        return decode(self.read(index), least)


class Captions(Sequence[str]):
    """Read one by one: an image may have very many."""

    def __init__(self, column: pa.ChunkedArray, lines: Rows, ends: Rows):
        self.column, self.lines, self.ends = column, lines, ends

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError("no such caption")
        k = int(np.searchsorted(self.ends, index, "right"))
        chunk, place = divmod(int(self.lines[k]), BATCH)
        return self.column.chunk(chunk)[place].values[int(index - (self.ends[k - 1] if k else 0))].as_py()
