"""A budget: what is picked for it, a schedule that follows the clock, and an end that comes on time."""

import json
import time
from dataclasses import replace

import pytest
import torch

from helpers import QuietConsole, train_run
from m1clip import cli
from m1clip import run as runs
from m1clip.config import TrainConfig, from_json
from m1clip.data.sources import open_sources
from m1clip.model.clip import load
from m1clip.model.towers import Vision
from m1clip.training import autoconfig, loop, schedule, timing
from m1clip.training.autoconfig import Candidate, Time, TokenizedCaptions, decide
from m1clip.training.optim import learning_rate
from m1clip.training.schedule import Schedule
from photos import photos

CARE = ((0, {"crop": 0.9}), (20, {"crop": 0.5}))
LADDER = [
    Candidate("low", 0, {"batch": 8}, CARE),
    Candidate("middle", 18_000, {"batch": 16}, CARE),
    Candidate("high", 54_000, {"batch": 32}),
]


class Clock:
    """time.monotonic, but only we move it."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(schedule.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def steps_of(clock: Clock, pace_: Schedule, seconds) -> list[float]:
    """Take steps until the last; the rates they were taken at, of 1 at most."""
    config, rates, step, ended = TrainConfig(lr=1.0, warmup=0.1), [], 0, False
    while not ended:
        rates.append(learning_rate(*pace_.place(step), config))
        clock.now += seconds(step)
        step += 1
        ended = pace_.count(step)
    return rates


@pytest.mark.parametrize("seconds", [lambda step: 0.1, lambda step: 0.05 if step < 400 else 0.4])
def test_the_rate_has_come_down_when_the_time_is_over_however_fast_the_steps_were(clock, seconds):
    rates = steps_of(clock, Schedule(10**6, clock.now + 100, 100), seconds)
    assert 96 < clock.now - 1000 < 99
    assert max(rates) > 0.99
    assert rates[-1] < 0.001
    assert rates.index(max(rates)) * 3 < len(rates)


def test_time_is_kept_for_what_follows_the_last_step(clock):
    mine = Schedule(10, clock.now + 100, 100)
    mine.place(0)
    for what, seconds in (("evaluating", 6.0), ("saving", 3.0)):
        with mine.aside(what):
            clock.now += seconds
    steps_of(clock, mine, lambda step: 0.5)
    assert clock.now == pytest.approx(1090, abs=0.5)


def test_what_follows_the_last_step_is_tried_at_half_time_if_it_was_not_before(clock):
    mine = Schedule(10, clock.now + 100, 100)
    mine.place(0)
    clock.now += 48
    assert not mine.must_try
    clock.now += 2
    assert mine.must_try
    with mine.aside("evaluating"):
        clock.now += 1
    assert not mine.must_try


def test_the_number_of_steps_is_guessed_better_and_better(clock):
    mine = Schedule(7, clock.now + 103, 100)
    mine.place(0)
    for step in range(1, 11):
        clock.now += 1
        assert not mine.count(step)
    assert mine.total == 100


def test_no_more_steps_are_taken_than_are_of_use(clock):
    rates = steps_of(clock, Schedule(50, clock.now + 100, 100, at_most=50), lambda step: 0.1)
    assert len(rates) == 50
    assert rates[-1] < 0.01
    rates = steps_of(clock, Schedule(50, clock.now + 2, 2, at_most=50), lambda step: 0.1)
    assert len(rates) < 21
    assert rates[-1] < 0.05


def test_without_a_budget_steps_decide():
    mine = Schedule(4)
    assert [mine.place(step) for step in range(2)] == [(0, 4), (1, 4)]
    assert [mine.count(step) for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert mine.last_step() == 4


@pytest.mark.parametrize(
    ("speeds", "batch"), [([100.0, 10.0], 8), ([1000.0, 250.0, 20.0], 16), ([3000.0, 2000.0, 700.0], 32), ([0.1], 8)]
)
def test_the_largest_model_that_gets_to_see_its_pairs_is_picked(speeds, batch):
    picked = decide(Time(100, 900, 0.0), LADDER, speeds)
    assert picked.changes["batch"] == batch
    assert f"{900:,} images" in picked.why


@pytest.mark.parametrize(("images", "crop"), [(900, 0.5), (4_500, 0.5), (4_600, 0.9), (10**6, 0.9)])
def test_what_is_looked_at_often_is_kept_from_being_learned_by_heart(images, crop):
    picked = decide(Time(100, images, 0.0), LADDER, [2000.0, 1000.0])  # 90,000 pairs
    assert picked.changes["batch"] == 16
    assert picked.changes["crop"] == crop
    assert "e+" not in picked.why


def test_many_images_of_which_few_are_seen_get_the_small_model_too():
    """Two minutes of a laptop are the same number of pairs, however many more there are."""
    ladder = [*autoconfig.BAGS, *autoconfig.READERS]
    few, many = (decide(Time(120, n, n / 700), ladder, [400.0, 250.0]) for n in (6_000, 10**6))
    assert few.changes["model"] == many.changes["model"] == autoconfig.BAGS[0].changes["model"]
    assert "cache_gb" not in few.changes
    assert many.changes["cache_gb"] == 0  # to decode a million would take all the time
    assert "decode" in many.why


def test_decoding_takes_time_from_the_steps():
    assert Time(100, 1000, 0.0).pairs(10.0) == pytest.approx(900)
    assert Time(100, 1000, 10.0).pairs(10.0) == pytest.approx(800)
    assert Time(100, 1000, 50.0).pairs(10.0) == pytest.approx(90 / 0.15)  # as they are seen, each 0.05 s


def test_where_no_model_can_take_a_step_the_reason_is_told(tmp_path, monkeypatch):
    """And where only the larger ones cannot, a smaller one is taken."""
    for number, name in enumerate(photos(tmp_path, 24)):
        (tmp_path / name).with_suffix(".txt").write_text(f"image {number}")
    config, most = TrainConfig(data=str(tmp_path), budget="10m", device="cpu", threads=1), 0

    def step(state, batch, mark=None):
        if state.model.config.vision.image_size > most:
            raise MemoryError("there is no more")

    monkeypatch.setattr(timing, "train_step", step)
    with pytest.raises(ValueError, match="no step of 5 pairs could be taken on cpu: it ran out of memory"):
        autoconfig.pick(config, lambda changes: replace(config, **changes), QuietConsole())
    most = 32
    picked = autoconfig.pick(config, lambda changes: replace(config, **changes), QuietConsole())
    assert picked.changes["model"] == autoconfig.BAGS[0].changes["model"]


def test_what_is_learned_from_is_known_by_a_sample(tmp_path):
    """Of images at equal distances, not of the first."""
    lines = [
        f"{name}\ta dog on the {'left' if i > 30 else 'grass'} of it" for i, name in enumerate(photos(tmp_path, 60))
    ]
    (tmp_path / "all.tsv").write_text("\n".join(["filepath\ttitle", *lines]))
    told = TokenizedCaptions.of(open_sources(TrainConfig(data=str(tmp_path / "all.tsv"), val_size=10)))
    assert (told.images, told.captions, told.words, told.drawn) == (50, 1, 7, False)
    assert 0.3 < told.sides < 0.6
    assert not autoconfig.fitted(autoconfig.BAGS[0], told).changes["flip"]
    assert autoconfig.fitted(autoconfig.BAGS[0], replace(told, sides=0.0)).changes["flip"]


def test_a_small_set_gets_a_batch_that_fits_and_no_more_captions_than_it_has():
    for candidate in (*autoconfig.BAGS, *autoconfig.READERS, *autoconfig.SCENES):
        fitted = autoconfig.fitted(candidate, TokenizedCaptions(40, 1, 8.0, 0.0, False))
        assert fitted.changes["batch"] == 10
        assert fitted.changes["captions"] == 1
        for regularization in (*(changes for _, changes in candidate.regularization), {}):
            replace(TrainConfig(), **fitted.changes | regularization)  # is a configuration


def test_scenes_are_not_mirrored_as_their_captions_say_left_and_right():
    for candidate in autoconfig.SCENES:
        assert not replace(TrainConfig(), **candidate.changes).flip


def test_rungs_want_more_pairs_the_higher_they_are():
    wanted = [candidate.pairs for candidate in (*autoconfig.BAGS, *autoconfig.READERS)]
    assert wanted[0] == 0
    assert wanted == sorted(set(wanted))


def test_a_run_ends_on_time_with_its_schedule_complete(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(photos(tmp_path / "photos", 60)):
        (tmp_path / "photos" / name).with_suffix(".txt").write_text(f"image {number} of {number % 7}")
    began = time.monotonic()
    words = ["train", "--data", "photos", "--budget", "16s", "--device", "cpu", "--threads", "1", "--name", "it"]
    assert cli.run_command([*words, "--json", "--crop-scale", "0.7", "--model.text.encoder", "attention"]) == 0
    took = time.monotonic() - began
    assert 14.4 < took < 17.6
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["finished"]
    config = from_json(TrainConfig, tmp_path / "runs/it/config.json")
    assert config.crop_scale == 0.7  # what is asked for is not picked
    assert config.model.text.mix == "attention"  # whose words are not dropped
    lines = [json.loads(line) for line in (tmp_path / "runs/it/metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "step"]
    assert rates[-1] < 0.15 * max(rates)  # there is time for a few steps only
    assert any(line.get("event") == "recipe" and "looks" in line["reason"] for line in lines)


def test_a_budget_and_a_number_of_epochs_contradict_each_other(capsys):
    assert cli.run_command(["train", "--budget", "5m", "--epochs", "3"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_resumed_schedule_goes_on_where_it_was(clock):
    config = TrainConfig(lr=1.0, warmup=0.1)
    mine = Schedule(100, clock.now + 50, 100, spent_s=50.0)
    assert learning_rate(*mine.place(40), config) < 0.6  # half of the time is gone: the climb is long over


def test_an_evaluation_that_the_last_one_would_follow_at_once_is_left_out(clock):
    mine = Schedule(10, clock.now + 100, 100)
    with mine.aside("evaluating"):
        clock.now += 5
    with mine.aside("saving"):
        clock.now += 1
    assert mine.may_evaluate()
    clock.now += 84
    assert not mine.may_evaluate()
    assert not mine.is_late
    clock.now += 5
    assert mine.is_late


def test_a_late_start_never_makes_the_rate_negative(clock):
    mine = Schedule(10, clock.now + 10, 10)
    clock.now += 20
    assert 0 <= learning_rate(*mine.place(0), TrainConfig(lr=1.0)) < 0.01


@pytest.fixture
def timed_run(tiny_run):
    return replace(tiny_run, budget="4s", epochs=1, eval_every=10**6, recipe="scratch")


def test_a_run_that_its_budget_ended_is_finished_until_it_gets_more(timed_run, tmp_path):
    first = train_run(timed_run, tmp_path / "r")
    assert first.finished
    again = train_run(timed_run, tmp_path / "r")
    assert again.finished
    assert again.step == first.step
    more = train_run(replace(timed_run, budget="7s"), tmp_path / "r")
    assert more.finished
    assert more.step > first.step


def test_a_budget_that_is_over_before_the_first_step_is_a_sentence(timed_run, tmp_path):
    with pytest.raises(ValueError, match="over before a step"):
        train_run(replace(timed_run, budget="0.001s"), tmp_path / "r")


def test_what_was_stopped_just_before_its_end_is_finished_without_a_step(timed_run, tmp_path):
    long = replace(timed_run, budget="60s")
    first = train_run(long, tmp_path / "r", stop_at=2)
    assert not first.finished
    run, console = runs.Run(tmp_path / "r"), QuietConsole()
    with run.locked():
        setup = check(long, tmp_path, run, console, began=time.monotonic() - 60)
        result = loop.train(setup, run, console)
    assert result.finished
    assert result.step == first.step
    assert result.scores is not None
    assert load(run.path)


def test_what_is_learned_already_gets_no_more_than_its_recipe_has(tiny_run, tmp_path):
    config = replace(tiny_run, budget="1h", recipe="full", epochs=2, init=str(tmp_path / "a" / "model"))
    train_run(tiny_run, tmp_path / "a")
    result = train_run(config, tmp_path / "b")
    assert result.finished
    assert result.step == 8


@pytest.mark.parametrize(
    ("changes", "told"), [({"start_size": 16, "budget": "5m"}, "give one"), ({"word_dropout": 0.5}, "bags of words")]
)
def test_what_does_not_go_together_is_refused(tiny_run, changes, told):
    with pytest.raises(ValueError, match=told):
        replace(tiny_run, **changes)


def test_a_image_with_several_captions_that_is_not_finite_is_passed_over(tiny_run, tmp_path, monkeypatch):
    """A broken batch is named by its rows and left out; the run goes on."""
    forward = Vision.forward

    def broken(self, pixels_BCHW, key_B=None):
        made = forward(self, pixels_BCHW, key_B)
        return made.where(torch.arange(len(made))[:, None] != 3, torch.nan) if key_B is not None else made

    monkeypatch.setattr(Vision, "forward", broken)
    result = train_run(replace(tiny_run, captions=2, steps=2), tmp_path / "r")
    assert result.finished
    skipped = [row for row in runs.Run(tmp_path / "r").records("event") if row["event"] == "skipped"]
    assert len(skipped) == 2
    assert len(skipped[0]["names"]) == 1


def test_adapters_find_a_place_in_a_bag_of_words(tiny_run, tmp_path):
    pytest.importorskip("peft")
    bag = replace(tiny_run.model, text=replace(tiny_run.model.text, encoder="bag_of_words"))
    train_run(replace(tiny_run, model=bag), tmp_path / "a")
    config = replace(tiny_run, recipe="lora", init=str(tmp_path / "a" / "model"), epochs=1)
    assert train_run(config, tmp_path / "b").finished
