import shutil
import signal
from dataclasses import replace

import pytest
import torch

from helpers import QuietConsole, train_run
from m1clip import run as runs
from m1clip.config import get_preset
from m1clip.model.clip import load
from m1clip.training.loop import Stop
from m1clip.training.optim import learning_rate


def test_a_run_leaves_the_folder_of_the_design(tiny_run, tmp_path):
    result = train_run(tiny_run, tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    assert result.finished
    assert {path.name for path in run.path.iterdir()} == {
        *(
            "config.json",
            "data.json",
            "machine.json",
            "retrievals.json",
            "metrics.jsonl",
            "status.json",
            "checkpoints",
            "best",
            "last",
            "model",
        )
    }
    assert run.read("status.json")["state"] == "finished"
    assert run.read("machine.json")["why"] == "asked for with --device cpu"
    assert [record["step"] for record in run.records("step")] == list(range(1, 9))
    step = next(run.records("step"))
    assert {"loss", "accuracy", "chance_loss", "chance_accuracy", "temperature", "lr", "grad_norm"} <= step.keys()
    assert len(list(run.records("eval"))) == len(list(run.records("epoch"))) == 2
    assert load(run.path).encode_text("a cat").shape == (1, 24)


def test_a_run_that_ends_within_an_epoch_is_evaluated_and_that_is_written_down(tiny_run, tmp_path):
    result = train_run(replace(tiny_run, steps=6), tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    assert [record["step"] for record in run.records("eval")] == [4, 6]
    assert result.scores is not None
    assert run.read("status.json")["best_score"] is not None
    assert run.read("retrievals.json")["step"] == 6


def test_a_run_learns(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=15, lr=3e-3), tmp_path / "r")
    records = list(runs.Run(tmp_path / "r").records("epoch"))
    assert records[0]["loss"] > 2.3
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]


def test_resumed_run_ends_with_the_same_weights_as_an_unbroken_one(tiny_run, tmp_path):
    tiny_run = replace(tiny_run, crop_scale=0.6, color_jitter=0.2)
    train_run(tiny_run, tmp_path / "whole")
    broken = train_run(tiny_run, tmp_path / "broken", stop_at=4)
    assert (broken.finished, broken.step) == (False, 5)  # in the middle of the second epoch
    assert train_run(tiny_run, tmp_path / "broken").finished
    whole, mended = (load(tmp_path / name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], mended[name]) for name in whole)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tiny_run, tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train_run(replace(tiny_run, seed=seed, epochs=1), tmp_path / name)
        weights.append(load(tmp_path / name).text_projection.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_sigmoid_run_trains_its_bias(tiny_run, tmp_path):
    config = replace(tiny_run, model=replace(tiny_run.model, loss="sigmoid"))
    assert train_run(config, tmp_path / "r").finished
    assert load(tmp_path / "r").logit_bias.item() != -10


def test_a_batch_larger_than_the_data_is_refused_before_anything_is_written(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="batch 65 is larger than the 64 training pairs"):
        check(replace(tiny_run, batch_size=65), tmp_path / "runs", None, QuietConsole())
    assert not list(tmp_path.iterdir())


def test_no_room_for_checkpoints_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(OSError, match=r"1\.00 GB free; checkpoints need 5\.48 GB"):
        check(get_preset("seed"), tmp_path / "deep" / "runs", None, QuietConsole())
    assert not list(tmp_path.iterdir())


def test_rate_climbs_to_its_peak_and_falls_to_nothing():
    config = replace(get_preset("nano"), lr=1.0, warmup=0.1)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[-1] < 1e-3
    assert learning_rate(0, 100, replace(config, warmup=0.0)) == 1.0


def test_checkpoints_come_by_the_clock_and_only_the_newest_are_kept(tiny_run, tmp_path):
    train_run(replace(tiny_run, save_every="1em" - 9), tmp_path / "r")
    assert {"step_000007", "step_000008"} <= names(tmp_path / "r" / "checkpoints")
    train_run(replace(tiny_run), tmp_path / "s")
    best = runs.Run(tmp_path / "s").read("checkpoints/step_000008/state.json")["position"]["best_step"]
    assert names(tmp_path / "s" / "checkpoints") == {f"step_{best:06d}", "step_000008"}


def test_checkpoints_come_by_steps_and_by_epochs(tiny_run, tmp_path):
    quiet = replace(tiny_run, keep=99, eval_every=99)
    train_run(replace(quiet, save_every="3"), tmp_path / "steps")
    assert names(tmp_path / "steps" / "checkpoints") == {"step_000003", "step_000006", "step_000008"}
    train_run(replace(quiet, epochs=5), tmp_path / "epochs")
    assert names(tmp_path / "epochs" / "checkpoints") == {"step_000008", "step_000016", "step_000020"}


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_evaluation_keeps_its_rhythm_and_comes_at_the_end(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=5, eval_every=2), tmp_path / "r")
    assert [record["epoch"] for record in runs.Run(tmp_path / "r").records("eval")] == [2, 4, 5]


def test_a_lost_link_loses_no_work(tiny_run, tmp_path):
    train_run(replace(tiny_run, epochs=1), tmp_path / "r")
    (tmp_path / "r" / "last").unlink()
    train_run(tiny_run, tmp_path / "r")
    events = runs.Run(tmp_path / "r").records("event")
    assert [(one["event"], one["step"]) for one in events if one["event"] in ("start", "resume")] == [
        ("start", 0),
        ("resume", 4),
    ]


def test_a_second_ctrl_c_means_at_once_but_not_within_a_second(monkeypatch):
    said, clock = [], iter((100.0, 100.1, 105.0))
    monkeypatch.setattr("m1clip.training.loop.time.monotonic", lambda: next(clock))
    with Stop(said.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "once more" in said[0]
