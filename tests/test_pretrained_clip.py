"""CLIPs of open_clip and transformers whose towers are not ours: embeddings, recipes, refusals by name."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import m1clip
from helpers import train_run
from m1clip.config import TrainConfig, check_config, from_json, recipe_defaults, with_defaults
from m1clip.model.library import LibraryText, LibraryVision, transformers_tokenizer
from m1clip.model.pretrained_clip import import_clip

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
CAPTIONS = ["a photo of a cat", "Two dogs, running_fast!  &amp; far", "x y " * 40]
PLAIN_VIT = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}
PLAIN_TEXT = {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
HF_TOKENS = {"hf_tokenizer_name": "local", "vocab_size": 120, "context_length": 12}
SIGLIP_TEXT = {**PLAIN_TEXT, **HF_TOKENS, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"}
SIGLIP_TEXT |= {"norm_kwargs": {"eps": 1e-6}, "tokenizer_kwargs": {"clean": "canonicalize"}}
CLIPA_TEXT = {**PLAIN_TEXT, **HF_TOKENS, "pool_type": "last", "no_causal_mask": True}
HF_TEXT = {"hf_model_name": "local", "hf_tokenizer_name": "local", "hf_pooler_type": "mean_pooler"}
ROBERTA = {"model_type": "roberta", "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
ROBERTA |= {"num_attention_heads": 2, "intermediate_size": 48, "max_position_embeddings": 40}
MT5 = {"model_type": "mt5", "vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 2}


def timm_tower(name: str, size: int, **settings: Any) -> dict[str, Any]:
    return {"timm_model_name": name, "image_size": size, "timm_model_pretrained": False, **settings}


# vision_cfg, text_cfg, further settings, preprocess_cfg
OPEN_CLIP_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "SigLIP": (
        timm_tower("test_vit", 160, timm_pool="map", timm_proj="none"),
        SIGLIP_TEXT,
        {"embed_dim": 64, "init_logit_bias": -10, "custom_text": True},
        {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"},
    ),
    "SigLIP 2": (
        timm_tower("test_vit", 160, timm_pool="map", timm_proj="none"),
        {**SIGLIP_TEXT, "act_kwargs": {"approximate": "tanh"}},
        {"embed_dim": 64, "init_logit_bias": -10, "custom_text": True},
        {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"},
    ),
    "MobileCLIP": (
        timm_tower("fastvit_t8", 64, timm_pool="avg", timm_proj=None),
        {**PLAIN_TEXT, "no_causal_mask": True},
        {"custom_text": True},
        {"mean": [0.0] * 3, "std": [1.0] * 3, "interpolation": "bilinear"},
    ),
    "EVA-02": (
        timm_tower("eva02_tiny_patch14_224", 224, timm_pool="token", timm_proj=None),
        PLAIN_TEXT,
        {"custom_text": True},
        {},
    ),
    "CoCa": (
        {**PLAIN_VIT, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True},
        {**PLAIN_TEXT, "context_length": 20, "embed_cls": True, "output_tokens": True},
        {"custom_text": True, "multimodal_cfg": {"context_length": 20, "width": 32, "heads": 2, "layers": 1}},
        {},
    ),
    "ResNet": ({"layers": [1, 1, 1, 1], "width": 16, "image_size": 64}, PLAIN_TEXT, {"quick_gelu": True}, {}),
    "ConvNeXt": (timm_tower("test_convnext", 64, timm_pool="", timm_proj="linear"), PLAIN_TEXT, {}, {}),
    "HF text tower": (PLAIN_VIT, {**HF_TEXT, "context_length": 12}, {"hf_config": ROBERTA}, {}),
    "mT5 text tower": (PLAIN_VIT, {**HF_TEXT, "hf_proj_type": "linear"}, {"hf_config": MT5}, {}),
    "CLIPA": (
        {**PLAIN_VIT, "no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True},
        {**CLIPA_TEXT, "tokenizer_kwargs": {"strip_sep_token": True}},
        {},
        {"mean": [0.4] * 3, "std": [0.2] * 3, "resize_mode": "squash", "interpolation": "bilinear"},
    ),
    "end-token pooling": (PLAIN_VIT, {**PLAIN_TEXT, **HF_TOKENS, "pool_type": "eos", "eos_id": 2}, {}, {}),
}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {
    **VISION,
    "vocab_size": 120,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION |= {"image_size": 32, "patch_size": 8}
CROP = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}}
SQUARE = {"size": {"height": 32, "width": 32}}
# config.json, image processor and its settings
TRANSFORMERS_MODELS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "siglip": ({}, "SiglipImageProcessorPil", SQUARE),
    "altclip": (
        {"projection_dim": 24, "text_config": {"project_dim": 24, "max_position_embeddings": 20}},
        "CLIPImageProcessorPil",
        CROP,
    ),
    "chinese_clip": ({"projection_dim": 24}, "CLIPImageProcessorPil", SQUARE | {"do_center_crop": False}),
    "metaclip_2": ({"projection_dim": 24}, "CLIPImageProcessorPil", CROP),
    "vision-text-dual-encoder": (
        {"projection_dim": 24, "vision_config": {"model_type": "vit"}, "text_config": {"model_type": "bert"}},
        "ViTImageProcessorPil",
        SQUARE,
    ),
    "clip": ({"projection_dim": 24, "vision_config": {"layer_norm_eps": 1e-3}}, "CLIPImageProcessorPil", CROP),
}


def images() -> list[Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    return [Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC) for size in ((240, 170), (64, 64), (97, 150))]


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """Weights and batch statistics of which none are interchangeable."""
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.03 * torch.randn_like(weight)
    for name, buffer in model.named_buffers():
        if "running_" in name:
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def save_tokenizer(folder: Path) -> Any:
    """A WordPiece tokenizer in the format of transformers."""
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    specials = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    core.train_from_iterator(CAPTIONS * 3, trainers.WordPieceTrainer(vocab_size=110, special_tokens=specials))
    ends = [("[CLS]", 1), ("[SEP]", 2)]
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names = dict(zip(("pad_token", "cls_token", "sep_token", "unk_token"), specials, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **names, eos_token="[SEP]", model_max_length=12)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_open_clip(kind: str, folder: Path) -> Path:
    """A model of open_clip with random weights, as its own `local-dir:` reads it."""
    import open_clip

    vision, text, settings, preprocess = OPEN_CLIP_MODELS[kind]
    settings, text = {"embed_dim": 48, **settings}, dict(text)
    if "hf_tokenizer_name" in text:
        save_tokenizer(folder)
    if hf_config := settings.pop("hf_config", None):
        (folder / "config.json").write_text(json.dumps(hf_config))
        text["hf_model_name"] = str(folder)
    config = {"model_cfg": {**settings, "vision_cfg": vision, "text_cfg": text}, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    model = randomize(open_clip.create_model(f"local-dir:{folder}", pretrained_text=False))
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "open_clip_model.safetensors")
    return folder


def encode_with_open_clip(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    import open_clip

    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")(CAPTIONS)
    with torch.no_grad():
        image = model.eval().encode_image(torch.stack([preprocess(image) for image in images()]))
        return F.normalize(image, dim=-1), F.normalize(model.encode_text(tokens), dim=-1)


def save_transformers(kind: str, folder: Path) -> Path:
    import transformers

    changes, processor, settings = TRANSFORMERS_MODELS[kind]
    config = {**changes, "vision_config": VISION | changes.get("vision_config", {})}
    config["text_config"] = TEXT | changes.get("text_config", {})
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **config))
    randomize(model).save_pretrained(folder)
    save_tokenizer(folder)
    getattr(transformers, processor)(**settings).save_pretrained(folder)
    return folder


def encode_with_transformers(kind: str, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    padding = {"padding": "max_length" if kind == "siglip" else True, "truncation": True, "max_length": 12}
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(CAPTIONS, return_tensors="pt", **padding)
    names = ["input_ids"] if kind == "siglip" else ["input_ids", "attention_mask"]
    _, processor, settings = TRANSFORMERS_MODELS[kind]
    pixels = getattr(transformers, processor)(**settings)(images(), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        image = model.get_image_features(pixel_values=pixels).pooler_output
        text = model.get_text_features(**{name: tokens[name] for name in names}).pooler_output
    return F.normalize(image, dim=-1), F.normalize(text, dim=-1)


def assert_embeds(ours: m1clip.CLIP, image: torch.Tensor, text: torch.Tensor) -> None:
    torch.testing.assert_close(ours.encode_image(images()), image, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours.encode_text(CAPTIONS), text, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", OPEN_CLIP_MODELS)
def test_a_model_of_open_clip_gives_its_embeddings_and_is_saved_self_contained(kind, tmp_path):
    (tmp_path / "theirs").mkdir()
    folder = save_open_clip(kind, tmp_path / "theirs")
    expected = encode_with_open_clip(folder)
    ours, _ = import_clip(str(folder))
    assert isinstance(ours.vision, LibraryVision) or isinstance(ours.text, LibraryText)
    assert_embeds(ours, *expected)
    ours.save(tmp_path / "ours")
    folder.rename(tmp_path / "elsewhere")
    assert_embeds(m1clip.load(tmp_path / "ours"), *expected)


@pytest.mark.parametrize("kind", TRANSFORMERS_MODELS)
def test_a_dual_encoder_of_transformers_gives_its_embeddings_and_is_saved_self_contained(kind, tmp_path):
    folder = save_transformers(kind, tmp_path / "theirs")
    expected = encode_with_transformers(kind, folder)
    ours, _ = import_clip(f"hf:{folder}")
    assert isinstance(ours.vision, LibraryVision)
    assert_embeds(ours, *expected)
    ours.save(tmp_path / "ours")
    folder.rename(tmp_path / "elsewhere")
    assert_embeds(m1clip.load(tmp_path / "ours"), *expected)


def test_a_sentencepiece_tokenizer_of_siglip_keeps_its_ids(tmp_path):
    from sentencepiece import SentencePieceTrainer
    from transformers import SiglipTokenizer

    (tmp_path / "text.txt").write_text("\n".join([*CAPTIONS, "the quick brown fox jumps over lazy dogs"] * 20))
    SentencePieceTrainer.train(input=str(tmp_path / "text.txt"), model_prefix=str(tmp_path / "spiece"), vocab_size=40)
    theirs = SiglipTokenizer(str(tmp_path / "spiece.model"), model_max_length=16)
    theirs.save_pretrained(tmp_path / "tokenizer")
    ours, length = transformers_tokenizer(tmp_path / "tokenizer", "", {"model_type": "siglip"})
    padding = {"padding": "max_length", "truncation": True, "max_length": 16}
    texts = ["a photo of a cat", "Two dogs, RUNNING far!"]
    assert ours(texts, length).tolist() == theirs(texts, **padding)["input_ids"]
    assert len({tuple(row) for row in ours(texts, length).tolist()}) == 2


def test_logits_keep_temperature_and_bias(tmp_path):
    import open_clip

    folder = save_open_clip("SigLIP", tmp_path)
    theirs = open_clip.create_model(f"local-dir:{folder}")
    ours, _ = import_clip(str(folder))
    pixels, tokens = torch.randn(2, 3, 160, 160), ours.tokenize(CAPTIONS)
    with torch.no_grad():
        expected, _ = theirs.eval().get_logits(pixels, tokens)
        torch.testing.assert_close(ours(pixels, tokens), expected, rtol=0, atol=1e-4)
    assert ours.config.loss == "sigmoid"


def test_our_own_tower_is_used_where_it_computes_the_same(tmp_path):
    ours, _ = import_clip(str(save_open_clip("ConvNeXt", tmp_path)))
    assert isinstance(ours.vision, LibraryVision)
    assert not isinstance(ours.text, LibraryText)
    assert ours.tokenize(["a cat"]).shape == (1, 8)  # and short captions stay short


def test_a_checkpoint_is_recognized_by_its_shapes_or_needs_its_name(tmp_path, monkeypatch):
    import open_clip

    folder = save_open_clip("ResNet", tmp_path)
    expected = encode_with_open_clip(folder)
    config = json.loads((folder / "open_clip_config.json").read_text())["model_cfg"]
    (folder / "open_clip_config.json").unlink()
    names = {"RN-test": config}
    monkeypatch.setattr(open_clip, "list_models", lambda: list(names))
    monkeypatch.setattr(open_clip, "get_model_config", names.get)
    path = folder / "open_clip_model.safetensors"
    ours, note = import_clip(str(path))
    assert "RN-test" in note
    assert_embeds(ours, *expected)
    names["RN-test-gelu"] = {**config, "quick_gelu": False}
    with pytest.raises(ValueError, match=r"CLIP with a ResNet; --model-name .*RN-test or RN-test-gelu"):
        import_clip(str(path))
    assert_embeds(import_clip(str(path), model_name="RN-test")[0], *expected)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("visual.trunk.blocks.0.mlp.fc1_g.weight", "EVA-02 vision tower"),
        ("visual.trunk.attn_pool.latent", "SigLIP"),
        ("text_decoder.ln_final.weight", "CoCa"),
        ("visual.trunk.stages.0.blocks.0.token_mixer.scale", "MobileCLIP"),
        ("visual.trunk.stages.0.blocks.0.conv_dw.weight", "ConvNeXt"),
    ],
)
def test_what_needs_open_clip_is_refused_by_its_name_without_it(name, family, tmp_path, monkeypatch):
    from m1clip.model import pretrained

    save_file({name: torch.zeros(2)}, tmp_path / "model.safetensors")
    monkeypatch.setattr(pretrained, "find_spec", lambda library: None)
    with pytest.raises(ValueError, match=rf"is a .*{family}.*pip install 'm1clip\[openclip\]'"):
        import_clip(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "bert"}, "is a bert model, not a dual encoder"),
        ({"model_type": "jina_clip", "auto_map": {"AutoModel": "modeling.X"}}, "jina_clip model, which transformers"),
    ],
)
def test_other_models_of_transformers_are_refused_by_their_name(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        import_clip(str(tmp_path))


@pytest.mark.parametrize("kind", ["siglip", "unknown"])
def test_code_beside_a_model_is_never_run(kind, tmp_path):
    folder = save_transformers("siglip", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "modeling.Config", "AutoModel": "modeling.Model", "AutoTokenizer": "modeling.Tokenizer"}
    config |= {"auto_map": auto_map} | ({"model_type": kind} if kind == "unknown" else {})
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling.py", "configuration.py", "tokenization.py", "__init__.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'RAN')!r}, 'w')")
    with pytest.raises(ValueError, match="never run") if kind == "unknown" else nullcontext():
        import_clip(str(folder))
    assert not (tmp_path / "RAN").exists()


def test_incomplete_weights_are_refused(tmp_path):
    folder = save_transformers("siglip", tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights.pop("vision_model.head.probe")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing \(such as vision_model.head.probe"):
        import_clip(str(folder))


def test_preprocessing_is_read_from_the_processor_config_of_transformers_5(tmp_path):
    folder = save_transformers("siglip", tmp_path)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    expected = import_clip(str(folder))[0].config.vision
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ValueError, match=r"no preprocessor_config\.json"):
        import_clip(str(folder))
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert import_clip(str(folder))[0].config.vision == expected
    assert (expected.resize_mode, expected.mean) == ("squash", (0.5, 0.5, 0.5))


def test_a_saved_tower_of_transformers_without_its_config_is_refused_without_a_download(tmp_path):
    (tmp_path / "theirs").mkdir()
    ours, _ = import_clip(str(save_open_clip("HF text tower", tmp_path / "theirs")))
    ours.save(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    config["text"]["settings"] |= {"hf_config": None}
    config["text"]["settings"]["text_cfg"]["hf_model_name"] = "someone/model"
    (tmp_path / "ours" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="open_clip cannot build this text tower"):
        m1clip.load(tmp_path / "ours")


@pytest.mark.parametrize(
    ("tower", "output", "embedding"),
    [("vision", "proj", "conv1.weight"), ("text", "text_projection", "token_embedding.weight")],
)
def test_the_projection_of_an_open_clip_tower_is_its_last_layer(tower, output, embedding, tmp_path):
    ours, _ = import_clip(str(save_open_clip("CLIPA", tmp_path)))
    layers_from_top = ours.get_submodule(tower).layers_from_top
    assert (layers_from_top(f"net.{output}"), layers_from_top(f"net.{embedding}")) == (1, 3)


def fine_tuning(init: Path, recipe: str) -> TrainConfig:
    settings = {"init": str(init), "batch_size": 8, "epochs": 2, "eval_every": 1, "log_every": 1, "lora_rank": 2}
    settings |= {"data": "synthetic:32", "val_size": 8, "device": "cpu", "unfreeze": 1 if recipe == "full" else 0}
    config = check_config(with_defaults(TrainConfig(**settings), recipe_defaults(TrainConfig(), recipe), settings))
    return replace(config, crop_scale=1.0, hflip=False)


@pytest.mark.parametrize("recipe", ["frozen", "lora", "full"])
@pytest.mark.parametrize("kind", ["ResNet", "siglip"])
def test_every_recipe_trains_and_resumes_exactly(kind, recipe, tmp_path):
    (tmp_path / "init").mkdir()
    save = save_open_clip if kind in OPEN_CLIP_MODELS else save_transformers
    config = fine_tuning(save(kind, tmp_path / "init"), recipe)
    whole = train_run(config, tmp_path / "whole")
    train_run(config, tmp_path / "resumed", stop_at=3)
    (tmp_path / "init").rename(tmp_path / "elsewhere")  # a run keeps its initial model
    resumed = train_run(from_json(TrainConfig, tmp_path / "resumed" / "config.json"), tmp_path / "resumed")
    first, second = (load_file(result.model / "model.safetensors") for result in (whole, resumed))
    initial = load_file(tmp_path / "whole" / "start" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], initial[name]) for name in first)
    assert resumed.scores is not None


class Embed(torch.nn.Module):
    """One tower with its projection head, as a module of its own."""

    def __init__(self, model: m1clip.CLIP, tower: str):
        super().__init__()
        self.model, self.tower = model, tower

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.model.embed_images if self.tower == "vision" else self.model.embed_tokens)(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ResNet", "siglip"])
def test_towers_of_other_libraries_export_to_onnx(kind, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    save = save_open_clip if kind in OPEN_CLIP_MODELS else save_transformers
    model, _ = import_clip(str(save(kind, tmp_path)))
    size = model.config.vision.image_size
    for tower, inputs in (("vision", torch.randn(3, 3, size, size)), ("text", model.tokenize(CAPTIONS))):
        program = torch.onnx.export(Embed(model, tower), (inputs,), dynamo=True)
        program.save(str(tmp_path / "tower.onnx"))
        session = onnxruntime.InferenceSession(str(tmp_path / "tower.onnx"))
        output = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
        expected = Embed(model, tower)(inputs).detach()
        torch.testing.assert_close(torch.from_numpy(output), expected, rtol=0, atol=1e-5)
