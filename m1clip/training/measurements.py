"""What was measured on this machine: JSON lines in the cache, by chip, memory and PyTorch. No torch."""

import json
import re
import statistics
import time
from dataclasses import dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from m1clip import sensors
from m1clip.config import TrainConfig, to_json
from m1clip.files import cache_folder, json_safe, read_jsonl

if TYPE_CHECKING:
    from m1clip.devices import Plan

MEASUREMENTS_FILE = "measurements-3.jsonl"  # a new number when rows or the training step change
HIGH_LOAD = 0.2  # fraction of all cores used by other programs; above it, timings are not reliable


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if samples[1:] else 3 * samples
    return q1, median, q3


def model_id(config: TrainConfig) -> str:
    """Hash of every setting that changes the cost of a step, except batch size and caption length."""
    settings = (config.optimizer, config.patch_dropout, config.grad_checkpointing, bool(config.ema))
    text = f"{to_json(config.model)}{settings}{config.captions_per_image}"
    return blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class StepCost:
    """Compute and memory of a training step of one model, optimizer and batch size."""

    model_id: str
    preset: str
    tokens: int  # caption length
    parameters: int
    gflop: float  # per pair, forward and backward
    activation_gb: float  # per pair, saved by autograd for the backward pass
    batch_size: int

    @property
    def state_gb(self) -> float:
        """Weights, gradients and two moments in fp32."""
        return 16 * self.parameters / 1e9

    @property
    def step_gflop(self) -> float:
        return self.gflop * self.batch_size


@dataclass(frozen=True)
class StepRow(StepCost):
    """Timed training steps of one plan."""

    time: float
    session: str
    comparison: str  # plans with the same id were timed in alternation
    device: str
    precision: str
    compile: bool
    threads: int
    samples_ms: list[float]
    step_ms: float  # median; q1_ms and q3_ms are the quartiles
    q1_ms: float
    q3_ms: float
    phases_ms: dict[str, float]
    setup_s: float  # what the first step took beyond a later one: compilation, allocation
    background_load: float
    peak_gb: float | None
    watts: float | None

    @property
    def plan(self) -> "Plan":
        from m1clip.devices import Plan  # imports torch

        return Plan(self.device, self.precision, self.compile, self.threads)

    @property
    def pairs_per_s(self) -> float:
        return 1e3 * self.batch_size / self.step_ms

    @property
    def gflops(self) -> float:
        return self.gflop * self.pairs_per_s

    @property
    def is_loaded(self) -> bool:
        return self.background_load > HIGH_LOAD


class MeasurementStore:
    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / MEASUREMENTS_FILE
        self.unsaved: list[dict[str, Any]] = []
        self.write_error: str | None = None

    def add(self, kind: str, **values: Any) -> None:
        """Append a row. If that fails, only this process knows the row, and `write_error` has the reason."""
        row = json_safe({"kind": kind, "time": round(time.time(), 1), **values})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(self.path, "a") as file:  # the newline comes first: the last line may be torn
                file.write("\n" + json.dumps(row, allow_nan=False))
        except OSError as error:
            self.write_error = str(error)
            self.unsaved.append(row)

    def rows(self, kind: str, **filters: Any) -> list[dict[str, Any]]:
        """Rows with these values, oldest first."""
        filters["kind"] = kind
        rows = (*read_jsonl(self.path), *self.unsaved)
        return [row for row in rows if all(row.get(key) == value for key, value in filters.items())]

    def steps(self, **filters: Any) -> list[StepRow]:
        """Step rows, without incomplete ones: the file may have been edited."""
        names = {field.name for field in fields(StepRow)}
        rows = [row for row in self.rows("step", **filters) if row.keys() >= names and row["samples_ms"]]
        return [StepRow(**{name: row[name] for name in names}) for row in rows]


def open_store() -> MeasurementStore:
    """The measurements of this machine."""
    machine = sensors.machine()
    parts = (machine["chip"], f"{machine['cores']} cores", f"{machine['ram_gb']:.0f} GB", machine["torch"])
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, parts)).lower())
    return MeasurementStore(cache_folder() / "machines" / name)
