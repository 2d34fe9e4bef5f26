"""Training from a test: a run in a folder with a silent console, stopped after some step if asked; and a web server."""

import io
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn

from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.monitor import web
from m1clip.run import Run, create_run, is_run
from m1clip.training.loop import TrainResult, fit
from m1clip.training.setup import prepare
from m1clip.training.step import TrainState
from m1clip.web.server import create_server, listen


class QuietConsole(Console):
    """Keeps warnings, prints nothing, and sends SIGINT after a step."""

    def __init__(self, stop_at: int | None = None):
        super().__init__(io.StringIO())
        self.stop_at, self.warnings = stop_at, list[str]()

    def update_training(self, step: int, records: list[dict[str, Any]], total: int) -> None:
        super().update_training(step, records, total)
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def warn(self, text: str) -> None:
        super().warn(text)
        self.warnings.append(text)


def train_run(
    config: TrainConfig, path: Path, stop_at: int | None = None, console: QuietConsole | None = None
) -> TrainResult:
    """Train the run at `path`, or resume it; the config is final."""
    resumed = Run(path) if is_run(path) else None
    if resumed:
        config = replace(config, recipe=resumed.read_config()[0].recipe)
    run = resumed or create_run(path.parent, path.name, "x", False)
    with run.locked():
        console = console or QuietConsole(stop_at)
        setup = prepare(config, {}, path.parent, resumed, console, time.monotonic(), is_final=True)
        return fit(setup, run, console)


def random_pairs(size: int, seed: int = 1, duplicate_BB: torch.Tensor | None = None) -> Batch:
    """Random 32 px images with random captions of 8 tokens."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 32, 32, 3), generator=rng, dtype=torch.uint8)
    words = torch.randint(3, 500, (size, 6), generator=rng)
    start, end = torch.full((size, 1), 1), torch.full((size, 1), 2)
    keys = torch.randint(0, 2**32, (size,), generator=rng)
    tokens_BKL = torch.cat([start, words, end], dim=1)[:, None]
    return Batch(Images(images), Tokens(tokens_BKL), keys, duplicate_BB, np.arange(size))


def make_state(config: TrainConfig, chunk: int | None = None) -> TrainState:
    """The same initial weights every time."""
    torch.manual_seed(0)
    state = TrainState(CLIP(config.model, Tokenizer.characters()), config)
    state.chunk = chunk or config.batch_size
    return state


@contextmanager
def serve_in_thread(runs: web.RunCache) -> Iterator[str]:
    """The web monitor in this process; yields its address."""
    server = create_server(web.create_app(runs))
    runs.is_closing = lambda: server.should_exit
    with run_in_thread(server) as address:
        yield address


@contextmanager
def run_in_thread(server: uvicorn.Server) -> Iterator[str]:
    """A server in a thread; yields its address."""
    with listen("127.0.0.1", 18465) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join(120)
