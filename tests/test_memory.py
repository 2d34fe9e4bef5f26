"""How much of a batch is held at once: counted, chosen with a reason, tried for real."""

from dataclasses import replace

import pytest
import torch

from m1clip.model.cost import cost
from m1clip.training import memory
from helpers import random_pairs, make_state


@pytest.fixture
def state(tiny_run):
    return make_state(replace(tiny_run, batch_size=64))


def test_what_is_kept_of_a_pair_is_what_the_cost_model_counts(state, tiny):
    counted = cost(replace(tiny, text=replace(tiny.text, length=8))).activation_mb  # captions of 8 tokens
    assert memory.activation_bytes(state, random_pairs(64)) / 1e6 == pytest.approx(counted, rel=0.1)


def test_recomputing_keeps_far_less(state):
    before = memory.activation_bytes(state, random_pairs(64))
    state.model.set_regularization(grad_checkpointing=True)
    assert memory.activation_bytes(state, random_pairs(64)) < 0.4 * before


def test_a_batch_that_fits_is_not_divided(state):
    chunk, why = memory.choose_chunk(state, random_pairs(64), 10_000)
    assert chunk == 64
    assert "the whole batch" in why
    assert "GB free" in why


def test_a_wish_is_taken_at_its_word(state):
    state.config = replace(state.config, chunk=7)
    assert memory.choose_chunk(state, random_pairs(64), 10**12) == (7, "asked for with --chunk 7")


@pytest.mark.parametrize(("one_mb", "fits"), [(2, 16), (4, 8), (10, 4), (30, 1)])
def test_the_largest_chunk_that_fits_is_found_by_trying(state, monkeypatch, one_mb, fits):
    """Room is 0.7 of 60 MB, and 3 MB are kept a pair, so 8 are tried; a pair really takes `one_mb`."""
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.06)
    monkeypatch.setattr(memory, "gradients_gb", lambda state: 0.0)
    monkeypatch.setattr(memory, "trial", lambda state, batch, chunk: chunk * one_mb / 1e3)
    chunk, why = memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)
    assert chunk == fits
    assert f"3.0 MB kept a pair, 0.1 GB free; tried, a pair took {one_mb}.0 MB" in why


def test_a_trial_that_runs_out_is_halved_and_one_that_sees_nothing_is_not_believed(state, monkeypatch):
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.06)
    monkeypatch.setattr(memory, "gradients_gb", lambda state: 0.0)
    monkeypatch.setattr(memory, "trial", lambda state, batch, chunk: None if chunk > 2 else 0.0)
    assert memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)[0] == 4


def test_where_not_even_one_pair_fits_it_is_said(state, monkeypatch):
    monkeypatch.setattr(memory, "trial", lambda *a: None)
    for free, words in ((0.01, "not even one pair fits"), (0.0, "gradients need")):
        monkeypatch.setattr(memory, "free_gb", lambda device, free=free: free)
        with pytest.raises(MemoryError, match=words):
            memory.choose_chunk(state, random_pairs(64), pair_bytes=3_000_000)


def test_a_real_trial_decides_where_memory_is_short(tiny_run, monkeypatch):
    wide = replace(tiny_run.model, vision=replace(tiny_run.model.vision, width=256, depth=4))
    state = make_state(replace(tiny_run, model=wide, batch_size=1024))
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.2)
    batch = random_pairs(1024)
    chunk, why = memory.choose_chunk(state, batch, memory.activation_bytes(state, batch))
    assert chunk in (128, 256, 512)
    assert "tried" in why


def test_a_trial_measures_real_memory_and_leaves_no_gradients(tiny_run):
    wide = replace(tiny_run.model, vision=replace(tiny_run.model.vision, width=256, depth=4))
    state = make_state(replace(tiny_run, model=wide, batch_size=512))
    expected = 512 * memory.activation_bytes(state, random_pairs(512)) / 1e9
    took = memory.try_chunk(state, random_pairs(512), 512)
    assert 0.7 * expected < took < 3 * expected
    assert all(weight.grad is None for weight in state.weights.values())


def test_a_step_that_fails_otherwise_is_not_taken_for_want_of_memory(state, monkeypatch):
    def wrong(*a):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(memory, "train_step", wrong)
    with pytest.raises(RuntimeError, match="shapes"):
        memory.step_with_retry(state, random_pairs(64), lambda phase: None, lambda chunk: None)


def test_memory_that_runs_out_in_the_optimizer_is_no_reason_to_repeat_the_step(state, monkeypatch):
    def update(bad):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(state, "update", update)
    with pytest.raises(torch.OutOfMemoryError):
        memory.step_with_retry(state, random_pairs(64), lambda phase: None, lambda chunk: None)
