"""Decoded pixels: every picture once, at the size the model sees, as bytes in a memory-mapped file.

Built by all cores, kept between runs, complete or absent. No torch, so its workers start quickly.
"""

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

from m1clip import pictures
from m1clip.data.pairs import Pairs
from m1clip.pictures import Pixels, square
from m1clip.sensors import readable

CHUNK = 256


def cache_folder() -> Path:
    return Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def pixels(pairs: Pairs, size: int, progress: Callable[[int], None] = lambda done: None) -> Pixels:
    """All pictures (N, size, size, 3); `progress` hears how many more are done."""
    path, found = _find(pairs, size)
    if found is not None:
        progress(len(pairs))
        return found
    require_room(size, pairs)
    with _aside(path) as file:
        # Written, not mapped: on a full disk a write fails with an error, a mapped page kills the process.
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(pairs), size, size, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in _decoded(pairs, size):
            file.write(part.tobytes())
            progress(len(part))
    return _open(path)


def require_room(size: int, *sources: Pairs) -> None:
    """Refuses what would not fit on the disk, before it is begun."""
    need = sum(len(pairs) * size * size * 3 for pairs in sources if _find(pairs, size)[1] is None)
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    free = free_bytes(folder)
    if need > free:
        room = f"{folder} has {readable(free)} free, the decoded pictures need {readable(need)}"
        raise OSError(f"{room}; set M1CLIP_CACHE to a folder elsewhere")


def _find(pairs: Pairs, size: int) -> tuple[Path, Pixels | None]:
    """Where the pictures' file is or would be, and its content if it is there and whole."""
    how = Path(pictures.__file__).read_text()  # a picture squared otherwise is another picture
    name = sha256(f"{pairs.fingerprint}/{size}/{how}".encode()).hexdigest()[:16]
    path = cache_folder() / f"pixels-{name}.npy"
    try:
        found = _open(path)
    except (FileNotFoundError, ValueError, EOFError):
        return path, None
    return path, found if found.shape == (len(pairs), size, size, 3) else None


def _open(path: Path) -> Pixels:
    mapped: Pixels = np.load(path, mmap_mode="r")
    return mapped


@contextmanager
def _aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` if the block ends well, and vanishes if it does not."""
    for left in path.parent.glob(f"{path.name}.*"):  # by a process that was killed
        if left.suffix[1:].isdecimal() and not psutil.pid_exists(int(left.suffix[1:])):
            left.unlink(missing_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with open(aside, "wb") as file:
            yield file
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _decoded(pairs: Pairs, size: int) -> Iterator[Pixels]:
    chunks = [range(i, min(i + CHUNK, len(pairs))) for i in range(0, len(pairs), CHUNK)]
    if len(chunks) == 1:
        yield _decode(pairs, size, chunks[0])
        return
    # Spawned, because forking a process that has threads (torch's, say) can deadlock.
    with ProcessPoolExecutor(
        mp_context=multiprocessing.get_context("spawn"), initializer=_follow_parent
    ) as pool:
        yield from pool.map(_decode, *zip(*((pairs, size, chunk) for chunk in chunks), strict=True))


def _decode(pairs: Pairs, size: int, rows: range) -> Pixels:
    return np.stack([square(pairs.image(i), size) for i in rows])


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent, which ends the pool; and end with it, should it be killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
