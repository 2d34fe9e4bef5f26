"""The files of a library in memory: what pages show of them, and filters by folder and date.

Shapes: N images, in the order of `Library.rows_N`; F files, by image and path. Copies are files of one image.
"""

import os
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, date, datetime
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m1clip.search.query import Library

DAY = 86_400.0  # seconds
FIRST_SECOND, LAST_SECOND = -62_000_000_000.0, 253_300_000_000.0  # that a date can be made of in any time zone
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Catalog:
    def __init__(self, library: Library):
        self.library = library
        known = dict(zip(library.rows_N.tolist(), range(len(library)), strict=True))
        files = [file for file in library.index.described_files(library.folder) if file[0] in known]
        rows, paths, sizes, mtimes, widths, heights, taken, contents = zip(*files, strict=True) if files else [()] * 8
        self.paths: Sequence[bytes] = paths
        self.position_F: Ints = np.array([known[row] for row in rows], np.int64)
        self.sizes, self.mtimes_ns = sizes, mtimes
        self.date_F = np.array([seconds_of(*times) for times in zip(taken, mtimes, strict=True)], np.float64)
        self.first_N: Ints = np.searchsorted(self.position_F, np.arange(len(library) + 1))  # file of each; and the end
        shown = self.first_N[:-1].tolist()
        self.shapes = [(widths[file], heights[file]) for file in shown]
        self.contents: list[bytes] = [contents[file] for file in shown]  # hashes
        self._prefix = len(os.fsencode(library.folder).rstrip(b"/")) + 1

    def __len__(self) -> int:
        return len(self.library)

    def position(self, row: int) -> int | None:
        """Of the image that has this row in the index; None if it is not in this library."""
        position = bisect_left(self.library.rows_N, row)
        return position if position < len(self) and self.library.rows_N[position] == row else None

    def files(self, position: int) -> list[int]:
        return list(range(self.first_N[position], self.first_N[position + 1]))

    def path(self, file: int) -> Path:
        return Path(os.fsdecode(self.paths[file]))

    def name(self, file: int) -> str:
        """Relative to the folder of the library; bytes that are not UTF-8 are replaced."""
        return self.paths[file][self._prefix :].decode(errors="replace")

    def date_of(self, file: int) -> datetime:
        return datetime.fromtimestamp(self.date_F[file], UTC).replace(tzinfo=None, microsecond=0)

    @cached_property
    def newest(self) -> Ints:
        """Positions of all images, by the date of their first file."""
        return np.argsort(-self.date_F[self.first_N[:-1]], kind="stable")

    @cached_property
    def folder_names(self) -> list[str]:
        """Folders of the files, sorted so that those below a folder follow it."""
        names = {self.name(file).rpartition("/")[0] for file in range(len(self.paths))}
        return sorted(names, key=lambda name: name.split("/"))

    @cached_property
    def folder_F(self) -> Ints:
        """Of each file, as an index of `folder_names`."""
        number = {name: index for index, name in enumerate(self.folder_names)}
        return np.array([number[self.name(file).rpartition("/")[0]] for file in range(len(self.paths))], np.int64)

    @cached_property
    def folders(self) -> dict[str, range]:
        """All folders below the library's, which is "", each with the folders in `folder_names` that it contains."""
        folders = {"": range(len(self.folder_names))}
        for number, name in enumerate(self.folder_names):
            parts = name.split("/") if name else []
            for depth in range(1, len(parts) + 1):
                folder = "/".join(parts[:depth])
                folders[folder] = range(folders.get(folder, range(number, 0)).start, number + 1)
        return folders

    def count_files(self) -> dict[str, int]:
        """Files in each folder and below it."""
        before = np.concatenate([[0], np.cumsum(np.bincount(self.folder_F, minlength=len(self.folder_names)))])
        return {name: int(before[inside.stop] - before[inside.start]) for name, inside in self.folders.items()}

    def select(self, folder: str = "", first: date | None = None, last: date | None = None) -> Bools:
        """Which files (F,) are in a folder or below it, and of these days, the last one included."""
        is_selected_F = np.ones(len(self.paths), np.bool_)
        if folder:
            inside = self.folders[folder]
            is_selected_F &= (self.folder_F >= inside.start) & (self.folder_F < inside.stop)
        if first:
            is_selected_F &= self.date_F >= seconds_of_day(first)
        if last:
            is_selected_F &= self.date_F < seconds_of_day(last) + DAY
        return is_selected_F

    def images_of(self, is_selected_F: Bools) -> Bools:
        """Which images (N,) have a selected file."""
        is_image_N = np.zeros(len(self), np.bool_)
        is_image_N[self.position_F[is_selected_F]] = True
        return is_image_N


def seconds_of(taken: float | None, mtime_ns: int) -> float:
    """Since 1970, by the camera's clock, or else by the local one, as if they showed UTC."""
    if taken is not None:
        return taken
    local = datetime.fromtimestamp(min(max(mtime_ns / 1e9, FIRST_SECOND), LAST_SECOND))
    return local.replace(tzinfo=UTC).timestamp()


def seconds_of_day(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()
