"""bench, bench scaling, compare, advise and doctor: measurements, reports, and each as a command."""

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import namedtuple
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from test_advice import step_row

from fakes import fake_gpu
from helpers import random_pairs, train_run
from m1clip import cli, devices, sensors
from m1clip.bench import report, sweep
from m1clip.commands import compare, doctor
from m1clip.config import PRESETS, get_preset, to_json
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost
from m1clip.run import Run
from m1clip.training import timing
from m1clip.training.device_plan import MeasurementStore, open_store
from m1clip.training.step import TrainState

QUICK = ("--quick", "--threads", "1")


@pytest.fixture(autouse=True)
def small_and_separate(tmp_path, monkeypatch, tiny):
    """Own measurements, tiny presets, and next to no time per measurement."""
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "PLAN_TRIAL_S", 0.05)
    monkeypatch.setattr(sweep, "QUICK_MATMULS", (64, 128))
    real_time_plans, real_time_operation = timing.time_plans, sweep.time_operation
    monkeypatch.setattr(timing, "time_plans", lambda *args: real_time_plans(*args[:3], 0.02))
    monkeypatch.setattr(sweep, "time_operation", lambda *args: real_time_operation(*args[:3], 0.01))
    monkeypatch.setitem(PRESETS, "mini", replace(get_preset("nano"), preset="mini", model=tiny))
    wider = replace(tiny, vision=replace(tiny.vision, width=64), text=replace(tiny.text, width=64))
    monkeypatch.setitem(PRESETS, "midi", replace(get_preset("nano"), preset="midi", model=wider))
    yield
    torch.set_num_threads(1)


def run_cli(capsys, *arguments):
    code = cli.run_command(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *arguments):
    code, out, err = run_cli(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


# Timing.


def test_a_timing_has_samples_quartiles_and_phases_that_add_up(tiny_run):
    store, config = MeasurementStore(open_store().folder), replace(tiny_run, batch_size=16)
    timings = timing.time_plans(config, [Plan()], timing.random_batch(config, 16, 12), 0.3)
    timing.add_comparison(store, timing.step_cost(config, 16, 12, store), timings)
    (row,) = store.steps()
    assert row.q1_ms <= row.step_ms <= row.q3_ms
    assert row.step_ms == pytest.approx(np.median(row.samples_ms))
    assert list(row.phases_ms) == ["copy", "forward", "backward", "optimizer"]
    ms, phases_ms = timing.time_step(TrainState(CLIP(config.model), config), Plan(), random_pairs(16))
    assert 0 < sum(phases_ms.values()) <= ms  # the phases lie between the two synchronizations


def test_plans_alternate_and_plans_of_one_device_share_a_state(tiny_run, monkeypatch):
    order, states, real = [], [], timing.add_sample
    monkeypatch.setattr(timing, "add_sample", lambda one, *rest: (order.append(one.plan), real(one, *rest)))
    monkeypatch.setattr(timing, "TrainState", lambda *args: states.append(args) or TrainState(*args))
    plans = [Plan(), Plan(threads=1), Plan("vision=cpu,text=cpu")]
    timing.time_plans(tiny_run, plans, timing.random_batch(tiny_run, 16, 12), 0.01)
    assert len(states) == 2
    assert order[:6] == [*plans[::-1], *plans]


def test_timing_leaves_the_random_state_and_the_threads_as_they_were(tiny_run):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    timing.time_plans(tiny_run, [Plan(threads=2)], random_pairs(8), 0.01)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == devices.DEFAULT_THREADS


def test_peak_memory_includes_the_state_and_grows_with_the_batch(tiny_run):
    config = replace(tiny_run, model=get_preset("nano").model)
    few, many = (timing.time_plans(config, [Plan()], timing.random_batch(config, n, 32), 0.01)[0] for n in (4, 64))
    assert few.peak_gb > 3 * 4 * model_cost(config.model).total / 1e9
    assert many.peak_gb > few.peak_gb + 0.5 * 60 * model_cost(config.model).activation_mb / 1e3


def test_flops_of_a_pair_by_hand(tiny):
    """Two FLOPs per weight and token, times three with the backward pass, and attention."""
    counted, D, patches = model_cost(tiny, tokens=12), 32, 4
    vision, text = patches + 1, 12
    linear = 2 * D * D * 12 * (vision + text)  # both towers have two blocks; the last one
    linear += 2 * D * D * 12 * 2  # computes one token of each
    attention = 4 * D * (vision**2 + text**2 + 2 * (vision + text))
    ends = 2 * (3 * 16 * 16 * D * patches + 2 * D * tiny.embed_dim)
    logits = 2 * 2 * tiny.embed_dim
    assert counted.forward_gflop * 1e9 == pytest.approx(linear + attention + ends + logits, rel=0.02)
    assert 2.5 < counted.step_gflop / counted.forward_gflop < 3.1


def test_utilization_is_the_flop_rate_over_that_of_the_fastest_matmul():
    rows = [{"operation": "matmul", "device": "cpu", "precision": "fp32", "best_gflops": g} for g in (90.0, 6400.0)]
    peaks = sweep.peak_gflops([*rows, {"operation": "copy"}])
    assert peaks == {("cpu", "fp32"): 6400.0}
    row = step_row(ms=100.0, batch_size=32, gflop=10.0)  # 320 GFLOP in 0.1 s
    assert report.Sweep("", {}, [], [], [], peaks).utilization(row) == pytest.approx(0.5)
    assert report.Sweep("", {}, [], [], [], {}).utilization(row) is None


# Operations.


@pytest.mark.parametrize("operation", sweep.operations((64,)), ids=lambda one: f"{one.name} {one.size}")
def test_every_operation_runs_and_has_a_bandwidth(operation):
    row = sweep.time_operation(operation, "cpu", "fp32", 0.01)
    assert row["gb_per_s"] == pytest.approx(1e3 * operation.elements * 4 / 1e9 / row["compute_ms"])
    assert (row["launch_ms"], row["transfer_ms"]) == (None, None)  # a CPU has no queue
    if operation.gflop:
        assert row["gflops"] == pytest.approx(1e3 * operation.gflop / row["compute_ms"])
        assert row["best_gflops"] >= row["gflops"]


def test_a_device_with_a_queue_has_launch_and_transfer_times(monkeypatch):
    synchronized = []
    monkeypatch.setattr(devices, "is_async", lambda device: True)
    monkeypatch.setattr(devices, "synchronize", synchronized.append)
    row = sweep.time_operation(sweep.operations((64,))[1], "cpu", "fp32", 0.01)
    assert synchronized
    assert row["launch_ms"] >= 0
    assert row["transfer_ms"] > 0


def test_bench_keeps_operations_without_flops_in_table_and_roofline(capsys, monkeypatch, tmp_path):
    texts = []
    monkeypatch.setattr(report, "annotate", lambda panel, text, *_, **__: texts.append(text))
    code, out, _ = run_cli(capsys, "bench", "--quick", "--presets", "mini", "--batch-sizes", "4", "--threads", "1")
    assert code == 0
    names = ("empty call", "layer norm", "AdamW", "copy")
    lines = {name: line for line in out.splitlines() for name in names if line.startswith(name)}
    assert lines.keys() == set(names)
    assert all(float(line.split()[-1].replace(",", "")) > 0 for line in lines.values())  # GB/s
    roofs = next(text for text in texts if "fastest matmul" in text)
    assert all(f"{name}: " in roofs for name in names)


# Crossover.


def compared(cpu, mps, noise=0.0, sizes=(4, 16, 64, 256)):
    """Rows of two devices whose steps take (constant, per pair) ms."""
    rows = []
    for size in sizes:
        for plan, (constant, slope) in ((Plan("cpu"), cpu), (Plan("mps"), mps)):
            ms = constant + slope * size
            rows.append(step_row(plan, ms, size, samples_ms=[ms * (1 + noise * k) for k in (-2, -1, 0, 1, 2)]))
    return rows


def test_a_crossover_is_interpolated_between_the_significant_points_around_it():
    (crossover,) = report.crossovers(compared((0, 2), (60, 1), noise=0.01))  # equal at 60
    assert (crossover.first, crossover.second) == ("cpu", "mps")
    assert crossover.at == pytest.approx(60, rel=0.05)
    assert (crossover.low, crossover.high) == (16, 64)
    assert crossover.text == f"small: mps overtakes cpu at batch size {crossover.at:.0f} (between 16 and 64)"


def test_more_noise_widens_the_range_of_the_crossover():
    """At 64 the devices are 3 % apart, which is not significant with this noise."""
    (crossover,) = report.crossovers(compared((0, 2), (60, 1), noise=0.05))
    assert (crossover.low, crossover.high) == (16, 256)


def test_without_a_crossover_the_range_of_the_speedup_is_reported():
    (crossover,) = report.crossovers(compared((0, 1), (50, 2)))
    assert crossover.at is None
    speedup = "cpu is 2.20x to 14.50x as fast as mps"
    assert crossover.text == f"small: no crossover from batch size 4 to 256; {speedup}"


def test_equal_devices_have_no_significant_crossover():
    rng, found = np.random.default_rng(0), []
    for _ in range(8):
        rows = compared((10, 1), (10, 1))
        noisy = [
            step_row(row.plan, 1, row.batch_size, samples_ms=list(row.step_ms * rng.normal(1, 0.08, 5))) for row in rows
        ]
        found += report.crossovers(noisy)
    assert all("no significant crossover" in crossover.text for crossover in found)


def test_two_batch_sizes_are_too_few_for_a_crossover():
    assert report.crossovers(compared((0, 2), (60, 1), sizes=(4, 256))) == []


def test_a_crossover_can_be_along_the_model_size():
    rows = []
    for name, parameters, cpu_ms, mps_ms in (("a", 10**6, 10, 30), ("b", 10**7, 100, 90), ("c", 10**8, 1000, 270)):
        for plan, ms in ((Plan("cpu"), cpu_ms), (Plan("mps"), mps_ms)):
            rows.append(step_row(plan, ms, 4, model=name, preset=name, parameters=parameters))
    (crossover,) = report.crossovers(rows)
    assert 10**6 < crossover.at < 10**7
    assert crossover.text.startswith("batch size 4: mps overtakes cpu at parameters ")


def test_a_crossover_under_background_load_says_so():
    rows = [replace(row, background_load=0.5) for row in compared((0, 1), (50, 2))]
    assert report.crossovers(rows)[0].text.endswith(", under background load")


# Stored measurements.


def test_a_torn_line_does_not_lose_other_measurements(tmp_path):
    store = MeasurementStore(tmp_path)
    store.add("x", value=1)
    with open(store.path, "a") as file:
        file.write('\n{"kind": "x", "val')
    store.add("x", value=float("nan"))
    assert [row["value"] for row in store.rows("x")] == [1, None]
    assert len(store.rows("x", value=1)) == 1


def test_incomplete_step_rows_are_left_out(tmp_path):
    store, values = MeasurementStore(tmp_path), asdict(step_row())
    store.add("step", device="cpu")
    store.add("step", **{**values, "samples_ms": []})
    store.add("step", **values)
    assert len(store.steps()) == 1


def test_an_unwritable_cache_keeps_measurements_in_memory(tmp_path):
    (tmp_path / "file").write_text("")
    store = MeasurementStore(tmp_path / "file" / "folder")
    store.add("x", value=1)
    assert store.rows("x")[0]["value"] == 1
    assert "Not a directory" in store.write_error


def test_another_pytorch_version_is_another_machine(monkeypatch):
    first = open_store().folder
    monkeypatch.setattr(sensors, "torch_version", lambda: "9.9.9")
    assert open_store().folder != first


def test_background_load_is_the_cpu_time_of_other_programs(monkeypatch):
    """Ten seconds on four cores: 20 s of CPU time, of which 4 s are ours and 6 s our children's."""
    clock = SimpleNamespace(now=0.0, busy=100.0, own=(1.0, 1.0, 0.0, 0.0, 0.0))
    cpu_times = namedtuple("cpu_times", "user system idle")
    monkeypatch.setattr(sensors.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(psutil, "cpu_times", lambda: cpu_times(clock.busy, 0.0, 1e6 - clock.busy))
    monkeypatch.setattr(os, "times", lambda: clock.own)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    load = sensors.BackgroundLoad()
    clock.now, clock.busy, clock.own = 10.0, 120.0, (4.0, 2.0, 5.0, 1.0, 0.0)
    assert load.share() == 0.25


def test_the_cpu_time_of_the_machine_is_readable():
    assert 0 <= sensors.BackgroundLoad().share() <= 1


# bench.


def test_two_sweeps_at_once_are_refused(capsys):
    with sweep.open_session("bench", {}, False, open_store().folder):
        code, _, err = run_cli(capsys, "bench", "--presets", "mini", "--quick", "--no-operations")
    assert code == 1
    assert "another m1clip bench is running" in err


def test_an_interrupted_sweep_is_resumed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_sweep", lambda *_: tmp_path)
    arguments = ("bench", "--presets", "mini", "--batch-sizes", "4", "8", "--no-operations", *QUICK)
    real, timed = timing.time_plans, []

    def interrupted(config, *rest):
        timed.append(config.batch_size)
        if len(timed) == 2:
            raise KeyboardInterrupt
        return real(config, *rest)

    monkeypatch.setattr(timing, "time_plans", interrupted)
    assert run_cli(capsys, *arguments)[0] == 130
    steps = run_json(capsys, *arguments)["steps"]
    assert timed == [4, 8, 8]
    assert [row["batch_size"] for row in steps if row["plan"] == "cpu"] == [4, 8]
    run_cli(capsys, *arguments)  # a finished sweep starts again
    assert timed == [4, 8, 8, 4, 8]


def test_a_comparison_that_does_not_fit_into_memory_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(sensors, "available_gb", lambda: 0.001)
    arguments = ("bench", "--presets", "mini", "--batch-sizes", "4", "--no-operations", "--quick")
    code, out, _ = run_cli(capsys, *arguments)
    assert code == 0
    assert "skipped\n  mini, batch size 4: needs " in out


def test_bench_prints_tables_and_writes_a_page(capsys, tmp_path):
    sizes = ("--batch-sizes", "4", "8", "16")
    code, out, _ = run_cli(capsys, "bench", "--presets", "mini", *sizes, "--out", "here", *QUICK)
    assert code == 0
    for text in ("operations", "training steps", "vision=cpu,text=cpu", "MFU", "crossover", "advise --preset nano"):
        assert text in out
    files = {path.name for path in (tmp_path / "here").iterdir()}
    assert files == {"bench.md", "bench.html", "throughput.png", "roofline.png"}
    page = (tmp_path / "here" / "bench.html").read_text()
    assert page.count("data:image/png") == 2
    assert "http" not in page
    markdown = (tmp_path / "here" / "bench.md").read_text()
    assert "| mini | 4 | cpu |" in markdown
    phases = next(line for line in markdown.splitlines() if line.startswith("| mini | 4 | cpu |") and "%" in line)
    assert sum(int(cell.strip(" %")) for cell in phases.split("|") if "%" in cell) in (99, 100, 101)


def test_bench_compares_two_devices_and_their_placements(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_sweep", lambda *_: tmp_path)
    fake_gpu(monkeypatch)
    steps = run_json(capsys, "bench", "--presets", "mini", "--batch-sizes", "4", "--quick", "--no-operations")["steps"]
    assert {row["device"] for row in steps} == {"cpu", "mps", "vision=cpu,text=mps", "vision=mps,text=cpu"}


def test_bench_warns_about_background_load():
    rows = [step_row(background_load=load) for load in (0.0, 0.1, 0.3, 0.6)]
    (warning,) = report.load_warning([row.background_load for row in rows], "timings")
    assert "up to 60 % of the cores during 2 of 4 timings" in warning
    assert report.load_warning([0.0, 0.1], "timings") == []


def test_a_sweep_without_steps_is_still_a_page(tmp_path):
    row = {"session": "s", "operation": "matmul", "size": "64²", "device": "cpu", "precision": "fp32"}
    timed = sweep.time_operation(sweep.operations((64,))[1], "cpu", "fp32", 0.01)
    result = report.Sweep("s", sensors.machine(), [{**row, **timed}], [], ["large: needs 9 GB"], {})
    markdown = report.write_sweep(result, tmp_path).with_suffix(".md").read_text()
    assert "| matmul | 64² | cpu | fp32 |" in markdown
    assert "- large: needs 9 GB" in markdown


# bench scaling.


def test_scaling_times_what_fits_and_extrapolates_the_rest(capsys, monkeypatch, tmp_path, tiny):
    real = timing.step_cost

    def huge(config, *rest):
        step_cost = real(config, *rest)
        return replace(step_cost, parameters=10**12) if config.preset == "huge" else step_cost

    monkeypatch.setattr(timing, "step_cost", huge)
    for name in ("maxi", "huge"):
        monkeypatch.setitem(PRESETS, name, replace(get_preset("midi"), preset=name))
    presets = ("mini", "midi", "maxi", "huge")
    result = run_json(capsys, "bench", "scaling", "--presets", *presets, "--out", "here", "--pairs", "1000")
    *small, largest = result["models"]
    assert [model["first_ms"] > 0 for model in small] == [True, True, True]
    assert (largest["preset"], largest["first_ms"], largest["pair_ms"]) == ("huge", None, {})
    assert largest["range_ms"][1] < largest["range_ms"][0] < largest["range_ms"][2]
    assert largest["memory_gb"] > 16_000
    assert result["skipped"][0].startswith("huge, batch size 4: needs ")
    assert "- huge, batch size 4: needs" in (tmp_path / "here" / "scaling.md").read_text()
    assert (tmp_path / "here" / "scaling.png").is_file()


# advise.


def test_advise_uses_the_timings_of_bench(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "write_sweep", lambda *_: tmp_path)
    run_cli(capsys, "bench", "--presets", "mini", "--batch-sizes", "4", "16", "--no-operations", *QUICK)
    code, out, err = run_cli(capsys, "advise", "--preset", "mini", "--batch-size", "16", "--no-measure")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()[2:] if line and line[0].isalpha()]
    assert names[:5] == ["plan", "chunk", "memory", "step", "epoch"]
    assert "measured on" in out
    assert "train --preset mini --batch-size 16 --device cpu --precision fp32" in out
    advice = run_json(capsys, "advise", "--preset", "mini", "--batch-size", "64", "--no-measure")
    assert advice["step"]["basis"] == "extrapolated from batch sizes 4 to 16"


def test_advise_times_a_model_that_was_not_measured(capsys, monkeypatch):
    code, out, _ = run_cli(capsys, "advise", "--preset", "mini", "--batch-size", "8")
    assert code == 0
    assert "measured on" in out
    monkeypatch.setattr(timing, "time_plans", lambda *_: pytest.fail("timed again"))
    assert run_cli(capsys, "advise", "--preset", "mini", "--batch-size", "8")[0] == 0


def test_advise_without_measurements_says_how_to_measure(capsys):
    code, out, _ = run_cli(capsys, "advise", "--preset", "mini", "--batch-size", "8", "--no-measure")
    assert code == 0
    assert "bench --presets mini --batch-sizes 8" in out


def test_advise_and_bench_agree_on_what_is_significant(capsys, monkeypatch):
    """A 5x speed-up under background load: bench reports it with the load, advise rejects it for the load."""
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    store, config = open_store(), get_preset("mini")
    step_cost = timing.step_cost(config, 32, 24, store)
    rows = []
    for size in (8, 16, 32):
        for plan, ms in ((Plan("cpu"), 500.0), (Plan("cpu", threads=1), 100.0)):
            row = step_row(plan, ms, size, model=step_cost.model_id, gflop=step_cost.gflop, background_load=0.5)
            rows.append(row)
            store.add("step", **{key: value for key, value in asdict(row).items() if key != "time"})
    (crossover,) = report.crossovers(rows)
    assert "no crossover" in crossover.text
    assert crossover.text.endswith("5.00x as fast as cpu, under background load")
    advice = run_json(capsys, "advise", "--preset", "mini", "--batch-size", "32", "--no-measure")
    assert advice["plan"]["threads"] == 0
    assert advice["rejected"]["cpu, 1 thread"].endswith("measured under background load")


# compare.


def test_compare_reports_speedups_and_loss_differences_with_the_background_load(
    capsys, monkeypatch, tmp_path, tiny_run
):
    """Two runs trained in this process instead of subprocesses; the second one beside other programs."""
    loads = iter([0.0, 0.6])
    monkeypatch.setattr(sensors.BackgroundLoad, "share", lambda self: next(loads))

    def run_m1clip(command, *arguments):
        if command == "report":
            return SimpleNamespace(stdout=json.dumps({"html": "page.html"}))
        options = dict(zip(arguments[::2], arguments[1::2], strict=False))
        path = options["--runs"] / options["--name"]
        result = train_run(replace(tiny_run, device=options["--device"], steps=6), path)
        return SimpleNamespace(returncode=0, stdout=json.dumps(result.record()))

    monkeypatch.setattr(compare, "run_m1clip", run_m1clip)
    (tmp_path / "c.json").write_text(to_json(replace(tiny_run, device="auto")))
    arguments = ("compare", "--on", "cpu", "vision=cpu,text=cpu", "--config", "c.json")
    code, out, _ = run_cli(capsys, *arguments)
    assert code == 0
    assert "up to 60 % of the cores during 1 of 2 runs; repeat on an idle machine" in out
    loads = iter([0.0, 0.0])
    result = run_json(capsys, *arguments)
    plain, split = result["runs"]
    assert (plain["speedup"], plain["max_loss_difference"]) == (1, 0)
    assert split["max_loss_difference"] < 1e-3
    assert split["speedup"] == pytest.approx(plain["step_ms"] / split["step_ms"])
    assert result["warnings"] == []


@pytest.mark.slow
def test_compare_trains_on_each_device_in_a_process(tmp_path, tiny_run):
    config = replace(tiny_run, device="auto", data="synthetic:40", val_size=8)
    (tmp_path / "c.json").write_text(to_json(config))
    arguments = ("--on", "cpu", "vision=cpu,text=cpu", "--config", "c.json", "--steps", "6", "--threads", "1")
    command = [sys.executable, "-m", "m1clip", "compare", *arguments, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    plain, split = result["runs"]
    assert (plain["max_loss_difference"], split["device"]) == (0, "vision=cpu,text=cpu")
    assert 0 <= plain["mean_r1"] <= 1
    assert Run(tmp_path / "runs" / "compare-1" / "cpu").read("config.json")["steps"] == 6
    assert (tmp_path / result["page"]).is_file()


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "--presets", "nanno"), "did you mean nano"),
        (("bench", "--batch-sizes", "1"), "--batch-sizes must be 2 to 1,000,000, not 1"),
        (("bench", "--threads", "100000"), "--threads must be 1 to 1,024, not 100000"),
        (("bench", "--devices", "gpu"), "no device 'gpu'"),
        (("bench", "scaling", "--devices", "vision=cpu,text=cpu"), "--devices takes single devices here"),
        (("bench", "scaling", "--devices", "gpu"), "no device 'gpu'"),
        (("bench", "scaling", "--pairs", "0"), "--pairs must be at least 1"),
        (("advise", "--batch-size", "20000"), "--batch-size 20,000 is larger than --pairs 12,000"),
        (("advise", "--preset", "huge"), "no preset 'huge'"),
        (("advise", "--batch-size", "1"), "batch_size must be at least 2"),
        (("train", "--device", ""), "no device ''"),
        (("compare", "--device", "cpu"), "from --on"),
        (("compare", "--on", "cpu", "cpu"), "--on names a device twice"),
        (("compare", "--on", "vision=cpu"), "a placement is"),
        (("doctor", "--preset", "x"), "no preset 'x'"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_exit_code_2(capsys, arguments, message):
    code, out, err = run_cli(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# doctor.


def test_doctor_checks_the_machine_and_its_devices(capsys):
    code, out, _ = run_cli(capsys, "doctor", "--preset", "mini", "--json")
    result = json.loads(out)
    names = {check["name"] for check in result["checks"]}
    assert {"python", "torch", "memory", "disk", "power", "heat", "load", "threads", "measurements"} <= names
    assert all(check["status"] in ("ok", "warn", "fail") for check in result["checks"])
    assert code == int(not result["ok"]) == int(any(check["status"] == "fail" for check in result["checks"]))


def test_doctor_knows_every_extra():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert doctor.EXTRAS.keys() == project["optional-dependencies"].keys() - {"bench", "dev"}
    (text,) = (text for name, _, text in doctor.check_versions() if name == "extras")
    assert all(re.search(rf"\b{extra}\b", text) for extra in doctor.EXTRAS)


def test_doctor_catches_a_device_with_wrong_gradients(capsys, monkeypatch):
    fake_gpu(monkeypatch, "text.blocks.1.mlp.activation", "backward")
    code, out, _ = run_cli(capsys, "doctor", "--preset", "mini")
    assert code == 1
    assert "the input gradient of text.blocks.1.mlp.activation differs" in " ".join(out.split())
    assert "use --device cpu" in out


def status_of(name):
    checks = itertools.chain(doctor.check_versions(), doctor.check_machine())
    return next(status for check, status, _ in checks if check == name)


@pytest.mark.parametrize(
    ("name", "patched", "status", "remedy"),
    [
        ("memory", {"available_gb": lambda: 1.0}, "fail", "close other programs"),
        ("heat", {"temperature_c": lambda: 97.0}, "warn", "cool down"),
        ("heat", {"temperature_c": lambda: None, "speed_limit": lambda: 60}, "warn", "cool down"),
    ],
)
def test_a_problem_comes_with_a_remedy(monkeypatch, name, patched, status, remedy):
    for function, value in patched.items():
        monkeypatch.setattr(sensors, function, value)
    assert status_of(name) == status
    assert remedy in doctor.REMEDIES[name]


@pytest.mark.parametrize(
    ("version", "status"), [("2.8.0", "fail"), ("2.7.1", "fail"), ("2.13.0", "warn"), ("2.15.0", "ok")]
)
def test_pytorch_versions_with_known_bugs_are_reported_on_a_mac(monkeypatch, version, status):
    monkeypatch.setattr(sensors, "torch_version", lambda: version)
    monkeypatch.setattr(sensors, "chip", lambda: "Apple M1")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert status_of("torch") == status


@pytest.mark.parametrize(("plugged", "status"), [(False, "warn"), (True, "ok")])
def test_running_on_battery_is_a_warning(monkeypatch, plugged, status):
    battery = SimpleNamespace(percent=80, power_plugged=plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    assert status_of("power") == status
