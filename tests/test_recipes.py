"""Recipes: what learns and what keeps still, features encoded once, exact resume, and why auto chose."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_pretrained import text_folder, vision_file

import m1clip
from helpers import QuietConsole, train_run
from m1clip import cli
from m1clip import run as runs
from m1clip.commands import train as verb
from m1clip.config import RECIPES, TrainConfig, from_json, get_preset, recipe_defaults, to_json
from m1clip.data.batches import BatchStream
from m1clip.data.splits import open_splits
from m1clip.model.clip import CLIP, load
from m1clip.training import recipes
from m1clip.training.features import encoded
from m1clip.training.recipes import Estimate


@pytest.fixture
def known(tiny, tmp_path) -> Path:
    """A small CLIP of ours, as if it had learned much."""
    from m1clip.model.tokenizer import Tokenizer

    torch.manual_seed(3)
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "known")
    return tmp_path / "known"


@pytest.fixture
def start(tiny_run, known) -> TrainConfig:
    return replace(tiny_run, init=str(known), lr=1e-2, crop_scale=0.6, save_every="1", log_every=1)


@pytest.fixture
def borrowed(tiny_run, tmp_path) -> TrainConfig:
    """Towers of timm and transformers that have never met."""
    weights = vision_file(tmp_path / "w.safetensors")
    text = text_folder(tmp_path / "bert")
    config = replace(tiny_run, vision="timm:test_vit", vision_weights=str(weights), text=f"hf:{text}")
    model = replace(config.model, embed_dim=24, head="mlp", inside=16)
    return replace(
        config, model=model, lr=1e-2, crop_scale=0.6, save_every="1", log_every=1, recipe="frozen", head_dropout=0.3
    )


HEADS = {"vision_projection", "text_projection", "logit_scale"}
SMALL = ["--data", "synthetic:48", "--val-size", "16", "--device", "cpu"]


def weights_of(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(run / name / "model.safetensors")


def moved(run: Path) -> set[str]:
    """What is not as it was at the start, by its first name."""
    before, after = weights_of(run, "start"), weights_of(run)
    assert before.keys() == after.keys()
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"recipe": "locked"}, {"vision_projection", "text_projection", "logit_scale"}),
        ({"recipe": "locked", "lock": "vision"}, {"vision_projection", "text_projection", "logit_scale", "text"}),
        ({"recipe": "lora"}, {"vision", "text", "vision_projection", "text_projection", "logit_scale"}),
        ({"recipe": "full"}, {"vision", "text", "vision_projection", "text_projection", "logit_scale"}),
    ],
)
def test_only_what_a_recipe_lets_learn_moves(changes, want, start, tmp_path):
    config = replace(start, **changes)
    assert train_run(config, tmp_path / "r").finished
    assert moved(tmp_path / "r") == want
    assert m1clip.load(tmp_path / "r").encode_text("a red circle").shape == (1, 24)


def test_unfreeze_lets_the_last_layers_learn(start, tmp_path):
    train_run(replace(start, recipe="full", unfreeze=1), tmp_path / "r")
    before, after = weights_of(tmp_path / "r", "start"), weights_of(tmp_path / "r")
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert any("vision.blocks.0." in name for name in still)
    assert not any(f"{tower}.blocks.1." in name for name in still for tower in ("vision", "text"))
    assert "vision.position" in still
    assert "text.token.weight" in still


@pytest.mark.parametrize("recipe", ["locked", "lora", "full"])
@pytest.mark.parametrize("more", [{}, {"ema": 0.9}])
def test_a_run_of_any_recipe_resumes_exactly(recipe, more, start, tmp_path):
    config = replace(start, recipe=recipe if recipe == "lora" else 0.2, **more)
    train_run(config, tmp_path / "whole")
    assert not train_run(config, tmp_path / "parts", stop_at=3).finished
    assert train_run(from_json(TrainConfig, tmp_path / "parts" / "config.json"), tmp_path / "parts").finished
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_borrowed_towers_resume_exactly_without_their_files(borrowed, tmp_path):
    train_run(borrowed, tmp_path / "whole")
    train_run(borrowed, tmp_path / "parts", stop_at=3)
    (tmp_path / "bert").rename(tmp_path / "gone")
    (tmp_path / "w.safetensors").unlink()
    config = from_json(TrainConfig, tmp_path / "parts" / "config.json")
    assert config.freeze == "both"
    assert train_run(config, tmp_path / "parts").finished
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert moved(tmp_path / "whole") == HEADS


@pytest.mark.parametrize("recipe", ["lora", "full"])
def test_borrowed_towers_learn_too(recipe, borrowed, tmp_path):
    assert train_run(replace(borrowed, recipe=recipe), tmp_path / "r").finished
    assert {"vision", "text"} < moved(tmp_path / "r")


def test_one_borrowed_tower_and_one_of_ours(borrowed, tmp_path):
    train_run(replace(borrowed, text=""), tmp_path / "r")
    assert moved(tmp_path / "r") == {*HEADS, "text"}


def test_a_divided_batch_learns_the_same_with_adapters(start, tmp_path):
    config = replace(start, recipe="lora")
    train_run(config, tmp_path / "whole")
    train_run(replace(config, chunk=4), tmp_path / "parts")
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all((whole[name] - parts[name]).abs().max() < 1e-4 for name in whole)


def test_adapters_kept_apart_come_to_the_same(start, tmp_path):
    config = replace(start, recipe="lora")
    train_run(config, tmp_path / "merged")
    train_run(replace(config, apart=True), tmp_path / "apart")
    assert (tmp_path / "apart" / "model" / "adapter.safetensors").is_file()
    base, first = weights_of(tmp_path / "apart"), weights_of(tmp_path / "apart", "start")
    assert torch.equal(base["vision.blocks.0.attn.qkv.weight"], first["vision.blocks.0.attn.qkv.weight"])
    one, other = load(tmp_path / "merged" / "model"), load(tmp_path / "apart" / "model")
    assert (one.encode_text(["a red circle"]) - other.encode_text(["a red circle"])).abs().max() < 1e-6


def test_adapters_of_attention_alone(start, tmp_path):
    train_run(replace(start, recipe="lora", adapt="attention"), tmp_path / "r")
    before, after = weights_of(tmp_path / "r", "start"), weights_of(tmp_path / "r")
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert "vision.blocks.0.mlp.wide.weight" in still
    assert "vision.blocks.0.attn.qkv.weight" not in still


def test_between_the_start_and_what_was_learned(start, tmp_path):
    config = replace(start, recipe="full")
    train_run(config, tmp_path / "far")
    train_run(replace(config, wise_ft=0.25), tmp_path / "near")
    first, last, near = (
        weights_of(tmp_path / "far", "start"),
        weights_of(tmp_path / "far"),
        weights_of(tmp_path / "near"),
    )
    for name in first:
        assert torch.allclose(near[name], 0.75 * first[name] + 0.25 * last[name], atol=1e-6), name
    events = [row for row in runs.Run(tmp_path / "near").records("event") if row["event"] == "wise-ft"]
    assert events[0]["part"] == 0.25


def test_new_heads_on_a_known_clip_begin_as_the_old_ones(known):
    model = init.with_head(load(known), "mlp", 16)
    assert torch.allclose(model.encode_text(["a cat"]), load(known).encode_text(["a cat"]), atol=1e-6)


def test_features_are_those_of_the_towers(start):
    config = replace(start, recipe="frozen")
    config, found = init.find(config, None)
    data = open_splits(config, 32, 40)
    model = init.begin(config, found, found.tokenizer)
    made = encoded(model, data.train, config, ("vision", "text"), 2, QuietConsole().working)
    assert len(made.views) == 2
    pixels = data.val  # of the size that the tower sees
    seen = encoded(model, pixels, config, ("vision", "text"), 1, QuietConsole().working)
    with torch.no_grad():
        want = model.vision(model.normalize(torch.from_numpy(pixels.take(np.arange(5))[1])))
        assert np.allclose(seen.views[0][:5], want.numpy(), atol=2e-3, rtol=2e-3)
        said = model.text(model.tokenize([data.train.captions(7)[0]]))
        assert np.allclose(made.of_captions(made.start_N[7:8]), said.numpy(), atol=2e-3, rtol=2e-3)
    assert not np.allclose(made.views[0], made.views[1])
    batches = BatchStream(data.train, model.tokenize, 16, 0, 32, features=made)
    one, two = batches.batch(3), batches.batch(3)
    assert torch.equal(one.images_BHWC, two.images_BHWC)
    assert one.images_BHWC.shape == (16, 32)


ENCODE = """
import sys, time
from m1clip.config import (TrainConfig, from_json)
from m1clip.data import row_store
from m1clip.model import clip
from m1clip.training import features
row_store.PART = 8
features.SIZES = (4, 8)
real = features.seen
def slow(*args):
    time.sleep(0.1)
    return real(*args)
features.seen = slow
write = row_store.Store._write
def told(self, missing, made, progress):
    write(self, missing, made, lambda n: (progress(n), print("made", self.folder.name, n, flush=True)))
row_store.Store._write = told
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from helpers import train_run
train_run(from_json(TrainConfig, Path(sys.argv[1])), Path(sys.argv[2]))
"""


def test_encoding_that_is_killed_goes_on_where_it_was(start, tmp_path):
    config = replace(start, recipe="frozen", views=2)
    (tmp_path / "c.json").write_text(to_json(config))
    env = {**os.environ, "M1CLIP_CACHE": str(tmp_path / "cache")}
    tests = str(Path(__file__).parent)

    def run(name: str) -> subprocess.Popen:
        words = [sys.executable, "-c", ENCODE, str(tmp_path / "c.json"), str(tmp_path / name), tests]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env)

    child = run("killed")
    lines = [line for line in (child.stdout.readline() for _ in range(3000)) if line.startswith("made features")]
    child.wait()
    whole = len(lines)
    for path in (tmp_path / "cache").glob("features-*"):
        for one in path.iterdir():
            one.unlink()
    again = run("again")
    seen = 0
    while seen < whole // 2:
        seen += again.stdout.readline().startswith("made features")
    again.send_signal(signal.SIGKILL)
    again.wait()
    last = run("last")
    rest = [line for line in last.stdout if line.startswith("made features")]
    assert last.wait() == 0
    assert 0 < len(rest) <= whole - whole // 2 + 1
    one, other = weights_of(tmp_path / "killed"), weights_of(tmp_path / "last")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_features_of_other_weights_are_not_taken(start, known, tmp_path):
    config = replace(start, recipe="frozen")
    train_run(config, tmp_path / "one")
    cache = Path(os.environ["M1CLIP_CACHE"])
    before = set(cache.glob("features-*"))
    train_run(replace(config, seed=config.seed), tmp_path / "two")
    assert set(cache.glob("features-*")) == before
    model = load(known)
    model.vision.position.data += 0.1
    model.save(known)
    train_run(config, tmp_path / "three")
    assert len(set(cache.glob("features-*")) - before) == 1 + config.views


FAST, SLOW = Estimate(1e-3, 1e-3), Estimate(10.0, 10.0)


def at_hand(what: str) -> init.InitModel:
    tower = object()
    return {
        "a clip": init.InitModel(known=tower),
        "two towers": init.InitModel(vision=tower, text=tower),
        "one tower": init.InitModel(vision=tower),
    }[what]


@pytest.mark.parametrize(
    ("what", "images", "cost", "budget", "want", "told"),
    [
        ("two towers", 6_000, FAST, "", "locked", "never met"),
        ("one tower", 6_000, FAST, "", "locked", "only the vision tower"),
        ("a clip", 500, FAST, "", "lora", "by heart"),
        ("a clip", 50_000, FAST, "", "lora", "not enough"),
        ("a clip", 500_000, FAST, "", "full", "every weight"),
        ("a clip", 500, SLOW, "10m", "locked", "of the 10 min"),
        ("a clip", 500, FAST, "10m", "lora", "by heart"),
    ],
)
def test_auto_says_what_and_why(what, images, cost, budget, want, told):
    config = replace(TrainConfig(), init="x", budget=budget)
    recipe, why = recipes.decide(config, at_hand(what), images, 5 * images, cost)
    assert recipe == want
    assert told in why


def words_of(known: Path, more: str) -> list[str]:
    asked = f"--init KNOWN --data synthetic:48 --val-size 16 --device cpu --name r {more}"
    return [str(known) if word == "KNOWN" else word for word in asked.split()]


def test_auto_from_the_command_line_takes_the_recipes_defaults(known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = verb.parse("m1clip train", words_of(known, "--epochs 1"))
    assert args.training.recipe == "auto"
    assert verb.main(args) == 0
    config = from_json(TrainConfig, tmp_path / "runs" / "r" / "config.json")
    assert (config.recipe, config.lr, config.epochs) == ("lora", RECIPES["lora"]["lr"], 1)
    assert config.batch_size == 48
    reason = [row for row in runs.Run(tmp_path / "runs" / "r").records("event") if row["event"] == "recipe"]
    assert "48 images" in reason[0]["reason"]


def test_locked_then_unfrozen_is_one_command(known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = verb.parse("m1clip train", words_of(known, "--epochs 2 --recipe locked --unfreeze 1"))
    assert verb.main(args) == 0
    first, second = (from_json(TrainConfig, tmp_path / "runs" / name / "config.json") for name in ("r", "r-unfrozen"))
    assert (first.recipe, second.recipe, second.unfreeze) == ("locked", "full", 1)
    assert {"vision", "text"} < moved(tmp_path / "runs" / "r-unfrozen")


def test_a_shape_is_no_wish_one_can_have_of_a_model_that_is_there(capsys):
    for flag in ("--model.text.encoder=bag", "--model.embed-dim=64"):
        assert cli.run_command(["train", "--init", "some.pt", flag]) == 2
        assert flag.partition("=")[0] in capsys.readouterr().err
    assert verb.parse("m1clip train", ["--init", "some.pt", "--model.head", "mlp"]).training.model.head == "mlp"


def test_without_a_start_nothing_has_changed():
    args = verb.parse("m1clip train", [])
    assert args.training == get_preset("nano")
    assert recipe_defaults(get_preset("nano"), "scratch").lr == get_preset("nano").lr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"recipe": "locked", "init": ""}, "needs something learned"),
        ({"recipe": "scratch"}, "begins with nothing"),
        ({"recipe": "lora", "init": "no-such.pt"}, "no model"),
    ],
)
def test_what_does_not_go_together(changes, told, start, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        check(replace(start, **changes), tmp_path / "runs", None, QuietConsole())


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"init": "x", "vision": "timm:y"}, "brings both towers"),
        ({"budget": "soon"}, "budget must be"),
        ({"wise_ft": 1.5}, "wise_ft"),
        ({"vision_weights": "x"}, "needs --vision"),
    ],
)
def test_wrong_values(changes, told):
    with pytest.raises(ValueError, match=told):
        replace(TrainConfig(), **changes)


def test_a_damaged_start_is_a_sentence_on_the_command_line(known, tmp_path):
    file = known / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "m1clip", "train", "--init", str(known), "--recipe", "lora", "--data", "synthetic:32"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "damaged" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - began < 60


def test_the_result_is_an_ordinary_model_and_telemetry_is_complete(borrowed, tmp_path):
    train_run(borrowed, tmp_path / "r")
    run = runs.Run(tmp_path / "r")
    steps = list(run.records("step"))
    assert [row["step"] for row in steps] == [*range(1, 9)]
    assert all(row["loss"] is not None for row in steps)
    assert len(list(run.records("eval"))) == 2
    config = json.loads((tmp_path / "r" / "model" / "config.json").read_text())
    assert config["vision"]["timm"] == "test_vit"
    assert config["text"]["hf"]["model_type"] == "bert"


def test_the_activation_is_part_of_a_feature_s_name(start, known, tmp_path):
    cache = Path(os.environ["M1CLIP_CACHE"])
    train_run(replace(start, recipe="frozen"), tmp_path / "one")
    before = set(cache.glob("features-*"))
    config = json.loads((known / "config.json").read_text())
    (known / "config.json").write_text(json.dumps({**config, "activation": "quick_gelu"}))
    train_run(replace(start, recipe="frozen"), tmp_path / "two")
    assert set(cache.glob("features-*")) - before


def test_a_second_stage_keeps_flags_and_is_never_a_stale_one(known, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--init", str(known), "--recipe", "locked", "--unfreeze", "1", "--name", "r", "--epochs", "1"]
    words += ["--crop-scale", "1", "--no-flip"]
    assert verb.main(verb.parse("m1clip train", words)) == 0
    second = tmp_path / "runs" / "r-unfrozen"
    config = from_json(TrainConfig, second / "config.json")
    assert (config.crop_scale, config.hflip) == (1, False)
    assert verb.main(verb.parse("m1clip train", [*words, "--overwrite", "--lr", "0.05"])) == 0
    first = weights_of(tmp_path / "runs" / "r")
    assert all(torch.equal(value, first[name]) for name, value in weights_of(second, "start").items())


def test_a_tower_without_weights_is_not_locked(borrowed, tmp_path):
    config = replace(borrowed, vision_weights="none", head_dropout=0.0)
    train_run(config, tmp_path / "r")
    assert moved(tmp_path / "r") == {*HEADS, "vision"}
    train_run(config, tmp_path / "again")
    one, other = weights_of(tmp_path / "r", "start"), weights_of(tmp_path / "again", "start")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_wise_ft_of_nothing_is_refused_at_once(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="--wise-ft"):
        check(replace(tiny_run, wise_ft=0.5), tmp_path / "runs", None, QuietConsole())
