"""Which device is trusted, how a run is choice, and two towers that work at once."""

from dataclasses import replace

import pytest
import torch

from fakes import fake_gpu
from m1clip import devices, measurements
from m1clip import run as runs
from m1clip.config import TrainConfig
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.training import device_plan, parity, timing
from m1clip.training.state import LOSS_SCALE, TrainState
from m1clip.training.step import train_step
from trained import Quiet, some_batch, some_state, trained

SPLIT = Plan("vision=cpu,text=cpu")


@pytest.fixture(autouse=True)
def fresh_measurements(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def one_thread():
    yield
    torch.set_num_threads(1)


def settled(config, model=None, before=None, console=None):
    batch = some_batch(config.batch_size)
    return device_plan.settle(config, model or CLIP(config.model), batch, 10, before, console or Quiet())


@pytest.mark.parametrize("chunk", [8, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_towers_at_once_learn_what_one_after_the_other_do(tiny, chunk, optimizer):
    config = TrainConfig(model=tiny, batch=8, ema=0.9, dropout=0.1, patch_dropout=0.25, optimizer=optimizer)
    plain, split = some_state(config, chunk), some_state(config, chunk)
    split = TrainState(split.model, config, SPLIT)
    split.chunk = chunk
    for number in range(3):
        batch = some_batch(8, seed=number)
        one, other = train_step(plain, batch)[0], train_step(split, split.take(batch))[0]
        assert torch.equal(one, other)
    assert all(torch.equal(plain.weights[name], weight) for name, weight in split.weights.items())


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_towers_of_a_split_step_work_at_the_same_time(tiny):
    """Each waits for the other inside its tower: one after the other would never get past."""
    from threading import Barrier

    state = some_state(TrainConfig(model=tiny, batch=4))
    state = TrainState(state.model, state.config, SPLIT)
    meet = Barrier(2, timeout=20)
    for tower in (state.model.vision, state.model.text):
        tower.register_forward_pre_hook(lambda *_: print(meet.wait()))
        tower.register_full_backward_hook(lambda *_: print(meet.wait()))
    assert train_step(state, some_batch(4))[0].isfinite().all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_in_less_precision_is_near_that_in_full(tiny, precision):
    config = TrainConfig(model=tiny, batch=8)
    full, less = some_state(config), some_state(config)
    less = TrainState(less.model, config, Plan("cpu", precision))
    a, b = (train_step(state, some_batch(8))[0] for state in (full, less))
    assert torch.allclose(a, b, rtol=0.05, atol=0.13)  # one of eight may be matched otherwise
    assert not torch.equal(a, b)
    assert all(weight.dtype == torch.float32 for weight in less.weights.values())


def test_gradients_too_large_for_fp16_halve_the_scale_of_the_loss_and_move_nothing(tiny):
    state = some_state(TrainConfig(model=tiny, batch=4))
    state = TrainState(state.model, state.config, Plan("cpu", "fp16"))
    before = {name: weight.clone() for name, weight in state.weights.items()}
    state.loss_scale.fill_(1e9)
    train_step(state, some_batch(4))
    assert state.loss_scale == 5e8
    assert all(torch.equal(before[name], weight) for name, weight in state.weights.items())
    assert TrainState(state.model, state.config, Plan("cpu", "fp16")).loss_scale == LOSS_SCALE


@pytest.mark.parametrize(
    ("requested", "said"),
    [
        ("vision=cpu", "a placement is vision=DEVICE,text=DEVICE"),
        ("vision=cpu,txt=cpu", "a placement is vision=DEVICE,text=DEVICE"),
        ("vision=cpu,text=gpu", "no device 'gpu'"),
        ("vision=mps,text=cpu", "has no mps on this machine"),
        ("cpu:3", "no device 'cpu:3'"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(monkeypatch, requested, said):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    with pytest.raises(ValueError, match=said):
        devices.tower_devices(requested)


def test_a_device_that_computes_the_same_is_trusted(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    found = parity.check(CLIP(tiny), some_batch(8), Plan("mps"))
    assert found
    assert found.worst == 0
    assert found.compared > 100
    assert "agree with the CPU's" in str(found)


@pytest.mark.parametrize(
    ("module", "fault", "said"),
    [
        (
            "text.blocks.1.mlp.activation",
            "backward",
            "the gradient that comes back through text.blocks.1.mlp.act",
        ),
        ("vision.blocks.0.attn.qkv", "forward", "the output of vision.blocks.0.attn.qkv differs"),
        ("vision.patch", "forward", "the output of vision.patch differs"),
        ("text_projection", "backward", "text_projection"),
        ("vision.ln_post", "raises", "it failed: this operation is not there"),
    ],
)
def test_a_device_that_computes_something_else_is_caught_and_the_module_named(tiny, monkeypatch, module, fault, said):
    fake_gpu(monkeypatch, module, fault)
    found = parity.check(CLIP(tiny), some_batch(8), Plan("mps"))
    assert not found
    assert said in str(found)


def test_wrong_attention_is_blamed_on_the_attention(tiny, monkeypatch):
    """The product itself is no module: what comes wrong out of it is its parent's doing."""
    real, calls = devices.attention, []

    def wrong(q, k, v, causal):
        calls.append(causal)
        return real(q, k, v, not causal) if len(calls) == 5 else real(q, k, v, causal)

    fake_gpu(monkeypatch)
    monkeypatch.setattr(devices, "attention", wrong)  # twice 2 blocks on the CPU, then the first there
    found = parity.check(CLIP(tiny), some_batch(8), Plan("mps"))
    assert str(found).startswith("what vision.blocks.0.attn hands to vision.blocks.0.attn.out differs")


def test_nan_on_the_device_is_a_difference(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    good = parity.run(CLIP(tiny), some_batch(4), Plan())
    bad = {key: value.clone() for key, value in good.items()}
    bad["the loss", "of"] = torch.tensor(float("nan"))
    assert "the loss differs" in str(parity.compare(good, bad, Plan("mps")))


def test_a_run_on_a_wrong_device_falls_back_and_says_so(tiny_run, monkeypatch, tmp_path):
    fake_gpu(monkeypatch, "text.blocks.1.mlp.activation", "backward")
    console = Quiet()
    config = replace(tiny_run, device="mps", epochs=1)
    assert trained(config, tmp_path / "r", console=console).finished
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["device"] == "cpu"
    assert "mps is not trusted: the gradient that comes back through text.blocks.1.mlp.activation" in machine["why"]
    assert any("The CPU is used instead" in warning for warning in console.warnings)


def test_trust_device_does_not_compare(tiny_run, monkeypatch):
    fake_gpu(monkeypatch, "vision.patch", "forward")
    choice = settled(replace(tiny_run, device="mps", trust_device=True))
    assert (choice.plan.device, choice.parity) == ("mps", None)


def test_with_a_cpu_alone_nothing_is_measured(tiny_run, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    monkeypatch.setattr(timing, "time_plans", lambda *_, **__: pytest.fail("measured"))
    choice = settled(replace(tiny_run, device="auto"))
    assert choice.plan == Plan()
    assert choice.why == "no GPU that torch can use was found"


def test_with_two_devices_a_moment_of_real_steps_decides_and_is_remembered(tiny_run, monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(device_plan, "MOMENT_S", 0.05)
    choice = settled(replace(tiny_run, device="auto"))
    tried = {row["device"] for row in measurements.here().rows("step")}
    assert {"cpu", "mps", "vision=cpu,text=mps", "vision=mps,text=cpu"} <= tried
    assert choice.why.count(" ms (") >= 2
    assert "a step" in choice.why
    monkeypatch.setattr(timing, "time_plans", lambda *_, **__: pytest.fail("measured twice"))
    assert settled(replace(tiny_run, device="auto")).plan.device == choice.plan.device


def test_what_a_device_refuses_is_told_and_the_others_go_on(tiny_run, monkeypatch):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(device_plan, "MOMENT_S", 0.05)
    real = timing.warm_up

    def refuse(timing_, *rest):
        if "mps" in timing_.plan.device:
            raise RuntimeError("MPS backend out of memory")
        real(timing_, *rest)

    monkeypatch.setattr(timing, "warm_up", refuse)
    console = Quiet()
    choice = settled(replace(tiny_run, device="auto"), console=console)
    assert choice.plan.device == "cpu"
    assert "mps was not measured" in choice.why
    assert any("mps: it ran out of memory; left out" in warning for warning in console.warnings)


def test_a_resumed_run_goes_on_by_the_plan_it_had(tiny_run, tmp_path):
    config = replace(tiny_run, device=SPLIT.device, precision="bf16")
    trained(config, tmp_path / "r", stop_at=2)
    console = Quiet()
    trained(replace(config, device="auto", precision="auto"), tmp_path / "r", console=console)
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["plan"] == {"device": SPLIT.device, "precision": "bf16", "compile": False, "threads": 0}
    assert machine["why"].startswith("asked for")  # the reason is still the first one's


def test_a_device_that_is_gone_when_the_run_is_resumed_is_replaced_and_told(tiny_run, monkeypatch):
    monkeypatch.setattr(devices, "available", lambda: ["cpu"])
    choice = settled(replace(tiny_run, device="auto"), before=Plan("mps", "fp16"))
    assert choice.plan == Plan("cpu")
    assert "it was on mps, but" in choice.why


def test_another_device_does_not_inherit_the_old_ones_precision(tiny_run):
    choice = settled(replace(tiny_run, device="cpu"), before=Plan("mps", "fp16", True))
    assert choice.plan == Plan("cpu")
    assert choice.why == "as it was before, --device cpu"


@pytest.mark.parametrize(("first", "then"), [("fp16", "fp32"), ("fp32", "fp16")])
def test_the_scale_of_the_loss_belongs_to_the_precision(tiny, first, then):
    """A run in fp16 that went on in fp32 had gradients a thousand times too long."""
    config = TrainConfig(model=tiny, batch=8)
    states = [TrainState(some_state(config).model, config, Plan("cpu", one)) for one in (first, then)]
    train_step(states[0], some_batch(8))
    states[1].load(states[0].model.state_dict(), states[0].tensors())
    norms = [train_step(state, some_batch(8, seed=2))[0][3].item() for state in states]
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert states[1].loss_scale == (LOSS_SCALE if then == "fp16" else 1)


def test_an_overflow_in_fp16_is_no_skip_that_counts(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr("m1clip.training.state.LOSS_SCALE", 1e9)
    config = replace(tiny_run, precision="fp16", max_skips=0)
    assert trained(config, tmp_path / "r").finished
    events = [one for one in runs.Run(tmp_path / "r").records("event") if one["event"] == "loss scale halved"]
    assert events


def test_parity_takes_the_step_itself_with_its_noise(tiny, monkeypatch):
    """The noise of dropped tokens goes wrong on the device alone: no module shows it."""
    from m1clip.model import rng

    real, calls = rng.uniform, []

    def wrong(key_B, salt, shape):
        calls.append(salt)
        drawn = real(key_B, salt, shape)
        return drawn.flip(1) if calls.count(0) == 2 and salt == 0 else drawn

    fake_gpu(monkeypatch)
    monkeypatch.setattr(rng, "uniform", wrong)
    config = TrainConfig(model=tiny, batch=8, patch_dropout=0.5)
    found = parity.check(CLIP(tiny), some_batch(8), Plan("mps"), config)
    assert "the loss of a whole step" in str(found)


def test_a_fault_that_shows_only_with_many_rows_is_caught(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    real, passes = CLIP.embed_tokens, []

    def rolled(model, tokens_BL, key_B=None):
        passes.append(len(tokens_BL))
        made = real(model, tokens_BL, key_B)
        return made.roll(1, 0) if len(tokens_BL) > 4 and passes.count(len(tokens_BL)) == 2 else made

    monkeypatch.setattr(CLIP, "embed_tokens", rolled)
    found = parity.check(CLIP(tiny), some_batch(12), Plan("mps"))
    assert str(found).startswith("what 12 captions are embedded as differs from the CPU's")


@pytest.mark.parametrize("error", [TypeError("float64"), ValueError("x"), IndexError(), AssertionError()])
def test_whatever_the_device_raises_is_a_reason_to_leave_it(tiny_run, monkeypatch, error):
    fake_gpu(monkeypatch)
    monkeypatch.setattr(parity, "run", lambda model, batch, plan: good(plan))

    def good(plan):
        if plan.device == "mps":
            raise error
        return {("x", "gradient of"): torch.ones(1)}

    choice = settled(replace(tiny_run, device="mps"))
    assert choice.plan.device == "cpu"
    assert "it failed" in choice.why


def test_parity_leaves_the_weights_as_they_were(tiny, monkeypatch):
    fake_gpu(monkeypatch)
    model = CLIP(tiny)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert parity.check(model, some_batch(8), Plan("mps"), TrainConfig(model=tiny, optimizer="muon"))
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


def test_what_cannot_be_compiled_is_trained_without_and_said(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/bin/false",))
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    torch._dynamo.reset()
    console = Quiet()
    assert trained(replace(tiny_run, compile="on", steps=2), tmp_path / "r", console=console).finished
    machine = runs.Run(tmp_path / "r").read("machine.json")
    assert machine["plan"]["compile"] is False
    assert "; not compiled: " in machine["why"]
    assert any(warning.startswith("not compiled: ") for warning in console.warnings)


def test_steps_end_a_run_whatever_the_epochs(tiny_run, tmp_path):
    assert trained(replace(tiny_run, steps=5), tmp_path / "r").step == 5
