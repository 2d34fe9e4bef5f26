"""Metrics of each step, and the records of a run: steps, diagnostics, evaluations, epochs."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from m1clip import devices, losses, sensors
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, BatchStream, Images
from m1clip.data.index import BadRows
from m1clip.evals.embeddings import embedding_statistics
from m1clip.evals.evaluate import Evaluation
from m1clip.run import Run
from m1clip.training.checkpoint import Progress, last_checkpoint
from m1clip.training.diagnose import WINDOW, Findings, History, Record, diagnose, few_negatives, known_numbers
from m1clip.training.memory import memory_by_part
from m1clip.training.optim import Schedule
from m1clip.training.step import STATS, TrainState, embed_chunks, embed_images, embed_texts

PHASES = ("data", "copy", "forward", "backward", "optimizer")
PHASES_MS = [f"{phase}_ms" for phase in PHASES]
HEARTBEAT_S = 1.0
MAX_SKIPPED = 20  # steps with a non-finite loss or gradient after which the run stops
Tracker = tuple[Callable[[dict[str, float], int], Any], Callable[[], Any]]  # send the values of a step; close


class PendingStep(NamedTuple):
    """A step whose numbers are still on the device."""

    record: Record
    stats: Tensor
    timestamps: dict[str, Any]
    rows: list[int]


class StepMetrics:
    def __init__(self, config: TrainConfig, device: torch.device, duplicate_BB: Tensor | None = None):
        """Chance depends on the duplicates of a typical batch."""
        self.batch_size, self.device = config.batch_size, device
        chance_loss = losses.chance(config.model.loss, config.batch_size, duplicate_BB)
        accuracy = losses.chance_accuracy(config.batch_size, duplicate_BB)
        self.chance = {"chance_loss": chance_loss, "chance_accuracy": accuracy}
        self.log_every, self.always_phases, self.has_phases = config.log_every, devices.has_event_timer(device), True
        self.pending, self.timestamps = list[PendingStep](), dict[str, Any]()
        self.epoch_steps: list[Record] = []  # of the current epoch, also those of earlier sessions
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
        # 0 where the vision tower is frozen and no image is read
        size = batch.image.images_BHWC.shape[1] if isinstance(batch.image, Images) else 0
        record = {"step": step, "time": round(time.time(), 3), "lr": lr, "image_size": size, "chunk": chunk}
        record["between_ms"] = round(1e3 * self.between_s, 3)
        if batch.masked:
            record |= {"masked_negatives": batch.masked, "without_negative": batch.without_negative}
        self.pending.append(PendingStep(record, stats, self.timestamps, batch.rows.tolist()))
        self.ended_at = time.perf_counter()

    def read(self) -> list[Record]:
        """A record for every step since the last reading."""
        with self.paused():  # waiting for the queue is already part of the steps' time
            values = torch.stack([step.stats for step in self.pending]).tolist()
        records = [self._record(step, stats) for step, stats in zip(self.pending, values, strict=True)]
        self.pending = []
        self.epoch_steps += records
        return records

    def _record(self, step: PendingStep, values: list[float]) -> Record:
        stats = {key: value if math.isfinite(value) else None for key, value in zip(STATS, values, strict=True)}
        skipped = stats["loss"] is None or stats["grad_norm"] is None
        times = list(step.timestamps.values())
        step_ms, phases_ms = devices.elapsed_ms(times[0], times[-1]), dict[str, float | None].fromkeys(PHASES_MS)
        if len(times) > 2:
            spans = (devices.elapsed_ms(a, b) for a, b in itertools.pairwise(times))
            phases_ms = {phase: round(span, 3) for phase, span in zip(PHASES_MS, spans, strict=True)}
        accuracy = None if math.isnan(values[1]) else (values[1] + values[2]) / 2  # NaN: no pair has a negative
        record = {**step.record, **stats, "accuracy": accuracy, **self.chance}
        if record.get("without_negative") == 1:
            record["chance_accuracy"] = None
        record |= {"step_ms": round(step_ms, 3), **phases_ms}
        record["pairs_per_s"] = round(1e3 * self.batch_size / (step_ms + record["between_ms"]), 2)
        return {**record, "skipped": True, "rows": step.rows} if skipped else record

    def epoch_means(self) -> Record:
        """Means of the finished epoch and its seconds; evaluation and saving are not training time."""
        records, self.epoch_steps = self.epoch_steps, []
        seconds = max(1e-9, total_seconds(records))
        keys = (*STATS, "accuracy", *PHASES_MS, "step_ms")
        known = {key: known_numbers(records, key) for key in keys}
        means = {key: sum(values) / len(values) if values else None for key, values in known.items()}
        speed = {"seconds": round(seconds, 2), "pairs_per_s": round(self.batch_size * len(records) / seconds, 2)}
        chance = {**self.chance, "chance_accuracy": None} if means["accuracy"] is None else self.chance
        return {**means, **chance, **speed}

    @contextmanager
    def paused(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.paused_s += time.perf_counter() - started


def total_seconds(records: list[Record]) -> float:
    return sum(sum(known_numbers(records, key)) for key in ("step_ms", "between_ms")) / 1e3


@dataclass
class Logger:
    run: Run
    console: Console
    state: TrainState
    progress: Progress
    batches: BatchStream
    schedule: Schedule
    imported: sensors.MemoryUse
    pair_bytes: int = 0  # activations of one pair, once they have been counted

    def __post_init__(self) -> None:
        self.config, self.last_step, self.reported_bad_rows = self.state.config, Record(), 0
        self.history, self.reported = History(self.schedule.total), set[str]()
        self.energy, self.heartbeat_at = sensors.EnergyMeter(), 0.0
        # A total is known only if every session was measured, an epoch's only if it began in this session.
        self.joules_before = 0.0 if self.progress.step == 0 else self.progress.joules
        self.epoch_start_joules = None if self.batches.epoch_end(self.progress.step) is None else 0.0
        self.power_since: tuple[float, float | None] = (time.monotonic(), self.energy.joules())
        sensors.readings(self.run.path)  # core utilization is measured from here

    def is_due(self) -> bool:
        return self.progress.step % self.config.log_every == 0 or self.console.needs_training_line()

    def log_steps(self, records: list[Record]) -> None:
        """Write step records; raise if too many steps were skipped."""
        for record in records:
            self.run.log("step", **{key: value for key, value in record.items() if key != "rows"})
            if record.get("skipped"):
                self._log_skipped(record)
        self.last_step = records[-1]
        self.history.add_steps(records)
        self.progress.seconds += total_seconds(records)
        self.progress.joules = add_known(self.energy.joules(), self.joules_before)
        self.run.phase, seconds = "", total_seconds(records)
        eta_s = (self.schedule.total - records[-1]["step"]) * seconds / len(records)
        self._report(few_negatives(self.history.steps[-WINDOW:]))
        self.console.update_training(records[-1]["step"], records, self.schedule.total)
        if time.monotonic() - self.heartbeat_at >= HEARTBEAT_S:
            self.write_status("running", eta_s=round(eta_s, 1), report_s=round(seconds, 1))
            self.heartbeat_at = time.monotonic()

    def write_status(self, state: str, **values: Any) -> None:
        best = {"best_metric": self.config.best_metric, "best_score": self.progress.best_score}
        self.run.write_status(state, self.progress.step, total=self.schedule.total, **best, **values)

    def _log_skipped(self, record: Record) -> None:
        """Name the rows of a batch with a non-finite loss or gradient; only the cause where it is known."""
        step = record["step"]
        if self.state.scaler.is_enabled() and record["loss"] is not None and self.state.scaler.get_scale() >= 1:
            # An overflow while the gradient scaler is still finding its scale.
            self.run.log("event", step, event="loss scale halved", scale=self.state.scaler.get_scale())
            return
        self.progress.skipped += 1
        rows = self._nonfinite_rows(step - 1) or record["rows"]
        names = [self.batches.pairs.location(row) for row in rows]
        listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = "loss" if record["loss"] is None else "gradient"
        self.run.log("event", step, event="skipped", what=what, rows=record["rows"], names=names[:20])
        message = f"non-finite {what} at step {step:,}; rows of the batch: {listed}"
        if self.progress.skipped > MAX_SKIPPED:
            raise FloatingPointError(
                f"{message}. More than {MAX_SKIPPED} steps were skipped; {last_checkpoint(self.run)}. "
                "Try a lower --lr, and check these rows"
            )
        self.console.warn(f"{message}. The step was skipped; {last_checkpoint(self.run)}")

    def _nonfinite_rows(self, step: int) -> list[int]:
        """Rows of a batch whose own embedding is not finite; none if all are, as it is the weights then."""
        batch = self.state.to_device(self.batches.batch(step))
        finite_B = torch.ones(len(batch), dtype=torch.bool, device=self.state.device)
        for embed in (embed_images, embed_texts):
            embeddings = embed_chunks(self.state, batch.split(self.state.chunk), embed)
            finite_B &= embeddings.isfinite().flatten(1).all(1).to(finite_B.device)
        if not finite_B.any():
            return []
        return [int(row) for row, finite in zip(batch.rows, finite_B.tolist(), strict=True) if not finite]

    def log_out_of_memory(self, chunk: int) -> None:
        self.progress.chunk = chunk
        self.run.log("event", self.progress.step, event="out of memory", chunk=chunk)
        self.console.warn(
            f"out of memory at step {self.progress.step + 1:,}: repeating the step with --chunk {chunk:,} "
            f"(the contrastive batch stays {self.config.batch_size:,})"
        )

    def log_diagnostics(self, batch: Batch, image_BE: Tensor, text_BE: Tensor) -> None:
        """Gradient and weight norms, embedding statistics, memory and sensors; then known problems."""
        if self.last_step.get("skipped"):
            return  # nothing is finite
        clipping = max(1.0, (self.last_step["grad_norm"] or 0.0) / self.config.grad_clip)
        gradients, weights = norms_by_block(self.state)
        gradients = {name: norm * clipping for name, norm in gradients.items()}  # before clipping
        record = {"grad_norms": gradients, "weight_norms": weights, **embedding_statistics(image_BE, text_BE)}
        record["memory_gb"] = memory_by_part(self.state, batch, self.pair_bytes, self.imported)
        record |= {"power_w": self._power(), "joules": self.progress.joules}
        record |= {"device_gb": devices.peak_gb(self.state.device), **sensors.readings(self.run.path)}
        self.run.log("diagnostics", self.progress.step, **record)
        self.history.diagnostics.append(record)
        self._report(diagnose(self.history))

    def _report(self, findings: Findings) -> None:
        """Warn of each problem once."""
        for name, sentence in findings.items():
            if name not in self.reported:
                self.reported.add(name)
                self.run.log("event", self.progress.step, event="diagnosis", about=name, text=sentence)
                self.console.warn(f"{name}: {sentence}")

    def log_eval(self, evaluation: Evaluation) -> None:
        step = self.progress.step
        record = {"epoch": self.batches.epoch_end(step), **evaluation.record()}
        self.run.log("eval", step, **record)
        self.history.evals.append(record)
        examples = {"step": step, "time": round(time.time(), 3), **evaluation.examples()}
        with suppress(OSError):  # on a full disk the previous examples stay
            self.run.write("retrievals.json", examples, durable=False)

    def log_epoch(self, epoch: int, means: Record, evaluation: Evaluation | None) -> None:
        joules, start = self.energy.joules(), self.epoch_start_joules
        self.epoch_start_joules = joules
        scores = evaluation.scores if evaluation else None
        watt_hours = None if self.progress.joules is None else self.progress.joules / 3600
        energy = {
            "joules": None if start is None else add_known(joules, -start),
            "wh_so_far": watt_hours,
            "mean_r1_per_wh": scores.mean_r1 / watt_hours if scores and watt_hours else None,
        }
        self.run.log("epoch", self.progress.step, epoch=epoch, **means, **energy)
        self.history.epochs.append(means)
        epochs = None if self.schedule.deadline or self.config.steps else self.config.epochs
        self.console.print_epoch(epoch, epochs, means, evaluation.metrics() if evaluation else None)
        self._report(diagnose(self.history))

    def log_bad_rows(self, bad_rows: BadRows) -> None:
        """Report rows that could not be decoded during training, each once."""
        if new := bad_rows.examples[self.reported_bad_rows :]:
            self.reported_bad_rows += len(new)
            names = [str(row) for row in new[:20]]
            self.run.log("event", self.progress.step, event="bad rows", count=len(bad_rows), names=names)
            self.console.warn(f"{bad_rows}; the next rows were used instead")

    def log_early_stop(self) -> None:
        now = self.progress
        self.run.log("event", now.step, event="out of patience", best_step=now.best_step)
        self.console.print(
            f"no better {self.config.best_metric} in {now.evals_since_best} evaluations: stopped at step "
            f"{now.step:,}; the model is that of step {now.best_step:,}"
        )

    def _power(self) -> float | None:
        """Mean watts since the last call."""
        (then, before), (now, joules) = self.power_since, (time.monotonic(), self.energy.joules())
        self.power_since = (now, joules)
        return None if before is None or joules is None else (joules - before) / (now - then)


def add_known(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


@torch.no_grad()
def norms_by_block(state: TrainState) -> tuple[dict[str, float], dict[str, float]]:
    """Gradient and weight norms by block, read from the device at once."""
    blocks: dict[str, list[torch.nn.Parameter]] = {}
    for name, weight in state.weights.items():
        parts = name.split(".")
        depth = 3 if "blocks" in parts else 2 if parts[0] in ("vision", "text") else 1
        blocks.setdefault(".".join(parts[:depth]), []).append(weight)
    norms = []
    for weights in blocks.values():
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        norms.append(torch.stack([get_total_norm(x).to(state.device) for x in (gradients, weights)]))
    gradient_norms, weight_norms = torch.stack(norms).T.tolist()
    return dict(zip(blocks, gradient_norms, strict=True)), dict(zip(blocks, weight_norms, strict=True))


# Optional trackers: the same records in tensorboard, wandb or trackio. The run folder stays authoritative.
def check_tracker(name: str) -> None:
    if name != "none" and find_spec(name) is None:
        raise ValueError(f"--track {name} needs an extra: pip install 'm1clip[{name}]'")


@contextmanager
def tracking(run: Run, config: TrainConfig, step: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, every record but events also goes to the tracker, from `step` on."""

    def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # our stdout is for results, possibly one line of JSON
                return function(*arguments)
        except Exception as error:  # whatever a tracker raises must not end the training
            run.on_record = None
            warn(f"{config.track} failed and is no longer used: {error}")

    tracker = None if config.track == "none" else guarded(TRACKERS[config.track], run, config, step)
    if tracker is None:
        yield
        return
    send, close = tracker

    def send_record(record: dict[str, Any]) -> None:
        if record["kind"] != "event":
            values = {key: value for key, value in record.items() if key not in ("step", "time")}
            guarded(send, dict(scalars(values, record["kind"])), record["step"])

    run.on_record = send_record
    try:
        yield
    finally:
        run.on_record = None
        guarded(close)


def scalars(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Flat names grouped by kind: step/loss, diagnostics/grad_norms/vision.blocks.0."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}/{key}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value


def _tensorboard(run: Run, config: TrainConfig, step: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)  # later steps are repeated

    def send(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return send, writer.close


def _wandb(run: Run, config: TrainConfig, step: int) -> Tracker:
    import wandb

    # Without a key wandb would prompt for one, and nobody answers in a background run.
    mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
    wandb_run = wandb.init(project="m1clip", name=run.name, dir=run.path, config=asdict(config), mode=mode)
    return lambda values, step: wandb_run.log(values, step=step), wandb_run.finish


def _trackio(run: Run, config: TrainConfig, step: int) -> Tracker:
    import trackio

    trackio.init(project="m1clip", name=run.name, config=asdict(config))
    return lambda values, step: trackio.log(values, step=step), trackio.finish


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
