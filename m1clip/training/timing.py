"""Time real training steps of several plans in alternation, so that a disturbance affects all of them."""

import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import torch

from m1clip import devices, sensors
from m1clip.config import TrainConfig, to_json
from m1clip.console import Console
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.devices import Plan
from m1clip.errors import short_error
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost
from m1clip.training import memory
from m1clip.training.device_plan import MeasurementStore, StepCost, StepRow
from m1clip.training.step import TrainState, train_step

PLAN_TRIAL_S = 1.0  # per plan, if nothing was measured before
MIN_ROUNDS, ROUNDS, MAX_ROUNDS = 3, 5, 15  # at least with little time or slow rounds; at least; at most
SLOW_ROUND_S = 20.0
QUEUED_S = 0.1  # a GPU is timed over this many seconds of queued steps: training does not wait for each one


def quartiles(samples: list[float]) -> tuple[float, float, float]:
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive") if samples[1:] else 3 * samples
    return q1, median, q3


def model_id(config: TrainConfig) -> str:
    """Hash of every setting that changes the cost of a step, except batch size and caption length."""
    settings = (config.optimizer, config.patch_dropout, config.grad_checkpointing, bool(config.ema))
    text = f"{to_json(config.model)}{settings}{config.captions_per_image}"
    return blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass
class PlanTiming:
    plan: Plan
    samples_ms: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)
    setup_s: float = 0.0  # what the first step took beyond a later one: compilation, allocation
    step_s: float = 0.0
    steps_per_sample: int = 1
    peak_gb: float | None = None
    watts: float | None = None
    background_load: float = 0.0
    error: str | None = None


def time_plans(config: TrainConfig, plans: Sequence[Plan], batch: Batch, seconds: float) -> list[PlanTiming]:
    """Time steps of one model and batch by each plan, about `seconds` per plan."""
    states: dict[str, TrainState] = {}  # by device: the weights do not change the cost of a step
    timings, load = [PlanTiming(plan) for plan in plans], sensors.BackgroundLoad()
    for timing in timings:
        catch_error(timing, lambda timing: warm_up(timing, states, config, batch))
    running = [timing for timing in timings if not timing.error]
    round_s = sum(timing.step_s * timing.steps_per_sample for timing in running) or 1.0
    least = MIN_ROUNDS if seconds < 2 or round_s > SLOW_ROUND_S else ROUNDS
    for number in range(max(least, min(MAX_ROUNDS, int(seconds * len(running) / round_s)))):
        for timing in running if number % 2 else running[::-1]:
            catch_error(timing, lambda timing: add_sample(timing, states[timing.plan.device], batch))
    for timing in timings:
        timing.background_load = load.share()
    states.clear()
    for device in {device for plan in plans for device in plan.devices}:
        devices.release(device)
    devices.apply_plan(Plan())
    return timings


def catch_error(timing: PlanTiming, run: Callable[[PlanTiming], None]) -> None:
    """A plan that fails on the device, in the compiler or for lack of memory does not end the comparison."""
    try:
        if not timing.error:
            run(timing)
    except devices.DEVICE_ERRORS as error:
        timing.error = short_error(error)


def warm_up(timing: PlanTiming, states: dict[str, TrainState], config: TrainConfig, batch: Batch) -> None:
    plan = timing.plan
    if plan.device not in states:
        with torch.random.fork_rng(devices=[]):  # a run about to start has its own random state
            torch.manual_seed(0)
            states[plan.device] = TrainState(CLIP(config.model), config, replace(plan, compile=False))
    state = states[plan.device]
    first_s = time_step(state, plan, batch)[0] / 1e3
    timing.peak_gb, timing.step_s = peak_memory(state, plan, batch)
    if timing.step_s < 2:
        timing.step_s = time_step(state, plan, batch)[0] / 1e3
    timing.setup_s = max(0.0, first_s - timing.step_s)
    if any(devices.is_async(device) for device in state.model.devices):
        timing.steps_per_sample = max(1, min(20, round(QUEUED_S / timing.step_s)))


def peak_memory(state: TrainState, plan: Plan, batch: Batch) -> tuple[float, float]:
    """GB of the state and of a step's peak on all its devices, and the seconds of that slowed-down step."""
    state.zero_grad()
    memory.release_memory(state)
    used = set(state.model.devices)
    gpus = [device for device in used if devices.memory_gb(device) is not None]
    for device in gpus:
        devices.reset_peak(device)
    before_gb = sum(devices.memory_gb(device) or 0.0 for device in gpus)
    with sensors.PeakMemory() as peak:
        seconds = time_step(state, plan, batch)[0] / 1e3
    memory.retain_freed_memory()  # as in training; it was off so that the peak could be seen
    gpu_gb = sum(devices.peak_gb(device) or 0.0 for device in gpus) - before_gb
    state_gb = sum(memory.state_memory_gb(state).values())
    return state_gb + gpu_gb + (peak.gb if len(gpus) < len(used) else 0.0), seconds


def add_sample(timing: PlanTiming, state: TrainState, batch: Batch) -> None:
    if timing.step_s < 0.3:
        time_step(state, timing.plan, batch)  # wakes sleeping threads and refills the caches
    energy = sensors.EnergyMeter()
    ms, phases_ms = time_step(state, timing.plan, batch, timing.steps_per_sample)
    joules = energy.joules()
    if joules is not None:
        watts, count = joules / (timing.steps_per_sample * ms / 1e3), len(timing.samples_ms)
        timing.watts = ((timing.watts or 0.0) * count + watts) / (count + 1)
    if not devices.has_event_timer(state.device):  # phases need a synchronize after each: a step of its own
        phases_ms = time_step(state, timing.plan, batch, with_phases=True)[1]
    timing.samples_ms.append(ms)
    timing.phases_ms.append(phases_ms)


def time_step(
    state: TrainState, plan: Plan, batch: Batch, steps: int = 1, with_phases: bool = False
) -> tuple[float, dict[str, float]]:
    """Milliseconds per step between two synchronizations, and of each phase of the last step."""
    devices.apply_plan(plan)
    state.use_plan(plan)
    state.chunk = len(batch)
    with_phases = with_phases or devices.has_event_timer(state.device)
    stamps: dict[str, Any] = {}

    def mark(phase: str) -> None:
        if with_phases:
            stamps[phase] = devices.timestamp(state.device)

    for device in state.model.devices:
        devices.synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        mark("start")
        on_device = state.to_device(batch)
        mark("copy")
        train_step(state, on_device, mark)
    for device in state.model.devices:
        devices.synchronize(device)
    ms = 1e3 * (time.perf_counter() - start) / steps
    return ms, {b: devices.elapsed_ms(stamps[a], stamps[b]) for a, b in pairwise(stamps)}


def random_batch(config: TrainConfig, batch_size: int, tokens: int) -> Batch:
    rng, size = torch.Generator().manual_seed(0), config.model.vision.image_size
    tokens_BL = torch.randint(3, config.model.text.vocab_size, (batch_size, tokens), generator=rng)
    tokens_BL[:, 0], tokens_BL[:, -1] = 1, 2
    tokens_BKL = tokens_BL[:, None].repeat(1, config.captions_per_image, 1)
    images_BHWC = torch.randint(0, 256, (batch_size, size, size, 3), generator=rng, dtype=torch.uint8)
    key_B = torch.randint(0, 2**32, (batch_size,), generator=rng)
    return Batch(Images(images_BHWC), Tokens(tokens_BKL), key_B, None, np.arange(batch_size))


def step_cost(config: TrainConfig, batch_size: int, tokens: int, store: MeasurementStore) -> StepCost:
    """The cost of a step; counted once per model and stored, because counting takes a second or more."""
    model, names = model_id(config), ("parameters", "gflop", "activation_gb")
    if not (rows := store.rows("cost", model_id=model, tokens=tokens)):
        cost = model_cost(config.model, tokens=tokens, captions=config.captions_per_image)
        rows = [dict(zip(names, (cost.total, cost.step_gflop, cost.activation_mb / 1e3), strict=True))]
        store.add("cost", model_id=model, tokens=tokens, **rows[0])
    return StepCost(model, config.preset, tokens, batch_size=batch_size, **{name: rows[0][name] for name in names})


def add_comparison(store: MeasurementStore, cost: StepCost, timings: Sequence[PlanTiming], session: str = "") -> None:
    """Store a step row for each plan of one comparison, or a skipped row if it failed."""
    shared = {**asdict(cost), "comparison": uuid.uuid4().hex[:12], "session": session}
    for timing in timings:
        if timing.error:
            item = f"{cost.preset}, batch size {cost.batch_size:,}, {timing.plan}"
            store.add("skipped", **shared, item=item, reason=timing.error)
            continue
        q1_ms, step_ms, q3_ms = quartiles(timing.samples_ms)
        phases = {phase: statistics.median(ms[phase] for ms in timing.phases_ms) for phase in timing.phases_ms[0]}
        row = {"step_ms": step_ms, "q1_ms": q1_ms, "q3_ms": q3_ms, "phases_ms": phases, **asdict(timing.plan)}
        names = ("samples_ms", "setup_s", "background_load", "peak_gb", "watts")
        store.add("step", **shared, **row, **{name: getattr(timing, name) for name in names})


def measure_missing(
    config: TrainConfig, batch: Batch, cost: StepCost, store: MeasurementStore, console: Console
) -> list[StepRow]:
    """All step rows; if a device has none of this model, a few real steps are timed on all devices first."""
    available, rows = devices.available(), store.steps()
    if {row.device for row in rows if row.model_id == cost.model_id}.issuperset(available):
        return rows
    plans = [Plan(name) for name in available] + split_plans(available)
    plans += [Plan(name, precision) for name in available for precision in faster_precisions(name)]
    for size in trial_batch_sizes(cost, len({plan.device for plan in plans})):
        with console.progress(f"timing {size} pairs on {', '.join(available)}", None):
            timings = time_plans(config, plans, batch.split(size)[0], PLAN_TRIAL_S)
        for failed in (one for one in timings if one.error):
            console.warn(f"{failed.plan}: {failed.error}; not used")
        add_comparison(store, replace(cost, batch_size=size), timings)
    return store.steps()


def trial_batch_sizes(cost: StepCost, states: int) -> list[int]:
    """The batch size, if the CPU can do it in the time of a trial, or two smaller ones to extrapolate."""
    gflops = 0.4 * devices.matmul_gflops(devices.torch_device("cpu"), "fp32")  # a typical utilization
    free_gb = sensors.available_gb() * memory.USABLE - states * cost.state_gb
    most = int(min(PLAN_TRIAL_S * gflops / cost.gflop, free_gb / (memory.PEAK * cost.activation_gb)))
    if most >= cost.batch_size:
        return [cost.batch_size]
    return sorted({size for size in (max(2, most // 4), most) if 2 <= size <= most})


def split_plans(available: Sequence[str]) -> list[Plan]:
    """One tower on each of two devices, both ways; with a CPU alone, both towers in parallel on it."""
    pairs = list(permutations(available, 2)) or [(available[0], available[0])]
    return [Plan(f"vision={vision},text={text}") for vision, text in pairs]


def faster_precisions(name: str) -> list[str]:
    """Precisions in which a matrix product is faster than in fp32; others are not worth timing steps in."""
    device, faster = devices.torch_device(name), []
    baseline = devices.matmul_gflops(device, "fp32")
    for precision in devices.precisions(device)[1:]:
        with suppress(*devices.DEVICE_ERRORS):
            faster += [precision] if devices.matmul_gflops(device, precision) > 1.05 * baseline else []
    return faster
