"""--budget: the model that is chosen for it, a schedule that follows the clock, and an end in time."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from helpers import QuietConsole, train_run
from m1clip import cli
from m1clip.config import TrainConfig, check_config, from_json, override
from m1clip.data.splits import open_sources
from m1clip.model.clip import load
from m1clip.run import Run
from m1clip.training import autoconfig, optim, timing
from m1clip.training.autoconfig import (
    BAG_OF_WORDS,
    SYNTHETIC,
    TRANSFORMERS,
    Candidate,
    DataSummary,
    TimeBudget,
    adapt_to_data,
    choose_candidate,
    fit_budget,
)
from m1clip.training.loop import fit
from m1clip.training.optim import MIN_STEPS, Schedule, learning_rate
from m1clip.training.setup import prepare
from photos import write_photos

REGULARIZATION = ((0, {"crop_scale": 0.9}), (20, {"crop_scale": 0.5}))
CANDIDATES = [
    Candidate("small", 0, {"batch_size": 8}, REGULARIZATION),
    Candidate("medium", 18_000, {"batch_size": 16}, REGULARIZATION),
    Candidate("large", 54_000, {"batch_size": 32}),
]


class Clock:
    """time.monotonic that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 1000.0
        monkeypatch.setattr(optim.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def cpu_clock(monkeypatch) -> None:
    """Time is the CPU time of this process, so that a busy machine does not shorten a budget."""
    monkeypatch.setattr(time, "monotonic", time.process_time)
    monkeypatch.setattr(time, "perf_counter", time.process_time)


def run_schedule(clock: Clock, plan: Schedule, step_s: Callable[[int], float]) -> list[float]:
    """Take steps until the last one; their learning rates, at most 1."""
    rates, step, ended = [], 0, False
    while not ended:
        rates.append(learning_rate(*plan.progress(step), peak=1.0, warmup=0.1))
        clock.now += step_s(step)
        step += 1
        ended = plan.count(step)
    return rates


@pytest.mark.parametrize("step_s", [lambda step: 0.1, lambda step: 0.05 if step < 400 else 0.4])
def test_the_learning_rate_reaches_zero_with_the_budget_at_any_speed(clock, step_s):
    rates = run_schedule(clock, Schedule(10**6, clock.now + 100, 100), step_s)
    assert 96 < clock.now - 1000 < 99
    assert max(rates) > 0.99
    assert rates[-1] < 0.001
    assert rates.index(max(rates)) * 3 < len(rates)


def test_time_is_reserved_for_the_last_evaluation_and_save(clock):
    plan = Schedule(10, clock.now + 100, 100)
    plan.progress(0)
    for kind, seconds in (("eval", 6.0), ("save", 3.0)):
        with plan.timed_pause(kind):
            clock.now += seconds
    run_schedule(clock, plan, lambda step: 0.5)
    assert clock.now == pytest.approx(1090, abs=0.5)


def test_an_evaluation_is_timed_at_half_time_if_there_was_none(clock):
    plan = Schedule(10, clock.now + 100, 100)
    plan.progress(0)
    clock.now += 48
    assert not plan.needs_trial_eval
    clock.now += 2
    assert plan.needs_trial_eval
    with plan.timed_pause("eval"):
        clock.now += 1
    assert not plan.needs_trial_eval


def test_an_evaluation_that_the_last_one_would_follow_immediately_is_left_out(clock):
    plan = Schedule(10, clock.now + 100, 100)
    for kind, seconds in (("eval", 5.0), ("save", 1.0)):
        with plan.timed_pause(kind):
            clock.now += seconds
    assert plan.has_time_to_eval()
    clock.now += 84
    assert not plan.has_time_to_eval()
    assert not plan.is_late
    clock.now += 5
    assert plan.is_late


def test_the_estimated_number_of_steps_follows_their_speed(clock):
    plan = Schedule(7, clock.now + 103, 100)
    plan.progress(0)
    for step in range(1, 11):
        clock.now += 1
        assert not plan.count(step)
    assert plan.total == 100


@pytest.mark.parametrize(("budget_s", "steps"), [(100, 50), (2, 20)])
def test_a_budget_never_takes_more_than_the_maximum_of_steps(clock, budget_s, steps):
    plan = Schedule(50, clock.now + budget_s, budget_s, max_steps=50)
    rates = run_schedule(clock, plan, lambda step: 0.1)
    assert steps - 1 <= len(rates) <= steps
    assert rates[-1] < 0.05


def test_without_a_budget_the_schedule_counts_steps():
    plan = Schedule(4)
    assert [plan.progress(step) for step in range(2)] == [(0, 4), (1, 4)]
    assert [plan.count(step) for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert plan.last_step() == 4
    assert not plan.needs_trial_eval


def test_a_resumed_schedule_continues_where_it_was(clock):
    plan = Schedule(100, clock.now + 50, 100, elapsed_s=50.0)
    assert 0.4 < learning_rate(*plan.progress(40), peak=1.0, warmup=0.1) < 0.6  # half of the cosine


def test_a_late_start_takes_a_few_steps_with_a_whole_schedule(clock):
    plan = Schedule(10, clock.now + 10, 10)
    clock.now += 20
    rates = run_schedule(clock, plan, lambda step: 5.0)
    assert len(rates) == MIN_STEPS
    assert 0 <= min(rates) < max(rates) <= 1
    assert rates[-1] < 0.2


@pytest.mark.parametrize(
    ("speeds", "batch_size"),
    [([100.0, 10.0], 8), ([1000.0, 250.0, 20.0], 16), ([3000.0, 2000.0, 700.0], 32), ([0.1], 8)],
)
def test_the_largest_model_that_sees_enough_pairs_is_chosen(speeds, batch_size):
    settings, reason = choose_candidate(TimeBudget(100, 900, 0.0), CANDIDATES, speeds)
    assert settings["batch_size"] == batch_size
    assert "900 images" in reason


def test_the_reason_states_what_the_next_larger_model_lacks():
    settings, reason = choose_candidate(TimeBudget(100, 900, 0.0), CANDIDATES, [1000.0, 250.0, 100.0])
    assert settings["epochs"] == 25  # 22,500 pairs of 900 images
    assert reason == (
        "medium; 1 min 40 s are about 25 epochs of 900 images at 250 pairs/s; "
        "the next larger model would see 9,000 pairs and needs 54,000"
    )


@pytest.mark.parametrize(("images", "crop_scale"), [(900, 0.5), (4_500, 0.5), (4_600, 0.9), (10**6, 0.9)])
def test_regularization_grows_with_the_number_of_epochs(images, crop_scale):
    settings, reason = choose_candidate(TimeBudget(100, images, 0.0), CANDIDATES, [2000.0, 1000.0])  # 90,000 pairs
    assert settings["batch_size"] == 16
    assert settings["crop_scale"] == crop_scale
    assert "e+" not in reason


def test_a_large_dataset_of_which_little_is_seen_gets_the_small_model_too():
    """Two minutes are the same number of pairs, however many images there are."""
    candidates = [*BAG_OF_WORDS, *TRANSFORMERS]
    small, large = (TimeBudget(120, images, images / 700) for images in (6_000, 10**6))
    few, _ = choose_candidate(small, candidates, [400.0, 250.0])
    many, reason = choose_candidate(large, candidates, [400.0, 250.0])
    assert few["model"] == many["model"] == BAG_OF_WORDS[0].settings["model"]
    assert "cache_gb" not in few
    assert many["cache_gb"] == 0  # decoding a million images would take all the time
    assert "decoded on the fly" in reason


def test_decoding_takes_time_from_training():
    assert TimeBudget(100, 1000, 0.0).pairs(10.0) == pytest.approx(900)
    assert TimeBudget(100, 1000, 10.0).pairs(10.0) == pytest.approx(800)
    assert TimeBudget(100, 1000, 50.0).pairs(10.0) == pytest.approx(90 / 0.15)  # on the fly, 0.05 s each


def test_larger_candidates_need_more_pairs():
    needed = [candidate.min_pairs for candidate in (*BAG_OF_WORDS, *TRANSFORMERS)]
    assert needed[0] == 0
    assert needed == sorted(set(needed))


def test_the_data_is_summarized_from_an_evenly_spaced_sample(tmp_path):
    names = write_photos(tmp_path, 60)
    rows = [f"{name}\ta dog on the {'left' if i > 30 else 'grass'} of it" for i, name in enumerate(names)]
    (tmp_path / "all.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    config = TrainConfig(data=str(tmp_path / "all.tsv"), val_size=10)
    data = DataSummary.from_sources(open_sources(config))
    assert (data.images, data.captions_per_image, data.words_per_caption, data.is_synthetic) == (50, 1, 7, False)
    assert 0.3 < data.left_right < 0.6
    assert not adapt_to_data(BAG_OF_WORDS[0], data).settings["hflip"]
    assert adapt_to_data(BAG_OF_WORDS[0], replace(data, left_right=0.0)).settings["hflip"]


@pytest.mark.parametrize("candidate", [*BAG_OF_WORDS, *TRANSFORMERS, *SYNTHETIC], ids=lambda one: one.name)
def test_every_candidate_is_valid_and_fits_a_small_dataset(candidate):
    adapted = adapt_to_data(candidate, DataSummary(40, 1, 8.0, 0.0, False))
    assert (adapted.settings["batch_size"], adapted.settings["captions_per_image"]) == (10, 1)
    for settings in (*(settings for _, settings in candidate.regularization), {}):
        check_config(override(TrainConfig(), adapted.settings | settings))


def test_synthetic_scenes_are_not_flipped_because_their_captions_say_left_and_right():
    assert not any(candidate.settings.get("hflip", False) for candidate in SYNTHETIC)


def captioned_photos(folder: Path, count: int) -> Path:
    for number, name in enumerate(write_photos(folder, count)):
        (folder / name).with_suffix(".txt").write_text(f"image {number} of {number % 7}")
    return folder


def test_models_too_large_for_memory_are_left_out_and_none_at_all_is_an_error(tmp_path, monkeypatch):
    folder, largest = captioned_photos(tmp_path / "photos", 24), 0
    given = {"data": str(folder), "budget": "10m", "device": "cpu", "threads": 1}
    config = override(TrainConfig(), given)

    def train_step(state, batch, mark=None):
        if state.model.config.vision.image_size > largest:
            raise MemoryError("out of memory")

    monkeypatch.setattr(timing, "train_step", train_step)
    with pytest.raises(ValueError, match=r"a batch of 5 pairs does not run on cpu: .*memory"):
        fit_budget(config, given, open_sources(config), QuietConsole())
    largest = 32
    fitted, reason = fit_budget(config, given, open_sources(config), QuietConsole())
    assert fitted.model == BAG_OF_WORDS[0].settings["model"]
    assert reason.startswith(BAG_OF_WORDS[0].name)


def test_the_users_settings_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(autoconfig, "training_speed", lambda config, tokens, max_s: 500.0)
    data = str(captioned_photos(tmp_path / "photos", 24))
    given = {"data": data, "budget": "10m", "crop_scale": 0.7, "lr": 1e-5, "model.text.encoder": "transformer"}
    config = override(TrainConfig(), given)
    fitted, _ = fit_budget(config, given, open_sources(config), QuietConsole())
    assert (fitted.data, fitted.budget, fitted.crop_scale, fitted.lr) == (data, "10m", 0.7, 1e-5)
    assert fitted.model.text.encoder == "transformer"
    assert fitted.word_dropout == 0  # only for a bag of words
    assert fitted.model.vision == BAG_OF_WORDS[-1].settings["model"].vision


@pytest.mark.slow
def test_a_budget_run_completes_its_schedule(tmp_path, capsys, monkeypatch, cpu_clock):
    monkeypatch.chdir(tmp_path)
    captioned_photos(tmp_path / "photos", 60)
    flags = "--data photos --budget 6s --device cpu --threads 1 --workers 1 --name r --crop-scale 0.7 --json"
    assert cli.run_command(["train", *flags.split()]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["finished"]
    config, run = from_json(TrainConfig, tmp_path / "runs/r/config.json"), Run(tmp_path / "runs/r")
    assert (config.recipe, config.preset, config.crop_scale) == ("scratch", "budget", 0.7)
    rates = [record["lr"] for record in run.records("step")]
    assert rates[-1] < 0.15 * max(rates)  # there is time for a few steps only
    (reason,) = (record["reason"] for record in run.records("event") if record["event"] == "recipe")
    assert "epochs of 57 images" in reason


@pytest.fixture
def budget_run(tiny_run) -> TrainConfig:
    return replace(tiny_run, budget="1.5s", epochs=1, eval_every=10**6, recipe="scratch")


@pytest.mark.slow
def test_a_run_ended_by_its_budget_is_finished_until_it_gets_a_larger_one(budget_run, tmp_path, cpu_clock):
    first = train_run(budget_run, tmp_path / "r")
    assert first.finished
    again = train_run(budget_run, tmp_path / "r")
    assert (again.finished, again.step) == (True, first.step)
    more = train_run(replace(budget_run, budget="3s"), tmp_path / "r")
    assert more.finished
    assert more.step > first.step


def test_a_budget_over_before_the_first_step_still_trains_a_model(budget_run, tmp_path):
    console = QuietConsole()
    result = train_run(replace(budget_run, budget="0.001s"), tmp_path / "r", console=console)
    assert (result.finished, result.step) == (True, MIN_STEPS)
    assert any("was used before training began" in text for text in console.warnings)
    rates = [record["lr"] for record in Run(tmp_path / "r").records("step")]
    assert min(rates) > 0
    assert rates[-1] < max(rates)
    assert load(tmp_path / "r")
    assert train_run(replace(budget_run, budget="0.001s"), tmp_path / "r").step == MIN_STEPS


def test_decoding_time_of_slow_images_is_estimated_from_a_few(tmp_path, monkeypatch):
    sources, now = open_sources(TrainConfig(data=str(captioned_photos(tmp_path / "photos", 60)), workers=2)), [0.0]

    def decode_rows(pairs, size, rows):
        now[0] += 0.7 * len(rows)

    monkeypatch.setattr(autoconfig, "decode_rows", decode_rows)
    monkeypatch.setattr(autoconfig.time, "perf_counter", lambda: now[0])
    config = TrainConfig(budget="1m", workers=2)
    assert autoconfig.decoding_time(sources, config) == pytest.approx(57 * 0.7 / 2)
    assert now[0] < 4  # seconds of the fake clock
    assert autoconfig.decodes_on_the_fly(sources, config, QuietConsole()) == (True,)
    assert autoconfig.decodes_on_the_fly(sources, replace(config, budget="1h"), QuietConsole()) == ()


def test_a_run_stopped_just_before_its_end_is_finished_without_another_step(budget_run, tmp_path):
    config, console = replace(budget_run, budget="1h"), QuietConsole()
    first = train_run(config, tmp_path / "r", stop_at=2)
    assert not first.finished
    run = Run(tmp_path / "r")
    with run.locked():
        setup = prepare(config, {}, tmp_path, run, console, started=time.monotonic() - 3600, is_final=True)
        result = fit(setup, run, console)
    assert (result.finished, result.step) == (True, first.step)
    assert result.scores is not None
    assert load(run.path)


def test_fine_tuning_with_a_budget_ends_after_its_epochs(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "pretrained")
    init = str(tmp_path / "pretrained" / "model")
    result = train_run(replace(tiny_run, budget="1h", recipe="full", init=init), tmp_path / "r")
    assert (result.finished, result.step) == (True, 8)


def test_a_budget_and_a_number_of_epochs_cannot_be_combined(capsys):
    assert cli.run_command(["train", "--budget", "5m", "--epochs", "3"]) == 2
    assert "--budget and --epochs cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["soon", "0s", "-5m", "10", "1e400h"])
def test_a_budget_is_a_duration(budget):
    with pytest.raises(ValueError, match="budget must be a duration such as 90s, 10m or 2h"):
        check_config(TrainConfig(budget=budget))
