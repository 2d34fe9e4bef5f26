"""Dynamic batching: an encoder takes whatever is queued as soon as it is free."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Generic, TypeVar

from m1clip.serve.errors import busy

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Job(Generic[T, R]):
    """The items of one request."""

    items: Sequence[T]
    future: asyncio.Future[list[R]]
    results: list[R] = field(default_factory=list)
    taken: int = 0  # items that were part of a batch


Parts = list[tuple[Job[T, R], Sequence[T]]]  # the items of a batch, by the job they belong to


class BatchQueue(Generic[T, R]):
    """Runs `encode` in a thread of its own, on one batch after the other, with the items of all requests.

    No request waits for others: a batch is what came while the previous one was encoded, so it is one request
    when few are sent and `max_batch` items under load. A long request takes turns with the others.
    """

    def __init__(
        self,
        encode: Callable[[list[T]], Sequence[R]],
        max_batch: int,
        max_queue: int,
        on_batch: Callable[[int, float, int], None] = lambda size, seconds, queued: None,
    ):
        self.encode, self.max_batch, self.max_queue, self.on_batch = encode, max_batch, max_queue, on_batch
        self.thread = ThreadPoolExecutor(1)
        self.jobs = deque[Job[T, R]]()
        self.queued = 0  # items
        self.item_s = 0.0  # of the last batches, to say when to try again
        self.runner: asyncio.Task[None] | None = None

    async def run(self, items: Sequence[T]) -> list[R]:
        """The results of all items. If the caller is cancelled, its items are not encoded."""
        if self.queued + len(items) > self.max_queue:
            raise busy(f"{self.queued:,} items are waiting", self.queued * self.item_s)
        loop = asyncio.get_running_loop()
        job: Job[T, R] = Job(items, loop.create_future())
        self.jobs.append(job)
        self.queued += len(items)
        if self.runner is None:
            self.runner = loop.create_task(self._run())
        return await job.future

    async def _run(self) -> None:
        while parts := self._take():
            start = perf_counter()
            await self._encode(parts)
            size, seconds = sum(len(part) for _, part in parts), perf_counter() - start
            self.item_s += 0.2 * (seconds / size - self.item_s)
            self.on_batch(size, seconds, self.queued)
        self.runner = None

    def _take(self) -> Parts[T, R]:
        """The next batch; a job that is not finished by it goes to the end of the queue."""
        parts: Parts[T, R] = []
        free = self.max_batch
        while self.jobs and free:
            job = self.jobs.popleft()
            part = job.items[job.taken : job.taken + free]
            if job.future.done():  # cancelled, or one of its items has failed
                self.queued -= len(job.items) - job.taken
                continue
            parts.append((job, part))
            job.taken, free, self.queued = job.taken + len(part), free - len(part), self.queued - len(part)
            if job.taken < len(job.items):
                self.jobs.append(job)
        return parts

    async def _encode(self, parts: Parts[T, R]) -> None:
        items = [item for _, part in parts for item in part]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self.thread, self.encode, items)
        except Exception as error:  # reaches the requests that wait for it
            if len(parts) > 1:  # one request must not fail because of another one
                for job, part in parts:
                    await self._encode([(job, part)])
            elif not parts[0][0].future.done():
                parts[0][0].future.set_exception(error)
            return
        start = 0
        for job, part in parts:
            job.results += results[start : start + len(part)]
            start += len(part)
            if len(job.results) == len(job.items) and not job.future.done():
                job.future.set_result(job.results)

    def close(self) -> None:
        self.thread.shutdown(cancel_futures=True)
