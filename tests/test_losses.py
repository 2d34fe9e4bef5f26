import math

import pytest
import torch

from m1clip import losses


def plain_softmax(logits):
    """The double loop of the paper, without a matrix in sight."""
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
def test_chance_is_the_best_that_a_constant_can_do(kind):
    best = min(losses.LOSSES[kind](torch.full((12, 12), c)).item() for c in torch.linspace(-6, 0, 601).tolist())
    assert losses.chance(kind, 12) == pytest.approx(best, abs=1e-4)


def test_accuracies_of_both_directions():
    logits = torch.tensor([[2.0, 3.0], [0.0, 3.5]])  # rows: 1 of 2 right; columns: both
    assert [one.item() for one in losses.accuracies(logits)] == [0.5, 1.0]
    assert [one.item() for one in losses.accuracies(torch.eye(5))] == [1.0, 1.0]


TWINS = torch.tensor([[0, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


def test_a_softmax_without_duplicates_is_that_of_the_couples_that_are_left():
    logits = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    left = [(0, [0, 2]), (1, [1, 2]), (2, [0, 1, 2])]  # each row may choose among these
    rows = [-torch.log_softmax(logits[i, kept], 0)[kept.index(i)] for i, kept in left]
    columns = [-torch.log_softmax(logits[kept, i], 0)[kept.index(i)] for i, kept in left]
    expected = (sum(rows) + sum(columns)) / 6
    assert losses.softmax_loss(logits, TWINS).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_what_stands_at_a_twin_does_not_matter(kind):
    logits = torch.randn(3, 3, requires_grad=True)
    losses.LOSSES[kind](logits, TWINS, 0.1).backward()
    assert logits.grad[TWINS].abs().max() == 0
    assert logits.grad[~TWINS].abs().min() > 0
    assert losses.accuracies(logits.detach() + 99 * TWINS, TWINS)[0] == losses.accuracies(logits, TWINS)[0]


def test_smoothing_leaves_chance_where_it_was():
    at_chance = torch.full((12, 12), -math.log(11))  # the best constant: 1 of 12 matches
    for kind, loss in losses.LOSSES.items():
        assert loss(at_chance, None, 0.1).item() == pytest.approx(losses.chance(kind, 12), abs=1e-5)


@pytest.mark.parametrize("kind", losses.LOSSES)
def test_smoothing_without_duplicates_equals_smoothing_with_an_empty_mask(kind):
    logits = torch.randn(4, 4)
    loss = losses.LOSSES[kind]
    none = torch.zeros(4, 4, dtype=torch.bool)
    assert loss(logits, None, 0.1).item() == pytest.approx(loss(logits, none, 0.1).item(), abs=1e-6)
    assert loss(logits, None, 0.1).item() != pytest.approx(loss(logits).item(), abs=1e-3)
