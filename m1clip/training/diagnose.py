"""Known training problems, recognized from a run's own records. Pure functions: records in, findings out."""

import math
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

Record = dict[str, Any]
Findings = dict[str, str]
WINDOW = 50
MAX_STEPS = 40 * WINDOW
MANY_MASKED = 0.5  # fraction of the negatives: two labels of equal size mask a little less
MAX_WITHOUT_NEGATIVE = 0.01  # fraction of the pairs that have no negative
TEMPERATURE_RISE = 1.5  # a slightly higher temperature soon falls again, or label smoothing holds it there


@dataclass
class History:
    """Records of this session, oldest first; of the steps, the last few thousand."""

    total: int
    first_temperature: float = math.nan
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    diagnostics: list[Record] = field(default_factory=list)

    def add_steps(self, records: list[Record]) -> None:
        self.steps += [record for record in records if not record.get("skipped")]
        if math.isnan(self.first_temperature) and self.steps:
            self.first_temperature = self.steps[0]["temperature"]
        if len(self.steps) > 2 * MAX_STEPS:
            del self.steps[:MAX_STEPS]


def diagnose(history: History) -> Findings:
    """Findings by name; none until there are enough records."""
    findings, recent = Findings(), history.steps[-WINDOW:]
    if len(recent) >= WINDOW // 2 and recent[-1]["step"] >= max(WINDOW, history.total // 10):
        findings |= not_learning(recent) | waiting_for_data(recent)
        findings |= rising_temperature(history.first_temperature, recent)
    if history.diagnostics:
        findings |= zero_gradients(history.diagnostics[-1]["grad_norms"])
    return findings | slowing_down(history.steps) | overfitting(history) | swapping(history.diagnostics)


def known_numbers(records: list[Record], key: str) -> list[float]:
    """A field of the records in which it is known; the records of an earlier session may have been edited."""
    return [record[key] for record in records if type(record.get(key)) in (int, float) and abs(record[key]) < 1e200]


def few_negatives(recent: list[Record]) -> Findings:
    """Pairs with an equal caption or image are no negatives of each other; there may be few others."""
    if not recent:
        return {}
    keys = ("masked_negatives", "without_negative")
    masked, without = (sum(known_numbers(recent, key)) / len(recent) for key in keys)
    if masked <= MANY_MASKED and without <= MAX_WITHOUT_NEGATIVE:
        return {}
    advice = "m1clip data check shows which repeat; give images captions that distinguish them"
    if without == 1:
        values = "no pair has a negative: in each batch all captions or images are equal"
        return {"no negatives": f"{values}. Nothing can be learned, and the loss says nothing; {advice}"}
    values = f"{masked:.0%} of the negatives are left out, because their caption or image equals that of the pair"
    if without > MAX_WITHOUT_NEGATIVE:
        values += f", and {without:.0%} of the pairs have no negative at all (accuracy leaves them out)"
    return {"few negatives": f"{values}: {advice}"}


def not_learning(recent: list[Record]) -> Findings:
    losses, accuracies = (known_numbers(recent, key) for key in ("loss", "accuracy"))
    chance_loss, chance = recent[-1]["chance_loss"], recent[-1]["chance_accuracy"]
    if not losses or not accuracies or not chance or chance == 1:  # nothing was compared
        return {}
    loss, accuracy = fmean(losses), fmean(accuracies)
    noise = math.sqrt(chance * (1 - chance) / (2 * len(recent) / chance))  # two guesses per pair, B = 1 / chance
    if accuracy > 1.2 * chance + 3 * noise:
        return {}
    if abs(loss - chance_loss) < 0.02 * chance_loss:
        values = f"the loss has stayed at chance ({loss:.3f}, chance {chance_loss:.3f}) for {len(recent)} steps"
        advice = "Try a lower --lr (a third), a longer --warmup, and check that captions match their images"
        return {"loss at chance": f"{values}: all pairs have the same similarity. {advice}"}
    values = f"in-batch accuracy is {accuracy:.2%}, chance is {chance:.2%}"
    return {"accuracy at chance": f"{values}: the model cannot match pairs yet"}


def rising_temperature(first: float, recent: list[Record]) -> Findings:
    before, now = recent[0]["temperature"], recent[-1]["temperature"]
    values = f"the temperature has risen from {first:.4f} to {now:.4f}; it normally falls"
    cause = "The pairs are not separable yet: captions are too similar, or the learning rate is too high"
    is_rising = now > TEMPERATURE_RISE * first and now > before
    return {"temperature rising": f"{values}. {cause}"} if is_rising else {}


def waiting_for_data(recent: list[Record]) -> Findings:
    timed = [record for record in recent if record["data_ms"] is not None]
    fraction = sum(record["data_ms"] for record in timed) / max(1e-9, sum(record["step_ms"] for record in timed))
    values = f"{fraction:.0%} of the step time is spent waiting for the next batch"
    advice = "loading is slower than training; more --workers or a larger --cache-gb may help"
    return {"waiting for data": f"{values}: {advice}"} if fraction > 0.1 else {}


def slowing_down(steps: list[Record]) -> Findings:
    """Compare with the fastest earlier window of the same image size and chunk."""
    same = [record for record in steps if all(record[key] == steps[-1][key] for key in ("image_size", "chunk"))]
    times = [record["step_ms"] - (record["data_ms"] or 0) for record in same]
    if len(times) < 3 * WINDOW:
        return {}
    now = median(times[-WINDOW:])
    best = min(median(times[i : i + WINDOW]) for i in range(WINDOW // 2, len(times) - WINDOW, WINDOW // 2))
    values = f"steps became {now / best:.1f} times slower ({best:.0f} ms at best, now {now:.0f} ms)"
    cause = "the machine is hot, saving power or busy with other programs"
    return {"throttling": f"{values}: {cause}"} if now >= 1.3 * best else {}


def overfitting(history: History) -> Findings:
    if len(history.evals) < 3 or len(history.epochs) < 2:
        return {}
    # Retrieval by a few labels has as few queries: its R@1 is noise.
    key = "label_accuracy" if all("label_accuracy" in record for record in history.evals) else "mean_r1"
    *before, last, now = (float(record[key]) for record in history.evals)
    best = max(*before, last)
    queries = history.evals[-1]["images"] * (1 if key == "label_accuracy" else 2)
    noise = math.sqrt(best * (1 - best) / queries)
    accuracies = known_numbers(history.epochs[-2:], "accuracy")
    rising = len(accuracies) == 2 and accuracies[1] > accuracies[0]
    falling = now < best - 2 * noise and now <= last
    name = "label accuracy" if key == "label_accuracy" else "R@1"
    values = f"training accuracy still rises while validation {name} has fallen from {best:.1%} to {now:.1%}"
    advice = "more data, --crop-scale, --patch-dropout or --patience would help"
    return {"overfitting": f"{values}: {advice}"} if rising and falling else {}


def swapping(records: list[Record]) -> Findings:
    if len(records) < 2:
        return {}
    written = records[-1]["swapped_out_gb"] - records[-2]["swapped_out_gb"]
    in_use = records[-1]["swap_used_gb"]
    growth = in_use - records[0]["swap_used_gb"]
    values = f"the machine is swapping ({max(written, growth):.1f} GB written, {in_use:.1f} GB in use)"
    advice = "steps will be slow; a smaller --chunk helps"
    return {"swapping": f"{values}: {advice}"} if written >= 0.2 or growth >= 0.5 else {}


def zero_gradients(norms: dict[str, float]) -> Findings:
    largest = max(norms.values(), default=0.0)
    zero = ", ".join(name for name, norm in norms.items() if norm < 1e-6 * largest)
    text = f"no gradient reaches {zero}: these weights do not train"
    return {"dead gradients": text} if zero and math.isfinite(largest) else {}
