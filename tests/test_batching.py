"""Dynamic batching of m1clip serve: what becomes one batch, who waits, and what an error reaches."""

import asyncio
import threading

import pytest

from m1clip.serve.batching import BatchQueue
from m1clip.serve.errors import RequestError


class Encoder:
    """Doubles numbers; each batch waits for its turn, and -1 is an error."""

    def __init__(self, is_open=True):
        self.batches, self.gate = [], threading.Event()
        if is_open:
            self.gate.set()

    def __call__(self, items):
        self.batches.append(list(items))
        assert self.gate.wait(120)
        if -1 in items:
            raise ValueError("unlucky")
        return [2 * item for item in items]


def run(work):
    return asyncio.run(asyncio.wait_for(work, 120))


def test_a_request_on_its_own_is_encoded_at_once():
    encoder = Encoder()
    assert run(BatchQueue(encoder, 4, 100).run([1, 2])) == [2, 4]
    assert encoder.batches == [[1, 2]]


def test_what_comes_while_the_encoder_is_busy_is_one_batch():
    async def main():
        encoder = Encoder(is_open=False)
        queue = BatchQueue(encoder, 4, 100)
        tasks = [asyncio.ensure_future(queue.run([number])) for number in range(7)]
        while not encoder.batches:
            await asyncio.sleep(0.001)
        tasks += [asyncio.ensure_future(queue.run([number])) for number in range(7, 10)]
        encoder.gate.set()
        assert await asyncio.gather(*tasks) == [[2 * number] for number in range(10)]
        assert encoder.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    run(main())


def test_a_long_request_takes_turns_with_short_ones():
    async def main():
        encoder = Encoder()
        queue = BatchQueue(encoder, 4, 100)
        long, short = asyncio.ensure_future(queue.run(list(range(20)))), asyncio.ensure_future(queue.run([100]))
        assert await short == [200]
        assert not long.done()
        assert await long == [2 * number for number in range(20)]
        assert encoder.batches[1][0] == 100

    run(main())


def test_a_full_queue_is_status_429_with_a_time_to_wait():
    async def main():
        encoder = Encoder(is_open=False)
        queue = BatchQueue(encoder, 2, 6)
        tasks = [asyncio.ensure_future(queue.run([1, 2]))]
        while not encoder.batches:
            await asyncio.sleep(0.001)
        tasks += [asyncio.ensure_future(queue.run([1, 2])) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="busy: 6 items are waiting; try again later") as refused:
            await queue.run([1])
        assert (refused.value.status_code, refused.value.headers) == (429, {"Retry-After": "1"})
        encoder.gate.set()
        await asyncio.gather(*tasks)
        assert queue.queued == 0
        assert await queue.run([5]) == [10]

    run(main())


def test_cancelled_requests_are_dropped_from_the_queue():
    async def main():
        encoder = Encoder(is_open=False)
        queue = BatchQueue(encoder, 2, 100)
        first, second, third = (asyncio.ensure_future(queue.run([number] * 2)) for number in (1, 2, 3))
        while not encoder.batches:
            await asyncio.sleep(0.001)
        second.cancel()
        encoder.gate.set()
        assert await asyncio.gather(first, third) == [[2, 2], [6, 6]]
        assert encoder.batches == [[1, 1], [3, 3]]
        assert queue.queued == 0

    run(main())


def test_an_error_reaches_only_the_request_that_caused_it():
    async def main():
        queue = BatchQueue(Encoder(), 4, 100)
        results = await asyncio.gather(*(queue.run([number]) for number in (1, -1, 3)), return_exceptions=True)
        assert (results[0], str(results[1]), results[2]) == ([2], "unlucky", [6])

    run(main())


def test_the_figures_of_a_batch_are_reported():
    seen = []
    queue = BatchQueue(Encoder(), 3, 100, lambda size, seconds, queued: seen.append((size, seconds >= 0, queued)))
    assert run(queue.run(list(range(5)))) == [0, 2, 4, 6, 8]
    assert seen == [(3, True, 2), (2, True, 0)]
