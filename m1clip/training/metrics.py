"""Per-step metrics: loss, accuracy and times, read from the device rarely and together."""

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

PHASES = ("data", "copy", "forward", "backward", "optimizer")
Record = dict[str, Any]


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers are still on the device."""

    step: int
    lr: float
    stats: Tensor
    rows: list[int]
    image_size: int
    chunk: int
    has_phases: bool
    timestamps: dict[str, Any]
    between_s: float
    time: float


class StepMetrics:
    def __init__(self, config: TrainConfig, device: torch.device):
        self.batch_size, self.device = config.batch_size, device
        self.chance = {
            "chance_loss": losses.chance(config.model.loss, config.batch_size),
            "chance_accuracy": 1 / config.batch_size,
        }
        self.log_every, self.always_phases = config.log_every, devices.has_event_timer(device)
        self.has_phases = True
        self.pending: list[PendingStep] = []
        self.epoch_steps: list[Record] = []
        self.timestamps: dict[str, Any] = {}
        self.ended_at = self.between_s = self.paused_s = 0.0

    def timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches; waiting for each is the `data` phase of its step."""
        iterator, self.ended_at = iter(batches), time.perf_counter()
        for count in itertools.count(1):
            # Without event timers a phase is exact only after a synchronization: not at every step.
            self.has_phases = self.always_phases or count % self.log_every == 0
            self.between_s = max(0.0, time.perf_counter() - self.ended_at - self.paused_s)
            self.paused_s, self.timestamps = 0.0, {}
            self.mark("start")
            batch = next(iterator, None)
            if batch is None:
                return
            self.mark("data")
            yield batch

    def mark(self, phase: str) -> None:
        """The end of a phase, in the device's own time."""
        if self.has_phases:
            self.timestamps[phase] = devices.timestamp(self.device)
        elif phase in ("start", "optimizer"):
            self.timestamps[phase] = time.perf_counter()

    def add(self, step: int, lr: float, stats: Tensor, batch: Batch, chunk: int) -> None:
        """Keep a step's numbers on the device: reading them would make a GPU wait."""
        timing = (self.has_phases, self.timestamps, self.between_s, time.time())
        # 0 where the vision tower is frozen and no image is read
        size = batch.image.images_BHWC.shape[1] if isinstance(batch.image, Images) else 0
        self.pending.append(PendingStep(step, lr, stats, batch.rows.tolist(), size, chunk, *timing))
        self.ended_at = time.perf_counter()

    def read(self) -> list[Record]:
        """A record for every step since the last reading."""
        if not self.pending:
            return []
        with self.paused():  # waiting for the queue is already part of the steps' time
            values = torch.stack([step.stats for step in self.pending]).tolist()
        records = [self._record(step, stats) for step, stats in zip(self.pending, values, strict=True)]
        self.pending = []
        self.epoch_steps += records
        return records

    def _record(self, step: PendingStep, values: list[float]) -> Record:
        stats = {key: value if math.isfinite(value) else None for key, value in zip(STATS, values, strict=True)}
        skipped = stats["loss"] is None or stats["grad_norm"] is None
        timestamps = list(step.timestamps.values())
        phases: dict[str, float | None] = dict.fromkeys((f"{phase}_ms" for phase in PHASES), None)
        if step.has_phases:
            spans = (devices.elapsed_ms(a, b) for a, b in itertools.pairwise(timestamps))
            phases = {f"{phase}_ms": round(span, 3) for phase, span in zip(PHASES, spans, strict=True)}
        step_ms, between_ms = devices.elapsed_ms(timestamps[0], timestamps[-1]), 1e3 * step.between_s
        return {
            "step": step.step,
            "time": round(step.time, 3),
            **stats,
            "accuracy": (values[1] + values[2]) / 2,
            **self.chance,
            "lr": step.lr,
            "image_size": step.image_size,
            "chunk": step.chunk,
            "step_ms": round(step_ms, 3),
            **phases,
            "between_ms": round(between_ms, 3),
            "pairs_per_s": round(1e3 * self.batch_size / (step_ms + between_ms), 2),
            **({"skipped": True, "rows": step.rows} if skipped else {}),
        }

    def restore_epoch(self, records: Iterable[Record]) -> None:
        """Steps of an epoch that began in an earlier session."""
        self.epoch_steps = list(records)

    def epoch_means(self) -> Record:
        """Means of the finished epoch and its seconds; evaluation and saving are not training time."""
        records, self.epoch_steps = self.epoch_steps, []
        seconds = total_seconds(records)
        keys = (*STATS, "accuracy", *(f"{phase}_ms" for phase in PHASES), "step_ms")
        speed = {"seconds": round(seconds, 2), "pairs_per_s": round(self.batch_size * len(records) / seconds, 2)}
        return {**{key: mean_of_known(row[key] for row in records) for key in keys}, **self.chance, **speed}

    @contextmanager
    def paused(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - started


def total_seconds(records: list[Record]) -> float:
    return sum(float(record["step_ms"] + record["between_ms"]) for record in records) / 1e3


def mean_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
