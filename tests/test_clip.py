"""The model: towers, heads, logits, saving and loading."""

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import m1clip
from m1clip.config import PRESETS, ModelConfig, TrainConfig
from m1clip.model.clip import CLIP, MODEL_FILES
from m1clip.model.tokenizer import Tokenizer


@pytest.fixture
def model(tiny: ModelConfig) -> CLIP:
    torch.manual_seed(0)
    return CLIP(tiny, Tokenizer.characters()).eval()


@pytest.fixture
def bag(tiny: ModelConfig) -> CLIP:
    torch.manual_seed(0)
    return CLIP(replace(tiny, text=replace(tiny.text, encoder="bag_of_words")), Tokenizer.characters())


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_saved_model_is_three_files_and_encodes_the_same_when_loaded(model, tmp_path):
    model.save(tmp_path / "m")
    loaded = m1clip.load(tmp_path / "m")
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)) for _ in range(3)]
    assert torch.equal(model.encode_image(images), loaded.encode_image(images))
    assert torch.equal(model.encode_text(["a", "b c"]), loaded.encode_text(["a", "b c"]))
    assert {path.name for path in (tmp_path / "m").iterdir()} == {*MODEL_FILES}


def test_one_image_and_one_string_give_unit_rows(model):
    image, text = model.encode_image(Image.new("RGB", (300, 200), "red")), model.encode_text("a red thing")
    assert image.shape == text.shape == (1, 24)
    assert image.norm().item() == pytest.approx(1)
    assert text.norm().item() == pytest.approx(1)


def test_pixels_are_normalized_as_torchvision_does(model):
    images_BHWC = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    mean, std = (torch.tensor(c) for c in (model.config.vision.mean, model.config.vision.std))
    expected = ((images_BHWC / 255 - mean) / std).permute(0, 3, 1, 2)
    torch.testing.assert_close(model.normalize(images_BHWC), expected)


def test_logits_are_scaled_cosine_similarities(model):
    pixels, tokens = torch.randn(3, 3, 32, 32), model.tokenize(["a", "b c", "d"])
    image, text = model.embed_images(pixels), model.embed_tokens(tokens)
    cosine = torch.cosine_similarity(image[:, None], text[None], dim=-1)
    torch.testing.assert_close(model(pixels, tokens), cosine / 0.07)


def test_padding_does_not_change_a_caption(model, bag):
    for clip in (model, bag):
        alone = clip.encode_text("short")
        padded = clip.encode_text(["short", "a much longer caption"])[:1]
        torch.testing.assert_close(alone, padded, rtol=0, atol=1e-6)


def test_text_is_causal_and_vision_is_not(model):
    outputs = []
    for tower in (model.text, model.vision):
        tower.blocks[0].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    tokens = model.tokenize("abcdef")
    model.embed_tokens(tokens)
    tokens[0, 4] = 20
    model.embed_tokens(tokens)
    before, after = outputs
    assert torch.equal(before[0, :4], after[0, :4])
    assert not torch.equal(before[0, 4:], after[0, 4:])
    pixels = torch.zeros(1, 3, 32, 32)
    model.embed_images(pixels)
    pixels[..., 16:, 16:] = 1  # the last patch
    model.embed_images(pixels)
    before, after = outputs[2:]
    assert not torch.equal(before[0, 0], after[0, 0])


def test_mean_pooling_averages_the_patches(tiny):
    vision = CLIP(replace(tiny, vision=replace(tiny.vision, pool="mean"))).eval().vision
    outputs = []
    vision.blocks[-1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    features = vision(torch.randn(2, 3, 32, 32))
    torch.testing.assert_close(features, vision.ln_post(outputs[0].mean(1)))


def test_a_bag_of_words_ignores_word_order_and_repetition(bag):
    caption, reversed_, repeated, other = bag.encode_text(["ab cd", "dc ba", "ab cdab cd", "ab ce"])
    torch.testing.assert_close(caption, reversed_, rtol=0, atol=1e-6)
    torch.testing.assert_close(caption, repeated, rtol=0, atol=1e-6)
    assert not torch.allclose(caption, other, atol=1e-3)


def test_a_saved_bag_of_words_encodes_the_same(bag, tmp_path):
    bag.save(tmp_path / "m")
    torch.testing.assert_close(m1clip.load(tmp_path / "m").encode_text("a cat"), bag.encode_text("a cat"))


def test_word_dropout_is_a_function_of_the_row_key(bag):
    bag.set_regularization(TrainConfig(word_dropout=0.5))
    tokens_BL, key_B = bag.tokenize(["a dog and a cat run"] * 64), torch.arange(64)
    full, dropped = bag.embed_tokens(tokens_BL), bag.embed_tokens(tokens_BL, key_B)
    assert torch.equal(dropped, bag.embed_tokens(tokens_BL, key_B))
    torch.testing.assert_close(full[0], full[1])
    assert not torch.allclose(dropped[0], dropped[1], atol=1e-3)


def test_word_dropout_keeps_at_least_one_word(bag):
    bag.set_regularization(TrainConfig(word_dropout=0.9))
    embeddings = bag.embed_tokens(bag.tokenize(["ab"] * 64), torch.arange(64))
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(64))
    embeddings[:, 0].sum().backward()
    assert bag.text.token.weight.grad.norm() < 1e4


def test_regularization_needs_row_keys(tiny):
    torch.manual_seed(0)
    model = CLIP(replace(tiny, head="mlp"), Tokenizer.characters())
    pixels, key_B = torch.randn(4, 3, 32, 32), torch.arange(4)
    plain = model.embed_images(pixels)
    for setting in ("patch_dropout", "head_dropout"):
        model.set_regularization(TrainConfig(**{setting: 0.5}))
        assert torch.equal(model.embed_images(pixels), plain)
        assert not torch.allclose(model.embed_images(pixels, key_B), plain, atol=1e-3)
    model.set_regularization(TrainConfig())
    assert torch.equal(model.embed_images(pixels, key_B), plain)


def test_a_calibrated_head_standardizes_its_features(tiny):
    head = CLIP(replace(tiny, head="standardized")).vision_projection
    features = 5 + 3 * torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    features[:, 7] = 2.0  # a constant feature must stay finite
    head.calibrate(features)
    expected = (features - features.mean(0)) / features.std(0).clamp(min=1e-3 * features.std(0).mean())
    torch.testing.assert_close(head(features), head.linear(expected), rtol=1e-4, atol=1e-4)


def test_the_temperature_starts_at_clips_and_is_clamped(model):
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    model.logit_scale.data.fill_(9.0)
    model.clamp_logit_scale()
    assert model.logit_scale.item() == pytest.approx(math.log(100))


def test_sigmoid_models_start_as_siglip_does(tiny):
    model = CLIP(replace(tiny, loss="sigmoid"))
    assert model.logit_scale.exp().item() == pytest.approx(10)
    assert model.logit_bias.item() == -10


def test_vit_b16_char_has_a_vit_b16_and_a_six_layer_text_tower():
    with torch.device("meta"):
        model = CLIP(PRESETS["vit-b16-char"].model)
    assert sum(w.numel() for w in model.vision.parameters()) == 85_799_424
    assert sum(w.numel() for w in model.text.parameters()) == 18_971_648
    assert sum(w.numel() for w in model.parameters()) == 105_426_433


@pytest.mark.parametrize(("preset", "count"), [("base", 151_277_313), ("large", 427_616_513), ("1b", 986_109_441)])
def test_presets_have_the_parameter_counts_of_the_published_models(preset, count):
    with torch.device("meta"):
        assert sum(w.numel() for w in CLIP(PRESETS[preset].model).parameters()) == count


def test_weights_are_initialized_as_in_clip():
    torch.manual_seed(0)
    model = CLIP(PRESETS["tiny"].model)  # width 256; 6 and 4 layers
    block = model.vision.blocks[0]
    stds = {
        block.attn.qkv: 256**-0.5,
        block.attn.out: (2 * 256 * 6) ** -0.5,
        block.mlp.wide: (2 * 256) ** -0.5,
        block.mlp.narrow: (2 * 256 * 6) ** -0.5,
        model.text.blocks[0].mlp.narrow: (2 * 256 * 4) ** -0.5,
        model.text.token: 0.02,
        model.text_projection: 256**-0.5,
    }
    for layer, std in stds.items():
        assert layer.weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.text.position.std().item() == pytest.approx(0.01, rel=0.05)
    assert block.mlp.narrow.bias.abs().max() == 0


def test_an_invalid_configuration_is_refused(tiny):
    with pytest.raises(ValueError, match="image_size 30 is not a multiple of patch_size 16"):
        CLIP(replace(tiny, vision=replace(tiny.vision, image_size=30)))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tiny):
    with pytest.raises(ValueError, match="33 tokens, but vocab_size is 20"):
        CLIP(replace(tiny, text=replace(tiny.text, vocab_size=20)), Tokenizer.characters())


@pytest.mark.parametrize("name", MODEL_FILES)
def test_a_missing_file_is_named(model, tmp_path, name):
    model.save(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        m1clip.load(tmp_path / "m")


def test_weights_of_another_shape_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    edit_config(tmp_path / "m", embed_dim=48)
    shapes = r"misshapen \(such as text_projection.weight +24 × 32 in the file, 48 × 32 in the model"
    with pytest.raises(ValueError, match=shapes):
        m1clip.load(tmp_path / "m")


def test_weights_of_another_depth_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    text = json.loads((tmp_path / "m" / "config.json").read_text())["text"]
    edit_config(tmp_path / "m", text={**text, "layers": 3})
    with pytest.raises(ValueError, match=r"12 missing \(such as text\.blocks\.2"):
        m1clip.load(tmp_path / "m")


def test_damaged_files_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    for name, message in {
        "model.safetensors": "is damaged",
        "tokenizer.json": "tokenizer.json cannot be read",
        "config.json": "config.json",
    }.items():
        shutil.copytree(tmp_path / "m", tmp_path / name)
        file = tmp_path / name / name
        file.write_bytes(file.read_bytes()[:50])
        with pytest.raises(ValueError, match=message):
            m1clip.load(tmp_path / name)


def test_a_failed_save_leaves_the_old_model(model, tmp_path, monkeypatch):
    model.save(tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()

    def full_disk(*_):
        raise OSError(28, "No space")

    monkeypatch.setattr("m1clip.model.safe_load.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        model.save(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
