"""The sweep: which operations, models, batches and plans are measured, so that it can be taken up again."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from m1clip import devices, sensors
from m1clip.bench import operations
from m1clip.config import TrainConfig, get_preset
from m1clip.devices import Plan
from m1clip.estimates import Work
from m1clip.files import lock_folder
from m1clip.measurements import Measurements
from m1clip.training import device_plan, memory, timing

Row = dict[str, Any]
FRESH_S = 24 * 3600  # a sweep that was interrupted longer ago is begun anew
FULL = {"nano": (4, 16, 64, 256, 1024), "tiny": (4, 16, 64), "small": (4, 16), "seed": (4,), "base": (4,)}
QUICK = {"nano": (4, 32, 256), "tiny": (8,)}
# Compiling takes half a minute for each model, so it is tried where it is most likely to pay.
COMPILED = {("nano", 256), ("tiny", 16)}
SLOW_GFLOP = 150  # a step with more is tried on each device and placement, not in every variant


@dataclass(frozen=True)
class Settings:
    presets: tuple[str, ...]
    batches: tuple[int, ...]
    """For every preset; none is each preset's own row of the table."""
    devices: tuple[str, ...]
    precisions: tuple[str, ...]
    """Beside fp32; none is those whose products are faster."""
    threads: tuple[int, ...]
    """Beside torch's own; none is one, the fast cores, and all."""
    compile: bool
    tokens: int
    quick: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of products."""
        return (64, 256, 1024, 2048) if self.quick else operations.SIZES

    @property
    def operation_s(self) -> float:
        """For each operation."""
        return 0.2 if self.quick else 1.0

    @property
    def seconds(self) -> float:
        """For each plan of a time_plans."""
        return 1.0 if self.quick else 4.0


@dataclass(frozen=True)
class Group:
    """One time_plans: a model and a batch, by several plans in turn."""

    config: TrainConfig
    tokens: int
    plans: tuple[Plan, ...]

    @property
    def key(self) -> list[Any]:
        return [self.config.preset, self.config.batch_size, self.tokens]


def session(known: Measurements, settings: Settings, kind: str, overwrite: bool) -> str:
    """The name of this sweep, or of the same one that was interrupted."""
    wanted = asdict(settings)
    for row in reversed(known.rows("session", of=kind)):
        same = {key: list(value) if isinstance(value, tuple) else value for key, value in wanted.items()}
        ended = known.rows("ended", session=row["session"])
        if not overwrite and not ended and row["settings"] == same and time.time() - row["time"] < FRESH_S:
            return str(row["session"])
        break
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    known.add("session", session=name, of=kind, settings=wanted)
    return name


@contextmanager
def alone(known: Measurements) -> Iterator[None]:
    """No other sweep on this machine meanwhile: each would time the other."""
    known.folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(known.folder) as ours:
        if not ours:
            raise RuntimeError("another bench is measuring on this machine; wait for it, or stop it")
        yield


def groups(settings: Settings, gains: dict[str, list[str]]) -> list[Group]:
    """Smallest work first, so that a sweep that is stopped has covered something."""
    table = QUICK if settings.quick else FULL
    made = []
    for name in settings.presets or tuple(table):
        config = get_preset(name)
        tokens = min(settings.tokens or config.model.text.context_length, config.model.text.context_length)
        for batch in settings.batches or table.get(name, (4, config.batch_size)):
            given = replace(config, batch_size=batch)
            made.append(Group(given, tokens, tuple(plans(given, settings, gains))))
    return made


def plans(config: TrainConfig, settings: Settings, gains: dict[str, list[str]]) -> Iterable[Plan]:
    """The plain plan of each device, and what differs from it in one thing."""
    here = [name for name in settings.devices if "=" not in name]
    split = [Plan(name) for name in settings.devices if "=" in name]
    yield from (Plan(name) for name in here)
    yield from split or (device_plan.splits(here) if here else [])
    if "cpu" in here:
        yield from (Plan("cpu", threads=number) for number in settings.threads)
    for name in here:
        yield from (Plan(name, precision) for precision in gains[name])
        tried = settings.compile or (not settings.quick and (config.preset, config.batch_size) in COMPILED)
        if tried and devices.can_compile(devices.torch_device(name))[0]:
            yield Plan(name, compile=True)


def thread_numbers() -> tuple[int, ...]:
    """Worth trying beside torch's own: one, the fast cores, all."""
    machine = sensors.machine()
    numbers = {1, sensors.fast_cores() or 1, machine["cores"], machine["threads"]} - {devices.DEFAULT_THREADS}
    return tuple(sorted(numbers))


def run_operations(
    known: Measurements,
    name: str,
    settings: Settings,
    gains: dict[str, list[str]],
    step: Callable[[str], None],
) -> None:
    done = {(row["operation"], row["size"], row["device"], row["precision"]) for row in of(known, name, "operation")}
    for one in operations.operations(settings.sizes):
        for device, faster in gains.items():
            for precision in ("fp32", *faster):
                step(f"{one.name} {one.size} on {device}")
                wanted = precision == "fp32" or one.name != "AdamW"  # which is fp32 whatever the products are
                if wanted and (one.name, one.size, device, precision) not in done:
                    try:
                        found = operations.measure(one, device, precision, settings.operation_s)
                        known.add("operation", session=name, **found)
                    except devices.DEVICE_ERRORS as error:
                        what = {"operation": one.name, "size": one.size, "device": device}
                        known.add("refused", session=name, **what, reason=devices.short_error(error))


def operation_count(settings: Settings, gains: dict[str, list[str]]) -> int:
    return len(operations.operations(settings.sizes)) * sum(1 + len(some) for some in gains.values())


def run_steps(
    known: Measurements, name: str, groups: Sequence[Group], seconds: float, step: Callable[[str], None]
) -> None:
    done = [row["group"] for row in of(known, name, "time_plans")]
    for group in groups:
        config = group.config
        step(f"{config.preset}, batch {config.batch_size}")
        if group.key in done:
            continue
        work = device_plan.work_of(config, config.batch_size, group.tokens, known)
        reason = too_large(group, work)
        if reason:
            known.add("skipped", session=name, preset=config.preset, batch=config.batch_size, reason=reason)
        else:
            tried = [plan for plan in group.plans if work.step_gflop < SLOW_GFLOP or plan.threads == 0]
            batch = timing.some_batch(config, config.batch_size, group.tokens)
            timings = timing.time_plans(config, tried, batch, seconds)
            device_plan.keep_contest(known, config, work, group.tokens, timings, session=name)
        known.add("time_plans", session=name, group=group.key)


def too_large(group: Group, work: Work) -> str | None:
    """Why a time_plans is not tried: more memory than is free, by what such a step is known to take."""
    placements = len({plan.device for plan in group.plans})  # each has a state of its own
    need = placements * work.state_gb + memory.PEAK * work.activation_gb * work.batch
    free = sensors.available_gb()
    if need <= memory.SHARE * free:
        return None
    return f"it needs about {need:.1f} GB, and {free:.1f} GB are free"


def of(known: Measurements, session: str, kind: str) -> list[Row]:
    return known.rows(kind, session=session)


def peaks(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """GFLOP/s of the best product of matrices, by device and precision: what utilization is a part of."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["operation"] == "product":
            key = row["device"], row["precision"]
            best[key] = max(best.get(key, 0.0), row["best_gflops"])
    return best


def utilization(row: Row, best: dict[tuple[str, str], float]) -> float | None:
    """The model's own FLOPs of a step against what the device could do; None for two different devices."""
    names = set(devices.tower_devices(row["device"]))
    peak = best.get((names.pop(), row["precision"])) if len(names) == 1 else None
    return None if peak is None else row["gflop"] * row["batch"] / (row["step_ms"] / 1e3) / peak
