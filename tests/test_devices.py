import pytest
import torch

from m1clip import devices, losses
from m1clip import run as runs
from m1clip.config import preset
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from m1clip.train import checkpoint
from m1clip.train.optim import make_optimizer
from m1clip.train.step import train_step

GPUS = ["cuda", "mps"]


def here(name: str) -> torch.device:
    if name not in devices.available():
        pytest.skip(f"no {name} on this machine")
    return torch.device(name)


def test_a_choice_comes_with_its_reason(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    assert devices.choose("auto") == (torch.device("cpu"), "no GPU that torch can use was found")
    assert devices.choose("cpu")[1] == "asked for with --device cpu"
    with pytest.raises(ValueError, match="has no mps on this machine; it has cpu"):
        devices.choose("mps")
    with pytest.raises(ValueError, match="no device 'gpu'"):
        devices.choose("gpu")


def test_auto_takes_the_gpu_and_says_how_to_compare(monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    device, why = devices.choose("auto")
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
    device, tokenizer = here(name), Tokenizer.characters()
    run = runs.create(tmp_path, "r", "x", fresh=False)
    tokens = torch.tensor([[1, i + 5, 2] for i in range(4)], device=device)
    pixels = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8, device=device)
    models = [CLIP(tiny, tokenizer).to(device) for _ in range(2)]
    optimizers = [make_optimizer(model, preset("nano")) for model in models]
    train_step(models[0], optimizers[0], pixels, tokens, clip_norm=1.0)
    checkpoint.save(run, 1, models[0], optimizers[0])
    assert checkpoint.resume(run, models[1], optimizers[1]) == 1
    losses_after = [
        train_step(m, o, pixels, tokens, clip_norm=1.0)[0].item()
        for m, o in zip(models, optimizers, strict=True)
    ]
    assert losses_after[0] == pytest.approx(losses_after[1], rel=1e-4)


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
        loss = losses.softmax_loss(model(devices.copy(pixels, where), devices.copy(tokens, where)))
        loss.backward()
        grads.append([weight.grad.cpu().clone() for weight in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
