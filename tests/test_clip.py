import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import m1clip
from m1clip.config import PRESETS, ModelConfig
from m1clip.model.clip import CLIP
from m1clip.model.export_clip import convert
from m1clip.model.tokenizer import Tokenizer


@pytest.fixture
def model(tiny: ModelConfig) -> CLIP:
    torch.manual_seed(0)
    return CLIP(tiny, Tokenizer.characters()).eval()


def test_a_image_and_a_string_meet_in_two_lines(model, tmp_path):
    model.save(tmp_path / "m")
    loaded = m1clip.load(tmp_path / "m")
    score = loaded.encode_image(Image.new("RGB", (300, 200), "red")) @ loaded.encode_text("a red thing").T
    assert score.shape == (1, 1)


def test_saved_and_loaded_encodes_the_same(model, tmp_path):
    model.save(tmp_path / "m")
    loaded = m1clip.load(tmp_path / "m")
    images = [Image.fromarray(np.random.default_rng(i).integers(0, 255, (40, 50, 3), np.uint8)) for i in range(3)]
    assert torch.equal(model.encode_image(images), loaded.encode_image(images))
    assert torch.equal(model.encode_text(["a", "b c"]), loaded.encode_text(["a", "b c"]))
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_embeddings_have_length_one(model):
    assert model.encode_text(["one", "two three"]).norm(dim=1).tolist() == pytest.approx([1, 1])


def test_padding_does_not_change_a_caption(model):
    alone = model.encode_text("short")
    beside_a_long_one = model.encode_text(["short", "a much longer caption"])[:1]
    assert torch.allclose(alone, beside_a_long_one, atol=1e-6)


def test_captions_are_read_with_others_of_their_length_and_come_back_in_their_order(model):
    said = ["ab " * (number % 7 + 1) for number in range(50)]
    tokens_BL, key_B = model.tokenize(said), torch.arange(50)
    model.set_regularization(dropout=0.3)
    together = model.text(tokens_BL, key_B)
    alone = torch.cat([model.text(tokens_BL[i : i + 1], key_B[i : i + 1]) for i in range(50)])
    assert torch.allclose(together, alone, atol=1e-5)
    some_BD = torch.randn(together.shape, generator=torch.Generator().manual_seed(1))
    (together * some_BD).sum().backward()
    apart = {name: weight.grad.clone() for name, weight in model.text.named_parameters()}
    model.zero_grad()
    (alone * some_BD).sum().backward()
    for name, weight in model.text.named_parameters():
        assert torch.allclose(weight.grad, apart[name], rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("side", ["vision", "text"])
def test_the_last_block_works_for_one_token_alone_and_nothing_else_changes(model, side):
    """Features and every gradient are those of a tower that takes all tokens through, and then one."""
    torch.manual_seed(0)
    tower = getattr(model, side).train()
    last, met = tower.blocks[-1], []
    forward = last.forward

    def slowly(x_BLD, part, key_B, only_B):
        met.append(only_B)
        every_BLD = forward(x_BLD, part, key_B)
        return every_BLD[torch.arange(len(only_B)), only_B][:, None]

    pixels = torch.randn(5, 3, model.config.vision.image_size, model.config.vision.image_size)
    captions = ["a dog", "two dogs run over the grass", "a cat on a mat", "red", "a red ball and a dog"]
    given = pixels if side == "vision" else model.tokenize(captions)
    found = {}
    for name, way in (("fast", forward), ("slow", slowly)):
        last.forward = way
        tower.zero_grad()
        y_BD = tower(given)
        (y_BD * torch.linspace(-1, 1, y_BD.numel()).view_as(y_BD)).sum().backward()
        found[name] = [y_BD.detach(), *(weight.grad.clone() for weight in tower.parameters())]
    assert met  # the slow way was taken
    for fast, slow in zip(*found.values(), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)


def test_text_is_causal_and_vision_is_not(model):
    tokens = model.tokenize("abcdef")
    states = {}
    hook = model.text.blocks[0].register_forward_hook(lambda m, i, out: states.__setitem__("x", out))
    model.embed_tokens(tokens)
    before = states["x"].clone()
    tokens[0, 4] = 20
    model.embed_tokens(tokens)
    hook.remove()
    assert torch.equal(before[0, :4], states["x"][0, :4])
    assert not torch.equal(before[0, 4:], states["x"][0, 4:])

    hook = model.vision.blocks[-1].register_forward_hook(lambda m, i, out: states.__setitem__("x", out))
    pixels = torch.zeros(1, 3, 32, 32)
    model.embed_images(pixels)
    before = states["x"].clone()
    pixels[..., 16:, 16:] = 1  # the last patch
    model.embed_images(pixels)
    hook.remove()
    assert not torch.equal(before[0, 0], states["x"][0, 0])


@pytest.fixture
def bag(tiny: ModelConfig) -> CLIP:
    torch.manual_seed(0)
    return CLIP(replace(tiny, text=replace(tiny.text, encoder="bag_of_words")), Tokenizer.characters())


def test_to_a_bag_of_words_their_order_is_nothing_and_their_number_little(bag):
    one, other, twice, another = bag.encode_text(["ab cd", "dc ba", "ab cdab cd", "ab ce"])
    assert torch.allclose(one, other, atol=1e-6)
    assert torch.allclose(one, twice, atol=1e-6)
    assert not torch.allclose(one, another, atol=1e-3)


def test_a_bag_of_words_heeds_neither_padding_nor_what_follows_the_end(bag, tmp_path):
    alone, beside = bag.encode_text("a cat"), bag.encode_text(["a cat", "a much longer caption"])[:1]
    assert torch.allclose(alone, beside, atol=1e-6)
    bag.save(tmp_path / "m")
    assert torch.allclose(m1clip.load(tmp_path / "m").encode_text("a cat"), alone, atol=1e-6)


def test_each_caption_loses_words_of_its_own_in_training(bag):
    bag.set_regularization(word_dropout=0.5)
    tokens_BL, key_B = bag.tokenize(["a dog and a cat run"] * 64), torch.arange(64)
    whole, some = bag.embed_tokens(tokens_BL), bag.embed_tokens(tokens_BL, key_B)
    assert torch.equal(some, bag.embed_tokens(tokens_BL, key_B))
    assert torch.allclose(whole[0], whole[1], atol=1e-6)
    assert not torch.allclose(some[0], some[1], atol=1e-3)
    assert some.isfinite().all()


def test_a_caption_never_loses_all_its_words(bag):
    bag.set_regularization(word_dropout=0.9)
    tokens_BL = bag.tokenize(["ab"] * 64)
    made = bag.embed_tokens(tokens_BL, torch.arange(64))
    assert torch.allclose(made.norm(dim=1), torch.ones(64), atol=1e-5)
    made[:, 0].sum().backward()
    assert bag.text.token.weight.grad.norm() < 1e4


def test_a_bag_of_words_has_no_place_in_the_other_libraries(bag, tmp_path):
    plain = replace(bag.config.vision, pool="class", stem="patch")
    model = CLIP(replace(bag.config, vision=plain), Tokenizer.characters())
    with pytest.raises(ValueError, match="bags of words"):
        convert(model, "open_clip", tmp_path / "m")


def test_temperature_starts_at_clips_and_is_clamped(model):
    assert model.logit_scale.exp().item() == pytest.approx(1 / 0.07)
    model.logit_scale.data.fill_(9.0)
    model.clamp_logit_scale()
    assert model.logit_scale.item() == pytest.approx(math.log(100))


def test_sigmoid_models_have_siglips_start(tiny):
    model = CLIP(replace(tiny, loss="sigmoid"))
    assert model.logit_scale.exp().item() == pytest.approx(10)
    assert model.logit_bias.item() == -10


def test_seed_preset_is_the_documented_model():
    with torch.device("meta"):
        model = CLIP(PRESETS["seed"].model)
    assert sum(w.numel() for w in model.parameters()) == 105_426_433
    assert sum(w.numel() for w in model.vision.parameters()) == 85_799_424
    assert sum(w.numel() for w in model.text.parameters()) == 18_971_648


@pytest.mark.parametrize(("preset", "count"), [("base", 151_277_313), ("large", 427_616_513), ("1b", 986_109_441)])
def test_known_shapes_have_the_known_counts(preset, count):
    with torch.device("meta"):
        assert sum(w.numel() for w in CLIP(PRESETS[preset].model).parameters()) == count


def test_weights_start_as_in_clip():
    torch.manual_seed(0)
    model = CLIP(PRESETS["tiny"].model)  # width 256; depth 6 and 4
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


def test_mean_pooling_weighs_every_patch_alike(tiny):
    vision = CLIP(replace(tiny, vision=replace(tiny.vision, pool="mean"))).eval().vision
    states = {}
    vision.blocks[-1].register_forward_hook(lambda m, i, out: states.__setitem__("x", out))
    out = vision(torch.randn(2, 3, 32, 32))
    assert torch.allclose(out, vision.ln_post(states["x"].mean(1)), atol=1e-6)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(model, tmp_path, name):
    model.save(tmp_path / "m")
    (tmp_path / "m" / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        m1clip.load(tmp_path / "m")


def test_weights_of_another_shape_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["embed"] = 48
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=r"misshapen +text_projection.weight +24 × 32 in the file, 48 × 32 in the model"
    ):
        m1clip.load(tmp_path / "m")


def test_weights_of_another_depth_are_named(model, tmp_path):
    model.save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["text"]["depth"] = 3
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"missing +text\.blocks\.2.*\n.*\n(.*\n)*.*more"):
        m1clip.load(tmp_path / "m")


def test_damaged_files_get_a_sentence(model, tmp_path):
    model.save(tmp_path / "m")
    for name, words in {
        "model.safetensors": "damaged",
        "tokenizer.json": "tokenizer",
        "config.json": "config",
    }.items():
        shutil.copytree(tmp_path / "m", tmp_path / name)
        file = tmp_path / name / name
        file.write_bytes(file.read_bytes()[:50])
        with pytest.raises(ValueError, match=words):
            m1clip.load(tmp_path / name)


def test_a_tokenizer_too_large_for_the_table_is_refused(tiny):
    with pytest.raises(ValueError, match="33 tokens"):
        CLIP(replace(tiny, text=replace(tiny.text, vocab=20)), Tokenizer.characters())


def test_a_failed_save_leaves_the_old_model(model, tmp_path, monkeypatch):
    model.save(tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    monkeypatch.setattr("m1clip.model.safe_load.save_file", lambda *a: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(OSError, match="No space"):
        model.save(tmp_path / "m")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
