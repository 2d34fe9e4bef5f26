import json
from dataclasses import asdict, replace

import pytest

from m1clip import config as c


@pytest.mark.parametrize("name", c.PRESETS)
def test_a_preset_survives_json(name, tmp_path):
    (tmp_path / "config.json").write_text(c.to_json(c.PRESETS[name]))
    assert c.from_json(c.TrainConfig, tmp_path / "config.json") == c.PRESETS[name]


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="did you mean nano"):
        c.preset("nanno")
    with pytest.raises(ValueError, match="there are 1b, base"):
        c.preset("zzzzzz")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("batch", 1, "at least 2"),
        ("lr", 0.0, "above 0 and finite"),
        ("lr", float("nan"), "above 0 and finite"),
        ("lr", float("inf"), "above 0 and finite"),
        ("epochs", 0, "at least 1"),
        ("warmup", 1.5, "below 1"),
        ("weight_decay", -0.1, "0 or more"),
        ("weight_decay", float("nan"), "0 or more"),
        ("seed", -1, "seed"),
        ("threads", -2, "threads"),
    ],
)
def test_an_out_of_range_value_is_named(field, value, words):
    with pytest.raises(ValueError, match=words):
        replace(c.PRESETS["nano"], **{field: value})


def test_shapes_that_cannot_be_built_are_refused():
    with pytest.raises(ValueError, match="not a multiple of patch"):
        c.VisionConfig(image_size=100, patch=16)
    with pytest.raises(ValueError, match="does not divide into 7 heads"):
        c.TextConfig(width=64, heads=7)
    with pytest.raises(ValueError, match="2, 4, 8, 16"):
        c.VisionConfig(image_size=28, patch=14, stem="conv")


def test_a_wrong_key_or_type_in_json_is_named(tmp_path):
    good = asdict(c.PRESETS["nano"])
    cases = {
        "unknown key epoch; did you mean epochs": {**good, "epoch": 3},
        "epochs must be of type int, not 'many'": {**good, "epochs": "many"},
        "unknown key model.vision.widht; did you mean width": {
            **good,
            "model": {**good["model"], "vision": {**good["model"]["vision"], "widht": 3}},
        },
    }
    for words, values in cases.items():
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=words):
            c.from_json(c.TrainConfig, tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1, 2")
    with pytest.raises(ValueError, match=r"config\.json"):
        c.from_json(c.TrainConfig, tmp_path / "config.json")


def test_a_word_or_a_number_is_read_and_anything_else_named():
    assert c.build(c.TrainConfig, {"chunk": "auto"}).chunk == "auto"
    assert c.build(c.TrainConfig, {"chunk": 8}).chunk == 8
    for wrong in ("all", 2.5, None):
        with pytest.raises(ValueError, match="chunk must be auto or int, not"):
            c.build(c.TrainConfig, {"chunk": wrong})
