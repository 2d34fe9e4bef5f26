"""Estimates and advice from synthetic measurements whose answer is known."""

from dataclasses import asdict, replace

import pytest

from m1clip.config import get_preset
from m1clip.devices import Plan
from m1clip.training.device_plan import (
    StepCost,
    StepRow,
    advise,
    estimate_step,
    find_comparison,
    is_significant,
    predict_run,
)
from m1clip.training.timing import model_id, quartiles

SMALL = StepCost("m1", "small", 8, 40_000_000, 10.0, 0.01, 32)


def step_row(plan=None, ms=100.0, batch_size=32, model="m1", comparison=None, **changes):
    samples = changes.pop("samples_ms", [ms * k for k in (0.98, 0.99, 1, 1.01, 1.02)])
    q1_ms, step_ms, q3_ms = quartiles(samples)
    cost = asdict(replace(SMALL, model_id=model, batch_size=batch_size))
    row = {**cost, "time": 1e9, "session": "", "comparison": comparison or f"{model}/{batch_size}"}
    row |= {**asdict(plan or Plan()), "samples_ms": samples, "step_ms": step_ms, "q1_ms": q1_ms, "q3_ms": q3_ms}
    row |= {"phases_ms": {"forward": 0.6 * ms, "backward": 0.4 * ms}, "setup_s": 0.0, "background_load": 0.0}
    return StepRow(**{**row, "peak_gb": 1.0, "watts": None, **changes})


def step_ms(batch_size, constant=20.0, per_gflop=2.0, gflop=10.0):
    return constant + per_gflop * gflop * batch_size


def ask(rows, available=("cpu",), cost=SMALL, requested=None, steps=0):
    return advise(cost, rows, list(available), requested or {}, steps)


# Estimates.


def test_a_measured_step_is_estimated_as_measured_last():
    estimate = estimate_step([step_row(ms=100), step_row(ms=90)], Plan(), SMALL)
    assert (estimate.ms, estimate.confidence) == (90, "high")
    assert estimate.basis.startswith("measured on")
    assert str(estimate) == "90 ms (78.3 ms to 103 ms)"  # 15 % from day to day
    few_samples = estimate_step([step_row(samples_ms=[90, 90, 90])], Plan(), SMALL)
    assert few_samples.confidence == "medium"


def test_between_measured_batch_sizes_the_time_is_a_constant_plus_a_part_per_flop():
    rows = [step_row(ms=step_ms(size), batch_size=size) for size in (8, 16, 64)]
    estimate = estimate_step(rows, Plan(), SMALL)
    assert estimate.ms == pytest.approx(step_ms(32), rel=1e-6)
    assert (estimate.confidence, estimate.basis) == ("medium", "interpolated from batch sizes 8 to 64")


def test_beyond_the_measured_batch_sizes_it_extrapolates_with_a_wider_range_and_less_confidence():
    rows = [step_row(ms=step_ms(size), batch_size=size) for size in (2, 4, 8)]
    far, near = (estimate_step(rows, Plan(), replace(SMALL, batch_size=size)) for size in (512, 10))
    assert far.ms == pytest.approx(step_ms(512), rel=1e-6)
    assert far.basis == "extrapolated from batch sizes 2 to 8"
    assert (far.confidence, near.confidence) == ("low", "medium")
    assert far.factor > near.factor > 1


def test_shorter_captions_are_fewer_flops_of_the_same_model():
    rows = [step_row(ms=step_ms(size), batch_size=size) for size in (8, 64)]
    estimate = estimate_step(rows, Plan(), replace(SMALL, gflop=5.0))
    assert estimate.ms == pytest.approx(step_ms(32, gflop=5.0), rel=1e-6)


def test_a_model_that_was_never_measured_is_estimated_from_the_others():
    def true_ms(gflop, parameters, batch_size):
        return 5 + 2 * gflop * batch_size + 4e-7 * parameters

    sizes = {"a": (0.2, 1_500_000), "b": (2.6, 9_000_000), "c": (40.0, 150_000_000), "d": (110.0, 100_000_000)}
    rows = [
        step_row(ms=true_ms(gflop, n, size), model=name, preset=name, gflop=gflop, parameters=n, batch_size=size)
        for name, (gflop, n) in sizes.items()
        for size in (4, 16)
    ]
    inside = estimate_step(rows, Plan(), replace(SMALL, model_id="new"))
    assert inside.ms == pytest.approx(true_ms(10.0, 40_000_000, 32), rel=0.01)
    assert inside.basis == "this model was not measured; interpolated from a, b, c, d"
    assert inside.confidence == "low"
    outside = estimate_step(rows, Plan(), StepCost("1b", "1b", 77, 10**9, 1150.0, 0.1, 4))
    assert "extrapolated" in outside.basis
    assert outside.ms == pytest.approx(true_ms(1150.0, 10**9, 4), rel=0.01)


def test_nothing_is_estimated_from_another_plan_or_from_too_few_models():
    assert estimate_step([], Plan(), SMALL) is None
    assert estimate_step([step_row(Plan("mps"))], Plan("cpu"), SMALL) is None
    assert estimate_step([step_row(model="x"), step_row(model="y")], Plan(), SMALL) is None


def test_a_single_measurement_is_scaled_with_low_confidence():
    estimate = estimate_step([step_row(ms=50, batch_size=8)], Plan(), SMALL)
    assert (estimate.ms, estimate.confidence) == (pytest.approx(200), "low")
    assert estimate.basis == "extrapolated from batch size 8"
    assert estimate.factor > 1.6


# Significance: the one rule of bench and advise.


@pytest.mark.parametrize(
    ("a", "b", "significant"),
    [
        ([100, 101, 99, 100, 100], [50, 51, 49, 50, 50], True),
        ([100, 101, 99, 100, 100], [100, 101, 99, 100, 101], False),
        ([60, 80, 100, 120, 140], [50, 70, 90, 110, 130], False),  # always faster, but the IQRs overlap
        ([100, 100, 100], [80, 80, 120], False),  # one of three rounds disagrees
        ([100, 100, 100, 100, 40], [60, 60, 60, 60, 61], True),  # one of five rounds may disagree
    ],
)
def test_a_difference_is_significant_if_the_iqrs_are_disjoint_and_the_rounds_agree(a, b, significant):
    rows = step_row(samples_ms=a), step_row(samples_ms=b)
    assert is_significant(*rows) == is_significant(*rows[::-1]) == significant


def test_a_large_speedup_under_background_load_is_rejected_for_the_load_not_for_its_significance():
    """One thread seemed 60 times as fast, because another program had the second core."""
    rows = [step_row(ms=10_000, background_load=0.5), step_row(Plan(threads=1), 180, background_load=0.5)]
    advice = ask(rows)
    assert is_significant(*rows)
    assert advice.plan == Plan()
    assert "55.56x as fast as cpu" in advice.rejected["cpu, 1 thread"]
    assert advice.rejected["cpu, 1 thread"].endswith("measured under background load")
    assert (advice.step.confidence, "under background load" in advice.step.basis) == ("low", True)


def test_timings_without_background_load_are_preferred():
    loaded = [step_row(ms=9_000, background_load=0.5), step_row(Plan(threads=1), 180, background_load=0.5)]
    idle = [step_row(ms=100, comparison="idle"), step_row(Plan(threads=1), 180, comparison="idle")]
    advice = ask([*idle, *loaded])
    assert (advice.plan, advice.step.ms, advice.step.confidence) == (Plan(), 100, "high")
    assert "0.56x" in advice.rejected["cpu, 1 thread"]


# Advice.


def test_the_faster_device_depends_on_the_batch_size():
    """A GPU that needs 40 ms to launch a step and is five times as fast: the CPU wins below batch size 3."""
    rows = []
    for size in (2, 8, 32):
        rows.append(step_row(Plan("cpu"), step_ms(size, 0, 2.0), size))
        rows.append(step_row(Plan("mps"), step_ms(size, 40, 0.4), size))
    small, large = (ask(rows, ("cpu", "mps"), replace(SMALL, batch_size=size)) for size in (2, 32))
    assert (small.plan.device, large.plan.device) == ("cpu", "mps")
    assert large.reason.startswith("cpu: 640 ms (557 ms to 736 ms), mps: 168 ms (146 ms to 193 ms); measured on")
    assert (large.confidence, large.step.ms) == ("high", 168)


def test_devices_without_a_significant_difference_are_reported_as_such():
    advice = ask([step_row(Plan("cpu"), 100), step_row(Plan("mps"), 99)], ("cpu", "mps"))
    assert advice.confidence == "low"
    assert "(not significant)" in advice.reason


def test_a_device_that_was_not_measured_is_named():
    advice = ask([step_row(Plan("cpu"))], ("cpu", "mps"))
    assert (advice.plan.device, advice.confidence) == ("cpu", "low")
    assert "mps: not measured" in advice.reason


def test_other_plans_are_judged_within_one_comparison():
    """The variants were timed on a day when everything was twice as slow: only the ratio counts."""
    slow_day = {"comparison": "slow day", "time": 1.1e9}
    rows = [step_row(ms=100), step_row(ms=200, **slow_day), step_row(Plan(threads=4), 120, **slow_day)]
    rows += [step_row(Plan(precision="bf16"), 300, **slow_day)]
    advice = ask(rows)
    assert advice.plan == Plan("cpu", threads=4)
    assert advice.reason == "1.67x as fast as cpu (120 ms vs 200 ms at batch size 32)"
    assert advice.rejected == {"cpu, bf16": "0.67x as fast as cpu (300 ms vs 200 ms at batch size 32); less than 1.05x"}


def test_a_placement_is_chosen_only_where_it_was_measured_faster():
    split = Plan("vision=mps,text=cpu")
    rows = [step_row(Plan("cpu"), 300), step_row(Plan("mps"), 100), step_row(split, 80)]
    assert ask(rows, ("cpu", "mps")).plan == split
    rows[-1] = step_row(split, 99)
    assert ask(rows, ("cpu", "mps")).plan == Plan("mps")


def test_a_speedup_that_is_not_significant_is_not_taken():
    rows = [step_row(ms=100), step_row(Plan(threads=1), samples_ms=[60, 70, 90, 120, 140])]
    advice = ask(rows)
    assert advice.plan == Plan()
    assert advice.rejected["cpu, 1 thread"].endswith("; not significant")


@pytest.mark.parametrize(("steps", "compiled"), [(100, False), (10_000, True)])
def test_compiling_has_to_pay_off_within_the_run(steps, compiled):
    advice = ask([step_row(ms=100), step_row(Plan(compile=True), 80, setup_s=30.0)], steps=steps)
    assert advice.plan.compile == compiled
    assert "cpu, compiled" not in advice.rejected or (
        advice.rejected["cpu, compiled"].endswith("saves 2 s in 100 steps, compiling takes 30 s")
    )


def test_requested_settings_are_kept():
    rows = [step_row(ms=100), step_row(Plan(precision="bf16"), 400)]
    advice = ask(rows, requested={"device": "cpu", "precision": "bf16"})
    assert (advice.plan, advice.step.ms) == (Plan("cpu", "bf16"), 400)
    assert advice.reason == "requested with --device cpu --precision bf16"
    assert advice.rejected == {}


def test_a_comparison_of_another_model_counts_only_if_its_step_is_similar():
    rows = [step_row(model="x", preset="nano"), step_row(Plan(threads=1), 50, model="x", preset="nano")]
    base, other = find_comparison(rows, Plan(), Plan(threads=1), SMALL)
    assert (base.step_ms, other.step_ms) == (100, 50)
    advice = ask(rows)
    assert (advice.plan, advice.confidence) == (Plan(threads=1), "medium")
    assert "at batch size 32 of nano" in advice.reason
    advice = ask([replace(row, gflop=0.1) for row in rows])
    assert advice.plan == Plan()
    assert advice.rejected["cpu, 1 thread"].endswith("that model is too different from this one")


def test_two_changes_are_not_combined_unless_they_were_measured_together():
    """A placement and fp16 both gain: together they would put the text tower on the CPU in fp16."""
    split = Plan("vision=mps,text=cpu")
    rows = [step_row(Plan("cpu"), 300), step_row(Plan("mps"), 100), step_row(split, 80)]
    rows += [step_row(Plan("mps", "fp16"), 60)]
    advice = ask(rows, ("cpu", "mps"))
    assert (advice.plan, advice.step.ms) == (Plan("mps", "fp16"), 60)
    assert advice.rejected[split.device].endswith("the chosen plan is faster")


def test_a_plan_of_the_slower_device_can_still_be_the_fastest():
    rows = [step_row(Plan("cpu"), 95), step_row(Plan("mps"), 100), step_row(Plan("mps", "fp16"), 50)]
    assert ask(rows, ("cpu", "mps")).plan == Plan("mps", "fp16")


def test_a_plan_on_a_device_that_is_gone_is_not_advised():
    rows = [step_row(Plan("cpu"), 95), step_row(Plan("mps", "fp16"), 50)]
    assert ask(rows).plan == Plan("cpu")


def test_a_run_is_predicted_with_its_chunk_memory_and_epoch():
    rows = [step_row(ms=1000)]
    whole = {name: (value, reason) for name, value, _, reason in predict_run(SMALL, ask(rows), rows, 16.0, 3200)}
    assert whole["chunk"][0] == "whole batch"
    assert whole["memory"] == ("1.00 GB", "measured")
    assert whole["epoch"][0] == "1 min 40 s"
    divided = {name: value for name, value, *_ in predict_run(SMALL, ask(rows), rows, 1.2, 3200)}
    assert divided["chunk"] == "8"  # 0.84 GB usable, 0.64 GB of state, 13 MB per pair
    assert divided["memory"] == "0.74 GB"
    assert divided["step"] == "1,333 ms"  # forward runs twice
    assert predict_run(SMALL, ask(rows), rows, 0.5, 3200)[0][1] == "does not fit"


def test_the_id_of_a_model_depends_on_what_its_step_costs():
    nano = get_preset("nano")
    assert model_id(nano) == model_id(replace(nano, epochs=99, lr=1e-5, batch_size=7, data="elsewhere"))
    for other in (replace(nano, optimizer="adamw"), replace(nano, patch_dropout=0.5), get_preset("tiny")):
        assert model_id(nano) != model_id(other)
