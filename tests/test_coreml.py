"""Core ML packages: the saved program, run op by op, gives the embeddings of torch."""

import json
import logging
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import tiny_config
from helpers import QuietConsole
from m1clip import cli
from m1clip.export.apple import write_packages
from m1clip.export.coreml import convert_image, convert_text
from m1clip.export.export import open_reference
from m1clip.export.graph import Encoders, ImageEncoder, TextEncoder, make_encoders
from m1clip.export.mil import OPS, Feature, MILProgram, NativeProgram
from m1clip.model.clip import CLIP
from m1clip.model.pretrained import load_hf_text, load_timm
from m1clip.model.tokenizer import Tokenizer

ct = pytest.importorskip("coremltools", reason="needs m1clip[coreml]")
CAPTIONS = ["a", "two dogs.", "a caption that is much longer than the context"]
LIMITS = {"fp32": 0.999999, "fp16": 0.99999, "int8": 0.999}  # of the minimum cosine
MODELS = {
    "patch stem, class token, transformer": {"vision": {"layers": 2}, "text": {"layers": 2}},
    "conv stem, mean, bag of words": {
        **{"vision": {"stem": "conv", "pool": "mean"}, "text": {"encoder": "bag_of_words"}},
        **{"activation": "quick_gelu", "head": "mlp"},
    },
    "patch stem, mean, standardized head": {"vision": {"pool": "mean"}, "head": "standardized"},
}


def tiny_encoders(**settings: Any) -> Encoders:
    torch.manual_seed(0)
    for tower in ("vision", "text"):
        settings[tower] = replace(getattr(tiny_config(), tower), **{"layers": 1, **settings.get(tower, {})})
    model = CLIP(replace(tiny_config(), **settings), Tokenizer.characters())
    for weight in model.parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, 0.5, 0.2)  # biases and norms as after training, not 0 and 1
    return make_encoders(model, finite_masks=True)


def tokenize_full(encoder: TextEncoder, texts: list[str]) -> np.ndarray:
    """Ids of the full context length, which a package takes."""
    ids_NL = encoder.model.tokenize(texts).numpy()
    return np.pad(ids_NL, ((0, 0), (0, encoder.context_length - ids_NL.shape[1]))).astype(np.int32)


@pytest.fixture(scope="module")
def encoders() -> Encoders:
    return tiny_encoders()


@pytest.fixture(scope="module")
def text_package(encoders: Encoders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packages") / "text.mlpackage"
    convert_text(encoders.text, path)
    return path


def random_pixels(count: int, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), generator=torch.Generator().manual_seed(0)).float()


@torch.no_grad()
def expected_images(encoder: ImageEncoder, pixels_BCHW: torch.Tensor) -> torch.Tensor:
    return encoder(encoder.model.normalize(pixels_BCHW.permute(0, 2, 3, 1).byte()))


def min_cosine(actual: np.ndarray, expected: torch.Tensor) -> float:
    return torch.cosine_similarity(torch.from_numpy(actual).double(), expected.double()).min().item()


@pytest.mark.parametrize(("model", "precision"), [*zip(MODELS, LIMITS, strict=True)])
def test_packages_give_the_embeddings_of_torch(model, precision, tmp_path):
    encoders, pixels = tiny_encoders(**MODELS[model]), random_pixels(3)
    convert_image(encoders.image, tmp_path / "image.mlpackage", precision)
    images = MILProgram(tmp_path / "image.mlpackage").embed(pixels.numpy())
    assert min_cosine(images, expected_images(encoders.image, pixels)) >= LIMITS[precision]
    convert_text(encoders.text, tmp_path / "text.mlpackage", precision, batch=2)
    texts = MILProgram(tmp_path / "text.mlpackage").embed(tokenize_full(encoders.text, CAPTIONS))
    assert min_cosine(texts, encoders.text.model.encode_text(CAPTIONS)) >= LIMITS[precision]


def test_a_half_precision_mask_is_finite_and_hides_what_follows_the_end(encoders, text_package):
    program = MILProgram(text_package)
    assert any(
        op.op_type == "softmax" and op.outputs[0].dtype == ct.converters.mil.mil.types.fp16 for op in program.ops
    )
    ids_NL = tokenize_full(encoders.text, CAPTIONS)
    embeds = program.embed(ids_NL)
    assert min_cosine(embeds, encoders.text.model.encode_text(CAPTIONS)) >= LIMITS["fp16"]
    ids_NL[0, 3:] = 7  # "a" is start, a, end
    assert np.array_equal(program.embed(ids_NL[:1]), embeds[:1])


def test_ops_of_other_networks_give_the_values_of_torch(tmp_path):
    def forward(x_BCHW):
        pooled = F.max_pool2d(x_BCHW, 3, 2, 1), F.avg_pool2d(x_BCHW, 3, 2, 1, count_include_pad=False)
        padded = F.pad(x_BCHW, (1, 2, 3, 4), "reflect")[:, 1:, 3:-2:3, ::2]
        active = F.hardswish(x_BCHW), F.leaky_relu(x_BCHW), F.elu(x_BCHW), F.hardsigmoid(x_BCHW), F.silu(x_BCHW)
        sums = x_BCHW.cumsum(3), x_BCHW.var(1, keepdim=True), (x_BCHW.abs() + 1).rsqrt(), (x_BCHW.abs() + 1).log()
        order = x_BCHW.flip(1)[:, [2, -1, 0]], x_BCHW.argmax(2).float(), x_BCHW.amin((2, 3)), x_BCHW.clamp(max=0.5)
        norm = F.batch_norm(x_BCHW.relu().floor(), torch.arange(3.0), torch.arange(1.0, 4.0))
        return torch.cat([part.flatten(1) for part in (*pooled, padded, *active, *sums, *order, norm)], 1)

    encoder = tiny_encoders().image
    encoder.forward = forward
    convert_image(encoder, tmp_path / "i.mlpackage", "fp32", 2, pixels="normalized")
    x_BCHW = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    actual = MILProgram(tmp_path / "i.mlpackage").embed(x_BCHW.numpy())
    torch.testing.assert_close(torch.from_numpy(actual), forward(x_BCHW), rtol=1e-5, atol=1e-5)


def test_an_infinite_mask_is_named(tmp_path):
    encoder = tiny_encoders().text
    encoder.forward = lambda ids_BL: torch.where(ids_BL > 3, 1.0, -torch.inf).softmax(-1)
    convert_text(encoder, tmp_path / "text.mlpackage")
    with pytest.raises(ValueError, match="not finite after constant"):
        MILProgram(tmp_path / "text.mlpackage")


@pytest.mark.parametrize("pixels", ["bytes", "normalized"])
def test_eight_images_are_a_tensor_of_bytes_or_normalized_pixels(encoders, pixels, tmp_path):
    names = {"input_name": "input", "output_name": "output"}
    convert_image(encoders.image, tmp_path / "i.mlpackage", "fp16", 8, pixels=pixels, **names)
    program, given = MILProgram(tmp_path / "i.mlpackage"), random_pixels(11)
    assert program.inputs == {"input": Feature((8, 3, 32, 32), "fp32")}
    assert program.outputs == {"output": Feature((8, 24), "fp32")}
    array = given if pixels == "bytes" else encoders.image.model.normalize(given.permute(0, 2, 3, 1))
    assert min_cosine(program.embed(array.numpy()), expected_images(encoders.image, given)) >= LIMITS["fp16"]
    with pytest.raises(ValueError, match="not finite after cast"):
        program.embed(np.full((1, 3, 32, 32), 1e5, np.float32))


def test_an_image_input_has_a_batch_of_one(encoders, tmp_path):
    with pytest.raises(ValueError, match="a batch of 1, not 8"):
        convert_image(encoders.image, tmp_path / "i.mlpackage", batch=8)


def test_float_ids_are_exact_above_what_half_precision_holds(tmp_path):
    config = replace(tiny_config(), text=replace(tiny_config().text, vocab_size=49408, layers=1))
    model = CLIP(config, Tokenizer.characters())
    convert_text(make_encoders(model, finite_masks=True).text, tmp_path / "t.mlpackage", float_ids=True)
    ids_BL = torch.tensor([[1, 49405, 2049, 40001, 2] + [0] * 19])
    program = MILProgram(tmp_path / "t.mlpackage")
    assert program.inputs == {"input_ids": Feature((1, 24), "fp32")}
    with torch.no_grad():
        assert min_cosine(program.embed(ids_BL.float().numpy()), model.embed_tokens(ids_BL)) >= LIMITS["fp16"]


def test_a_package_says_what_it_takes_and_its_conversion_prints_nothing(encoders, tmp_path, capfd, caplog):
    convert_image(encoders.image, tmp_path / "i.mlpackage", "int8")
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert {path.name for path in (tmp_path / "i.mlpackage").iterdir()} == {"Data", "Manifest.json"}
    model = ct.models.MLModel(str(tmp_path / "i.mlpackage"), skip_model_load=True)
    (given,) = model.get_spec().description.input
    assert (given.name, given.type.WhichOneof("Type"), given.type.imageType.width) == ("image", "imageType", 32)
    assert model.author == "m1clip"
    assert "32 × 32" in model.input_description["image"]
    assert model.user_defined_metadata["m1clip.mean"] == "[0.48145466, 0.4578275, 0.40821073]"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_bytes(path: Path) -> None:
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip_bytes], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["Manifest.json", "model.mlmodel", "weight.bin"])
def test_a_damaged_package_is_one_sentence(text_package, name: str, damage: Callable[[Path], None], tmp_path):
    shutil.copytree(text_package, tmp_path / "t.mlpackage")
    (file,) = (tmp_path / "t.mlpackage").rglob(name)
    damage(file)
    with pytest.raises(ValueError, match=r"not a readable Core ML program: .+") as caught:
        MILProgram(tmp_path / "t.mlpackage")
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Core ML package at"):
        MILProgram(tmp_path / "none.mlpackage")


def test_wrong_inputs_are_refused(text_package):
    program = MILProgram(text_package)
    with pytest.raises(ValueError, match="the inputs are input_ids, not ids"):
        program.predict({"ids": np.zeros((1, 24), np.int32)})
    with pytest.raises(ValueError, match=r"must have the shape \(1, 24\), not \(1, 8\)"):
        program.predict({"input_ids": np.zeros((1, 8), np.int32)})
    with pytest.raises(ValueError, match=r"gather \w+ of .+ failed"):
        program.predict({"input_ids": np.full((1, 24), 512, np.int32)})


def test_an_op_that_coremltools_or_the_interpreter_lacks_is_named(text_package, monkeypatch, tmp_path):
    encoder = tiny_encoders().image
    encoder.forward = lambda pixels: torch.special.i0(pixels)
    with pytest.raises(ValueError, match=r"coremltools cannot convert the op \w*i0"):
        convert_image(encoder, tmp_path / "i.mlpackage")
    monkeypatch.delitem(OPS, "softmax")
    with pytest.raises(ValueError, match="an op that cannot be run here: softmax"):
        MILProgram(text_package)


def test_without_coremltools_the_extra_is_named(encoders, monkeypatch, tmp_path):
    monkeypatch.setattr("m1clip.model.pretrained.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'm1clip\[coreml\]'"):
        convert_image(encoders.image, tmp_path / "i.mlpackage")


def test_a_timm_tower_converts(tmp_path):
    pytest.importorskip("timm", reason="needs m1clip[timm]")
    torch.manual_seed(0)
    vision = load_timm("timm:test_efficientnet?weights=none").config
    model = CLIP(replace(tiny_config(), vision=vision), Tokenizer.characters())
    encoder, pixels = make_encoders(model, finite_masks=True).image, random_pixels(2, model.config.vision.image_size)
    convert_image(encoder, tmp_path / "i.mlpackage")
    images = MILProgram(tmp_path / "i.mlpackage").embed(pixels.numpy())
    assert min_cosine(images, expected_images(encoder, pixels)) >= LIMITS["fp16"]


def test_a_transformers_text_tower_converts(tmp_path):
    pytest.importorskip("transformers", reason="needs m1clip[hf]")
    from test_pretrained import CAPTIONS, text_folder

    tower, tokenizer = load_hf_text(f"hf:{text_folder(tmp_path / 'bert')}")
    model = CLIP(replace(tiny_config(), text=tower.config), tokenizer)
    encoder = make_encoders(model, finite_masks=True).text
    convert_text(encoder, tmp_path / "t.mlpackage", batch=3)
    texts = MILProgram(tmp_path / "t.mlpackage").embed(tokenize_full(encoder, CAPTIONS))
    assert min_cosine(texts, model.encode_text(CAPTIONS)) >= LIMITS["fp16"]


@pytest.mark.skipif(sys.platform != "darwin", reason="Core ML runs on macOS only")
def test_core_ml_gives_the_embeddings_of_the_interpreter(encoders, text_package, tmp_path):
    ids_NL = tokenize_full(encoders.text, CAPTIONS)
    native = NativeProgram(text_package).embed(ids_NL)
    assert min_cosine(native, torch.from_numpy(MILProgram(text_package).embed(ids_NL))) >= 0.9999
    convert_image(encoders.image, tmp_path / "i.mlpackage")
    native = NativeProgram(tmp_path / "i.mlpackage").embed(random_pixels(1).numpy())
    assert min_cosine(native, expected_images(encoders.image, random_pixels(1))) >= 0.9999


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML predicts here")
def test_prediction_by_core_ml_is_refused_without_macos(text_package):
    with pytest.raises(ValueError, match="macOS only"):
        NativeProgram(text_package)


def test_an_export_has_packages_for_one_item_and_for_eight_and_says_how_they_were_checked(tmp_path, capsys):
    torch.manual_seed(0)
    CLIP(tiny_config(), Tokenizer.characters()).save(tmp_path / "model")
    argv = ["export", str(tmp_path / "model"), "--to", "coreml", "--out", str(tmp_path / "out"), "--val-size", "8"]
    assert cli.run_command(argv) == 0
    printed = capsys.readouterr().out
    assert "executing the saved MIL program op by op" in printed
    assert ("need macOS" in printed) == (sys.platform != "darwin")
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    lowest = {check["file"]: check["min_cosine"] for check in manifest["checks"]}
    assert len(lowest) == 4
    assert min(lowest.values()) >= LIMITS["fp16"]
    assert MILProgram(tmp_path / "out" / "ImageEncoderBatch8.mlpackage").inputs["pixels"].shape == (8, 3, 32, 32)
    weights = next((tmp_path / "out").rglob("weight.bin"))
    assert str(weights.relative_to(tmp_path / "out")) in manifest["files"]


def test_the_package_of_rclip_takes_eight_normalized_images(encoders, tmp_path):
    model = encoders.image.model
    reference = open_reference(model, None, "", 8, QuietConsole())
    checks, _, _, _ = write_packages("rclip", reference, "fp32", tmp_path, QuietConsole())
    assert checks[0].min_cosine >= LIMITS["fp32"]
    program = MILProgram(tmp_path / checks[0].file)
    assert (*program.inputs, *program.outputs) == ("input", "output")
    assert program.inputs["input"].shape[0] == 8
