"""The answers of the web monitor, as its OpenAPI schema publishes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RunRow:
    """A line of the list of runs; it changes with every record that the run logs."""

    run: str
    state: str
    step: int
    total: float | None
    eta_s: float | None
    best_metric: str | None
    best_score: float | None
    device: str | None
    reason: str | None
    warning: str | None
    problem: str | None
    time: float | None
    pid: Any
    data: str
    preset: str
    log_bytes: int | None
    fraction_read: float | None  # of its log, once it was opened


@dataclass(frozen=True)
class RunList:
    runs: list[RunRow]  # the newest first
    start: str | None  # the run that is shown first


@dataclass(frozen=True)
class Event:
    time: float | None
    step: int
    event: str
    text: str


@dataclass(frozen=True)
class GradientFlow:
    step: list[int]
    block: list[str]
    norm: list[list[float | None]]  # block x step


@dataclass(frozen=True)
class RunDescription:
    summary: dict[str, Any]
    path: str
    fraction_read: float  # of the log; below 1, the figures are of its newest part
    last_step: int
    config: dict[str, Any]
    preset_values: dict[str, Any]  # of the settings that differ from the preset
    machine: dict[str, Any]
    data: dict[str, Any]
    phases_ms: dict[str, float | None]
    recent_steps: int
    current: dict[str, float | None]
    chance: dict[str, float | None]
    pairs_per_s: float | None
    diagnostics: dict[str, Any]
    epoch: dict[str, Any]
    gradient_flow: GradientFlow
    events: list[Event]  # the newest first
    bad_lines: list[int]  # the first of them
    bad_line_count: int


@dataclass(frozen=True)
class CurvePoints:
    x: list[float]
    y: Sequence[float | None]  # null at a gap
    chance: float | None


@dataclass(frozen=True)
class Retrievals:
    """Example queries of the latest evaluation; empty before the first."""

    step: Any
    queries: list[dict[str, Any]]
    shown: dict[str, dict[str, Any]]  # images by row
