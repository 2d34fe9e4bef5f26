"""From measurements to advice: which device, and how; each with its reason and how sure it is.

Measures nothing itself: it reads the lines that `m1clip bench` and training have left.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from m1clip.devices import Plan
from m1clip.estimates import BUSY, ENOUGH, VARIES, Estimate, Row, Work, plan_of, predict, undisturbed, work_in
from m1clip.format import milliseconds

PAYS = {"placement": 1.03, "threads": 1.05, "precision": 1.05, "compile": 1.05}  # times as fast
NEAR = 4.0  # times the work, or a fourth: a time_plans of another model that is farther off tells nothing
LEVELS = ("low", "medium", "high")


@dataclass(frozen=True)
class Gain:
    """How much faster one plan was than another, taken in turns."""

    plan: Plan
    ratio: float
    why: str
    confidence: str
    setup_s: float
    saved_ms: float
    clear: bool
    """Whether nearly every round says the same, and the middle halves are apart."""
    near: bool
    """Whether it was measured for this model, or for much the same work."""


def gain(rows: Sequence[Row], base: Plan, other: Plan, work: Work) -> Gain | None:
    """From the time_plans most like the work in question in which both took part."""
    comparisons: dict[str, dict[Plan, Row]] = {}
    for row in rows:
        comparisons.setdefault(row["time_plans"], {})[plan_of(row)] = row
    both = [time_plans for time_plans in comparisons.values() if base in time_plans and other in time_plans]
    quiet = undisturbed([time_plans[base] for time_plans in both])
    both = [time_plans for time_plans in both if time_plans[base] in quiet]
    if not both:
        return None

    def distance(time_plans: dict[Plan, Row]) -> tuple[bool, float, float]:
        row = time_plans[base]
        return row["model"] != work.model, abs(math.log(work_in(row) / work.step_gflop)), -row["time"]

    nearest = min(both, key=distance)
    a, b = nearest[base], nearest[other]
    ratio, same = a["step_ms"] / b["step_ms"], a["model"] == work.model
    here = same and a["batch"] == work.batch
    where = f"at batch {a['batch']}" if same else f"for {a['preset']} at batch {a['batch']}"
    told = f"{milliseconds(b['step_ms'])} against {milliseconds(a['step_ms'])} {where}: {ratio:.2f}x"
    confidence = "high" if here else "medium" if same else "low"
    saved = (1 - 1 / ratio) * a["step_ms"] * work.step_gflop / work_in(a)
    if (a.get("busy") or 0.0) > BUSY:
        confidence, told = "low", f"{told}, measured while other programs were busy"
    near = same or 1 / NEAR <= work_in(a) / work.step_gflop <= NEAR
    return Gain(other, ratio, told, confidence, b["setup_s"] or 0.0, saved, _clear(a, b), near)


def _clear(a: Row, b: Row) -> bool:
    if (a.get("busy") or 0.0) > BUSY:
        return False
    apart: bool = b["high_ms"] < a["low_ms"] or b["low_ms"] > a["high_ms"]
    if not apart:
        return False
    rounds = [x > y for x, y in zip(a["samples_ms"], b["samples_ms"], strict=False)]
    faster: float = sum(rounds) / len(rounds)
    return max(faster, 1 - faster) >= (0.8 if len(rounds) >= ENOUGH else 1.0)


@dataclass(frozen=True)
class Choice:
    name: str
    value: str
    why: str
    confidence: str


@dataclass(frozen=True)
class RequestedPlan:
    """What is already decided; None is left to the advisor."""

    device: str | None = None
    precision: str | None = None
    compile: bool | None = None
    threads: int | None = None


@dataclass
class Advice:
    plan: Plan
    choices: list[Choice] = field(default_factory=list)
    step: Estimate | None = None
    by_device: dict[str, Estimate] = field(default_factory=dict)

    def why(self) -> str:
        """The reasons that matter for a line in a log: the device's, and of whatever is not the plain way."""
        said = [choice.why for choice in self.choices if choice.name == "device"]
        plain = {"precision": "fp32", "compile": "off", "threads": "torch's own", "placement": "one device"}
        for choice in self.choices:
            if plain.get(choice.name, choice.value) != choice.value:
                said.append(f"{choice.name} {choice.value} ({choice.why})")
        return "; ".join(said)


@dataclass(frozen=True)
class Best:
    """What can be had from one device: the plain plan, or the one change to it that gains the most."""

    plan: Plan
    estimate: Estimate | None
    choices: list[Choice]


def advise(
    work: Work,
    rows: Sequence[Row],
    here: Sequence[str],
    requested: RequestedPlan | None = None,
    steps: int = 0,
) -> Advice:
    """The fastest plan that was measured; never two changes together that were only measured one by one."""
    requested = requested or RequestedPlan()
    names = [requested.device] if requested.device else list(here)
    single = [key for key in PAYS if key != "placement"]
    bests = {name: _best(name, work, rows, requested, steps, single) for name in names}
    known = {name: best.estimate for name, best in bests.items() if best.estimate}
    if requested.device:
        device = Choice("device", requested.device, f"asked for with --device {requested.device}", "high")
    elif len(here) == 1:
        device = Choice("device", here[0], "no GPU that torch can use was found", "high")
    elif not known:
        device = Choice("device", here[-1], "nothing was measured yet: m1clip bench does", "low")
    else:
        device = _fastest(known, bests, here)
    best = bests[device.value]
    if requested.device is None:  # two devices have to be faster than the faster of them
        best = _best(device.value, work, rows, requested, steps, list(PAYS))
    return Advice(best.plan, [device, *best.choices], best.estimate, known)


def _fastest(known: dict[str, Estimate], bests: dict[str, Best], here: Sequence[str]) -> Choice:
    first = min(known, key=lambda name: known[name].ms)
    others = {name: one for name, one in known.items() if name != first}
    why = f"{_with(first, bests)}{known[first]} a step"
    why += "".join(f"; {name} {_with(name, bests)}{one}" for name, one in others.items())
    why += "".join(f"; {name} was not measured" for name in here if name not in known)
    sure = min((one.confidence for one in known.values()), key=LEVELS.index)
    if not others or any(one.ms / VARIES < known[first].ms for one in others.values()):
        sure, why = "low", why + (": too close to be sure" if others else "")
    return Choice("device", first, f"{why} ({known[first].basis})", sure)


def _with(name: str, bests: dict[str, Best]) -> str:
    """What its time was reached with, if not plainly."""
    return "" if bests[name].plan == Plan(name) else f"as {bests[name].plan} "


def _best(
    name: str, work: Work, rows: Sequence[Row], requested: RequestedPlan, steps: int, keys: Sequence[str]
) -> Best:
    """With what may be changed: some of placement, threads, precision, compile."""
    asked = {key: value for key, value in vars(requested).items() if value is not None and key != "device"}
    base = replace(Plan(name), **asked)
    told = predict(rows, base, work)
    open_to = [key for key in keys if key not in asked]
    gains = {key: found for key in open_to if (found := _most(key, base, work, rows))}
    paying = {key: found for key, found in gains.items() if _verdict(key, found, steps) == PAID}
    winner = max(paying, key=lambda key: paying[key].ratio, default=None)
    choices = [Choice(key, _value(key, base), f"asked for with --{key} {_value(key, base)}", "high") for key in asked]
    for key in open_to:
        choices.append(_choice(key, base, gains.get(key), winner, steps))
    if winner is None:
        return Best(base, told, choices)
    taken = paying[winner]
    exact = predict(rows, taken.plan, work)
    if exact is None or exact.confidence == "low":
        exact = told and replace(
            told, ms=told.ms / taken.ratio, low=told.low / taken.ratio, high=told.high / taken.ratio
        )
    return Best(taken.plan, exact, choices)


def _most(name: str, base: Plan, work: Work, rows: Sequence[Row]) -> Gain | None:
    """The largest gain among the plans that differ from the plain one in this alone."""
    key = "device" if name == "placement" else name
    plans = [
        plan
        for plan in dict.fromkeys(plan_of(row) for row in rows)
        if plan != base
        and (plan.is_split if name == "placement" else plan.device == base.device)
        and replace(plan, **{key: getattr(base, key)}) == base
    ]
    found = [one for plan in plans if (one := gain(rows, base, plan, work))]
    return max(found, key=lambda one: one.ratio, default=None)


PAID = "pays"


def _verdict(name: str, found: Gain, steps: int) -> str:
    """Whether a change pays, or why not."""
    if found.ratio <= PAYS[name]:
        return "which does not pay"
    if not found.near:
        return "too unlike to go by"
    if not found.clear:
        return "but within what they vary"
    if name == "compile" and steps * found.saved_ms / 1e3 <= found.setup_s:
        return f"which does not pay back {found.setup_s:.0f} s of compiling in {steps:,} steps"
    return PAID


def _choice(name: str, base: Plan, found: Gain | None, winner: str | None, steps: int) -> Choice:
    plain = "one device" if name == "placement" else _value(name, base)
    if found is None:
        return Choice(name, plain, "no other was measured", "low")
    why, verdict = f"{_value(name, found.plan)}: {found.why}", _verdict(name, found, steps)
    if name == winner:
        return Choice(name, _value(name, found.plan), why, found.confidence)
    if verdict == PAID:
        verdict = f"but {winner} gains more, and both together were not measured"
    return Choice(name, plain, f"{why}, {verdict}", found.confidence)


def _value(name: str, plan: Plan) -> str:
    if name == "compile":
        return "on" if plan.compile else "off"
    if name == "threads":
        return str(plan.threads) if plan.threads else "torch's own"
    return plan.device if name == "placement" else plan.precision


def as_json(advice: Advice) -> dict[str, Any]:
    return {
        "plan": asdict(advice.plan),
        "choices": [asdict(choice) for choice in advice.choices],
        "step": asdict(advice.step) if advice.step else None,
        "by_device": {name: asdict(one) for name, one in advice.by_device.items()},
    }
