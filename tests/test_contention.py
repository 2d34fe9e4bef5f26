"""Training beside other programs: what changes, and that no result does."""

import ctypes
import os
import platform
import struct
import sys

import pytest
import torch

from m1clip import sensors
from m1clip.config import get_preset
from m1clip.model.clip import CLIP
from m1clip.training import contention
from m1clip.training.contention import SCHED_SETATTR, SHORT_SLICE_NS, ContentionPolicy, set_time_slice
from m1clip.training.step import TrainState, train_step
from m1clip.training.timing import random_batch


@pytest.fixture
def state():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = get_preset("nano")
    yield TrainState(CLIP(config.model), config)
    torch.set_num_threads(threads)


@pytest.fixture
def policy(state, monkeypatch):
    """Checks the load at every update, and keeps what it reports."""
    monkeypatch.setattr(contention, "CHECK_S", 0.0)
    policy = ContentionPolicy(state, lambda text: policy.reports.append(text))
    policy.reports = []
    yield policy
    policy.close()


def set_load(monkeypatch, cores):
    """Other processes use so many of the cores that the threads of this one need."""
    total, threads = os.cpu_count() or 1, torch.get_num_threads()
    monkeypatch.setattr(sensors.BackgroundLoad, "share", lambda load: (cores + total - threads) / total)


def test_towers_that_run_at_once_give_the_same_bits(state):
    batch = random_batch(state.config, 32, 16)
    torch.manual_seed(0)
    other = TrainState(CLIP(state.config.model), state.config)
    other.run_towers_at_once(True)
    for _ in range(3):
        expected, stats = train_step(state, batch)[0], train_step(other, batch)[0]
        assert torch.equal(expected, stats)
    other.run_towers_at_once(False)
    assert other.text_thread is None
    assert all(torch.equal(weight, other.weights[name]) for name, weight in state.weights.items())


def test_the_policy_follows_the_load_and_reports_once(state, policy, monkeypatch):
    policy.update()
    for cores, active in ((1.0, True), (0.3, True), (0.1, False), (0.3, False), (1.0, True)):
        set_load(monkeypatch, cores)
        policy.update()
        assert policy.is_active == active
        assert (state.text_thread is not None) == active
    assert len(policy.reports) == 1
    assert "both towers run at once" in policy.reports[0]


def test_a_plan_with_two_devices_or_compiled_blocks_stays_as_it_is(state, policy, monkeypatch):
    set_load(monkeypatch, 1.0)
    for plan in ({"device": "vision=cpu,text=cpu"}, {"device": "cpu", "compile": True}):
        state.plan = type(state.plan)(**plan)
        policy.update()
        assert not policy.is_active


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SCHED_SETATTR, reason="time slices are a feature of Linux"
)
def test_the_time_slice_is_set_and_reset():
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release < (6, 12):
        pytest.skip("Linux 6.12 was the first with time slices")

    def time_slice():
        attributes = ctypes.create_string_buffer(48)
        assert ctypes.CDLL(None).syscall(SCHED_SETATTR[platform.machine()] + 1, 0, attributes, 48, 0) == 0
        return struct.unpack("IIQiIQQQ", attributes.raw)[5]

    default = time_slice()
    set_time_slice(SHORT_SLICE_NS)
    assert time_slice() == SHORT_SLICE_NS
    set_time_slice(0)
    assert time_slice() == default
