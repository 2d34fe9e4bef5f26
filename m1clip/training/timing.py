"""The time of real steps: several plans in turn, so that what disturbs one disturbs all."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median, quantiles
from typing import Any

import numpy as np
import torch

from m1clip import devices, sensors
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.training import memory
from m1clip.training.state import TrainState
from m1clip.training.step import train_step

FEW, LEAST, MOST = 3, 5, 15
"""Rounds of a time_plans: where little time is given, or a round takes long; else; at most."""
SLOW_S = 20.0
BURST_S = 0.1  # a queued device is timed over as many steps as this takes: in a run nothing waits for each


@dataclass
class Timing:
    """What one plan took."""

    plan: Plan
    step_ms: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    first_s: float = 0.0
    """Of the first step, with everything that is made only once: compiled code, kernels, moments."""
    steady_s: float = 0.0
    """Of the one after it."""
    peak_gb: float | None = None
    joules: float | None = None
    seconds: float = 0.0
    burst: int = 1
    busy: float = 0.0
    """Part of all cores that other programs took meanwhile."""
    failed: str | None = None

    def record(self) -> dict[str, Any]:
        """Flat, for a line of JSON; times are medians, and the middle half of them is beside it."""
        low, middle, high = quartiles(self.step_ms)
        names = self.phases[0] if self.phases else {}
        return {
            **vars(self.plan),
            "step_ms": round(middle, 3),
            "low_ms": round(low, 3),
            "high_ms": round(high, 3),
            "samples_ms": [round(ms, 3) for ms in self.step_ms],
            "phases_ms": {name: round(median(one[name] for one in self.phases), 3) for name in names},
            "setup_s": round(max(0.0, self.first_s - self.steady_s), 2),
            "busy": self.busy,
            "peak_gb": None if self.peak_gb is None else round(self.peak_gb, 3),
            "watts": None if self.joules is None else round(self.joules / self.seconds, 2),
        }


def quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high


def time_plans(config: TrainConfig, plans: list[Plan], batch: Batch, seconds: float) -> list[Timing]:
    """Each plan's real steps of one model and batch, about `seconds` for each plan, in turns.

    Plans on the same devices share a state: what it has learned does not change what a step costs.
    """
    states: dict[str, TrainState] = {}
    timings, others = [Timing(plan) for plan in plans], sensors.BackgroundLoad()
    for timing in timings:
        trying(timing, partial(warm_up, timing, states, config, batch))
    running = [timing for timing in timings if not timing.failed]
    turn_s = sum(timing.steady_s * timing.burst for timing in running) or 1.0
    least = FEW if seconds < 2 or turn_s > SLOW_S else LEAST
    rounds = max(least, min(MOST, int(seconds * len(running) / turn_s)))
    for number in range(rounds):
        for timing in running if number % 2 else running[::-1]:
            trying(timing, partial(one_turn, timing, states, batch))
    for timing in timings:
        timing.busy = others.share()
    states.clear()
    for place in {place for plan in plans for place in plan.devices}:
        devices.release(place)
    sensors.trim_malloc()
    devices.apply_plan(Plan())
    return timings


def trying(timing: Timing, work: Callable[[], None]) -> None:
    """What a device, a compiler or the memory refuses is a result, not the end of the others."""
    if timing.failed:
        return
    try:
        work()
    except devices.DEVICE_ERRORS as error:
        timing.failed = devices.short_error(error)


def warm_up(timing: Timing, states: dict[str, TrainState], config: TrainConfig, batch: Batch) -> None:
    plan = timing.plan
    if plan.device not in states:
        with torch.random.fork_rng(devices=[]):  # a run that is about to begin has its own
            torch.manual_seed(0)
            states[plan.device] = TrainState(CLIP(config.model), config, replace(plan, compile=False))
    state = ready(states[plan.device], plan, batch)
    timing.first_s = timed(state, batch)[0] / 1e3
    timing.peak_gb, timing.steady_s = peak_of(state, batch)
    if timing.steady_s < 2:
        timing.steady_s = timed(state, batch)[0] / 1e3
    queued = any(devices.is_async(place) for place in state.model.devices)
    timing.burst = max(1, min(20, round(BURST_S / timing.steady_s))) if queued else 1


def peak_of(state: TrainState, batch: Batch) -> tuple[float, float]:
    """GB that the state keeps and the most that a step takes beside it, on all its devices; its seconds.

    Looking costs time, so this step is not among those counted.
    """
    state.zero_grad()
    memory.release(state)
    sensors.trim_malloc()
    places = set(state.model.devices)
    gpus = [place for place in places if devices.memory_gb(place) is not None]
    for place in gpus:
        devices.reset_peak(place)
    before = sum(devices.memory_gb(place) or 0.0 for place in gpus)
    with sensors.PeakMemory() as peak:
        seconds = timed(state, batch)[0] / 1e3
    memory.retain_freed_memory()  # as in a run; what was freed had been given back, to be seen
    grown = sum(devices.peak_gb(place) or 0.0 for place in gpus) - before
    on_host = peak.gb if len(gpus) < len(places) else 0.0
    return memory.kept_gb(state) + grown + on_host, seconds


def one_turn(timing: Timing, states: dict[str, TrainState], batch: Batch) -> None:
    state = ready(states[timing.plan.device], timing.plan, batch)
    if timing.steady_s < 0.3:
        timed(state, batch)  # threads that slept, caches that others filled
    energy, began = sensors.EnergyMeter(), time.perf_counter()
    ms, phases = timed(state, batch, timing.burst)
    timing.seconds += time.perf_counter() - began
    drawn = energy.joules()
    timing.joules = None if drawn is None else (timing.joules or 0.0) + drawn
    timing.step_ms.append(ms)
    if not devices.has_event_timer(state.device):  # its phases are exact only where each is waited for
        phases = timed(state, batch, exact=True)[1]
    timing.phases.append(phases)


def ready(state: TrainState, plan: Plan, batch: Batch) -> TrainState:
    devices.apply_plan(plan)
    state.use(plan)
    state.chunk = len(batch)
    return state


def timed(state: TrainState, batch: Batch, burst: int = 1, exact: bool = False) -> tuple[float, dict[str, float]]:
    """Milliseconds of a step, from an empty queue to an empty queue, and of the phases of the last one."""
    exact = exact or devices.has_event_timer(state.device)
    stamps: dict[str, Any] = {}

    def mark(phase: str) -> None:
        if exact:
            stamps[phase] = devices.timestamp(state.device)

    for place in state.model.devices:
        devices.synchronize(place)
    began = time.perf_counter()
    for _ in range(burst):
        mark("start")
        here = state.take(batch)
        mark("copy")
        train_step(state, here, mark)
    for place in state.model.devices:
        devices.synchronize(place)
    ms = 1e3 * (time.perf_counter() - began) / burst
    names = list(stamps)
    spans = zip(names[1:], names, strict=False)
    return ms, {name: devices.elapsed_ms(stamps[before], stamps[name]) for name, before in spans}


def some_batch(config: TrainConfig, size: int, tokens: int) -> Batch:
    """Random images and captions of a given length: a step takes no less time for learning nothing."""
    rng, side = torch.Generator().manual_seed(0), config.model.vision.image_size
    tokens_BL = torch.randint(3, config.model.text.vocab_size, (size, tokens), generator=rng)
    tokens_BL[:, 0], tokens_BL[:, -1] = 1, 2
    tokens_BKL = tokens_BL[:, None].repeat(1, config.captions_per_image, 1)
    images_BHWC = torch.randint(0, 256, (size, side, side, 3), generator=rng, dtype=torch.uint8)
    key_B = torch.randint(0, 2**32, (size,), generator=rng)
    return Batch(Images(images_BHWC), Tokens(tokens_BKL), key_B, None, np.arange(size))
