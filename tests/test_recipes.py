"""Recipes: which parameters are trained, features encoded once, exact resume, and the reason for auto's choice."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_pretrained import text_folder, vision_file

import m1clip
from helpers import QuietConsole, train_run
from m1clip import cli, devices
from m1clip.commands import parse_flags
from m1clip.commands import train as command
from m1clip.config import (
    RECIPES,
    DataConfig,
    Preprocess,
    TrainConfig,
    check_config,
    from_json,
    get_preset,
    recipe_defaults,
    to_json,
)
from m1clip.data import pixel_cache
from m1clip.data.batches import BatchStream
from m1clip.data.index import no_progress
from m1clip.data.splits import open_sources, open_splits
from m1clip.model.clip import CLIP, load
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run
from m1clip.training.features import FeatureEncoder
from m1clip.training.setup import (
    FEATURE_VIEWS,
    InitModel,
    build_model,
    choose_recipe,
    load_init,
    prepare,
    replace_heads,
)
from photos import write_photos

HEADS = {"vision_projection", "text_projection", "logit_scale"}


@pytest.fixture
def pretrained(tiny, tmp_path) -> Path:
    """A small CLIP in place of a pretrained one."""
    torch.manual_seed(3)
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "pretrained")
    return tmp_path / "pretrained"


@pytest.fixture
def finetuning(tiny_run, pretrained) -> TrainConfig:
    return replace(tiny_run, init=str(pretrained), lr=1e-2, crop_scale=0.6, save_every="1", log_every=1)


@pytest.fixture
def encoders(tiny_run, tmp_path) -> TrainConfig:
    """Encoders of timm and transformers that were not trained together, with new heads."""
    weights, text = vision_file(tmp_path / "w.safetensors"), text_folder(tmp_path / "bert")
    model = replace(tiny_run.model, head="mlp", head_hidden=16)
    config = replace(tiny_run, vision=f"timm:test_vit?weights={weights}", text=f"hf:{text}", model=model)
    config = replace(config, lr=1e-2, crop_scale=0.6, save_every="1", log_every=1)
    return replace(config, recipe="frozen", head_dropout=0.3)


def weights_of(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def assert_same_weights(a: Path, b: Path) -> None:
    expected, actual = weights_of(a), weights_of(b)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def unchanged_weights(run: Path) -> set[str]:
    before, after = weights_of(run, "start"), weights_of(run)
    assert before.keys() == after.keys()
    return {name for name in before if torch.equal(before[name], after[name])}


def trained_modules(run: Path) -> set[str]:
    """Top-level modules with a changed weight."""
    return {name.split(".")[0] for name in weights_of(run).keys() - unchanged_weights(run)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"recipe": "frozen"}, HEADS),
        ({"recipe": "frozen", "freeze": "vision"}, {*HEADS, "text"}),
        ({"recipe": "frozen", "freeze": "text"}, {*HEADS, "vision"}),
        ({"recipe": "full", "freeze": "vision"}, {*HEADS, "text"}),
        ({"recipe": "lora"}, {*HEADS, "vision", "text"}),
        ({"recipe": "full"}, {*HEADS, "vision", "text"}),
    ],
)
def test_a_recipe_trains_exactly_its_modules(settings, expected, finetuning, tmp_path):
    assert train_run(replace(finetuning, **settings), tmp_path / "r").finished
    assert trained_modules(tmp_path / "r") == expected
    assert m1clip.load(tmp_path / "r").encode_text("a red circle").shape == (1, 24)


def test_unfreeze_trains_only_the_last_layers(finetuning, tmp_path):
    train_run(replace(finetuning, recipe="full", unfreeze=1), tmp_path / "r")
    unchanged = unchanged_weights(tmp_path / "r")
    towers = ("vision", "text")
    assert {name for name in unchanged if ".blocks.0." in name} == {
        name for name in weights_of(tmp_path / "r") if ".blocks.0." in name
    }
    assert not any(name.startswith(f"{tower}.blocks.1.") for name in unchanged for tower in towers)
    assert {"vision.position", "text.token.weight"} <= unchanged


def test_lora_changes_the_linear_layers_of_the_towers_only(finetuning, tmp_path):
    train_run(replace(finetuning, recipe="lora"), tmp_path / "r")
    changed = weights_of(tmp_path / "r").keys() - unchanged_weights(tmp_path / "r")
    in_towers = {name for name in changed if name.split(".")[0] in ("vision", "text")}
    layers = {".".join(name.split(".")[-2:]) for name in in_towers}
    assert layers == {"qkv.weight", "out.weight", "wide.weight", "narrow.weight"}


def test_the_adapter_beside_a_lora_model_gives_the_same_embeddings(finetuning, tmp_path):
    train_run(replace(finetuning, recipe="lora"), tmp_path / "r")
    model, initial = load(tmp_path / "r" / "model"), load(tmp_path / "r" / "start")
    peft = pytest.importorskip("peft", reason="needs m1clip[lora]")
    adapted = peft.PeftModel.from_pretrained(initial, str(tmp_path / "r" / "model" / "adapter")).eval()
    captions = ["a red circle", "a small blue square"]
    torch.testing.assert_close(adapted.encode_text(captions), model.encode_text(captions), rtol=0, atol=1e-5)


def test_lora_works_with_a_bag_of_words(tiny_run, tmp_path):
    text = replace(tiny_run.model.text, encoder="bag_of_words")
    train_run(replace(tiny_run, model=replace(tiny_run.model, text=text)), tmp_path / "a")
    config = replace(tiny_run, recipe="lora", init=str(tmp_path / "a" / "model"), epochs=1)
    assert train_run(config, tmp_path / "b").finished
    assert "text" in trained_modules(tmp_path / "b")


@pytest.mark.parametrize("ema", [0.0, 0.9])
@pytest.mark.parametrize("recipe", ["frozen", "lora", "full"])
def test_a_run_of_any_recipe_resumes_exactly(recipe, ema, finetuning, tmp_path):
    model = replace(finetuning.model, head="mlp", head_hidden=16)
    config = replace(finetuning, recipe=recipe, ema=ema, model=model, head_dropout=0.2)
    train_run(config, tmp_path / "whole")
    assert not train_run(config, tmp_path / "parts", stop_at=3).finished
    resumed = from_json(TrainConfig, tmp_path / "parts" / "config.json")
    assert train_run(resumed, tmp_path / "parts").finished
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_pretrained_encoders_resume_exactly_without_their_files(encoders, tmp_path):
    train_run(encoders, tmp_path / "whole")
    train_run(encoders, tmp_path / "parts", stop_at=3)
    (tmp_path / "bert").rename(tmp_path / "moved")
    (tmp_path / "w.safetensors").unlink()
    config = from_json(TrainConfig, tmp_path / "parts" / "config.json")
    assert config.freeze == "both"
    assert train_run(config, tmp_path / "parts").finished
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")
    assert trained_modules(tmp_path / "whole") == HEADS


@pytest.mark.parametrize("recipe", ["lora", "full"])
def test_pretrained_encoders_can_be_trained(recipe, encoders, tmp_path):
    assert train_run(replace(encoders, recipe=recipe), tmp_path / "r").finished
    assert {"vision", "text"} < trained_modules(tmp_path / "r")


def test_one_pretrained_encoder_is_frozen_and_the_other_tower_trained(encoders, tmp_path):
    train_run(replace(encoders, text=""), tmp_path / "r")
    assert trained_modules(tmp_path / "r") == {*HEADS, "text"}


def test_a_timm_encoder_without_weights_is_trained_and_reproducible(encoders, tmp_path):
    config = replace(encoders, vision="timm:test_vit?weights=none", head_dropout=0.0)
    for name in ("a", "b"):
        train_run(config, tmp_path / name)
    assert trained_modules(tmp_path / "a") == {*HEADS, "vision"}
    assert_same_weights(tmp_path / "a", tmp_path / "b")


def test_chunks_train_the_same_lora(finetuning, tmp_path):
    config = replace(finetuning, recipe="lora")
    train_run(config, tmp_path / "whole")
    train_run(replace(config, chunk=4), tmp_path / "chunks")
    whole, chunked = weights_of(tmp_path / "whole"), weights_of(tmp_path / "chunks")
    torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-4)


def test_wise_ft_interpolates_between_the_initial_and_the_trained_weights(finetuning, tmp_path):
    config = replace(finetuning, recipe="full")
    train_run(config, tmp_path / "full")
    result = train_run(replace(config, wise_ft=0.25), tmp_path / "averaged")
    initial, final = weights_of(tmp_path / "full", "start"), weights_of(tmp_path / "full")
    expected = {name: 0.75 * initial[name] + 0.25 * final[name] for name in initial}
    torch.testing.assert_close(weights_of(tmp_path / "averaged"), expected, rtol=0, atol=1e-6)
    (event,) = (record for record in Run(tmp_path / "averaged").records("event") if record["event"] == "wise-ft")
    assert (event["weight"], event["mean_r1"]) == (0.25, result.scores.mean_r1)


def test_new_heads_of_a_pretrained_clip_compute_the_same_at_first(pretrained):
    clip = load(pretrained)
    model = replace_heads(clip, "mlp", 16)
    torch.testing.assert_close(model.encode_text(["a cat"]), clip.encode_text(["a cat"]), rtol=0, atol=1e-6)


def frozen_split(config: TrainConfig):
    """Config, model and splits of a run with frozen towers."""
    config, init = load_init(replace(config, recipe="frozen"), None)
    splits = open_splits(open_sources(config), config, Preprocess(32), Preprocess(40))
    return config, build_model(config, init, init.tokenizer), splits


def test_stored_features_are_those_of_the_towers(finetuning):
    config, model, splits = frozen_split(finetuning)
    tables = FeatureEncoder(model, config, no_progress).encode(splits.val, ("vision", "text"), views=1)
    _, pixels = splits.val.take(np.arange(5))
    with torch.no_grad():
        images = model.vision(model.normalize(torch.from_numpy(pixels)))
        captions = model.text(model.tokenize([splits.val.captions(7)[0]]))
    np.testing.assert_allclose(tables.images.views[0][:5], images, atol=2e-3, rtol=2e-3)
    stored = tables.captions.take(tables.captions.start_N[7:8])[0]
    np.testing.assert_allclose(stored, captions, atol=2e-3, rtol=2e-3)


def test_feature_batches_pick_a_view_of_each_image_and_depend_on_their_number_only(finetuning):
    config, model, splits = frozen_split(finetuning)
    tables = FeatureEncoder(model, config, no_progress).encode(splits.train, ("vision", "text"), views=2)
    assert len(tables.images.views) == 2
    assert not np.allclose(*tables.images.views)
    batches = BatchStream(splits.train, model.tokenize, 16, 0, 32, features=tables)
    batch, again = batches.batch(3), batches.batch(3)
    features_BD = batch.image.features_BD
    assert features_BD.shape == (16, 32)
    assert torch.equal(features_BD, again.image.features_BD)
    for row, features in zip(batch.rows, features_BD.numpy(), strict=True):
        assert any(np.array_equal(features, view[row].astype(np.float32)) for view in tables.images.views)


def test_without_augmentation_one_view_is_encoded(finetuning):
    config, model, splits = frozen_split(replace(finetuning, crop_scale=1.0))
    tables = FeatureEncoder(model, config, no_progress).encode(splits.train, ("vision",), views=3)
    assert len(tables.images.views) == 1
    assert tables.captions is None


def cached_features() -> set[Path]:
    return set(Path(os.environ["M1CLIP_CACHE"]).glob("features-*"))


def test_features_are_shared_by_runs_and_depend_on_the_weights(finetuning, pretrained, tmp_path):
    config = replace(finetuning, recipe="frozen")
    train_run(config, tmp_path / "a")
    before = cached_features()
    train_run(replace(config, lr=1e-3), tmp_path / "b")
    assert cached_features() == before
    model = load(pretrained)
    model.vision.position.data += 0.1
    model.save(pretrained)
    train_run(config, tmp_path / "c")
    assert len(cached_features() - before) == FEATURE_VIEWS + 1  # of the training split, and of the validation split


def test_features_depend_on_the_activation(finetuning, pretrained, tmp_path):
    train_run(replace(finetuning, recipe="frozen"), tmp_path / "a")
    before, config = cached_features(), json.loads((pretrained / "config.json").read_text())
    (pretrained / "config.json").write_text(json.dumps({**config, "activation": "quick_gelu"}))
    train_run(replace(finetuning, recipe="frozen"), tmp_path / "b")
    assert cached_features() - before


def observe_encoding(set_attribute: Callable[..., None], on_chunk: Callable[[], None]) -> None:
    """Call a function after every chunk of features that is encoded and written; chunks have 8 rows."""
    complete = pixel_cache.RowStore._complete

    def observed(store, produce, progress):
        def produce_and_report(chunks):
            for chunk in produce(chunks):
                yield chunk
                if store.folder.name.startswith("features-"):
                    on_chunk()

        complete(store, produce_and_report, progress)

    set_attribute(pixel_cache, "CHUNK_ROWS", 8)
    set_attribute(pixel_cache.RowStore, "_complete", observed)


def train_until_killed(config: Path, run: Path, chunks: int) -> None:
    """In a process of its own: kill it when so many chunks are encoded."""
    countdown = iter(range(chunks - 1))
    torch.set_num_threads(1)  # as the process of the tests
    devices.DEFAULT_THREADS = 1
    observe_encoding(setattr, lambda: next(countdown, None) is None and os.kill(os.getpid(), signal.SIGKILL))
    train_run(from_json(TrainConfig, config), run)


@pytest.mark.slow
def test_killed_encoding_continues_where_it_was(finetuning, tmp_path, monkeypatch):
    config, encoded = replace(finetuning, recipe="frozen"), []
    (tmp_path / "config.json").write_text(to_json(config))
    observe_encoding(monkeypatch.setattr, lambda: encoded.append(1))
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "whole-cache"))
    train_run(config, tmp_path / "whole")
    total, half = len(encoded), len(encoded) // 2
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    arguments = (tmp_path / "config.json", tmp_path / "killed", half)
    child = multiprocessing.get_context("spawn").Process(target=train_until_killed, args=arguments)
    child.start()
    child.join(600)
    assert child.exitcode == -signal.SIGKILL
    encoded.clear()
    train_run(config, tmp_path / "again")
    assert len(encoded) == total - half > 0
    assert_same_weights(tmp_path / "whole", tmp_path / "again")


def test_a_budget_too_short_for_encoding_trains_on_fewer_images(finetuning, tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "m1clip.training.features.time_encoding", lambda model, captions: (10.0, 1.0)
    )  # seconds per item
    console, config = QuietConsole(), replace(finetuning, recipe="frozen", budget="10m")
    result = train_run(config, tmp_path / "r", console=console)
    data = Run(tmp_path / "r").read("data.json")
    assert result.finished
    assert data["every"] > 1
    assert data["train"] == -(-64 // data["every"])
    assert any(f"1 of {data['every']} images is used" in text for text in console.warnings)
    assert train_run(config, tmp_path / "r").step == result.step  # a resumed run has the same images
    whole = train_run(replace(config, budget=""), tmp_path / "whole")
    assert Run(whole.run).read("data.json")["train"] == 64


def test_every_nth_row_of_images_decoded_on_the_fly_is_decoded(tmp_path):
    names = write_photos(tmp_path, 30)
    (tmp_path / "t.csv").write_text("\n".join(["image,caption", *(f"{name},scene {name}" for name in names)]))
    config = DataConfig(data=str(tmp_path / "t.csv"), val_size=3, cache_gb=0, workers=1)
    splits, rows = open_splits(open_sources(config), config, Preprocess(32), Preprocess(32)), np.arange(0, 27, 4)
    captions, pixels = [splits.train.captions(row) for row in rows], splits.train.take(rows)[1]
    train = splits.with_every(4).train
    assert list(train.all_captions()) == captions
    assert np.array_equal(train.take(np.arange(len(train)))[1], pixels)


FAST, SLOW = (1e-3, 1e-3), (10.0, 10.0)  # seconds per image and per caption
TOWER = object()
CLIP_INIT, TWO_ENCODERS = InitModel(TOWER, ("vision", "text")), InitModel(None, ("vision", "text"), None, TOWER, TOWER)
ONE_ENCODER, RANDOM_ENCODER = InitModel(None, ("vision",), None, TOWER), InitModel(vision=TOWER)


@pytest.mark.parametrize(
    ("init", "images", "cost", "budget", "recipe", "reason"),
    [
        (TWO_ENCODERS, 6_000, FAST, "", "frozen", "not trained together"),
        (ONE_ENCODER, 6_000, FAST, "", "frozen", "only the vision tower is pretrained"),
        (RANDOM_ENCODER, 6_000, FAST, "", "full", "no tower is pretrained"),
        (CLIP_INIT, 500, FAST, "", "lora", "500 images are few enough to overfit"),
        (CLIP_INIT, 50_000, FAST, "", "lora", "too few to train all weights"),
        (CLIP_INIT, 500_000, FAST, "", "full", "500,000 images are enough to train all weights"),
        (CLIP_INIT, 500, SLOW, "10m", "frozen", "lora would take about 25 h 00 min of the 10 min"),
        (CLIP_INIT, 500, FAST, "10m", "lora", "few enough to overfit"),
    ],
)
def test_auto_chooses_by_init_data_and_budget_and_says_why(init, images, cost, budget, recipe, reason):
    config = TrainConfig(init="x", budget=budget)
    chosen, why = choose_recipe(config, init, images, 5 * images, *cost)
    assert chosen == recipe
    assert reason in why


def flags(pretrained: Path, more: str) -> list[str]:
    return f"--init {pretrained} --data synthetic:48 --val-size 16 --device cpu --name r {more}".split()


def run_train(pretrained: Path, more: str) -> None:
    assert command.main(parse_flags(command.Args, "m1clip train", flags(pretrained, more))) == 0


def config_of(name: str) -> TrainConfig:
    return from_json(TrainConfig, Path("runs") / name / "config.json")


def test_auto_takes_the_defaults_of_its_recipe_where_no_flag_is_given(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_train(pretrained, "--epochs 1")
    config = config_of("r")
    assert (config.recipe, config.lr, config.epochs) == ("lora", RECIPES["lora"]["lr"], 1)
    assert config.batch_size == 48  # all pairs, because there are fewer than the recipe's 64
    (event,) = (record for record in Run(Path("runs/r")).records("event") if record["event"] == "recipe")
    assert event["reason"].startswith("48 images are few enough to overfit")


def test_frozen_then_unfrozen_is_one_command(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_train(pretrained, "--epochs 1 --recipe frozen --unfreeze 1 --crop-scale 1 --no-hflip")
    first, second = config_of("r"), config_of("r-unfrozen")
    assert (first.recipe, second.recipe, second.unfreeze) == ("frozen", "full", 1)
    assert (second.crop_scale, second.hflip) == (1, False)
    assert {"vision", "text"} < trained_modules(Path("runs/r-unfrozen"))
    final, initial = weights_of(Path("runs/r")), weights_of(Path("runs/r-unfrozen"), "start")
    assert all(torch.equal(initial[name], final[name]) for name in final)


def test_overwriting_the_frozen_run_repeats_the_unfrozen_one(pretrained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_train(pretrained, "--epochs 1 --recipe frozen --unfreeze 1")
    before = weights_of(Path("runs/r-unfrozen"), "start")
    run_train(pretrained, "--epochs 1 --recipe frozen --unfreeze 1 --overwrite --lr 0.05")
    after, final = weights_of(Path("runs/r-unfrozen"), "start"), weights_of(Path("runs/r"))
    assert all(torch.equal(after[name], final[name]) for name in final)
    assert not torch.equal(after["text_projection.weight"], before["text_projection.weight"])


@pytest.mark.parametrize("flag", ["--model.text.encoder=bag_of_words", "--model.embed-dim=64"])
def test_the_shape_of_a_pretrained_model_cannot_be_changed(flag, pretrained, capsys):
    assert cli.run_command(["train", "--init", str(pretrained), flag]) == 2
    assert f"{flag.partition('=')[0]} cannot change it" in capsys.readouterr().err


def test_the_head_of_a_pretrained_model_can_be_replaced(finetuning, tmp_path):
    config = replace(finetuning, recipe="frozen", model=replace(finetuning.model, head="standardized"))
    train_run(config, tmp_path / "r")
    assert load(tmp_path / "r").config.head == "standardized"


def test_training_from_scratch_keeps_the_preset():
    assert command.Args().training == get_preset("nano")
    assert recipe_defaults(get_preset("nano"), "scratch") == {"recipe": "scratch"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "frozen", "init": ""}, "--recipe frozen needs pretrained weights"),
        ({"recipe": "scratch"}, "--recipe scratch starts from random weights"),
        ({"recipe": "lora", "init": "no-such.pt"}, "no-such.pt"),
        ({"recipe": "scratch", "init": "", "wise_ft": 0.5}, "--wise-ft"),
        ({"init": "x", "vision": "timm:y"}, "--init provides both towers"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused_before_anything_is_written(
    settings, message, finetuning, tmp_path
):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        prepare(replace(finetuning, **settings), {}, tmp_path / "runs", None, QuietConsole(), 0.0, is_final=False)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("settings", [{"wise_ft": 1.5}, {"lora_rank": 0}, {"head_dropout": 1.0}, {"unfreeze": -1}])
def test_values_out_of_range_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        check_config(replace(TrainConfig(), **settings))


def test_a_damaged_checkpoint_is_refused_with_one_sentence(pretrained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = pretrained / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert cli.run_command(["train", *flags(pretrained, "--recipe lora")]) == 2
    error = capsys.readouterr().err
    assert "damaged" in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


def test_a_frozen_run_logs_every_step_and_saves_the_configs_of_its_encoders(encoders, tmp_path):
    train_run(encoders, tmp_path / "r")
    run = Run(tmp_path / "r")
    steps = list(run.records("step"))
    assert [record["step"] for record in steps] == [*range(1, 9)]
    assert all(record["loss"] is not None and record["image_size"] == 0 for record in steps)
    assert len(list(run.records("eval"))) == 2
    config = json.loads((tmp_path / "r" / "model" / "config.json").read_text())
    assert config["vision"]["timm"] == "test_vit"
    assert config["text"]["hf"]["model_type"] == "bert"
