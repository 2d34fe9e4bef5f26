"""Decoded pixels: every picture once, at the size the model sees, as bytes in a memory-mapped file.

Built by all cores, kept between runs, complete or absent. No torch, so its workers start quickly.
"""

import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from m1clip.data.pairs import Pairs
from m1clip.pictures import Pixels, square

CHUNK = 256


def cache_folder() -> Path:
    return Path(os.environ.get("M1CLIP_CACHE") or Path.home() / ".cache" / "m1clip")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def pixels(pairs: Pairs, size: int, progress: Callable[[int], None] = lambda done: None) -> Pixels:
    """All pictures (N, size, size, 3); `progress` hears how many more are done."""
    name = sha256(f"{pairs.fingerprint}/{size}".encode()).hexdigest()[:16]
    path = cache_folder() / f"pixels-{name}.npy"
    shape = (len(pairs), size, size, 3)
    try:
        found = np.load(path, mmap_mode="r")
        if found.shape == shape:
            progress(len(pairs))
            return found  # type: ignore[no-any-return]
    except (FileNotFoundError, ValueError, EOFError):
        pass  # absent or damaged: made anew below
    path.parent.mkdir(parents=True, exist_ok=True)
    need, free = math.prod(shape), free_bytes(path.parent)
    if need > free:
        sizes = (
            f"{need / 1e9:.2f} GB of decoded pictures do not fit in {path.parent} ({free / 1e9:.2f} GB free)"
        )
        raise OSError(f"{sizes}; set M1CLIP_CACHE to a folder elsewhere")
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        whole = np.lib.format.open_memmap(aside, mode="w+", dtype=np.uint8, shape=shape)
        start = 0
        for part in _decoded(pairs, size):
            whole[start : start + len(part)] = part
            start += len(part)
            progress(len(part))
        whole.flush()
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def _decoded(pairs: Pairs, size: int) -> Iterator[Pixels]:
    chunks = [range(i, min(i + CHUNK, len(pairs))) for i in range(0, len(pairs), CHUNK)]
    if len(chunks) == 1:
        yield _decode(pairs, size, chunks[0])
        return
    # Spawned, because forking a process that has threads (torch's, say) can deadlock.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_ignore_ctrl_c) as pool:
        yield from pool.map(_decode, *zip(*((pairs, size, chunk) for chunk in chunks), strict=True))


def _decode(pairs: Pairs, size: int, rows: range) -> Pixels:
    return np.stack([square(pairs.image(i), size) for i in rows])


def _ignore_ctrl_c() -> None:
    """The parent hears it and ends the pool; workers that also raise would only litter the screen."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
