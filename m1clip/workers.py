"""Processes that apply one function to chunks of work, such as decoding images. No torch."""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

TASKS_PER_WORKER = 4  # queued, running or done but not yet consumed: bounds the memory
T = TypeVar("T")
Rows = Sequence[Any]  # numbers of rows, or names of files


class WorkerDied(RuntimeError):  # noqa: N818 - what happened, not a fault of the program
    """A worker process was killed, by the system for lack of memory or by a file that crashes the decoder."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def row_chunks(rows: int, size: int) -> list[range]:
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def map_chunks(function: Callable[[Rows], T], chunks: Sequence[Rows], workers: int) -> Iterator[T]:
    """Results in order. One chunk or `workers=1` runs in the main process."""
    if len(chunks) == 1 or workers == 1:
        yield from map(function, chunks)
    else:
        with closing(WorkerPool(function, workers)) as pool:
            yield from pool.map(chunks)


class WorkerPool(Generic[T]):
    """Processes that apply one function, picklable and sent to each of them once, to chunks of rows.

    They are spawned, because forking a threaded process can deadlock.
    """

    def __init__(self, function: Callable[[Rows], T], workers: int):
        self.workers = workers or usable_cores()
        context = multiprocessing.get_context("spawn")
        with safe_path():  # its queues start multiprocessing's resource tracker
            self.executor = ProcessPoolExecutor(self.workers, context, _start_worker, (function,))
        atexit.register(self.close)  # before Python joins its children: after a second Ctrl-C it would wait forever

    def map(self, chunks: Iterable[Rows]) -> Iterator[T]:
        pending = deque[tuple[Rows, Future[T]]]()
        try:
            for rows in chunks:
                pending.append((rows, self._submit(rows)))
                if len(pending) > TASKS_PER_WORKER * self.workers:
                    rows, future = pending.popleft()
                    yield future.result()
            while pending:
                rows, future = pending.popleft()
                yield future.result()
        except BrokenProcessPool:
            raise WorkerDied(
                f"a worker process was killed near image {rows[0]}: out of memory (--workers 1 needs less), "
                "or a file that crashes the decoder"
            ) from None

    def _submit(self, rows: Rows) -> Future[T]:
        """Submitting may start a process, which inherits the blocked Ctrl-C: it would print a traceback."""
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with safe_path() if len(self.executor._processes or ()) < self.workers else nullcontext():
                return self.executor.submit(_apply, rows)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def close(self) -> None:
        atexit.unregister(self.close)
        processes = list((self.executor._processes or {}).values())  # None after a shutdown
        self.executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()


_environment = threading.Lock()


@contextmanager
def safe_path() -> Iterator[None]:
    """Python processes started in the block do not import modules from the current folder, nor the user's script.

    A script that calls m1clip outside of `if __name__ == "__main__"` would call it again in each worker.
    Nor does multiprocessing's resource tracker warn of semaphores after Ctrl-C.
    """
    with _environment:
        script = vars(sys.modules["__main__"])
        hidden: dict[str, Any] = {name: script[name] for name in ("__file__", "__spec__") if name in script}
        script |= dict.fromkeys(hidden)
        previous = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONWARNINGS")}
        quiet = "ignore::UserWarning:multiprocessing.resource_tracker"
        warnings = ",".join(filter(None, (previous["PYTHONWARNINGS"], quiet)))
        os.environ.update({"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": warnings})
        try:
            yield
        finally:
            script |= hidden
            for name, value in previous.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


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
