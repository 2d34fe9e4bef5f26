"""The cache folder, and how much of the disk it may take. What is oldest and not in use goes first."""

import atexit
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from tempfile import mkdtemp

from m1clip.files import cache_folder
from m1clip.format import file_size

OURS = (
    "pixels-",
    "index-",
    "content-",
    "features-",
)  # what is made from data that is elsewhere, and can be made again
RESERVE = 1e9  # bytes of the disk that are never taken, or a twentieth of a small one


@contextmanager
def explained_if_full(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == ENOSPC or "No space left" in str(error):
            raise OSError(
                f"the disk of {folder.parent} is full; set M1CLIP_CACHE to a folder elsewhere"
            ) from None
        raise


def free_bytes(folder: Path) -> int:
    """What may be taken: the last of the disk is left alone."""
    usage = shutil.disk_usage(folder)
    return int(usage.free - min(RESERVE, usage.total / 20))


def make_room(need: int, most: float, keep: Path, what: str = "decoded images") -> bool:
    """Whether `need` more bytes fit into a cache of `most`; older things that nobody uses are removed for it.

    A disk without room is an error, because what fits into the cache was promised.
    """
    folder = cache_folder()
    things = sorted((one for one in folder.iterdir() if one.name.startswith(OURS)), key=_age)
    sizes = {one: size_of(one) for one in things}
    spare = [one for one in things if one != keep and _is_free(one)]
    if sum(sizes.values()) - sum(sizes[one] for one in spare) + need > most:
        return False
    taken = sum(sizes.values())
    for one in spare:
        if taken + need <= most and need <= free_bytes(folder):
            break
        if _remove(one):
            taken -= sizes[one]
    if need > free_bytes(folder):
        raise OSError(
            f"{folder} has room for {file_size(max(0, free_bytes(folder)))}, the {what} need "
            f"{file_size(need)}; set M1CLIP_CACHE to a folder elsewhere"
            + (", or --cache-gb 0 to decode live" if what == "decoded images" else "")
        )
    return True


def own_folder(prefix: str) -> Path:
    """A folder for this process alone, gone when it ends; what processes that were killed left goes now."""
    for left in cache_folder().glob(f"{prefix}*"):
        _remove(left)
    folder = Path(mkdtemp(prefix=prefix, dir=cache_folder()))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # until we end, however we do
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _age(one: Path) -> float:
    try:
        return one.lstat().st_mtime
    except FileNotFoundError:  # others come and go
        return 0.0


def size_of(path: Path) -> int:
    total = 0
    for one in (path, *path.rglob("*")):
        with suppress(FileNotFoundError):
            total += 0 if one.is_dir() else one.lstat().st_size
    return total


def _is_free(one: Path) -> bool:
    """Whether it is in nobody's hands."""
    with _free(one) as free:
        return free


def _remove(one: Path) -> bool:
    """Whether it could go."""
    with _free(one) as free:
        if free and one.is_dir():
            shutil.rmtree(one, ignore_errors=True)
        elif free:
            one.unlink(missing_ok=True)
        return free


@contextmanager
def _free(one: Path) -> Iterator[bool]:
    """Whether nobody else holds it, kept so for the block."""
    try:
        handle = os.open(one, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(handle)
