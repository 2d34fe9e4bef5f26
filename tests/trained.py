"""Training from a test: a run in a folder, without a console, that may be stopped after some step."""

import io
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch

from m1clip import run as runs
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.training import loop
from m1clip.training.setup import check
from m1clip.training.state import TrainState


class Quiet(Console):
    def __init__(self, stop_at: int | None = None):
        super().__init__(io.StringIO())
        self.stop_at, self.warnings = stop_at, list[str]()

    def step(self, step: int, rows: list[dict[str, Any]], total: int) -> None:
        super().step(step, rows, total)
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)

    def warn(self, text: str) -> None:
        super().warn(text)
        self.warnings.append(text)


def trained(
    config: TrainConfig, path: Path, stop_at: int | None = None, console: Quiet | None = None
) -> loop.Result:
    """Train the run at `path`, or go on with it."""
    old = runs.Run(path) if path.exists() else None
    run = old or runs.create(path.parent, path.name, "x", False)
    with run.owned():
        console = console or Quiet(stop_at)
        return loop.train(check(config, path.parent, old, console), run, console)


def some_batch(size: int, seed: int = 1, duplicate_BB: torch.Tensor | None = None) -> Batch:
    """Random images of 32 px with random captions of 8 tokens."""
    rng = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (size, 32, 32, 3), generator=rng, dtype=torch.uint8)
    words = torch.randint(3, 500, (size, 6), generator=rng)
    start, end = torch.full((size, 1), 1), torch.full((size, 1), 2)
    keys = torch.randint(0, 2**32, (size,), generator=rng)
    return Batch(images, torch.cat([start, words, end], dim=1), keys, duplicate_BB, np.arange(size))


def some_state(config: TrainConfig, chunk: int | None = None) -> TrainState:
    """The same weights every time."""
    torch.manual_seed(0)
    state = TrainState(CLIP(config.model, Tokenizer.characters()), config)
    state.chunk = chunk or config.batch_size
    return state
