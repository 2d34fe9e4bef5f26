"""What is told of a run as it goes: every step, looks inside, scores, epochs, and what seems wrong.

Everything that lasts goes to the run's metrics, everything for people to the console.
"""

import json
import time
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from m1clip import devices, sensors
from m1clip.console import Console
from m1clip.data.batches import Batch, BatchStream
from m1clip.data.rows import BadRows
from m1clip.evals.health import health
from m1clip.evals.retrieval import Retrieval
from m1clip.files import atomic_write
from m1clip.run import Run
from m1clip.training import checkpoint, memory
from m1clip.training.checkpoint import Progress
from m1clip.training.diagnose import History, diagnose
from m1clip.training.metrics import Row, seconds_of
from m1clip.training.schedule import Schedule
from m1clip.training.state import TrainState
from m1clip.training.step import embed_captions, embed_images

MAX_SKIPPED = 20
BEAT_S = 1.0


class Logger:
    def __init__(
        self,
        run: Run,
        console: Console,
        state: TrainState,
        progress: Progress,
        batches: BatchStream,
        schedule: Schedule,
    ):
        self.run, self.console, self.state, self.progress = run, console, state, progress
        self.batches, self.config, self.schedule = batches, state.config, schedule
        self.pair_bytes, self.last_row, self.told_bad = 0, Row(), 0
        self.seen, self.said = History(schedule.total), set[str]()
        self.energy, self.beat_at = sensors.EnergyMeter(), 0.0
        # A total is known only if every session could be measured, an epoch's if it began in this one.
        self.joules_before = 0.0 if progress.step == 0 else progress.joules
        self.epoch_from = 0.0 if batches.epoch_end(progress.step) is not None else None
        self.power_from: tuple[float, float | None] = (time.monotonic(), self.energy.joules())
        sensors.readings(run.path)  # the cores' use is counted from here

    def steps(self, rows: list[Row]) -> None:
        """Log what the metrics has read; stop where too many steps had to be passed over."""
        for row in rows:
            self.run.log("step", **{key: value for key, value in row.items() if key != "rows"})
            if row.get("skipped"):
                self._skipped(row)
        self.last_row = rows[-1]
        self.seen.add_steps(rows)
        self.progress.seconds += seconds_of(rows)
        self.progress.joules = plus(self.energy.joules(), self.joules_before)
        eta_s = (self.schedule.total - rows[-1]["step"]) * seconds_of(rows) / len(rows)
        self.console.step(rows[-1]["step"], rows, self.schedule.total)
        if time.monotonic() - self.beat_at >= BEAT_S:
            self.status("running", eta_s=round(eta_s, 1))
            self.beat_at = time.monotonic()

    def status(self, state: str, **values: Any) -> None:
        best = {"best_metric": self.config.best_metric, "best_score": self.progress.best_score}
        self.run.status(state, self.progress.step, total=self.schedule.total, **best, **values)

    def _skipped(self, row: Row) -> None:
        """Say which rows were in the batch, and which of them is the cause where one is."""
        scale = float(self.state.loss_scale)
        if self.state.plan.precision == "fp16" and row["loss"] is not None and scale >= 1:
            self.run.log(
                "event", row["step"], event="loss scale halved", scale=scale
            )  # how its height is found
            return
        self.progress.skipped += 1
        names = [
            self.batches.pairs.location(number) for number in self._broken(row["step"] - 1) or row["rows"]
        ]
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = "loss" if row["loss"] is None else "gradient"
        self.run.log("event", row["step"], event="skipped", what=what, rows=row["rows"], names=names[:20])
        told = f"the {what} is not finite at step {row['step']:,}; the batch held {shown}"
        if self.progress.skipped > MAX_SKIPPED:
            raise FloatingPointError(
                f"{told}. That is more than {MAX_SKIPPED} such steps; "
                f"{checkpoint.last_good(self.run)}. Try a lower --lr, and look at these rows"
            )
        self.console.warn(f"{told}. No step was taken; {checkpoint.last_good(self.run)}")

    @torch.no_grad()
    def _broken(self, step: int) -> list[int]:
        """The rows of a batch whose own embedding is not finite."""
        batch = self.state.take(self.batches.batch(step))
        good_B = torch.ones(len(batch), dtype=torch.bool, device=self.state.device)
        for embed in (embed_images, embed_captions):
            made = [embed(self.state, part) for part in batch.split(self.state.chunk)]
            good_B &= torch.cat(made).isfinite().flatten(1).all(1).to(good_B.device)
        if not good_B.any():
            return []  # it is the weights
        return [int(row) for row, good in zip(batch.rows, good_B.tolist(), strict=True) if not good]

    def divided(self, chunk: int) -> None:
        """Memory ran out, and the same step is done again in smaller parts."""
        self.progress.chunk = chunk
        self.run.log("event", self.progress.step, event="out of memory", chunk=chunk)
        self.console.warn(
            f"out of memory at step {self.progress.step + 1:,}: the same step again, with the batch of "
            f"{self.config.batch_size:,} divided into parts of {chunk:,} (--chunk)"
        )

    def inside(self, batch: Batch, image_BE: Tensor, text_BE: Tensor) -> None:
        """Norms by block, the embeddings' health, memory by part, the machine; then what seems wrong."""
        if self.last_row.get("skipped"):
            return  # nothing finite to look at
        # Gradients are shown as they were before clipping.
        cut = max(1.0, (self.last_row["grad_norm"] or 0.0) / self.config.grad_clip)
        grads, weights = norms(self.state)
        record = {
            "grad_norms": {name: norm * cut for name, norm in grads.items()},
            "weight_norms": weights,
            **health(image_BE, text_BE),
            "memory_gb": memory.by_part(self.state, batch, self.pair_bytes),
            "power_w": self._power(),
            "joules": self.progress.joules,
            "device_gb": devices.peak_gb(self.state.device),
            **sensors.readings(self.run.path),
        }
        self.run.log("logger", self.progress.step, **record)
        self.seen.watches.append(record)
        self._diagnose()

    def _diagnose(self) -> None:
        for name, sentence in diagnose(self.seen).items():
            if name not in self.said:
                self.said.add(name)
                self.run.log("event", self.progress.step, event="diagnosis", about=name, text=sentence)
                self.console.warn(f"{name}: {sentence}")

    def scores(self, scores: Retrieval, figures: dict[str, Any]) -> None:
        epoch = self.batches.epoch_end(self.progress.step)
        record = {"epoch": epoch, **scores.record(), **figures}
        self.run.log("eval", self.progress.step, **record)
        self.seen.evals.append(record)

    def examples(self, found: dict[str, Any]) -> None:
        """What the latest evaluation found, for people to look at; on a full disk the one before stays."""
        record = {"step": self.progress.step, "time": round(time.time(), 3), **found}
        with suppress(OSError):
            atomic_write(self.run.path / "retrievals.json", json.dumps(record) + "\n", durable=False)

    def epoch(self, epoch: int, means: Row, scores: Retrieval | None) -> None:
        now, began = self.energy.joules(), self.epoch_from
        self.epoch_from = now
        hours = None if self.progress.joules is None else self.progress.joules / 3600
        energy = {
            "joules": None if began is None else plus(now, -began),
            "wh_so_far": hours,
            "mean_r1_per_wh": scores.mean_r1 / hours if scores and hours else None,
        }
        self.run.log("epoch", self.progress.step, epoch=epoch, **means, **energy)
        self.seen.epochs.append(means)
        epochs = None if self.schedule.deadline else self.config.epochs
        self.console.epoch(epoch, epochs, means, scores)
        self._diagnose()

    def bad_rows(self, faults: BadRows) -> None:
        """Tell of rows that could not be decoded while training, as far as that has not been told."""
        if new := faults.examples[self.told_bad :]:
            self.told_bad += len(new)
            names = [str(fault) for fault in new[:20]]
            self.run.log("event", self.progress.step, event="bad rows", count=len(faults), names=names)
            self.console.warn(f"{faults}; others were taken instead")

    def gave_up(self) -> None:
        """Why the run ends before its time, and what it leaves."""
        now = self.progress
        told = f"no better {self.config.best_metric} in {now.stale} evaluations"
        self.run.log("event", now.step, event="out of patience", best_step=now.best_step)
        self.console.say(f"{told}: ended at step {now.step:,}; the model is that of step {now.best_step:,}")

    def _power(self) -> float | None:
        """Watts since the last look."""
        (then, before), (now, drawn) = self.power_from, (time.monotonic(), self.energy.joules())
        self.power_from = (now, drawn)
        return None if before is None or drawn is None else (drawn - before) / (now - then)


def plus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def norms(state: TrainState) -> tuple[dict[str, float], dict[str, float]]:
    """Lengths of gradients and of weights by block of both towers, read from the device at once."""
    parts: dict[str, list[torch.nn.Parameter]] = {}
    for name, weight in state.weights.items():
        words = name.split(".")
        depth = 3 if "blocks" in words else 2 if words[0] in ("vision", "text") else 1
        parts.setdefault(".".join(words[:depth]), []).append(weight)
    lengths = [
        torch.stack([length(tensors) for tensors in (grads_of(weights), weights)]).to(state.device)
        for weights in parts.values()
    ]
    both = torch.stack(lengths).tolist()
    return {name: one[0] for name, one in zip(parts, both, strict=True)}, {
        name: one[1] for name, one in zip(parts, both, strict=True)
    }


def grads_of(weights: list[torch.nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]


def length(tensors: list[Tensor] | list[torch.nn.Parameter]) -> Tensor:
    whole: Tensor = torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors])).norm()
    return whole
