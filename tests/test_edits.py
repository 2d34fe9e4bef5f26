"""Accuracy against captions with one word changed."""

import pytest
import torch
import torch.nn.functional as F

from m1clip.data.synthetic import SyntheticScenes
from m1clip.evals import evaluate
from m1clip.evals.evaluate import edit_scores


def unit_vectors(rows: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, 8, generator=torch.Generator().manual_seed(0)), dim=1)


def edits_of(pairs: SyntheticScenes) -> list[evaluate.Edit]:
    return [(row, kind, text) for row in range(len(pairs)) for kind, text in pairs.edits(row)]


def test_accuracy_is_that_of_each_kind_of_word(monkeypatch):
    """Edited colors score below the original caption, all other edits above it."""
    pairs, true_NE = SyntheticScenes(30, split="val"), unit_vectors(30)
    edited = edits_of(pairs)
    factors = torch.tensor([-1.0 if kind == "color" else 2.0 for _, kind, _ in edited])
    edited_ME = factors[:, None] * true_NE[[row for row, _, _ in edited]]
    monkeypatch.setattr(evaluate, "embed_captions", lambda model, captions: edited_ME)
    scores = {score.changed: score for score in edit_scores(None, edited, true_NE, true_NE)}
    assert scores.keys() > {"color"}
    assert sum(score.edits for score in scores.values()) == len(edited)
    assert scores.pop("color").accuracy == 1.0
    assert {score.accuracy for score in scores.values()} == {0.0}


def test_scores_equal_a_plain_loop_over_the_edited_captions(monkeypatch):
    pairs, image_NE, embedded = SyntheticScenes(20, split="val"), unit_vectors(20), {}

    def embed(model, captions):
        torch.manual_seed(1)
        embedded.update(zip(captions, F.normalize(torch.randn(len(captions), 8), dim=1), strict=True))
        return torch.stack([embedded[text] for text in captions])

    monkeypatch.setattr(evaluate, "embed_captions", embed)
    text_NE, wins = unit_vectors(20).roll(1, 0), {}
    scores = edit_scores(None, edits_of(pairs), image_NE, text_NE)
    for row in range(20):
        for kind, text in pairs.edits(row):
            wins.setdefault(kind, []).append(float(image_NE[row] @ text_NE[row] > image_NE[row] @ embedded[text]))
    for score in scores:
        assert score.accuracy == pytest.approx(sum(wins[score.changed]) / len(wins[score.changed]))


def test_a_tie_counts_half(monkeypatch):
    same_NE = F.normalize(torch.ones(5, 4), dim=1)
    monkeypatch.setattr(evaluate, "embed_captions", lambda model, captions: same_NE[:1].expand(len(captions), -1))
    scores = edit_scores(None, edits_of(SyntheticScenes(5, split="val")), same_NE, same_NE)
    assert {score.accuracy for score in scores} == {score.chance for score in scores} == {0.5}
