"""From measurements to advice: which device, how, how long; each with its reason and how sure it is.

Measures nothing itself: it reads the lines that `m1clip bench` and training have left.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.config import TrainConfig, to_json
from m1clip.devices import Plan

Row = dict[str, Any]
Numbers = NDArray[np.float64]
PAYS = 1.05  # a change is worth it from here on; less is within what machines vary from day to day
PAYS_SPLIT = 1.03
LEVELS = ("low", "medium", "high")


@dataclass(frozen=True)
class Work:
    """What is asked about: a model with its optimiser, and a batch."""

    model: str
    """Identity of everything that decides what a step costs, but for batch and caption length."""
    name: str
    parameters: int
    gflop: float
    """Per pair, forward and backward, at the length that captions have."""
    batch: int
    activation_gb: float = 0.0
    """Per pair: what the backward pass needs kept."""

    @property
    def state_gb(self) -> float:
        """Weights, gradients and two moments of each, in float32."""
        return 16 * self.parameters / 1e9

    @property
    def step_gflop(self) -> float:
        return self.gflop * self.batch


def identity(config: TrainConfig) -> str:
    parts = (config.optimizer, config.drop_tokens, config.recompute, bool(config.ema))
    return blake2b((to_json(config.model) + repr(parts)).encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Estimate:
    ms: float
    low: float
    high: float
    basis: str
    confidence: str

    def __str__(self) -> str:
        return f"{spoken(self.ms)} ({spoken(self.low)} to {spoken(self.high)})"


def spoken(ms: float) -> str:
    return f"{ms / 1e3:.3g} s" if ms >= 1e4 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def plan_of(row: Row) -> Plan:
    return Plan(row["device"], row["precision"], row["compile"], row["threads"])


def predict(rows: Iterable[Row], plan: Plan, work: Work) -> Estimate | None:
    """A step's time by one plan: as measured, between or beyond what was, or from other models."""
    rows = [row for row in rows if plan_of(row) == plan]
    same = [row for row in rows if row["model"] == work.model]
    for row in reversed(same):
        if row["batch"] == work.batch and math.isclose(row["gflop"], work.gflop, rel_tol=0.01):
            day = time.strftime("%d %B %Y", time.localtime(row["time"]))
            return Estimate(row["step_ms"], row["low_ms"], row["high_ms"], f"measured on {day}", "high")
    if same:
        return _of_this_model(latest(same), work)
    return _of_other_models(latest(rows), work)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Of repeated measurements the newest."""
    return list({(row["model"], row["batch"], round(row["gflop"], 4)): row for row in rows}.values())


def _of_this_model(rows: list[Row], work: Work) -> Estimate:
    x, ms = _points(rows)
    if len(rows) == 1:
        told = float(ms[0] * max(1.0, work.step_gflop / x[0]))
        basis = f"scaled from one measurement, at batch {rows[0]['batch']}"
        return Estimate(told, told * 0.6, told * 1.5, basis, "low")
    told, beyond = _line(x, ms, work.step_gflop), _beyond(x, work.step_gflop)
    missed = [math.log(_line(x, ms, at) / true) for at, true in zip(x, ms, strict=True)]
    wide = 1 + max(float(np.std(missed)) if len(rows) > 2 else 0.1, 0.05) + 0.1 * beyond
    batches = f"{min(row['batch'] for row in rows)} to {max(row['batch'] for row in rows)}"
    basis = f"between measurements of this model (batches {batches})"
    if beyond:
        basis = f"extrapolated: this model was measured at batches {batches}"
    return Estimate(told, told / wide, told * wide, basis, "medium" if beyond < 1 else "low")


def _of_other_models(rows: list[Row], work: Work) -> Estimate | None:
    told = foretell(rows, work.step_gflop, work.parameters)
    if told is None:
        return None
    beyond = _beyond(_points(rows)[0], work.step_gflop)
    wide = told[1] + 0.1 * beyond
    names = ", ".join(dict.fromkeys(row["preset"] for row in rows))
    basis = f"this model was not measured: {'extrapolated' if beyond else 'interpolated'} from {names}"
    return Estimate(told[0], told[0] / wide, told[0] * wide, basis, "low")


def foretell(rows: Sequence[Row], step_gflop: float, parameters: int) -> tuple[float, float] | None:
    """Milliseconds of a step by the rows of other models, and a factor that 90 % should lie within.

    A step is taken for a constant, a part that grows with its work and one with the parameters it updates;
    how well that foretells is found by leaving out each row in turn.
    """
    if len(rows) < 3:
        return None
    facts = np.array([(1.0, _work(row), row["parameters"]) for row in rows])
    ms = np.array([row["step_ms"] for row in rows])
    told = _shares(facts, ms) @ np.array((1.0, step_gflop, parameters))
    missed = [
        np.log(_shares(np.delete(facts, i, 0), np.delete(ms, i)) @ facts[i] / ms[i]) for i in range(len(rows))
    ]
    return float(told), float(np.exp(max(0.1, 1.64 * np.sqrt(np.mean(np.square(missed))))))


def _shares(facts: Numbers, ms: Numbers) -> Numbers:
    """The least relative squares, none below zero: what would be is left out."""
    found, used = np.zeros(facts.shape[1]), list(range(facts.shape[1]))
    while used:
        some, *_ = np.linalg.lstsq(facts[:, used] / ms[:, None], np.ones(len(ms)), rcond=None)
        if (some >= 0).all():
            found[used] = some
            break
        used.pop(int(np.argmin(some)))
    return found


def _points(rows: list[Row]) -> tuple[Numbers, Numbers]:
    return np.array([_work(row) for row in rows]), np.array([row["step_ms"] for row in rows])


def _line(x: Numbers, ms: Numbers, at: float) -> float:
    """A step is a constant part (launches, the update) and one that grows with its work."""
    slope, start = np.polyfit(x, ms, 1, w=1 / ms)
    if start < 0 or slope < 0:
        slope, start = float((ms / x).mean()), 0.0
    return float(start + slope * at)


def _beyond(x: Numbers, at: float) -> float:
    """How often what was measured has to be doubled, or halved, to reach this."""
    low, high = 0.99 * float(x.min()), 1.01 * float(x.max())
    return max(0.0, math.log2(at / high), math.log2(low / at))


def _work(row: Row) -> float:
    return float(row["gflop"] * row["batch"])


@dataclass(frozen=True)
class Gain:
    """How much faster one plan was than another, taken in turns."""

    ratio: float
    why: str
    confidence: str
    setup_s: float
    saved_ms: float
    clear: bool
    """Whether the middle halves of the two are apart."""


def gain(rows: Sequence[Row], base: Plan, other: Plan, work: Work) -> Gain | None:
    """From the contest most like the work in question in which both took part."""
    contests: dict[str, dict[Plan, Row]] = {}
    for row in rows:
        contests.setdefault(row["contest"], {})[plan_of(row)] = row
    both = [contest for contest in contests.values() if base in contest and other in contest]
    if not both:
        return None

    def distance(contest: dict[Plan, Row]) -> tuple[bool, float, float]:
        row = contest[base]
        return row["model"] != work.model, abs(math.log(_work(row) / work.step_gflop)), -row["time"]

    nearest = min(both, key=distance)
    a, b = nearest[base], nearest[other]
    ratio, same = a["step_ms"] / b["step_ms"], a["model"] == work.model
    here = same and a["batch"] == work.batch
    where = f"at batch {a['batch']}" if same else f"for {a['preset']} at batch {a['batch']}"
    told = f"{spoken(b['step_ms'])} against {spoken(a['step_ms'])} {where}: {ratio:.2f}x"
    confidence = "high" if here else "medium" if same else "low"
    saved = (1 - 1 / ratio) * a["step_ms"] * work.step_gflop / _work(a)
    clear = b["high_ms"] < a["low_ms"] or b["low_ms"] > a["high_ms"]
    return Gain(ratio, told, confidence, b["setup_s"] or 0.0, saved, clear)


@dataclass(frozen=True)
class Choice:
    name: str
    value: str
    why: str
    confidence: str


@dataclass(frozen=True)
class Wishes:
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


def advise(
    work: Work, rows: Sequence[Row], here: Sequence[str], wishes: Wishes | None = None, steps: int = 0
) -> Advice:
    """One decision after the other, each against the same plain plan on the device chosen first."""
    wishes = wishes or Wishes()
    advice = Advice(Plan())
    _choose_device(advice, work, rows, here, wishes)
    base = advice.plan
    ratio = 1.0
    for name in ("placement", "threads", "precision", "compile"):
        ratio *= _choose(advice, name, base, work, rows, wishes, steps)
    told = predict(rows, base, work)
    if told and (whole := predict(rows, advice.plan, work)) and whole.confidence == "high":
        advice.step = whole
    elif told:
        advice.step = replace(told, ms=told.ms / ratio, low=told.low / ratio, high=told.high / ratio)
    return advice


def _choose_device(
    advice: Advice, work: Work, rows: Sequence[Row], here: Sequence[str], wishes: Wishes
) -> None:
    if wishes.device is not None:
        advice.plan = Plan(wishes.device)
        advice.choices.append(
            Choice("device", wishes.device, f"asked for with --device {wishes.device}", "high")
        )
        return
    told = {name: predict(rows, Plan(name), work) for name in here}
    advice.by_device = {name: one for name, one in told.items() if one}
    if len(here) == 1:
        why, sure = "no GPU that torch can use was found", "high"
        advice.choices.append(Choice("device", here[0], why, sure))
        return
    if not advice.by_device:
        why = "nothing was measured yet: m1clip bench does"
        advice.plan = Plan(here[-1])
        advice.choices.append(Choice("device", here[-1], why, "low"))
        return
    best = min(advice.by_device, key=lambda name: advice.by_device[name].ms)
    others = {name: one for name, one in advice.by_device.items() if name != best}
    why = f"{advice.by_device[best]} a step"
    why += "".join(f"; {name} {one}" for name, one in others.items())
    why += "".join(f"; {name} was not measured" for name in here if name not in advice.by_device)
    sure = min((one.confidence for one in advice.by_device.values()), key=LEVELS.index)
    if not others or any(one.low < advice.by_device[best].high for one in others.values()):
        sure, why = "low", why + (": too close to be sure" if others else "")
    advice.plan = Plan(best)
    advice.choices.append(Choice("device", best, f"{why} ({advice.by_device[best].basis})", sure))


def _choose(
    advice: Advice, name: str, base: Plan, work: Work, rows: Sequence[Row], wishes: Wishes, steps: int
) -> float:
    """Decide one thing; the gain in speed."""
    plain, others = _options(name, base, rows)
    asked = wishes.device if name == "placement" else getattr(wishes, name)
    if asked is not None and name != "placement":
        plan = replace(base, **{name: asked})  # type: ignore[arg-type]
        found = gain(rows, base, plan, work)
        told = f"asked for with --{name} {_value(name, plan)}" + (f" ({found.why})" if found else "")
        _take(advice, name, plan, told, "high")
        return found.ratio if found else 1.0
    if asked is not None:  # a device was asked for: where the towers are is part of it
        return 1.0
    gains = {plan: found for plan in others if (found := gain(rows, base, plan, work))}
    if not gains:
        why = "no other was measured" if name != "placement" else "no placement of two was measured"
        _take(advice, name, base, why, "low", plain)
        return 1.0
    plan = max(gains, key=lambda plan: gains[plan].ratio)
    best = gains[plan]
    pays = best.clear and best.ratio > (PAYS_SPLIT if name == "placement" else PAYS)
    why = f"{_value(name, plan)}: {best.why}"
    if name == "compile" and pays:
        back_s = steps * best.saved_ms / 1e3
        pays = back_s > best.setup_s
        why += f"; {best.setup_s:.0f} s to translate, {back_s:.0f} s saved in {steps:,} steps"
    if not pays:
        unclear = (
            ", but within what they vary" if best.ratio > 1 and not best.clear else ", which does not pay"
        )
        _take(advice, name, base, why + unclear, best.confidence, plain)
        return 1.0
    _take(advice, name, plan, why, best.confidence)
    return best.ratio


def _options(name: str, base: Plan, rows: Sequence[Row]) -> tuple[str, list[Plan]]:
    """How the plain way is called, and the plans that differ from it in this one thing."""
    plans = dict.fromkeys(plan_of(row) for row in rows)
    if name == "placement":
        return "one device", [
            plan for plan in plans if plan.is_split and replace(plan, device=base.device) == base
        ]
    key = {"threads": "threads", "precision": "precision", "compile": "compile"}[name]
    same = [plan for plan in plans if plan != base and replace(plan, **{key: getattr(base, key)}) == base]
    return _value(name, base), same


def _value(name: str, plan: Plan) -> str:
    if name == "compile":
        return "on" if plan.compile else "off"
    if name == "threads":
        return str(plan.threads) if plan.threads else "torch's own"
    return plan.device if name == "placement" else plan.precision


def _take(advice: Advice, name: str, plan: Plan, why: str, sure: str, shown: str | None = None) -> None:
    key = "device" if name == "placement" else name
    advice.plan = replace(advice.plan, **{key: getattr(plan, key)})
    advice.choices.append(Choice(name, shown or _value(name, plan), why, sure))


def as_json(advice: Advice) -> dict[str, Any]:
    return {
        "plan": asdict(advice.plan),
        "choices": [asdict(choice) for choice in advice.choices],
        "step": asdict(advice.step) if advice.step else None,
        "by_device": {name: asdict(one) for name, one in advice.by_device.items()},
    }
