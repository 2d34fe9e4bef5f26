"""What a run records: step metrics, diagnostics, evaluations, epochs, events, sensors and trackers."""

import json
import math
import sys
import time
from dataclasses import make_dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from helpers import QuietConsole, make_state, random_pairs, train_run
from m1clip import sensors
from m1clip.evals.embeddings import effective_rank, embedding_statistics, uniformity
from m1clip.model.towers import VisionTransformer
from m1clip.run import Run
from m1clip.training import logger
from m1clip.training.diagnose import WINDOW, History, diagnose, few_negatives
from m1clip.training.logger import PHASES, StepMetrics, norms_by_block
from photos import write_photos


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[dict]:
    """Every line of metrics.jsonl of a small run, read as strict JSON."""
    from conftest import tiny_config, tiny_run_config

    path = tmp_path_factory.mktemp("records") / "r"
    train_run(replace(tiny_run_config(tiny_config()), epochs=3, log_every=1), path)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def of_kind(records: list[dict], kind: str) -> list[dict]:
    return [record for record in records if record["kind"] == kind]


def test_every_step_is_recorded_with_its_chance_level(records):
    steps = of_kind(records, "step")
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert {"loss", "i2t_accuracy", "t2i_accuracy", "temperature", "lr", "grad_norm"} <= steps[0].keys()
    assert steps[0]["chance_loss"] == pytest.approx(math.log(16))
    assert steps[0]["chance_accuracy"] == 1 / 16
    assert steps[0]["accuracy"] == (steps[0]["i2t_accuracy"] + steps[0]["t2i_accuracy"]) / 2
    times = [record["time"] for record in steps]
    assert times == sorted(times)


def test_the_phases_add_up_to_the_step(records):
    for record in of_kind(records, "step"):
        assert sum(record[f"{phase}_ms"] for phase in PHASES) == pytest.approx(record["step_ms"], abs=0.01)
        seconds = (record["step_ms"] + record["between_ms"]) / 1e3
        assert record["pairs_per_s"] == pytest.approx(16 / seconds, rel=1e-3)


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_step_times_are_those_of_the_clock_without_pauses(tiny_run, monkeypatch):
    """Each step waits 30 ms for data and has four phases of 5 ms; 2 ms pass between steps, evaluations pause."""
    clock, batch = Clock(monkeypatch), random_pairs(16)
    metrics = StepMetrics(tiny_run, torch.device("cpu"))

    def slow_batches():
        for _ in range(6):
            clock.now += 0.03
            yield batch

    for step, _ in enumerate(metrics.timed(slow_batches()), 1):
        for phase in PHASES[1:]:
            clock.now += 0.005
            metrics.mark(phase)
        metrics.add(step, 1e-3, torch.ones(5), batch, 16)
        clock.now += 0.002
        if step % 2 == 0:
            metrics.read()
            with metrics.paused():
                clock.now += 7.0
    means = metrics.epoch_means()
    assert means["data_ms"] == pytest.approx(30)
    assert means["forward_ms"] == pytest.approx(5)
    assert means["step_ms"] == pytest.approx(50)
    assert means["seconds"] == pytest.approx(0.31)  # 6 steps, and the 5 times between them
    assert means["pairs_per_s"] == pytest.approx(6 * 16 / 0.31, rel=1e-3)


def test_diagnostics_have_norms_by_block_and_the_state_of_the_machine(records):
    first, second = of_kind(records, "diagnostics")
    assert (first["step"], second["step"]) == (5, 10)
    blocks = {f"{tower}.blocks.{i}" for tower in ("vision", "text") for i in range(2)}
    for norms in (first["grad_norms"], first["weight_norms"]):
        assert blocks | {"vision.patch", "text.token", "vision_projection", "logit_scale"} <= norms.keys()
        assert all(norm > 0 for norm in norms.values())
    total = math.sqrt(sum(norm**2 for norm in first["grad_norms"].values()))
    assert total == pytest.approx(of_kind(records, "step")[4]["grad_norm"], rel=1e-3)  # before clipping
    assert first["rss_gb"] > 0.1
    assert len(first["cpu_percent"]) >= 1
    assert {"temperature_c", "power_w", "joules", "swap_used_gb", "disk_free_gb", "peak_rss_gb"} <= first.keys()


def test_diagnostics_name_the_parts_of_memory(records):
    parts = of_kind(records, "diagnostics")[0]["memory_gb"]
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    assert parts["gradients"] == parts["parameters"]
    assert parts["activations"] > parts["batch"] > 0
    assert parts["ema"] == 0
    assert parts["libraries"] > 0.1


def test_evaluations_come_with_chance_and_embedding_statistics(records):
    evals = of_kind(records, "eval")
    assert [record["epoch"] for record in evals] == [1, 2, 3]
    assert evals[-1]["chance_r1"] == 1 / 16
    assert 0 < evals[-1]["alignment"] < 4
    assert 1 <= evals[-1]["effective_rank_text"] <= 24


def test_epochs_have_the_means_of_their_steps_and_unknown_energy_is_none(records):
    epoch, steps = of_kind(records, "epoch")[-1], of_kind(records, "step")[-4:]
    for key in ("loss", "accuracy", "step_ms", "forward_ms"):
        assert epoch[key] == pytest.approx(sum(record[key] for record in steps) / 4)
    seconds = sum(record["step_ms"] + record["between_ms"] for record in steps) / 1e3
    assert epoch["seconds"] == pytest.approx(seconds, abs=0.01)
    if not sensors.EnergyMeter().counters:
        assert (epoch["joules"], epoch["wh_so_far"], epoch["mean_r1_per_wh"]) == (None, None, None)


class FakeMeter:
    """10 J more at every reading."""

    def __init__(self):
        self.total = 0.0

    def joules(self):
        self.total += 10
        return self.total


def test_energy_is_recorded_per_epoch_and_in_total(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sensors, "EnergyMeter", FakeMeter)
    train_run(replace(tiny_run, epochs=3), tmp_path / "r")
    epochs, evals = (list(Run(tmp_path / "r").records(kind)) for kind in ("epoch", "eval"))
    totals = [epoch["wh_so_far"] for epoch in epochs]
    assert all(epoch["joules"] > 0 for epoch in epochs)
    assert totals == sorted(totals)
    assert sum(epoch["joules"] for epoch in epochs) >= 3600 * totals[-1]
    for epoch, evaluation in zip(epochs, evals, strict=True):
        assert epoch["mean_r1_per_wh"] == pytest.approx(evaluation["mean_r1"] / epoch["wh_so_far"])


def test_total_energy_is_unknown_if_one_session_was_not_measured(tiny_run, tmp_path, monkeypatch):
    if sensors.EnergyMeter().counters:
        pytest.skip("this machine measures energy")
    train_run(tiny_run, tmp_path / "r", stop_at=2)
    monkeypatch.setattr(sensors, "EnergyMeter", FakeMeter)
    train_run(tiny_run, tmp_path / "r")
    *_, last = Run(tmp_path / "r").records("epoch")
    assert last["wh_so_far"] is None
    assert last["joules"] > 0  # the last epoch began in the measured session


def test_embedding_statistics_of_known_distributions():
    torch.manual_seed(0)
    spread = torch.nn.functional.normalize(torch.randn(400, 32), dim=1)
    assert embedding_statistics(spread, spread)["alignment"] == 0
    assert uniformity(spread) < -3.5
    assert effective_rank(spread) > 28
    collapsed = spread[:1].expand(400, 32)
    assert uniformity(collapsed) == pytest.approx(0)
    assert effective_rank(collapsed) == 0
    line = torch.nn.functional.normalize(torch.randn(400, 1) * spread[:1], dim=1)
    assert effective_rank(line) == pytest.approx(1, abs=0.01)
    opposite = embedding_statistics(collapsed, -collapsed)
    assert opposite["modality_gap"] == pytest.approx(2)
    assert opposite["alignment"] == pytest.approx(4)


def test_norms_by_block_are_sums_of_squares(tiny_run):
    state = make_state(tiny_run)
    for weight in state.weights.values():
        weight.grad = torch.full_like(weight, 2.0)
    state.weights["logit_scale"].grad = None
    gradients, weights = norms_by_block(state)
    block = [weight for name, weight in state.weights.items() if name.startswith("text.blocks.1.")]
    assert gradients["text.blocks.1"] == pytest.approx(2 * math.sqrt(sum(weight.numel() for weight in block)))
    assert weights["text.blocks.1"] == pytest.approx(torch.cat([w.flatten() for w in block]).norm().item())
    assert gradients["logit_scale"] == 0


def step_records(count: int, start: int = 0, **values) -> list[dict]:
    normal = {
        **{"loss": 2.0, "chance_loss": math.log(256), "accuracy": 0.5, "chance_accuracy": 1 / 256},
        **{"temperature": 0.07, "data_ms": 0.0, "step_ms": 100.0, "image_size": 64, "chunk": 256},
    }
    return [{"step": start + i + 1, **normal, **values} for i in range(count)]


DIAGNOSTICS = {"grad_norms": {"vision.blocks.0": 1.0}, "swapped_out_gb": 0.0, "swap_used_gb": 0.0}


def history(steps: list[dict] | None = None, total: int = 600, **records) -> History:
    made = History(total, **records)
    made.add_steps(steps or [])
    return made


def evals(*scores: float) -> list[dict]:
    return [{"mean_r1": score, "images": 1000} for score in scores]


def epochs(*accuracies: float) -> list[dict]:
    return [{"accuracy": accuracy} for accuracy in accuracies]


THROTTLED = step_records(120) + step_records(60, 120, step_ms=150.0)
PROBLEMS = {
    "loss at chance": (history(step_records(60, loss=5.55, accuracy=0.004)), "5.550, chance 5.545"),
    "accuracy at chance": (history(step_records(60, loss=5.0, accuracy=0.004)), "0.40%, chance is 0.39%"),
    "temperature rising": (history(step_records(30) + step_records(30, 30, temperature=0.12)), "from 0.0700 to 0.1200"),
    "waiting for data": (history(step_records(60, data_ms=15.0)), "15% of the step time"),
    "throttling": (history(THROTTLED), "1.5 times slower (100 ms at best, now 150 ms)"),
    "swapping": (history(diagnostics=[DIAGNOSTICS, {**DIAGNOSTICS, "swapped_out_gb": 0.6}]), "0.6 GB written"),
    "dead gradients": (
        history(diagnostics=[{**DIAGNOSTICS, "grad_norms": {"a": 1.0, "b": 0.0}}]),
        "no gradient reaches b:",
    ),
    "overfitting": (
        history(evals=evals(0.5, 0.6, 0.55, 0.5), epochs=epochs(0.5, 0.6, 0.7, 0.8)),
        "from 60.0% to 50.0%",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_known_problem_is_found_alone_and_described_with_its_numbers(problem):
    seen, sentence = PROBLEMS[problem]
    findings = diagnose(seen)
    assert list(findings) == [problem]
    assert sentence in findings[problem]


def test_throttling_compares_steps_of_the_same_chunk_and_without_data_waits():
    halved = step_records(120) + step_records(60, 120, step_ms=150.0, chunk=128)
    assert "throttling" not in diagnose(history(halved))
    waiting = step_records(120) + step_records(60, 120, step_ms=150.0, data_ms=50.0)
    assert list(diagnose(history(waiting))) == ["waiting for data"]


def test_a_healthy_run_has_no_findings():
    healthy = history(
        step_records(300, temperature=0.06, data_ms=1.0),
        evals=evals(0.5, 0.6, 0.59),
        epochs=epochs(0.5, 0.6, 0.7),
        diagnostics=[DIAGNOSTICS, DIAGNOSTICS],
    )
    assert diagnose(healthy) == {}


def test_nothing_is_said_about_learning_during_the_warm_up():
    assert diagnose(history(step_records(60, loss=5.55, accuracy=0.004), total=6000)) == {}


def test_a_history_keeps_the_first_temperature_and_the_last_few_thousand_steps():
    long = History(10**6)
    for start in range(0, 100 * WINDOW, WINDOW):
        long.add_steps(step_records(WINDOW, start, temperature=0.07 + start))
    long.add_steps([{**step_records(1)[0], "skipped": True}])
    assert long.first_temperature == 0.07
    assert 40 * WINDOW <= len(long.steps) <= 80 * WINDOW
    assert long.steps[-1]["step"] == 100 * WINDOW


def test_a_run_reports_each_problem_once(tiny_run, tmp_path):
    console = QuietConsole()
    train_run(replace(tiny_run, epochs=20, lr=1e-9), tmp_path / "r", console=console)
    events = [record for record in Run(tmp_path / "r").records("event") if record["event"] == "diagnosis"]
    assert any("at chance" in record["about"] for record in events)
    assert [f"{record['about']}: {record['text']}" for record in events] == console.warnings
    assert len({record["about"] for record in events}) == len(events)


def test_a_non_finite_image_with_several_captions_is_named_and_its_step_skipped(tiny_run, tmp_path, monkeypatch):
    forward = VisionTransformer.forward

    def with_nan(self, pixels_BCHW, key_B=None):
        features_BD = forward(self, pixels_BCHW, key_B)
        broken_B = torch.arange(len(features_BD)) == 3
        return features_BD.masked_fill(broken_B[:, None], torch.nan) if key_B is not None else features_BD

    monkeypatch.setattr(VisionTransformer, "forward", with_nan)
    result = train_run(replace(tiny_run, captions_per_image=2, steps=2), tmp_path / "r")
    skipped = [record for record in Run(tmp_path / "r").records("event") if record["event"] == "skipped"]
    assert result.finished
    assert [record["step"] for record in skipped] == [1, 2]
    assert all(len(record["names"]) == 1 and len(record["rows"]) == 16 for record in skipped)


class FakeChip:
    """A counter of zeus whose fields are named like those of Apple silicon."""

    fields = ("cpu_total_mj", "performance_cores_mj", "gpu_mj", "ane_mj")

    def __init__(self):
        self.millijoules, self.reading = 1000.0, make_dataclass("Reading", self.fields)

    def get_total_energy_consumption(self):
        self.millijoules += 500
        return self.reading(self.millijoules, [1.0, 2.0], 2 * self.millijoules, None)


def test_energy_is_the_sum_of_a_chips_parts_and_none_without_a_counter(monkeypatch):
    chip, missing = FakeChip(), type("MissingError", (Exception,), {})

    def absent():
        raise missing

    device = ModuleType("zeus.device")
    device.get_soc, device.get_cpus, device.get_gpus = lambda: chip, absent, absent
    modules = {"zeus": ModuleType("zeus"), "zeus.device": device}
    modules["zeus.device.exception"] = SimpleNamespace(ZeusBaseError=missing)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert sensors.EnergyMeter().joules() == pytest.approx(1.5)  # 500 mJ of the CPU and twice that of the GPU
    device.get_soc = absent
    assert sensors.EnergyMeter().joules() is None


def test_peak_memory_includes_what_was_freed_inside_the_block():
    deadline = time.monotonic() + 120
    with sensors.PeakMemory() as peak:
        large = torch.ones(50_000_000)
        while peak.gb < 0.15 and time.monotonic() < deadline:
            time.sleep(0.002)
        del large
    assert 0.15 <= peak.gb < 0.4


def test_available_memory_respects_the_limit_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(sensors, "CGROUP", tmp_path)
    monkeypatch.setattr(sensors.psutil, "virtual_memory", lambda: SimpleNamespace(available=8_000_000_000))
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert sensors.available_gb() == 2.0
    (tmp_path / "memory.max").write_text("max\n")
    assert sensors.available_gb() == 8.0


def test_tensorboard_has_the_numbers_of_the_log(tiny_run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_run(replace(tiny_run, track="tensorboard", log_every=1), tmp_path / "r")
    events = reader.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    run, tracked = Run(tmp_path / "r"), {event.step: event.value for event in events.Scalars("step/loss")}
    assert tracked == pytest.approx({record["step"]: record["loss"] for record in run.records("step")})
    assert "diagnostics/grad_norms/vision.blocks.0" in events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("eval/mean_r1")] == pytest.approx(
        [record["mean_r1"] for record in run.records("eval")]
    )


class CrashingConsole(QuietConsole):
    def update_training(self, step, records, total):
        super().update_training(step, records, total)
        if step == 5:
            raise RuntimeError("crash")


def test_steps_repeated_after_a_crash_replace_the_old_ones_in_tensorboard(tiny_run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = replace(tiny_run, track="tensorboard", log_every=1, save_every="3")
    with pytest.raises(RuntimeError, match="crash"):
        train_run(config, tmp_path / "r", console=CrashingConsole())
    train_run(config, tmp_path / "r")
    events = reader.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    losses = [record["loss"] for record in Run(tmp_path / "r").records("step")]
    assert [event.step for event in events.Scalars("step/loss")] == list(range(1, 9))
    assert [event.value for event in events.Scalars("step/loss")] == pytest.approx(losses)


def test_wandb_stores_the_records_offline(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_run(replace(tiny_run, track="wandb"), tmp_path / "r")
    (stored,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert b"step/loss" in content
    assert b"eval/mean_r1" in content


def test_a_failing_tracker_is_dropped_and_training_continues(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    steps = []

    def open_broken(run, config, step):
        def send(values, step):
            steps.append(step)
            raise ConnectionError("the service is gone")

        return send, lambda: None

    monkeypatch.setitem(logger.TRACKERS, "tensorboard", open_broken)
    console = QuietConsole()
    assert train_run(replace(tiny_run, track="tensorboard"), tmp_path / "r", console=console).finished
    assert steps == [1]
    assert console.warnings == ["tensorboard failed and is no longer used: the service is gone"]


def test_a_missing_tracker_is_refused_with_the_extra_to_install(monkeypatch):
    monkeypatch.setattr(logger, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'm1clip\[wandb\]'"):
        logger.check_tracker("wandb")


@pytest.fixture
def equal_captions(tmp_path) -> str:
    names = write_photos(tmp_path / "photos", 24)
    rows = "".join(f"photos/{name},a photo\n" for name in names)
    (tmp_path / "equal.csv").write_text("image,caption\n" + rows)
    return str(tmp_path / "equal.csv")


@pytest.mark.parametrize("steps", [1, 0])
def test_a_run_without_negatives_says_so_and_has_no_accuracy(tiny_run, equal_captions, tmp_path, steps):
    config = replace(tiny_run, data=equal_captions, val_size=4, batch_size=8, epochs=1, steps=steps)
    console, run = QuietConsole(), Run(tmp_path / "r")
    train_run(config, run.path, console=console)
    assert [text for text in console.warnings if text.startswith("no negatives: no pair has a negative")]
    for record in (*run.records("step"), *run.records("epoch")):
        assert (record["accuracy"], record["chance_accuracy"]) == (None, None)
    assert [record["without_negative"] for record in run.records("step")] == [1.0] * (steps or 2)
    assert "100.0 %" not in console.console.file.stream.getvalue()
    assert [event["about"] for event in run.records("event") if event["event"] == "diagnosis"] == ["no negatives"]


def test_few_negatives_are_reported_with_their_fractions():
    masked = {"masked_negatives": 0.8, "without_negative": 0.25}
    found = few_negatives(step_records(3, **masked))
    assert "80% of the negatives are left out" in found["few negatives"]
    assert "25% of the pairs have no negative" in found["few negatives"]
    assert few_negatives(step_records(3, masked_negatives=0.49)) == few_negatives(step_records(3)) == {}


def test_records_of_an_earlier_session_may_lack_anything(tiny_run):
    metrics = StepMetrics(tiny_run, torch.device("cpu"))
    metrics.epoch_steps = [{"step": 1}, {"step": 2, "loss": "x", "step_ms": [], "between_ms": 10**400}]
    metrics.epoch_steps += [{"step": 3, "loss": 2.0, "step_ms": 100.0, "between_ms": 0.0}]
    means = metrics.epoch_means()
    assert (means["loss"], means["seconds"], means["accuracy"]) == (2.0, 0.1, None)
