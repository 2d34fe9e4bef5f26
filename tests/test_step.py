"""The step against plainer ones: the whole batch at once, torch's own optimizers, a sum written out."""

from dataclasses import replace

import pytest
import torch

from m1clip.config import TrainConfig
from m1clip.data.batches import Batch
from m1clip.model import rng
from m1clip.model.clip import CLIP
from m1clip.training.optim import Muon, make_optimizers
from m1clip.training.state import TrainState
from m1clip.training.step import STATS, embed_captions, train_step
from helpers import random_pairs, make_state


def config_of(tiny, loss: str = "softmax", **changes) -> TrainConfig:
    return TrainConfig(model=replace(tiny, loss=loss), batch_size=12, grad_clip=1e9, **changes)


def gradients(config: TrainConfig, chunk: int, duplicate_BB=None) -> dict[str, torch.Tensor]:
    state = make_state(config, chunk)
    train_step(state, random_pairs(12, duplicate_BB=duplicate_BB))
    return {name: weight.grad for name, weight in state.weights.items()}


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("grad_checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 6])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_divided_batch_gives_the_gradients_of_the_whole(tiny, loss, chunk, grad_checkpointing):
    """With dropout and dropped tokens: noise belongs to the rows, so all passes see the same."""
    noisy = config_of(tiny, loss, patch_dropout=0.5, label_smoothing=0.1)
    whole = gradients(noisy, chunk=12)
    assert furthest(gradients(replace(noisy, grad_checkpointing=grad_checkpointing), chunk), whole) < 2e-5
    without = gradients(replace(noisy, patch_dropout=0.0), chunk=12)
    assert furthest(without, whole) > 1e-2  # the noise was really there


def test_duplicates_are_masked_in_a_divided_batch_too(tiny):
    duplicate_BB = torch.zeros(12, 12, dtype=torch.bool)
    duplicate_BB[0, 1] = duplicate_BB[1, 0] = True
    whole = gradients(config_of(tiny), 12, duplicate_BB)
    assert furthest(gradients(config_of(tiny), 5, duplicate_BB), whole) < 1e-5
    assert furthest(gradients(config_of(tiny), 12), whole) > 1e-4


def told_thrice(batch: Batch) -> Batch:
    """The same images with three captions each."""
    others = [random_pairs(len(batch), seed).tokens_BL for seed in (8, 9)]
    return replace(batch, tokens_BL=torch.stack([batch.tokens_BL, *others], dim=1))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_several_captions_of_a_image_are_the_mean_of_their_losses(tiny, loss):
    config, batch = config_of(tiny, loss), told_thrice(random_pairs(12))
    apart: dict[str, list[torch.Tensor]] = {}
    for k in range(3):
        state = make_state(config)
        train_step(state, replace(batch, tokens_BL=batch.tokens_BL[:, k]))
        for name, weight in state.weights.items():
            apart.setdefault(name, []).append(weight.grad)
    state = make_state(config)
    train_step(state, batch)
    mean = {name: torch.stack(grads).mean(0) for name, grads in apart.items()}
    assert furthest({name: weight.grad for name, weight in state.weights.items()}, mean) < 1e-5


@pytest.mark.parametrize("chunk", [5, 6])
def test_several_captions_in_a_divided_batch(tiny, chunk):
    found = []
    for size in (12, chunk):
        state = make_state(config_of(tiny), size)
        train_step(state, told_thrice(random_pairs(12)))
        found.append({name: weight.grad for name, weight in state.weights.items()})
    assert furthest(*found) < 1e-5


def test_captions_of_one_image_have_noise_of_their_own(tiny):
    state = make_state(config_of(tiny))
    batch = random_pairs(12)
    same_BKL = batch.tokens_BL[:, None].repeat(1, 2, 1)
    text_BKE = embed_captions(state, replace(batch, tokens_BL=same_BKL))
    assert (text_BKE[:, 0] - text_BKE[:, 1]).abs().amax(1).min() > 1e-3


def test_recomputing_alone_changes_no_bit(tiny):
    noisy = config_of(tiny)
    assert furthest(gradients(noisy, 12), gradients(replace(noisy, grad_checkpointing=True), 12)) == 0


def one_step(config: TrainConfig, optimizer=None) -> tuple[TrainState, dict[str, float]]:
    state = make_state(config)
    if optimizer:
        state.optimizers = [optimizer(state.model.parameters())]
    stats = train_step(state, random_pairs(12))[0]
    return state, dict(zip(STATS, stats.tolist(), strict=True))


def test_a_step_moves_no_further_than_the_clipped_gradient_allows(tiny):
    config = replace(config_of(tiny), grad_clip=0.01)
    before = make_state(config).weights
    state, stats = one_step(config, lambda weights: torch.optim.SGD(weights, lr=1.0, fused=True))
    moved = torch.cat([(state.weights[name] - before[name]).flatten() for name in before])
    assert stats["grad_norm"] > 1  # what is reported is the length before the cut
    assert moved.norm().item() == pytest.approx(0.01, rel=0.01)


def test_a_step_clamps_the_temperature(tiny):
    state = make_state(config_of(tiny))
    state.model.logit_scale.data.fill_(6.0)
    stats = train_step(state, random_pairs(12))[0]
    assert stats[STATS.index("temperature")].item() == pytest.approx(0.01)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_batch_that_is_not_finite_moves_nothing_and_says_so(tiny, optimizer):
    state = make_state(config_of(tiny, optimizer=optimizer, ema=0.9))
    train_step(state, random_pairs(12))
    batch = random_pairs(12, seed=2)
    nonsense = replace(batch, images_BHWC=batch.images_BHWC.float().fill_(float("nan")))
    before = {name: tensor.clone() for name, tensor in everything(state).items()}
    stats = train_step(state, nonsense)[0]
    assert not stats[0].isfinite()
    assert all(torch.equal(tensor, before[name]) for name, tensor in everything(state).items())


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    mean = {f"mean of {name}": tensor for name, tensor in state.ema.items()}
    return {**state.tensors(), **mean}


def test_the_mean_of_the_weights_is_scored_and_the_moving_ones_go_on(tiny):
    state = make_state(config_of(tiny, ema=0.5))
    start = state.weights["text_projection.weight"].detach().clone()
    train_step(state, random_pairs(12))
    moving = state.weights["text_projection.weight"].detach().clone()
    with state.averaged_model() as model:
        mean = model.text_projection.weight.detach().clone()
    memory = 2 / 11  # of the first step, where there is little to remember
    assert torch.allclose(mean, memory * start + (1 - memory) * moving, atol=1e-6)
    assert torch.equal(state.weights["text_projection.weight"], moving)


def test_muon_turns_as_torchs_own_does():
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(48, 32)) for _ in range(2))
    torchs = torch.optim.Muon([theirs], 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    both = ((ours, Muon([ours], 0.01)), (theirs, torchs))
    for _ in range(3):
        gradient = torch.randn(48, 32)
        for weight, optimizer in both:
            weight.grad = gradient.clone()
            optimizer.step()
    assert (ours - 1).abs().max() > 0.01
    assert torch.allclose(ours, theirs, atol=5e-4)  # torch's runs in bfloat16


def test_muon_takes_the_matrices_from_features_to_features_and_adamw_the_rest(tiny):
    model = CLIP(replace(tiny, vision=replace(tiny.vision, stem="conv")))
    names = {id(weight): name for name, weight in model.named_parameters()}
    rest, turned = make_optimizers(model, config_of(tiny, optimizer="muon"))
    taken = {names[id(w)] for group in turned.param_groups for w in group["params"]}
    blocks = {name for name in names.values() if ".blocks." in name and model.get_parameter(name).ndim == 2}
    stem = {f"vision.patch.{layer}.weight" for layer in (2, 4, 6)}  # the first looks at colors
    assert taken == blocks | stem | {"vision_projection.weight", "text_projection.weight"}
    assert len(taken) + sum(len(group["params"]) for group in rest.param_groups) == len(names)


def test_only_matrices_decay(tiny):
    model = CLIP(replace(tiny, loss="sigmoid"))
    (optimizer,) = make_optimizers(model, config_of(tiny))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decay = {names[id(w)]: group["weight_decay"] for group in optimizer.param_groups for w in group["params"]}
    assert len(decay) == len(names)
    kept = {name for name, amount in decay.items() if amount == 0}
    assert all(model.get_parameter(name).ndim >= 2 for name in decay.keys() - kept)
    assert {"text.token.weight", "text.position", "vision.position", "vision.class_token"} <= kept
    assert {"logit_scale", "logit_bias", "vision.ln_pre.weight", "text.blocks.0.mlp.wide.bias"} <= kept


def test_rates_fall_layer_by_layer_towards_the_pixels(tiny):
    model = CLIP(tiny)
    names = {id(weight): name for name, weight in model.named_parameters()}
    state = TrainState(model, config_of(tiny, layer_decay=0.5))
    state.set_lr(0.8)
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    lr = {names[id(weight)]: group["lr"] for group in groups for weight in group["params"]}
    assert lr["vision_projection.weight"] == lr["vision.ln_post.weight"] == lr["logit_scale"] == 0.8
    assert lr["vision.blocks.1.attn.qkv.weight"] == pytest.approx(0.4)
    assert lr["vision.blocks.0.attn.qkv.weight"] == pytest.approx(0.2)
    assert lr["vision.patch.weight"] == lr["text.token.weight"] == pytest.approx(0.1)


def test_noise_is_even_and_differs_by_row_salt_and_place():
    key_B = torch.tensor([7, 8, 7])
    drawn = rng.uniform(key_B, 3, (100, 100))
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.std().item() == pytest.approx(12**-0.5, abs=0.01)
    assert torch.equal(drawn[0], drawn[2])
    assert abs(torch.corrcoef(drawn[:2].flatten(1))[0, 1].item()) < 0.05
    assert abs(torch.corrcoef(torch.stack([drawn[0], rng.uniform(key_B, 4, (100, 100))[0]]).flatten(1))[0, 1]) < 0.05
    assert len(drawn[0].unique()) > 9_990


def test_dropout_keeps_the_mean_and_nothing_is_dropped_without_keys():
    x = torch.ones(8, 50, 50)
    dropped = rng.dropout(x, 0.25, torch.arange(8), 0)
    assert dropped.mean().item() == pytest.approx(1, abs=0.02)
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    assert rng.dropout(x, 0.25, None, 0) is x


def test_each_image_keeps_its_own_tokens_in_their_order():
    x_BLD = torch.arange(10.0).view(1, 10, 1).expand(4, 10, 1)
    kept = rng.some_of(x_BLD, 0.6, torch.arange(4), 0)[..., 0]
    assert kept.shape == (4, 4)
    assert all(row.tolist() == sorted(set(row.tolist())) for row in kept)
    assert len({tuple(row.tolist()) for row in kept}) > 1


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_smaller_image_goes_through_the_same_tower(tiny, pool):
    model = CLIP(replace(tiny, vision=replace(tiny.vision, image_size=64, pool=pool)))
    full = model.embed_images(torch.zeros(2, 3, 64, 64))
    small = model.embed_images(torch.zeros(2, 3, 32, 32))
    assert small.shape == full.shape
    first, places = model.vision.places(2)
    assert len(first) == (pool == "class")
    grid = model.vision.position[len(first) :].view(4, 4, -1)
    assert torch.allclose(places.view(2, 2, -1)[0, 0], grid[:2, :2].mean((0, 1)), atol=1e-6)
