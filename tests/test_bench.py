"""The sweep, its figures and its page; and each verb as it is typed."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from fakes import fake_gpu
from m1clip import cli, devices, measurements, sensors
from m1clip.bench import crossover, operations, report, scaling, sweep
from m1clip.commands import doctor
from m1clip.config import PRESETS, get_preset, to_json
from m1clip.devices import Plan
from m1clip.measurements import Measurements
from m1clip.model.cost import model_cost
from m1clip.training import device_plan, timing
from m1clip.training.state import TrainState
from m1clip.training.step import train_step
from test_advisor import row
from trained import some_batch, some_state


@pytest.fixture(autouse=True)
def overwrite(tmp_path, monkeypatch, tiny):
    """Measurements of its own, and a preset that takes no time."""
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.Settings, "seconds", 0.02)
    monkeypatch.setattr(sweep.Settings, "operation_s", 0.01)
    monkeypatch.setattr(sweep.Settings, "sizes", (64, 128))
    monkeypatch.setitem(PRESETS, "mini", replace(get_preset("nano"), preset="mini", model=tiny))
    wider = replace(tiny, vision=replace(tiny.vision, width=64), text=replace(tiny.text, width=64))
    monkeypatch.setitem(PRESETS, "midi", replace(get_preset("nano"), preset="midi", model=wider))
    yield
    torch.set_num_threads(1)


def ran(capsys, *words):
    code = cli.run(list(words))
    out, err = capsys.readouterr()
    return code, out, err


# The clock.


def test_a_timed_step_is_the_step(tiny_run):
    """Against a stopwatch around the same call, and the phases add up to the whole."""
    config = replace(tiny_run, batch=16)
    batch = timing.some_batch(config, 16, 12)
    state = some_state(config)

    def by_the_clock() -> float:
        times = []
        for _ in range(9):
            began = time.perf_counter()
            train_step(state, batch)
            times.append(1e3 * (time.perf_counter() - began))
        return sorted(times)[4]

    before = by_the_clock()
    found = timing.time_plans(config, [Plan()], batch, seconds=0.3)[0].record()
    both = (before, by_the_clock())
    assert 0.4 * min(both) < found["step_ms"] < 2.5 * max(both)  # other processes share the cores
    assert sum(found["phases_ms"].values()) == pytest.approx(found["step_ms"], rel=0.3)
    assert set(found["phases_ms"]) == {"copy", "forward", "backward", "optimizer"}
    assert found["low_ms"] <= found["step_ms"] <= found["high_ms"]


def test_contestants_take_turns_and_plans_of_one_device_share_a_learner(tiny_run, monkeypatch):
    order, made = [], []
    real = timing.one_turn
    monkeypatch.setattr(timing, "one_turn", lambda one, *rest: (order.append(str(one.plan)), real(one, *rest)))
    monkeypatch.setattr(timing, "TrainState", lambda *words: made.append(words) or TrainState(*words))
    plans = [Plan(), Plan(threads=1), Plan("vision=cpu,text=cpu")]
    timing.time_plans(tiny_run, plans, timing.some_batch(tiny_run, 16, 12), seconds=0.01)
    assert len(made) == 2
    assert order[:6] == [*[str(plan) for plan in plans[::-1]], *[str(plan) for plan in plans]]


def test_a_contest_leaves_the_random_numbers_and_threads_as_they_were(tiny_run):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    timing.time_plans(tiny_run, [Plan(threads=2)], some_batch(8), seconds=0.01)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == devices.DEFAULT_THREADS


def test_memory_of_a_step_is_counted_from_what_the_model_needs(tiny_run):
    """Weights and two moments stay; a batch that is eight times as large takes more."""
    config = replace(tiny_run, model=get_preset("nano").model)
    few, many = (timing.time_plans(config, [Plan()], timing.some_batch(config, n, 32), 0.01)[0] for n in (4, 64))
    state = 3 * 4 * model_cost(config.model).total / 1e9
    assert few.peak_gb > state
    assert many.peak_gb > few.peak_gb + 0.5 * 60 * model_cost(config.model).activation_mb / 1e3


def test_utilization_is_flops_over_time_over_the_best_product():
    one = row(ms=100.0, batch=32, gflop=10.0, precision="fp32")
    assert sweep.utilization(one, {("cpu", "fp32"): 6400.0}) == pytest.approx(0.5)  # 320 GFLOP in 0.1 s
    assert sweep.utilization(one, {}) is None
    products = [{"operation": "product", "device": "cpu", "precision": "fp32", "best_gflops": g} for g in (90.0, 150.0)]
    assert sweep.peaks([*products, {"operation": "copy"}]) == {("cpu", "fp32"): 150.0}


def test_flops_of_a_pair_by_hand(tiny):
    """Two multiply-adds of every weight for every token, thrice with the backward pass, and attention."""
    made = model_cost(tiny, tokens=12)
    D, patches = 32, 4
    vision, text = patches + 1, 12
    linear = 2 * D * D * 12 * (vision + text)  # both towers have two blocks, and the last
    linear += 2 * D * D * 12 * 2  # works for one token of each, at which its two heads look whole
    attention = 4 * D * (vision**2 + text**2 + 2 * (vision + text))
    ends = 2 * (3 * 16 * 16 * D * patches + 2 * D * tiny.embed_dim)
    logits = 2 * 2 * tiny.embed_dim  # a batch of two, per pair
    assert made.forward_gflop * 1e9 == pytest.approx(linear + attention + ends + logits, rel=0.02)
    assert 2.5 < made.step_gflop / made.forward_gflop < 3.1


# Operations.


@pytest.mark.parametrize("one", operations.operations((64,)), ids=lambda one: f"{one.name} {one.size}")
def test_each_operation_runs_and_its_columns_make_sense(one):
    found = operations.measure(one, "cpu", "fp32", 0.01)
    assert 0 < found["compute_ms"] == found["alone_ms"]
    assert found["launch_ms"] is None  # a CPU has no queue
    assert found["gb_per_s"] > 0
    if one.gflop:
        assert found["gflops"] == pytest.approx(one.gflop / found["compute_ms"] * 1e3)


def test_a_queue_has_launch_transfer_and_compute(monkeypatch):
    """A fake whose work is done when it is waited for: 2 ms each, and 1 ms to wait."""
    queue = []

    def wait(device):
        if queue:
            time.sleep(0.001 + 0.002 * len(queue))
            queue.clear()

    monkeypatch.setattr(devices, "is_async", lambda device: True)
    monkeypatch.setattr(devices, "synchronize", wait)
    one = operations.Operation("nothing", "1", 0.0, ((1,),), 2, lambda t: lambda: queue.append(1))
    found = operations.measure(one, "cpu", "fp32", 0.4)
    assert found["issued_ms"] < 0.5
    assert found["alone_ms"] == pytest.approx(3.1, abs=0.8)
    assert found["compute_ms"] == pytest.approx(2.05, abs=0.4)
    assert found["launch_ms"] == pytest.approx(1.0, abs=0.8)
    assert found["transfer_ms"] >= 0


# Crossing.


def comparisons(first, second, noise=0.0, batches=(4, 16, 64, 256)):
    made = []
    for batch in batches:
        for plan, (constant, slope) in ((Plan("cpu"), first), (Plan("mps"), second)):
            ms = constant + slope * batch
            spread = [ms * (1 + noise * k) for k in (-2, -1, 0, 1, 2)]
            made.append(row(plan, ms, batch, samples_ms=spread))
    return made


def test_the_batch_where_one_overtakes_the_other_is_found_with_its_range():
    found = crossover.crossings(comparisons((0, 2), (60, 1), noise=0.05))  # equal at 60
    assert len(found) == 1
    assert (str(found[0].first), str(found[0].second)) == ("cpu", "mps")
    assert found[0].low < 60 < found[0].high
    assert found[0].at == pytest.approx(60, rel=0.15)
    assert str(found[0]).startswith("small: mps overtakes cpu at batch")


def test_never_in_the_measured_range_is_an_answer():
    found = crossover.crossings(comparisons((0, 1), (50, 2)))[0]
    assert found.at is None
    lead = "cpu is 2.20 to 14.50 times as fast as mps"
    assert str(found) == f"small: never, in the measured range (batch 4 to batch 256); {lead}"


def test_more_noise_is_a_wider_range():
    narrow, wide = (crossover.crossings(comparisons((0, 2), (60, 1), noise))[0] for noise in (0.01, 0.08))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def test_what_is_level_is_undecided():
    """Equal devices, and only noise: no crossing is to be found in it."""
    rng, found = np.random.default_rng(0), []
    for _ in range(8):
        rows = comparisons((10, 1), (10, 1))
        for one in rows:
            samples = one["step_ms"] * (1 + 0.08 * rng.standard_normal(5))
            one |= {"samples_ms": samples.tolist(), "step_ms": float(np.median(samples))}
        found += crossover.crossings(rows)
    assert sum("undecided" in str(one) for one in found) >= 6


def test_two_batches_are_too_few_to_fit():
    assert crossover.crossings(comparisons((0, 2), (60, 1), batches=(4, 256))) == []


def test_sizes_are_crossed_too():
    rows = []
    for name, parameters, cpu, gpu in (("a", 1e6, 10, 30), ("b", 1e7, 100, 90), ("c", 1e8, 1000, 270)):
        for plan, ms in ((Plan("cpu"), cpu), (Plan("mps"), gpu)):
            rows.append(row(plan, ms, 4, model=name, name=name, parameters=parameters))
    found = crossover.crossings(rows)[0]
    assert found.along == "parameters"
    assert 1e6 < found.at < 1e7
    assert "batch 4: mps overtakes cpu at" in str(found)


# What is kept.


def test_measurements_survive_a_torn_line(tmp_path):
    known = Measurements(tmp_path)
    known.add("x", value=1)
    with open(known.path, "a") as file:
        file.write('{"kind": "x", "val')
    known.add("x", value=float("nan"))
    assert [one["value"] for one in known.rows("x")] == [1, None]
    assert known.rows("x", value=1)[0]["kind"] == "x"


def test_a_row_that_lacks_something_is_passed_over(tmp_path):
    known = Measurements(tmp_path)
    good = {key: value for key, value in row().items() if key not in ("kind", "time")}
    known.add("step", device="cpu")
    for wrong in ({"step_ms": None}, {"step_ms": "1"}, {"step_ms": 0}, {"samples_ms": []}, {"gflop": -1.0}):
        known.add("step", **{**good, **wrong})
    known.add("session", of="bench")
    known.add("step", **good)
    assert len(known.rows("step")) == 1
    assert known.rows("session") == []


def test_two_sweeps_at_once_would_time_each_other(capsys):
    with sweep.alone(measurements.here()):
        code, _, err = ran(capsys, "bench", "--presets", "mini", "--quick", "--no-operations")
    assert code == 1
    assert "another bench is measuring" in err


def test_what_other_programs_take_is_seen():
    others = sensors.BackgroundLoad()
    time.sleep(0.3)
    assert 0 <= others.share() <= 1
    others = sensors.BackgroundLoad()
    code = "import time; end = time.time() + 1.2\nwhile time.time() < end: pass"
    subprocess.run([sys.executable, "-c", code])
    assert others.share() > 0.2


def test_what_cannot_be_kept_is_known_until_the_end(tmp_path):
    (tmp_path / "file").write_text("")
    known = Measurements(tmp_path / "file" / "folder")
    known.add("x", value=1)
    assert known.rows("x")[0]["value"] == 1
    assert "Not a directory" in known.unkept


def test_another_torch_is_another_machine(monkeypatch):
    first = measurements.here().folder
    monkeypatch.setattr(measurements, "torch_version", lambda: "9.9.9")
    assert measurements.here().folder != first


def test_an_interrupted_sweep_goes_on_where_it_was(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write", lambda *_: tmp_path)  # the page has its own test
    words = ("bench", "--presets", "mini", "--batches", "4", "8", "--no-operations", "--quick", "--json")
    real, tried = timing.time_plans, []

    def interrupted(config, *rest):
        tried.append(config.batch_size)
        if len(tried) == 2:
            raise KeyboardInterrupt
        return real(config, *rest)

    monkeypatch.setattr(timing, "time_plans", interrupted)
    assert ran(capsys, *words)[0] == 130
    code, out, _ = ran(capsys, *words)
    assert (code, tried) == (0, [4, 8, 8])
    assert [one["batch"] for one in json.loads(out)["steps"] if one["device"] == "cpu" and not one["threads"]] == [4, 8]
    ran(capsys, *words)  # a finished one is begun anew
    assert tried == [4, 8, 8, 4, 8]


def test_what_will_not_fit_is_skipped_and_said(capsys, monkeypatch):
    monkeypatch.setattr(sensors, "available_gb", lambda: 0.001)
    code, out, _ = ran(capsys, "bench", "--presets", "mini", "--batches", "4", "--no-operations", "--quick")
    assert code == 0
    assert "left out\n  mini, batch 4: it needs about" in out


# The verbs.


def test_bench_prints_tables_and_leaves_images_and_a_page(capsys, tmp_path):
    words = ("--presets", "mini", "--batches", "4", "8", "16", "--quick", "--out", "here")
    code, out, _ = ran(capsys, "bench", *words)
    assert code == 0
    for word in (
        "operations",
        "training steps",
        "vision=cpu,text=cpu",
        "of peak",
        "overtak",
        "advise --preset nano",
    ):
        assert word in out
    made = {path.name for path in (tmp_path / "here").iterdir()}
    assert made == {"bench.md", "bench.html", "throughput.png", "crossover.png", "phases.png", "roofline.png"}
    page = (tmp_path / "here" / "bench.html").read_text()
    assert page.count("data:image/png") == 4
    assert "http" not in page.replace("http-equiv", "")
    assert "| mini | 4 | cpu |" in (tmp_path / "here" / "bench.md").read_text()


def test_bench_with_two_devices_compares_them(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write", lambda *_: tmp_path)
    fake_gpu(monkeypatch)
    words = ("--presets", "mini", "--batches", "4", "--quick", "--no-operations", "--json")
    code, out, _ = ran(capsys, "bench", *words)
    assert code == 0
    tried = {one["device"] for one in json.loads(out)["steps"]}
    assert tried == {"cpu", "mps", "vision=cpu,text=mps", "vision=mps,text=cpu"}


def test_scaling_measures_what_fits_and_plans_the_rest(capsys, monkeypatch, tmp_path):
    real = device_plan.work_of

    def huge(config, *rest):
        work = real(config, *rest)
        return replace(work, parameters=10**12) if config.preset == "midi" else work

    monkeypatch.setattr(device_plan, "work_of", huge)
    monkeypatch.setattr(scaling, "SECONDS", 0.05)
    code, out, _ = ran(capsys, "bench", "scaling", "--presets", "mini", "midi", "--out", "here", "--json")
    assert code == 0
    mini, midi = json.loads(out)["sizes"]
    assert mini["measured"]["cpu"]["step_ms"] > 0
    assert midi["measured"] == {}
    assert "GB are free" in midi["reason"]
    assert midi["documents_speedup"] == 3.0
    assert (tmp_path / "here" / "scaling.png").stat().st_size > 10_000
    assert "midi: it needs" in (tmp_path / "here" / "scaling.md").read_text()


def test_advise_answers_from_what_was_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write", lambda *_: tmp_path)
    ran(capsys, "bench", "--presets", "mini", "--batches", "4", "16", "--no-operations", "--quick")
    code, out, err = ran(capsys, "advise", "--preset", "mini", "--batch-size", "16", "--no-measure")
    assert (code, err) == (0, "")
    for word in (
        "device",
        "placement",
        "threads",
        "precision",
        "compile",
        "chunk",
        "memory",
        "step",
        "epoch",
    ):
        assert f"\n{word}" in out
    assert "measured on" in out
    assert "should_use_mps" in out
    told = json.loads(ran(capsys, "advise", "--preset", "mini", "--batch-size", "64", "--no-measure", "--json")[1])
    assert told["step"]["basis"].startswith("extrapolated: this model was measured at batches 4 to 16")


def test_advise_measures_for_a_moment_what_it_does_not_know(capsys, monkeypatch):
    monkeypatch.setattr(device_plan, "MOMENT_S", 0.05)
    code, out, _ = ran(capsys, "advise", "--preset", "mini", "--batch-size", "8")
    assert code == 0
    assert "measured on" in out
    monkeypatch.setattr(timing, "time_plans", lambda *_: pytest.fail("measured twice"))
    assert ran(capsys, "advise", "--preset", "mini", "--batch-size", "8")[0] == 0


def test_advise_knows_nothing_and_says_so(capsys):
    code, out, _ = ran(capsys, "advise", "--preset", "mini", "--no-measure")
    assert code == 0
    assert "nothing was measured on this machine yet" in out


def test_the_documents_rule_is_marked_when_it_is_wrong(capsys, monkeypatch):
    fake_gpu(monkeypatch)
    known, config = measurements.here(), get_preset("mini")
    work = device_plan.work_of(config, 32, 24, known)
    for plan, ms in ((Plan("cpu"), 100.0), (Plan("mps"), 20.0)):
        one = row(plan, ms, 32, model=work.model, gflop=work.gflop, peak_gb=0.1)
        known.add("step", **{key: value for key, value in one.items() if key not in ("kind", "time")})
    code, out, _ = ran(capsys, "advise", "--preset", "mini", "--batch-size", "32", "--policy", "seed")
    assert code == 0
    assert "the documents' rule (should_use_mps) says cpu: 0.1 M parameters are fewer than 100 M" in out
    assert "measured: mps; the rule is WRONG: 5.00 times as slow" in out


def test_compare_trains_the_same_on_each(tmp_path, tiny_run):
    """Real processes: the losses agree, and the page has both curves."""
    (tmp_path / "c.json").write_text(to_json(replace(tiny_run, device="auto", data="synthetic:40", val_size=8)))
    words = [
        "--on",
        "cpu",
        "vision=cpu,text=cpu",
        "--config",
        "c.json",
        "--steps",
        "6",
        "--threads",
        "1",
        "--json",
    ]
    command = [sys.executable, "-m", "m1clip", "compare", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, split = json.loads(done.stdout)["runs"]
    assert plain["losses_apart"] == 0
    assert split["losses_apart"] < 1e-3
    assert split["speed"] > 0
    assert 0 <= plain["mean_r1"] <= 1
    assert (tmp_path / "runs" / "compare-1" / "compare.png").stat().st_size > 10_000
    assert "of synthetic:40, seed 0" in (tmp_path / "runs" / "compare-1" / "compare.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("bench", "--presets", "nanno"), "did you mean nano"),
        (("bench", "--batches", "1"), "a batch has 2 to a million pairs"),
        (("bench", "--threads", "100000"), "threads must be 1 to 1024"),
        (("bench", "scaling", "--devices", "vision=cpu,text=cpu"), "scaling takes single devices"),
        (("advise", "--batch-size", "20000"), "batch 20,000 is larger than the 12,000 pairs"),
        (("train", "--device", ""), "no device ''"),
        (("bench", "--devices", "gpu"), "no device 'gpu'"),
        (("bench", "--precisions", "int8"), "no precision 'int8'"),
        (("bench", "--tokens", "2"), "at least 3"),
        (("bench", "scaling", "--pairs", "0"), "pairs must be at least 1"),
        (("advise", "--preset", "huge"), "no preset 'huge'"),
        (("advise", "--batch-size", "1"), "batch must be at least 2"),
        (("compare", "--device", "cpu"), "with --on"),
        (("compare", "--on", "cpu", "cpu"), "each device of --on once"),
        (("compare", "--on", "vision=cpu"), "a placement is"),
        (("doctor", "--preset", "x"), "no preset 'x'"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_2(capsys, words, said):
    code, out, err = ran(capsys, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


# The doctor.


def test_doctor_finds_this_machine_fit(capsys):
    code, out, _ = ran(capsys, "doctor", "--preset", "mini", "--json")
    told = json.loads(out)
    assert code == (0 if told["ok"] else 1)
    about = {one["about"] for one in told["checks"]}
    assert {
        "python",
        "torch",
        "numpy",
        "memory",
        "disk",
        "power",
        "heat",
        "load",
        "threads",
        "measured",
    } <= about
    assert all(one["state"] in ("ok", "warn", "fail") for one in told["checks"])


def test_doctor_catches_a_device_with_wrong_gradients(capsys, monkeypatch):
    fake_gpu(monkeypatch, "text.blocks.1.mlp.activation", "backward")
    code, out, _ = ran(capsys, "doctor", "--preset", "mini")
    assert code == 1
    assert "comes back through text.blocks.1.mlp.activation" in " ".join(out.split())
    assert "--device cpu" in out


@pytest.mark.parametrize(
    ("check", "patched", "state", "said"),
    [
        (doctor.memory, {"available_gb": lambda: 1.0}, "fail", "close other programs"),
        (doctor.heat, {"temperature_c": lambda: 97.0}, "warn", "let it cool"),
        (doctor.heat, {"temperature_c": lambda: None, "speed_limit": lambda: 60}, "warn", "let it cool"),
    ],
)
def test_what_is_wrong_comes_with_its_remedy(monkeypatch, check, patched, state, said):
    for name, value in patched.items():
        monkeypatch.setattr(sensors, name, value)
    found = check()
    assert found.state == state
    assert said in found.remedy


@pytest.mark.parametrize(
    ("version", "state"), [("2.8.0", "fail"), ("2.7.1", "fail"), ("2.13.0", "warn"), ("2.15.0", "ok")]
)
def test_versions_with_known_bugs_are_told_on_a_mac(monkeypatch, version, state):
    monkeypatch.setattr(measurements, "torch_version", lambda: version)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor.torch_().state == state


def test_a_battery_is_a_warning_and_an_adapter_is_not(monkeypatch):
    from collections import namedtuple

    battery = namedtuple("battery", "percent power_plugged")
    for plugged, state in ((False, "warn"), (True, "ok")):
        monkeypatch.setattr("psutil.sensors_battery", lambda plugged=plugged: battery(80, plugged), raising=False)
        assert doctor.power().state == state


def test_a_report_without_steps_is_still_a_page(tmp_path):
    known = measurements.here()
    machine = {**sensors.machine(), "torch": "x"}
    known.add(
        "operation",
        session="20260101-000000",
        **operations.measure(operations.operations((64,))[1], "cpu", "fp32", 0.01),
    )
    known.add(
        "operation",
        session="20260101-000000",
        **operations.measure(operations.operations((64,))[-1], "cpu", "fp32", 0.01),
    )
    made = report.read(known, "20260101-000000", machine)
    assert report.write(made, tmp_path / "p").exists()
