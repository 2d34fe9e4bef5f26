"""Figures of a server for Prometheus; those of several workers are added up."""

import os
from functools import lru_cache
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
    multiprocess,
)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32)


class Metrics:
    """`folder` is where several workers write their figures."""

    def __init__(self, folder: str | None = None):
        registry = CollectorRegistry()
        self.requests = Counter("m1clip_requests", "HTTP requests", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "m1clip_request_seconds", "time of a request", ["path"], buckets=SECONDS, registry=registry
        )
        self.items = Counter("m1clip_items", "encoded texts and images", ["encoder"], registry=registry)
        self.batch = Histogram("m1clip_batch_items", "items of a batch", ["encoder"], buckets=SIZES, registry=registry)
        self.encode = Counter("m1clip_encode_seconds", "time in an encoder", ["encoder"], registry=registry)
        options = {"registry": registry, "multiprocess_mode": "livesum"}
        self.queue = Gauge("m1clip_queue_items", "items that wait for an encoder", ["encoder"], **options)  # type: ignore[arg-type]
        if folder is None:
            ProcessCollector(registry=registry)  # memory, CPU time, open files
        else:
            forget_dead_workers(Path(folder))
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        self.registry = registry
        self.of_request = lru_cache(1000)(lambda path, status: self.requests.labels(path, status))
        self.of_path = lru_cache(100)(lambda path: self.seconds.labels(path))

    def add_request(self, path: str, status: int, seconds: float) -> None:
        self.of_request(path, status).inc()
        self.of_path(path).observe(seconds)

    def add_batch(self, encoder: str, size: int, seconds: float, queued: int) -> None:
        self.items.labels(encoder).inc(size)
        self.batch.labels(encoder).observe(size)
        self.encode.labels(encoder).inc(seconds)
        self.queue.labels(encoder).set(queued)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def forget_dead_workers(folder: Path) -> None:
    """Their queues ended with them; their counters stay."""
    for file in folder.glob("gauge_live*.db"):
        pid = int(file.stem.rpartition("_")[2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            multiprocess.mark_process_dead(pid)  # type: ignore[no-untyped-call]
