"""Known training problems, recognized from a run's own records. Pure functions: records in, findings out."""

import math
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

Record = dict[str, Any]
WINDOW = 50
MAX_STEPS = 40 * WINDOW
TEMPERATURE_RISE = 1.5  # a slightly higher temperature soon falls again, or label smoothing holds it there


@dataclass
class History:
    """Records of this session, oldest first; of the steps, the last few thousand."""

    total: int
    first_temperature: float | None = None
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    diagnostics: list[Record] = field(default_factory=list)

    def add_steps(self, records: list[Record]) -> None:
        self.steps += [record for record in records if not record.get("skipped")]
        if self.first_temperature is None and self.steps:
            self.first_temperature = self.steps[0]["temperature"]
        if len(self.steps) > 2 * MAX_STEPS:
            del self.steps[:MAX_STEPS]


def diagnose(history: History) -> dict[str, str]:
    """Findings by name; none until there are enough records."""
    findings: dict[str, str] = {}
    recent = history.steps[-WINDOW:]
    if len(recent) >= WINDOW // 2 and recent[-1]["step"] >= max(WINDOW, history.total // 10):
        findings |= not_learning(recent) | waiting_for_data(recent)
        findings |= rising_temperature(history.first_temperature, recent)
    findings |= slowing_down(history.steps) | overfitting(history)
    return findings | swapping(history.diagnostics) | zero_gradients(history.diagnostics[-1:])


def not_learning(recent: list[Record]) -> dict[str, str]:
    loss, accuracy = (fmean(record[key] for record in recent) for key in ("loss", "accuracy"))
    chance_loss, chance = recent[-1]["chance_loss"], recent[-1]["chance_accuracy"]
    noise = math.sqrt(chance * (1 - chance) / (2 * len(recent) / chance))  # two guesses per pair, B = 1 / chance
    if accuracy > 1.2 * chance + 3 * noise:
        return {}
    if abs(loss - chance_loss) < 0.02 * chance_loss:
        return {
            "loss at chance": f"the loss has stayed at chance ({loss:.3f}, chance {chance_loss:.3f}) for "
            f"{len(recent)} steps: all pairs have the same similarity. Try a lower --lr (a third), a longer "
            "--warmup, and check that captions match their images"
        }
    return {
        "accuracy at chance": f"in-batch accuracy is {accuracy:.2%}, chance is {chance:.2%}: "
        "the model cannot match pairs yet"
    }


def rising_temperature(first: float | None, recent: list[Record]) -> dict[str, str]:
    before, now = recent[0]["temperature"], recent[-1]["temperature"]
    if first is None or now <= TEMPERATURE_RISE * first or now <= before:
        return {}
    return {
        "temperature rising": f"the temperature has risen from {first:.4f} to {now:.4f}; it normally falls. "
        "The pairs are not separable yet: captions are too similar, or the learning rate is too high"
    }


def waiting_for_data(recent: list[Record]) -> dict[str, str]:
    timed = [record for record in recent if record["data_ms"] is not None]
    fraction = sum(record["data_ms"] for record in timed) / max(1e-9, sum(record["step_ms"] for record in timed))
    if fraction <= 0.1:
        return {}
    return {
        "waiting for data": f"{fraction:.0%} of the step time is spent waiting for the next batch: "
        "loading is slower than training; more --workers or a larger --cache-gb may help"
    }


def slowing_down(steps: list[Record]) -> dict[str, str]:
    """Compare with the fastest earlier window of the same image size and chunk."""
    same = [record for record in steps if all(record[key] == steps[-1][key] for key in ("image_size", "chunk"))]
    times = [record["step_ms"] - (record["data_ms"] or 0) for record in same]
    if len(times) < 3 * WINDOW:
        return {}
    now = median(times[-WINDOW:])
    best = min(median(times[i : i + WINDOW]) for i in range(WINDOW // 2, len(times) - WINDOW, WINDOW // 2))
    if now < 1.3 * best:
        return {}
    return {
        "throttling": f"steps became {now / best:.1f} times slower ({best:.0f} ms at best, now {now:.0f} ms): "
        "the machine is hot, saving power or busy with other programs"
    }


def overfitting(history: History) -> dict[str, str]:
    if len(history.evals) < 3 or len(history.epochs) < 2:
        return {}
    best, now = max(record["mean_r1"] for record in history.evals[:-1]), history.evals[-1]["mean_r1"]
    noise = math.sqrt(best * (1 - best) / (2 * history.evals[-1]["images"]))
    rising = history.epochs[-1]["accuracy"] > history.epochs[-2]["accuracy"]
    falling = now < best - 2 * noise and now <= history.evals[-2]["mean_r1"]
    if not (rising and falling):
        return {}
    return {
        "overfitting": f"training accuracy still rises while validation R@1 has fallen from "
        f"{best:.1%} to {now:.1%}: more data, --crop-scale, --patch-dropout or --patience would help"
    }


def swapping(records: list[Record]) -> dict[str, str]:
    if len(records) < 2:
        return {}
    written = records[-1]["swapped_out_gb"] - records[-2]["swapped_out_gb"]
    growth = records[-1]["swap_used_gb"] - records[0]["swap_used_gb"]
    if written < 0.2 and growth < 0.5:
        return {}
    return {
        "swapping": f"the machine is swapping ({max(written, growth):.1f} GB written, "
        f"{records[-1]['swap_used_gb']:.1f} GB in use): steps will be slow; a smaller --chunk helps"
    }


def zero_gradients(last: list[Record]) -> dict[str, str]:
    if not last:
        return {}
    norms = last[0]["grad_norms"]
    largest = max(norms.values())
    zero = [name for name, norm in norms.items() if norm < 1e-6 * largest]
    if not zero or not math.isfinite(largest):
        return {}
    return {"dead gradients": f"no gradient reaches {', '.join(zero)}: these weights do not train"}
