"""Example queries of an evaluation, and accuracy by the difficulty of the negatives."""

import base64
import io
import json
import math
from itertools import combinations

import numpy as np
import torch
from PIL import Image

from helpers import train_run
from m1clip.data.splits import Split, SplitPart
from m1clip.evals.embeddings import (
    TIERS,
    accuracy_by_difficulty,
    similarity_quantiles,
    tfidf_similarity,
    win_probability,
)
from m1clip.evals.examples import example_queries
from m1clip.evals.retrieval import Relevance
from m1clip.run import Run

CAPTIONS = [
    f"{size} {color} {noun}"
    for size in ("large", "small")
    for color in ("red", "blue")
    for noun in ("cat", "bus", "hat")
]


def unit_vectors(rows: int, width: int, seed: int) -> torch.Tensor:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return x / x.norm(dim=1, keepdim=True)


def test_similarity_is_that_of_words_and_ignores_case_order_and_punctuation():
    similarity = tfidf_similarity(["a red cat", "a red dog", "a blue cat", "A  CAT, red", "zebra"])
    assert np.allclose(similarity.diagonal(), 1)
    assert np.isclose(similarity[0, 3], 1)
    assert similarity[0, 4] == 0
    assert similarity[0, 1] > 0


def test_a_rare_word_in_common_counts_more_than_a_frequent_one():
    captions = ["the zebra", "the cat", "a zebra", "the dog", "the bus"]
    similarity = tfidf_similarity(captions)
    assert similarity[0, 2] > similarity[0, 1] > 0


def test_captions_of_any_language_and_length_can_be_compared():
    chinese = tfidf_similarity(["一只红色的猫", "一只蓝色的猫", "海边的船"])
    assert chinese[0, 1] > chinese[0, 2] > 0
    long = tfidf_similarity(["word " * 100_000 + f"end{n}" for n in range(30)])
    assert long.shape == (30, 30)


def test_negatives_are_ordered_by_similarity_and_an_equal_caption_is_none():
    captions = ["a red cat", "A red cat ", "a red dog", "blue zebra"]
    quantile = similarity_quantiles(captions, tfidf_similarity(captions))
    assert np.isnan(quantile[0, 0])
    assert np.isnan(quantile[0, 1])
    assert quantile[0, 3] < quantile[0, 2]
    counts = {name: ((low <= quantile) & (quantile < high)).sum() for name, (low, high) in TIERS.items()}
    assert sum(counts.values()) == np.isfinite(quantile).sum()


def test_accuracy_by_difficulty_equals_a_plain_loop():
    count = len(CAPTIONS)
    image_NE, text_NE = unit_vectors(count, 6, 1), unit_vectors(count, 6, 2)
    results = accuracy_by_difficulty(image_NE, text_NE, CAPTIONS)
    score, quantile = (image_NE @ text_NE.T).numpy(), similarity_quantiles(CAPTIONS, tfidf_similarity(CAPTIONS))
    negatives = results["hard"]["among"] - 1
    for name, (low, high) in TIERS.items():
        wins, first = [], []
        for direction in (score, score.T):
            for i in range(count):
                others = [j for j in range(count) if low <= quantile[i, j] < high]
                wins += [direction[i, i] > direction[i, j] for j in others]
                draws = list(combinations(others, negatives))
                first.append(np.mean([all(direction[i, i] > direction[i, j] for j in draw) for draw in draws]))
        assert math.isclose(results[name]["pairwise"], np.mean(wins), abs_tol=1e-9), name
        assert math.isclose(results[name]["first"], np.mean(first), abs_tol=1e-9), name


def test_a_perfect_model_is_right_in_every_tier_and_a_random_one_is_at_chance():
    captions = [f"{a} {b}" for a in "abcdefghijklmnopqrst" for b in "uvwxy"]
    image_NE = unit_vectors(100, 32, 0)
    assert all(tier["first"] == 1 for tier in accuracy_by_difficulty(image_NE, image_NE, captions).values())
    random = accuracy_by_difficulty(image_NE, unit_vectors(100, 32, 1), captions)
    assert random.keys() == TIERS.keys()
    assert all(abs(tier["pairwise"] - 0.5) < 0.1 for tier in random.values())
    assert all(abs(tier["first"] - 1 / tier["among"]) < 0.1 for tier in random.values())


def test_there_are_no_tiers_without_enough_pairs_or_without_a_word_in_common():
    image_NE, text_NE = unit_vectors(30, 8, 0), unit_vectors(30, 8, 1)
    assert accuracy_by_difficulty(image_NE[:2], text_NE[:2], ["a b", "a c"]) == {}
    assert accuracy_by_difficulty(image_NE, text_NE, [f"x{n}" for n in range(30)]) == {}
    assert accuracy_by_difficulty(image_NE[:3], text_NE[:3], ["", "", ""]) == {}


def test_win_probability_is_that_of_drawing_without_replacement():
    assert win_probability(2, np.array([1]), np.array([4])) == 0.5  # 3/4 * 2/3
    assert win_probability(3, np.array([2]), np.array([4])) == 0


class GrayImages:
    """Five images of one gray value each, with two captions; the last two have equal captions but for case."""

    identity = fingerprint = "x"
    texts = (("zero", "naught"), ("one", "single"), ("two", "pair"), ("same", "alike"), ("Same ", "ALIKE"))

    def __len__(self):
        return 5

    def captions(self, index):
        return self.texts[index]

    def location(self, index):
        return f"row {index}"


RELEVANCE = Relevance.from_captions(GrayImages.texts)


def gray_split() -> Split:
    pixels = np.stack([np.full((40, 40, 3), 50 * n, np.uint8) for n in range(5)])
    return Split([SplitPart(GrayImages(), np.arange(5), pixels)])


def gray_examples() -> dict:
    """All captions find their image, but for "zero", "one" and "same"."""
    text_ME = torch.eye(5).repeat_interleave(2, 0)
    text_ME[0] = torch.tensor([0.1, 0.9, 0.0, 0.0, 0.0])  # finds image 1, by a large margin
    text_ME[2] = torch.tensor([0.0, 0.5, 0.6, 0.0, 0.0])  # finds image 2, by a small margin
    text_ME[6] = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.9])  # finds the image with the same caption: no error
    return example_queries(text_ME, torch.eye(5), RELEVANCE, gray_split())


def test_errors_are_sorted_by_margin_and_an_image_with_the_same_caption_is_none():
    errors = [query for query in gray_examples()["queries"] if query["group"] == "errors"]
    assert [(query["text"], query["truth"], query["rank"]) for query in errors] == [("zero", 0, 2), ("one", 1, 2)]
    assert errors[0]["top"][0] == {"row": 1, "score": 0.9, "same_caption": False}
    assert errors[0]["true_score"] == 0.1


def test_the_sample_has_evenly_spaced_queries_with_their_ranks():
    sample = [query for query in gray_examples()["queries"] if query["group"] == "sample"]
    assert len(sample) == 8
    assert [sample[0]["text"], sample[-1]["text"]] == ["zero", "ALIKE"]
    same = next(query for query in sample if query["text"] in ("same", "Same "))
    assert same["rank"] == 1
    assert {hit["row"]: hit["same_caption"] for hit in same["top"]} == {
        row: row == 7 - same["truth"] for row in range(5)
    }


def test_the_images_of_all_results_are_stored_as_jpeg_with_caption_and_location():
    examples = gray_examples()
    assert set(examples["shown"]) == {"0", "1", "2", "3", "4"}
    record = examples["shown"]["2"]
    assert (record["caption"], record["name"]) == ("two", "row 2")
    image = Image.open(io.BytesIO(base64.b64decode(record["jpeg"])))
    assert image.size == (40, 40)
    assert abs(image.convert("L").getpixel((20, 20)) - 100) < 4
    assert json.loads(json.dumps(examples)) == examples


def test_a_collapsed_model_finds_nothing():
    """All scores are equal: every correct image comes after the wrong ones."""
    same_NE = torch.ones(5, 4) / 2
    examples = example_queries(same_NE.repeat_interleave(2, 0), same_NE, RELEVANCE, gray_split())
    ranks = {query["text"].strip().lower(): query["rank"] for query in examples["queries"]}
    assert ranks["zero"] == 5
    assert ranks["alike"] == 4  # two of the five images are correct
    assert any(query["group"] == "errors" for query in examples["queries"])


def test_training_writes_the_examples_of_its_last_evaluation(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "r")
    examples, run = json.loads((tmp_path / "r" / "retrievals.json").read_text()), Run(tmp_path / "r")
    assert examples["step"] == 8
    for query in examples["queries"]:
        scores = [hit["score"] for hit in query["top"]]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
        first = query["top"][0]
        assert (first["row"] == query["truth"] or first["same_caption"]) == (query["rank"] == 1)
    *_, last = run.records("eval")
    assert set(last["hard_negatives"]) == set(TIERS)
