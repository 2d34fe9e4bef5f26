"""The device plan of a run: requested, resumed, or the fastest by the step times stored for this machine."""

import json
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from m1clip import devices, sensors
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, ImageFeatures, TextFeatures
from m1clip.devices import Plan
from m1clip.errors import short_error
from m1clip.files import cache_folder, json_safe, read_jsonl, remove_irregular
from m1clip.format import duration, milliseconds
from m1clip.model.clip import CLIP
from m1clip.training.memory import PEAK, USABLE, power_of_two
from m1clip.training.step import TrainState, embed_images, embed_texts

SKIP_PARITY = "M1CLIP_SKIP_PARITY"
SAME_AS_BEFORE = "as in the resumed run"
MEASUREMENTS_FILE = "measurements-3.jsonl"  # a new number when rows or the training step change
HIGH_LOAD = 0.2  # fraction of all cores used by other programs; above it, timings are not reliable
DAILY_VARIATION = 1.15  # ratio of the same step's times on different days; 2 shared cores, November 2026
MIN_SAMPLES, MIN_SPEEDUP = 5, 1.05
MAX_DISTANCE = 4.0  # another model's comparison counts if its step has 1/4 to 4 times the GFLOP
CHUNKED = 4 / 3  # GradCache runs forward twice
LEVELS = ("low", "medium", "high")
Setting = tuple[str, str, str, str]  # name, value, confidence, reason


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
    def plan(self) -> Plan:
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
            remove_irregular(self.path)
            with open(self.path, "a") as file:  # the newline comes first: the last line may be torn
                file.write("\n" + json.dumps(row, allow_nan=False))
        except OSError as error:
            self.write_error = str(error)
            self.unsaved.append(row)

    def rows(self, kind: str, **filters: Any) -> list[dict[str, Any]]:
        """Rows with these values, oldest first."""
        filters["kind"] = kind
        stored = list[dict[str, Any]]()
        with suppress(OSError):  # not a regular file, or not ours to read: measured again
            stored += read_jsonl(self.path)
        rows = [row for row in (*stored, *self.unsaved) if all(row.get(key) == value for key, value in filters.items())]
        return [row for row in rows if is_complete(kind, row)]

    def steps(self, **filters: Any) -> list[StepRow]:
        """Step rows, without incomplete ones: the file may have been edited."""
        rows = list[StepRow]()
        for row in self.rows("step", **filters):
            with suppress(ValueError):  # includes pydantic's errors
                rows.append(_step_adapter().validate_json(json.dumps(row), strict=True))
        return [row for row in rows if row.samples_ms and min(*row.samples_ms, row.step_ms) > 0]


REQUIRED_NUMBERS = {"cost": ("parameters", "gflop", "activation_gb"), "session": ("time",)}
REQUIRED_NUMBERS |= {"step": ("parameters", "gflop", "batch_size", "step_ms", "q1_ms", "q3_ms")}
REQUIRED_TEXTS = {"operation": ("operation", "device", "precision"), "skipped": ("item", "reason")}
REQUIRED_TEXTS |= {"session": ("session",)}


def is_complete(kind: str, row: Mapping[str, Any]) -> bool:
    """Whether a row has what its readers need: positive numbers and texts."""
    numbers: list[Any] = [row.get(name) for name in REQUIRED_NUMBERS.get(kind, ())]
    are_numbers = all(type(number) in (int, float) and 0 < number < 1e30 for number in numbers)
    return are_numbers and all(isinstance(row.get(name), str) for name in REQUIRED_TEXTS.get(kind, ()))


@cache
def _step_adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(StepRow)


def open_store() -> MeasurementStore:
    """The measurements of this machine: JSON lines in the cache, by chip, memory and PyTorch."""
    machine = sensors.machine()
    parts = (machine["chip"], f"{machine['cores']} cores", f"{machine['ram_gb']:.0f} GB", machine["torch"])
    name = re.sub(r"[^a-z0-9.]+", "-", " ".join(map(str, parts)).lower())
    return MeasurementStore(cache_folder() / "machines" / name)


StepRows = Sequence[StepRow]
RowPair = tuple[StepRow, StepRow]


@dataclass(frozen=True)
class StepEstimate:
    ms: float
    factor: float  # the step should take between ms / factor and ms * factor
    basis: str
    confidence: str

    def __str__(self) -> str:
        low, high = milliseconds(self.ms / self.factor), milliseconds(self.ms * self.factor)
        return f"{milliseconds(self.ms)} ({low} to {high})"


def estimate_step(rows: StepRows, plan: Plan, cost: StepCost) -> StepEstimate | None:
    """Step time by a plan: as measured, interpolated or extrapolated for this model, or from other models."""
    rows = [row for row in rows if row.plan == plan]
    rows = [row for row in rows if not row.is_loaded] or rows
    same_model = [row for row in rows if row.model_id == cost.model_id]
    for row in reversed(same_model):
        if row.batch_size == cost.batch_size and math.isclose(row.gflop, cost.gflop, rel_tol=0.01):
            factor = max(DAILY_VARIATION, row.step_ms / row.q1_ms, row.q3_ms / row.step_ms)
            confidence = "high" if len(row.samples_ms) >= MIN_SAMPLES else "medium"
            basis = f"measured on {time.strftime('%d %B %Y', time.localtime(row.time))}"
            if row.is_loaded:
                basis, confidence = f"{basis} under background load", "low"
            return StepEstimate(row.step_ms, factor, basis, confidence)
    newest = {(row.model_id, row.batch_size, round(row.gflop, 4)): row for row in same_model or rows}
    return _fitted(list(newest.values()), cost, bool(same_model)) if same_model or len(newest) >= 3 else None


def _fitted(rows: StepRows, cost: StepCost, is_same_model: bool) -> StepEstimate:
    gflop, (ms, factor) = [row.step_gflop for row in rows], fit_step_time(rows, cost, not is_same_model)
    # Doublings or halvings from the measured range.
    outside = max(0.0, math.log2(cost.step_gflop / max(gflop)), math.log2(min(gflop) / cost.step_gflop))
    basis = "extrapolated" if outside > 0.01 else "interpolated"
    if is_same_model:
        sizes, factor = sorted(row.batch_size for row in rows), max(DAILY_VARIATION**1.5, factor)
        basis = f"{basis} from batch size{f's {sizes[0]} to' if sizes[1:] else ''} {sizes[-1]}"
    else:
        names = ", ".join(dict.fromkeys(row.preset for row in rows))
        basis = f"this model was not measured; {basis} from {names}"
    is_reliable = is_same_model and outside < 1 and len(rows) > 1
    return StepEstimate(ms, factor + 0.1 * outside, basis, "medium" if is_reliable else "low")


def fit_step_time(rows: StepRows, cost: StepCost, per_parameter: bool = True) -> tuple[float, float]:
    """Step time in ms: a part per GFLOP, a constant and a part per parameter, fitted to the rows.

    Also the factor within which 90 % of such estimates lie, from leaving out one row at a time.
    """
    width = min(len(rows), 3 if per_parameter else 2)
    features = np.array([(row.step_gflop, 1.0, row.parameters)[:width] for row in rows])
    ms = np.array([row.step_ms for row in rows])

    def predict(used: list[int], x: Any) -> float:
        """Least relative squares; the most negative coefficient is dropped until there is none."""
        columns = list(range(width))
        while True:
            relative = features[np.ix_(used, columns)] / ms[used, None]
            solution = np.linalg.lstsq(relative, np.ones(len(used)), rcond=None)[0]
            if (solution >= 0).all():
                return float(solution @ np.array(x)[columns])
            columns.pop(int(np.argmin(solution)))

    indices = list(range(len(rows)))
    value = predict(indices, (cost.step_gflop, 1.0, cost.parameters))
    if len(rows) < 3:
        return value, 1.6 if len(rows) == 1 else 1.2
    errors = [math.log(predict(indices[:i] + indices[i + 1 :], features[i]) / ms[i]) for i in indices]
    return value, math.exp(max(0.1, 1.64 * float(np.sqrt(np.mean(np.square(errors))))))


def is_significant(a: StepRow, b: StepRow) -> bool:
    """Whether one of two plans of a comparison is faster. The only such rule: bench and advise share it.

    The interquartile ranges are disjoint, and the same plan wins at least 80 % of the rounds (with fewer than
    five rounds, all of them).
    """
    wins = [x < y for x, y in zip(a.samples_ms, b.samples_ms, strict=False)]
    share = max(sum(wins), len(wins) - sum(wins)) / len(wins)
    return share >= (0.8 if len(wins) >= MIN_SAMPLES else 1.0) and (a.q3_ms < b.q1_ms or b.q3_ms < a.q1_ms)


def find_comparison(rows: StepRows, base: Plan, other: Plan, cost: StepCost) -> RowPair | None:
    """Rows of both plans from the comparison most like this step: idle, same model, similar GFLOP, newest."""
    comparisons: dict[str, dict[Plan, StepRow]] = {}
    for row in rows:
        comparisons.setdefault(row.comparison, {})[row.plan] = row

    def distance(pair: RowPair) -> tuple[bool, bool, float, float]:
        row = pair[0]
        gflop_ratio = abs(math.log(row.step_gflop / cost.step_gflop))
        return row.is_loaded, row.model_id != cost.model_id, gflop_ratio, -row.time

    pairs = [(plans[base], plans[other]) for plans in comparisons.values() if {base, other} <= plans.keys()]
    return min(pairs, key=distance, default=None)


def speedup(pair: RowPair) -> float:
    return pair[0].step_ms / pair[1].step_ms


def describe_speedup(pair: RowPair, cost: StepCost) -> str:
    base, row = pair
    times = f"{milliseconds(row.step_ms)} vs {milliseconds(base.step_ms)} at batch size {base.batch_size}"
    model = "" if base.model_id == cost.model_id else f" of {base.preset}"
    return f"{speedup(pair):.2f}x as fast as {base.plan} ({times}{model})"


def objection(pair: RowPair, cost: StepCost, steps: int) -> str | None:
    """Why the second plan does not replace the first; None if it does."""
    base, row = pair
    gflop_ratio = base.step_gflop / cost.step_gflop
    if speedup(pair) < MIN_SPEEDUP:
        return f"less than {MIN_SPEEDUP}x"
    if base.model_id != cost.model_id and not 1 / MAX_DISTANCE <= gflop_ratio <= MAX_DISTANCE:
        return "that model is too different from this one"
    if base.is_loaded:
        return "measured under background load"
    if not is_significant(base, row):
        return "not significant"
    saved_s = steps * (base.step_ms - row.step_ms) / gflop_ratio / 1e3
    if row.compile and saved_s <= row.setup_s:
        return f"saves {duration(saved_s)} in {steps:,} steps, compiling takes {duration(row.setup_s)}"
    return None


@dataclass(frozen=True)
class PlanChoice:
    plan: Plan
    reason: str
    parity: str | None = None  # the result of the comparison with the CPU


@dataclass(frozen=True)
class Advice:
    plan: Plan
    reason: str
    confidence: str
    step: StepEstimate | None
    rejected: dict[str, str]  # other measured plans, and why they were not chosen


def advise(
    cost: StepCost, rows: StepRows, available: Sequence[str], requested: Mapping[str, Any], steps: int
) -> Advice:
    """The fastest measured plan; `requested` holds the fields of Plan that are decided already."""
    # The fastest plain plan of a device is the reference. Another plan has to beat it in the same comparison.
    names = [requested["device"]] if "device" in requested else available
    plain = [Plan(**{"device": name, **requested}) for name in names]
    estimates = {plan: estimate for plan in plain if (estimate := estimate_step(rows, plan, cost))}
    reference = min(estimates, key=lambda plan: estimates[plan].ms, default=plain[-1])
    best, rejected = None, {}
    for plan in dict.fromkeys(row.plan for row in rows if row.plan != reference):
        used = {part.rpartition("=")[2] for part in plan.device.split(",")}
        is_allowed = replace(plan, **requested) == plan and used <= {*available, reference.device}
        if is_allowed and (pair := find_comparison(rows, reference, plan, cost)):
            reason = objection(pair, cost, steps)
            if reason is None and (best is None or speedup(pair) > speedup(best)):
                best = pair
            rejected[str(plan)] = f"{describe_speedup(pair, cost)}; {reason or 'the chosen plan is faster'}"
    reason, confidence = "PyTorch finds no GPU", "high"
    if len(plain) > 1:
        times = ", ".join(f"{plan}: {estimates.get(plan, 'not measured')}" for plan in plain)
        others = [find_comparison(rows, reference, plan, cost) for plan in plain if plan != reference]
        is_clear = all(pair and is_significant(*pair) for pair in others)
        basis = estimates[reference].basis if estimates else "m1clip bench measures them"
        reason = f"{times}{'' if is_clear else ' (not significant)'}; {basis}"
        levels = [estimate.confidence for estimate in estimates.values()]
        confidence = min(levels, key=LEVELS.index) if is_clear else "low"
    if requested:
        typed = {key: ("off", "on")[value] if isinstance(value, bool) else value for key, value in requested.items()}
        flags = "requested with " + " ".join(f"--{key} {value}" for key, value in typed.items())
        reason = flags if "device" in requested else f"{reason}; {flags}"
    step = estimates.get(reference)
    if best is None:
        return Advice(reference, reason, confidence, step, rejected)
    rejected.pop(str(best[1].plan))
    measured = estimate_step(rows, best[1].plan, cost)
    if measured is None or measured.confidence == "low":
        measured = step and replace(step, ms=step.ms / speedup(best))
    is_exact = (best[0].model_id, best[0].batch_size) == (cost.model_id, cost.batch_size)
    reason = describe_speedup(best, cost) + (f"; {reason}" if requested else "")
    return Advice(best[1].plan, reason, "high" if is_exact else "medium", measured, rejected)


def predict_run(cost: StepCost, advice: Advice, rows: StepRows, free_gb: float, pairs: int) -> list[Setting]:
    """Chunk, memory, step and epoch of a run by the advised plan."""
    usable_gb, pair_gb, chunk = USABLE * free_gb - cost.state_gb, PEAK * cost.activation_gb, cost.batch_size
    if pair_gb * chunk > usable_gb:
        chunk = power_of_two(usable_gb / pair_gb) if usable_gb >= pair_gb else 0
    need_gb, basis = cost.state_gb + pair_gb * max(1, chunk), ("medium", "computed from the model")
    for row in rows:
        if (row.plan, row.model_id, row.batch_size) == (advice.plan, cost.model_id, chunk) and row.peak_gb:
            need_gb, basis = row.peak_gb, ("high", "measured")
    text = "whole batch" if chunk == cost.batch_size else f"{chunk:,}" if chunk else "does not fit"
    state = f"{cost.state_gb:.2f} GB of weights, gradients and moments"
    sizes = f"{state}, {1e3 * cost.activation_gb:.3g} MB of activations per pair, {free_gb:.1f} GB free"
    predictions = [("chunk", text, "high", sizes), ("memory", f"{need_gb:.2f} GB", *basis)]
    if step := advice.step:
        step = replace(step, ms=step.ms * (CHUNKED if chunk < cost.batch_size else 1.0))
        steps = max(1, pairs // cost.batch_size)
        predictions.append(("step", milliseconds(step.ms), step.confidence, f"{step}, {step.basis}"))
        reason = f"{steps:,} steps for {pairs:,} pairs, without evaluation"
        predictions.append(("epoch", duration(steps * step.ms / 1e3), step.confidence, reason))
    return predictions


def choose_plan(
    config: TrainConfig, model: CLIP, batch: Batch, steps: int, resumed_plan: Plan | None, console: Console
) -> PlanChoice:
    is_features = isinstance(batch.image, ImageFeatures) and isinstance(batch.text, TextFeatures)
    if is_features and not resumed_plan:
        return PlanChoice(Plan(str(model.devices[0]), threads=config.threads), "the device that encoded the features")
    choice = resume_plan(resumed_plan, config) if resumed_plan else auto_plan(config, batch, steps, console)
    return check_parity(choice, model, batch, console, config)


def default_plan(config: TrainConfig) -> PlanChoice:
    """The requested device, or a GPU if there is one: where nothing has been measured."""
    if config.device != "auto":
        return PlanChoice(Plan(config.device, threads=config.threads), f"requested with --device {config.device}")
    device, reason = devices.default_device("auto")
    return PlanChoice(Plan(device.type, threads=config.threads), reason)


def requested_plan(config: TrainConfig) -> dict[str, Any]:
    """The fields of Plan that are set by flags; a device that this machine lacks is an error."""
    settings = {name: getattr(config, name) for name in ("device", "precision", "compile", "threads")}
    requested = {name: value for name, value in settings.items() if value not in ("auto", 0)}
    if "device" in requested:
        devices.tower_devices(config.device)
    return {**requested, "compile": config.compile == "on"} if "compile" in requested else requested


def resume_plan(plan: Plan, config: TrainConfig) -> PlanChoice:
    """The plan of the interrupted run, unless flags or a missing device change it."""
    requested, reason = requested_plan(config), SAME_AS_BEFORE
    if "device" not in requested:
        try:
            devices.tower_devices(plan.device)
        except ValueError as error:
            reason = f"the resumed run was on {plan.device}, but {error}"
            requested["device"] = devices.default_device("auto")[0].type
    if requested.get("device", plan.device) != plan.device:  # the other settings were chosen for the old one
        plan = Plan(plan.device)
    changes = {key: value for key, value in requested.items() if getattr(plan, key) != value}
    reason += "".join(f", --{key} {getattr(config, key)}" for key in changes if getattr(config, key) != "auto")
    return PlanChoice(replace(plan, **changes), reason)


def auto_plan(config: TrainConfig, batch: Batch, steps: int, console: Console) -> PlanChoice:
    """The fastest plan by the measurements of this machine; without any, every device is timed first."""
    available, requested, store = devices.available(), requested_plan(config), open_store()
    rows, tokens = store.steps(), batch.text[0].shape[-1]
    is_undecided = "device" not in requested and len(available) > 1
    cost = StepCost("", config.preset, tokens, 1, 1.0, 1.0, len(batch))
    if rows or is_undecided:  # counting the cost takes a second
        from m1clip.training import timing

        cost = timing.step_cost(config, len(batch), tokens, store)
    if is_undecided:
        rows = timing.measure_missing(config, batch, cost, store, console)
    if store.write_error:
        console.warn(f"measurements cannot be stored: {store.write_error}")
    advice = advise(cost, rows, available, requested, steps)
    return PlanChoice(advice.plan, advice.reason)


def check_parity(
    choice: PlanChoice, model: CLIP, batch: Batch, console: Console, config: TrainConfig | None = None
) -> PlanChoice:
    """The same choice if its devices compute what the CPU does, else the CPU."""
    plan = choice.plan
    if os.environ.get(SKIP_PARITY) == "1" or set(devices.tower_devices(plan.device)) == {"cpu"}:
        return choice
    from m1clip.training.device_check import compare_with_cpu

    with console.progress(f"comparing {plan.device} with the CPU", None):
        result = compare_with_cpu(model, batch, plan, config)
    if not result.mismatch:
        return replace(choice, parity=str(result))
    reason = f"{plan.device} is not used, because {result}"
    console.warn(f"{reason}. The CPU is used instead. {SKIP_PARITY}=1 skips this check")
    return PlanChoice(Plan("cpu", threads=plan.threads), reason, str(result))


def compile_blocks(choice: PlanChoice, state: TrainState, batch: Batch, console: Console) -> PlanChoice:
    """Compile the transformer blocks and try them on one chunk, if planned; if that fails, do not compile."""
    if not choice.plan.compile:
        return choice
    possible, reason = devices.can_compile(state.device)
    try:
        if possible:
            state.use_plan(choice.plan)
            with console.progress("compiling the transformer blocks", None):
                chunk = state.to_device(batch.split(state.chunk)[0])
                for embed in (embed_images, embed_texts):
                    embed(state.model, chunk, choice.plan.precision).sum().backward()  # type: ignore[no-untyped-call]
            return choice
    except devices.DEVICE_ERRORS as error:
        reason = short_error(error)
    finally:
        state.zero_grad()
    console.warn(f"not compiled: {reason}")
    plan = replace(choice.plan, compile=False)
    state.use_plan(plan)
    return replace(choice, plan=plan, reason=f"{choice.reason}; not compiled: {reason}")
