"""Retrieval scores and their chance level against double loops, exact formulas and random rankings."""

import random
from math import comb
from statistics import fmean, median

import pytest
import torch
import torch.nn.functional as F

from m1clip.evals import retrieval as module
from m1clip.evals.retrieval import Relevance, chance_scores, label_accuracy, ranks, retrieval

LABELS = ["a photo of a cat"] * 4 + ["a photo of a dog"] * 3 + ["a photo of an owl"]


def unit_vectors(rows: int, width: int = 8, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def one_to_one(pairs: int) -> Relevance:
    return Relevance.from_captions([[f"caption {number}"] for number in range(pairs)])


def repeated_captions(images: int, seed: int) -> list[list[str]]:
    """One to four captions per image, most of them shared with other images, in any case and spacing."""
    rng = random.Random(seed)
    variants = ("{}", " {}", "{} ", "A {}")
    return [
        [rng.choice(variants).format(f"caption {rng.randrange(images)}") for _ in range(rng.randint(1, 4))]
        for _ in range(images)
    ]


def distinct_captions(captions: list[list[str]]) -> list[str]:
    return list(dict.fromkeys(text.strip().lower() for of_image in captions for text in of_image))


def correct_pairs(captions: list[list[str]], texts: list[str]) -> set[tuple[int, int]]:
    """(image, text) where the text equals one of the image's captions, by a plain double loop."""
    own = [{text.strip().lower() for text in of_image} for of_image in captions]
    return {(image, m) for image in range(len(captions)) for m, text in enumerate(texts) if text in own[image]}


def embedded(captions: list[list[str]], seed: int) -> tuple[list[str], torch.Tensor]:
    """All captions and their embeddings, equal for equal captions."""
    texts, distinct = [text.strip().lower() for of_image in captions for text in of_image], distinct_captions(captions)
    return texts, unit_vectors(len(distinct), seed=10 + seed)[[distinct.index(text) for text in texts]]


def loop_ranks(scores: torch.Tensor, correct: set[tuple[int, int]]) -> list[int]:
    """1 + the incorrect targets above the best correct one."""
    result = []
    for query, row in enumerate(scores.tolist()):
        best = max(score for target, score in enumerate(row) if (query, target) in correct)
        wrong = [score for target, score in enumerate(row) if (query, target) not in correct]
        result.append(1 + sum(score > best for score in wrong))
    return result


@pytest.mark.parametrize("seed", range(3))
def test_ranks_equal_a_double_loop_with_repeated_captions_and_several_per_image(seed, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 7)  # several chunks, the last one incomplete
    captions, image_NE = repeated_captions(30, seed), unit_vectors(30, seed=seed)
    texts, text_ME = embedded(captions, seed)
    relevance, distinct = Relevance.from_captions(captions), distinct_captions(captions)
    text_KE = text_ME[relevance.first_K]
    i2t = loop_ranks(image_NE @ text_KE.T, correct_pairs(captions, distinct))
    assert ranks(image_NE, text_KE, relevance.captions_of).tolist() == i2t
    t2i = loop_ranks(text_ME @ image_NE.T, {(m, image) for image, m in correct_pairs(captions, texts)})
    assert ranks(text_ME, image_NE, relevance.images_of).tolist() == t2i


@pytest.mark.parametrize("seed", range(2))
def test_recalls_and_median_ranks_are_those_of_the_double_loop(seed):
    captions, image_NE = repeated_captions(40, seed), unit_vectors(40, seed=seed)
    texts, text_ME = embedded(captions, seed)
    relevance, distinct = Relevance.from_captions(captions), distinct_captions(captions)
    scores = retrieval(image_NE, text_ME, relevance)
    loop = loop_ranks(image_NE @ text_ME[relevance.first_K].T, correct_pairs(captions, distinct))
    direction = scores.image_to_text
    assert (scores.images, scores.captions, scores.distinct_captions) == (40, len(texts), len(distinct))
    assert direction.median_rank == median(loop)
    for k, recall in ((1, direction.r1), (5, direction.r5), (10, direction.r10)):
        assert recall == pytest.approx(fmean(rank <= k for rank in loop))


def test_recall_of_seen_and_unseen_captions_equals_a_loop():
    captions, image_NE = repeated_captions(30, 5), unit_vectors(30, seed=5)
    texts, text_ME = embedded(captions, 5)
    seen = {text for text in texts if int(text.split()[-1]) % 2}
    scores = retrieval(image_NE, text_ME, Relevance.from_captions(captions), torch.tensor([t in seen for t in texts]))
    t2i = loop_ranks(text_ME @ image_NE.T, {(m, image) for image, m in correct_pairs(captions, texts)})
    by_caption = {
        flag: [rank <= 1 for rank, t in zip(t2i, texts, strict=True) if (t in seen) == flag] for flag in (0, 1)
    }
    assert scores.seen.seen_captions == len(by_caption[1])
    assert scores.seen.seen_t2i_r1 == pytest.approx(fmean(by_caption[1]))
    assert scores.seen.unseen_t2i_r1 == pytest.approx(fmean(by_caption[0]))


def test_label_accuracy_equals_a_loop_and_copies_of_a_wrong_label_do_not_fill_the_first_ranks():
    truth, image_NE, label_KE = torch.arange(60) % 12, unit_vectors(60), unit_vectors(12, seed=1)
    order = [sorted(range(12), key=row.__getitem__, reverse=True) for row in (image_NE @ label_KE.T).tolist()]
    scores = label_accuracy(image_NE, label_KE, truth)
    assert scores.label_accuracy == pytest.approx(fmean(row[0] == k for row, k in zip(order, truth, strict=True)))
    assert scores.label_top5 == pytest.approx(fmean(k in row[:5] for row, k in zip(order, truth, strict=True)))
    assert (scores.labels, scores.chance_label, scores.most_frequent_label) == (12, 1 / 12, 5 / 60)
    retrieved = retrieval(image_NE, label_KE[truth], Relevance.from_captions([[f"label {k}"] for k in truth]))
    assert retrieved.image_to_text.r1 == scores.label_accuracy
    assert retrieved.image_to_text.r5 == scores.label_top5


def test_a_perfect_classifier_of_labeled_images_has_full_recall_in_both_directions():
    one_hot_NE = F.one_hot(torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])).float()
    scores = retrieval(one_hot_NE, one_hot_NE, Relevance.from_captions([[text] for text in LABELS]))
    assert (scores.mean_r1, scores.text_to_image.r10, scores.text_to_image.median_rank) == (1.0, 1.0, 1.0)
    assert scores.chance_text_to_image.r1 == pytest.approx((4 * 4 / 8 + 3 * 3 / 8 + 1 / 8) / 8)
    assert scores.chance_image_to_text.r1 == pytest.approx(1 / 3)


def test_a_classifier_that_mistakes_one_label_loses_exactly_its_images():
    truth, predicted = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2]), torch.tensor([0, 0, 0, 0, 0, 0, 0, 2])
    image_NE, text_ME = F.one_hot(predicted).float(), F.one_hot(truth, 3).float()
    scores = retrieval(image_NE, text_ME, Relevance.from_captions([[text] for text in LABELS]))
    assert scores.image_to_text.r1 == pytest.approx(5 / 8)


def hypergeometric_recall(targets: int, correct: int, k: int) -> float:
    """1 - P(k targets drawn without replacement contain no correct one)."""
    return 1 - comb(targets - correct, k) / comb(targets, k)


@pytest.mark.parametrize("images", [3, 12, 60])
def test_chance_recalls_are_hypergeometric_with_all_correct_targets(images):
    captions = repeated_captions(images, seed=images)
    distinct = distinct_captions(captions)
    targets, correct = len(distinct), correct_pairs(captions, distinct)
    counts = [sum(image == n for image, _ in correct) for n in range(images)]
    chance, _ = chance_scores(Relevance.from_captions(captions))
    for k, recall in ((1, chance.r1), (5, chance.r5), (10, chance.r10)):
        expected = fmean(hypergeometric_recall(targets, count, min(k, targets)) for count in counts)
        assert recall == pytest.approx(expected)


def test_chance_scores_are_those_of_many_random_rankings():
    """Classes of very different size: the median is that of all queries, not a mean of medians."""
    captions = [[text] for text in ["a cat"] * 30 + ["a dog"] * 8 + [f"object {n}" for n in range(22)]]
    correct, rng = correct_pairs(captions, [text for (text,) in captions]), random.Random(0)
    simulated = []
    for _ in range(300):
        order = rng.sample(range(60), 60)
        for query in rng.sample(range(60), 60):
            simulated.append(next(rank for rank, target in enumerate(order, 1) if (query, target) in correct))
    _, chance = chance_scores(Relevance.from_captions(captions))
    assert chance.median_rank == pytest.approx(median(simulated), abs=1)
    for k, recall in ((1, chance.r1), (5, chance.r5), (10, chance.r10)):
        assert recall == pytest.approx(fmean(rank <= k for rank in simulated), abs=0.03)


@pytest.mark.parametrize(("images", "median_rank"), [(40, 20.5), (41, 21.0), (1, 1.0)])
def test_chance_of_distinct_captions_is_exact(images, median_rank):
    scores = retrieval(torch.eye(images), torch.eye(images), one_to_one(images))
    assert scores.mean_r1 == 1.0
    assert scores.chance_text_to_image.r5 == min(1.0, 5 / images)
    assert scores.chance_image_to_text.median_rank == median_rank
    assert scores.record()["chance_r1"] == 1 / images


def test_any_of_five_captions_counts():
    text_ME = torch.tensor([[1, 0], [0.8, 0.2], [0.7, 0.3], [0.3, 0.7], [0.2, 0.8]] + [[0, 1.0]] * 5)
    captions = [[f"{image} {k}" for k in range(5)] for image in range(2)]
    scores = retrieval(torch.eye(2), F.normalize(text_ME, dim=1), Relevance.from_captions(captions))
    assert scores.image_to_text.r1 == 1.0
    assert scores.text_to_image.r1 == pytest.approx(0.8)


def test_a_collapsed_model_scores_like_a_random_one():
    same_NE = F.normalize(torch.ones(99, 4), dim=1)
    scores = retrieval(same_NE, same_NE, one_to_one(99))
    assert scores.image_to_text.median_rank == scores.chance_image_to_text.median_rank == 50
    assert scores.image_to_text.r1 == scores.text_to_image.r10 == 0


def test_non_finite_embeddings_are_refused():
    with pytest.raises(FloatingPointError, match="not finite"):
        retrieval(torch.full((9, 4), float("nan")), torch.eye(9, 4), one_to_one(9))


def test_the_record_is_flat_and_names_every_score():
    scores = retrieval(unit_vectors(20), unit_vectors(20, seed=1), one_to_one(20))
    record = scores.record()
    assert record["i2t_r5"] == scores.image_to_text.r5
    assert record["chance_t2i_median_rank"] == scores.chance_text_to_image.median_rank
    assert record["mean_r1"] == (record["i2t_r1"] + record["t2i_r1"]) / 2
    assert (record["images"], record["captions"]) == (20, 20)
