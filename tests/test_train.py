"""Training runs: what they write, when they evaluate and save, and that they resume exactly."""

import math
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch

from helpers import QuietConsole, train_run
from m1clip.config import get_preset, override
from m1clip.model.clip import load
from m1clip.run import Run
from m1clip.signals import StopSignal
from m1clip.training import checkpoint
from m1clip.training.optim import learning_rate
from m1clip.training.setup import prepare


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_folder_has_the_documented_files(tiny_run, tmp_path):
    result = train_run(tiny_run, tmp_path / "r")
    run = Run(tmp_path / "r")
    assert result.finished
    assert names(run.path) == {
        *("config.json", "data.json", "machine.json", "status.json", "metrics.jsonl", "retrievals.json"),
        *("checkpoints", "best", "last", "model"),
    }
    assert run.read("status.json")["state"] == "finished"
    assert "--device cpu" in run.read("machine.json")["why"]
    assert [record["step"] for record in run.records("step")] == list(range(1, 9))
    assert len(list(run.records("eval"))) == len(list(run.records("epoch"))) == 2
    assert load(run.path).encode_text("a cat").shape == (1, 24)


def test_every_step_is_logged_beside_its_chance(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "r")
    for record in Run(tmp_path / "r").records("step"):
        assert record["chance_loss"] == pytest.approx(math.log(16))
        assert record["chance_accuracy"] == 1 / 16
        assert 0 < record["loss"] < 6
        assert 0 <= record["accuracy"] <= 1
        assert min(record["temperature"], record["lr"], record["grad_norm"], record["pairs_per_s"]) > 0


def test_a_run_that_ends_within_an_epoch_is_evaluated_at_its_end(tiny_run, tmp_path):
    result = train_run(replace(tiny_run, steps=6), tmp_path / "r")
    run = Run(tmp_path / "r")
    evals = list(run.records("eval"))
    assert [(record["step"], record["epoch"]) for record in evals] == [(4, 1), (6, None)]
    assert result.scores.mean_r1 == evals[-1]["mean_r1"]
    assert run.read("status.json")["best_score"] == max(record["mean_r1"] for record in evals)
    assert run.read("retrievals.json")["step"] == 6


def test_a_run_learns(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=15, lr=3e-3), tmp_path / "r")
    records = list(Run(tmp_path / "r").records("epoch"))
    assert records[0]["loss"] > 2.3
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tiny_run, tmp_path):
    config = replace(tiny_run, crop_scale=0.6, color_jitter=0.2)
    train_run(config, tmp_path / "whole")
    stopped = train_run(config, tmp_path / "resumed", stop_at=4)
    assert (stopped.finished, stopped.scores, stopped.step) == (False, None, 5)  # within the second epoch
    assert train_run(config, tmp_path / "resumed").finished
    whole, resumed = (load(tmp_path / name).state_dict() for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tiny_run, tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_run(replace(tiny_run, seed=seed, epochs=1), tmp_path / name)
        weights.append(load(tmp_path / name).text_projection.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_sigmoid_loss_trains_its_bias(tiny_run, tmp_path):
    assert train_run(override(tiny_run, {"model.loss": "sigmoid"}), tmp_path / "r").finished
    assert load(tmp_path / "r").logit_bias.item() != -10


def test_a_batch_larger_than_the_data_is_refused_before_anything_is_written(tiny_run, tmp_path):
    config = replace(tiny_run, batch_size=65)
    with pytest.raises(ValueError, match="batch_size 65 is larger than the 64 training pairs"):
        prepare(config, {"batch_size": 65}, tmp_path / "runs", None, QuietConsole(), time.monotonic(), is_final=False)
    assert not list(tmp_path.iterdir())
    setup = prepare(config, {}, tmp_path / "runs", None, QuietConsole(), time.monotonic(), is_final=False)
    assert setup.config.batch_size == 64  # a default is adapted


def test_a_disk_without_room_for_checkpoints_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(OSError, match=r"1\.00 GB free; checkpoints need 5\.48 GB"):
        prepare(get_preset("vit-b16-char"), {}, tmp_path / "deep" / "runs", None, QuietConsole(), 0.0, is_final=False)
    assert not list(tmp_path.iterdir())


def test_data_that_has_changed_cannot_be_resumed(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "r", stop_at=2)
    with pytest.raises(ValueError, match=r"the data of .* has changed"):
        train_run(replace(tiny_run, seed=1), tmp_path / "r")


def test_the_learning_rate_warms_up_and_decays_to_zero():
    rates = [learning_rate(step, 100, peak=1.0, warmup=0.1) for step in range(101)]
    assert rates.index(max(rates)) == 10
    assert rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[55] == pytest.approx(0.5)  # cosine: half-way down
    assert rates[100] == pytest.approx(0, abs=1e-12)
    assert learning_rate(0, 100, peak=1.0, warmup=0.0) == 1.0


def test_checkpoints_are_saved_by_time(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "KEEP", 99)
    train_run(replace(tiny_run, save_every="0.000001s"), tmp_path / "r")
    assert names(tmp_path / "r" / "checkpoints") == {f"step_{step:06d}" for step in range(1, 9)}


def test_checkpoints_are_saved_by_steps_and_at_the_end(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "KEEP", 99)
    train_run(replace(tiny_run, save_every="3", eval_every=99), tmp_path / "r")
    assert names(tmp_path / "r" / "checkpoints") == {"step_000003", "step_000006", "step_000008"}


def test_only_the_newest_two_checkpoints_and_the_best_are_kept(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=5, save_every="1"), tmp_path / "r")
    folder = tmp_path / "r" / "checkpoints"
    best = checkpoint.read_progress(folder / "step_000020").best_step
    assert names(folder) == {f"step_{best:06d}", "step_000019", "step_000020"}


def test_evaluations_follow_eval_every_and_come_at_the_end(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=5, eval_every=2), tmp_path / "r")
    assert [record["epoch"] for record in Run(tmp_path / "r").records("eval")] == [2, 4, 5]


def test_a_missing_link_to_the_last_checkpoint_loses_no_work(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=1), tmp_path / "r")
    (tmp_path / "r" / "last").unlink()
    train_run(tiny_run, tmp_path / "r")
    events = [(record["event"], record["step"]) for record in Run(tmp_path / "r").records("event")]
    assert [event for event in events if event[0] in ("start", "resume")] == [("start", 0), ("resume", 4)]


def test_a_second_ctrl_c_stops_at_once_unless_it_follows_within_a_second(monkeypatch):
    messages, clock = [], iter((100.0, 100.1, 105.0))
    monkeypatch.setattr("m1clip.signals.time.monotonic", lambda: next(clock))
    with StopSignal(messages.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert messages == ["SIGINT: finishing this step and saving; send it again to stop at once"]
