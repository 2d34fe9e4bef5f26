"""Accuracy against captions with one word changed, by word lists and by the files of benchmarks."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import QuietConsole
from m1clip.data.choices import known_choices, open_choices
from m1clip.data.synthetic import SyntheticScenes
from m1clip.decode import BadImage
from m1clip.evals.edits import Edit, caption_edits, choice_scores, edit_scores, word_lists
from photos import write_photos


class TextEmbedder:
    """Embeddings of texts from a table or a function."""

    def __init__(self, embed):
        self.texts = embed


def unit_vectors(rows: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)), dim=1)


def edits_of(pairs: SyntheticScenes) -> list[Edit]:
    return [(row, kind, text) for row in range(len(pairs)) for kind, text in pairs.edits(row)]


def test_accuracy_is_that_of_each_kind_of_word():
    """Edited colors score below the original caption, all other edits above it."""
    pairs, true_NE = SyntheticScenes(30, split="val"), unit_vectors(30)
    edited = edits_of(pairs)
    factors = torch.tensor([-1.0 if kind == "color" else 2.0 for _, kind, _ in edited])
    edited_ME = factors[:, None] * true_NE[[row for row, _, _ in edited]]
    scores = {s.changed: s for s in edit_scores(TextEmbedder(lambda texts: edited_ME), edited, true_NE, true_NE)}
    assert scores.keys() > {"color"}
    assert sum(score.edits for score in scores.values()) == len(edited)
    assert scores.pop("color").accuracy == 1.0
    assert {score.accuracy for score in scores.values()} == {0.0}


def test_scores_equal_a_plain_loop_over_the_edited_captions():
    pairs, image_NE, embedded = SyntheticScenes(20, split="val"), unit_vectors(20), {}

    def embed(captions):
        torch.manual_seed(1)
        embedded.update(zip(captions, F.normalize(torch.randn(len(captions), 8), dim=1), strict=True))
        return torch.stack([embedded[text] for text in captions])

    text_NE, wins = unit_vectors(20).roll(1, 0), {}
    scores = edit_scores(TextEmbedder(embed), edits_of(pairs), image_NE, text_NE)
    for row in range(20):
        for kind, text in pairs.edits(row):
            wins.setdefault(kind, []).append(float(image_NE[row] @ text_NE[row] > image_NE[row] @ embedded[text]))
    for score in scores:
        assert score.accuracy == pytest.approx(sum(wins[score.changed]) / len(wins[score.changed]))


def test_a_tie_counts_half():
    same_NE = F.normalize(torch.ones(5, 4), dim=1)
    embedder = TextEmbedder(lambda captions: same_NE[:1].expand(len(captions), -1))
    scores = edit_scores(embedder, edits_of(SyntheticScenes(5, split="val")), same_NE, same_NE)
    assert {score.accuracy for score in scores} == {score.chance for score in scores} == {0.5}


@pytest.mark.parametrize(
    ("captions", "kind", "expected"),
    [
        (["A man on the beach."], "object", {"A woman on the beach."}),
        (["A man and a woman on the beach."], "object", set()),  # the first word's only alternative occurs
        (["Two dogs.", "three animals", "five of them", "six"], "count", {"Four dogs."}),
        (["a plate with a hot dog", "a snack"], "object", set()),
        (["a large box left of a cup"], "relation", {"a large box right of a cup"}),
        (["the wooden door of a house"], "attribute", None),
    ],
)
def test_a_word_is_exchanged_for_one_that_no_caption_of_the_image_has(captions, kind, expected):
    edits = {text for found, text in caption_edits(captions) if found == kind}
    assert edits == expected if expected is not None else len(edits) == 1
    assert captions[0] not in edits
    assert list(caption_edits(captions)) == list(caption_edits(captions))


def test_the_article_follows_the_new_word():
    articles = {
        text.split()[0] for caption in ("an apple.", "a pizza.", "A dog.") for _, text in caption_edits([caption])
    }
    assert articles <= {"a", "an", "A", "An"}
    for _, text in caption_edits(["An apple."]):
        assert text.startswith("A ") or text.split()[1][0] in "aeiou"


def test_every_word_can_be_exchanged_and_never_for_itself():
    for words in word_lists().values():
        for word, others in words.items():
            assert others
            assert word not in others


def write_sugarcrepe(folder: Path) -> None:
    names = write_photos(folder / "val2017", 3)
    for kind in ("add_att", "swap_obj"):
        items = {
            str(i): {"filename": name, "caption": f"true {i}", "negative_caption": f"false {i}"}
            for i, name in enumerate(names)
        }
        (folder / f"{kind}.json").write_text(json.dumps(items))
    (folder / "other.json").write_text("{}")


def write_aro(folder: Path) -> None:
    names = write_photos(folder / "images", 2)
    box = {"bbox_x": 4, "bbox_y": 2, "bbox_w": 20, "bbox_h": 30}
    items = [{"image_path": name, "true_caption": "true", "false_caption": "false", **box} for name in names]
    (folder / "visual_genome_relation.json").write_text(json.dumps(items))


def write_winoground(folder: Path) -> None:
    names = [name.removesuffix(".jpg") for name in write_photos(folder / "images", 4)]
    for name in names:
        (folder / "images" / f"{name}.jpg").rename(folder / "images" / f"{name}.png")
    pairs = zip(names[::2], names[1::2], strict=True)
    lines = [
        {"image_0": a, "image_1": b, "caption_0": "first", "caption_1": "second", "collapsed_tag": "Object"}
        for a, b in pairs
    ]
    (folder / "examples.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_the_files_of_sugarcrepe_are_read_as_they_are_distributed(tmp_path):
    write_sugarcrepe(tmp_path)
    images, choices = open_choices(f"sugarcrepe:{tmp_path}")
    assert len(images) == 3  # each once
    assert images.image(0).size == (48, 48)
    assert [choice.kind for choice in choices] == ["add_att"] * 3 + ["swap_obj"] * 3
    assert choices[4].images == (1,)
    assert choices[4].texts == ("true 1", "false 1")


def test_the_images_of_aro_are_cropped_to_their_box(tmp_path):
    write_aro(tmp_path)
    images, choices = open_choices(f"aro:{tmp_path}?images={tmp_path / 'images'}")
    assert images.image(1, min_size=8).size == (20, 30)
    assert [choice.kind for choice in choices] == ["relation"] * 2


def test_boxes_and_files_that_are_no_images_are_bad_images(tmp_path):
    write_aro(tmp_path)
    path = tmp_path / "visual_genome_relation.json"
    items = json.loads(path.read_text())
    items[0] |= {"bbox_w": 900_000, "bbox_h": 900_000}
    items[1] |= {"bbox_x": 500}
    path.write_text(json.dumps(items))
    images, _ = open_choices(f"aro:{tmp_path}")
    assert images.image(0).size == (44, 46)  # what is left of the image
    with pytest.raises(BadImage, match="outside of the image"):
        images.image(1)
    (tmp_path / "images" / "0000.jpg").unlink()
    os.mkfifo(tmp_path / "images" / "0000.jpg")
    with pytest.raises(BadImage, match="not a regular file"):
        images.image(0)


@pytest.mark.parametrize("caption", ["a ſmall house", "a traın here", "", "STRASSE", "a" * 9_000])
def test_any_caption_can_be_searched_for_words(caption):
    assert all(text != caption for _, text in caption_edits([caption]))


def test_an_image_outside_of_the_folder_is_refused(tmp_path):
    write_sugarcrepe(tmp_path)
    item = {"filename": "../secret.jpg", "caption": "a", "negative_caption": "b"}
    (tmp_path / "swap_att.json").write_text(json.dumps({"0": item}))
    with pytest.raises(ValueError, match=r"'\.\./secret\.jpg' is outside of the folder of images"):
        open_choices(f"sugarcrepe:{tmp_path}")


@pytest.mark.parametrize("spec", ["sugarcrepe:", "aro:{}", "winoground:{}?split=x"])
def test_a_folder_without_the_files_of_a_benchmark_is_one_sentence(tmp_path, spec):
    with pytest.raises((FileNotFoundError, ValueError)):
        open_choices(spec.format(tmp_path))


def test_choices_without_a_decoded_image_are_left_out(tmp_path):
    write_sugarcrepe(tmp_path)
    _, choices = open_choices(f"sugarcrepe:{tmp_path}")
    kept = known_choices(choices, [0, 2])
    assert [choice.images for choice in kept] == [(0,), (1,), (0,), (1,)]


def test_winoground_counts_both_captions_and_both_images(tmp_path):
    """The first choice has both captions right but one image wrong, the second everything."""
    write_winoground(tmp_path)
    _, choices = open_choices(f"winoground:{tmp_path}")
    image_NE = torch.tensor([[1.0, 0.0], [0.6, 0.8], [1.0, 0.0], [0.0, 1.0]])
    texts = {0: [[0.9, 0.1], [0.8, 1.5]], 1: [[1.0, 0.0], [0.0, 1.0]]}
    text_ME = torch.tensor([*texts[0], *texts[1]])
    scores = {s.changed: s for s in choice_scores(TextEmbedder(lambda captions: text_ME), choices, image_NE)}
    expected = []
    for number in texts:
        score = image_NE[2 * number : 2 * number + 2] @ torch.tensor(texts[number]).T
        text = bool((score.argmax(1) == torch.arange(2)).all())
        image = bool((score.argmax(0) == torch.arange(2)).all())
        expected.append((text, image, text and image))
    means = [sum(column) / 2 for column in zip(*expected, strict=True)]
    names = ["Object text", "Object image", "Object group"]
    assert [scores[name].accuracy for name in names] == means
    assert [scores[name].chance for name in names] == [0.25, 0.25, 1 / 6]


def test_a_benchmark_is_evaluated_from_the_command(tmp_path, tiny_run, capsys):
    import m1clip
    from m1clip import cli

    result = m1clip.train(config=tiny_run, runs=tmp_path / "runs", console=QuietConsole(), steps=1)
    write_sugarcrepe(tmp_path / "crepe")
    write_photos(tmp_path / "crepe" / "val2017", 3)
    capsys.readouterr()
    argv = ["eval", str(result.run), "--data", f"sugarcrepe:{tmp_path / 'crepe'}", "--device", "cpu", "--json"]
    assert cli.run_command(argv) == 0
    record = json.loads(capsys.readouterr().out)
    assert [(edit["changed"], edit["edits"]) for edit in record["edits"]] == [
        ("add_att", 3),
        ("swap_obj", 3),
        ("all", 6),
    ]
    assert record["task"] == "image_caption_selection"
    assert record["metrics"]["text_acc"] == pytest.approx(record["edits"][2]["accuracy"])
    assert cli.run_command([*argv, "--task", "zeroshot"]) == 2
