"""The cache folder, and how much of the disk it may take. What is oldest and not in use goes first."""

import atexit
import fcntl
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp

from m1clip.run import locked
from m1clip.sensors import readable

RESERVE = 1e9  # bytes of the disk that are never taken, or a twentieth of a small one


def cache_folder() -> Path:
    folder = Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def free_bytes(folder: Path) -> int:
    """What may be taken: the last of the disk is left alone."""
    usage = shutil.disk_usage(folder)
    return int(usage.free - min(RESERVE, usage.total / 20))


def make_room(need: int, most: float, keep: Path) -> bool:
    """Whether `need` more bytes fit into a cache of `most`; older things that nobody uses are removed for it.

    A disk without room is an error, because what fits into the cache was promised.
    """
    folder = cache_folder()
    if need > most:
        return False
    things = sorted(folder.iterdir(), key=lambda one: one.lstat().st_mtime)
    sizes = {one: size_of(one) for one in things}
    taken = sum(sizes.values())
    for one in things:
        if taken + need <= most and need <= free_bytes(folder):
            break
        if one != keep and _remove(one):
            taken -= sizes[one]
    if need > free_bytes(folder):
        raise OSError(
            f"{folder} has room for {readable(max(0, free_bytes(folder)))}, the decoded pictures need "
            f"{readable(need)}; set M1CLIP_CACHE to a folder elsewhere, or --cache-gb 0 to decode live"
        )
    return taken + need <= most


def own_folder(prefix: str) -> Path:
    """A folder for this process alone; it goes with it, or when another of its kind is asked for."""
    for left in cache_folder().glob(f"{prefix}*"):
        _remove(left)
    folder = Path(mkdtemp(prefix=prefix, dir=cache_folder()))
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # until we end, however we do
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _remove(one: Path) -> bool:
    """Whether it could go: what can be made again, and is in nobody's hands."""
    if one.is_dir() and one.name.startswith(("pixels-", "index-")):
        with locked(one) as ours:
            if ours:
                shutil.rmtree(one, ignore_errors=True)
            return ours
    if one.is_file() and one.name.startswith(("content-", "pixels-")):  # small, or of an older version
        one.unlink(missing_ok=True)
        return True
    return False


def size_of(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(one.lstat().st_size for one in path.rglob("*"))
