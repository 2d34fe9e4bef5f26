"""What evaluation leaves for people: how hard negatives fare, and what is found for some captions."""

import base64
import io
import json
import math
from itertools import combinations

import numpy as np
import torch
from PIL import Image

from helpers import train_run
from m1clip.data.splits import Cached, Part, Split
from m1clip.evals.examples import examples
from m1clip.evals.hard_negatives import TIERS, by_difficulty, none_of, places, similarity

CAPTIONS = [
    f"{size} {color} {what}"
    for size in ("large", "small")
    for color in ("red", "blue")
    for what in ("cat", "bus", "hat")
]


def units(count, size, seed):
    made = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return made / made.norm(dim=1, keepdim=True)


def test_similarity_is_of_words_and_rare_ones_count_more():
    alike = similarity(["a red cat", "a red dog", "a blue cat", "A  CAT, red", "zebra"])
    assert np.allclose(alike.diagonal(), 1)
    assert np.isclose(alike[0, 3], 1)
    assert alike[0, 4] == 0
    assert alike[0, 1] > 0


def test_negatives_are_placed_by_similarity_and_the_same_caption_is_none():
    words = ["a red cat", "A red cat ", "a red dog", "blue zebra"]
    place = places(words, similarity(words))
    assert np.isnan(place[0, 0])
    assert np.isnan(place[0, 1])
    assert place[0, 3] < place[0, 2]
    counts = {name: ((low <= place) & (place < high)).sum() for name, (low, high) in TIERS.items()}
    assert sum(counts.values()) == np.isfinite(place).sum()


def test_difficulty_equals_a_slow_count():
    count = len(CAPTIONS)
    image, text = units(count, 6, 1), units(count, 6, 2)
    found = by_difficulty(image, text, CAPTIONS)
    score, place = (image @ text.T).numpy(), places(CAPTIONS, similarity(CAPTIONS))
    others = found["hard"]["among"] - 1
    for name, (low, high) in TIERS.items():
        won, first = [], []
        for way in (score, score.T):
            for i in range(count):
                mine = [j for j in range(count) if low <= place[i, j] < high]
                won += [way[i, i] > way[i, j] for j in mine]
                draws = list(combinations(mine, others))
                first.append(np.mean([all(way[i, i] > way[i, j] for j in draw) for draw in draws]))
        assert math.isclose(found[name]["pairwise"], np.mean(won), abs_tol=1e-9), name
        assert math.isclose(found[name]["first"], np.mean(first), abs_tol=1e-9), name


def test_a_model_that_knows_is_right_at_every_difficulty_and_one_that_guesses_is_at_chance():
    words = [f"{a} {b}" for a in "abcdefghijklmnopqrst" for b in "uvwxy"]
    same = units(100, 32, 0)
    assert all(tier["first"] == 1 for tier in by_difficulty(same, same, words).values())
    guess = by_difficulty(same, units(100, 32, 1), words)
    assert all(abs(tier["pairwise"] - 0.5) < 0.1 for tier in guess.values())
    assert all(abs(tier["first"] - 1 / tier["among"]) < 0.1 for tier in guess.values())
    assert by_difficulty(same[:2], same[:2], words[:2]) == {}


def test_drawing_without_putting_back():
    assert none_of(2, np.array([1]), np.array([4])) == 0.5  # 3/4 * 2/3
    assert none_of(3, np.array([2]), np.array([4])) == 0


class Drawn:
    """Five images of one grey each, with two captions; the last two are captioned alike."""

    identity = fingerprint = "x"
    words = (("zero", "nought"), ("one", "single"), ("two", "pair"), ("same", "alike"), ("same", "alike"))

    def __len__(self):
        return 5

    def captions(self, index):
        return self.words[index]

    def row(self, index):
        return f"row {index}"


def side():
    grey = np.stack([np.full((40, 40, 3), 50 * n, np.uint8) for n in range(5)])
    return Split([Part(Drawn(), np.arange(5), Cached(grey, np.arange(5)))])


def test_examples_show_the_first_five_the_truth_and_the_worst_errors():
    image, text = torch.eye(5), torch.eye(5).repeat_interleave(2, 0)
    text[0] = torch.tensor([0.1, 0.9, 0.0, 0.0, 0.0])  # "zero" finds image 1, by far
    text[2] = torch.tensor([0.0, 0.5, 0.6, 0.0, 0.0])  # "one" finds image 2, by little
    text[6] = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.9])  # finds its duplicate, which is no error
    found = examples(text, image, torch.arange(5).repeat_interleave(2), side())
    errors = [query for query in found["queries"] if query["group"] == "errors"]
    assert [(query["text"], query["truth"], query["rank"]) for query in errors] == [("zero", 0, 2), ("one", 1, 2)]
    assert errors[0]["top"][0] == {"row": 1, "score": 0.9, "same_caption": False}
    sample = {query["text"]: query for query in found["queries"] if query["group"] == "sample"}
    assert len(sample) >= 5
    assert set(found["shown"]) == {"0", "1", "2", "3", "4"}
    image = Image.open(io.BytesIO(base64.b64decode(found["shown"]["2"]["jpeg"])))
    assert image.size == (40, 40)
    assert abs(image.convert("L").getpixel((20, 20)) - 100) < 4
    json.dumps(found)


def test_training_leaves_the_examples_of_its_latest_evaluation(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "run")
    found = json.loads((tmp_path / "run" / "retrievals.json").read_text())
    assert found["step"] == 8
    for query in found["queries"]:
        assert len(query["top"]) == 5
        assert [hit["score"] for hit in query["top"]] == sorted((hit["score"] for hit in query["top"]), reverse=True)
        assert (query["top"][0]["row"] == query["truth"]) == (query["rank"] == 1)
    evals = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in evals if record["kind"] == "eval"][-1]
    assert set(last["negatives"]) == set(TIERS)


def test_a_model_to_which_all_look_alike_has_found_nothing():
    same = torch.ones(5, 4) / 2
    found = examples(same.repeat_interleave(2, 0), same, torch.arange(5).repeat_interleave(2), side())
    assert {query["rank"] for query in found["queries"]} == {5}
    assert any(query["group"] == "errors" for query in found["queries"])


def test_captions_of_any_language_and_length_can_be_compared():
    chinese = similarity(["一只红色的猫", "一只蓝色的猫", "海边的船"])
    assert chinese[0, 1] > chinese[0, 2] > 0
    long = ["word " * 100_000 + f"end{n}" for n in range(30)]
    assert similarity(long).shape == (30, 30)
    nothing = [f"x{n}" for n in range(30)]  # no word in common: none is harder than another
    assert by_difficulty(units(30, 8, 0), units(30, 8, 1), nothing) == {}
    assert by_difficulty(units(3, 8, 0), units(3, 8, 1), ["", "", ""]) == {}
