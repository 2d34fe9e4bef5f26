"""Figures of a run as it goes: means since the last reading, speed without the pauses, time to go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from m1clip import losses
from m1clip.train.step import STATS


class Meter:
    def __init__(self, loss: str, batch: int, total: int):
        self.batch, self.total = batch, total
        self.chance = {"chance_loss": losses.chance(loss, batch), "chance_accuracy": 1 / batch}
        self.unread: list[Tensor] = []
        self.epoch_rows: list[list[float]] = []
        self.started = self.read_at = self.epoch_at = self.saved_at = time.perf_counter()

    def add(self, stats: Tensor) -> None:
        """Keep a step's figures where they are: reading a GPU's would make it wait."""
        self.unread.append(stats)

    def read(self, step: int) -> dict[str, float]:
        """Means of the steps since the last reading, fetched from the device all at once."""
        rows: list[list[float]] = torch.stack(self.unread).tolist()
        now = time.perf_counter()  # after the fetch: only now is the queued work done
        step_s = (now - self.read_at) / len(rows)
        self.unread, self.read_at = [], now
        self.epoch_rows += rows
        return {
            **self._means(rows),
            "step_ms": round(step_s * 1e3, 3),
            "pairs_per_s": round(self.batch / step_s, 2),
            "eta_s": round((self.total - step) * step_s, 1),
        }

    def epoch(self) -> dict[str, float]:
        """Means of the whole epoch, and its seconds without the pauses."""
        now = time.perf_counter()
        rows, seconds = self.epoch_rows, now - self.epoch_at
        self.epoch_rows, self.epoch_at = [], now
        speed = {"seconds": round(seconds, 2), "pairs_per_s": round(self.batch * len(rows) / seconds, 2)}
        return {**self._means(rows), **speed}

    def _means(self, rows: list[list[float]]) -> dict[str, float]:
        means = {name: sum(row[i] for row in rows) / len(rows) for i, name in enumerate(STATS)}
        return {**means, **self.chance}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Evaluation and saving are not training time."""
        began = time.perf_counter()
        yield
        pause = time.perf_counter() - began
        self.started, self.read_at, self.epoch_at = (
            self.started + pause,
            self.read_at + pause,
            self.epoch_at + pause,
        )

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def minutes_since_save(self) -> float:
        return (time.perf_counter() - self.saved_at) / 60

    def saved(self) -> None:
        self.saved_at = time.perf_counter()
