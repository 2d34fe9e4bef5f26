"""What a plan means for a run that has not begun: how much of a batch at once, how much memory, how long."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from m1clip.advisor import Advice, Choice
from m1clip.estimates import Estimate, Work, plan_of
from m1clip.format import duration, milliseconds
from m1clip.training import memory
from m1clip.training.memory import PEAK, SHARE, power_of_two

DIVIDED = 4 / 3  # a batch in parts is embedded twice: forward, forward and backward
Row = dict[str, Any]


@dataclass(frozen=True)
class Outlook:
    chunk: int
    """PairDataset at once; 0 where not even the weights and moments fit."""
    memory_gb: float
    step: Estimate | None
    epoch_s: tuple[float, float, float] | None
    """Likely, at best, at worst."""
    choices: list[Choice]


def outlook(work: Work, advice: Advice, rows: Sequence[Row], pairs: int) -> Outlook:
    chunk, at_once = _chunk(work, memory.free_gb(advice.plan.devices[0]))
    mine = [row for row in rows if plan_of(row) == advice.plan and row["peak_gb"]]
    memory_gb, held = _memory(work, chunk, mine)
    if advice.step is None:
        unknown = Choice("step", "–", "nothing like it was measured: m1clip bench does", "–")
        return Outlook(chunk, memory_gb, None, None, [at_once, held, unknown])
    step, count = advice.step, max(1, pairs // work.batch)
    if chunk < work.batch:
        ms, low, high = (DIVIDED * time for time in (step.ms, step.low, step.high))
        step = Estimate(ms, low, high, f"{step.basis}; a third more, as it is divided", step.confidence)
    of_step = Choice(
        "step",
        milliseconds(step.ms),
        f"{step.basis}; {milliseconds(step.low)} to {milliseconds(step.high)}",
        step.confidence,
    )
    likely, low, high = (count * ms / 1e3 for ms in (step.ms, step.low, step.high))
    why = f"{count:,} steps for {pairs:,} pairs; {duration(low)} to {duration(high)}; without evaluation and saving"
    of_epoch = Choice("epoch", duration(likely), why, step.confidence)
    return Outlook(chunk, memory_gb, step, (likely, low, high), [at_once, held, of_step, of_epoch])


def _chunk(work: Work, free: float) -> tuple[int, Choice]:
    room, pair = SHARE * free - work.state_gb, PEAK * work.activation_gb
    counted = f"{1e3 * work.activation_gb:.3g} MB kept a pair, {free:.1f} GB free"
    if room < pair:
        need = f"weights, gradients and moments need {work.state_gb:.1f} GB"
        return 0, Choice("chunk", "does not fit", f"{need}; {counted}", "high")
    if pair * work.batch <= room:
        return work.batch, Choice("chunk", "the whole batch", counted, "high")
    chunk = power_of_two(room / pair)
    return chunk, Choice("chunk", f"{chunk:,} at once", counted, "high")


def _memory(work: Work, chunk: int, rows: Sequence[Row]) -> tuple[float, Choice]:
    same = [row for row in rows if row["model"] == work.model and row["batch"] == work.batch]
    if same and chunk == work.batch:
        held = float(same[-1]["peak_gb"])
        return held, Choice("memory", f"{held:.2f} GB", "measured at this batch", "high")
    need = work.state_gb + PEAK * work.activation_gb * max(1, chunk)
    why = "weights, gradients, moments and activations, counted"
    return need, Choice("memory", f"{need:.2f} GB", why, "medium")
