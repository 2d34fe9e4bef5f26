"""Where a run is trained and how: as asked, as before, or by what is measured; trusted once it is checked."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from typing import Any

from m1clip import advisor, devices, measurements, sensors
from m1clip.advisor import Wishes
from m1clip.config import TrainConfig
from m1clip.console import Screen
from m1clip.data.batches import Batch, Batches
from m1clip.devices import Plan
from m1clip.estimates import Work, identity
from m1clip.measurements import Measurements
from m1clip.model.clip import CLIP
from m1clip.model.cost import cost
from m1clip.training import memory, parity, timing
from m1clip.training.state import Learner
from m1clip.training.step import embed_captions, embed_pictures
from m1clip.training.timing import Timing

TRIED = 8  # pairs by which a device is compared with the CPU before it encodes
MOMENT_S = 1.0
"""Given to each plan where nothing was measured before."""


@dataclass(frozen=True)
class Placed:
    plan: Plan
    why: str
    parity: str | None = None

    def record(self) -> dict[str, Any]:
        return {"device": self.plan.device, "why": self.why, "plan": asdict(self.plan), "parity": self.parity}


def settle(
    config: TrainConfig, model: CLIP, batch: Batch, steps: int, before: Plan | None, screen: Screen
) -> Placed:
    """The plan of a run. The model ends where it says."""
    if batch.bytes_BSSC.ndim == 2 and batch.tokens_BL.is_floating_point() and before is None:
        before = Plan(str(model.places[0]), threads=config.threads)
        return Placed(before, "the heads learn where their features were encoded")
    placed = keep(before, config) if before else decide(config, batch, steps, screen)
    return placed if config.trust_device else trusted(placed, model, batch, screen, config)


def for_encoding(config: TrainConfig, model: CLIP, batches: Batches, screen: Screen) -> None:
    """Put the model where its locked towers will encode."""
    memory.keep_memory()
    asked = devices.choose("auto")[0].type if config.device == "auto" else config.device
    placed = Placed(Plan(asked), "")
    if not config.trust_device:
        placed = trusted(placed, model, batches.at(0).split(TRIED)[0], screen, config)
    model.place(*placed.plan.places)


def trusted(
    placed: Placed, model: CLIP, batch: Batch, screen: Screen, config: TrainConfig | None = None
) -> Placed:
    """The same, if its devices compute what the CPU does; or else the CPU."""
    plan = placed.plan
    if set(devices.parts_of(plan.device)) == {"cpu"}:
        return placed
    with screen.working(f"comparing {plan.device} with the CPU", None):
        found = parity.check(model, batch, plan, config)
    if found:
        return replace(placed, parity=str(found))
    told = f"{plan.device} is not trusted: {found}"
    screen.warn(f"{told}. The CPU is used instead")
    return Placed(Plan("cpu", threads=plan.threads), f"{told}; the CPU instead", str(found))


def compiled(placed: Placed, learner: Learner, batch: Batch, screen: Screen) -> Placed:
    """Have the blocks compiled and tried on one chunk, if that is the plan; go on without, if that fails."""
    if not placed.plan.compile:
        return placed
    able, why = devices.can_compile(learner.device)
    try:
        if able:
            learner.use(placed.plan)
            with screen.working("compiling the blocks", None):
                some = learner.take(batch.split(learner.chunk)[0])
                for embed in (embed_pictures, embed_captions):
                    embed(learner, some).sum().backward()  # type: ignore[no-untyped-call]
    except devices.REFUSALS as error:
        able, why = False, devices.refusal(error)
    learner.zero_grad()
    if able:
        return placed
    screen.warn(f"not compiled: {why}")
    plan = replace(placed.plan, compile=False)
    learner.use(plan)
    return replace(placed, plan=plan, why=f"{placed.why}; not compiled: {why}")


def wishes_of(config: TrainConfig) -> Wishes:
    asked = None if config.device == "auto" else config.device
    if asked is not None:
        devices.parts_of(asked)
    return Wishes(
        asked,
        None if config.precision == "auto" else config.precision,
        None if config.compile == "auto" else config.compile == "on",
        config.threads or None,
    )


AS_BEFORE = "as it was before"


def keep(before: Plan, config: TrainConfig) -> Placed:
    """A resumed run goes on as it did, unless flags say otherwise or the machine has changed."""
    asked = {key: value for key, value in vars(wishes_of(config)).items() if value is not None}
    told = AS_BEFORE
    if "device" not in asked:
        try:
            devices.parts_of(before.device)
        except ValueError as error:
            told = f"it was on {before.device}, but {error}"
            asked["device"] = devices.choose("auto")[0].type
    if asked.get("device", before.device) != before.device:  # what suited the old one need not suit this
        before = Plan(before.device)
    changed = {key: value for key, value in asked.items() if getattr(before, key) != value}
    told += "".join(f", --{key} {value}" for key, value in changed.items())
    return Placed(replace(before, **changed), told)


def decide(config: TrainConfig, batch: Batch, steps: int, screen: Screen) -> Placed:
    here, wishes = devices.available(), wishes_of(config)
    known = measurements.here()
    rows = known.rows("step")
    undecided = wishes.device is None and len(here) > 1
    if not rows and not undecided:  # nothing to choose by, and nothing worth a wait
        return Placed(plain(wishes), advisor.advise(nothing(config), [], here, wishes).why())
    work = work_of(config, len(batch), batch.tokens_BL.shape[-1], known)
    if undecided and not measured(rows, here, work):
        rows = try_now(config, batch, work, known, here, screen)
    if known.unkept:  # a full disk is no reason not to train
        screen.warn(f"what is measured cannot be kept ({known.unkept})")
    advice = advisor.advise(work, rows, here, wishes, steps)
    return Placed(advice.plan, advice.why())


def plain(wishes: Wishes) -> Plan:
    return Plan(wishes.device or "cpu", wishes.precision or "fp32", bool(wishes.compile), wishes.threads or 0)


def nothing(config: TrainConfig) -> Work:
    return Work(identity(config), config.preset, 0, 1.0, config.batch)


def measured(rows: Sequence[dict[str, Any]], here: Sequence[str], work: Work) -> bool:
    """Whether something is known of this very model on each device."""
    known = {row["device"] for row in rows if row["model"] == work.model}
    return known.issuperset(here)


def work_of(config: TrainConfig, batch: int, tokens: int, known: Measurements) -> Work:
    """What a step costs; counted once for each model, as that takes a second or more."""
    model = identity(config)
    for row in known.rows("cost", model=model, tokens=tokens):
        return Work(model, config.preset, row["parameters"], row["gflop"], batch, row["activation_gb"])
    made = cost(config.model, tokens=tokens, captions=config.captions)
    kept_gb = made.activation_mb / 1e3
    counted = {"parameters": made.total, "gflop": made.step_gflop, "activation_gb": kept_gb}
    known.add("cost", model=model, tokens=tokens, **counted)
    return Work(model, config.preset, made.total, made.step_gflop, batch, kept_gb)


def try_now(
    config: TrainConfig, batch: Batch, work: Work, known: Measurements, here: Sequence[str], screen: Screen
) -> list[dict[str, Any]]:
    """A few seconds of real steps on every device and placement; remembered for the next time."""
    plans = [Plan(name) for name in here] + splits(here)
    plans += [Plan(name, precision) for name in here for precision in paying(name)]
    for size in affordable(work):
        with screen.working(f"trying {size} pairs at a time on {', '.join(here)}", None):
            timings = timing.contest(config, plans, batch.split(size)[0], MOMENT_S)
        for one in timings:
            if one.failed:
                screen.warn(f"{one.plan}: {one.failed}; left out")
        keep_contest(known, config, replace(work, batch=size), batch.tokens_BL.shape[-1], timings)
    return known.rows("step")


def affordable(work: Work) -> list[int]:
    """The batch, if the CPU takes no more than a moment for it; or two smaller ones to extrapolate from."""
    here = devices.available()
    second = devices.product_gflops(devices.at("cpu"), "fp32") * 0.4 / work.gflop  # pairs, roughly
    learners = len(here) + len(splits(here))
    free = sensors.available_gb() * memory.SHARE - learners * work.state_gb
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
    device = devices.at(name)
    full, found = devices.product_gflops(device, "fp32"), []
    for one in devices.precisions(device)[1:]:
        with suppress(*devices.REFUSALS):
            if devices.product_gflops(device, one) > 1.05 * full:
                found.append(one)
    return found


def keep_contest(
    known: Measurements, config: TrainConfig, work: Work, tokens: int, timings: Sequence[Timing], **more: Any
) -> None:
    contest = uuid.uuid4().hex[:12]
    shared = {
        "contest": contest,
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
