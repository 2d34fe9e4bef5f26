"""What a run tells about itself: steps, looks inside, scores, epochs, findings, trackers."""

import json
import math
import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from helpers import QuietConsole, make_state, random_pairs, train_run
from m1clip import run as runs
from m1clip import sensors
from m1clip.evals.health import effective_rank, health, uniformity
from m1clip.training import logger, trackers
from m1clip.training.diagnose import History, diagnose
from m1clip.training.metrics import PHASES, StepMetrics


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Every line of a small run, read as a stranger would: nothing but JSON."""
    from conftest import tiny_config, tiny_run_config

    path = tmp_path_factory.mktemp("told") / "r"
    train_run(replace(tiny_run_config(tiny_config()), epochs=3), path)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=pytest.fail) for line in lines]


def of_kind(told, kind):
    return [row for row in told if row["kind"] == kind]


def test_every_step_is_told_with_its_chance_and_phases(told):
    steps = of_kind(told, "step")
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert {"loss", "i2t_accuracy", "t2i_accuracy", "temperature", "lr", "grad_norm"} <= steps[0].keys()
    assert steps[0]["chance_loss"] == pytest.approx(math.log(16))
    assert steps[0]["chance_accuracy"] == 1 / 16
    assert steps[0]["accuracy"] == (steps[0]["i2t_accuracy"] + steps[0]["t2i_accuracy"]) / 2
    times = [row["time"] for row in steps]
    assert times == sorted(times)


def test_the_phases_add_up_to_the_step(told):
    for row in of_kind(told, "step"):
        assert sum(row[f"{phase}_ms"] for phase in PHASES) == pytest.approx(row["step_ms"], rel=0.03)
        assert row["pairs_per_s"] == pytest.approx(16e3 / (row["step_ms"] + row["between_ms"]), rel=0.01)


def test_the_steps_add_up_to_the_clock(tiny_run):
    """Waiting, working and pausing of known length: what is told is what a clock outside has seen."""
    metrics, batch = StepMetrics(tiny_run, torch.device("cpu")), random_pairs(16)
    spent = {"waiting": 0.0, "working": 0.0, "pausing": 0.0}  # sleep may take longer than it was asked to

    def sleep(seconds, what):
        began = time.perf_counter()
        time.sleep(seconds)
        spent[what] += time.perf_counter() - began

    def slow_batches():
        for _ in range(6):
            sleep(0.03, "waiting")
            yield batch

    began = time.perf_counter()
    for step, _ in enumerate(metrics.timed(slow_batches()), 1):
        for phase in PHASES[1:]:
            sleep(0.005, "working")
            metrics.mark(phase)
        metrics.add(step, 1e-3, torch.ones(5), batch, 16)
        if step % 2 == 0:
            metrics.read()
            with metrics.paused():
                sleep(0.05, "pausing")
    told = metrics.epoch()
    assert told["seconds"] == pytest.approx(time.perf_counter() - began - spent["pausing"], rel=0.1)
    assert told["data_ms"] == pytest.approx(1e3 * spent["waiting"] / 6, rel=0.1)
    assert told["step_ms"] == pytest.approx(1e3 * (spent["waiting"] + spent["working"]) / 6, rel=0.1)


def test_a_look_inside_has_norms_by_block_health_memory_and_the_machine(told):
    look = of_kind(told, "logger")[0]
    assert look["step"] == 5
    blocks = {f"{tower}.blocks.{i}" for tower in ("vision", "text") for i in range(2)}
    for norms in (look["grad_norms"], look["weight_norms"]):
        assert blocks | {"vision.patch", "text.token", "vision_projection", "logit_scale"} <= norms.keys()
        assert all(norm > 0 for norm in norms.values())
    whole = math.sqrt(sum(norm**2 for norm in look["grad_norms"].values()))
    assert whole == pytest.approx(of_kind(told, "step")[4]["grad_norm"], rel=1e-3)  # as before clipping
    memory = look["memory_gb"]
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["gradients"] == memory["parameters"]
    assert memory["activations"] > memory["data"] > 0
    assert look["rss_gb"] > 0.1
    assert len(look["cpu_percent"]) >= 1
    assert {"temperature_c", "power_w", "joules", "swap_used_gb", "disk_free_gb", "peak_rss_gb"} <= look.keys()


def test_scores_come_with_the_health_of_the_val_embeddings_and_epochs_with_energy(told):
    score, epoch = of_kind(told, "eval")[-1], of_kind(told, "epoch")[-1]
    assert score["chance_r1"] == 1 / 16
    assert 0 < score["alignment"] < 4
    assert 1 <= score["effective_rank_text"] <= 24
    assert {"joules", "wh_so_far", "mean_r1_per_wh", "seconds", "loss", "forward_ms"} <= epoch.keys()
    last = of_kind(told, "step")[-4:]
    assert epoch["loss"] == pytest.approx(sum(row["loss"] for row in last) / 4)


def test_health_of_known_spaces():
    torch.manual_seed(0)
    spread = torch.nn.functional.normalize(torch.randn(400, 32), dim=1)
    assert health(spread, spread)["alignment"] == 0
    assert uniformity(spread) < -3.5
    assert effective_rank(spread) > 28
    point = spread[:1].expand(400, 32)
    assert uniformity(point) == pytest.approx(0)
    assert effective_rank(point) == 0
    line = torch.nn.functional.normalize(torch.randn(400, 1) * spread[:1], dim=1)
    assert effective_rank(line) == pytest.approx(1, abs=0.01)
    apart = health(point, -point)
    assert apart["modality_gap"] == pytest.approx(2)
    assert apart["alignment"] == pytest.approx(4)


def test_norms_are_those_written_out(tiny_run):
    state = make_state(tiny_run)
    for weight in state.weights.values():
        weight.grad = torch.full_like(weight, 2.0)
    state.weights["logit_scale"].grad = None
    grads, weights = logger.norms(state)
    block = [weight for name, weight in state.weights.items() if name.startswith("text.blocks.1.")]
    assert grads["text.blocks.1"] == pytest.approx(2 * math.sqrt(sum(weight.numel() for weight in block)))
    assert weights["text.blocks.1"] == pytest.approx(torch.cat([w.flatten() for w in block]).norm().item())
    assert grads["logit_scale"] == 0


def rows(count: int, start: int = 0, **values) -> list[dict]:
    plain = {
        **{"loss": 2.0, "chance_loss": math.log(256), "accuracy": 0.5, "chance_accuracy": 1 / 256},
        **{"temperature": 0.07, "data_ms": 0.0, "step_ms": 100.0, "image_size": 64, "chunk": 256},
    }
    return [{"step": start + i + 1, **plain, **values} for i in range(count)]


LOOK = {"grad_norms": {"vision.blocks.0": 1.0}, "swapped_out_gb": 0.0, "swap_used_gb": 0.0}
EVAL = {"images": 1000}


@pytest.mark.parametrize(
    ("finding", "seen"),
    [
        ("loss at chance", {"steps": rows(60, loss=5.55, accuracy=0.004)}),
        ("accuracy at chance", {"steps": rows(60, loss=5.0, accuracy=0.004)}),
        ("temperature rising", {"steps": rows(30) + rows(30, 30, temperature=0.12)}),
        ("waiting for data", {"steps": rows(60, wait_ms=15.0)}),
        ("throttling", {"steps": rows(120) + rows(60, 120, step_ms=150.0)}),
        ("swapping", {"steps": [], "watches": [LOOK, {**LOOK, "swapped_out_gb": 0.6}]}),
        ("dead gradients", {"steps": [], "watches": [{**LOOK, "grad_norms": {"a": 1.0, "b": 0.0}}]}),
        (
            "overfitting",
            {
                "evals": [{"mean_r1": score, **EVAL} for score in (0.5, 0.6, 0.55, 0.5)],
                "epochs": [{"accuracy": part} for part in (0.5, 0.6, 0.7, 0.8)],
            },
        ),
    ],
)
def test_what_is_typically_wrong_is_said_once_it_is(finding, seen):
    history = History(600)
    history.add_steps(seen.pop("steps", []))
    for name, values in seen.items():
        setattr(history, name, values)
    assert list(diagnose(history)) == [finding]
    assert len(diagnose(history)[finding]) > 40


def test_a_healthy_run_has_no_findings():
    history = History(600, evals=[{"mean_r1": score, **EVAL} for score in (0.5, 0.6, 0.59)])
    history.epochs = [{"accuracy": part} for part in (0.5, 0.6, 0.7)]
    history.watches = [LOOK, LOOK]
    history.add_steps(rows(300, temperature=0.06, wait_ms=1.0))
    assert diagnose(history) == {}
    early = History(6000)
    early.add_steps(rows(60, loss=5.55, accuracy=0.004))
    assert diagnose(early) == {}  # still climbing to its rate


def test_a_run_says_what_is_wrong_and_writes_it_down(tiny_run, tmp_path):
    console = QuietConsole()
    stuck = replace(tiny_run, epochs=20, lr=1e-9)
    train_run(stuck, tmp_path / "r", console=console)
    events = [row for row in runs.Run(tmp_path / "r").records("event") if row["event"] == "diagnosis"]
    assert any("at chance" in row["about"] for row in events)
    assert any("at chance" in text for text in console.warnings)
    assert len({row["about"] for row in events}) == len(events)  # each once


class Chip:
    def __init__(self):
        self.mj = 1000.0

    def get_total_energy_consumption(self):
        self.mj += 500
        from zeus.device.soc import Measured

        return Measured(self.mj, [1.0, 2.0], 2 * self.mj, None)


def test_energy_is_the_sum_of_the_chips_parts_and_none_where_nothing_can_be_read(monkeypatch):
    """zeus reads the counters; here it is a stand-in with one chip whose fields are named as Apple's."""
    from dataclasses import make_dataclass

    fields = ("cpu_total_mj", "performance_cores_mj", "gpu_mj", "ane_mj")
    zeus, soc, chip = ModuleType("zeus.device"), ModuleType("zeus.device.soc"), Chip()
    soc.Measured = make_dataclass("Measured", fields)

    class MissingError(Exception):
        pass

    def absent():
        raise MissingError

    zeus.get_soc, zeus.get_cpus, zeus.get_gpus = lambda: chip, absent, absent
    fakes = {"zeus": ModuleType("zeus"), "zeus.device": zeus, "zeus.device.soc": soc}
    fakes["zeus.device.exception"] = SimpleNamespace(ZeusBaseError=MissingError)
    for name, module in fakes.items():
        monkeypatch.setitem(sys.modules, name, module)
    energy = sensors.EnergyMeter()
    assert energy.joules() == pytest.approx(1.5)  # 500 mJ of the CPU and twice that of the GPU
    zeus.get_soc = absent
    assert sensors.EnergyMeter().joules() is None


def test_peak_sees_memory_that_is_gone_again():
    with sensors.PeakMemory() as peak:
        big = torch.ones(50_000_000)
        time.sleep(0.02)
        del big
    assert 0.15 < peak.gb < 0.4


def test_a_containers_limit_is_the_memory_that_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(sensors, "CGROUP", tmp_path)
    everything = sensors.available_gb()
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    assert sensors.available_gb() == 2.0
    (tmp_path / "memory.max").write_text("max\n")
    assert sensors.available_gb() == pytest.approx(everything, rel=0.2)


def test_tensorboard_gets_the_same_numbers(tiny_run, tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_run(replace(tiny_run, track="tensorboard"), tmp_path / "r")
    events = reader.EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("step/loss")}
    run = runs.Run(tmp_path / "r")
    assert shown == pytest.approx({row["step"]: row["loss"] for row in run.records("step")})
    assert "logger/grad_norms/vision.blocks.0" in events.Tags()["scalars"]
    assert "eval/mean_r1" in events.Tags()["scalars"]


def test_wandb_takes_the_records_offline(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train_run(replace(tiny_run, track="wandb"), tmp_path / "r")
    (stored,) = (tmp_path / "r" / "wandb").glob("offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    assert b"step/loss" in content
    assert b"eval/mean_r1" in content


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tiny_run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    calls = []

    def broken(run, config, step):
        def send(values, step):
            calls.append(step)
            raise ConnectionError("the service is gone")

        return send, lambda: None

    monkeypatch.setitem(trackers.OPEN, "tensorboard", broken)
    console = QuietConsole()
    assert train_run(replace(tiny_run, track="tensorboard"), tmp_path / "r", console=console).finished
    assert len(calls) == 1
    assert any("the service is gone" in text for text in console.warnings)


def test_a_tracker_that_is_not_installed_is_refused_with_the_extra(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'm1clip\[wandb\]'"):
        trackers.require("wandb")


def test_telemetry_costs_less_than_a_hundredth_of_a_step(tiny_run, tmp_path):
    """All that a step pays for being told: stamps, its line, a share of the looks. Nano has 400 ms."""
    state, run = make_state(tiny_run), runs.create_run(tmp_path, "r", "x", False)
    metrics, batch = StepMetrics(tiny_run, torch.device("cpu")), random_pairs(16)
    image_BE, text_BE = (torch.nn.functional.normalize(torch.randn(256, 128), dim=1) for _ in range(2))
    for weight in state.weights.values():
        weight.grad = torch.ones_like(weight)
    began = time.perf_counter()
    for step in range(1, 101):
        for phase in ("start", *PHASES):
            metrics.mark(phase)
        metrics.add(step, 1e-3, torch.ones(5), batch, 16)
        if step % 10 == 0:
            for row in metrics.read():
                run.log("step", **row)
            run.write_status("running", step)
        if step % 50 == 0:
            run.log("logger", step, norms=logger.norms(state), **health(image_BE, text_BE))
            sensors.readings(tmp_path)
    assert (time.perf_counter() - began) / 100 < 0.004
