"""Configs: JSON, validation, settings by dotted path, presets and recipe defaults."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from m1clip import config as c

NANO = c.PRESETS["nano"]


@pytest.mark.parametrize("name", c.PRESETS)
def test_a_preset_is_valid_and_unchanged_by_json(name, tmp_path):
    c.check_config(c.PRESETS[name])
    (tmp_path / "config.json").write_text(c.to_json(c.PRESETS[name]))
    assert c.from_json(c.TrainConfig, tmp_path / "config.json") == c.PRESETS[name]


def test_pretrained_towers_are_unchanged_by_json():
    vision = c.TimmConfig("resnet18", 224, 512, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), ("layer3",))
    text = c.HFConfig({"model_type": "bert", "layers": [1, 2]}, 30522, 64, 384)
    config = c.TrainConfig(model=c.ModelConfig(vision, text))
    assert c.from_dict(c.TrainConfig, json.loads(c.to_json(config))) == config


def test_an_unknown_preset_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"no preset 'nanno'; did you mean nano\?"):
        c.get_preset("nanno")
    with pytest.raises(ValueError, match="choose from 1b, base"):
        c.get_preset("zzzzzz")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch_size", 1, "batch_size must be at least 2, not 1"),
        ("lr", 0.0, "lr must be above 0, not 0.0"),
        ("lr", float("nan"), "lr must be finite, not nan"),
        ("lr", float("inf"), "lr must be finite, not inf"),
        ("epochs", 0, "epochs must be at least 1"),
        ("warmup", 1.0, "warmup must be below 1, not 1.0"),
        ("weight_decay", -0.1, "weight_decay must be at least 0"),
        ("weight_decay", float("nan"), "weight_decay must be finite"),
        ("weight_decay", float("inf"), "weight_decay must be finite"),
        ("crop_scale", 0.0, "crop_scale must be at least 0.05"),
        ("seed", -1, "seed must be at least 0"),
        ("threads", -2, "threads must be at least 0"),
        ("val_size", 0, "val_size must be at least 1 or 'auto', not 0"),
        ("chunk", 0, "chunk must be at least 1 or 'auto', not 0"),
        ("template", "a photo", "template needs a {} for the label"),
        ("preset", "nanno", "did you mean nano"),
        ("budget", "ten minutes", "budget must be a duration such as 90s, 10m or 2h"),
        ("save_every", "often", "save_every must be a duration"),
        ("save_every", "0", "save_every must be"),
        ("model.vision.mean", (float("nan"), 0.0, 0.0), "model.vision.mean.0 must be at most 1000, not nan"),
        ("model.vision.std", (1e-300, 1.0, 1.0), "std must be at least 0.0001"),
        ("model.vision.layers", 10**7, "model.vision.layers must be at most 256"),
        ("model.embed_dim", 2**70, "model.embed_dim must be at most 65536"),
        ("word_dropout", 0.1, "word_dropout needs --model.text.encoder bag_of_words"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        c.check_config(c.override(NANO, {field: value}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vision.image_size": 100}, "image_size 100 is not a multiple of patch_size 16"),
        ({"vision.heads": 7}, "vision width 128 is not divisible by 7 heads"),
        ({"text.heads": 7}, "text width 128 is not divisible by 7 heads"),
        ({"text.layers": 0}, "text.layers must be at least 1, not 0"),
        ({"text.context_length": 2}, "context_length must be at least 3"),
        ({"vision.image_size": 70, "vision.patch_size": 14}, "a conv stem needs a patch_size of 2, 4, 8, 16"),
        ({"embed_dim": 0}, "embed_dim must be at least 1, not 0"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        c.check_config(c.override(NANO.model, settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epoch": 3}, r"unknown key epoch; did you mean epochs\?"),
        ({"crop": 0.5}, "unknown key crop; did you mean crop_pct or crop_scale"),
        ({"model": {"vision": {"widht": 3}}}, "unknown key model.vision.widht; did you mean width"),
        ({"model": {"text": {"hed": 3}}}, "unknown key model.text.hed; did you mean head"),
        ({"epochs": "many"}, "epochs must be a valid integer, not 'many'"),
        ({"model": {"vision": {"width": "wide"}}}, "model.vision.width must be a valid integer, not 'wide'"),
        ({"model": {"vision": 3}}, "model.vision must be an object, not 3"),
        ({"hflip": 1}, "hflip must be a valid boolean, not 1"),
        ({"allow": ["urls", "all"]}, "allow.1 must be 'urls' or 'links', not 'all'"),
        ({"recipe": "locked"}, "recipe must be 'auto', 'scratch', 'frozen', 'lora' or 'full', not 'locked'"),
        ({"chunk": "all"}, "chunk must be a valid integer or 'auto', not 'all'"),
        ({"chunk": 2.5}, "chunk must be a valid integer or 'auto', not 2.5"),
        ({"chunk": None}, "chunk must be a valid integer or 'auto', not None"),
        ({"epochs": 0}, "epochs must be at least 1"),
    ],
)
def test_a_wrong_key_or_value_in_config_json_is_named(settings, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(merged(asdict(NANO), settings)))
    with pytest.raises(ValueError, match=words) as refused:
        c.from_json(c.TrainConfig, tmp_path / "config.json")
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: ")


def merged(config: dict, settings: dict) -> dict:
    """Nested dictionaries with other values."""
    inner = {
        key: merged(config[key], value)
        for key, value in settings.items()
        if isinstance(value, dict) and isinstance(config.get(key), dict)
    }
    return {**config, **settings, **inner}


@pytest.mark.parametrize("text", ["[1, 2", "[1, 2]", "3", "\udcff", "[" * 100_000])
def test_a_file_that_is_no_config_is_named(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json "):
        c.from_json(c.TrainConfig, tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match=r"no configuration at .*gone\.json"):
        c.from_json(c.TrainConfig, tmp_path / "gone.json")


def test_missing_keys_have_their_defaults():
    assert c.from_dict(c.TrainConfig, {"chunk": 8}) == c.TrainConfig(chunk=8)
    assert c.from_dict(c.TrainConfig, {"chunk": "auto", "lr": 1}) == c.TrainConfig(lr=1.0)


def test_settings_have_dotted_names_and_leave_the_rest_alone():
    config = c.override(NANO, {"lr": 0.5, "model.vision.width": 256, "model.text.width": 64, "model.head": "mlp"})
    settings = {"lr": 0.5, "model.vision.width": 256, "model.head": "mlp", "epochs": 3, "model.vision.layers": 4}
    assert c.select_settings(config, settings) == settings
    assert c.select_settings(NANO, ["model.vision.width"]) == {"model.vision.width": 128}


def test_an_unknown_setting_gets_a_suggestion():
    with pytest.raises(ValueError, match=r"unknown setting epoch; did you mean epochs\?"):
        c.override(NANO, {"epoch": 3})
    with pytest.raises(ValueError, match="unknown setting widht; did you mean width"):
        c.override(NANO, {"model.vision.widht": 3})


def test_settings_of_the_user_are_checked_and_converted():
    config = c.check_config(c.override(NANO, {"data": Path("photos"), "lr": 1}))
    assert (config.data, config.lr, type(config.lr)) == ("photos", 1.0, float)
    with pytest.raises(ValueError, match="epochs must be a valid integer, not '3'"):
        c.check_config(c.override(NANO, {"epochs": "3"}))
    with pytest.raises(ValueError, match="batch_size must be at least 2"):
        c.check_config(c.override(NANO, {"batch_size": 1}))


def test_given_settings_are_stronger_than_other_defaults():
    config = c.with_defaults(NANO, c.recipe_defaults(NANO, "lora"), {"lr": 0.5, "model.vision.width": 256})
    assert (config.recipe, config.lr, config.model.vision.width) == ("lora", 0.5, 256)
    assert (config.epochs, config.batch_size, config.optimizer) == (3, 64, "adamw")  # of the recipe
    assert config.model.text == NANO.model.text


def test_a_recipe_has_larger_heads_for_separately_trained_encoders():
    both = c.recipe_defaults(c.TrainConfig(vision="timm:x", text="hf:x"), "frozen")
    assert (both["model.head"], both["batch_size"], both["lr"]) == ("mlp", 1024, 3e-3)
    one = c.recipe_defaults(c.TrainConfig(vision="timm:x"), "frozen")
    assert (one["model.head"], one["batch_size"], one["lr"]) == ("mlp", 256, 1e-3)
    assert "model.head" not in c.recipe_defaults(c.TrainConfig(init="clip.pt"), "full")


@pytest.mark.parametrize(("text", "interval"), [("500", (0.0, 500)), ("90s", (90.0, 0)), ("2h", (7200.0, 0))])
def test_checkpoints_are_saved_by_steps_or_by_time(text, interval):
    assert c.TrainConfig(save_every=text).save_interval == interval


def test_arguments_that_contradict_each_other_are_refused():
    for given in ({"resume", "overwrite"}, {"resume", "config"}, {"config", "preset", "lr"}, {"budget", "steps"}):
        with pytest.raises(ValueError, match="cannot be combined"):
            c.check_exclusive(given)
    c.check_exclusive({"config", "overwrite", "name", "epochs", "steps"})
