"""Devices: their choice, their quirks, and on a machine with a GPU that it trains as the CPU does."""

import pytest
import torch

from helpers import make_state, random_pairs
from m1clip import devices, errors, losses
from m1clip.bench import sweep
from m1clip.config import TrainConfig, get_preset
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import create_run
from m1clip.training import device_check, timing
from m1clip.training.checkpoint import Progress, load_checkpoint, save_checkpoint
from m1clip.training.step import TrainState, train_step

GPUS = ["cuda", "mps"]


def require_device(name: str) -> torch.device:
    if name not in devices.available():
        pytest.skip(f"no {name} on this machine")
    return torch.device(name)


def test_a_device_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    assert devices.default_device("auto") == (torch.device("cpu"), "PyTorch finds no GPU")
    assert devices.default_device("cpu")[1] == "requested with --device cpu"
    with pytest.raises(ValueError, match="finds no mps on this machine, only cpu"):
        devices.default_device("mps")
    with pytest.raises(ValueError, match="no device 'gpu'"):
        devices.default_device("gpu")
    with pytest.raises(ValueError, match="name one device here"):
        devices.default_device("vision=cpu,text=cpu")


def test_auto_is_the_gpu_if_nothing_was_measured(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    device, reason = devices.default_device("auto")
    assert device.type == "mps"
    assert "--device cpu" in reason


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_equals_sdpa(causal):
    q, k, v = torch.randn(3, 2, 4, 7, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(devices.plain_attention(q, k, v, causal), expected, atol=1e-6)


@pytest.mark.parametrize("length", [5, 8, 9, 40])
@pytest.mark.parametrize("name", GPUS)
def test_attention_of_strided_tensors_equals_the_cpus(name, length):
    """On MPS, strided tensors and short sequences gave wrong results in several PyTorch releases."""
    device = require_device(name)
    qkv = torch.randn(2, length, 3, 4, 8)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    on_device = devices.attention(*qkv.to(device).permute(2, 0, 3, 1, 4), causal=True)
    assert torch.allclose(on_device.cpu(), devices.attention(q, k, v, causal=True), atol=1e-5)


@pytest.mark.parametrize("name", GPUS)
def test_a_checkpoint_of_a_gpu_is_resumed_on_it(name, tiny, tmp_path):
    device, config = require_device(name), TrainConfig(model=tiny, batch_size=4)
    run = create_run(tmp_path, "r", "x", overwrite=False)
    batch = random_pairs(4).to(device, device)
    states = [TrainState(CLIP(tiny, Tokenizer.characters()).to(device), config) for _ in range(2)]
    train_step(states[0], batch)
    path = save_checkpoint(run, states[0], Progress(step=1))
    assert load_checkpoint(path, states[1]).step == 1
    first, second = (train_step(state, batch)[0][0].item() for state in states)
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_a_step_that_is_not_finite_changes_nothing(name, optimizer, tiny):
    device = require_device(name)
    config = TrainConfig(model=tiny, batch_size=4, optimizer=optimizer, ema=0.9)
    state = TrainState(CLIP(tiny).to(device), config)
    train_step(state, random_pairs(4).to(device, device))
    before = {key: value.clone() for key, value in state.tensors().items()}
    state.model.vision_projection.weight.grad.fill_(float("nan"))
    state.update(torch.tensor(True, device=device))
    after = state.tensors()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_timestamps_are_ordered(name):
    device = require_device(name)
    x = torch.randn(512, 512, device=device)
    start = devices.timestamp(device)
    for _ in range(20):
        x = torch.nn.functional.normalize(x @ x)
    end = devices.timestamp(device)
    x.sum().item()
    assert devices.elapsed_ms(start, end) > 0


def test_out_of_memory_errors_are_recognized():
    assert errors.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert errors.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"))
    assert not errors.is_out_of_memory(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert errors.is_out_of_memory(caught.value)
    assert errors.short_error(caught.value) == "out of memory"


@pytest.mark.parametrize("requested", ["{}", "vision={},text=cpu", "vision=cpu,text={}"])
@pytest.mark.parametrize("name", GPUS)
def test_a_step_on_a_gpu_equals_the_cpus(name, requested, tiny):
    """Loss, gradient norm and weights after two steps, on the device and with one tower on each."""
    require_device(name)
    config = TrainConfig(model=tiny, batch_size=8)
    cpu, other = make_state(config), make_state(config)
    other = TrainState(other.model, config, Plan(requested.format(name)))
    for number in range(2):
        batch = random_pairs(8, seed=number)
        expected, actual = train_step(cpu, batch)[0], train_step(other, other.to_device(batch))[0]
        assert torch.allclose(expected, actual.cpu(), rtol=1e-3, atol=1e-3)
    for expected, actual in zip(cpu.weights.values(), other.weights.values(), strict=True):
        assert torch.allclose(expected, actual.cpu(), atol=2e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_trains_in_lower_precision(name, precision, tiny):
    if precision not in devices.precisions(require_device(name)):
        pytest.skip(f"{name} has no {precision} here")
    config = TrainConfig(model=tiny, batch_size=8)
    state = TrainState(make_state(config).model, config, Plan(name, precision))
    values = [train_step(state, state.to_device(random_pairs(8)))[0][0].item() for _ in range(8)]
    assert values[-1] < values[0]


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_computes_what_the_cpu_does(name):
    require_device(name)
    config = get_preset("nano")
    batch = timing.random_batch(config, 8, config.model.text.context_length)
    result = device_check.compare_with_cpu(CLIP(config.model), batch, Plan(name), config)
    assert result.mismatch is None


@pytest.mark.parametrize("name", GPUS)
def test_plans_and_operations_are_timed_on_a_gpu(name, tiny):
    device, config = require_device(name), TrainConfig(model=tiny, batch_size=8)
    plans = [Plan("cpu"), Plan(name), Plan(f"vision={name},text=cpu")]
    for plan_timing in timing.time_plans(config, plans, timing.random_batch(config, 8, 12), seconds=0.1):
        assert plan_timing.error is None
        assert min(plan_timing.samples_ms) > 0
    row = sweep.time_operation(sweep.operations((256,))[1], name, "fp32", 0.1)
    assert row["transfer_ms"] > 0
    assert row["launch_ms"] is not None
    assert devices.limit_gb(device) > devices.memory_gb(device) >= 0


@pytest.mark.parametrize("name", GPUS)
def test_gradients_on_a_gpu_equal_the_cpus(name, tiny):
    device = require_device(name)
    torch.manual_seed(0)
    model = CLIP(tiny)
    pixels, tokens = torch.randn(6, 3, 32, 32), torch.randint(3, 500, (6, 16))
    tokens[:, -1] = model.text.end_id
    gradients = []
    for where in (torch.device("cpu"), device):
        model.to(where).zero_grad()
        loss = losses.softmax_loss(model(devices.copy_to(pixels, where), devices.copy_to(tokens, where)))
        loss.backward()
        gradients.append([weight.grad.cpu().clone() for weight in model.parameters()])
    for expected, actual in zip(*gradients, strict=True):
        assert torch.allclose(expected, actual, atol=1e-4)
