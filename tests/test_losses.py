"""The contrastive losses against double loops and hand-worked numbers."""

import math

import pytest
import torch

from m1clip import losses


def plain_softmax(logits):
    """The paper's equation as a double loop."""
    total = torch.zeros((), dtype=logits.dtype)
    n = len(logits)
    for i in range(n):
        row = sum(torch.exp(logits[i, j]) for j in range(n))
        column = sum(torch.exp(logits[j, i]) for j in range(n))
        total = total - torch.log(torch.exp(logits[i, i]) / row) - torch.log(torch.exp(logits[i, i]) / column)
    return total / (2 * n)


def plain_sigmoid(logits):
    total = torch.zeros((), dtype=logits.dtype)
    n = len(logits)
    for i in range(n):
        for j in range(n):
            z = 1 if i == j else -1
            total = total + torch.log(1 / (1 + torch.exp(-z * logits[i, j])))
    return -total / n


@pytest.mark.parametrize(
    ("fast", "plain"), [(losses.softmax_loss, plain_softmax), (losses.sigmoid_loss, plain_sigmoid)]
)
def test_loss_and_gradient_equal_the_double_loop(fast, plain):
    logits = torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    a, b = fast(ours), plain(theirs)
    a.backward()
    b.backward()
    assert a.item() == pytest.approx(b.item(), abs=1e-12)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)


def test_softmax_loss_of_equal_logits_is_chance():
    assert losses.softmax_loss(torch.zeros(12, 12)).item() == pytest.approx(math.log(12))


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_chance_is_the_loss_of_the_best_constant(kind):
    best = min(losses.LOSSES[kind](torch.full((12, 12), c)).item() for c in torch.linspace(-6, 0, 601).tolist())
    assert losses.chance(kind, 12) == pytest.approx(best, abs=1e-4)


def test_accuracy_in_both_directions():
    logits = torch.tensor([[2.0, 3.0], [0.0, 3.5]])  # 1 of 2 rows correct, both columns
    assert [accuracy.item() for accuracy in losses.accuracies(logits)] == [0.5, 1.0]
    assert [accuracy.item() for accuracy in losses.accuracies(torch.eye(5))] == [1.0, 1.0]


DUPLICATE = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


def test_duplicates_are_left_out_of_the_softmax():
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    candidates = [(0, [0, 2]), (1, [1, 2]), (2, [0, 1, 2])]  # the candidates of each row
    rows = [-torch.log_softmax(logits[i, kept], 0)[kept.index(i)] for i, kept in candidates]
    columns = [-torch.log_softmax(logits[kept, i], 0)[kept.index(i)] for i, kept in candidates]
    expected = (sum(rows) + sum(columns)) / 6
    assert losses.softmax_loss(logits, DUPLICATE).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_the_logit_of_a_duplicate_does_not_matter(kind):
    logits = torch.randn(3, 3, requires_grad=True)
    losses.LOSSES[kind](logits, DUPLICATE, 0.1).backward()
    assert logits.grad[DUPLICATE].abs().max() == 0
    assert logits.grad[~DUPLICATE].abs().min() > 0
    assert losses.accuracies(logits.detach() + 99 * DUPLICATE, DUPLICATE)[0] == losses.accuracies(logits, DUPLICATE)[0]


def test_chance_without_duplicates_is_that_of_random_embeddings_of_three_labels():
    label_B = torch.arange(12) % 3
    duplicate_BB = (label_B[:, None] == label_B).fill_diagonal_(False)
    assert losses.chance("softmax", 12, duplicate_BB) == pytest.approx(
        losses.softmax_loss(torch.zeros(12, 12), duplicate_BB).item()
    )
    random = torch.Generator().manual_seed(0)
    measured = []
    for _ in range(2000):
        image_BE, text_KE = torch.randn(12, 8, generator=random), torch.randn(3, 8, generator=random)
        measured += losses.accuracies(image_BE @ text_KE[label_B].T, duplicate_BB)
    assert losses.chance_accuracy(12, duplicate_BB) == pytest.approx(torch.stack(measured).mean().item(), abs=0.02)


def test_smoothing_does_not_change_chance():
    at_chance = torch.full((12, 12), -math.log(11))  # the best constant: 1 of 12 matches
    for kind, loss in losses.LOSSES.items():
        assert loss(at_chance, None, 0.1).item() == pytest.approx(losses.chance(kind, 12), abs=1e-5)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_smoothing_without_duplicates_equals_smoothing_with_an_empty_mask(kind):
    logits = torch.randn(4, 4)
    loss = losses.LOSSES[kind]
    no_duplicates = torch.zeros(4, 4, dtype=torch.bool)
    assert loss(logits, None, 0.1).item() == pytest.approx(loss(logits, no_duplicates, 0.1).item(), abs=1e-6)
    assert loss(logits, None, 0.1).item() != pytest.approx(loss(logits).item(), abs=1e-3)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_chance_of_a_batch_of_duplicates_is_no_loss(kind):
    all_equal = ~torch.eye(4, dtype=torch.bool)
    assert losses.chance(kind, 4, all_equal) == 0
    assert losses.chance_accuracy(4, all_equal) is None


def test_a_pair_without_a_negative_does_not_count_as_accuracy():
    duplicate_BB = torch.ones(4, 4, dtype=torch.bool).fill_diagonal_(False)
    assert all(accuracy.isnan() for accuracy in losses.accuracies(torch.randn(4, 4), duplicate_BB, torch.zeros(4)))
    assert losses.chance_accuracy(4, duplicate_BB) is None
    # Pair 0 equals all others, which differ: it has no negative, and pairs 1 to 3 have two each.
    duplicate_BB = torch.zeros(4, 4, dtype=torch.bool)
    duplicate_BB[0, 1:] = duplicate_BB[1:, 0] = True
    logit_BB = torch.tensor([[9.0, 0, 0, 0], [0, 9, 0, 0], [0, 0, 0, 9], [0, 9, 0, 0]])
    i2t, t2i = losses.accuracies(logit_BB, duplicate_BB, torch.tensor([False, True, True, True]))
    assert i2t.item() == pytest.approx(1 / 3)  # not 2 / 4
    assert t2i.item() == pytest.approx(1 / 3)
