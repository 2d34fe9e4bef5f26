"""A budget: what is picked for it, a schedule that follows the clock, and an end that comes on time."""

import json
import time
from dataclasses import replace

import pytest

from m1clip import cli
from m1clip.config import TrainConfig, from_json
from m1clip.train import budget, pace
from m1clip.train.budget import Rung, decide
from m1clip.train.optim import rate
from m1clip.train.pace import Pace
from photos import photos

LADDER = [Rung("low", 0, {"batch": 8}), Rung("middle", 20, {"batch": 16}), Rung("high", 60, {"batch": 32})]


class Clock:
    """time.monotonic, but only we move it."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(pace.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def steps_of(clock: Clock, pace_: Pace, seconds) -> list[float]:
    """Take steps until the last; the rates they were taken at, of 1 at most."""
    config, rates, step, ended = TrainConfig(lr=1.0, warmup=0.1), [], 0, False
    while not ended:
        rates.append(rate(*pace_.place(step), config))
        clock.now += seconds(step)
        step += 1
        ended = pace_.count(step)
    return rates


@pytest.mark.parametrize("seconds", [lambda step: 0.1, lambda step: 0.05 if step < 400 else 0.4])
def test_the_rate_has_come_down_when_the_time_is_over_however_fast_the_steps_were(clock, seconds):
    rates = steps_of(clock, Pace(10**6, clock.now + 100, 100), seconds)
    assert 97 < clock.now - 1000 < 100
    assert max(rates) > 0.99
    assert rates[-1] < 0.001
    assert rates.index(max(rates)) * 3 < len(rates)


def test_time_is_kept_for_what_follows_the_last_step(clock):
    mine = Pace(10, clock.now + 100, 100)
    mine.place(0)
    for what, seconds in (("evaluating", 6.0), ("saving", 3.0)):
        with mine.aside(what):
            clock.now += seconds
    steps_of(clock, mine, lambda step: 0.5)
    assert clock.now == pytest.approx(1091, abs=0.5)


def test_what_follows_the_last_step_is_tried_at_half_time_if_it_was_not_before(clock):
    mine = Pace(10, clock.now + 100, 100)
    mine.place(0)
    clock.now += 48
    assert not mine.must_try
    clock.now += 2
    assert mine.must_try
    with mine.aside("evaluating"):
        clock.now += 1
    assert not mine.must_try


def test_the_number_of_steps_is_guessed_better_and_better(clock):
    mine = Pace(7, clock.now + 102, 100)
    mine.place(0)
    for step in range(1, 11):
        clock.now += 1
        assert not mine.count(step)
    assert mine.total == 100


def test_no_more_steps_are_taken_than_are_of_use(clock):
    rates = steps_of(clock, Pace(50, clock.now + 100, 100, at_most=50), lambda step: 0.1)
    assert len(rates) == 50
    assert rates[-1] < 0.01
    rates = steps_of(clock, Pace(50, clock.now + 2, 2, at_most=50), lambda step: 0.1)
    assert len(rates) < 21
    assert rates[-1] < 0.05


def test_without_a_budget_steps_decide():
    mine = Pace(4)
    assert [mine.place(step) for step in range(2)] == [(0, 4), (1, 4)]
    assert [mine.count(step) for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert mine.last_step() == 4


@pytest.mark.parametrize(
    ("speeds", "batch"),
    [([100.0, 10.0], 8), ([1000.0, 250.0, 20.0], 16), ([3000.0, 2000.0, 700.0], 32), ([0.1], 8)],
)
def test_the_largest_model_that_gets_its_looks_is_picked(speeds, batch):
    picked = decide(100, 900, LADDER, speeds)
    assert picked.changes["batch"] == batch
    assert f"{900:,} pictures" in picked.why


def test_a_small_set_gets_a_batch_that_fits_and_no_more_captions_than_it_has():
    for rung in (*budget.FEW_PICTURES, *budget.MANY_PICTURES):
        fitted = budget.fitted(rung, pictures=40, captions=1)
        assert fitted.changes["batch"] == 10
        assert fitted.changes["captions"] == 1
        replace(TrainConfig(), **fitted.changes)  # is a configuration


def test_rungs_want_more_looks_the_higher_they_are():
    for ladder in (budget.FEW_PICTURES, budget.MANY_PICTURES):
        assert ladder[0].looks == 0
        assert [rung.looks for rung in ladder] == sorted({rung.looks for rung in ladder})


def test_a_run_ends_on_time_with_its_schedule_complete(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(photos(tmp_path / "photos", 60)):
        (tmp_path / "photos" / name).with_suffix(".txt").write_text(f"picture {number} of {number % 7}")
    began = time.monotonic()
    words = [
        "train",
        "--data",
        "photos",
        "--budget",
        "12s",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--name",
        "it",
    ]
    assert cli.run([*words, "--json", "--crop", "0.7"]) == 0
    took = time.monotonic() - began
    assert 10.8 < took < 13.2
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["finished"]
    config = from_json(TrainConfig, tmp_path / "runs/it/config.json")
    assert config.crop == 0.7  # what is asked for is not picked
    assert config.model.text.mix == "bag"
    lines = [json.loads(line) for line in (tmp_path / "runs/it/metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "step"]
    assert rates[-1] < 0.02 * max(rates)
    assert any(line.get("event") == "recipe" and "looks" in line["reason"] for line in lines)


def test_a_budget_and_a_number_of_epochs_contradict_each_other(capsys):
    assert cli.run(["train", "--budget", "5m", "--epochs", "3"]) == 2
    assert "give one of them" in capsys.readouterr().err
