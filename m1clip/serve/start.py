"""Starts a server: loads the model, in one process or in several."""

import asyncio
import gc
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from uvicorn.config import STARTUP_FAILURE

from m1clip.onnx_model import OnnxCLIP, load_onnx
from m1clip.serve import MAX_REQUESTS, Limits
from m1clip.web import Address
from m1clip.web.server import run_server, run_workers
from m1clip.workers import usable_cores

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from m1clip.serve.app import SearchIndex

SHUTDOWN_S = 30  # for the requests that are being answered
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # of workers; prometheus_client reads it when it is imported


@dataclass(frozen=True)
class ServeSettings:
    """All that a worker process needs to build its application."""

    folder: Path
    name: str
    limits: Limits
    address: Address
    workers: int
    allow_urls: bool
    access_log: bool
    open_index: "Callable[[], SearchIndex | None]"
    session: str = ""  # value of the cookie, the same in all workers


def serve(settings: ServeSettings) -> None:
    settings = replace(settings, session=secrets.token_urlsafe(32))
    raise_file_limit()
    what, address, options = f"serving {settings.name}", settings.address, {"timeout_graceful_shutdown": SHUTDOWN_S}
    if settings.workers == 1:
        run_server(what, lambda token, is_closing: build_app(settings), address, limit_concurrency=None, **options)
        return
    load_onnx(settings.folder).check_files()  # an error is one sentence here, and not one of each worker
    with tempfile.TemporaryDirectory(prefix="m1clip-metrics-") as folder:
        os.environ[METRICS_FOLDER] = folder
        run_workers(what, partial(build_worker, settings), address, settings.workers, limit_concurrency=None, **options)


def build_app(settings: ServeSettings, on_start: Callable[[], None] = lambda: None) -> "ASGIApp":
    """The application, with its model loaded."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # to look for them takes as long as to import numpy
    gc.disable()  # while much is imported and nothing is freed
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(load_model, settings.folder, max(1, usable_cores() // settings.workers))
        from m1clip.serve.app import Service, embedding_app  # imports FastAPI, which takes as long as the model
        from m1clip.serve.engine import Engine
        from m1clip.serve.metrics import Metrics
        from m1clip.serve.middleware import LineWriter
        from m1clip.web.access import Access

        metrics, fetch = Metrics(os.environ.get(METRICS_FOLDER)), None
        if settings.allow_urls:
            from m1clip.serve.fetch import MAX_BYTES, Fetcher

            fetch = Fetcher(min(MAX_BYTES, settings.limits.max_bytes))
        engine = Engine(loading.result(), settings.limits, fetch, metrics.add_batch)
    service = Service(engine, settings.name, metrics, settings.open_index())
    access = Access(settings.address.token, session=settings.session, api_prefix="/")
    app = embedding_app(service, access, LineWriter(print_lines) if settings.access_log else None, on_start)
    gc.enable()
    gc.freeze()  # what is there now stays: the collector need not visit it again
    return app


def load_model(folder: Path, threads: int) -> OnnxCLIP:
    """Both encoders, which have been run once: the first request is as fast as the others.

    Not on a large batch: of ViT-B/32 that takes seconds.
    """
    model = load_onnx(folder, threads)
    size = model.config.vision.image_size
    model.embed_texts(["a photo"])
    model.embed_pixels(np.zeros((1, size, size, 3), np.uint8))
    return model


def build_worker(settings: ServeSettings) -> "ASGIApp":
    """The application of a worker process, which ends with its parent."""

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            asyncio.get_running_loop().add_reader(parent.sentinel, signal.raise_signal, signal.SIGTERM)

    try:
        return build_app(settings, end_with_parent)
    except (OSError, ValueError, MemoryError) as error:
        print(f"m1clip: {error}", file=sys.stderr, flush=True)
        sys.exit(STARTUP_FAILURE)


def raise_file_limit() -> None:
    """Allow a connection for each request that may be answered at once; macOS allows 256 open files by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_REQUESTS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def print_lines(lines: bytes) -> None:
    sys.stdout.buffer.write(lines)
    sys.stdout.buffer.flush()
