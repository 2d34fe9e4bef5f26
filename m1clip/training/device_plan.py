"""The device plan of a run: requested, resumed or measured, with its reason. Check it against the CPU."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from m1clip import devices, losses, parity, sensors
from m1clip.config import TrainConfig
from m1clip.console import Console
from m1clip.data.batches import Batch, ImageFeatures, TextFeatures
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.parity import Parity, Recording
from m1clip.training import memory, timing
from m1clip.training.advice import advise
from m1clip.training.step import TrainState, embed_images, embed_texts, train_step
from m1clip.training.timing import MeasurementStore, StepCost, StepRow, open_store

SKIP_PARITY = "M1CLIP_SKIP_PARITY"
PLAN_TRIAL_S = 1.0  # per plan, if nothing was measured before
PARITY_PAIRS, PARITY_EMBEDDED = 4, 256  # compared module by module, and by their embeddings alone
LARGE_MODEL = 50_000_000  # parameters; larger models are compared on fewer pairs
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


def move_to_encoding_device(config: TrainConfig, model: CLIP, batch: Batch, console: Console) -> None:
    """Move the model to the device on which its frozen towers encode features."""
    memory.retain_freed_memory()
    choice = check_parity(default_plan(config), model, batch.split(2 * PARITY_PAIRS)[0], console, config)
    model.to_devices(*choice.plan.devices)


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
        cost = timing.step_cost(config, len(batch), tokens, store)
    if is_undecided:
        rows = measure_missing(config, batch, cost, store, console)
    if store.write_error:
        console.warn(f"measurements cannot be stored: {store.write_error}")
    advice = advise(cost, rows, available, requested, steps)
    return PlanChoice(advice.plan, advice.reason)


def measure_missing(
    config: TrainConfig, batch: Batch, cost: StepCost, store: MeasurementStore, console: Console
) -> list[StepRow]:
    """All step rows; if a device has none of this model, a few real steps are timed on all devices first."""
    available, rows = devices.available(), store.steps()
    if {row.device for row in rows if row.model_id == cost.model_id}.issuperset(available):
        return rows
    plans = [Plan(name) for name in available] + split_plans(available)
    plans += [Plan(name, precision) for name in available for precision in faster_precisions(name)]
    for size in trial_batch_sizes(cost, len(available) + len(split_plans(available))):
        with console.progress(f"timing {size} pairs on {', '.join(available)}", None):
            timings = timing.time_plans(config, plans, batch.split(size)[0], PLAN_TRIAL_S)
        for failed in (one for one in timings if one.error):
            console.warn(f"{failed.plan}: {failed.error}; not used")
        timing.add_comparison(store, replace(cost, batch_size=size), timings)
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


def check_parity(
    choice: PlanChoice, model: CLIP, batch: Batch, console: Console, config: TrainConfig | None = None
) -> PlanChoice:
    """The same choice if its devices compute what the CPU does, else the CPU."""
    plan = choice.plan
    if os.environ.get(SKIP_PARITY) == "1" or set(devices.tower_devices(plan.device)) == {"cpu"}:
        return choice
    with console.progress(f"comparing {plan.device} with the CPU", None):
        result = compare_with_cpu(model, batch, plan, config)
    if not result.mismatch:
        return replace(choice, parity=str(result))
    reason = f"{plan.device} is not used, because {result}"
    console.warn(f"{reason}. The CPU is used instead. {SKIP_PARITY}=1 skips this check")
    return PlanChoice(Plan("cpu", threads=plan.threads), reason, str(result))


def compare_with_cpu(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig | None = None) -> Parity:
    """Compare modules, gradients, embeddings and, with a config, a training step. Weights do not change."""
    divisor = 1 if sum(weight.numel() for weight in model.parameters()) < LARGE_MODEL else 2
    few, many = batch.split(PARITY_PAIRS // divisor)[0], batch.split(PARITY_EMBEDDED // divisor**3)[0]

    def run(plan: Plan) -> Recording:
        def embed(pairs: Batch) -> list[Tensor]:
            on_device = pairs.to(*plan.devices)
            return [each(model, on_device, plan.precision, with_dropout=False) for each in (embed_images, embed_texts)]

        def contrastive_loss() -> Tensor:
            image_BE, text_BKE = embed(few)
            return losses.LOSSES[model.config.loss](model.logits(image_BE, text_BKE[:, 0].to(image_BE.device)))

        model.to_devices(*plan.devices)
        recording = parity.record(model, contrastive_loss)
        if config:
            recording |= record_step(model, few, plan, config)
        with torch.no_grad():  # the shapes of training: some faults only show with many rows
            for kind, embeddings in zip(("images", "captions"), embed(many), strict=True):
                recording[f"the embedding of {len(many)} {kind}"] = embeddings.cpu()
        return recording

    return parity.compare(run, replace(plan, compile=False))


def record_step(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig) -> Recording:
    """Loss and gradients of a real training step, with its dropout, threads and loss scaling."""
    weights = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    state = TrainState(model, replace(config, ema=0.0), plan)
    state.set_lr(0.0)
    recording = {"the loss of a training step": train_step(state, state.to_device(batch))[0][0].detach().cpu()}
    for name, weight in state.weights.items():
        if weight.grad is not None:
            recording[f"{parity.PARAMETER}{name} in a training step"] = weight.grad.cpu().clone()
    state.zero_grad()
    with torch.no_grad():
        for name, weight in state.weights.items():
            weight.copy_(weights[name])
    return recording


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
