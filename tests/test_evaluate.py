"""The one evaluator: training, m1clip.evaluate and `m1clip eval` give the same scores, also on labeled folders."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import m1clip
from helpers import QuietConsole
from m1clip import cli
from m1clip.console import Console
from m1clip.data.splits import Split, SplitPart, TrainCaptions
from m1clip.evals.evaluate import evaluate_model
from m1clip.run import Run
from photos import jpeg

LABELS = ("cat", "dog", "owl")
COUNTS = {"train": 6, "val": 4}


class LabeledImages:
    """Images of one gray value per label; labels differ in case."""

    fingerprint = identity = "labeled"
    labels = (0, 0, 0, 0, 1, 1, 1, 2)

    def __len__(self):
        return len(self.labels)

    def captions(self, index):
        label = LABELS[self.labels[index]]
        return [f"a photo of a {label.upper() if index % 2 else label}"]

    def location(self, index):
        return f"row {index}"


class Classifier:
    """Embeds images and captions as one-hot vectors of their label."""

    devices = (torch.device("cpu"), torch.device("cpu"))

    def normalize(self, images_BHWC):
        return images_BHWC

    def embed_images(self, images_BHWC):
        return F.one_hot(images_BHWC[:, 0, 0, 0].long(), 3).float()

    def encode_text(self, texts, batch_size=256):
        return F.one_hot(torch.tensor([LABELS.index(text.split()[-1].lower()) for text in texts]), 3).float()


def labeled_split() -> Split:
    pixels = np.stack([np.full((16, 16, 3), label, np.uint8) for label in LabeledImages.labels])
    return Split([SplitPart(LabeledImages(), np.arange(8), pixels)])


@pytest.mark.parametrize("chunk", [3, 256])
def test_a_perfect_classifier_scores_100_percent_on_labeled_images(chunk):
    evaluation = evaluate_model(Classifier(), labeled_split(), chunk=chunk)
    scores = evaluation.scores
    assert scores.image_to_text.r1 == scores.text_to_image.r1 == 1.0
    assert scores.chance_r1 == pytest.approx((1 / 3 + (4 * 4 + 3 * 3 + 1) / 64) / 2)
    assert not [query for query in evaluation.examples()["queries"] if query["group"] == "errors"]
    assert {query["rank"] for query in evaluation.examples()["queries"]} == {1}


def test_the_record_of_an_evaluation_is_complete_and_strict_json():
    evaluation = evaluate_model(Classifier(), labeled_split())
    record = json.loads(json.dumps(evaluation.record()), parse_constant=pytest.fail)
    assert record["mean_r1"] == 1.0
    assert record["alignment"] == 0.0
    assert record["images"] == record["captions"] == 8
    assert "hard_negatives" in record


@pytest.fixture(scope="module")
def labeled_run(tmp_path_factory) -> SimpleNamespace:
    """A tiny model trained for a few steps on a folder with train/ and val/, each with a folder per label."""
    from conftest import tiny_config, tiny_run_config

    folder, numbers = tmp_path_factory.mktemp("labeled"), iter(range(100))
    for split, count in COUNTS.items():
        for extra, label in enumerate(LABELS):  # labels are not equally frequent
            path = folder / "images" / split / label
            path.mkdir(parents=True)
            for _ in range(count + extra):
                number = next(numbers)
                (path / f"{number}.jpg").write_bytes(jpeg(number))
    config = replace(tiny_run_config(tiny_config()), data=str(folder / "images"), val_size="auto", batch_size=8)
    console = Console((folder / "stderr.txt").open("w"))
    result = m1clip.train(config=config, name="r", runs=folder / "runs", console=console)
    run = Run(folder / "runs" / "r")
    return SimpleNamespace(result=result, run=run, header=folder / "stderr.txt", config=config)


def score_keys(record: dict) -> dict:
    return {key: value for key, value in record.items() if key.startswith(("i2t", "t2i", "chance", "mean_r1"))}


def test_training_the_api_and_the_command_agree_on_labeled_images(labeled_run, capsys):
    *_, logged = labeled_run.run.records("eval")
    expected = score_keys(logged)
    assert score_keys(labeled_run.result.scores.record()) == expected
    assert score_keys(m1clip.evaluate(labeled_run.run.path, device="cpu").scores.record()) == expected
    capsys.readouterr()
    assert cli.run_command(["eval", str(labeled_run.run.path), "--device", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert score_keys(printed) == expected
    assert (printed["images"], printed["captions"]) == (logged["images"], logged["captions"]) == (15, 15)


def test_chance_on_labeled_images_counts_all_images_of_a_label(labeled_run):
    counts = [COUNTS["val"] + extra for extra in range(len(LABELS))]
    expected = sum(count * count / sum(counts) for count in counts) / sum(counts)
    for record in labeled_run.run.records("eval"):
        assert record["chance_t2i_r1"] == pytest.approx(expected)
        assert record["chance_i2t_r1"] == record["chance_label"] == pytest.approx(1 / 3)
    (chance_row,) = (row for row in labeled_run.header.read_text().splitlines() if row.strip().startswith("chance"))
    assert chance_row.split()[-6:] == ["33.3", "%", "33.3", "%", f"{100 * expected:.1f}", "%"]


def test_label_accuracy_is_shown_first_and_in_the_log_and_json(labeled_run, capsys):
    *_, logged = labeled_run.run.records("eval")
    assert (logged["labels"], logged["label_accuracy"]) == (3, logged["i2t_r1"])
    assert logged["most_frequent_label"] == pytest.approx(6 / 15)
    assert cli.run_command(["eval", str(labeled_run.run.path), "--device", "cpu"]) == 0
    first = capsys.readouterr().out.split("\n\n")[1]
    rows = {line.split("  ")[0]: line for line in first.splitlines()}
    assert first.startswith("zero-shot: 15 images, 3 labels")
    assert f" {100 * logged['label_accuracy']:.1f} % (" in rows["top-1"]  # the same prompts as in training
    assert rows["chance"].split()[1:] == ["33.3", "%"]
    assert rows["most frequent label"].split()[3:] == ["40.0", "%"]
    assert labeled_run.result.record()["label_accuracy"] == logged["label_accuracy"]


def test_captions_are_labels_only_if_each_image_has_one_and_few_are_distinct():
    label, caption = [["a cat"], ["A dog "]], [["a cat", "an animal"]]
    assert TrainCaptions.compare(label * 4, label) == TrainCaptions(frozenset({"a cat", "a dog"}), ("a cat", "A dog "))
    for train, val in ((label * 3, label), (label * 4 + caption, label), ([["a cat"]] * 9, [["a cat"]])):
        assert TrainCaptions.compare(train, val).labels == ()
    assert TrainCaptions.compare(None, label * 5) == TrainCaptions(None, ("a cat", "A dog "))


def test_seen_captions_are_those_that_also_occur_in_training():
    val = [["A red cat", "a dog"], ["a tree"]]
    assert TrainCaptions.compare([["a red cat "], ["a blue tree"]], val).seen == {"a red cat"}


def test_the_best_checkpoint_follows_the_logged_scores(labeled_run):
    scores = [record["label_accuracy"] for record in labeled_run.run.records("eval")]
    status = labeled_run.run.read("status.json")
    assert (status["best_score"], status["best_metric"]) == (max(scores), "label_accuracy")
    assert all(score > 0 for score in scores)  # equal captions are not errors: chance is a third


def test_the_table_shows_chance_under_the_scores(labeled_run, capsys):
    assert cli.run_command(["eval", str(labeled_run.run.path), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    chance = next(line for line in lines if line.startswith("chance t→i"))
    assert chance.split()[2] == f"{100 * labeled_run.result.scores.chance_text_to_image.r1:.1f}"


def test_a_validation_split_with_training_images_is_refused(labeled_run, tmp_path):
    data = str(labeled_run.run.path.parent.parent / "images" / "train")  # no splits of its own
    settings = {"data": data, "steps": 1, "batch_size": 8, "model": labeled_run.config.model, "device": "cpu"}
    result = m1clip.train(name="r", runs=tmp_path, val_size=6, console=QuietConsole(), **settings)
    assert m1clip.evaluate(result.run, val_size=5, device="cpu").scores.images == 5
    with pytest.raises(ValueError, match="the run has 6 validation images; --val-size 7 adds training images"):
        m1clip.evaluate(result.run, val_size=7, device="cpu")


def test_another_model_folder_and_split_can_be_evaluated(labeled_run):
    data = str(labeled_run.run.path.parent.parent / "images")
    result = m1clip.evaluate(labeled_run.run.model, data=data, split="all", device="cpu")
    assert result.model == labeled_run.run.model
    assert result.scores.images == sum(3 * count + 3 for count in COUNTS.values())
    assert result.edits == []
    with pytest.raises(ValueError, match="has no test split"):
        m1clip.evaluate(labeled_run.run.model, data=data, split="test", device="cpu")
