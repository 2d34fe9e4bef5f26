"""Where a run is trained and how: as asked, as before, or by what is measured; trusted once it is checked."""

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

from m1clip import advisor, devices, measurements, sensors
from m1clip.advisor import RequestedPlan
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, BatchStream
from m1clip.devices import Plan
from m1clip.estimates import Work, identity
from m1clip.measurements import Measurements
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost
from m1clip.training import memory, parity, timing
from m1clip.training.state import TrainState
from m1clip.training.step import embed_captions, embed_images
from m1clip.training.timing import Timing

SKIP_PARITY = os.environ.get("M1CLIP_SKIP_PARITY") == "1"
TRIED = 8  # pairs by which a device is compared with the CPU before it encodes
MOMENT_S = 1.0
"""Given to each plan where nothing was measured before."""


@dataclass(frozen=True)
class PlanChoice:
    plan: Plan
    why: str
    parity: str | None = None

    def record(self) -> dict[str, Any]:
        return {"device": self.plan.device, "why": self.why, "plan": asdict(self.plan), "parity": self.parity}


def settle(
    config: TrainConfig, model: CLIP, batch: Batch, steps: int, before: Plan | None, console: Console
) -> PlanChoice:
    """The plan of a run. The model ends where it says."""
    if batch.images_BHWC.ndim == 2 and batch.tokens_BL.is_floating_point() and before is None:
        before = Plan(str(model.devices[0]), threads=config.threads)
        return PlanChoice(before, "the heads learn where their features were encoded")
    choice = keep(before, config) if before else decide(config, batch, steps, console)
    return choice if SKIP_PARITY else trusted(choice, model, batch, console, config)


def for_encoding(config: TrainConfig, model: CLIP, batches: BatchStream, console: Console) -> None:
    """Put the model where its locked towers will encode."""
    memory.retain_freed_memory()
    asked = devices.default_device("auto")[0].type if config.device == "auto" else config.device
    choice = PlanChoice(Plan(asked), "")
    if not SKIP_PARITY:
        choice = trusted(choice, model, batches.at(0).split(TRIED)[0], console, config)
    model.to_devices(*choice.plan.devices)


def trusted(
    choice: PlanChoice, model: CLIP, batch: Batch, console: Console, config: TrainConfig | None = None
) -> PlanChoice:
    """The same, if its devices compute what the CPU does; or else the CPU."""
    plan = choice.plan
    if set(devices.tower_devices(plan.device)) == {"cpu"}:
        return choice
    with console.progress(f"comparing {plan.device} with the CPU", None):
        found = parity.check(model, batch, plan, config)
    if found:
        return replace(choice, parity=str(found))
    told = f"{plan.device} is not trusted: {found}"
    console.warn(f"{told}. The CPU is used instead")
    return PlanChoice(Plan("cpu", threads=plan.threads), f"{told}; the CPU instead", str(found))


def compiled(choice: PlanChoice, state: TrainState, batch: Batch, console: Console) -> PlanChoice:
    """Have the blocks compiled and tried on one chunk, if that is the plan; go on without, if that fails."""
    if not choice.plan.compile:
        return choice
    able, why = devices.can_compile(state.device)
    try:
        if able:
            state.use(choice.plan)
            with console.progress("compiling the blocks", None):
                some = state.take(batch.split(state.chunk)[0])
                for embed in (embed_images, embed_captions):
                    embed(state, some).sum().backward()  # type: ignore[no-untyped-call]
    except devices.DEVICE_ERRORS as error:
        able, why = False, devices.short_error(error)
    state.zero_grad()
    if able:
        return choice
    console.warn(f"not compiled: {why}")
    plan = replace(choice.plan, compile=False)
    state.use(plan)
    return replace(choice, plan=plan, why=f"{choice.why}; not compiled: {why}")


def requested_plan(config: TrainConfig) -> RequestedPlan:
    asked = None if config.device == "auto" else config.device
    if asked is not None:
        devices.tower_devices(asked)
    return RequestedPlan(
        asked,
        None if config.precision == "auto" else config.precision,
        None if config.compile == "auto" else config.compile == "on",
        config.threads or None,
    )


AS_BEFORE = "as it was before"


def keep(before: Plan, config: TrainConfig) -> PlanChoice:
    """A resumed run goes on as it did, unless flags say otherwise or the machine has changed."""
    asked = {key: value for key, value in vars(requested_plan(config)).items() if value is not None}
    told = AS_BEFORE
    if "device" not in asked:
        try:
            devices.tower_devices(before.device)
        except ValueError as error:
            told = f"it was on {before.device}, but {error}"
            asked["device"] = devices.default_device("auto")[0].type
    if asked.get("device", before.device) != before.device:  # what suited the old one need not suit this
        before = Plan(before.device)
    changed = {key: value for key, value in asked.items() if getattr(before, key) != value}
    told += "".join(f", --{key} {value}" for key, value in changed.items())
    return PlanChoice(replace(before, **changed), told)


def decide(config: TrainConfig, batch: Batch, steps: int, console: Console) -> PlanChoice:
    here, requested = devices.available(), requested_plan(config)
    known = measurements.here()
    rows = known.rows("step")
    undecided = requested.device is None and len(here) > 1
    if not rows and not undecided:  # nothing to choose by, and nothing worth a wait
        return PlanChoice(plain(requested), advisor.advise(nothing(config), [], here, requested).why())
    work = work_of(config, len(batch), batch.tokens_BL.shape[-1], known)
    if undecided and not measured(rows, here, work):
        rows = try_now(config, batch, work, known, here, console)
    if known.unkept:  # a full disk is no reason not to train
        console.warn(f"what is measured cannot be kept ({known.unkept})")
    advice = advisor.advise(work, rows, here, requested, steps)
    return PlanChoice(advice.plan, advice.why())


def plain(requested: RequestedPlan) -> Plan:
    return Plan(
        requested.device or "cpu",
        requested.precision or "fp32",
        bool(requested.compile),
        requested.threads or 0,
    )


def nothing(config: TrainConfig) -> Work:
    return Work(identity(config), config.preset, 0, 1.0, config.batch_size)


def measured(rows: Sequence[dict[str, Any]], here: Sequence[str], work: Work) -> bool:
    """Whether something is known of this very model on each device."""
    known = {row["device"] for row in rows if row["model"] == work.model}
    return known.issuperset(here)


def work_of(config: TrainConfig, batch: int, tokens: int, known: Measurements) -> Work:
    """What a step costs; counted once for each model, as that takes a second or more."""
    model = identity(config)
    for row in known.rows("cost", model=model, tokens=tokens):
        return Work(model, config.preset, row["parameters"], row["gflop"], batch, row["activation_gb"])
    made = model_cost(config.model, tokens=tokens, captions=config.captions_per_image)
    kept_gb = made.activation_mb / 1e3
    counted = {"parameters": made.total, "gflop": made.step_gflop, "activation_gb": kept_gb}
    known.add("cost", model=model, tokens=tokens, **counted)
    return Work(model, config.preset, made.total, made.step_gflop, batch, kept_gb)


def try_now(
    config: TrainConfig, batch: Batch, work: Work, known: Measurements, here: Sequence[str], console: Console
) -> list[dict[str, Any]]:
    """A few seconds of real steps on every device and placement; remembered for the next time."""
    plans = [Plan(name) for name in here] + splits(here)
    plans += [Plan(name, precision) for name in here for precision in paying(name)]
    for size in affordable(work):
        with console.progress(f"trying {size} pairs at a time on {', '.join(here)}", None):
            timings = timing.time_plans(config, plans, batch.split(size)[0], MOMENT_S)
        for one in timings:
            if one.failed:
                console.warn(f"{one.plan}: {one.failed}; left out")
        keep_contest(known, config, replace(work, batch=size), batch.tokens_BL.shape[-1], timings)
    return known.rows("step")


def affordable(work: Work) -> list[int]:
    """The batch, if the CPU takes no more than a moment for it; or two smaller ones to extrapolate from."""
    here = devices.available()
    second = devices.matmul_gflops(devices.torch_device("cpu"), "fp32") * 0.4 / work.gflop  # pairs, roughly
    states = len(here) + len(splits(here))
    free = sensors.available_gb() * memory.SHARE - states * work.state_gb
    most = int(min(MOMENT_S * second, free / (memory.PEAK * work.activation_gb)))
    if most >= work.batch:
        return [work.batch]
    return sorted({size for size in (max(2, most // 4), most) if 2 <= size <= most})


def splits(here: Sequence[str]) -> list[Plan]:
    """The towers on two devices, each way; on one machine with a CPU alone, side by side on it."""
    pairs = list(permutations(here, 2)) or [(here[0], here[0])]
    return [Plan(f"vision={a},text={b}") for a, b in pairs]


def paying(name: str) -> list[str]:
    """Precisions below fp32 whose products are faster there; the others would only cost time."""
    device = devices.torch_device(name)
    full, found = devices.matmul_gflops(device, "fp32"), []
    for one in devices.precisions(device)[1:]:
        with suppress(*devices.DEVICE_ERRORS):
            if devices.matmul_gflops(device, one) > 1.05 * full:
                found.append(one)
    return found


def keep_contest(
    known: Measurements, config: TrainConfig, work: Work, tokens: int, timings: Sequence[Timing], **more: Any
) -> None:
    time_plans = uuid.uuid4().hex[:12]
    shared = {
        "time_plans": time_plans,
        "model": work.model,
        "preset": config.preset,
        "batch": work.batch,
        "tokens": tokens,
    }
    shared |= {
        "parameters": work.parameters,
        "gflop": work.gflop,
        "activation_gb": work.activation_gb,
        "optimizer": config.optimizer,
        **more,
    }
    for one in timings:
        if one.failed:
            known.add("skipped", **shared, **asdict(one.plan), reason=one.failed)
        else:
            record = one.record()
            speed = 1e3 * work.batch / record["step_ms"]
            per_joule = None if record["watts"] is None else round(speed / record["watts"], 3)
            known.add("step", **shared, **record, pairs_per_s=round(speed, 3), pairs_per_joule=per_joule)
