"""How much of a batch is held at once: counted, chosen with a reason, tried for real."""

from dataclasses import replace

import pytest
import torch

from m1clip.model.cost import cost
from m1clip.train import memory
from trained import some_batch, some_learner


@pytest.fixture
def learner(tiny_run):
    return some_learner(replace(tiny_run, batch=64))


def test_what_is_kept_of_a_pair_is_what_the_cost_model_counts(learner, tiny):
    counted = cost(replace(tiny, text=replace(tiny.text, length=8))).activation_mb  # captions of 8 tokens
    assert memory.kept_bytes(learner, some_batch(64)) / 1e6 == pytest.approx(counted, rel=0.1)


def test_recomputing_keeps_far_less(learner):
    before = memory.kept_bytes(learner, some_batch(64))
    learner.model.practise(0.0, 0.0, recompute=True)
    assert memory.kept_bytes(learner, some_batch(64)) < 0.4 * before


def test_a_batch_that_fits_is_not_divided(learner):
    chunk, why = memory.choose_chunk(learner, some_batch(64), 10_000)
    assert chunk == 64
    assert "the whole batch" in why
    assert "GB free" in why


def test_a_wish_is_taken_at_its_word(learner):
    learner.config = replace(learner.config, chunk=7)
    assert memory.choose_chunk(learner, some_batch(64), 10**12) == (7, "asked for with --chunk 7")


@pytest.mark.parametrize(("one", "fits"), [(0.001, 32), (0.01, 4), (0.04, 1)])
def test_the_largest_chunk_that_fits_is_found_by_trying(learner, monkeypatch, one, fits):
    """Room is 0.7 of 0.06 GB; a trial takes `one` GB a pair, whatever was estimated."""
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.06)
    monkeypatch.setattr(memory, "state_gb", lambda learner: 0.0)
    tried = []

    def trial(learner, batch, chunk):
        tried.append(chunk)
        return None if chunk * one > 0.2 else chunk * one

    monkeypatch.setattr(memory, "trial", trial)
    chunk, why = memory.choose_chunk(learner, some_batch(64), pair_bytes=3_000_000)
    assert chunk == fits
    assert f"{fits} pairs at once took {fits * one:.2f} GB" in why
    assert tried[0] == 8  # 0.042 / (1.5 * 0.003), down to a power of two


def test_where_not_even_one_pair_fits_it_is_said(learner, monkeypatch):
    monkeypatch.setattr(memory, "free_gb", lambda device: 0.001)
    monkeypatch.setattr(memory, "trial", lambda *a: None)
    with pytest.raises(MemoryError, match="not even one pair fits"):
        memory.choose_chunk(learner, some_batch(64), pair_bytes=3_000_000)


def test_a_trial_measures_real_memory_and_leaves_no_gradients(tiny_run):
    wide = replace(tiny_run.model, vision=replace(tiny_run.model.vision, width=256, depth=4))
    learner = some_learner(replace(tiny_run, model=wide, batch=512))
    expected = 512 * memory.kept_bytes(learner, some_batch(512)) / 1e9
    took = memory.trial(learner, some_batch(512), 512)
    assert 0.7 * expected < took < 3 * expected
    assert all(weight.grad is None for weight in learner.weights.values())


def test_a_step_that_fails_otherwise_is_not_taken_for_want_of_memory(learner, monkeypatch):
    def wrong(*a):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(memory, "train_step", wrong)
    with pytest.raises(RuntimeError, match="shapes"):
        memory.careful_step(learner, some_batch(64), lambda phase: None, lambda chunk: None)


def test_memory_that_runs_out_in_the_optimiser_is_no_reason_to_repeat_the_step(learner, monkeypatch):
    def update(bad):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(learner, "update", update)
    with pytest.raises(torch.OutOfMemoryError):
        memory.careful_step(learner, some_batch(64), lambda phase: None, lambda chunk: None)
