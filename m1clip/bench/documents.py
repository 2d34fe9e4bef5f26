"""The documents' own rules for choosing a device, as they wrote them, and what measuring says of them."""

from dataclasses import dataclass

from m1clip.advisor import Advice
from m1clip.config import ModelConfig, VisionConfig
from m1clip.estimates import Work


@dataclass(frozen=True)
class Verdict:
    answer: str
    """cpu, a device that is here, or "a GPU"."""
    why: str
    verdict: str
    lost: float | None = None
    """How many times as slow as the fastest; None where that was not measured."""


def should_use_mps(model_size: int, batch_size: int, operation_size: int) -> tuple[bool, str]:
    """And which line decides. operation_size is not defined there: here, elements of the largest product."""
    if model_size < 100_000_000:
        return False, f"{model_size / 1e6:.1f} M parameters are fewer than 100 M"
    if batch_size < 32:
        return False, f"batch {batch_size} is smaller than 32"
    if operation_size < 1024 * 1024:
        return False, f"its largest product has {operation_size:,} elements, fewer than 1,048,576"
    return True, "100 M parameters, 32 pairs and a million elements are reached"


def predicted_speedup(model_params: int) -> float:
    """GPU against CPU, by the count of parameters alone."""
    for most, ratio in ((50e6, 0.1), (100e6, 0.3), (200e6, 0.8), (500e6, 1.5)):
        if model_params < most:
            return ratio
    return 3.0


def judge(model: ModelConfig, work: Work, tokens: int, measured: Advice, here: list[str]) -> Verdict:
    """The rule's answer to a question that was also answered by measuring."""
    assert isinstance(model.vision, VisionConfig)
    towers = ((model.vision.tokens, model.vision.width), (tokens, model.text.width))
    largest = max(length * 4 * width for length, width in towers) * work.batch
    gpu, why = should_use_mps(work.parameters, work.batch, largest)
    gpus = [name for name in here if name != "cpu"]
    if not gpus:
        told = "not to be followed" if gpu else "right, for want of another"
        return Verdict("a GPU" if gpu else "cpu", why, f"{told}: there is no GPU here")
    answer = gpus[-1] if gpu else "cpu"
    times = {name: one.ms for name, one in measured.by_device.items()}
    if answer not in times or len(times) < 2:
        return Verdict(answer, why, "not to be judged: the devices were not all measured")
    lost = times[answer] / min(times.values())
    if lost == 1:
        return Verdict(answer, why, "right", lost)
    sure = all(one.confidence != "low" for one in measured.by_device.values())
    doubt = "" if sure else ", by an uncertain estimate"
    return Verdict(answer, why, f"WRONG: {lost:.2f} times as slow{doubt}", lost)
