"""The Python API: m1clip.train and m1clip.evaluate."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import m1clip
from helpers import QuietConsole
from m1clip import api, evaluation
from m1clip.config import DataConfig, TrainConfig, from_json, get_preset, override, requested_config, to_json
from m1clip.data.splits import open_sources
from m1clip.model.interop import export_clip
from m1clip.run import Run
from m1clip.settings import DataSettings, TrainSettings
from m1clip.training import autoconfig
from m1clip.training.setup import prepare

TINY = {
    **{"data": "synthetic:32", "val_size": 8, "batch_size": 8, "epochs": 1, "device": "cpu"},
    **{"model.vision.image_size": 32, "model.vision.width": 32, "model.vision.layers": 1},
    **{"model.text.width": 32, "model.text.layers": 1, "model.embed_dim": 24},
}


@pytest.fixture
def train(tmp_path):
    """m1clip.train in a folder of its own, without output."""

    def call(**settings):
        return m1clip.train(**{"runs": tmp_path / "runs", "console": QuietConsole(), **settings})

    return call


def config_of(result: api.TrainResult) -> TrainConfig:
    return from_json(TrainConfig, result.run / "config.json")


def test_public_names_are_those_of_the_api():
    assert m1clip.train is api.train
    assert m1clip.evaluate is evaluation.evaluate
    assert dir(m1clip) == ["CLIP", "evaluate", "load", "train"]
    with pytest.raises(AttributeError, match="m1clip has no trian; it has CLIP, evaluate, load, train"):
        m1clip.trian  # noqa: B018


def test_the_typed_settings_are_the_fields_of_the_configs():
    for settings, config in ((DataSettings, DataConfig), (TrainSettings, TrainConfig)):
        assert get_type_hints(settings) == {**get_type_hints(config), "data": str | Path}


@pytest.mark.slow
def test_a_type_checker_knows_the_settings(tmp_path):
    (tmp_path / "script.py").write_text("""import m1clip
m1clip.train(lr=1e-3, val_size="auto", optimizer="muon")
m1clip.train(lrr=1e-3)
m1clip.train(optimizer="sgd")
m1clip.evaluate("nano-1", data="x", lr=1e-3)
reveal_type(m1clip.load("nano-1").encode_image("cat.jpg"))
""")
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line.partition(": ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert errors == ["script.py:3", "script.py:4", "script.py:5"], done.stdout
    assert 'Revealed type is "torch._tensor.Tensor | Any"' in done.stdout  # an OnnxCLIP returns arrays


def test_train_takes_settings_by_keyword_and_returns_scores_and_paths(train, tmp_path):
    result = train(**TINY, name="mine", lr=0.5)
    assert (result.run, result.model) == (tmp_path / "runs" / "mine", tmp_path / "runs" / "mine" / "model")
    assert (result.finished, result.step, result.best_step) == (True, 4, 4)
    assert result.seconds > 0
    assert result.scores.chance_r1 == 1 / 8
    assert 0 <= result.scores.mean_r1 <= 1
    record = result.record()
    assert (record["run"], record["step"], record["images"]) == (str(result.run), 4, 8)
    assert record["mean_r1"] == result.scores.mean_r1
    assert m1clip.load(result.model).encode_text("a cat").shape == (1, 24)


def test_nested_settings_have_dotted_names(train):
    config = config_of(train(**TINY, lr=0.5))
    assert (config.lr, config.data, config.val_size) == (0.5, "synthetic:32", 8)
    assert (config.model.vision.width, config.model.text.layers, config.model.embed_dim) == (32, 1, 24)
    nano = get_preset("nano")
    assert (config.preset, config.optimizer, config.model.vision.stem) == ("nano", nano.optimizer, "conv")


def test_a_config_is_trained_as_it_is_but_for_given_settings(train):
    first = train(**TINY, name="first")
    again = train(config=first.run / "config.json", name="again")
    assert config_of(again) == config_of(first)
    assert again.scores == first.scores
    other = train(config=config_of(first), name="other", seed=1, **{"model.vision.width": 64})
    assert config_of(other) == override(config_of(first), {"seed": 1, "model.vision.width": 64})


def test_given_settings_survive_a_recipe(train):
    first = train(**TINY)
    tuned = train(
        init=str(first.model), recipe="full", data="synthetic:32", val_size=8, epochs=1, lr=0.01, device="cpu"
    )
    config = config_of(tuned)
    assert (config.recipe, config.epochs, config.lr) == ("full", 1, 0.01)
    assert (config.optimizer, config.hflip, config.patience) == ("adamw", True, 2)  # of the recipe
    assert config.model == config_of(first).model
    assert config.batch_size == 32  # the recipe's 64, limited by the data


def test_a_config_file_gets_no_other_defaults_from_its_recipe(train, tmp_path):
    first = train(**TINY)
    config = replace(config_of(first), init=str(first.model), recipe="full", hflip=False, lr=0.01)
    (tmp_path / "config.json").write_text(to_json(config))
    tuned = config_of(train(config=str(tmp_path / "config.json"), lr=0.02))
    assert tuned == replace(config, lr=0.02)


def test_given_settings_survive_a_budget(monkeypatch):
    monkeypatch.setattr(autoconfig, "training_speed", lambda config, tokens, max_s: 1000.0)
    given = {"data": "synthetic:512", "budget": "60s", "lr": 0.5, "model.vision.layers": 1, "batch_size": 8}
    requested = requested_config(given)
    config, reason = autoconfig.fit_budget(requested, given, open_sources(requested), QuietConsole())
    assert (config.lr, config.model.vision.layers, config.batch_size) == (0.5, 1, 8)
    assert config.optimizer == "muon"  # of the chosen model
    assert "nano" in reason


def test_a_preset_is_kept_within_a_budget(tmp_path):
    given = {"preset": "tiny", "data": "synthetic:512", "budget": "60s", "val_size": 8}
    setup = prepare(requested_config(given), given, tmp_path, None, QuietConsole(), time.monotonic(), is_final=False)
    assert setup.config.model == get_preset("tiny").model
    assert setup.deadline is not None


def test_an_interrupted_run_is_resumed_to_the_same_weights(train):
    whole = train(**TINY, name="whole", log_every=1)
    stopped = train(**TINY, name="stopped", log_every=1, console=QuietConsole(stop_at=2))
    assert (stopped.finished, stopped.scores) == (False, None)
    resumed = train(name="stopped", resume=True)
    assert (resumed.finished, resumed.step, resumed.scores) == (True, 4, whole.scores)
    weights, expected = (m1clip.load(result.model).state_dict() for result in (resumed, whole))
    assert all(torch.equal(weights[key], expected[key]) for key in expected)


def test_a_resumed_run_may_be_longer_but_not_different(train, tmp_path):
    train(**TINY)
    assert train(resume=True, epochs=2).step == 8  # by default the newest
    for settings in ({"seed": 1}, {"model.vision.width": 64}, {"data": "synthetic:33"}, {"optimizer": "adamw"}):
        with pytest.raises(ValueError, match="a resumed run cannot change"):
            train(resume=True, **settings)
    assert Run(tmp_path / "runs" / "nano-1").read("status.json")["state"] == "finished"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epoch": 3}, "unknown setting epoch; did you mean epochs"),
        ({"model.vision.widht": 3}, "unknown setting widht; did you mean width"),
        ({"epochs": "3"}, "epochs must be a valid integer, not '3'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"preset": "nanno"}, "did you mean nano"),
        ({"config": TrainConfig(), "preset": "tiny"}, "--config and --preset cannot be combined"),
        ({"config": TrainConfig(), "resume": True}, "--resume and --config cannot be combined"),
        ({"resume": True, "overwrite": True}, "--resume and --overwrite cannot be combined"),
        ({"budget": "10m", "epochs": 3}, "--budget and --epochs cannot be combined"),
        ({"vision": "timm:x", "model.vision.width": 3}, "--model.vision.width cannot change it"),
        ({"name": "a/b"}, "plain folder name"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(train, tmp_path, settings, words):
    with pytest.raises(ValueError, match=words):
        train(**settings)
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_is_deleted_only_with_overwrite(train):
    train(**TINY, name="r")
    with pytest.raises(FileExistsError, match="--overwrite"):
        train(**TINY, name="r")
    assert train(**TINY, name="r", overwrite=True, seed=1).finished


def test_evaluate_gives_the_scores_of_training(train, tmp_path):
    result = train(**TINY)
    options = {"runs": tmp_path / "runs", "device": "cpu", "console": QuietConsole()}
    for model in (None, "nano-1", result.run, result.model, result.run / "last"):
        evaluation = m1clip.evaluate(model, **options)
        assert evaluation.scores == result.scores
    assert evaluation.model == result.run / "last"
    assert {edit.changed for edit in evaluation.edits} >= {"color", "sky"}
    assert all(0 <= edit.accuracy <= 1 for edit in evaluation.edits)


def test_load_takes_what_the_commands_take(train, tmp_path, monkeypatch):
    result = train(**TINY)
    expected = result.model / "model.safetensors"
    (tmp_path / "copy").symlink_to(result.model)
    weights = load_file(expected)["text_projection.weight"]
    for model in (None, "nano-1", result.run, str(result.run), result.model, result.run / "best", tmp_path / "copy"):
        loaded = m1clip.load(model, runs=tmp_path / "runs")
        assert torch.equal(loaded.text_projection.weight, weights)
    monkeypatch.chdir(tmp_path)
    assert torch.equal(m1clip.load("nano-1").text_projection.weight, weights)


def test_load_imports_the_clip_of_another_library(train, tmp_path):
    native = {"model.vision.stem": "patch", "model.vision.pool": "class"}
    clip = m1clip.load(train(**TINY, **native).model)
    export_clip(clip, "transformers", tmp_path / "theirs")
    imported = m1clip.load(tmp_path / "theirs")
    torch.testing.assert_close(imported.encode_text("a cat"), clip.encode_text("a cat"))


def test_load_says_where_it_looked(train, tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"no run 'gone' in .*, and there is no model 'gone'; expected .*hub name"
    ):
        m1clip.load("gone", runs=tmp_path)
    monkeypatch.setattr("m1clip.model.safe_load.download_from_hub", lambda name: pytest.fail("asked the hub"))
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no run or model 'runs/gone'; runs is a folder without it"):
        m1clip.load("runs/gone")


def test_evaluate_takes_other_data_and_splits(train, tmp_path):
    options = {"model": train(**TINY).run, "device": "cpu", "console": QuietConsole()}
    assert m1clip.evaluate(**options, val_size=5).scores.images == 5
    for color in ("red", "green", "blue"):
        (tmp_path / "photos" / color).mkdir(parents=True)
        for size in (40, 50):
            Image.new("RGB", (size, size), color).save(tmp_path / "photos" / color / f"{size}.png")
    evaluation = m1clip.evaluate(**options, data=tmp_path / "photos", split="all")  # a Path is fine
    assert (evaluation.scores.images, evaluation.edits) == (6, [])
    with pytest.raises(ValueError, match="has no test split"):
        m1clip.evaluate(**options, split="test")
    with pytest.raises(ValueError, match="unknown setting dat; did you mean data"):
        m1clip.evaluate(**options, dat="x")


def test_evaluate_names_a_model_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run 'gone'"):
        m1clip.evaluate("gone", runs=tmp_path)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text(to_json(TrainConfig()))
    with pytest.raises(FileNotFoundError, match="has no model yet"):
        m1clip.evaluate("new", runs=tmp_path)
