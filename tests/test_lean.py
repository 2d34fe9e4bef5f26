"""Layers that keep less, against the same layers as torch has them."""

import pytest
import torch
from torch import nn

from m1clip.config import TrainConfig
from m1clip.model import fast
from m1clip.model.towers import QuickGELU
from m1clip.training import memory
from m1clip.training.step import train_step
from trained import some_batch, some_state

CHEAP = {"norm": lambda: nn.LayerNorm(8), "gelu": nn.GELU, "quick": QuickGELU}


@pytest.fixture
def always(monkeypatch):
    """Narrow layers too: wide ones would make slow tests."""
    monkeypatch.setattr(fast, "WIDE", 1)


def found(way, cheap, linear, x):
    """The result, and all gradients of a sum of it."""
    weights = [w for w in (x, *linear.parameters(), *cheap.parameters()) if w.requires_grad]
    y = way(cheap, linear, x)
    factors = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), weights)]


def plainly(cheap, linear, x):
    return linear(cheap(x))


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
@pytest.mark.parametrize("kind", CHEAP)
def test_results_and_gradients_are_those_of_plain_layers(always, kind, shape):
    torch.manual_seed(0)
    cheap, linear, x = CHEAP[kind](), nn.Linear(8, 5), torch.randn(shape, requires_grad=True)
    for ours, theirs in zip(*(found(way, cheap, linear, x) for way in (fast.linear_after, plainly)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_norm_that_does_not_move_is_left_out(always):
    norm, linear = nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 5)
    x = torch.randn(3, 8, requires_grad=True)
    for ours, theirs in zip(*(found(way, norm, linear, x) for way in (fast.linear_after, plainly)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_input_is_kept(always):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear = nn.Linear(8, 5)
        fast.linear_after(nn.LayerNorm(8), linear, torch.randn(3, 8))
    assert [tuple(tensor.shape) for tensor in kept] == [(3, 8), (5, 8)]
    assert kept[1].data_ptr() == linear.weight.data_ptr()


def test_where_it_would_not_pay_or_be_wrong_the_layers_are_as_they_are(always, monkeypatch):
    linear, x = nn.Linear(8, 5), torch.randn(3, 8)
    assert fast.pays(linear, x)
    with torch.no_grad():
        assert not fast.pays(linear, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast.pays(linear, x)
        assert fast.linear_after(nn.GELU(), linear, x).dtype == torch.bfloat16
    heard = linear.register_full_backward_hook(lambda *_: None)
    assert not fast.pays(linear, x)
    heard.remove()
    assert not fast.pays(nn.Linear(8, 5).requires_grad_(False), x)
    monkeypatch.setattr(fast, "WIDE", 6)
    assert not fast.pays(linear, x)


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_a_step_of_lean_layers_is_the_same_and_keeps_less(tiny, monkeypatch, grad_checkpointing):
    config = TrainConfig(model=tiny, batch=12, dropout=0.2, grad_checkpointing=grad_checkpointing)
    results = []
    for wide in (10**6, 1):
        monkeypatch.setattr(fast, "WIDE", wide)
        state = some_state(config, 5)
        kept = memory.kept_bytes(state, some_batch(12))
        stats, *_ = train_step(state, some_batch(12))
        results.append((kept, stats, {name: weight.grad.clone() for name, weight in state.weights.items()}))
    (much, before, plain), (little, after, ours) = results
    torch.testing.assert_close(after, before)
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6)
    assert little < 0.8 * much or grad_checkpointing
