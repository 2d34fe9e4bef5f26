import io
import shutil
import signal
from dataclasses import replace

import pytest
import torch

from m1clip import run as runs
from m1clip.config import TrainConfig, preset
from m1clip.model.clip import CLIP, load
from m1clip.train import checkpoint, loop
from m1clip.train.optim import make_optimizer, rate
from m1clip.train.screen import Screen
from m1clip.train.step import STATS, train_step
from m1clip.train.stop import Stop


class Quiet(Screen):
    """A screen that shows nothing, and may stop the run after some step."""

    def __init__(self, stop_at: int | None = None):
        super().__init__(io.StringIO())
        self.stop_at = stop_at

    def step(self, step: int, values: dict[str, float]) -> None:
        super().step(step, values)
        if step == self.stop_at:
            signal.raise_signal(signal.SIGINT)


def trained(config: TrainConfig, path, stop_at: int | None = None) -> loop.Result:
    old = runs.Run(path) if path.exists() else None
    setup = loop.check(config, path.parent, old)
    return loop.train(config, setup, old or runs.create(path.parent, path.name, "x", False), Quiet(stop_at))


def test_a_run_leaves_the_folder_of_the_design(tiny_run, tmp_path):
    result = trained(tiny_run, tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    assert result.finished
    assert {path.name for path in run.path.iterdir()} == {
        *("config.json", "machine.json", "metrics.jsonl", "status.json", "checkpoints", "last", "model")
    }
    assert run.read("status.json")["state"] == "finished"
    assert run.read("machine.json")["why"] == "asked for with --device cpu"
    assert [record["step"] for record in run.records("step")] == [2, 4, 6, 8]
    step = next(run.records("step"))
    assert {
        "loss",
        "accuracy",
        "chance_loss",
        "chance_accuracy",
        "temperature",
        "lr",
        "grad_norm",
    } <= step.keys()
    assert len(list(run.records("eval"))) == len(list(run.records("epoch"))) == 2
    assert load(run.path).encode_text("a cat").shape == (1, 24)


def test_a_run_learns(tiny_run, tmp_path):
    trained(replace(tiny_run, epochs=15, lr=3e-3), tmp_path / "r")
    records = list(runs.Run(tmp_path / "r").records("epoch"))
    assert records[0]["loss"] > 2.3
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]


def test_resumed_run_ends_with_the_same_weights_as_an_unbroken_one(tiny_run, tmp_path):
    tiny_run = replace(tiny_run, shift=0.1)
    trained(tiny_run, tmp_path / "whole")
    broken = trained(tiny_run, tmp_path / "broken", stop_at=4)
    assert (broken.finished, broken.step) == (False, 5)
    assert trained(tiny_run, tmp_path / "broken").finished
    whole, mended = (load(tmp_path / name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(whole[name], mended[name]) for name in whole)


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tiny_run, tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained(replace(tiny_run, seed=seed, epochs=1), tmp_path / name)
        weights.append(load(tmp_path / name).text_projection.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_sigmoid_run_trains_its_bias(tiny_run, tmp_path):
    config = replace(tiny_run, model=replace(tiny_run.model, loss="sigmoid"))
    assert trained(config, tmp_path / "r").finished
    assert load(tmp_path / "r").logit_bias.item() != -10


def test_a_non_finite_loss_stops_the_run_and_names_the_step(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train_step", lambda *a, **k: torch.tensor([float("nan"), 0, 0, 0]))
    with pytest.raises(FloatingPointError, match="loss is nan at step 2"):
        trained(tiny_run, tmp_path / "r")
    assert not (tmp_path / "r" / "checkpoints").exists()


def test_a_batch_larger_than_the_data_is_refused_before_anything_is_written(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="batch 65 is larger than the 64 training pairs"):
        loop.check(replace(tiny_run, batch=65), tmp_path / "runs", None)
    assert not list(tmp_path.iterdir())


def test_no_room_for_checkpoints_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    with pytest.raises(OSError, match=r"1\.00 GB free; checkpoints need 4\.22 GB"):
        loop.check(preset("seed"), tmp_path / "deep" / "runs", None)
    assert not list(tmp_path.iterdir())


def test_rate_climbs_to_its_peak_and_falls_to_nothing():
    config = replace(preset("nano"), lr=1.0, warmup=0.1)
    rates = [rate(step, 100, config) for step in range(100)]
    assert rates.index(max(rates)) == 10
    assert rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[0] < 0.1
    assert rates[-1] < 1e-3
    assert rate(0, 100, replace(config, warmup=0.0)) == 1.0


def one_step(model: CLIP, lr: float, clip_norm: float) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    bytes_BSSC = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    tokens_BL = torch.tensor([[1, i + 5, 2] for i in range(4)])
    return train_step(model, optimizer, bytes_BSSC, tokens_BL, clip_norm=clip_norm)


def test_a_step_moves_no_further_than_the_clipped_gradient_allows(tiny):
    torch.manual_seed(0)
    model = CLIP(tiny)
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
    stats = dict(zip(STATS, one_step(model, lr=1.0, clip_norm=0.01).tolist(), strict=True))
    after = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert stats["grad_norm"] > 1  # what is reported is the length before the cut
    assert (after - before).norm().item() == pytest.approx(0.01, rel=0.01)


def test_a_step_clamps_the_temperature(tiny):
    model = CLIP(tiny)
    model.logit_scale.data.fill_(6.0)
    stats = one_step(model, lr=1e-6, clip_norm=1.0)
    assert stats[STATS.index("temperature")].item() == pytest.approx(0.01)


def test_weights_follow_the_seed_and_not_only_the_data(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "train_step", lambda *a, **k: torch.zeros(len(STATS)))
    for seed in (0, 1):
        trained(replace(tiny_run, seed=seed, epochs=1), tmp_path / str(seed))
    zero, one = (load(tmp_path / name).text_projection.weight for name in "01")
    assert not torch.equal(zero, one)


def test_checkpoints_come_by_the_clock_and_only_the_newest_are_kept(tiny_run, tmp_path):
    trained(replace(tiny_run, save_minutes=1e-9), tmp_path / "r")
    kept = sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert kept == ["step_000007", "step_000008"]
    assert [record["step"] for record in runs.Run(tmp_path / "r").records("step")] == list(range(1, 9))
    trained(tiny_run, tmp_path / "s")
    assert [path.name for path in (tmp_path / "s" / "checkpoints").iterdir()] == ["step_000008"]


def test_evaluation_keeps_its_rhythm_and_comes_at_the_end(tiny_run, tmp_path):
    trained(replace(tiny_run, epochs=5, eval_every=2), tmp_path / "r")
    assert [record["epoch"] for record in runs.Run(tmp_path / "r").records("eval")] == [2, 4, 5]


def test_broken_weights_are_not_saved_over_good_ones(tiny_run, tmp_path):
    trained(tiny_run, tmp_path / "r")
    run, model = runs.Run(tmp_path / "r"), load(tmp_path / "r")
    model.text_projection.weight.data[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"the last good state is .*step_000008"):
        checkpoint.save(run, 9, model, make_optimizer(model, tiny_run))
    assert checkpoint.last(run).name == "step_000008"


def test_a_refused_resume_does_not_touch_a_finished_run(tiny_run, tmp_path):
    trained(tiny_run, tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    (checkpoint.last(run) / "optimizer.safetensors").write_text("cut")
    with pytest.raises(ValueError, match="cannot go on"), runs.Run(run.path).owned():
        trained(tiny_run, run.path)
    assert run.read("status.json")["state"] == "finished"


def test_only_matrices_decay(tiny):
    model = CLIP(replace(tiny, loss="sigmoid"))
    decayed, free = make_optimizer(model, preset("nano")).param_groups
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.1, 0.0)
    assert all(weight.ndim >= 2 for weight in decayed["params"])
    kept = {names[id(weight)] for weight in free["params"]}
    assert {"text.token.weight", "text.position", "vision.position", "vision.class_token"} <= kept
    assert {"logit_scale", "logit_bias", "vision.ln_pre.weight", "text.blocks.0.mlp.wide.bias"} <= kept
    assert len(decayed["params"]) + len(kept) == len(names)


def test_a_checkpoint_that_fails_leaves_the_one_before(tiny_run, tmp_path, monkeypatch):
    trained(tiny_run, tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    before = checkpoint.last(run)
    model = load(run.path)
    monkeypatch.setattr(
        checkpoint, "write_tensors", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left"))
    )
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(run, 99, model, make_optimizer(model, tiny_run))
    assert checkpoint.last(run) == before
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000008"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", "{}"),
        ("state.json", '{"step": -5}'),
        ("optimizer.safetensors", "cut"),
        ("model.safetensors", None),
    ],
)
def test_a_damaged_checkpoint_is_named_and_nothing_is_changed(tiny_run, tmp_path, name, content):
    trained(replace(tiny_run, epochs=1), tmp_path / "r")
    file = tmp_path / "r" / "checkpoints" / "step_000004" / name
    file.unlink() if content is None else file.write_text(content)
    config = (tmp_path / "r" / "config.json").read_text()
    with pytest.raises(ValueError, match=r"cannot go on from .*step_000004"):
        trained(tiny_run, tmp_path / "r")
    assert (tmp_path / "r" / "config.json").read_text() == config


def test_a_lost_link_loses_no_work(tiny_run, tmp_path):
    trained(replace(tiny_run, epochs=1), tmp_path / "r")
    (tmp_path / "r" / "last").unlink()
    trained(tiny_run, tmp_path / "r")
    assert [record["step"] for record in runs.Run(tmp_path / "r").records("event")] == [0, 4]


def test_a_second_ctrl_c_means_at_once_but_not_within_a_second(monkeypatch):
    said, clock = [], iter((100.0, 100.1, 105.0))
    monkeypatch.setattr("m1clip.train.stop.time.monotonic", lambda: next(clock))
    with Stop(said.append) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.asked
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "once more" in said[0]
