"""The index of a source: where each picture lies and what is said of it, as a memory-mapped Arrow file.

A picture that many rows name is one entry with many captions. A million rows cost the disk, not the memory.
"""

import json
import os
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
from m1clip.data.decode import MOST_BYTES, BadPicture, decode
from m1clip.data.fetch import fetched
from m1clip.data.folders import SIDES
from m1clip.data.rows import Fault, Faults, Listing, Row, checked, place

Rows = NDArray[np.int64]
BATCH = 8192
NO_SIDE, TRAIN, HELD_OUT, TEST, UNLISTED = range(5)
CODES = {"train": TRAIN, "held-out": HELD_OUT, "test": TEST, "unlisted": UNLISTED}
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("file", pa.int32()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("table", pa.int32()),
        ("line", pa.int32()),
        ("side", pa.int8()),
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
    captions: list[str]


class Names:
    """Few names that many rows share, as numbers; no name is -1."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {"": -1}

    def number(self, name: str) -> int:
        return self.known.setdefault(name, len(self.known) - 1)

    def all(self) -> list[str]:
        return list(self.known)[1:]


class Builder:
    """Rows in, an Arrow file out; what cannot be used goes to `faults`."""

    def __init__(self, listing: Listing, config: DataConfig, faults: Faults):
        self.listing, self.allow, self.faults = listing, config.allow, faults
        self.files, self.tables = Names(), Names()
        self.root = os.path.abspath(listing.root)
        self.real_root = os.path.realpath(listing.root)

    def write(self, path: Path, progress: Callable[[int], None]) -> str:
        """Write the index; the fingerprint of its pictures."""
        raw = path.with_suffix(".raw")
        try:
            keys = self._write_raw(raw, progress)
            with pa.memory_map(str(raw)) as source:
                return self._write_final(path, _grouped(pa.ipc.open_file(source), keys))
        finally:
            raw.unlink(missing_ok=True)

    def _write_raw(self, raw: Path, progress: Callable[[int], None]) -> NDArray[np.int64]:
        """One entry a row, in the order they come; the answer says which are of the same picture."""
        keys = array("q")
        with pa.ipc.new_file(str(raw), SCHEMA) as writer:
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
        """Rows that follow each other and name the same picture become one here already."""
        last: Entry | None = None
        for row in self.listing.rows:
            row = row if isinstance(row, Fault) else self._allowed(checked(row))
            if isinstance(row, Fault):
                self.faults.rows += 1
                self.faults.add(row)
            elif last and (last.name, last.offset) == (row.image, row.offset) and not row.file:
                last.captions.extend(row.captions)
            else:
                if last:
                    yield last
                side = CODES.get(SIDES.get(row.split.lower(), row.split), NO_SIDE)
                file, table = self.files.number(row.file), self.tables.number(row.table)
                last = Entry(
                    row.image, file, row.offset, row.length, table, row.line, side, list(row.captions)
                )
        if last:
            yield last

    def _allowed(self, row: Row | Fault) -> Row | Fault:
        if isinstance(row, Fault) or "://" not in row.image:
            return row
        if not row.image.startswith(("http://", "https://")):
            return Fault("refused", place(row), f"{row.image[:80]} is no file")
        if "urls" not in self.allow:
            return Fault(
                "refused", place(row), f"{row.image[:80]} is on the net; --allow urls would fetch it"
            )
        return row

    def _write_final(self, path: Path, batches: Iterator[pa.RecordBatch]) -> str:
        same = blake2b(self.root.encode(), digest_size=16)
        for file in self.files.all():
            about = os.stat(file)
            same.update(f"{os.path.abspath(file)}/{about.st_size}/{about.st_mtime_ns}".encode())
        facts = {"root": self.root, "files": self.files.all(), "tables": self.tables.all()}
        schema = SCHEMA.with_metadata({"facts": json.dumps(facts)})
        with pa.ipc.new_file(str(path), schema) as writer:
            for batch in batches:
                self.faults.rows += len(batch)
                names, inside = batch["name"].to_pylist(), batch["file"].to_numpy()
                there = np.ones(len(batch), bool)
                for i in np.flatnonzero(inside < 0):
                    stamp = self._stamp(names[i], batch, int(i))
                    if isinstance(stamp, Fault):
                        self.faults.add(stamp)
                        there[i] = False
                    same.update(str(stamp).encode())
                same.update("\n".join(names).encode())
                same.update(batch["offset"].to_numpy().tobytes() + batch["length"].to_numpy().tobytes())
                writer.write_batch(batch.filter(pa.array(there)).replace_schema_metadata(schema.metadata))
        return same.hexdigest()

    def _stamp(self, name: str, batch: pa.RecordBatch, i: int) -> str | Fault:
        """What tells a file from an earlier one of the same name; a fault if it cannot be used."""
        if "://" in name:
            return name
        path = os.path.join(self.root, name)

        def fault(kind: str, what: str) -> Fault:
            line = batch["line"][i].as_py()
            table = self.tables.all()[batch["table"][i].as_py()] if line else ""
            return Fault(kind, f"{table} line {line}" if line else path, what)

        try:
            about = os.lstat(path)
            if stat.S_ISLNK(about.st_mode):
                real = os.path.realpath(path)
                if "links" not in self.allow and not real.startswith(self.real_root + os.sep):
                    return fault("refused", f"{name} is a link that leads out, to {real} (--allow links)")
                about = os.stat(path)
        except (OSError, ValueError):
            return fault("missing file", f"there is no {name}")
        if not stat.S_ISREG(about.st_mode):
            return fault("missing file", f"{name} is not a file")
        return f"{about.st_size}/{about.st_mtime_ns}"


def _columns(batch: Sequence[Entry]) -> pa.RecordBatch:
    columns = zip(*batch, strict=True) if batch else [()] * len(SCHEMA)
    return pa.record_batch(
        [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA
    )


def _grouped(raw: pa.RecordBatchFileReader, keys: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Entries of the same picture joined, each where it first stood."""
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    if len(first) == len(keys):
        yield from (raw.get_batch(i) for i in range(raw.num_record_batches))
        return
    order = np.lexsort((np.arange(len(keys)), first[group]))  # rows by the place of their picture's first
    starts = np.flatnonzero(np.diff(first[group][order], prepend=-1))
    ends = np.append(starts[1:], len(order))
    table = raw.read_all()
    for at in range(0, len(starts), BATCH):
        begin, end = starts[at : at + BATCH], ends[at : at + BATCH]
        taken = table.take(order[begin[0] : end[-1]]).combine_chunks()
        heads = taken.take(begin - begin[0])
        captions = taken["captions"].combine_chunks()
        lengths = np.concatenate([[0], np.cumsum(np.diff(captions.offsets.to_numpy()))])
        cuts = lengths[np.append(begin, end[-1]) - begin[0]].astype(np.int32)
        joined = pa.ListArray.from_arrays(pa.array(cuts), captions.flatten())
        columns = [joined if name == "captions" else heads[name].combine_chunks() for name in SCHEMA.names]
        yield pa.record_batch(columns, SCHEMA)


class Indexed:
    """Pairs of an index, all or some of them. What is opened is opened anew in each process."""

    def __init__(self, path: Path, fingerprint: str, rows: Rows | None = None):
        self.path, self.fingerprint = path, fingerprint
        self.rows = np.arange(self._table.num_rows) if rows is None else rows

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "fingerprint": self.fingerprint, "rows": self.rows}

    def take(self, rows: Rows) -> "Indexed":
        chosen = self.rows[rows]
        name = blake2b(chosen.tobytes(), digest_size=8).hexdigest()
        return Indexed(self.path, f"{self.fingerprint}/{name}", chosen)

    @cached_property
    def _table(self) -> pa.Table:
        return pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()

    @cached_property
    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._table.schema.metadata[b"facts"])
        return facts

    def column(self, name: str) -> NDArray[Any]:
        values: NDArray[Any] = self._table[name].to_numpy()
        return values[self.rows]

    def _value(self, name: str, index: int) -> Any:
        return self._table[name][int(self.rows[index])].as_py()

    def __len__(self) -> int:
        return len(self.rows)

    def captions(self, index: int) -> Sequence[str]:
        return Captions(self._table["captions"][int(self.rows[index])].values)

    def row(self, index: int) -> str:
        """Where a person finds it."""
        name, line = self._value("name", index), self._value("line", index)
        if line:
            return f"{self._facts['tables'][self._value('table', index)]} line {line} ({name})"
        file = self._value("file", index)
        return (
            f"{self._facts['files'][file]}: {name}" if file >= 0 else os.path.join(self._facts["root"], name)
        )

    def name(self, index: int) -> str:
        name: str = self._value("name", index)
        return name

    def container(self) -> NDArray[np.int32]:
        """The number of the file that holds each picture among others; -1 where it is a file itself."""
        return self.column("file")

    def read(self, index: int) -> bytes:
        """The picture's bytes as they lie on the disk."""
        name, file = self._value("name", index), self._value("file", index)
        if file >= 0:
            path = self._facts["files"][file]
        else:
            path = fetched(name) if "://" in name else os.path.join(self._facts["root"], name)
        try:
            with open(path, "rb") as handle:
                size = self._value("length", index) or os.fstat(handle.fileno()).st_size
                if size > MOST_BYTES:
                    raise BadPicture("refused", f"{size:,} bytes are too many for a picture")
                handle.seek(self._value("offset", index))
                return handle.read(size)
        except FileNotFoundError:
            raise BadPicture("missing file", "there is no such file") from None
        except OSError as error:
            raise BadPicture("unreadable", f"cannot be read ({error.strerror})") from None

    def image(self, index: int, least: int = 0) -> Image.Image:
        return decode(self.read(index), least)


class Captions(Sequence[str]):
    """Read one by one: a picture may have very many."""

    def __init__(self, values: pa.StringArray):
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        found = self.values[index]
        return found.to_pylist() if isinstance(index, slice) else found.as_py()
