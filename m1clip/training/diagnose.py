"""What is typically wrong, in a sentence each. Pure: the run's own records in, findings out."""

import math
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

Record = dict[str, Any]
WINDOW = 50
MOST = 40 * WINDOW
RISEN = 1.5  # a temperature that is a little above its start is soon below it, or smoothed labels hold it


@dataclass
class History:
    """What has been seen of a run in this session, oldest first; of its steps, the last few thousand."""

    total: int
    first_temperature: float | None = None
    steps: list[Record] = field(default_factory=list)
    evals: list[Record] = field(default_factory=list)
    epochs: list[Record] = field(default_factory=list)
    watches: list[Record] = field(default_factory=list)

    def add_steps(self, rows: list[Record]) -> None:
        self.steps += [row for row in rows if not row.get("skipped")]
        if self.first_temperature is None and self.steps:
            self.first_temperature = self.steps[0]["temperature"]
        if len(self.steps) > 2 * MOST:
            del self.steps[:MOST]


def diagnose(seen: History) -> dict[str, str]:
    """Findings by name; none until there is enough to judge by."""
    found: dict[str, str] = {}
    recent = seen.steps[-WINDOW:]
    if len(recent) >= WINDOW // 2 and recent[-1]["step"] >= max(WINDOW, seen.total // 10):
        found |= learning(recent) | waiting(recent) | temperature(seen.first_temperature, recent)
    return found | slowing(seen.steps) | overfitting(seen) | swapping(seen.watches) | dead(seen.watches[-1:])


def learning(recent: list[Record]) -> dict[str, str]:
    loss, right = (fmean(row[key] for row in recent) for key in ("loss", "accuracy"))
    chance, guess = recent[-1]["chance_loss"], recent[-1]["chance_accuracy"]
    noise = math.sqrt(guess * (1 - guess) / (2 * len(recent) / guess))  # of two guesses a pair, B = 1 / guess
    if right > 1.2 * guess + 3 * noise:
        return {}
    if abs(loss - chance) < 0.02 * chance:
        return {
            "loss at chance": f"the loss has stayed at chance ({loss:.3f}, chance {chance:.3f}) for "
            f"{len(recent)} steps: to the model all pairs look alike. Try a lower --lr (a third), a longer "
            "--warmup, and look at the data: do the captions match their images?"
        }
    return {
        "accuracy at chance": f"in-batch accuracy is {right:.2%}, and guessing gives {guess:.2%}: "
        "nothing that tells pairs apart has been learned yet"
    }


def temperature(first: float | None, recent: list[Record]) -> dict[str, str]:
    before, now = recent[0]["temperature"], recent[-1]["temperature"]
    if first is None or now <= RISEN * first or now <= before:
        return {}
    return {
        "temperature rising": f"the temperature has risen from {first:.4f} to {now:.4f}; it normally falls. "
        "The pairs are not separable yet: captions too alike, or a rate that is too high"
    }


def waiting(recent: list[Record]) -> dict[str, str]:
    timed = [row for row in recent if row["wait_ms"] is not None]
    part = sum(row["wait_ms"] for row in timed) / max(1e-9, sum(row["step_ms"] for row in timed))
    if part <= 0.1:
        return {}
    return {
        "waiting for data": f"{part:.0%} of the step is spent waiting for the next batch: preparing it takes "
        "longer than learning from it"
    }


def slowing(steps: list[Record]) -> dict[str, str]:
    """Against the fastest earlier stretch with images and chunks of the same size."""
    same = [row for row in steps if all(row[key] == steps[-1][key] for key in ("side", "chunk"))]
    times = [row["step_ms"] - (row["wait_ms"] or 0) for row in same]
    if len(times) < 3 * WINDOW:
        return {}
    now = median(times[-WINDOW:])
    best = min(median(times[i : i + WINDOW]) for i in range(WINDOW // 2, len(times) - WINDOW, WINDOW // 2))
    if now < 1.3 * best:
        return {}
    return {
        "throttling": f"steps take {now / best:.1f} times as long as at their best ({now:.0f} ms, then "
        f"{best:.0f} ms): the machine is hot, saving power or busy with something else"
    }


def overfitting(seen: History) -> dict[str, str]:
    if len(seen.evals) < 3 or len(seen.epochs) < 2:
        return {}
    best, now = max(row["mean_r1"] for row in seen.evals[:-1]), seen.evals[-1]["mean_r1"]
    noise = math.sqrt(best * (1 - best) / (2 * seen.evals[-1]["images"]))
    rising = seen.epochs[-1]["accuracy"] > seen.epochs[-2]["accuracy"]
    falling = now < best - 2 * noise and now <= seen.evals[-2]["mean_r1"]
    if not (rising and falling):
        return {}
    return {
        "overfitting": f"accuracy in training still rises while validation R@1 has fallen from "
        f"{best:.1%} to {now:.1%}: more data, --crop-scale, --patch-dropout or --patience would help"
    }


def swapping(watches: list[Record]) -> dict[str, str]:
    if len(watches) < 2:
        return {}
    written = watches[-1]["swapped_out_gb"] - watches[-2]["swapped_out_gb"]
    grown = watches[-1]["swap_used_gb"] - watches[0]["swap_used_gb"]
    if written < 0.2 and grown < 0.5:
        return {}
    return {
        "swapping": f"the machine is swapping ({max(written, grown):.1f} GB written, "
        f"{watches[-1]['swap_used_gb']:.1f} GB in use): steps will be slow; a smaller --chunk helps"
    }


def dead(last: list[Record]) -> dict[str, str]:
    if not last:
        return {}
    norms = last[0]["grad_norms"]
    most = max(norms.values())
    none = [name for name, norm in norms.items() if norm < 1e-6 * most]
    if not none or not math.isfinite(most):
        return {}
    return {"dead gradients": f"no gradient reaches {', '.join(none)}: these weights do not learn"}
