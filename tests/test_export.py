"""m1clip export: files that equal torch, refused if they do not; INT8; the folders of products."""

import errno
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tokenizers
import torch

import m1clip
from conftest import tiny_config, tiny_run_config
from helpers import QuietConsole, train_run
from m1clip import cli, sensors
from m1clip.config import ModelConfig, TextConfig, VisionConfig
from m1clip.evals.retrieval import Relevance
from m1clip.export import export as exporting
from m1clip.export import onnx, quantize, verify
from m1clip.export.export import Exporter, Options, export_model, open_reference
from m1clip.export.graph import make_encoders
from m1clip.export.layouts import OnnxEncoders
from m1clip.export.quantize import RECIPES, find_int8
from m1clip.export.verify import ExportFailed, Reference, load_session
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.targets import find_misfit

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
NAMES = {"image": "vision_model.onnx", "text": "text_model.onnx"}
CAPTIONS = ["a red cat", "Two  dogs, running!", "b", "a much longer caption than all of the others " * 3]


@pytest.fixture(autouse=True, scope="module")
def short_timings() -> Iterator[None]:
    """Speeds are not what these tests are about."""
    seconds, verify.SPEED_S = verify.SPEED_S, 0.001
    yield
    verify.SPEED_S = seconds


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with a conv stem, mean pooling and a bag of words: no library has such a model."""
    tiny = tiny_config()
    vision = replace(tiny.vision, stem="conv", pool="mean")
    model = replace(tiny, vision=vision, text=replace(tiny.text, encoder="bag_of_words"), head="mlp")
    path = tmp_path_factory.mktemp("runs") / "bag"
    train_run(replace(tiny_run_config(model), tokenizer="bpe", epochs=6, lr=3e-3), path)
    return path


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run exported to all layouts of ONNX that it fits, in INT8."""
    out = tmp_path_factory.mktemp("exported") / "out"
    model = m1clip.load(run)
    targets = ["onnx", "fastembed", "transformers-js", "immich"]
    results = export_model(model, targets, out, Options(int8=True, max_loss=100), console=QuietConsole())
    assert not [result.problems for result in results if result.failed]
    return out


def test_an_export_equals_torch_in_any_batch(run, tmp_path):
    model = m1clip.load(run)
    result = model.export("onnx", tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "vision_model.onnx")
    texts = onnxruntime.InferenceSession(tmp_path / "out" / "text_model.onnx")
    for batch in (1, 7, 1000):
        pixels = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))
        found = session.run(None, {"pixel_values": pixels.numpy()})[0]
        np.testing.assert_allclose(found, model.embed_images(pixels).detach().numpy(), atol=1e-5)
        ids = model.tokenize((CAPTIONS * batch)[:batch])
        found = texts.run(None, {"input_ids": ids.numpy()})[0]
        np.testing.assert_allclose(found, model.embed_tokens(ids).detach().numpy(), atol=1e-5)
    assert min(check.min_cosine for check in result.checks) > 0.99999
    assert result.after == result.before


def test_the_manifest_has_checksums_versions_and_the_recall_that_onnxruntime_alone_gives(exported, run):
    folder = exported / "onnx"
    manifest = json.loads((folder / "export.json").read_text())
    for name, record in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == record["sha256"]
    assert {path.name for path in folder.iterdir()} == {*manifest["files"], "export.json"}
    assert {"torch", "onnx", "onnxruntime", "m1clip"} <= manifest["versions"].keys()
    assert manifest["cpu_flags"] == sensors.cpu_flags()
    # Recall by a plain loop over validation scenes, without our evaluation code.
    model, reference = m1clip.load(run), open_reference(m1clip.load(run), run / "model", "", 1000, QuietConsole())
    vision, text = (onnxruntime.InferenceSession(folder / manifest[tower]) for tower in ("vision", "text"))
    captions = [reference.pairs.captions(row)[0] for row in range(len(reference))]
    pixels = (
        reference.images(0, len(reference)).transpose(0, 3, 1, 2) - model.mean_C11.numpy()
    ) / model.std_C11.numpy()
    image_NE = vision.run(None, {"pixel_values": pixels})[0]
    text_NE = text.run(None, {"input_ids": model.tokenize(captions).numpy()})[0]
    score_NN = image_NE @ text_NE.T
    correct = [captions[int(row.argmax())] == caption for row, caption in zip(score_NN, captions, strict=True)]
    # Dynamic INT8 rounds by the largest value of a batch, so one image may differ with the size of batches.
    assert np.mean(correct) == pytest.approx(manifest["recall"]["after"]["i2t_r1"], abs=1.01 / len(correct))


def test_a_file_that_differs_from_torch_is_not_left_behind(run, exported, tmp_path, monkeypatch, capsys):
    def wrong(encoder: Any, path: Path, opset: int) -> None:
        """What was exported before, with a wrong weight in the image encoder."""
        model = onnx.load_model(exported / "transformers-js" / "onnx" / NAMES[encoder.name])
        if encoder.name == "image":
            weight = next(one for one in model.graph.initializer if one.name.endswith("vision_projection.linear.bias"))
            weight.raw_data = np.full(weight.dims, 3, np.float32).tobytes()
        onnx.save_model(model, path)

    monkeypatch.setattr(exporting, "export_onnx", wrong)
    out = tmp_path / "out"
    assert cli.run_command(["export", str(run), "--out", str(out)]) == 1
    assert "minimum cosine" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ExportFailed, match="minimum cosine"):
        m1clip.load(run).export("onnx", out)
    out.mkdir()
    (out / "export.json").write_text("earlier")
    assert cli.run_command(["export", str(run), "--out", str(out), "--overwrite"]) == 1
    assert "was not written" in capsys.readouterr().out
    assert (out / "export.json").read_text() == "earlier"
    assert cli.run_command(["export", str(run), "--out", str(out), "--force", "--overwrite"]) == 1
    assert json.loads((out / "export.json").read_text())["passed"] is False


def test_a_fixed_batch_is_refused(run, tmp_path):
    encoder = make_encoders(m1clip.load(run)).image
    torch.onnx.export(encoder, (encoder.example(2),), dynamo=True, verbose=False).save(str(tmp_path / "x.onnx"))
    with pytest.raises(ExportFailed, match="fixed batch of 2"):
        load_session(tmp_path / "x.onnx")


def test_a_full_disk_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "out" / "text_model.onnx"))

    monkeypatch.setattr(onnx, "save_model", full)
    assert cli.run_command(["export", str(run), "--out", str(tmp_path / "out")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_replaced_only_if_it_is_an_export(run, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for flags in ([], ["--overwrite"]):
        assert cli.run_command(["export", str(run), "--out", str(tmp_path / "mine"), *flags]) == 2
        assert "not an earlier export" in capsys.readouterr().err
    (tmp_path / "mine" / "export.json").write_text("{}")
    assert cli.run_command(["export", str(run), "--out", str(tmp_path / "mine")]) == 2
    assert "--overwrite replaces it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "target", "extra"), [("onnxscript", "onnx", "export"), ("coremltools", "coreml", "coreml")]
)
def test_a_missing_extra_says_what_to_install(run, tmp_path, monkeypatch, capsys, library, target, extra):
    from m1clip.model import pretrained

    found = pretrained.find_spec
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None if name == library else found(name))
    assert cli.run_command(["export", str(run), "--to", target, "--out", str(tmp_path / "out")]) == 2
    assert f"pip install 'm1clip[{extra}]'" in capsys.readouterr().err


def test_a_run_without_a_model_or_checkpoint_is_refused(run, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.json").write_text((run / "config.json").read_text())
    assert cli.run_command(["export", str(tmp_path / "new")]) == 2
    assert "no model yet" in capsys.readouterr().err


def test_a_model_without_known_data_is_compared_on_generic_images(tmp_path, capsys):
    torch.manual_seed(0)
    CLIP(tiny_config(), Tokenizer.characters()).save(tmp_path / "model")
    assert cli.run_command(["export", str(tmp_path / "model"), "--to", "m1clip", "--out", str(tmp_path / "out")]) == 0
    assert "generic images" in capsys.readouterr().err
    assert "generic images" in json.loads((tmp_path / "out" / "export.json").read_text())["compared_on"]


def text_reference(model: CLIP) -> Reference:
    """Captions only: each "image" is the embedding of its caption, so that recall is 100 % in fp32."""
    texts = [f"{first}{second} {animal}" for first in "abcdefgh" for second in "stuvwxyz" for animal in ("cat", "dog")]
    with torch.no_grad():
        text_KE = model.encode_text(texts).numpy()
    relevance = Relevance.from_captions([[text] for text in texts])
    return Reference(model, None, texts, list(range(len(texts))), text_KE, text_KE, relevance, "captions")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def text_graph(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, Path]:
    torch.manual_seed(0)
    config = replace(tiny_config(), text=TextConfig(512, 24, 64, 3, 4), embed_dim=32)
    model = CLIP(config, Tokenizer.characters()).eval()
    path = tmp_path_factory.mktemp("text") / "text.onnx"
    onnx.export_onnx(make_encoders(model).text, path)
    return text_reference(model), path


def test_int8_of_all_operators_destroys_a_text_encoder_and_the_gate_sees_it(text_graph, tmp_path, monkeypatch):
    reference, path = text_graph
    monkeypatch.setattr(quantize, "TOWERS", ("text",))
    arguments = (OnnxEncoders(path, path), reference, 0.5, tmp_path, load_session, QuietConsole())
    broken = find_int8(*arguments, recipes=[recipe for recipe in RECIPES if recipe.name == "static, all operators"])
    (trial,) = broken.trials["text"]
    assert "R@1 falls from 100.0 %" in str(trial.problem)
    found = find_int8(*arguments)
    assert found.chosen["text"].problem is None
    assert found.chosen["text"].recipe.name != "static, all operators"
    assert found.chosen["text"].path.stat().st_size < 0.5 * path.stat().st_size


def test_int8_stores_the_weights_of_convolutions_and_matrices_as_bytes(exported):
    graph = onnx.load_model(exported / "onnx" / "vision_model_int8.onnx").graph
    shapes = [list(tensor.dims) for tensor in graph.initializer if tensor.data_type == 1]  # float
    assert any(node.op_type == "Conv" for node in graph.node)
    assert max(np.prod(shape) for shape in shapes) <= 256  # biases of the head; the second convolution has 288


def test_a_tokenizer_that_gives_other_tokens_is_refused(text_graph, tmp_path):
    reference, _ = text_graph
    wrong, right = tmp_path / "wrong.json", tmp_path / "right.json"
    right.write_text(json.dumps(reference.model.tokenizer.to_clip_json()))
    assert verify.find_token_difference(right, reference) is None
    state = json.loads(right.read_text())
    state["normalizer"] = None
    state["post_processor"] = None  # no start and end tokens
    wrong.write_text(json.dumps(state))
    assert "does not give the tokens of the model to 128 of 128 captions" in verify.find_token_difference(
        wrong, reference
    )


def test_a_caption_that_was_cut_without_its_end_token_ends_at_its_last_token(text_graph):
    reference, path = text_graph
    model = reference.model
    ids = model.tokenize(["abcdefgh"])
    cut = ids[:, :6].clone()  # as transformers.js truncates
    kept = cut.clone()
    kept[:, -1] = model.tokenizer.end_id
    found = load_session(path)(cut.numpy())
    np.testing.assert_allclose(found, model.embed_tokens(kept).detach().numpy(), atol=1e-5)


def test_the_tokenizer_of_a_product_gives_our_ids(exported, run):
    model = m1clip.load(run)
    theirs = tokenizers.Tokenizer.from_file(str(exported / "fastembed" / "text" / "tokenizer.json"))
    config = json.loads((exported / "fastembed" / "text" / "tokenizer_config.json").read_text())
    theirs.enable_truncation(config["model_max_length"])
    for caption in CAPTIONS:
        assert theirs.encode(caption).ids == model.tokenizer.encode([caption], model.config.text.context_length)[0]
    assert theirs.token_to_id(config["pad_token"]) == model.tokenizer.settings.pad_id


def test_the_joint_graph_of_transformers_js_has_the_logits_of_torch(exported, run):
    model, folder = m1clip.load(run), exported / "transformers-js" / "onnx"
    pixels, ids = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0)), model.tokenize(CAPTIONS)
    expected = model(pixels, ids).detach().numpy()
    for name, correlation in (("model.onnx", 0.999999), ("model_quantized.onnx", 0.95)):
        session = onnxruntime.InferenceSession(folder / name)
        names = [output.name for output in session.get_outputs()]
        found = dict(
            zip(names, session.run(None, {"pixel_values": pixels.numpy(), "input_ids": ids.numpy()}), strict=True)
        )
        assert np.corrcoef(found["logits_per_image"].ravel(), expected.ravel())[0, 1] >= correlation
        np.testing.assert_array_equal(found["logits_per_text"], found["logits_per_image"].T)
    assert json.loads((folder.parent / "config.json").read_text())["model_type"] == "clip"


def test_embeddings_for_immich_are_filled_with_zeros_to_a_width_that_it_knows(exported, run):
    model, folder = m1clip.load(run), exported / "immich" / "clip" / "ViT-B-32__openai"
    pixels = torch.randn(2, 3, 32, 32)
    found = onnxruntime.InferenceSession(folder / "visual" / "model.onnx").run(None, {"image": pixels.numpy()})[0]
    assert found.shape == (2, 512)
    assert not found[:, model.config.embed_dim :].any()
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_fastembed_opens_its_folder(exported, run, tmp_path):
    fastembed = pytest.importorskip("fastembed", reason="benchmarks/products.py installs it in a venv of its own")
    found = fastembed.TextEmbedding(
        "Qdrant/clip-ViT-B-32-text", specific_model_path=str(exported / "fastembed" / "text")
    )
    expected = m1clip.load(exported / "onnx").encode_text(CAPTIONS)
    np.testing.assert_allclose(np.stack(list(found.embed(CAPTIONS))), expected, atol=1e-4)


OPENAI_SHAPE = ModelConfig(VisionConfig(256, 64, 32, 1, 2), TextConfig(49408, 77, 32, 1, 2), 512)


@pytest.fixture(scope="module")
def openai_model() -> CLIP:
    from m1clip.model.tokenizer import find_openai_vocabulary

    torch.manual_seed(0)
    return CLIP(OPENAI_SHAPE, Tokenizer.from_clip_vocabulary(find_openai_vocabulary())).eval()


def test_rclip_and_immich_get_their_names_types_and_shapes(openai_model, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", lambda name: None)  # tests/test_coreml.py has the package of rclip
    results = export_model(openai_model, ["rclip", "immich"], tmp_path, console=QuietConsole(), val_size=8)
    assert not any(result.failed for result in results)
    assert "RCLIP_USE_ONNX_ON_MACOS=1" in results[0].notes[0]
    rclip = tmp_path / "rclip" / "ViT-B-32-256-datacomp_s34b_b86k"
    immich = tmp_path / "immich" / "clip" / "ViT-B-32__openai"
    expected = {
        rclip / "visual.onnx": ("input", "tensor(float)", [3, 256, 256]),
        rclip / "textual.onnx": ("input", "tensor(int64)", ["length"]),
        immich / "visual" / "model.onnx": ("image", "tensor(float)", [3, 256, 256]),
        immich / "textual" / "model.onnx": ("text", "tensor(int32)", ["length"]),
    }
    for path, (name, kind, shape) in expected.items():
        (node,) = onnxruntime.InferenceSession(path).get_inputs()
        assert (node.name, node.type, node.shape[1:]) == (name, kind, shape)
    assert (tmp_path / "rclip" / "tokenizer" / "bpe_simple_vocab_16e6.txt.gz").is_file()
    # As immich's machine learning tokenizes: padded to the full length.
    tokenizer = tokenizers.Tokenizer.from_file(str(immich / "textual" / "tokenizer.json"))
    pad = json.loads((immich / "textual" / "tokenizer_config.json").read_text())["pad_token"]
    length = json.loads((immich / "config.json").read_text())["text_cfg"]["context_length"]
    tokenizer.enable_padding(length=length, pad_token=pad, pad_id=tokenizer.token_to_id(pad))
    ids = np.array([tokenizer.encode("A photo of a cat").ids], np.int32)
    found = onnxruntime.InferenceSession(immich / "textual" / "model.onnx").run(None, {"text": ids})[0]
    np.testing.assert_allclose(found, openai_model.encode_text("A photo of a cat").numpy(), atol=1e-5)


@pytest.mark.parametrize("target", ["transformers", "sentence-transformers", "infinity", "open_clip"])
def test_folders_of_libraries_are_loaded_by_the_library(openai_model, tmp_path, target):
    result = openai_model.export(target, tmp_path / "out", val_size=8)
    assert {check.checked_by for check in result.checks} == {"open_clip" if target == "open_clip" else "transformers"}
    assert min(check.min_cosine for check in result.checks) > 0.99999
    assert (tmp_path / "out" / "modules.json").exists() == (target == "sentence-transformers")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            "rclip",
            "--model.vision.image-size 256 --model.text.context-length 77 --model.embed-dim 512 --tokenizer openai",
        ),
        ("queryable", "--tokenizer openai"),
        ("transformers", "--preset small"),
        ("open_clip", "--preset small"),
    ],
)
def test_a_product_that_does_not_fit_names_the_flags_to_train_with_before_training(target, words, tmp_path, capsys):
    argv = ["train", "--ship-to", target, "--runs", str(tmp_path), "--data", "synthetic:40", "--steps", "1"]
    assert cli.run_command(argv) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_flags_that_a_product_needs_are_enough(tmp_path):
    argv = ["train", "--ship-to", "rclip", "immich", "--data", "synthetic:40", "--steps", "1", "--batch-size", "8"]
    shape = "--model.vision.image-size 256 --model.text.context-length 77 --model.embed-dim 512 --tokenizer openai"
    small = "--val-size 4 --model.vision.layers 1 --model.text.layers 1 --model.vision.patch-size 32"
    assert cli.run_command([*argv, *shape.split(), *small.split(), "--runs", str(tmp_path), "--name", "x"]) == 0
    config = m1clip.load(tmp_path / "x").config
    assert find_misfit("rclip", config, has_openai_tokenizer=True) is None
    assert config.text.vocab_size == 49408


def test_all_targets_that_fit_are_exported_and_the_others_are_named(run, tmp_path, monkeypatch, capsys):
    calls = list[str]()
    monkeypatch.setattr(Exporter, "export", lambda self, target, folder: calls.append(target))
    monkeypatch.setattr(exporting, "open_reference", lambda *args: None)
    monkeypatch.setattr(Exporter, "__init__", lambda *args: None)
    export_model(m1clip.load(run), ["all"], tmp_path / "out")
    assert calls == ["onnx", "coreml", "immich", "fastembed", "transformers-js"]
    assert "rclip needs" in capsys.readouterr().err
