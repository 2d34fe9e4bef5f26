"""Which plan a run gets, whether its devices are checked, and towers that run in parallel."""

import os
from dataclasses import fields, replace
from threading import Barrier

import pytest
import torch

from fakes import fake_gpu
from helpers import QuietConsole, make_state, random_pairs, train_run
from m1clip import devices, parity
from m1clip import run as runs
from m1clip.config import TrainConfig
from m1clip.devices import Plan
from m1clip.model import rng
from m1clip.model.clip import CLIP
from m1clip.training import device_check, device_plan, timing
from m1clip.training.device_plan import open_store
from m1clip.training.step import LOSS_SCALE, TrainState, train_step

SPLIT = Plan("vision=cpu,text=cpu")


@pytest.fixture(autouse=True)
def own_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("M1CLIP_SKIP_PARITY", raising=False)
    yield
    torch.set_num_threads(1)


def choose(config, model=None, resumed_plan=None, console=None):
    model, batch = model or CLIP(config.model), random_pairs(config.batch_size)
    return device_plan.choose_plan(config, model, batch, 10, resumed_plan, console or QuietConsole())


# Two towers.


@pytest.mark.parametrize("chunk", [8, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_parallel_towers_train_bit_identically(tiny, chunk, optimizer):
    config = TrainConfig(model=tiny, batch_size=8, ema=0.9, patch_dropout=0.25, optimizer=optimizer)
    plain, split = make_state(config, chunk), make_state(config, chunk)
    split = TrainState(split.model, config, SPLIT)
    split.chunk = chunk
    for number in range(3):
        batch = random_pairs(8, seed=number)
        assert torch.equal(train_step(plain, batch)[0], train_step(split, split.to_device(batch))[0])
    assert all(torch.equal(plain.weights[name], weight) for name, weight in split.weights.items())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_towers_of_a_split_plan_run_in_parallel(tiny):
    """Each waits inside its tower for the other: one after the other would never finish."""
    state = make_state(TrainConfig(model=tiny, batch_size=4))
    state = TrainState(state.model, state.config, SPLIT)
    barrier = Barrier(2, timeout=120)
    for tower in (state.model.vision, state.model.text):
        tower.register_forward_pre_hook(lambda *_: print(barrier.wait()))
        tower.register_full_backward_hook(lambda *_: print(barrier.wait()))
    assert train_step(state, random_pairs(4))[0].isfinite().all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_lower_precision_is_close_to_fp32(tiny, precision):
    config = TrainConfig(model=tiny, batch_size=8)
    full, low = make_state(config), make_state(config)
    low = TrainState(low.model, config, Plan("cpu", precision))
    a, b = (train_step(state, random_pairs(8))[0] for state in (full, low))
    assert torch.allclose(a, b, rtol=0.05, atol=0.13)  # one of eight may be matched differently
    assert not torch.equal(a, b)
    assert all(weight.dtype == torch.float32 for weight in low.weights.values())


def test_an_overflow_in_fp16_halves_the_loss_scale_and_skips_the_update(tiny):
    state = make_state(TrainConfig(model=tiny, batch_size=4))
    state = TrainState(state.model, state.config, Plan("cpu", "fp16"))
    before = {name: weight.clone() for name, weight in state.weights.items()}
    state.scaler = torch.amp.GradScaler("cpu", init_scale=1e9)
    train_step(state, random_pairs(4))
    assert state.scaler.get_scale() == 5e8
    assert all(torch.equal(before[name], weight) for name, weight in state.weights.items())
    assert TrainState(state.model, state.config, Plan("cpu", "fp16")).scaler.get_scale() == LOSS_SCALE


@pytest.mark.parametrize(("first", "then"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_a_run_can_be_resumed_in_another_precision(tiny, first, then):
    """An fp16 run resumed in fp32 once kept its loss scale, and had gradients a thousand times too large."""
    config = TrainConfig(model=tiny, batch_size=8)
    states = [TrainState(make_state(config).model, config, Plan("cpu", one)) for one in (first, then)]
    train_step(states[0], random_pairs(8))
    states[1].load(states[0].model.state_dict(), states[0].tensors())
    norms = [train_step(state, random_pairs(8, seed=2))[0][3].item() for state in states]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert states[1].scaler.get_scale() == (LOSS_SCALE if then == "fp16" else 1)


def test_an_fp16_overflow_is_logged_and_does_not_end_the_run(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("m1clip.training.step.LOSS_SCALE", 1e9)
    assert train_run(replace(tiny_run, precision="fp16"), tmp_path / "r").finished
    events = [record["event"] for record in runs.Run(tmp_path / "r").records("event")]
    assert "loss scale halved" in events


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ("vision=cpu", "a placement is vision=DEVICE,text=DEVICE"),
        ("vision=cpu,txt=cpu", "a placement is vision=DEVICE,text=DEVICE"),
        ("vision=cpu,text=gpu", "no device 'gpu'"),
        ("vision=mps,text=cpu", "finds no mps on this machine, only cpu"),
        ("cpu:3", "no device 'cpu:3'"),
    ],
)
def test_an_impossible_device_is_an_error(monkeypatch, requested, message):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    with pytest.raises(ValueError, match=message):
        devices.tower_devices(requested)


# Parity.


def test_a_device_that_computes_the_same_matches(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    result = device_check.compare_with_cpu(CLIP(tiny), random_pairs(8), Plan("mps"))
    assert (result.mismatch, result.worst) == (None, 0)
    assert result.tensors > 100
    assert str(result).startswith(f"{result.tensors} tensors match the CPU: outputs within 0.002")


@pytest.mark.parametrize(
    ("module", "fault", "message"),
    [
        ("text.blocks.1.mlp.activation", "backward", "the input gradient of text.blocks.1.mlp.activation differs"),
        ("vision.blocks.0.attn.qkv", "forward", "the output of vision.blocks.0.attn.qkv differs"),
        ("vision.patch", "forward", "the output of vision.patch differs"),
        ("text_projection", "backward", "the input gradient of text_projection differs"),
        ("vision.ln_post", "raises", "it failed: this operation is not there"),
    ],
)
def test_a_device_that_computes_something_else_is_caught_with_the_module(tiny, monkeypatch, module, fault, message):
    fake_gpu(monkeypatch, module, fault)
    result = device_check.compare_with_cpu(CLIP(tiny), random_pairs(8), Plan("mps"))
    assert result.mismatch
    assert str(result).startswith(message)


def test_wrong_attention_is_blamed_on_the_attention(tiny, monkeypatch):
    """Attention itself is not a module: its wrong result shows as an input."""
    real, calls, wrong_call = devices.attention, [], 0

    def attention(q, k, v, causal):
        calls.append(causal)
        return real(q, k, v, causal != (len(calls) == wrong_call))

    fake_gpu(monkeypatch)
    monkeypatch.setattr(devices, "attention", attention)
    assert device_check.compare_with_cpu(CLIP(tiny), random_pairs(8), Plan("mps")).mismatch is None
    wrong_call = len(calls) + len(calls) // 2 + 1  # the next time, the first call on mps
    result = device_check.compare_with_cpu(CLIP(tiny), random_pairs(8), Plan("mps"))
    expected = "the input of vision.blocks.0.attn.out (computed in vision.blocks.0.attn) differs"
    assert str(result).startswith(expected)


def test_nan_is_a_mismatch():
    good = {"the loss": torch.ones(()), "the gradient of w": torch.ones(3)}
    bad = {**good, "the loss": torch.tensor(float("nan"))}
    assert parity.compare_recordings(good, good, "fp32").mismatch is None
    assert parity.compare_recordings(good, bad, "fp32").mismatch.startswith("the loss differs")
    assert parity.compare_recordings(good, {"the loss": torch.ones(())}, "fp32").mismatch


def test_the_dropout_of_the_training_step_is_compared_too(tiny, monkeypatch):
    """Only the random numbers of patch dropout are wrong on the device: no module shows it."""
    real, calls = rng.uniform, []

    def wrong(key_B, salt, shape):
        calls.append(salt)
        drawn = real(key_B, salt, shape)
        return drawn.flip(1) if calls.count(0) == 2 and salt == 0 else drawn

    fake_gpu(monkeypatch)
    monkeypatch.setattr(rng, "uniform", wrong)
    config = TrainConfig(model=tiny, batch_size=8, patch_dropout=0.5)
    result = device_check.compare_with_cpu(CLIP(tiny), random_pairs(8), Plan("mps"), config)
    assert str(result).startswith("the loss of a training step differs")


def test_a_fault_that_only_shows_with_many_rows_is_caught(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    real, passes = CLIP.embed_tokens, []

    def rolled(model, tokens_BL, key_B=None):
        passes.append(len(tokens_BL))
        text_BE = real(model, tokens_BL, key_B)
        return text_BE.roll(1, 0) if len(tokens_BL) > 4 and passes.count(len(tokens_BL)) == 2 else text_BE

    monkeypatch.setattr(CLIP, "embed_tokens", rolled)
    result = device_check.compare_with_cpu(CLIP(tiny), random_pairs(12), Plan("mps"))
    assert str(result).startswith("the embedding of 12 captions differs from the CPU's")


def test_parity_leaves_the_weights_unchanged(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    model, config = CLIP(tiny), TrainConfig(model=tiny, optimizer="muon")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert device_check.compare_with_cpu(model, random_pairs(8), Plan("mps"), config).mismatch is None
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.parametrize("error", [TypeError("float64"), ValueError("x"), IndexError(), AssertionError()])
def test_any_error_on_the_device_rejects_it(tiny_run, monkeypatch, error):
    fake_gpu(monkeypatch)

    def run(model, loss):
        if calls.append(1) or len(calls) == 2:
            raise error
        return {"the gradient of w": torch.ones(1)}

    calls = []
    monkeypatch.setattr(device_check, "record", run)
    choice = choose(replace(tiny_run, device="mps"))
    assert choice.plan.device == "cpu"
    assert choice.reason.startswith("mps is not used, because it failed: ")


def test_a_run_on_a_wrong_device_falls_back_to_the_cpu(tiny_run, monkeypatch, tmp_path):
    fake_gpu(monkeypatch, "text.blocks.1.mlp.activation", "backward")
    console = QuietConsole()
    assert train_run(replace(tiny_run, device="mps", epochs=1), tmp_path / "r", console=console).finished
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["device"] == "cpu"
    assert machine["why"].startswith("mps is not used, because the input gradient of text.blocks.1.mlp.activation")
    warning = next(text for text in console.warnings if "The CPU is used instead" in text)
    assert "M1CLIP_SKIP_PARITY=1" in warning


def test_the_parity_check_can_be_skipped(tiny_run, monkeypatch):
    fake_gpu(monkeypatch, "vision.patch", "forward")
    monkeypatch.setenv("M1CLIP_SKIP_PARITY", "1")
    choice = choose(replace(tiny_run, device="mps"))
    assert (choice.plan.device, choice.parity) == ("mps", None)


# The choice.


def test_with_a_cpu_alone_nothing_is_timed(tiny_run, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    monkeypatch.setattr(timing, "time_plans", lambda *_, **__: pytest.fail("timed"))
    choice = choose(replace(tiny_run, device="auto"))
    assert (choice.plan, choice.reason) == (Plan(), "PyTorch finds no GPU")
    choice = choose(replace(tiny_run, device="auto", precision="bf16", threads=3))
    assert choice.plan == Plan("cpu", "bf16", threads=3)
    assert choice.reason == "PyTorch finds no GPU; requested with --precision bf16 --threads 3"


def test_with_two_devices_a_trial_of_real_steps_decides_and_is_stored(tiny_run, monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(timing, "PLAN_TRIAL_S", 0.05)
    choice = choose(replace(tiny_run, device="auto"))
    timed = {row.device for row in open_store().steps()}
    assert {"cpu", "mps", "vision=cpu,text=mps", "vision=mps,text=cpu"} <= timed
    assert choice.reason
    monkeypatch.setattr(timing, "time_plans", lambda *_, **__: pytest.fail("timed again"))
    assert choose(replace(tiny_run, device="auto")).plan.device == choice.plan.device


def test_a_device_that_fails_in_the_trial_is_reported_and_the_others_go_on(tiny_run, monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(timing, "PLAN_TRIAL_S", 0.05)
    real = timing.warm_up

    def fail(plan_timing, *rest):
        if "mps" in plan_timing.plan.device:
            raise RuntimeError("MPS backend out of memory")
        real(plan_timing, *rest)

    monkeypatch.setattr(timing, "warm_up", fail)
    console = QuietConsole()
    choice = choose(replace(tiny_run, device="auto"), console=console)
    assert choice.plan.device == "cpu"
    assert "mps: not measured" in choice.reason
    assert "mps: out of memory; not used" in console.warnings


def test_a_resumed_run_keeps_its_plan(tiny_run, tmp_path):
    config = replace(tiny_run, device=SPLIT.device, precision="bf16")
    train_run(config, tmp_path / "r", stop_at=2)
    train_run(replace(config, device="auto", precision="auto"), tmp_path / "r")
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["plan"] == {"device": SPLIT.device, "precision": "bf16", "compile": False, "threads": 0}
    assert machine["why"].startswith("requested with")  # the reason of the first start


def test_a_resumed_run_whose_device_is_gone_gets_another_one(tiny_run, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    choice = choose(replace(tiny_run, device="auto"), resumed_plan=Plan("mps", "fp16"))
    assert choice.plan == Plan("cpu")
    assert choice.reason.startswith("the resumed run was on mps, but PyTorch")


def test_another_device_does_not_inherit_precision_and_compile_of_the_old_one(tiny_run):
    choice = choose(replace(tiny_run, device="cpu"), resumed_plan=Plan("mps", "fp16", True))
    assert (choice.plan, choice.reason) == (Plan("cpu"), "as in the resumed run, --device cpu")


def test_a_model_that_cannot_be_compiled_is_trained_uncompiled(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/bin/false",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    torch._dynamo.reset()
    console = QuietConsole()
    assert train_run(replace(tiny_run, compile="on", steps=2), tmp_path / "r", console=console).finished
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["plan"]["compile"] is False
    assert "; not compiled: " in machine["why"]
    assert any(warning.startswith("not compiled: ") for warning in console.warnings)


def test_steps_end_a_run_whatever_the_epochs(tiny_run, tmp_path):
    assert train_run(replace(tiny_run, steps=5), tmp_path / "r").step == 5


@pytest.mark.parametrize(
    "line", ["[" * 200_000, "{}", '{"kind": "step", "samples_ms": "x"}', "\0", "3", '{"kind": "cost"}']
)
def test_a_bad_line_among_the_measurements_is_skipped(tmp_path, line):
    store = device_plan.MeasurementStore(tmp_path)
    store.add("cost", parameters=1, gflop=0.5, activation_gb=0.1)
    with open(store.path, "a") as file:
        file.write("\n" + line)
    store.add("cost", parameters=2, gflop=0.5, activation_gb=0.1)
    assert [row["parameters"] for row in store.rows("cost")] == [1, 2]
    assert store.steps() == []
    store.path.unlink()
    os.mkfifo(store.path)
    assert store.rows("cost") == []
    store.add("cost", parameters=3, gflop=0.5, activation_gb=0.1)
    assert [row["parameters"] for row in store.rows("cost")] == [3]


def test_a_stored_step_with_wrong_values_is_left_out(tmp_path):
    store = device_plan.MeasurementStore(tmp_path)
    good = {field.name: 1 for field in fields(device_plan.StepRow)} | {"samples_ms": [1.0], "phases_ms": {}}
    good |= dict.fromkeys(("model_id", "preset", "session", "comparison", "device", "precision"), "x") | {
        "compile": False
    }
    for changed in ({}, {"step_ms": "x"}, {"step_ms": -1}, {"samples_ms": []}, {"samples_ms": {}}, {"tokens": None}):
        store.add("step", **{**good, **changed})
    assert len(store.steps()) == 1
