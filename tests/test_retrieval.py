import pytest
import torch
import torch.nn.functional as F

from m1clip.evals import retrieval as r


def plain_ranks(query, target, key_q, key_t):
    """Sort everything, look for the first right answer."""
    places = []
    for q, key in zip(query, key_q, strict=True):
        order = (target @ q).argsort(descending=True)
        places.append(1 + next(i for i, t in enumerate(order) if key_t[t] == key))
    return places


def test_ranks_equal_a_full_sort_when_captions_are_several_and_the_set_spans_chunks(monkeypatch):
    monkeypatch.setattr(r, "CHUNK", 7)
    torch.manual_seed(0)
    image, text = F.normalize(torch.randn(20, 8), dim=1), F.normalize(torch.randn(60, 8), dim=1)
    owner, own = torch.randint(20, (60,)), torch.arange(20)
    owner[:20] = own  # everyone has at least one
    assert r.ranks(text, image, owner, own).tolist() == plain_ranks(text, image, owner, own)
    # An image's own other captions above its best do not count against it: there are none above the best.
    found = r.ranks(image, text, own, owner).tolist()
    assert found == plain_ranks(image, text, own, owner)


def test_recall_counts_any_of_five_captions():
    image = torch.eye(2)
    text = torch.tensor([[1, 0], [0.8, 0.2], [0.7, 0.3], [0.3, 0.7], [0.2, 0.8]] + [[0, 1.0]] * 5)
    scores = r.retrieval(image, F.normalize(text, dim=1), torch.tensor([0] * 5 + [1] * 5))
    assert scores.image_to_text.r1 == 1.0
    assert round(scores.text_to_image.r1, 6) == 0.8


def test_a_collapsed_model_scores_at_chance_not_perfectly():
    same = F.normalize(torch.ones(99, 4), dim=1)
    scores = r.retrieval(same, same)
    assert scores.image_to_text.median_rank == 50
    assert scores.image_to_text.r1 == scores.text_to_image.r10 == 0


def test_a_broken_model_is_refused_not_ranked_first():
    broken = torch.full((9, 4), float("nan"))
    with pytest.raises(FloatingPointError, match="not finite"):
        r.retrieval(broken, torch.eye(9, 4))


def test_a_perfect_model_scores_one_and_chance_is_shown_beside_it():
    scores = r.retrieval(torch.eye(40), torch.eye(40))
    assert scores.mean_r1 == 1.0
    assert scores.chance.r5 == 0.125
    assert scores.record()["chance_r1"] == 1 / 40


def test_chance_with_five_captions_a_image_is_what_guessing_gives():
    torch.manual_seed(0)
    image_NE, text_ME = (F.normalize(torch.randn(n, 32), dim=1) for n in (200, 1000))
    tries = [r.retrieval(image_NE, text_ME[torch.randperm(1000)], torch.arange(1000) // 5) for _ in range(40)]
    guess = tries[0].chance_image_to_text
    for key in ("r1", "r5", "r10"):
        seen = sum(getattr(one.image_to_text, key) for one in tries) / len(tries)
        assert seen == pytest.approx(getattr(guess, key), rel=0.25)
    median = sum(one.image_to_text.median_rank for one in tries) / len(tries)
    assert median == pytest.approx(guess.median_rank, rel=0.08)
