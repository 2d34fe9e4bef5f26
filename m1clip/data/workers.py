"""Worker processes that decode images. Spawned, because forking a threaded process can deadlock. No torch."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from m1clip.data.decode import BadImage
from m1clip.data.rows import BadImages, PairDataset
from m1clip.images import Pixels, center_crop

T = TypeVar("T")
Rows = Sequence[int]
TASKS_PER_WORKER = 4  # queued, running or done but not yet consumed: bounds the memory


class Decoded(NamedTuple):
    pixels: Pixels
    """(rows, height, width, 3); black where an image cannot be decoded."""
    bad: BadImages


def decode_rows(pairs: PairDataset, image_size: int, rows: Rows) -> Decoded:
    pixels, bad = np.zeros((len(rows), image_size, image_size, 3), np.uint8), BadImages()
    for i, row in enumerate(rows):
        try:
            pixels[i] = center_crop(pairs.image(row, 2 * image_size), image_size)
        except BadImage as error:
            bad[row] = (error.kind, str(error))
    return Decoded(pixels, bad)


def row_chunks(rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def map_chunks(function: Callable[[Rows], T], chunks: Sequence[Rows], workers: int) -> Iterator[T]:
    """Results in order. One chunk or `workers=1` runs in the main process."""
    if len(chunks) == 1 or workers == 1:
        yield from map(function, chunks)
        return
    with closing(WorkerPool(function, workers)) as pool:
        yield from pool.map(chunks)


class WorkerPool(Generic[T]):
    """Processes that apply one function, picklable and sent to each of them once, to chunks of rows."""

    def __init__(self, function: Callable[[Rows], T], workers: int):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.workers = workers or cores or 1
        context = multiprocessing.get_context("spawn")
        self.executor = ProcessPoolExecutor(self.workers, context, _start_worker, (function,))

    def map(self, chunks: Iterable[Rows]) -> Iterator[T]:
        """Results in order."""
        pending = deque[tuple[Rows, Future[T]]]()
        for rows in chunks:
            pending.append((rows, self.executor.submit(_apply, rows)))
            if len(pending) > TASKS_PER_WORKER * self.workers:
                yield self._result(*pending.popleft())
        while pending:
            yield self._result(*pending.popleft())

    def _result(self, rows: Rows, future: "Future[T]") -> T:
        try:
            return future.result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"a worker process was killed near image {rows[0]}: out of memory (--workers 1 needs less), "
                "or a file that crashes the decoder"
            ) from None

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)


_function: Callable[[Rows], Any]


def _start_worker(function: Callable[[Rows], Any]) -> None:
    """Leave Ctrl-C to the parent, exit if it is killed, and run at a lower priority than training."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(rows: Rows) -> Any:
    return _function(rows)
