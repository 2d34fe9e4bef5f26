"""Zero-shot classification: prompts, the Python API, the command, and equality with open_clip's own code."""

import csv
import io
import json

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import m1clip
from m1clip import cli
from m1clip.model.classify import Classifier, make_classifier
from m1clip.model.clip import CLIP
from m1clip.model.interop import export_clip
from m1clip.model.tokenizer import Tokenizer
from m1clip.prompts import DEFAULT_TEMPLATES, Prompts, fill, parse_prompts
from photos import write_photos

LABELS = ["cat", "old dog", "owl"]


@pytest.fixture(scope="module")
def model() -> CLIP:
    from conftest import tiny_config

    torch.manual_seed(0)
    return CLIP(tiny_config(), Tokenizer.characters()).eval()


@pytest.mark.parametrize(
    ("template", "expected"),
    [("{}", "owl"), ("a {}.", "a owl."), ("{an}", "an owl"), ("a photo of {c}, {c}", "a photo of owl, owl")],
)
def test_a_template_is_filled_as_it_is_or_with_the_article(template, expected):
    assert fill(template, "owl") == expected


def test_prompts_come_from_texts_files_and_descriptions(tmp_path):
    (tmp_path / "t.txt").write_text("a photo of a {c}.\n\na drawing of {an}\n")
    (tmp_path / "t.json").write_text('["a sketch of a {}"]')
    (tmp_path / "d.json").write_text('{"cat": ["it purrs", "a small {}"], "owl": "it flies"}')
    prompts = parse_prompts(["a {}", *(str(tmp_path / name) for name in ("t.txt", "t.json", "d.json"))])
    assert prompts.of("cat")[:4] == ["a cat", "a photo of a cat.", "a drawing of a cat", "a sketch of a cat"]
    assert prompts.of("cat")[4:] == ["it purrs", "a small cat"]
    assert prompts.of("owl")[-1] == "it flies"
    assert parse_prompts([]).templates == DEFAULT_TEMPLATES
    only = parse_prompts([str(tmp_path / "d.json")])
    with pytest.raises(ValueError, match="1 of 3 labels have no description, such as 'old dog'"):
        only.check(LABELS)


def test_the_templates_of_open_clip_can_be_named():
    theirs = [template("cat") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    assert parse_prompts(["openai"]).of("cat") == list(dict.fromkeys(theirs))
    assert len(parse_prompts(["simple"]).templates) == len(open_clip.SIMPLE_IMAGENET_TEMPLATES)


@pytest.mark.parametrize("template", ["a photo", "gone.txt", "wrong.json", "wrong.txt", "deep.json"])
def test_a_template_without_a_place_for_the_label_is_one_sentence(template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_text('{"cat": [1]}')
    (tmp_path / "wrong.txt").write_text("no place\n")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"template|must be a list|not JSON"):
        parse_prompts([template])


def test_zero_shot_predictions_equal_those_of_open_clip(model, tmp_path):
    """The same weights, images and templates: each prediction of open_clip's classifier is ours."""
    export_clip(model, "open_clip", tmp_path / "oc")
    theirs, _, transform = open_clip.create_model_and_transforms(f"local-dir:{tmp_path / 'oc'}")
    names, templates = write_photos(tmp_path, 24), ["a photo of a {}.", "art of the {}.", "{}"]
    labels = [*LABELS, "bus", "tree", "a very long label indeed"]
    tokenize = open_clip.get_tokenizer(f"local-dir:{tmp_path / 'oc'}")
    with torch.no_grad():
        weights_EC = open_clip.build_zero_shot_classifier(theirs.eval(), tokenize, labels, templates)
        images = torch.stack([transform(Image.open(tmp_path / name)) for name in names])
        logits = theirs.logit_scale.exp() * theirs.encode_image(images, normalize=True) @ weights_EC
    ours = model.classify([tmp_path / name for name in names], labels, templates, top_k=6)
    for result, row in zip(ours, logits.softmax(1), strict=True):
        assert [label for label, _ in result.top] == [labels[k] for k in row.argsort(descending=True)]
        assert [value for _, value in result.top] == pytest.approx(sorted(row.tolist(), reverse=True), abs=1e-5)


def test_similarity_and_descriptions_in_python(model, tmp_path):
    files = [tmp_path / name for name in write_photos(tmp_path, 3)]
    expected = model.encode_image(files) @ model.encode_text(LABELS).T
    torch.testing.assert_close(model.similarity(files, LABELS), expected)
    texts = {"cat": ["it purrs", "soft fur"], "dog": ["it barks"]}
    (result,) = model.classify(files[0], texts)
    means = [F.normalize(model.encode_text(of_label).mean(0), dim=0) for of_label in texts.values()]
    logits = model.logit_scale.exp() * torch.stack(means) @ model.encode_image(files[0])[0]
    assert result.label == list(texts)[int(logits.argmax())]
    assert result.probability == pytest.approx(logits.softmax(0).max().item(), abs=1e-5)


def test_labels_and_descriptions_may_be_strings_and_wrong_ones_are_refused(model, tmp_path):
    (name,) = write_photos(tmp_path, 1)
    image = tmp_path / name
    assert model.classify(image, "cat,dog") == model.classify(image, ["cat", "dog"])
    assert model.classify(image, {"Hot_dog": "a sausage", "cat": "it purrs"})[0].label in ("Hot_dog", "cat")
    for labels in (["cat", "cat"], ["cat", "Cat"], ["hot dog", "hot_dog"], ["cat", ""], ["cat"]):
        with pytest.raises(ValueError, match="label"):
            model.classify(image, labels)
    with pytest.raises(ValueError, match="top_k must be at least 1"):
        model.classify(image, ["cat", "dog"], top_k=0)


def test_descriptions_match_labels_of_other_spelling(tmp_path):
    (tmp_path / "d.json").write_text('{"Golden_Retriever": "a dog with long hair", "cat": "it purrs"}')
    prompts = parse_prompts([str(tmp_path / "d.json")])
    assert prompts.of("golden retriever") == ["a dog with long hair"]
    with pytest.raises(ValueError, match="the descriptions are of none of the labels: golden retriever, cat"):
        prompts.check(["bus", "owl"])


def unit(*values: float) -> np.ndarray:
    return np.array(values, np.float32) / np.float32(np.linalg.norm(values))


def test_none_of_these_if_a_null_prompt_fits_as_well_as_the_best_label():
    labels_CE, null_PE = np.stack([unit(1, 0, 0), unit(0, 1, 0)]), unit(0, 0, 1)[None]
    classifier = Classifier(("cat", "dog"), labels_CE, null_PE, 10.0, None)
    images_NE = np.stack([unit(1, 0.2, 0.5), unit(0.2, 0.5, 1), unit(0, 1, 1)])
    assert [result.none_of_these for result in classifier.classify(images_NE, 1)] == [False, True, True]


def test_a_sigmoid_model_has_a_probability_for_each_label_by_itself():
    classifier = Classifier(("cat", "dog"), np.eye(2, dtype=np.float32), unit(1, 1)[None], 10.0, -5.0)
    (result,) = classifier.classify(unit(1, 0)[None], 2)
    assert [value for _, value in result.top] == pytest.approx(torch.tensor([5.0, -5.0]).sigmoid().tolist())


def test_each_label_is_the_mean_of_the_unit_vectors_of_its_prompts(model):
    prompts = Prompts(("a {}", "the {}"))
    classifier = make_classifier(model, LABELS, prompts)
    for label, vector in zip(LABELS, classifier.class_CE, strict=True):
        mean = torch.stack([model.encode_text(text)[0] for text in prompts.of(label)]).mean(0)
        np.testing.assert_allclose(vector, mean / mean.norm(), rtol=1e-5, atol=1e-6)


# The command.
@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model.save(folder / "model")
    write_photos(folder / "pets" / "cat", 3)
    write_photos(folder / "pets" / "old_dog", 2, start=3)
    (folder / "pets" / "owl").mkdir()
    return folder


def call(capsys, *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.run_command(["classify", *map(str, argv), "--device", "cpu"])
    return code, *capsys.readouterr()


def test_json_and_csv_have_a_row_for_each_image(saved, model, capsys):
    labels = "cat,old dog,owl,bus"
    code, out, _ = call(capsys, saved / "model", saved / "pets", "--labels", labels, "--json", "--top-k", 2)
    records = [json.loads(line) for line in out.splitlines()]
    assert (code, len(records)) == (0, 5)
    files = [record["image"] for record in records]
    assert files == sorted(files)
    for record, result in zip(records, model.classify(files, labels.split(","), top_k=2), strict=True):
        assert (record["label"], record["none_of_these"]) == (result.label, result.none_of_these)
        assert record["probability"] == pytest.approx(result.probability, abs=1e-6)
        assert [item["label"] for item in record["top"]] == [label for label, _ in result.top]
    assert [record["truth"] for record in records] == ["cat"] * 3 + ["old dog"] * 2
    _, out, _ = call(capsys, saved / "model", saved / "pets", "--labels", labels, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["label"] for row in rows] == [record["label"] for record in records]


def test_folder_names_are_labels_and_the_accuracy_is_printed(saved, model, capsys):
    code, out, _ = call(capsys, saved / "model", saved / "pets")
    lines = out.splitlines()
    assert code == 0
    files = [line.partition(": ")[0] for line in lines[:5]]
    truth = ["cat" if "/cat/" in file else "old dog" for file in files]
    correct = sum(r.label == t for r, t in zip(model.classify(files, ["cat", "old dog"]), truth, strict=True))
    assert lines[-1].startswith(f"accuracy: {100 * correct / 5:.1f} % (")
    assert lines[-1].endswith("chance 50.0 %")


def test_an_image_that_cannot_be_decoded_is_named_and_counted(saved, tmp_path, capsys):
    (tmp_path / "broken.jpg").write_bytes(b"\xff\xd8\xff not an image")
    files = [saved / "pets" / "cat" / "0000.jpg", tmp_path / "broken.jpg", saved / "pets" / "cat" / "0001.jpg"]
    code, out, err = call(capsys, saved / "model", *files, "--labels", "cat,dog", "--csv", "--batch-size", 1)
    assert code == 1
    assert len(out.splitlines()) == 3
    assert f"{tmp_path}/broken.jpg: " in err
    assert "1 of 3 images could not be decoded" in err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["{}/model"], "which images?"),
        (["{}/model", "{}/gone"], "there is no image or folder"),
        (["{}/model", "{}/pets/owl", "--labels", "a,b"], "has no images in it"),
        (["{}/model", "{}/pets/cat"], "the images are in one folder, so its name is no label"),
        (["{}/model", "{}/pets", "--labels", "cat"], "only 'cat' is given"),
        (["{}/model", "{}/pets", "--labels", "a,b", "--json", "--csv"], "--json and --csv cannot be combined"),
        (["{}/model", "{}/pets", "--labels", "a,b", "--top-k", "0"], "--top-k must be at least 1"),
        (["{}/model", "{}/pets", "--labels", "a,b", "--template", "photo"], "is neither a file nor a template"),
    ],
)
def test_a_wrong_command_is_one_sentence_and_exit_code_2(saved, argv, expected, capsys):
    code, out, err = call(capsys, *(word.format(saved) for word in argv))
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_a_run_is_loaded_by_name(saved, capsys):
    with pytest.raises(FileNotFoundError):
        m1clip.load("gone", runs=saved)
    code, _, err = call(capsys, "gone", saved / "pets", "--runs", saved)
    assert code == 2
    assert "no run 'gone'" in err
