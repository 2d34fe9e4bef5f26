"""How long a step takes: as measured, between or beyond that, or by other models. Measures nothing."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.config import TrainConfig, to_json
from m1clip.devices import Plan

Row = dict[str, Any]
Numbers = NDArray[np.float64]
VARIES = 1.15  # the same time_plans on another day: 2 shared cores, November 2026, mostly within this
ENOUGH = 5  # samples
BUSY = 0.2  # of all cores, taken by other programs: such a measurement tells of them


@dataclass(frozen=True)
class Work:
    """What is asked about: a model with its optimizer, and a batch."""

    model: str
    """Identity of everything that decides what a step costs, but for batch and caption length."""
    name: str
    parameters: int
    gflop: float
    """Per pair, forward and backward, at the length that captions have."""
    batch: int
    activation_gb: float = 0.0
    """Per pair: what the backward pass needs kept."""

    @property
    def state_gb(self) -> float:
        """Weights, gradients and two moments of each, in float32."""
        return 16 * self.parameters / 1e9

    @property
    def step_gflop(self) -> float:
        return self.gflop * self.batch


def identity(config: TrainConfig) -> str:
    parts: tuple[object, ...] = (
        config.optimizer,
        config.patch_dropout,
        config.grad_checkpointing,
        bool(config.ema),
    )
    parts += (config.captions_per_image,) if config.captions_per_image > 1 else ()
    return blake2b((to_json(config.model) + repr(parts)).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Estimate:
    ms: float
    low: float
    high: float
    basis: str
    confidence: str

    def __str__(self) -> str:
        return f"{spoken(self.ms)} ({spoken(self.low)} to {spoken(self.high)})"


def spoken(ms: float) -> str:
    if ms >= 2e6:
        return f"{ms / 3.6e6:,.3g} h"
    return f"{ms / 1e3:,.4g} s" if ms >= 1e4 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def plan_of(row: Row) -> Plan:
    return Plan(row["device"], row["precision"], row["compile"], row["threads"])


def predict(rows: Iterable[Row], plan: Plan, work: Work) -> Estimate | None:
    """A step's time by one plan: as measured, between or beyond what was, or from other models."""
    rows = undisturbed([row for row in rows if plan_of(row) == plan])
    same = [row for row in rows if row["model"] == work.model]
    exact = [row for row in same if row["batch"] == work.batch and math.isclose(row["gflop"], work.gflop, rel_tol=0.01)]
    if exact:
        return _as_measured(exact)
    if same:
        return _of_this_model(latest(same), work)
    return _of_other_models(latest(rows), work)


def _as_measured(rows: list[Row]) -> Estimate:
    """The newest; the range is that of all days, and never narrower than machines vary."""
    newest = rows[-1]
    ms, day = newest["step_ms"], time.strftime("%d %B %Y", time.localtime(newest["time"]))
    low = min(ms / VARIES, *(row["low_ms"] for row in rows))
    high = max(ms * VARIES, *(row["high_ms"] for row in rows))
    sure = "high" if len(newest["samples_ms"]) >= ENOUGH and high < 2 * low else "medium"
    if (newest.get("busy") or 0.0) > BUSY:
        return Estimate(ms, low, high, f"measured on {day}, while other programs were busy", "low")
    return Estimate(ms, low, high, f"measured on {day}", sure)


def undisturbed(rows: Sequence[Row]) -> list[Row]:
    """Those that were measured while the machine had little else to do, if there are any."""
    quiet = [row for row in rows if (row.get("busy") or 0.0) <= BUSY]
    return quiet or list(rows)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of repeated measurements the newest."""
    return list({(row["model"], row["batch"], round(row["gflop"], 4)): row for row in rows}.values())


def _of_this_model(rows: list[Row], work: Work) -> Estimate:
    x, ms = _points(rows)
    if len(rows) == 1:
        part = work.step_gflop / float(x[0])
        told = float(ms[0]) * (part if part > 1 else part**0.5)  # some of it is constant: how much is not known
        basis = f"scaled from one measurement, at batch {rows[0]['batch']}"
        return Estimate(told, min(told * 0.6, ms[0] * part * 0.8), told * 1.5, basis, "low")
    told, beyond = _line(x, ms, work.step_gflop), _beyond(x, work.step_gflop)
    missed = [math.log(_line(x, ms, at) / true) for at, true in zip(x, ms, strict=True)]
    spread = 1.64 * float(np.std(missed)) if len(rows) > 2 else 0.2
    wide = max(VARIES**1.5, math.exp(spread)) + 0.1 * beyond
    batches = f"{min(row['batch'] for row in rows)} to {max(row['batch'] for row in rows)}"
    basis = f"between measurements of this model (batches {batches})"
    if beyond:
        basis = f"extrapolated: this model was measured at batches {batches}"
    return Estimate(told, told / wide, told * wide, basis, "medium" if beyond < 1 else "low")


def _of_other_models(rows: list[Row], work: Work) -> Estimate | None:
    told = extrapolate(rows, work.step_gflop, work.parameters)
    if told is None:
        return None
    beyond = _beyond(_points(rows)[0], work.step_gflop)
    wide = told[1] + 0.1 * beyond
    names = ", ".join(dict.fromkeys(row["preset"] for row in rows))
    basis = f"this model was not measured: {'extrapolated' if beyond else 'interpolated'} from {names}"
    return Estimate(told[0], told[0] / wide, told[0] * wide, basis, "low")


def extrapolate(rows: Sequence[Row], step_gflop: float, parameters: int) -> tuple[float, float] | None:
    """Milliseconds of a step by the rows of other models, and a factor that 90 % should lie within.

    A step is taken for a constant, a part that grows with its work and one with the parameters it updates;
    how well that extrapolates is found by leaving out each row in turn.
    """
    if len(rows) < 3:
        return None
    facts = np.array([(1.0, work_in(row), row["parameters"]) for row in rows])
    ms = np.array([row["step_ms"] for row in rows])
    told = _shares(facts, ms) @ np.array((1.0, step_gflop, parameters))
    missed = [np.log(_shares(np.delete(facts, i, 0), np.delete(ms, i)) @ facts[i] / ms[i]) for i in range(len(rows))]
    return float(told), float(np.exp(max(0.1, 1.64 * np.sqrt(np.mean(np.square(missed))))))


def _shares(facts: Numbers, ms: Numbers) -> Numbers:
    """The least relative squares, none below zero: what would be is left out."""
    found, used = np.zeros(facts.shape[1]), list(range(facts.shape[1]))
    while used:
        some, *_ = np.linalg.lstsq(facts[:, used] / ms[:, None], np.ones(len(ms)), rcond=None)
        if (some >= 0).all():
            found[used] = some
            break
        used.pop(int(np.argmin(some)))
    return found


def _points(rows: list[Row]) -> tuple[Numbers, Numbers]:
    return np.array([work_in(row) for row in rows]), np.array([row["step_ms"] for row in rows])


def _line(x: Numbers, ms: Numbers, at: float) -> float:
    """A step is a constant part (launches, the update) and one that grows with its work."""
    slope, start = np.polyfit(x, ms, 1, w=1 / ms)
    if start < 0 or slope < 0:
        slope, start = float((ms / x).mean()), 0.0
    return float(start + slope * at)


def _beyond(x: Numbers, at: float) -> float:
    """How often what was measured has to be doubled, or halved, to reach this."""
    low, high = 0.99 * float(x.min()), 1.01 * float(x.max())
    return max(0.0, math.log2(at / high), math.log2(low / at))


def work_in(row: Row) -> float:
    return float(row["gflop"] * row["batch"])
