import pytest
import torch
from trained import some_batch, some_state

from m1clip import devices, losses
from m1clip import run as runs
from m1clip.bench import operations
from m1clip.config import TrainConfig, get_preset
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.training import checkpoint, parity, timing
from m1clip.training.checkpoint import Progress
from m1clip.training.state import TrainState
from m1clip.training.step import train_step

GPUS = ["cuda", "mps"]


def here(name: str) -> torch.device:
    if name not in devices.available():
        pytest.skip(f"no {name} on this machine")
    return torch.device(name)


def test_a_choice_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    assert devices.default_device("auto") == (torch.device("cpu"), "no GPU that torch can use was found")
    assert devices.default_device("cpu")[1] == "asked for with --device cpu"
    with pytest.raises(ValueError, match="has no mps on this machine; it has cpu"):
        devices.default_device("mps")
    with pytest.raises(ValueError, match="no device 'gpu'"):
        devices.default_device("gpu")


def test_auto_takes_the_gpu_and_says_how_to_compare(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    device, why = devices.default_device("auto")
    assert device.type == "mps"
    assert "--device cpu" in why


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_equals_torchs_own(causal):
    q, k, v = torch.randn(3, 2, 4, 7, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(devices.plain_attention(q, k, v, causal), expected, atol=1e-6)


@pytest.mark.parametrize("length", [5, 8, 9, 40])
@pytest.mark.parametrize("name", GPUS)
def test_attention_of_strided_tensors_equals_the_cpus(name, length):
    """On MPS strided tensors and short sequences have given wrong results in several torch releases."""
    device = here(name)
    qkv = torch.randn(2, length, 3, 4, 8)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    there = devices.attention(*qkv.to(device).permute(2, 0, 3, 1, 4), causal=True)
    assert torch.allclose(there.cpu(), devices.attention(q, k, v, causal=True), atol=1e-5)


@pytest.mark.parametrize("name", GPUS)
def test_a_checkpoint_made_there_goes_on_there(name, tiny, tmp_path):
    device, config = here(name), TrainConfig(model=tiny, batch=4)
    run = runs.create(tmp_path, "r", "x", overwrite=False)
    batch = some_batch(4).to(device, device)
    states = [TrainState(CLIP(tiny, Tokenizer.characters()).to(device), config) for _ in range(2)]
    train_step(states[0], batch)
    path = checkpoint.save(run, states[0], Progress(step=1), keep=1)
    assert checkpoint.load(path, states[1]).step == 1
    first, second = (train_step(state, batch)[0][0].item() for state in states)
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_a_step_that_is_not_finite_moves_nothing(name, optimizer, tiny):
    device = here(name)
    config = TrainConfig(model=tiny, batch=4, optimizer=optimizer, ema=0.9)
    state = TrainState(CLIP(tiny).to(device), config)
    train_step(state, some_batch(4).to(device, device))
    before = {key: value.clone() for key, value in state.tensors().items()}
    state.model.vision_projection.weight.grad.fill_(float("nan"))
    state.update(torch.tensor(True, device=device))
    after = state.tensors()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_stamps_measure_the_devices_own_time(name):
    device = here(name)
    x = torch.randn(512, 512, device=device)
    start = devices.timestamp(device)
    for _ in range(20):
        x = torch.nn.functional.normalize(x @ x)
    end = devices.timestamp(device)
    x.sum().item()
    assert 0 < devices.elapsed_ms(start, end) < 60_000


def test_running_out_of_memory_is_known_by_its_words():
    assert devices.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert devices.is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"))
    assert not devices.is_out_of_memory(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert devices.is_out_of_memory(caught.value)


@pytest.mark.parametrize("requested", ["{}", "vision={},text=cpu", "vision=cpu,text={}"])
@pytest.mark.parametrize("name", GPUS)
def test_a_step_there_is_the_cpus_step(name, requested, tiny):
    """Loss, gradient norm and weights after two steps, on the device and with one tower on each."""
    here(name)
    config = TrainConfig(model=tiny, batch=8, dropout=0.1)
    cpu, other = some_state(config), some_state(config)
    other = TrainState(other.model, config, Plan(requested.format(name)))
    for number in range(2):
        batch = some_batch(8, seed=number)
        one, there = train_step(cpu, batch)[0], train_step(other, other.take(batch))[0]
        assert torch.allclose(one, there.cpu(), rtol=1e-3, atol=1e-3)
    for mine, theirs in zip(cpu.weights.values(), other.weights.values(), strict=True):
        assert torch.allclose(mine, theirs.cpu(), atol=2e-4)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", GPUS)
def test_less_precision_trains_there(name, precision, tiny):
    if precision not in devices.precisions(here(name)):
        pytest.skip(f"{name} has no {precision} here")
    config = TrainConfig(model=tiny, batch=8)
    state = TrainState(some_state(config).model, config, Plan(name, precision))
    losses_seen = [train_step(state, state.to_device(some_batch(8)))[0][0].item() for _ in range(8)]
    assert losses_seen[-1] < losses_seen[0]


@pytest.mark.parametrize("name", GPUS)
def test_this_gpu_is_to_be_trusted(name):
    here(name)
    found = parity.on_scenes(get_preset("nano"), Plan(name))
    assert found, str(found)


@pytest.mark.parametrize("name", GPUS)
def test_contests_and_operations_run_there(name, tiny):
    here(name)
    config = TrainConfig(model=tiny, batch=8)
    plans = [Plan("cpu"), Plan(name), Plan(f"vision={name},text=cpu")]
    for one in timing.time_plans(config, plans, timing.some_batch(config, 8, 12), seconds=0.1):
        assert one.failed is None
        assert one.record()["step_ms"] > 0
    found = operations.measure(operations.operations((256,))[1], name, "fp32", 0.1)
    assert found["transfer_ms"] > 0
    assert found["launch_ms"] is not None
    assert devices.limit_gb(here(name)) > devices.memory_gb(here(name)) >= 0


@pytest.mark.parametrize("name", GPUS)
def test_gradients_equal_the_cpus(name, tiny):
    device = here(name)
    torch.manual_seed(0)
    model = CLIP(tiny)
    pixels, tokens = torch.randn(6, 3, 32, 32), torch.randint(3, 500, (6, 16))
    tokens[:, -1] = model.text.end_id
    grads = []
    for where in (torch.device("cpu"), device):
        model.to(where).zero_grad()
        loss = losses.softmax_loss(model(devices.copy_to(pixels, where), devices.copy_to(tokens, where)))
        loss.backward()
        grads.append([weight.grad.cpu().clone() for weight in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
