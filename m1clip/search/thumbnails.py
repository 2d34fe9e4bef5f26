"""Images as browsers show them: thumbnails, which are kept in a cache, and full images."""

import hashlib
import os
import sqlite3
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from m1clip.decode import (
    DECODE_ERRORS,
    MAX_BYTES,
    ORIENTATION,
    RAW_SUFFIX,
    decode,
    decode_raw,
    quiet_pillow,
    read_header,
)
from m1clip.files import open_regular

THUMBNAIL_SIZE, THUMBNAIL_QUALITY = 320, 80  # pixels of the longer edge
FULL_SIZE, FULL_QUALITY = 2_560, 90  # of images in formats that browsers do not show
# Formats that browsers show. They turn JPEGs by their EXIF orientation, but not all of them turn the others.
MEDIA_TYPES = {name: f"image/{name.lower()}" for name in ("JPEG", "PNG", "WEBP", "GIF", "AVIF")}
MEDIA_TYPES["MPO"] = "image/jpeg"  # several JPEGs, of which browsers show the first
MAX_CACHE_BYTES, MAX_MEMORY_BYTES = 500_000_000, 50_000_000
SCHEMA = """CREATE TABLE IF NOT EXISTS thumbnail(
    number INTEGER PRIMARY KEY, content BLOB NOT NULL, size INTEGER NOT NULL, jpeg BLOB NOT NULL,
    UNIQUE(content, size))"""


def decode_file(path: Path, data: bytes, min_size: int) -> Image.Image:
    return (decode_raw if RAW_SUFFIX.search(path.name) else decode)(data, min_size)


def make_thumbnail(path: Path, data: bytes, size: int = THUMBNAIL_SIZE) -> bytes:
    """An upright JPEG."""
    return encode_jpeg(decode_file(path, data, size), size, THUMBNAIL_QUALITY)


def encode_jpeg(image: Image.Image, size: int, quality: int) -> bytes:
    image.thumbnail((size, size))
    pixels = np.ascontiguousarray(image)
    return bytes(simplejpeg.encode_jpeg(pixels, quality=quality, colorspace="RGB", colorsubsampling="420"))


def full_image(path: Path, data: bytes) -> tuple[bytes, str]:
    """Bytes and media type that any browser shows upright: those of the file, or a JPEG."""
    if not RAW_SUFFIX.search(path.name):
        header = read_header(data)
        media_type = MEDIA_TYPES.get(header.format or "")
        if media_type and (media_type == "image/jpeg" or orientation_of(header) == 1):
            return data, media_type
    return encode_jpeg(decode_file(path, data, FULL_SIZE), FULL_SIZE, FULL_QUALITY), "image/jpeg"


def orientation_of(header: Image.Image) -> int:
    with suppress(*DECODE_ERRORS), quiet_pillow():
        return int(header.getexif().get(ORIENTATION, 1))
    return 1


class ThumbnailCache:
    """Thumbnails by the hash of their file. Without a database that can be used, each is made when it is needed."""

    def __init__(self, path: Path, max_bytes: int = MAX_CACHE_BYTES):
        self.max_bytes, self.lock = max_bytes, threading.Lock()
        try:
            self.database = open_cache(path)
        except sqlite3.DatabaseError:  # it is damaged, or cannot be written
            with suppress(OSError):
                path.unlink()
            try:
                self.database = open_cache(path)
            except sqlite3.DatabaseError:
                self.database, self.max_bytes = open_cache(":memory:"), MAX_MEMORY_BYTES

    def get(self, content: bytes, size: int) -> bytes | None:
        query = "SELECT jpeg FROM thumbnail WHERE content = ? AND size = ?"
        with self.lock, suppress(sqlite3.Error):
            found = self.database.execute(query, (content, size)).fetchone()
            return found[0] if found else None
        return None

    def put(self, content: bytes, size: int, jpeg: bytes) -> None:
        """Above the limit the oldest tenth is forgotten. A full disk, for one, is no reason to fail."""
        insert = "INSERT OR IGNORE INTO thumbnail(content, size, jpeg) VALUES (?, ?, ?)"
        tenth = "(SELECT count(*) / 10 + 1 FROM thumbnail)"
        oldest = f"SELECT number FROM thumbnail ORDER BY number LIMIT {tenth}"
        with self.lock, suppress(sqlite3.Error):
            self.database.execute(insert, (content, size, jpeg))
            if self._used_bytes() > self.max_bytes:
                self.database.execute(f"DELETE FROM thumbnail WHERE number IN ({oldest})")

    def _used_bytes(self) -> int:
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (self.database.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int((pages - free) * size)

    def close(self) -> None:
        self.database.close()


def open_cache(path: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA synchronous = OFF")  # what a power cut loses is made again
    database.execute(SCHEMA)
    return database


def read_unchanged(path: Path, content: bytes) -> bytes | None:
    """The bytes of a file, if they still have the hash that they have in the index."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                return None
            data = file.read(MAX_BYTES)
    except OSError:
        return None
    return data if hashlib.blake2b(data, digest_size=len(content)).digest() == content else None


def is_unchanged(path: Path, size: int, mtime_ns: int) -> bool:
    """Whether a file has the size and time that it has in the index; others are read to know."""
    with suppress(OSError):
        status = path.stat()
        return (status.st_size, status.st_mtime_ns) == (size, mtime_ns)
    return False
