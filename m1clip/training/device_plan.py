"""The device plan of a run: requested, resumed or measured, with its reason. Check it against the CPU."""

import os
from dataclasses import dataclass, replace
from typing import Any

from m1clip import devices
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, ImageFeatures, TextFeatures
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.training.advice import StepCost, advise, open_store
from m1clip.training.step import TrainState, embed_images, embed_texts

SKIP_PARITY = "M1CLIP_SKIP_PARITY"
SAME_AS_BEFORE = "as in the resumed run"


@dataclass(frozen=True)
class PlanChoice:
    plan: Plan
    reason: str
    parity: str | None = None  # the result of the comparison with the CPU


def choose_plan(
    config: TrainConfig, model: CLIP, batch: Batch, steps: int, resumed_plan: Plan | None, console: Console
) -> PlanChoice:
    is_features = isinstance(batch.image, ImageFeatures) and isinstance(batch.text, TextFeatures)
    if is_features and not resumed_plan:
        plan = Plan(str(model.devices[0]), threads=config.threads)
        return PlanChoice(plan, "the device that encoded the features")
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
    flags = {key: getattr(config, key) for key in changes}
    reason += "".join(f", --{key} {value}" for key, value in flags.items() if value != "auto")
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
    from m1clip.training.parity import compare_with_cpu

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
        reason = devices.short_error(error)
    finally:
        state.zero_grad()
    console.warn(f"not compiled: {reason}")
    plan = replace(choice.plan, compile=False)
    state.use_plan(plan)
    return replace(choice, plan=plan, reason=f"{choice.reason}; not compiled: {reason}")
