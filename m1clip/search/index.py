"""The index of a photo library: vectors in one file, and the files that they belong to in SQLite.

There is one index for each vision encoder. A vector belongs to the content of a file, so copies share it and a file
that was moved keeps it. Vectors are appended and synced before the database names them: whatever a killed process
left behind them is overwritten by the next one.

Shapes: N rows, E embedding.
"""

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from m1clip.files import cache_folder, fsync
from m1clip.onnx_model import OnnxCLIP
from m1clip.search.scan import Version

FORMAT = 1  # of the database; an index of another one is built again
SCHEMA = f"""
CREATE TABLE vectors(generation INTEGER NOT NULL);
INSERT INTO vectors VALUES (0);
CREATE TABLE image(
    row INTEGER PRIMARY KEY, content BLOB NOT NULL UNIQUE, width INTEGER NOT NULL, height INTEGER NOT NULL, taken REAL,
    hash BLOB NOT NULL);
CREATE TABLE file(
    path BLOB PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, row INTEGER,
    kind TEXT, reason TEXT) WITHOUT ROWID;
CREATE INDEX file_row ON file(row);
PRAGMA user_version = {FORMAT};
"""
WAIT_S = 60.0  # for another process that writes
MIN_UNUSED = 1_000  # vectors without a file, from which on they are removed, if they are also a quarter of all
Floats = NDArray[np.float32]


class ImageFacts(NamedTuple):
    """What is known of the content of a file beside its vector."""

    content: bytes  # hash of the bytes
    width: int
    height: int
    taken: float | None  # seconds since 1970, by the camera's clock
    hash: bytes  # perceptual, as bytes of one perceptual_hash.HASH


class FileRecord(NamedTuple):
    """A file, with the row of its vector, or the reason why it has none."""

    path: bytes
    version: Version
    row: int | None
    kind: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class ImageFile:
    """A file that can be found, and what a result of a search shows of it."""

    row: int
    path: Path
    width: int
    height: int
    taken: float | None
    mtime: float

    @property
    def date(self) -> datetime:
        """When it was taken by the camera's clock, or else changed by the local one; without a time zone."""
        if self.taken is not None:
            return datetime.fromtimestamp(self.taken, UTC).replace(tzinfo=None)
        return datetime.fromtimestamp(self.mtime).replace(microsecond=0)


class Index:
    def __init__(self, folder: Path, width: int):
        self.folder, self.width = folder, width
        self.row_bytes = 4 * width
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self.database = open_database(folder / "files.sqlite")
        if not self.is_intact:
            self.database.close()
            with self.locked(wait=True):  # or two processes would replace it
                self.database = open_database(folder / "files.sqlite")
                if not self.is_intact:  # nor has another process done it meanwhile
                    self.database.close()
                    remove_files_of_index(folder)
                    self.database = open_database(folder / "files.sqlite")

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def locked(self, wait: bool, report: Callable[[], None] | None = None) -> Iterator[bool]:
        """Only one process writes; yields whether it is this one. `report` is called if it has to wait."""
        handle, is_mine = os.open(self.folder, os.O_RDONLY), True
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_mine = wait
                if wait:
                    if report:
                        report()
                    fcntl.flock(handle, fcntl.LOCK_EX)
            yield is_mine
        finally:
            os.close(handle)

    # Reading

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All that the block reads is of one moment: no other process writes meanwhile."""
        if self.database.in_transaction:
            yield
            return
        with self.database:
            self.database.execute("BEGIN")
            yield

    @property
    def is_intact(self) -> bool:
        """Whether the database can be read, and all vectors that it names are there."""
        try:
            (version,) = self.database.execute("PRAGMA user_version").fetchone()
            if version != FORMAT:
                return False
            with self.snapshot():
                rows, path = self.row_count, self.vectors_path
                return rows == 0 or (path.exists() and path.stat().st_size >= rows * self.row_bytes)
        except sqlite3.OperationalError:  # locked, or a failing disk
            raise
        except sqlite3.DatabaseError:
            return False

    @property
    def data_version(self) -> int:
        """A number that changes when another process changes the index."""
        (version,) = self.database.execute("PRAGMA data_version").fetchone()
        return int(version)

    @property
    def generation(self) -> int:
        """Of the rows: another one has other numbers."""
        (generation,) = self.database.execute("SELECT generation FROM vectors").fetchone()
        return int(generation)

    @property
    def vectors_path(self) -> Path:
        return self.folder / f"vectors-{self.generation}.f32"

    @property
    def row_count(self) -> int:
        """Rows of the file of vectors, also those without a file."""
        (count,) = self.database.execute("SELECT coalesce(max(row), -1) + 1 FROM image").fetchone()
        return int(count)

    def open_vectors(self) -> Floats:
        """(N, E), memory-mapped."""
        with self.snapshot():
            count = self.row_count
            if not count:
                return np.zeros((0, self.width), np.float32)
            return np.memmap(self.vectors_path, np.float32, "r", shape=(count, self.width))

    def rows_below(self, folder: Path) -> NDArray[np.int64]:
        """Rows of the images below a folder, each once, in order."""
        query = "SELECT row FROM file WHERE path >= ? AND path < ? AND row IS NOT NULL"
        rows = np.fromiter((row for (row,) in self.database.execute(query, path_range(folder))), np.int64)
        rows.sort()
        return rows[np.diff(rows, prepend=-1) > 0]  # np.unique would import numpy.ma

    def files_below(self, folder: Path) -> dict[bytes, FileRecord]:
        query = "SELECT path, size, mtime_ns, ctime_ns, row, kind, reason FROM file WHERE path >= ? AND path < ?"
        found = self.database.execute(query, path_range(folder))
        return {
            path: FileRecord(path, Version(*version), *rest)
            for path, version, rest in ((row[0], row[1:4], row[4:]) for row in found)
        }

    def image_files(self, folder: Path, rows: Sequence[int] | None = None) -> list[ImageFile]:
        """The files below a folder that have one of these rows, or any, by row and path."""
        query = """SELECT row, path, width, height, taken, mtime_ns FROM file JOIN image USING (row)
            WHERE path >= ? AND path < ?"""
        if rows is not None:
            query += f" AND row IN ({','.join('?' * len(rows))})"
        found = self.database.execute(f"{query} ORDER BY row, path", (*path_range(folder), *(rows or ())))
        return [
            ImageFile(row, Path(os.fsdecode(path)), width, height, taken, mtime_ns / 1e9)
            for row, path, width, height, taken, mtime_ns in found
        ]

    def described_files(self, folder: Path) -> list[tuple[Any, ...]]:
        """What a catalog holds of the files below a folder, by row and path."""
        query = """SELECT row, path, size, mtime_ns, width, height, taken, content FROM file JOIN image USING (row)
            WHERE path >= ? AND path < ? ORDER BY row, path"""
        return self.database.execute(query, path_range(folder)).fetchall()

    def row_of(self, content: bytes) -> int | None:
        found = self.database.execute("SELECT row FROM image WHERE content = ?", (content,)).fetchone()
        return found[0] if found else None

    def perceptual_hashes(self) -> dict[int, bytes]:
        return dict(self.database.execute("SELECT row, hash FROM image"))

    # Writing, only while it is locked

    def add(self, images: Sequence[ImageFacts], vectors_NE: Floats, files: Iterable[FileRecord]) -> None:
        """Append vectors, then name them and their files in one transaction."""
        first = self.row_count
        if images:
            self._append(vectors_NE, first)
        rows = [(first + i, *facts) for i, facts in enumerate(images)]
        records = [(file.path, *file.version, file.row, file.kind, file.reason) for file in files]
        self._write(
            ("INSERT INTO image VALUES (?, ?, ?, ?, ?, ?)", rows),
            ("INSERT OR REPLACE INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", records),
        )

    def _append(self, vectors_NE: Floats, first: int) -> None:
        path, data = self.vectors_path, vectors_NE.tobytes()
        with writing(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                os.ftruncate(handle, first * self.row_bytes)  # what a killed process wrote, but did not name
                offset = first * self.row_bytes
                while data:
                    written = os.pwrite(handle, data, offset)
                    data, offset = data[written:], offset + written
            finally:
                os.close(handle)
            fsync(path)

    def remove_files(self, paths: Iterable[bytes]) -> None:
        self._write(("DELETE FROM file WHERE path = ?", [(path,) for path in paths]))

    def _write(self, *statements: tuple[str, Sequence[tuple[Any, ...]]]) -> None:
        with writing(self.folder), self.database:
            self.database.execute("BEGIN IMMEDIATE")
            for sql, rows in statements:
                self.database.executemany(sql, rows)

    def compact(self) -> bool:
        """Remove vectors that belong to no file any more, if there are many."""
        unused = "FROM image WHERE row NOT IN (SELECT row FROM file WHERE row IS NOT NULL)"
        ((count,),) = self.database.execute(f"SELECT count(*) {unused}")
        if count < max(MIN_UNUSED, self.row_count / 4):
            return False
        old, vectors_NE = self.vectors_path, self.open_vectors()
        kept = [row for (row,) in self.database.execute(f"SELECT row FROM image EXCEPT SELECT row {unused}")]
        generation = self.generation + 1
        new = self.folder / f"vectors-{generation}.f32"
        with writing(new):
            with open(new, "wb") as file:
                for start in range(0, len(kept), 4096):
                    file.write(vectors_NE[kept[start : start + 4096]].tobytes())
            fsync(new)
        moved = list(enumerate(kept))  # in order, so that a row moves to a free one
        self._write(
            (f"DELETE {unused}", [()]),
            ("UPDATE image SET row = ? WHERE row = ?", moved),
            ("UPDATE file SET row = ? WHERE row = ?", moved),
            ("UPDATE vectors SET generation = ?", [(generation,)]),
        )
        old.unlink(missing_ok=True)
        return True

    def remove_leftovers(self) -> None:
        """Files of vectors that a killed process made and the database does not name."""
        current = self.vectors_path
        for path in self.folder.glob("vectors-*.f32"):
            if path != current:
                path.unlink(missing_ok=True)


def index_of(model: OnnxCLIP) -> Index:
    """The index of a model's vision encoder, in the cache; another encoder or another preprocessing has another."""
    key = sha256(f"{model.vision_key}/{model.config.vision.preprocess}/{FORMAT}".encode()).hexdigest()[:16]
    return Index(cache_folder() / f"search-{key}", model.config.embed_dim)


def open_database(path: Path) -> sqlite3.Connection:
    """The database of an index, made if it is missing."""
    database = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
    try:
        if not database.execute("PRAGMA user_version").fetchone()[0]:
            database.execute("BEGIN IMMEDIATE")  # waits for another process that makes it
            if not database.execute("PRAGMA user_version").fetchone()[0]:
                for statement in SCHEMA.split(";"):
                    database.execute(statement)
            database.execute("COMMIT")
    except sqlite3.OperationalError as error:
        raise OSError(f"{path} cannot be opened: {error}; M1CLIP_CACHE names another folder") from None
    except sqlite3.DatabaseError:
        pass  # it is no database; whoever opened it notices
    return database


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Let an error of the block be one sentence that names this path and the way out."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"{path} cannot be written: {reason}; M1CLIP_CACHE names another folder") from None


def remove_files_of_index(folder: Path) -> None:
    for file in (*folder.glob("files.sqlite*"), *folder.glob("vectors-*.f32")):
        file.unlink(missing_ok=True)


def path_range(folder: Path) -> tuple[bytes, bytes]:
    """Paths below a folder are at least the first and less than the second."""
    prefix = os.fsencode(folder).rstrip(b"/")
    return prefix + b"/", prefix + b"0"  # the byte after "/"
