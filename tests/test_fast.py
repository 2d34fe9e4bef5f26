"""The fast towers against the plain ones: the same features, the same gradients, less memory."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from helpers import make_state, random_pairs
from m1clip.config import TextConfig, TrainConfig, VisionConfig
from m1clip.model import fast
from m1clip.model.towers import BagOfWords, QuickGELU, TextTransformer, VisionTransformer, init_tower
from m1clip.training import memory
from m1clip.training.step import train_step

VISION, TEXT = VisionConfig(32, 8, 32, 2, 4), TextConfig(100, 24, 32, 2, 2)
TOWERS = {
    "class token": lambda: VisionTransformer(VISION, "gelu"),
    "mean pooling": lambda: VisionTransformer(replace(VISION, pool="mean", stem="conv"), "quick_gelu"),
    "text": lambda: TextTransformer(TEXT, "gelu", 2),
    "one layer of text": lambda: TextTransformer(replace(TEXT, layers=1), "quick_gelu", 2),
    "bag of words": lambda: BagOfWords(TEXT, "gelu", 2),
}
PRE = {"norm": lambda: nn.LayerNorm(8), "gelu": nn.GELU, "quick_gelu": QuickGELU}


@pytest.fixture
def recompute_always(monkeypatch):
    """In narrow layers too: wide ones would make slow tests."""
    monkeypatch.setattr(fast, "MIN_RECOMPUTE_WIDTH", 1)


def captions(count: int) -> torch.Tensor:
    """Random tokens with the end (2) at all places, and random ids after it, which must not matter."""
    tokens_BL = torch.randint(3, 100, (count, 24), generator=torch.Generator().manual_seed(1))
    tokens_BL[torch.arange(count), 1 + torch.arange(count) % 23] = 2
    return tokens_BL


def features_and_gradients(tower: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    y_BD = tower(inputs)
    factor_BD = torch.linspace(-1, 1, y_BD.numel()).view_as(y_BD)
    return [y_BD.detach(), *torch.autograd.grad((y_BD * factor_BD).sum(), tower.parameters())]


@pytest.mark.parametrize("grad_checkpointing", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_fast_towers_have_the_features_and_gradients_of_plain_ones(recompute_always, name, grad_checkpointing):
    torch.manual_seed(0)
    plain, quick = TOWERS[name](), TOWERS[name]()
    init_tower(plain)
    for weight in plain.parameters():  # biases and norms away from 0 and 1
        weight.data += 0.1 * torch.randn_like(weight)
    quick.load_state_dict(plain.state_dict())
    quick = fast.make_fast(quick)
    quick.grad_checkpointing = grad_checkpointing
    assert not any(type(module) in fast.FAST for module in quick.modules())
    inputs = captions(50) if hasattr(plain, "token") else torch.randn(5, 3, 32, 32)
    for ours, expected in zip(
        features_and_gradients(quick, inputs), features_and_gradients(plain, inputs), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_short_captions_are_not_padded_to_the_longest():
    tower = fast.make_fast(TextTransformer(TEXT, "gelu", 2))
    init_tower(tower)
    lengths = []
    tower.blocks[0].register_forward_hook(lambda module, inputs, output: lengths.append(inputs[0].shape[1]))
    tower(captions(48))
    assert len(lengths) == fast.TEXT_GROUPS
    assert lengths == sorted(lengths)
    assert lengths[0] < 8 < 24 == lengths[-1]
    lengths.clear()
    tower(captions(2 * fast.MIN_GROUP - 1))  # too few to group
    assert lengths == [24]


def outputs_and_gradients(function, pre, linear, x):
    weights = [w for w in (x, *linear.parameters(), *pre.parameters()) if w.requires_grad]
    y = function(pre, linear, x)
    factors = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y.detach(), *torch.autograd.grad((y * factors).sum(), weights)]


def plain_linear(pre, linear, x):
    return linear(pre(x))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
@pytest.mark.parametrize("kind", PRE)
def test_recomputed_layers_equal_plain_ones(recompute_always, kind, shape, frozen):
    torch.manual_seed(0)
    pre, linear = PRE[kind]().requires_grad_(not frozen), nn.Linear(8, 5)
    x = torch.randn(shape, requires_grad=True)
    ours = outputs_and_gradients(fast.linear_with_recompute, pre, linear, x)
    for our, expected in zip(ours, outputs_and_gradients(plain_linear, pre, linear, x), strict=True):
        torch.testing.assert_close(our, expected)


def test_only_the_input_is_stored(recompute_always):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear = nn.Linear(8, 5)
        fast.linear_with_recompute(nn.LayerNorm(8), linear, torch.randn(3, 8))
    assert [tuple(tensor.shape) for tensor in saved] == [(3, 8), (5, 8)]
    assert saved[1].data_ptr() == linear.weight.data_ptr()


def test_plain_layers_are_used_where_recomputing_does_not_pay_or_would_be_wrong(recompute_always, monkeypatch):
    linear, x = nn.Linear(8, 5), torch.randn(3, 8)
    assert fast.should_recompute(linear, x)
    with torch.no_grad():
        assert not fast.should_recompute(linear, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fast.should_recompute(linear, x)
        assert fast.linear_with_recompute(nn.GELU(), linear, x).dtype == torch.bfloat16
    hook = linear.register_full_backward_hook(lambda *_: None)
    assert not fast.should_recompute(linear, x)
    hook.remove()
    assert not fast.should_recompute(nn.Linear(8, 5).requires_grad_(False), x)
    monkeypatch.setattr(fast, "MIN_RECOMPUTE_WIDTH", 6)
    assert not fast.should_recompute(linear, x)


@pytest.mark.parametrize("grad_checkpointing", [False, True])
def test_a_training_step_with_recomputed_layers_is_the_same_and_stores_less(tiny, monkeypatch, grad_checkpointing):
    config = TrainConfig(model=tiny, batch_size=12, patch_dropout=0.5, grad_checkpointing=grad_checkpointing)
    results = []
    for width in (10**6, 1):
        monkeypatch.setattr(fast, "MIN_RECOMPUTE_WIDTH", width)
        state = make_state(config, 5)
        stored = memory.activation_bytes(state, random_pairs(12))
        stats, *_ = train_step(state, random_pairs(12))
        results.append((stored, stats, {name: weight.grad.clone() for name, weight in state.weights.items()}))
    (plain_bytes, plain_stats, plain_grads), (fast_bytes, fast_stats, fast_grads) = results
    torch.testing.assert_close(fast_stats, plain_stats)
    for name, gradient in plain_grads.items():
        torch.testing.assert_close(fast_grads[name], gradient, rtol=1e-3, atol=1e-6)
    assert fast_bytes < 0.8 * plain_bytes or grad_checkpointing
