"""An ONNX export in onnxruntime: compared with the CLIP it was made from, without torch, and damaged."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import m1clip
from m1clip import cli, onnx_model
from m1clip.export.graph import make_encoders
from m1clip.model.clip import CLIP
from m1clip.onnx_model import OnnxCLIP, OnnxSession, load_onnx
from onnx_export import GRAPHS, export_graph, export_tiny, tiny_clip, write_export
from photos import write_photos

TEXTS = ["a red cat", "a bus", "b", "a much longer caption than all of the others", "a bus", "zebra, é!"]


@pytest.fixture(scope="module")
def model() -> CLIP:
    return tiny_clip()


@pytest.fixture(scope="module")
def folder(model: CLIP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(model, tmp_path_factory.mktemp("exported"))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    return [folder / name for name in write_photos(folder, 33)]


def assert_same(ours: np.ndarray, expected: torch.Tensor) -> None:
    assert (type(ours), ours.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3, 7, 33])
def test_embeddings_equal_those_of_torch_in_batches_of_any_size(folder, model, photos, count):
    loaded, texts = m1clip.load(folder), [f"{number} cats {'x' * number}" for number in range(count)]
    assert_same(loaded.encode_image(photos[:count]), model.encode_image(photos[:count]))
    assert_same(loaded.encode_image(photos[:count], batch_size=4), model.encode_image(photos[:count]))
    assert_same(loaded.encode_text(texts), model.encode_text(texts))
    assert_same(loaded.encode_text(texts, batch_size=4), model.encode_text(texts))


def test_inputs_are_those_of_clip(folder, model, photos):
    loaded, pixels = m1clip.load(folder), np.random.default_rng(0).integers(0, 256, (2, 50, 70, 3), np.uint8)
    assert loaded.config == model.config
    assert np.array_equal(loaded.tokenize(TEXTS), model.tokenize(TEXTS).numpy())
    assert_same(loaded.encode_text(TEXTS[0]), model.encode_text(TEXTS[0]))
    assert_same(loaded.encode_text(iter(TEXTS), progress=True), model.encode_text(TEXTS))
    for images in (photos[0], photos[0].read_bytes(), pixels, torch.from_numpy(pixels).permute(0, 3, 1, 2)):
        assert_same(loaded.encode_image(images), model.encode_image(images))
    assert loaded.encode_image([]).shape == loaded.encode_text([]).shape == (0, 24)
    assert_same(loaded.similarity(photos[:3], TEXTS), model.similarity(photos[:3], TEXTS))


def test_wrong_inputs_are_refused_as_by_clip(folder):
    loaded = m1clip.load(folder)
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        loaded.encode_text([], batch_size=0)
    with pytest.raises(TypeError, match="text 1: expected a string, not int"):
        loaded.encode_text(["a", 4])
    with pytest.raises(TypeError, match="image 0: expected a path"):
        loaded.encode_image(None)


@pytest.mark.parametrize("bias", [None, -5.0])
def test_classification_equals_that_of_torch(copied, model, photos, bias):
    write_export(model, copied, logit_bias=bias)
    labels, arguments = {"cat": ["it purrs"], "old dog": ["it barks"], "owl": ["a bird"]}, (["a {}", "the {}"], 2)
    expected = model.classify(photos, labels, *arguments)
    results = m1clip.load(copied).classify(photos, labels, *arguments, batch_size=5)
    for ours, theirs in zip(results, expected, strict=True):
        assert (ours.label, ours.none_of_these, len(ours.top)) == (theirs.label, theirs.none_of_these, 2)
        if bias is None:
            assert [p for _, p in ours.top] == pytest.approx([p for _, p in theirs.top], abs=1e-5)
        else:
            assert 0 < ours.probability < 1


RUN = """
import sys, m1clip
model = m1clip.load(sys.argv[1])
model.encode_text("a cat")
assert model.vision._session is None
model.classify(sys.argv[2], "cat,dog")
from m1clip.cli import run_command
assert run_command(["classify", *sys.argv[1:], "--labels", "cat,dog"]) == 0
assert "torch" not in sys.modules
"""


def test_torch_is_not_imported_and_a_text_needs_only_its_encoder(folder, photos):
    done = subprocess.run([sys.executable, "-c", RUN, folder, photos[0]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(photos[0]))


def test_a_gpu_is_refused_for_an_onnx_model(folder, photos, capsys):
    assert cli.run_command(["classify", str(folder), str(photos[0]), "--labels", "a,b", "--device", "mps"]) == 2
    assert "--device must be auto or cpu for an ONNX model, not mps" in capsys.readouterr().err


def test_a_graph_of_one_text_length_gets_texts_of_that_length(copied, model):
    encoder = make_encoders(model).text
    encoder.example = lambda count: torch.zeros(count, model.config.text.context_length, dtype=torch.long)
    export_graph(encoder, copied / GRAPHS["text"], {0: torch.export.Dim("batch", min=1, max=4096)})
    write_export(model, copied)
    assert_same(m1clip.load(copied).encode_text(TEXTS), model.encode_text(TEXTS))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip_byte, "is damaged: its content does not match export.json; export it again"),
        (truncate, "is damaged: it has .* bytes, not .*; export it again"),
        (Path.unlink, "is missing: export it again"),
    ],
)
def test_a_damaged_graph_is_named_when_it_is_first_used(copied, photos, damage: Callable[[Path], None], words):
    damage(copied / GRAPHS["vision"])
    loaded = m1clip.load(copied)
    assert loaded.encode_text("a cat").shape == (1, 24)
    with pytest.raises(ValueError, match=f"{copied / GRAPHS['vision']} {words}"):
        loaded.encode_image(photos[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision": "../x.onnx"}, r"'../x.onnx' is not the name of a file in its folder"),
        ({"text": ".."}, "'..' is not the name of a file in its folder"),
        ({"text": None}, "None is not the name of a file in its folder"),
        ({"files": {}}, "it has no checksum of vision_model.onnx"),
        ({"files": []}, "it has no checksum of vision_model.onnx"),
        ({"logit_scale": "100"}, "its logit_scale or logit_bias is not a number"),
        ({"logit_scale": float("nan")}, "cannot be read"),
    ],
)
def test_a_wrong_export_json_is_one_sentence(copied, model, changes, words):
    write_export(model, copied, **changes)
    with pytest.raises(ValueError, match=rf"export.json (is damaged: )?.*{words}"):
        m1clip.load(copied)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(copied, name):
    (copied / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing: export it again"):
        load_onnx(copied)


def write_graph(path: Path, inputs: list[int], outputs: list[int], location: str | None = None) -> None:
    """A graph that adds a weight, which may be in another file."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [0.0])
    if location:
        weight.ClearField("float_data")
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
    values = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", inputs), ("y", outputs))]
    node = helper.make_node("Add" if inputs == outputs else "Flatten", ["x", "w"][: 1 + (inputs == outputs)], ["y"])
    graph = helper.make_graph([node], "g", values[:1], values[1:], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    path.write_bytes(proto.SerializeToString())


def test_a_graph_of_another_shape_is_refused(copied, model, photos):
    path = copied / GRAPHS["vision"]
    for inputs, outputs, words in (
        ([1, 3, 32], [1, 96], r"does not fit config.json: its input is x tensor\(float\) \[1, 3, 32\]"),
        ([1, 3, 48, 48], [1, 6912], "does not fit config.json: its input is x"),
        ([1, 3, 32, 32], [1, 3072], r"does not fit config.json: its output is \(1, 3072\), not \(1, 24\)"),
    ):
        write_graph(path, inputs, outputs)
        write_export(model, copied)
        with pytest.raises(ValueError, match=f"{path} {words}"):
            m1clip.load(copied).encode_image(photos[0])
    shutil.copy(copied / GRAPHS["text"], path)
    write_export(model, copied)
    with pytest.raises(ValueError, match=f"{path} does not fit config.json: its input is input_ids"):
        m1clip.load(copied).encode_image(photos[0])


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd"])
def test_weights_outside_of_the_folder_are_not_read(copied, model, photos, location):
    (copied.parent / "secret.bin").write_bytes(bytes(4))
    write_graph(copied / GRAPHS["vision"], [1, 3, 32, 32], [1, 3, 32, 32], location)
    write_export(model, copied)
    with pytest.raises(ValueError, match=rf"{GRAPHS['vision']} cannot be loaded, export it again: .*xternal data"):
        m1clip.load(copied).encode_image(photos[0])


def test_weights_in_a_file_beside_the_graph_are_verified(copied, model, photos):
    path, expected = copied / GRAPHS["vision"], model.encode_image(photos[0])
    proto = onnx.load(path)
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")
    write_export(model, copied)
    assert_same(m1clip.load(copied).encode_image(photos[0]), expected)
    flip_byte(copied / f"{path.name}.data")
    with pytest.raises(ValueError, match=r"vision_model.onnx.data is damaged"):
        m1clip.load(copied).encode_image(photos[0])


def test_eval_needs_the_weights(folder):
    assert type(m1clip.load(folder)) is OnnxCLIP
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors in .*; a model folder has"):
        m1clip.evaluate(folder, data="synthetic:8")


@pytest.mark.parametrize("count", [0, 1, 5, 13])
def test_a_batch_that_is_split_over_threads_has_the_rows_of_single_items(folder, model, count):
    session = OnnxSession(folder / GRAPHS["vision"], threads=3)
    pixels_BCHW = np.random.default_rng(0).standard_normal((count, 3, 32, 32)).astype(np.float32)
    rows = [session.onnx.run(None, {session.input.name: pixels_CHW[None]})[0] for pixels_CHW in pixels_BCHW]
    assert session.is_split
    expected = np.concatenate([np.empty((0, model.config.embed_dim), np.float32), *rows])
    np.testing.assert_allclose(session.run(pixels_BCHW), expected, atol=1e-5)


@pytest.mark.parametrize(("batch", "is_split"), [(1, False), (2, False), (3, True), (16, True)])
def test_few_items_of_a_large_graph_share_all_threads(folder, monkeypatch, batch, is_split):
    monkeypatch.setattr(onnx_model, "SMALL_GRAPH", 0)
    assert OnnxSession(folder / GRAPHS["vision"], 3, batch).is_split == is_split
