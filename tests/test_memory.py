"""How many pairs are in memory at once: counted, chosen with a reason, tried, halved when memory runs out."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch

from helpers import make_state, random_pairs
from m1clip import sensors
from m1clip.config import TrainConfig, to_json
from m1clip.devices import Plan
from m1clip.model.clip import CLIP
from m1clip.model.cost import model_cost
from m1clip.training import memory, step
from m1clip.training.step import TrainState


@pytest.fixture
def state(tiny_run):
    return make_state(replace(tiny_run, batch_size=64))


@pytest.fixture
def wide_run(tiny_run):
    """A model whose activations are large enough to be seen in the memory of the process."""
    return replace(tiny_run, model=replace(tiny_run.model, vision=replace(tiny_run.model.vision, width=256, layers=4)))


def test_activation_bytes_are_those_of_the_cost_model(state, tiny):
    expected = model_cost(tiny, tokens=8).activation_mb
    assert memory.activation_bytes(state, random_pairs(64)) / 1e6 == pytest.approx(expected, rel=0.1)


def test_grad_checkpointing_saves_most_activations(state):
    without = memory.activation_bytes(state, random_pairs(64))
    state.model.set_regularization(TrainConfig(grad_checkpointing=True))
    assert memory.activation_bytes(state, random_pairs(64)) < 0.4 * without


def test_a_batch_that_fits_is_not_split(state):
    chunk, reason = memory.choose_chunk(state, random_pairs(64), 10_000)
    assert chunk == 64
    assert reason.startswith("no chunks needed: 0.0 MB of activations per pair, ")


@pytest.mark.parametrize(("requested", "chunk"), [(7, 7), (1000, 64)])
def test_a_requested_chunk_is_used_up_to_the_batch_size(state, requested, chunk):
    state.config = replace(state.config, chunk=requested)
    assert memory.choose_chunk(state, random_pairs(64), 10**12) == (chunk, f"--chunk {requested}")


@pytest.mark.parametrize(("pair_mb", "expected"), [(2, 16), (4, 8), (10, 4), (30, 1)])
def test_the_largest_chunk_that_fits_is_found_by_a_trial(state, monkeypatch, pair_mb, expected):
    """Usable are 0.7 of 60 MB. 3 MB of activations per pair suggest a trial of 8 pairs, which take `pair_mb` each."""
    tried = []
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.06)
    monkeypatch.setattr(memory, "try_chunk", lambda state, batch, chunk: tried.append(chunk) or chunk * pair_mb / 1e3)
    chunk, reason = memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)
    assert (tried, chunk) == ([8], expected)
    assert reason == f"3.0 MB of activations per pair, 0.1 GB free; a trial took {pair_mb}.0 MB per pair"


def test_a_trial_out_of_memory_is_halved_and_one_that_measures_nothing_is_not_believed(state, monkeypatch):
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.06)
    monkeypatch.setattr(memory, "try_chunk", lambda state, batch, chunk: None if chunk > 2 else 0.0)
    assert memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)[0] == 4


@pytest.mark.parametrize(("free", "message"), [(0.01, "not even one pair fits"), (0.0, "gradients need")])
def test_too_little_memory_is_an_error(state, monkeypatch, free, message):
    monkeypatch.setattr(memory, "try_chunk", lambda *arguments: None)
    monkeypatch.setattr(memory, "free_gb", lambda device: free)
    with pytest.raises(MemoryError, match=message):
        memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)


def test_a_real_trial_decides_when_memory_is_short(wide_run, monkeypatch):
    state, batch = make_state(replace(wide_run, batch_size=1024)), random_pairs(1024)
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.2)
    chunk, reason = memory.choose_chunk(state, batch, memory.activation_bytes(state, batch))
    assert chunk in (128, 256, 512)
    assert "a trial took" in reason


def test_a_trial_measures_real_memory_and_leaves_no_gradients(wide_run):
    state, batch = make_state(replace(wide_run, batch_size=512)), random_pairs(512)
    expected = 512 * memory.activation_bytes(state, batch) / 1e9
    memory.release_memory(state)  # memory that earlier tests have freed would be reused, and no growth seen
    assert 0.7 * expected < memory.try_chunk(state, batch, 512) < 3 * expected
    assert all(weight.grad is None for weight in state.weights.values())


def fail_above(chunk: int, embed):
    """An encoder that runs out of memory with more than `chunk` pairs."""

    def limited(model, batch, precision):
        if len(batch) > chunk:
            raise torch.OutOfMemoryError("out of memory")
        return embed(model, batch, precision)

    return limited


def test_a_step_out_of_memory_is_repeated_in_smaller_chunks_with_the_same_update(tiny_run, monkeypatch):
    expected, state = make_state(tiny_run), make_state(tiny_run)
    memory.train_step(expected, random_pairs(16))
    monkeypatch.setattr(step, "embed_texts", fail_above(4, step.embed_texts))
    chunks = []
    stats, _, _ = memory.step_with_retry(state, random_pairs(16), lambda phase: None, chunks.append)
    assert chunks == [8, 4]
    assert state.chunk == 4
    assert stats.isfinite().all()
    for name, weight in state.weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=0, atol=1e-4)


def test_an_fp16_step_can_be_repeated_after_its_gradients_were_unscaled(tiny_run, monkeypatch):
    torch.manual_seed(0)
    state, clip = TrainState(CLIP(tiny_run.model), tiny_run, Plan("cpu", "fp16")), torch.nn.utils.clip_grad_norm_
    failures = iter([torch.OutOfMemoryError("out of memory")])

    def clip_grad_norm(*arguments):
        for error in failures:
            raise error
        return clip(*arguments)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_grad_norm)
    chunks = []
    stats, _, _ = memory.step_with_retry(state, random_pairs(16), lambda phase: None, chunks.append)
    assert chunks == [8]
    assert stats.isfinite().all()


def test_any_other_error_is_not_retried(state, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(memory, "train_step", fail)
    with pytest.raises(RuntimeError, match="shapes"):
        memory.step_with_retry(state, random_pairs(64), lambda phase: None, pytest.fail)


def test_out_of_memory_in_the_optimizer_does_not_repeat_the_step(state, monkeypatch):
    def update(nonfinite):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(state, "update", update)
    with pytest.raises(torch.OutOfMemoryError):
        memory.step_with_retry(state, random_pairs(64), lambda phase: None, pytest.fail)


def test_memory_by_part_counts_every_tensor(wide_run):
    state, batch = make_state(replace(wide_run, batch_size=64, ema=0.9)), random_pairs(64)
    state.chunk = 16
    memory.train_step(state, batch)
    parts = memory.memory_by_part(state, batch, 1_000_000, sensors.memory_use())
    parameters = 4 * sum(weight.numel() for weight in state.model.parameters()) / 1e9
    assert parts["parameters"] == parts["gradients"] == parts["ema"] == pytest.approx(parameters)
    assert parts["optimizer"] == pytest.approx(2 * parameters, rel=1e-3)
    assert parts["activations"] == pytest.approx(0.016)
    assert parts["batch"] == pytest.approx(64 * (32 * 32 * 3 + 8 * 8 + 8) / 1e9)


def test_memory_by_part_adds_up_to_the_memory_of_the_process(wide_run, tmp_path):
    config = replace(wide_run, batch_size=32, log_every=1, steps=5, threads=1)
    (tmp_path / "config.json").write_text(to_json(config))
    command = [sys.executable, "-m", "m1clip", "train", "--config", "config.json", "--name", "r"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=600, capture_output=True, env=os.environ)
    records = map(json.loads, (tmp_path / "runs/r/metrics.jsonl").read_text().splitlines())
    (record,) = (record for record in records if record["kind"] == "diagnostics")
    parts = record["memory_gb"]
    assert sum(parts.values()) == pytest.approx(record["rss_gb"], rel=0.03)
    assert parts["libraries"] > 0.1
    assert parts["libraries"] < record["rss_gb"]
    assert parts["allocator"] < 0.5 * record["rss_gb"]
    if psutil.LINUX:
        assert parts["data"] > 0
