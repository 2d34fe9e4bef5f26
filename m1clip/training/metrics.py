"""Figures of a run as it goes: each step's numbers and times, read from the device together and rarely."""

import itertools
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from m1clip import devices, losses
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch, Images
from m1clip.training.step import STATS

PHASES = ("wait", "copy", "forward", "backward", "optimizer")
Row = dict[str, Any]


@dataclass(frozen=True)
class Unread:
    """A step whose numbers are still on the device."""

    step: int
    lr: float
    stats: Tensor
    rows: list[int]
    side: int
    chunk: int
    exact: bool
    stamps: dict[str, Any]
    between_s: float
    time: float


class StepMetrics:
    def __init__(self, config: TrainConfig, device: torch.device):
        self.batch, self.device = config.batch_size, device
        self.chance = {
            "chance_loss": losses.chance(config.model.loss, config.batch_size),
            "chance_accuracy": 1 / config.batch_size,
        }
        self.log_every, self.always_exact = config.log_every, devices.has_event_timer(device)
        self.exact = True
        self.unread: list[Unread] = []
        self.epoch_rows: list[Row] = []
        self.stamps: dict[str, Any] = {}
        self.ended_at = self.between_s = self.paused_s = 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; the time spent on waiting for each is the first phase of its step."""
        source, self.ended_at = iter(batches), time.perf_counter()
        for count in itertools.count(1):
            self.exact = self.always_exact or count % self.log_every == 0
            self.between_s = max(0.0, time.perf_counter() - self.ended_at - self.paused_s)
            self.paused_s, self.stamps = 0.0, {}
            self.mark("start")
            batch = next(source, None)
            if batch is None:
                return
            self.mark("wait")
            yield batch

    def mark(self, phase: str) -> None:
        """The phase ends here, in the device's own time."""
        if self.exact:
            self.stamps[phase] = devices.timestamp(self.device)
        elif phase in ("start", "optimizer"):
            self.stamps[phase] = time.perf_counter()

    def add(self, step: int, lr: float, stats: Tensor, batch: Batch, chunk: int) -> None:
        """Keep a step's figures where they are: reading a GPU's would make it wait."""
        rows = batch.rows.tolist()
        side = batch.image.images_BHWC.shape[1] if isinstance(batch.image, Images) else 0
        timing = (self.exact, self.stamps, self.between_s, time.time())
        self.unread.append(Unread(step, lr, stats, rows, side, chunk, *timing))
        self.ended_at = time.perf_counter()

    def read(self) -> list[Row]:
        """Every step since the last reading, one row each."""
        if not self.unread:
            return []
        with self.paused():  # waits for the queue, whose time the steps themselves hold
            values = torch.stack([one.stats for one in self.unread]).tolist()
        rows = [self._row(one, stats) for one, stats in zip(self.unread, values, strict=True)]
        self.unread = []
        self.epoch_rows += rows
        return rows

    def _row(self, one: Unread, stats: list[float]) -> Row:
        named = {
            name: value if math.isfinite(value) else None for name, value in zip(STATS, stats, strict=True)
        }
        skipped = named["loss"] is None or named["grad_norm"] is None
        stamps = list(one.stamps.values())
        times: dict[str, float | None] = dict.fromkeys((f"{phase}_ms" for phase in PHASES), None)
        if one.exact:
            spans = (devices.elapsed_ms(a, b) for a, b in itertools.pairwise(stamps))
            times = {f"{phase}_ms": round(span, 3) for phase, span in zip(PHASES, spans, strict=True)}
        step_ms, between_ms = devices.elapsed_ms(stamps[0], stamps[-1]), 1e3 * one.between_s
        return {
            "step": one.step,
            "time": round(one.time, 3),
            **named,
            "accuracy": (stats[1] + stats[2]) / 2,
            **self.chance,
            "lr": one.lr,
            "side": one.side,
            "chunk": one.chunk,
            "step_ms": round(step_ms, 3),
            **times,
            "between_ms": round(between_ms, 3),
            "pairs_per_s": round(1e3 * self.batch / (step_ms + between_ms), 2),
            **({"skipped": True, "rows": one.rows} if skipped else {}),
        }

    def recall(self, rows: Iterable[Row]) -> None:
        """Steps of an epoch that was begun in an earlier session."""
        self.epoch_rows = list(rows)

    def epoch(self) -> Row:
        """Means of the epoch so far, and its seconds; evaluation and saving are not training time."""
        rows, self.epoch_rows = self.epoch_rows, []
        seconds = seconds_of(rows)
        names = (*STATS, "accuracy", *(f"{phase}_ms" for phase in PHASES), "step_ms")
        speed = {"seconds": round(seconds, 2), "pairs_per_s": round(self.batch * len(rows) / seconds, 2)}
        return {**{name: mean(row[name] for row in rows) for name in names}, **self.chance, **speed}

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - began


def seconds_of(rows: list[Row]) -> float:
    return sum(float(row["step_ms"] + row["between_ms"]) for row in rows) / 1e3


def mean(values: Iterable[float | None]) -> float | None:
    """Of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
