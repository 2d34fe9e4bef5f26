"""Processes that decode images. Spawned: forking a process that has threads can deadlock. No torch."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from m1clip.data.decode import BadImage
from m1clip.data.pairs import PairDataset
from m1clip.images import Pixels, square

T = TypeVar("T")
AHEAD = 4  # tasks for each worker that may be waiting, done or not: memory stays bounded


class Decoded(NamedTuple):
    pixels: Pixels
    bad: dict[int, tuple[str, str]]
    """Rows that could not be decoded, and are black: kind and sentence."""


def parts_of(number: int, size: int) -> list[range]:
    """Rows 0 … number - 1 in parts of `size`."""
    return [range(at, min(at + size, number)) for at in range(0, number, size)]


def decode_rows(pairs: PairDataset, size: int, rows: Sequence[int]) -> Decoded:
    pixels, bad = np.zeros((len(rows), size, size, 3), np.uint8), dict[int, tuple[str, str]]()
    for i, row in enumerate(rows):
        try:
            pixels[i] = square(pairs.image(row, 2 * size), size)
        except BadImage as error:
            bad[row] = (error.kind, str(error))
    return Decoded(pixels, bad)


class Workers(Generic[T]):
    """A pool that does one thing to parts of a source; what it needs is sent to each process once."""

    def __init__(self, work: Callable[[Sequence[int]], T], number: int):
        """`work` can be pickled: a function of a module, or a partial of one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.number = number or cores or 1
        spawn = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(self.number, spawn, _begin, (work,))

    def map(self, parts: Iterable[Sequence[int]]) -> Iterator[T]:
        """What came of the parts, in order."""
        waiting: list[tuple[Sequence[int], Future[T]]] = []
        for part in parts:
            waiting.append((part, self.pool.submit(_work, part)))
            if len(waiting) > AHEAD * self.number:
                yield self._result(*waiting.pop(0))
        while waiting:
            yield self._result(*waiting.pop(0))

    def _result(self, part: Sequence[int], done: "Future[T]") -> T:
        try:
            return done.result()
        except BrokenProcessPool:
            raise RuntimeError(
                f"a process that decodes images was killed near one of images {part[0]} to {part[-1]}: "
                f"too little memory (--workers 1 needs less), or a file that breaks the decoder"
            ) from None

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> "Workers[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_mine: Callable[[Sequence[int]], Any]


def _begin(work: Callable[[Sequence[int]], Any]) -> None:
    """Leave Ctrl-C to the parent, which ends the pool; end with it, if it is killed; let training lead."""
    global _mine
    _mine = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with(parent: BaseProcess) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with, args=(parent,), daemon=True).start()


def _work(rows: Sequence[int]) -> Any:
    return _mine(rows)
