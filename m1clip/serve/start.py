"""Starts a server: loads the model, in one process or in several."""

import asyncio
import gc
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from uvicorn.config import STARTUP_FAILURE

from m1clip.onnx_model import load_onnx, usable_cores
from m1clip.serve import Limits
from m1clip.serve.app import SearchIndex, Service, embedding_app
from m1clip.serve.engine import Engine
from m1clip.serve.fetch import MAX_BYTES, Fetcher
from m1clip.serve.metrics import FOLDER, Metrics
from m1clip.serve.middleware import MAX_REQUESTS
from m1clip.web import Address
from m1clip.web.access import Access, new_session
from m1clip.web.server import run_server, run_workers

SHUTDOWN_S = 30  # for the requests that are being answered


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
    open_index: Callable[[], SearchIndex | None]
    session: str = ""  # value of the cookie, the same in all workers


def serve(settings: ServeSettings) -> None:
    settings = replace(settings, address=settings.address.with_token(), session=new_session())
    raise_file_limit()
    what, address, options = f"serving {settings.name}", settings.address, {"timeout_graceful_shutdown": SHUTDOWN_S}
    if settings.workers == 1:
        run_server(what, lambda token, is_closing: build_app(settings), address, limit_concurrency=None, **options)
        return
    load_onnx(settings.folder)  # an error is one sentence here
    with tempfile.TemporaryDirectory(prefix="m1clip-metrics-") as folder:
        os.environ[FOLDER] = folder
        run_workers(what, partial(build_worker, settings), address, settings.workers, limit_concurrency=None, **options)


def build_app(settings: ServeSettings, on_start: Callable[[], None] = lambda: None) -> FastAPI:
    """Load the model and run it once."""
    limits, metrics = settings.limits, Metrics()
    fetch = Fetcher(min(MAX_BYTES, limits.max_bytes)) if settings.allow_urls else None
    model = load_onnx(settings.folder, max(1, usable_cores() // settings.workers))
    engine = Engine(model, limits, fetch, metrics.add_batch)
    engine.warm_up()
    gc.freeze()  # what is there now stays: the collector need not visit it again
    service = Service(engine, settings.name, metrics, settings.open_index())
    access = Access(settings.address.token, session=settings.session, api_prefix="/")
    return embedding_app(service, access, print_line if settings.access_log else None, on_start)


def build_worker(settings: ServeSettings) -> FastAPI:
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


def print_line(line: bytes) -> None:
    with suppress(OSError, ValueError):  # a closed pipe must not fail the request
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()
