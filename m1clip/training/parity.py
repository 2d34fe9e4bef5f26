"""Does a device compute what the CPU does? Forward, loss and gradients of the actual model on real pairs.

CLIP's embeddings have been silently wrong on MPS (pixeltable#1314), so no other device is trusted unseen.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from m1clip import devices, losses
from m1clip.config import TrainConfig
from m1clip.data.batches import Batch, Images, TextFeatures, Tokens, map_input
from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.devices import Plan
from m1clip.images import center_crop
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.training.state import TrainState
from m1clip.training.step import of_captions, of_images, train_step

# How far apart two tensors may be, as a part of the length of the CPU's: forward and loss, gradients.
# Rounding alone makes about 1e-6 in fp32; TF32, which CUDA uses in convolutions, 1e-3.
TOLERANCE = {"fp32": (2e-3, 1e-2), "fp16": (1e-2, 5e-2), "bf16": (5e-2, 2e-1)}
SMALL = 1e-6  # gradients below this part of the largest are rounding errors on either side
PAIRS, MANY, LARGE = 4, 256, 50_000_000
"""PairDataset compared module by module, and embedded only; with more parameters than this, fewer of both."""


Seen = dict[tuple[str, str], Tensor]


@dataclass(frozen=True)
class Parity:
    plan: Plan
    worst: float
    """Largest difference met, as a part of the tolerance: 1 is just tolerable."""
    compared: int
    fault: str | None = None
    """What differs first, and by how much; None where nothing does."""

    def __bool__(self) -> bool:
        return self.fault is None

    def __str__(self) -> str:
        if self.fault:
            return self.fault
        forward, gradients = TOLERANCE[self.plan.precision]
        return (
            f"forward, loss and gradients agree with the CPU's ({self.compared} tensors of a few pairs; the "
            f"largest difference is {self.worst:.2g} of what is tolerated: {forward:g} forward, "
            f"{gradients:g} in gradients)"
        )


def check(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig | None = None) -> Parity:
    """Compare a plan with the CPU: module by module, and by the training step itself where there is a config.

    The model ends where the plan puts it, with the weights it had and without gradients.
    """
    few = batch.split(PAIRS if sum(w.numel() for w in model.parameters()) < LARGE else PAIRS // 2)[0]
    plan = replace(plan, compile=False)
    many = batch.split(MANY if len(few) == PAIRS else MANY // 8)[0]
    expected = everything(model, few, many, Plan(), config)
    try:
        found = everything(model, few, many, plan, config)
    except devices.DEVICE_ERRORS as error:  # such as an operation that the device does not have
        return Parity(plan, float("inf"), 0, f"it failed: {devices.short_error(error)}")
    return compare(expected, found, plan)


def everything(model: CLIP, few: Batch, many: Batch, plan: Plan, config: TrainConfig | None) -> Seen:
    seen = run(model, few, plan)
    if config:
        seen |= whole_step(model, few, plan, config)
    vision, text = plan.devices
    here = many.to(vision, text)
    with torch.no_grad():  # shapes as in a run: some faults show only beyond a few rows
        with devices.autocast(vision, plan.precision):
            image_BE = of_images(model, here.image)
        with devices.autocast(text, plan.precision):
            text_BE = of_captions(model, here.text)
    seen[f"what {len(many)} images are embedded as", "of"] = image_BE.float().cpu()
    seen[f"what {len(many)} captions are embedded as", "of"] = text_BE.float().cpu()
    return seen


def whole_step(model: CLIP, batch: Batch, plan: Plan, config: TrainConfig) -> Seen:
    """The step as it will be taken: with its noise, its threads, its scale of the loss, nothing looked at."""
    weights = {name: weight.detach().cpu().clone() for name, weight in model.named_parameters()}
    state = TrainState(model, replace(config, ema=0.0), plan)
    state.set_rate(0.0)
    stats = train_step(state, state.take(batch))[0]
    seen = {("the loss of a whole step", "of"): stats[0].detach().cpu()}
    seen |= {
        (f"{name}, in a whole step", "gradient of"): weight.grad.cpu().clone()
        for name, weight in state.weights.items()
        if weight.grad is not None
    }
    state.zero_grad()
    with torch.no_grad():
        for name, weight in state.weights.items():
            weight.copy_(weights[name])
    return seen


def on_scenes(config: TrainConfig, plan: Plan) -> Parity:
    """Of a model as it is before training, on drawn scenes."""
    scenes, words = SyntheticScenes(2 * PAIRS), Tokenizer.characters()
    text, size = config.model.text, config.model.vision.image_size
    pixels = np.stack([center_crop(scenes.image(i), size) for i in range(len(scenes))])
    said = [scenes.captions(i)[0] for i in range(len(scenes))]
    rows = np.arange(len(scenes))
    tokens_BKL = words(said, text.context_length)[:, None]
    batch = Batch(Images(torch.from_numpy(pixels)), Tokens(tokens_BKL), torch.from_numpy(rows), None, rows)
    torch.manual_seed(0)
    vocab = replace(text, vocab_size=max(text.vocab_size, len(words)))
    return check(CLIP(replace(config.model, text=vocab), words), batch, plan, config)


def first_of(text: Tokens | TextFeatures) -> Tokens | TextFeatures:
    """One caption an image."""
    return map_input(lambda tensor: tensor[:, :1], text)


def run(model: CLIP, batch: Batch, plan: Plan) -> Seen:
    """What passes through every module, both ways, in the order of its making, on the CPU."""
    model.to_devices(*plan.devices)
    model.zero_grad()
    here = batch.to(*plan.devices)
    with watched(model) as seen:
        vision, text = plan.devices
        with devices.autocast(vision, plan.precision):
            image_BE = of_images(model, here.image).float()
        with devices.autocast(text, plan.precision):
            text_BE = of_captions(model, first_of(here.text))[:, 0].float()
        loss = losses.LOSSES[model.config.loss](model.logits(image_BE, text_BE.to(vision)))
        seen["the loss", "of"] = loss.detach().cpu()
        loss.backward()  # type: ignore[no-untyped-call]
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            seen[name, "gradient of"] = weight.grad.cpu()
    model.zero_grad()
    return seen


@contextmanager
def watched(model: CLIP) -> Iterator[Seen]:
    """Every module without parts tells what comes in and what goes out, forward and backward."""
    seen: Seen = {}

    def tell(name: str, what: str, value: Any) -> None:
        tensor = value[0] if isinstance(value, tuple) else value
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen[name, what] = tensor.detach().float().cpu()

    hooks = []
    for name, module in model.named_modules():
        if any(True for _ in module.children()) or isinstance(module, CLIP | nn.ModuleList):
            continue
        hooks += [
            module.register_forward_pre_hook(lambda m, x, name=name: tell(name, "into", x)),
            module.register_forward_hook(lambda m, x, y, name=name: tell(name, "out of", y)),
            module.register_full_backward_pre_hook(lambda m, g, name=name: tell(name, "gradient into", g)),
            module.register_full_backward_hook(lambda m, gx, gy, name=name: tell(name, "gradient out of", gx)),
        ]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the first layers have no input that wants a gradient
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def compare(expected: Seen, found: Seen, plan: Plan) -> Parity:
    """The first difference that is not tolerated names the module; what comes wrong into one, its parent."""
    worst, fault = 0.0, None
    longest = max(float(value.norm()) for (_, what), value in expected.items() if what == "gradient of")
    for (name, what), truth in expected.items():
        backward = "gradient" in what
        tolerated = TOLERANCE[plan.precision][int(backward)]
        length = max(float(truth.norm()), longest * SMALL if backward else 0.0, 1e-12)
        value = found.get((name, what))
        apart = float("inf") if value is None else float((value - truth).norm()) / length
        apart = apart if apart == apart else float("inf")
        worst = max(worst, apart / tolerated)
        if apart > tolerated and fault is None:
            fault = describe(name, what, apart, tolerated)
    return Parity(plan, worst, len(expected), fault)


def describe(name: str, what: str, apart: float, tolerated: float) -> str:
    parent = name.rpartition(".")[0]
    told = {
        "into": f"what {parent or 'the model'} hands to {name}",
        "out of": f"the output of {name}",
        "gradient into": f"the gradient that {parent or 'the model'} hands back to {name}",
        "gradient out of": f"the gradient that comes back through {name}",
        "gradient of": f"the gradient of {name}",
        "of": name,
    }[what]
    return f"{told} differs from the CPU's by {apart:.2g} of its length ({tolerated:g} is tolerated)"
