"""The training step against plainer ones: the whole batch at once, torch's own optimizers, sums written out."""

from dataclasses import replace

import pytest
import torch

from helpers import make_state, random_pairs
from m1clip.config import ModelConfig, TrainConfig
from m1clip.data.batches import Batch, Images, Tokens
from m1clip.devices import Plan
from m1clip.losses import LOSSES
from m1clip.model.clip import CLIP
from m1clip.training.optim import Muon, make_optimizers
from m1clip.training.step import GROWTH_INTERVAL, LOSS_SCALE, STATS, TrainState, embed_texts, train_step

DUPLICATES = torch.zeros(12, 12, dtype=torch.bool)
DUPLICATES[0, 1] = DUPLICATES[1, 0] = True


def step_config(tiny: ModelConfig, loss: str = "softmax", **settings) -> TrainConfig:
    return TrainConfig(model=replace(tiny, loss=loss), batch_size=12, grad_clip=1e9, **settings)


def noisy_config(tiny: ModelConfig, loss: str = "softmax", **settings) -> TrainConfig:
    """Patch dropout, head dropout and label smoothing."""
    dropout = {"patch_dropout": 0.5, "head_dropout": 0.3, "label_smoothing": 0.1}
    return step_config(replace(tiny, head="mlp", head_hidden=16), loss, **dropout, **settings)


def step_gradients(config: TrainConfig, chunk: int = 12, batch: Batch | None = None) -> dict[str, torch.Tensor]:
    state = make_state(config, chunk)
    train_step(state, batch or random_pairs(12))
    return {name: weight.grad for name, weight in state.weights.items()}


def assert_gradients_close(actual, expected, atol: float = 1e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def max_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return max((a[name] - b[name]).abs().max().item() for name in a)


def with_three_captions(batch: Batch) -> Batch:
    others = [random_pairs(len(batch), seed).text.tokens_BKL for seed in (8, 9)]
    return replace(batch, text=Tokens(torch.cat([batch.text.tokens_BKL, *others], dim=1)))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_gradients_are_those_of_plain_autograd(tiny, loss):
    config = step_config(tiny, loss, label_smoothing=0.1)
    model, batch = make_state(config).model, random_pairs(12, duplicate_BB=DUPLICATES)
    logits_BB = model(model.normalize(batch.image.images_BHWC), batch.text.tokens_BKL[:, 0])
    LOSSES[loss](logits_BB, DUPLICATES, 0.1).backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    assert_gradients_close(step_gradients(config, batch=batch), expected)


@pytest.mark.parametrize("grad_checkpointing", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 6])
@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_chunks_give_the_gradients_of_the_whole_batch(tiny, loss, chunk, grad_checkpointing):
    """With dropout: masks are keyed by row, so both passes of GradCache see the same."""
    config = noisy_config(tiny, loss)
    whole = step_gradients(config)
    chunked = step_gradients(replace(config, grad_checkpointing=grad_checkpointing), chunk)
    assert_gradients_close(chunked, whole, atol=2e-5)


@pytest.mark.parametrize("setting", ["patch_dropout", "head_dropout", "label_smoothing"])
def test_every_regularization_changes_the_gradients(tiny, setting):
    config = noisy_config(tiny)
    assert max_difference(step_gradients(config), step_gradients(replace(config, **{setting: 0.0}))) > 1e-3


def test_duplicates_are_masked_in_chunks_too(tiny):
    config, batch = step_config(tiny), random_pairs(12, duplicate_BB=DUPLICATES)
    whole = step_gradients(config, 12, batch)
    assert_gradients_close(step_gradients(config, 5, batch), whole)
    assert max_difference(step_gradients(config), whole) > 1e-4


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_several_captions_per_image_give_the_mean_of_their_losses(tiny, loss):
    config, batch = step_config(tiny, loss), with_three_captions(random_pairs(12))
    single = [replace(batch, text=Tokens(tokens_BL[:, None])) for tokens_BL in batch.text.tokens_BKL.unbind(1)]
    separate = [step_gradients(config, batch=one) for one in single]
    mean = {name: torch.stack([gradients[name] for gradients in separate]).mean(0) for name in separate[0]}
    assert_gradients_close(step_gradients(config, batch=batch), mean)


@pytest.mark.parametrize("chunk", [5, 6])
def test_several_captions_per_image_in_chunks(tiny, chunk):
    config, batch = noisy_config(tiny), with_three_captions(random_pairs(12))
    assert_gradients_close(step_gradients(config, chunk, batch), step_gradients(config, 12, batch))


def test_captions_of_one_image_have_their_own_dropout(tiny):
    state, batch = make_state(noisy_config(tiny)), random_pairs(12)
    twice = replace(batch, text=Tokens(batch.text.tokens_BKL.repeat(1, 2, 1)))
    text_BKE = embed_texts(state.model, twice, "fp32")
    assert (text_BKE[:, 0] - text_BKE[:, 1]).abs().amax(1).min() > 1e-3
    assert torch.equal(text_BKE, embed_texts(state.model, twice, "fp32"))


def test_grad_checkpointing_changes_no_bit(tiny):
    config = noisy_config(tiny)
    assert max_difference(step_gradients(config), step_gradients(replace(config, grad_checkpointing=True))) == 0


def test_the_statistics_are_those_of_the_logits(tiny):
    state, batch = make_state(step_config(tiny)), random_pairs(12)
    model = make_state(step_config(tiny)).model
    logits_BB = model(model.normalize(batch.image.images_BHWC), batch.text.tokens_BKL[:, 0])
    stats, image_BE, text_BE = train_step(state, batch)
    stats = dict(zip(STATS, stats.tolist(), strict=True))
    assert stats["loss"] == pytest.approx(LOSSES["softmax"](logits_BB).item(), abs=1e-5)
    assert stats["i2t_accuracy"] == pytest.approx((logits_BB.argmax(1) == torch.arange(12)).float().mean().item())
    assert stats["t2i_accuracy"] == pytest.approx((logits_BB.argmax(0) == torch.arange(12)).float().mean().item())
    torch.testing.assert_close(model.logits(image_BE, text_BE), logits_BB, rtol=0, atol=1e-4)


def test_clipping_limits_the_update_and_reports_the_norm_before_it(tiny):
    config = replace(step_config(tiny), grad_clip=0.01)
    before, state = make_state(config).weights, make_state(config)
    state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=1.0, fused=True)]
    stats = train_step(state, random_pairs(12))[0]
    update = torch.cat([(state.weights[name] - before[name]).flatten() for name in before])
    assert stats[STATS.index("grad_norm")] > 1
    assert update.norm().item() == pytest.approx(0.01, rel=0.01)


def test_the_temperature_is_clamped_at_0_01(tiny):
    state = make_state(step_config(tiny))
    state.model.logit_scale.data.fill_(6.0)
    stats = train_step(state, random_pairs(12))[0]
    assert stats[STATS.index("temperature")].item() == pytest.approx(0.01)


def nan_images(batch: Batch) -> Batch:
    return replace(batch, image=Images(torch.full_like(batch.image.images_BHWC, torch.nan, dtype=torch.float32)))


def all_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    weights = {name: weight.detach().clone() for name, weight in state.weights.items()}
    ema = {f"{name}/ema": average.clone() for name, average in (state.ema or {}).items()}
    return {**{name: tensor.clone() for name, tensor in state.tensors().items()}, **weights, **ema}


@pytest.mark.parametrize("found_inf", [True, False])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_non_finite_batch_changes_nothing(tiny, optimizer, found_inf, monkeypatch):
    """Skipped on the device by `found_inf`, or, where that is not supported, by reading the loss."""
    monkeypatch.setattr("m1clip.devices.supports_found_inf", lambda device: found_inf)
    state = make_state(step_config(tiny, optimizer=optimizer, ema=0.9))
    train_step(state, random_pairs(12))
    before = all_tensors(state)
    stats = train_step(state, nan_images(random_pairs(12, seed=2)))[0]
    assert not stats[STATS.index("loss")].isfinite()
    assert all(torch.equal(tensor, before[name]) for name, tensor in all_tensors(state).items())
    train_step(state, random_pairs(12, seed=3))
    assert not torch.equal(state.weights["text_projection.weight"], before["text_projection.weight"])


def fp16_state(tiny: ModelConfig, **settings) -> TrainState:
    torch.manual_seed(0)
    return TrainState(CLIP(tiny), step_config(tiny, **settings), Plan("cpu", "fp16"))


def test_fp16_gradients_are_unscaled(tiny):
    state = fp16_state(tiny)
    train_step(state, random_pairs(12))
    actual = torch.cat([weight.grad.flatten() for weight in state.weights.values()])
    expected = torch.cat([gradient.flatten() for gradient in step_gradients(step_config(tiny)).values()])
    assert state.scaler.get_scale() == LOSS_SCALE
    assert torch.cosine_similarity(actual, expected, dim=0) > 0.999
    assert actual.norm().item() == pytest.approx(expected.norm().item(), rel=0.02)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_fp16_overflow_halves_the_loss_scale_and_skips_the_update(tiny, optimizer):
    state = fp16_state(tiny, optimizer=optimizer, ema=0.9)
    train_step(state, random_pairs(12))
    state.scaler.update(new_scale=1e38)  # the loss is finite, its scaled gradients are not
    before = all_tensors(state)
    stats = train_step(state, random_pairs(12, seed=2))[0]
    assert stats[STATS.index("loss")].isfinite()
    assert not stats[STATS.index("grad_norm")].isfinite()
    assert state.scaler.get_scale() == pytest.approx(5e37)
    after = all_tensors(state)
    assert all(torch.equal(after[name], before[name]) for name in before.keys() - {"loss_scale", "growth_tracker"})


def test_the_loss_scale_doubles_after_enough_finite_steps(tiny, monkeypatch):
    monkeypatch.setattr("m1clip.training.step.GROWTH_INTERVAL", 3)
    state = fp16_state(tiny)
    for step in range(3):
        assert state.scaler.get_scale() == LOSS_SCALE
        train_step(state, random_pairs(12, seed=step))
    assert state.scaler.get_scale() == 2 * LOSS_SCALE
    assert GROWTH_INTERVAL == 1000


def test_an_fp16_state_continues_exactly_from_its_tensors(tiny, monkeypatch):
    """With the loss scale and the steps counted towards its next doubling."""
    monkeypatch.setattr("m1clip.training.step.GROWTH_INTERVAL", 3)
    whole, resumed = fp16_state(tiny, ema=0.9), fp16_state(tiny, ema=0.9)
    for step in range(2):
        train_step(whole, random_pairs(12, seed=step))
    with whole.averaged_model() as model:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    resumed.load(weights, {name: tensor.clone() for name, tensor in whole.tensors().items()})
    for state in (whole, resumed):
        for step in (2, 3):
            train_step(state, random_pairs(12, seed=step))
    expected, actual = all_tensors(whole), all_tensors(resumed)
    assert expected["loss_scale"] == 2 * LOSS_SCALE
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_state_without_fp16_stores_no_loss_scale(tiny):
    assert "loss_scale" not in make_state(step_config(tiny)).tensors()
    assert make_state(step_config(tiny)).scaler.get_scale() == 1.0


def test_another_precision_gets_its_own_scaler(tiny):
    state = make_state(step_config(tiny))
    state.use_plan(Plan("cpu", "fp16"))
    assert state.scaler.get_scale() == LOSS_SCALE
    state.use_plan(Plan("cpu", "bf16"))
    assert not state.scaler.is_enabled()


def test_the_ema_model_is_evaluated_while_training_continues_from_the_trained_weights(tiny):
    state = make_state(step_config(tiny, ema=0.5))
    initial = state.weights["text_projection.weight"].detach().clone()
    train_step(state, random_pairs(12))
    trained = state.weights["text_projection.weight"].detach().clone()
    with state.averaged_model() as model:
        average = model.text_projection.weight.detach().clone()
    decay = 2 / 11  # at the first step, where there is little to average
    torch.testing.assert_close(average, decay * initial + (1 - decay) * trained, rtol=0, atol=1e-6)
    assert torch.equal(state.weights["text_projection.weight"], trained)


def test_the_ema_is_torchs_averaged_model_with_a_growing_decay(tiny):
    state, step = make_state(step_config(tiny, ema=0.4)), 0
    averaged = torch.optim.swa_utils.AveragedModel(
        state.model, avg_fn=lambda average, weight, _: average.lerp(weight, 1 - min(0.4, (1 + step) / (10 + step)))
    )
    averaged.n_averaged.fill_(1)  # the first update averages with the initial weights, as ours does
    for step in range(1, 9):
        train_step(state, random_pairs(12, seed=step))
        averaged.update_parameters(state.model)
    expected = dict(averaged.module.named_parameters())
    for name, average in state.ema.items():
        torch.testing.assert_close(average, expected[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
def test_muon_is_torchs_muon(shape):
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    reference = torch.optim.Muon([theirs], 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    optimizers = ((ours, Muon([ours], 0.01)), (theirs, reference))
    for _ in range(3):
        gradient = torch.randn(shape)
        for weight, optimizer in optimizers:
            weight.grad = gradient.clone()
            optimizer.step()
    assert (ours - 1).abs().max() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)  # torch's iterates in bfloat16


def test_muon_updates_hidden_matrices_and_adamw_everything_else(tiny):
    model = CLIP(replace(tiny, vision=replace(tiny.vision, stem="conv")))
    names = {id(weight): name for name, weight in model.named_parameters()}
    adamw, muon = make_optimizers(model, step_config(tiny, optimizer="muon"))
    by_muon = {names[id(w)] for group in muon.param_groups for w in group["params"]}
    blocks = {name for name in names.values() if ".blocks." in name and model.get_parameter(name).ndim == 2}
    stem = {f"vision.patch.{layer}.weight" for layer in (2, 4, 6)}  # the first one has RGB as input
    assert by_muon == blocks | stem | {"vision_projection.weight", "text_projection.weight"}
    assert len(by_muon) + sum(len(group["params"]) for group in adamw.param_groups) == len(names)


def test_only_matrices_have_weight_decay(tiny):
    model = CLIP(replace(tiny, loss="sigmoid"))
    (optimizer,) = make_optimizers(model, step_config(tiny))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decay = {names[id(w)]: group["weight_decay"] for group in optimizer.param_groups for w in group["params"]}
    without = {name for name, amount in decay.items() if amount == 0}
    assert decay.keys() == set(names.values())
    assert all(model.get_parameter(name).ndim >= 2 for name in decay.keys() - without)
    assert {"text.token.weight", "text.position", "vision.position", "vision.class_token"} <= without
    assert {"logit_scale", "logit_bias", "vision.ln_pre.weight", "text.blocks.0.mlp.wide.bias"} <= without


def test_full_fine_tuning_lowers_the_learning_rate_layer_by_layer(tiny):
    model = CLIP(tiny)
    names = {id(weight): name for name, weight in model.named_parameters()}
    state = TrainState(model, step_config(tiny, recipe="full"))
    state.set_lr(1.0)
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    lr = {names[id(weight)]: group["lr"] for group in groups for weight in group["params"]}
    assert lr["vision_projection.weight"] == lr["vision.ln_post.weight"] == lr["logit_scale"] == 1.0
    assert lr["vision.blocks.1.attn.qkv.weight"] == pytest.approx(0.8)
    assert lr["vision.blocks.0.attn.qkv.weight"] == pytest.approx(0.8**2)
    assert lr["vision.patch.weight"] == lr["text.token.weight"] == pytest.approx(0.8**3)


def test_from_scratch_all_layers_have_the_same_learning_rate(tiny):
    state = make_state(step_config(tiny))
    state.set_lr(0.3)
    assert {group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups} == {0.3}
