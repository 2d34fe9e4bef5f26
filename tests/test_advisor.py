"""Advice from made-up measurements whose truth is known."""

from dataclasses import asdict, replace

import pytest

from m1clip.advisor import RequestedPlan, advise, gain
from m1clip.bench.documents import predicted_speedup, should_use_mps
from m1clip.config import get_preset
from m1clip.devices import Plan
from m1clip.estimates import Work, extrapolate, identity, predict

SMALL = Work("m1", "small", 40_000_000, 10.0, 32)


def row(plan=None, ms=100.0, batch=32, model="m1", name="small", gflop=10.0, time_plans=None, **more):
    spread = {
        "low_ms": ms * 0.98,
        "high_ms": ms * 1.02,
        "samples_ms": [ms * k for k in (0.98, 0.99, 1, 1.01, 1.02)],
    }
    facts = {"model": model, "preset": name, "batch": batch, "gflop": gflop, "parameters": 40_000_000}
    facts |= {"tokens": 8, "activation_gb": 0.01, "peak_gb": 1.0, "phases_ms": {}, "watts": None}
    facts |= {"pairs_per_s": 1e3 * batch / ms, "pairs_per_joule": None}
    return {
        **{
            "kind": "step",
            "time": 1e9,
            "time_plans": time_plans or f"{model}/{batch}",
            "setup_s": 0.0,
            "step_ms": ms,
        },
        **{**facts, **spread, **asdict(plan or Plan()), **more},
    }


def time_of(batch, constant=20.0, per_gflop=2.0, gflop=10.0):
    return constant + per_gflop * gflop * batch


def test_what_was_measured_is_told_as_it_was():
    told = predict([row(ms=100), row(ms=90)], Plan(), SMALL)
    assert (told.ms, told.confidence) == (90, "high")  # the newest
    assert told.basis.startswith("measured on")
    assert (told.low, told.high) == (
        pytest.approx(90 / 1.15),
        pytest.approx(103.5),
    )  # as much as machines vary
    few = predict([row(ms=90, samples_ms=[90, 90, 90])], Plan(), SMALL)
    assert few.confidence == "medium"


def test_between_measured_batches_time_is_a_constant_and_a_part_that_grows():
    rows = [row(ms=time_of(batch), batch=batch) for batch in (8, 16, 64)]
    told = predict(rows, Plan(), SMALL)
    assert told.ms == pytest.approx(time_of(32), rel=1e-6)
    assert told.confidence == "medium"
    assert "between measurements of this model (batches 8 to 64)" in told.basis


def test_beyond_what_was_measured_it_says_so_and_is_less_sure():
    rows = [row(ms=time_of(batch), batch=batch) for batch in (2, 4, 8)]
    told, near = (predict(rows, Plan(), replace(SMALL, batch=batch)) for batch in (512, 10))
    assert told.ms == pytest.approx(time_of(512), rel=1e-6)
    assert told.basis == "extrapolated: this model was measured at batches 2 to 8"
    assert (told.confidence, near.confidence) == ("low", "medium")
    assert told.high / told.low > near.high / near.low


def test_shorter_captions_are_less_work_of_the_same_model():
    rows = [row(ms=time_of(batch), batch=batch) for batch in (8, 64)]
    told = predict(rows, Plan(), replace(SMALL, gflop=5.0))
    assert told.ms == pytest.approx(time_of(32, gflop=5.0), rel=1e-6)


def test_a_model_never_measured_is_foretold_from_others_and_said_to_be():
    def truth(gflop, parameters, batch):
        return 5 + 2 * gflop * batch + 4e-7 * parameters

    sizes = [
        ("a", 0.2, 1_500_000),
        ("b", 2.6, 9_000_000),
        ("c", 40.0, 150_000_000),
        ("d", 110.0, 100_000_000),
    ]
    rows = [
        row(ms=truth(g, p, b), model=n, name=n, gflop=g, parameters=p, batch=b) for n, g, p in sizes for b in (4, 16)
    ]
    told = predict(rows, Plan(), replace(SMALL, model="new"))
    assert told.ms == pytest.approx(truth(10.0, 40_000_000, 32), rel=0.01)
    assert told.confidence == "low"
    assert told.basis == "this model was not measured: interpolated from a, b, c, d"
    beyond = predict(rows, Plan(), Work("1b", "1b", 10**9, 1150.0, 4))
    assert "extrapolated" in beyond.basis
    assert beyond.ms == pytest.approx(truth(1150.0, 10**9, 4), rel=0.01)


def test_nothing_is_foretold_from_too_little():
    assert predict([], Plan(), SMALL) is None
    assert extrapolate([row(), row(batch=8)], 100.0, 10**6) is None
    assert predict([row(Plan("mps"))], Plan("cpu"), SMALL) is None


def test_one_measurement_is_scaled_and_doubted():
    told = predict([row(ms=50, batch=8)], Plan(), SMALL)
    assert (told.ms, told.confidence) == (200, "low")
    less = predict([row(ms=50, batch=128)], Plan(), SMALL)
    assert 50 / 4 < less.ms < 50  # some of it is constant
    assert less.low < 50 / 4


def test_the_faster_device_is_chosen_for_this_batch_and_the_other_for_that():
    """A GPU that takes 40 ms to launch a step and is five times as fast: the CPU wins below batch 3."""
    rows = []
    for batch in (2, 8, 32):
        rows += [
            row(Plan("cpu"), time_of(batch, 0, 2.0), batch),
            row(Plan("mps"), time_of(batch, 40, 0.4), batch),
        ]
    small, large = (advise(replace(SMALL, batch=batch), rows, ["cpu", "mps"]) for batch in (2, 32))
    assert (small.plan.device, large.plan.device) == ("cpu", "mps")
    assert large.choices[0].why.startswith("168 ms (146 ms to 193 ms) a step; cpu 640 ms (557 ms to 736 ms)")
    assert large.choices[0].confidence == "high"
    assert large.step.ms == 168


def test_devices_too_close_to_tell_are_said_to_be():
    rows = [row(Plan("cpu"), 100), row(Plan("mps"), 99)]
    choice = advise(SMALL, rows, ["cpu", "mps"]).choices[0]
    assert choice.confidence == "low"
    assert "too close to be sure" in choice.why


def test_a_device_that_was_not_measured_is_named():
    choice = advise(SMALL, [row(Plan("cpu"))], ["cpu", "mps"]).choices[0]
    assert choice.value == "cpu"
    assert "mps was not measured" in choice.why
    assert choice.confidence == "low"


def test_every_other_decision_goes_by_the_same_contest():
    """The variants were measured on a day when everything was twice as slow: only the ratio counts."""
    slow = {"time_plans": "slow day", "time": 1.1e9}
    rows = [row(ms=100), row(ms=200, **slow), row(Plan(threads=4), 120, **slow)]
    rows += [row(Plan(precision="bf16"), 300, **slow)]
    advice = advise(SMALL, rows, ["cpu"])
    assert advice.plan == Plan("cpu", threads=4)
    told = {choice.name: choice for choice in advice.choices}
    assert told["threads"].why == "4: 120 ms against 200 ms at batch 32: 1.67x"
    assert told["precision"].value == "fp32"
    assert "bf16: 300 ms against 200 ms at batch 32: 0.67x, which does not pay" in told["precision"].why


def test_a_placement_is_chosen_only_where_it_was_measured_faster():
    split = Plan("vision=mps,text=cpu")
    rows = [row(Plan("cpu"), 300), row(Plan("mps"), 100), row(split, 80)]
    assert advise(SMALL, rows, ["cpu", "mps"]).plan == split
    rows[-1] = row(split, 99)
    assert advise(SMALL, rows, ["cpu", "mps"]).plan == Plan("mps")


def test_a_gain_within_what_they_vary_is_not_taken():
    noisy = {"low_ms": 60.0, "high_ms": 140.0}
    rows = [row(ms=100), row(Plan(threads=1), 90, **noisy)]
    choice = next(one for one in advise(SMALL, rows, ["cpu"]).choices if one.name == "threads")
    assert choice.value == "torch's own"
    assert "but within what they vary" in choice.why


@pytest.mark.parametrize(("steps", "chosen"), [(100, "off"), (10_000, "on")])
def test_compiling_has_to_pay_within_the_run(steps, chosen):
    rows = [row(ms=100), row(Plan(compile=True), 80, setup_s=30.0)]
    choice = next(one for one in advise(SMALL, rows, ["cpu"], steps=steps).choices if one.name == "compile")
    assert choice.value == chosen
    assert ("does not pay back 30 s of compiling in 100 steps" in choice.why) == (chosen == "off")


def test_what_is_asked_for_is_taken_and_its_time_told():
    rows = [row(ms=100), row(Plan(precision="bf16"), 400)]
    advice = advise(SMALL, rows, ["cpu"], RequestedPlan(device="cpu", precision="bf16"))
    assert advice.plan == Plan("cpu", "bf16")
    assert advice.why() == "asked for with --device cpu; precision bf16 (asked for with --precision bf16)"
    assert advice.step.ms == 400


def test_another_models_contest_counts_for_less():
    rows = [row(model="x", name="nano"), row(Plan(threads=1), 50, model="x", name="nano")]
    found = gain(rows, Plan(), Plan(threads=1), SMALL)
    assert (found.confidence, found.ratio) == ("low", 2.0)
    assert "for nano at batch 32" in found.why


def test_two_changes_are_not_taken_together_unless_they_were_measured_so():
    """A placement and fp16 each gain: both at once would put the text tower on the CPU in fp16."""
    split = Plan("vision=mps,text=cpu")
    rows = [row(Plan("cpu"), 300), row(Plan("mps"), 100), row(split, 80), row(Plan("mps", "fp16"), 60)]
    advice = advise(SMALL, rows, ["cpu", "mps"])
    assert advice.plan == Plan("mps", "fp16")
    assert advice.step.ms == 60
    placement = next(one for one in advice.choices if one.name == "placement")
    assert "but precision gains more, and both together were not measured" in placement.why


def test_a_device_is_judged_by_the_best_it_can():
    rows = [row(Plan("cpu"), 95), row(Plan("mps"), 100), row(Plan("mps", "fp16"), 50)]
    advice = advise(SMALL, rows, ["cpu", "mps"])
    assert advice.plan == Plan("mps", "fp16")
    assert advice.choices[0].why.startswith("as mps, fp16 50 ms")


def test_a_contest_of_far_less_work_decides_nothing():
    rows = [
        row(model="x", name="nano", gflop=0.1),
        row(Plan(threads=1), 50, model="x", name="nano", gflop=0.1),
    ]
    advice = advise(SMALL, rows, ["cpu"])
    assert advice.plan == Plan()
    assert "too unlike to go by" in next(one for one in advice.choices if one.name == "threads").why


def test_a_gain_that_one_round_of_three_denies_is_not_clear():
    other = row(Plan(threads=1), 80, samples_ms=[80, 80, 120], low_ms=79, high_ms=81)
    assert gain([row(samples_ms=[100, 100, 100]), other], Plan(), Plan(threads=1), SMALL).clear is False


def test_what_was_measured_beside_other_programs_is_not_gone_by():
    """One thread seemed 60 times as fast, because another program had the second core."""
    rows = [row(ms=10_000, busy=0.5), row(Plan(threads=1), 180, busy=0.5)]
    advice = advise(SMALL, rows, ["cpu"])
    assert advice.plan == Plan()
    assert advice.step.confidence == "low"
    assert "while other programs were busy" in advice.step.basis
    quiet = {"time_plans": "quiet", "busy": 0.02}
    rows = [row(ms=100, **quiet), row(Plan(threads=1), 180, **quiet), *rows]
    advice = advise(SMALL, rows, ["cpu"])
    assert (advice.step.ms, advice.step.confidence) == (100, "high")


def test_what_a_step_costs_decides_which_model_it_is():
    nano = get_preset("nano")
    same = replace(nano, epochs=99, lr=1e-5, batch=7, data="elsewhere")
    assert identity(nano) == identity(same)
    for other in (replace(nano, optimizer="adamw"), replace(nano, patch_dropout=0.5), get_preset("tiny")):
        assert identity(nano) != identity(other)


def test_the_documents_rules_are_as_they_wrote_them():
    assert should_use_mps(76_700_000, 12, 10**7)[0] is False
    assert should_use_mps(150_000_000, 31, 10**7)[0] is False
    assert should_use_mps(150_000_000, 32, 10**6)[0] is False
    assert should_use_mps(150_000_000, 32, 2**20)[0] is True
    assert [predicted_speedup(int(n * 1e6)) for n in (10, 76, 150, 300, 1000)] == [0.1, 0.3, 0.8, 1.5, 3.0]
