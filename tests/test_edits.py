import torch
import torch.nn.functional as F

from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.evals import edits
from m1clip.evals.edits import edit_scores, is_editable


def test_a_image_that_prefers_the_truth_scores_and_one_that_does_not_does_not(monkeypatch):
    """Embeddings that know colors but think every other wrong word is better than the true one."""
    pairs = SyntheticScenes(30, split="val")
    assert is_editable(pairs)
    truth = F.normalize(torch.randn(30, 8, generator=torch.Generator().manual_seed(0)), dim=1)
    owners = [(row, what) for row in range(30) for what, _ in pairs.edits(row)]

    def embed(model, captions):
        better, worse = 2 * truth, -truth
        return torch.stack([(worse if what == "color" else better)[row] for row, what in owners])

    monkeypatch.setattr(edits, "embed_captions", embed)
    scores = {score.changed: score.accuracy for score in edit_scores(None, pairs, truth, truth)}
    assert scores.pop("color") == 1.0
    assert set(scores.values()) == {0.0}


def test_a_tie_is_half_a_win_as_a_guess_would_be(monkeypatch):
    pairs = SyntheticScenes(5, split="val")
    same = F.normalize(torch.ones(5, 4), dim=1)
    monkeypatch.setattr(edits, "embed_captions", lambda model, captions: same[:1].expand(len(captions), -1))
    assert {score.accuracy for score in edit_scores(None, pairs, same, same)} == {0.5}
