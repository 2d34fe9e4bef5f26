"""Scores on labelled images: zero-shot, probes, few-shot, robustness, the page, and --zeroshot while training."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, top_k_accuracy_score
from sklearn.neighbors import KNeighborsClassifier

import m1clip
from helpers import QuietConsole
from m1clip import cli
from m1clip.data.splits import Split, SplitPart
from m1clip.evals.embed import Embedder
from m1clip.evals.probe import FewShot, fit_logistic, linear_probe, split_by_label, vote
from m1clip.evals.robustness import CORRUPTIONS, STRENGTHS, corrupt
from m1clip.evals.tasks import TASKS
from m1clip.evals.zeroshot import LabelSet, NotApplicable, calibration_bins, find_labels, gain_is_significant, zero_shot
from m1clip.model.classify import Classifier
from m1clip.run import Run
from photos import SCENES, jpeg, write_photos

NAMES = ("cat", "dog", "owl", "bus", "tree", "fish")


class Labelled:
    """Gray images with labels and one caption each."""

    fingerprint = identity = "labelled"

    def __init__(self, labels, captions=None):
        self.labels, self.texts = labels, captions or [f"a photo of {label}" for label in labels]

    def __len__(self):
        return len(self.labels)

    def label(self, index):
        return self.labels[index]

    def captions(self, index):
        return [self.texts[index]]

    def location(self, index):
        return f"row {index}"


def split_of(labels, captions=None) -> Split:
    pixels = np.zeros((len(labels), 8, 8, 3), np.uint8)
    return Split([SplitPart(Labelled(labels, captions), np.arange(len(labels)), pixels)])


def random_scores(images: int = 200) -> tuple[torch.Tensor, torch.Tensor, Classifier]:
    """Embeddings near their label's, some of them wrong; truth; a classifier. The last label has no images."""
    rng = torch.Generator().manual_seed(0)
    class_CE = F.normalize(torch.randn(len(NAMES), 8, generator=rng), dim=1)
    truth_N = torch.randint(0, len(NAMES) - 1, (images,), generator=rng)
    image_NE = F.normalize(class_CE[truth_N] + 0.5 * torch.randn(images, 8, generator=rng), dim=1)
    return image_NE, truth_N, Classifier(NAMES, class_CE.numpy(), class_CE[:1].numpy(), 8.0, None)


def test_scores_equal_those_of_scikit_learn():
    image_NE, truth_N, classifier = random_scores()
    result = zero_shot(image_NE, LabelSet(NAMES, truth_N), classifier)
    logits, truth = classifier.logits(image_NE.numpy()), truth_N.numpy()
    predicted = logits.argmax(1)
    assert 0.4 < result.accuracy < 0.95
    assert result.accuracy == pytest.approx((predicted == truth).mean())
    assert result.mean_per_class == pytest.approx(balanced_accuracy_score(truth, predicted))
    assert result.top5 == pytest.approx(top_k_accuracy_score(truth, logits, k=5, labels=range(6)))
    assert np.array_equal(result.confusion, confusion_matrix(truth, predicted, labels=range(6)))
    assert result.majority == pytest.approx(np.bincount(truth).max() / 200)
    assert result.recall[-1] is None
    assert result.chance == 1 / 6
    confused = result.details()["most_confused"]
    assert confused[0][0] == max(c for i, row in enumerate(result.confusion) for j, c in enumerate(row) if i != j)


def test_the_calibration_error_equals_a_plain_loop():
    rng = torch.Generator().manual_seed(1)
    probability_N, correct_N = torch.rand(500, generator=rng), torch.rand(500, generator=rng) > 0.4
    bins = calibration_bins(probability_N, correct_N)
    expected = 0.0
    for k in range(15):
        inside = [i for i in range(500) if k / 15 < probability_N[i] <= (k + 1) / 15]
        assert bins[k][0] == len(inside)
        if inside:
            accuracy = sum(bool(correct_N[i]) for i in inside) / len(inside)
            expected += len(inside) / 500 * abs(accuracy - sum(float(probability_N[i]) for i in inside) / len(inside))
    assert sum(n * abs(p - a) for n, p, a in bins) / 500 == pytest.approx(expected, abs=1e-6)


def test_what_is_left_out_or_merged_is_counted():
    labels = find_labels(split_of(["cat", "Cat", "dog", "", "owl", "owl"]), ["dog", "cat", "fish"])
    assert labels.truth_N.tolist() == [1, 1, 0, -1, -1, -1]
    assert labels.notes == (
        "1 image without a label left out",
        "2 images with other labels left out (owl)",
        "1 label without images (fish)",
        "1 label merged with others that differ only in case or spaces",
    )
    with pytest.raises(ValueError, match=r"no image has one of the labels \(a, b\); the data has 'cat'"):
        find_labels(split_of(["cat", "dog"]), ["a", "b"])


def test_captions_are_labels_if_few_are_distinct():
    texts = ["a red mug", "a blue mug"] * 5
    labels = find_labels(split_of([""] * 10, texts))
    assert labels.names == ("a blue mug", "a red mug")
    assert labels.are_captions
    for captions, reason in ((None, "the images have no labels"), ([f"caption {i}" for i in range(10)], "no labels")):
        with pytest.raises(NotApplicable, match=reason):
            find_labels(split_of([""] * 10, captions or [f"x{i}" for i in range(10)]))
    with pytest.raises(NotApplicable, match="all images have the same label, 'cat'"):
        find_labels(split_of(["cat"] * 3))


def test_a_gain_is_significant_by_the_sign_test():
    assert not gain_is_significant(5, 0)  # 2 / 32
    assert gain_is_significant(6, 0)  # 2 / 64
    assert not gain_is_significant(0, 0)
    assert gain_is_significant(2000, 1500)


# Probes.
def clusters(per_label: int, labels: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    centers = F.normalize(torch.randn(labels, 16, generator=torch.Generator().manual_seed(9)), dim=1)
    truth_N = torch.arange(labels).repeat_interleave(per_label)
    return F.normalize(centers[truth_N] + 0.3 * torch.randn(len(truth_N), 16, generator=rng), dim=1), truth_N


def test_probes_learn_and_few_shot_has_every_k():
    (x, y), (x_test, y_test), fits = clusters(20), clusters(25, seed=1), []
    probe = linear_probe(x, y, x_test, y_test, 0, fits.append)
    expected = fit_logistic(x.numpy(), y.numpy(), probe.c).score(x_test.numpy(), y_test.numpy())
    assert probe.accuracy == pytest.approx(expected)
    assert probe.accuracy > 0.8
    assert probe.knn_accuracy > 0.7
    assert [shot.shots for shot in probe.few_shot] == [1, 2, 4, 8, 16]
    means = [shot.mean for shot in probe.few_shot]
    assert means[0] < means[-1]
    assert all(shot.draws == 10 and shot.std >= 0 and not shot.short for shot in probe.few_shot)
    assert (probe.chance, probe.majority) == (0.25, 0.25)
    assert probe == linear_probe(x, y, x_test, y_test, 0, fits.append)


def test_neighbors_vote_as_in_scikit_learn():
    (x, y), (queries, _) = clusters(20), clusters(10, seed=2)
    theirs = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07)).fit(x, y)
    assert np.array_equal(vote(x.numpy(), y.numpy(), queries.numpy(), 5), theirs.predict(queries))


def test_labels_that_differ_between_training_and_test_are_counted():
    (x, y), (x_test, y_test) = clusters(6, labels=3), clusters(2, labels=4, seed=1)
    keep = y_test != 0
    probe = linear_probe(x, y, x_test[keep], y_test[keep], 0, lambda done: None)
    assert probe.notes == (
        "1 labels of the test images do not occur in training: their 2 images are errors",
        "1 labels have training images but no test images",
    )
    assert probe.accuracy <= 4 / 6
    with pytest.raises(NotApplicable, match="all training images have the same label"):
        linear_probe(x[:3], y[:3], x_test, y_test, 0, lambda done: None)


def test_a_label_with_fewer_images_uses_all_of_them():
    x, y = clusters(8)
    keep = [row for row in range(32) if y[row] or row < 3]
    probe = linear_probe(x[keep], y[keep], x, y, 0, lambda done: None)
    assert [(shot.shots, shot.short) for shot in probe.few_shot] == [(1, 0), (2, 0), (4, 1), (8, 1)]
    assert isinstance(probe.few_shot[0], FewShot)


def test_each_label_is_split_by_the_order_of_the_keys():
    truth_N = torch.tensor([0, 0, 0, 0, 1, 1, 2, -1])
    train, test = split_by_label(truth_N, [9, 8, 7, 6, 5, 4, 3, 2], 0.3)
    assert test.tolist() == [3, 5]
    assert train.tolist() == [0, 1, 2, 4, 6]


# Robustness.
@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_stronger_corruption_changes_an_image_more(kind):
    images = np.stack([np.asarray(SCENES.image(i).resize((64, 64))) for i in range(3)])
    changes = [np.abs(corrupt(images, kind, level).astype(int) - images).mean() for level in range(len(STRENGTHS))]
    assert changes == sorted(changes)
    assert changes[0] > 0
    assert np.array_equal(corrupt(images, kind, 2), corrupt(images, kind, 2))
    one = corrupt(images[1:2], kind, 2, first=1)[0]
    assert np.array_equal(one, corrupt(images, kind, 2)[1])  # whatever the chunk


# Everything together.
@pytest.fixture(scope="module")
def pets(tmp_path_factory) -> Path:
    folder, start = tmp_path_factory.mktemp("data"), 0
    for label in ("cat", "dog", "owl", "bus", "tree"):
        write_photos(folder / "pets" / label, 8, start)
        start += 8
    return folder / "pets"


@pytest.fixture(scope="module")
def run(tmp_path_factory, pets) -> Run:
    """Two epochs, evaluated on the labelled images too."""
    from conftest import tiny_config, tiny_run_config

    config = replace(tiny_run_config(tiny_config()), zeroshot=str(pets), best_metric="zeroshot_accuracy")
    folder = tmp_path_factory.mktemp("runs")
    return Run(m1clip.train(config=config, name="r", runs=folder, console=QuietConsole()).run)


def test_zeroshot_accuracy_is_logged_and_selects_the_best_checkpoint(run, pets):
    records = list(run.records("eval"))
    assert [(r["zeroshot_images"], r["zeroshot_labels"], r["zeroshot_chance"]) for r in records] == [(40, 5, 0.2)] * 2
    status = run.read("status.json")
    assert status["best_metric"] == "zeroshot_accuracy"
    assert status["best_score"] == max(record["zeroshot_accuracy"] for record in records)
    result = m1clip.evaluate(run.path, data=str(pets), tasks=["zeroshot"], device="cpu", console=QuietConsole())
    assert result.zeroshot.accuracy == pytest.approx(records[-1]["zeroshot_accuracy"])


def test_every_task_is_done_or_its_reason_is_given(run, pets, capsys):
    capsys.readouterr()
    assert cli.run_command(["eval", str(run.path), "--data", str(pets), "--device", "cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert record["tasks"] == ["retrieval", "zeroshot", "probe", "robustness"]
    assert record["skipped"] == {"edits": "the captions are labels"}
    assert record["split"] == "all"
    right = sum(one["predicted"] == one["label"] for one in record["predictions"])
    assert record["zeroshot"]["accuracy"] == pytest.approx(right / 40)
    assert record["metrics"]["acc1"] == record["zeroshot"]["accuracy"]
    assert {"acc5", "mean_per_class_recall", "lp_acc1", "image_retrieval_recall@5"} <= record["metrics"].keys()
    assert record["probe"]["train_images"] + record["probe"]["test_images"] == 40
    assert {len(scores) for scores in record["robustness"]["scores"].values()} == {5}


def test_the_page_and_its_files(run, pets):
    folder = run.path / "evals" / f"{pets.parent.name}-pets-all"
    if not folder.exists():
        assert cli.run_command(["eval", str(run.path), "--data", str(pets), "--device", "cpu"]) == 0
    names = {file.name for file in folder.iterdir()}
    assert {"eval.html", "eval.md", "eval.json", "predictions.csv", "confusion.png", "calibration.png"} <= names
    assert {"few_shot.png", "robustness.png", "error-1.jpg"} <= names
    with open(folder / "predictions.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 40
    page = (folder / "eval.html").read_text()
    assert "Zero-shot classification</h2>" in page
    assert page.count("data:image/png") == 4
    for file in (folder / "clip_benchmark").iterdir():  # what its CSV builder reads
        result = json.loads(file.read_text())
        assert {"dataset", "model", "pretrained", "task", "metrics", "language"} == result.keys()
        assert result["task"] == file.stem
        assert all(isinstance(value, float | None) for value in result["metrics"].values())


def test_the_report_of_a_run_includes_its_evaluations(run, pets):
    test_the_page_and_its_files(run, pets)
    (run.path / "evals" / "damaged").mkdir(exist_ok=True)
    (run.path / "evals" / "damaged" / "eval.json").write_text('{"zeroshot": {"accuracy": "high"}}')
    assert cli.run_command(["report", str(run.path)]) == 0
    text = (run.path / "report" / "report.md").read_text()
    name = f"{pets.parent.name}-pets-all"
    assert f"## Evaluation: {name}" in text
    assert "### Zero-shot classification" in text
    assert "Zero-shot accuracy on" in text
    assert "eval.json` cannot be read" in text
    assert (run.path / "report" / f"eval-{name}-confusion.png").is_file()


def test_the_tasks_of_synthetic_data_and_a_task_that_is_not_possible(run, tmp_path, capsys):
    result = m1clip.evaluate(run.path, device="cpu", console=QuietConsole())
    assert result.results.done == list(TASKS)
    assert result.split == "val (combinations not in training)"
    assert (result.probe.train_images, result.probe.test_images) == (64, 16)
    (tmp_path / "t.csv").write_text("\n".join(["image,caption", *(f"{i}.jpg,caption {i}" for i in range(6))]))
    for i in range(6):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(i))
    argv = ["eval", str(run.path), "--data", str(tmp_path / "t.csv"), "--device", "cpu"]
    assert cli.run_command([*argv, "--task", "zeroshot"]) == 2
    assert capsys.readouterr().err.endswith("--task zeroshot is not possible: the images have no labels\n")


def test_a_second_task_encodes_nothing_again(run, pets, monkeypatch):
    def evaluate(tasks):
        return m1clip.evaluate(run.path, data=str(pets), tasks=tasks, device="cpu", console=QuietConsole())

    first = evaluate(["zeroshot"])
    monkeypatch.setattr(Embedder, "encode_pixels", property(lambda self: pytest.fail("encoded again")))
    assert evaluate(["zeroshot"]).zeroshot == first.zeroshot
    assert evaluate(["probe"]).probe


def test_the_run_s_own_data_is_evaluated_on_its_validation_split(run, pets, tmp_path):
    options = {"device": "cpu", "console": QuietConsole(), "tasks": ["retrieval"]}
    result = m1clip.train(
        data=str(pets), val_size=10, steps=1, batch_size=8, name="p", runs=tmp_path, console=QuietConsole(),
        model=run.read_config()[0].model, device="cpu",
    )  # fmt: skip
    assert m1clip.evaluate(result.run, data=str(pets), **options).images == 10
    assert m1clip.evaluate(result.run, **options).images == 10
    assert m1clip.evaluate(run.path, data=str(pets), **options).images == 40  # other data, without splits of its own


def test_a_page_has_no_files_of_an_earlier_evaluation(run, pets, tmp_path):
    options = {"device": "cpu", "console": QuietConsole(), "data": str(pets)}
    m1clip.evaluate(run.path, tasks=["zeroshot"], **options).write(tmp_path / "page")
    assert (tmp_path / "page" / "predictions.csv").exists()
    (tmp_path / "page" / "mine.txt").write_text("a note")
    m1clip.evaluate(run.path, tasks=["retrieval"], **options).write(tmp_path / "page")
    names = {str(file.relative_to(tmp_path / "page")) for file in (tmp_path / "page").rglob("*.*")}
    assert names == {"eval.html", "eval.md", "eval.json", "mine.txt", "clip_benchmark/zeroshot_retrieval.json"}


def test_a_probe_matches_labels_of_other_spelling(run, tmp_path):
    for split in ("train", "val"):
        for number, label in enumerate(("cat", "dog")):
            write_photos(tmp_path / split / label, 6, start=6 * number)  # the same images in both splits
    options = {"device": "cpu", "console": QuietConsole(), "tasks": ["probe"], "data": str(tmp_path)}
    result = m1clip.evaluate(run.path, labels="Cat,DOG", **options)
    assert result.probe.notes == ()
    assert result.probe.accuracy > 0


def test_a_part_of_the_training_data_is_evaluated_on_its_validation_split(run, pets, tmp_path):
    write_photos(tmp_path / "more" / "car", 8, start=50)
    write_photos(tmp_path / "more" / "boat", 8, start=60)
    data = f"{pets}+{tmp_path / 'more'}"
    settings = {"steps": 1, "batch_size": 8, "model": run.read_config()[0].model, "device": "cpu", "val_size": 4}
    result = m1clip.train(data=data, name="mixed", runs=tmp_path, console=QuietConsole(), **settings)
    options = {"device": "cpu", "console": QuietConsole(), "tasks": ["retrieval"]}
    assert m1clip.evaluate(result.run, data=str(pets), **options).images == 4


def test_labels_to_choose_from_can_be_given(run, pets):
    options = {"device": "cpu", "console": QuietConsole(), "tasks": ["zeroshot"], "data": str(pets)}
    result = m1clip.evaluate(run.path, labels="cat,dog,fish", templates=["a {}"], **options)
    assert (result.zeroshot.images, result.zeroshot.labels) == (16, ("cat", "dog", "fish"))
    assert result.zeroshot.notes == (
        "24 images with other labels left out (bus, owl, tree)",
        "1 label without images (fish)",
    )
    assert math.isclose(sum(result.zeroshot.counts), 16)


def test_undecodable_images_are_counted_and_refused_if_there_are_many(run, tmp_path, capsys):
    for label in ("cat", "dog"):
        write_photos(tmp_path / "pets" / label, 5)
    (tmp_path / "pets" / "dog" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    argv = ["eval", str(run.path), "--data", str(tmp_path / "pets"), "--task", "zeroshot", "--device", "cpu"]
    assert cli.run_command(argv) == 2
    assert "broken.jpg" in capsys.readouterr().err
    assert cli.run_command([*argv, "--max-bad-rows", "0.5"]) == 0
    out, err = capsys.readouterr()
    assert "zero-shot: 10 images, 2 labels" in out
    assert "broken.jpg" in err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"zeroshot": "gone"}, r"--zeroshot gone: no data source 'gone'"),
        ({"best_metric": "zeroshot_accuracy"}, "needs labelled images: --zeroshot SPEC"),
    ],
)
def test_wrong_zeroshot_settings_are_refused_before_anything_is_written(settings, expected, tmp_path):
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        m1clip.train(data="synthetic:40", steps=1, batch_size=8, runs=tmp_path, console=QuietConsole(), **settings)
    assert not list(tmp_path.iterdir())
