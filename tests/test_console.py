"""Progress as text: regular lines with the time left where the output is not a terminal."""

import io
import threading

import pytest

from m1clip import console as module
from m1clip.console import Console, ProgressLines


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_of_progress_has_the_time_left_at_the_rate_of_the_last_minute():
    clock = Clock()
    lines = ProgressLines("decoding images", 12_000, clock)
    assert lines.line() == "decoding images 0 of 12,000"
    lines.advance(6_000)  # read from a cache, at once
    clock.now += 60
    for _ in range(6):
        lines.line()
    lines.advance(600)
    clock.now += 10
    assert lines.line() == "decoding images 6,600 of 12,000, about 1 min 30 s left"


def test_a_line_without_a_total_has_the_time_so_far():
    clock = Clock()
    lines = ProgressLines("listing photos", None, clock)
    lines.advance(70)
    clock.now += 65
    assert lines.line() == "listing photos: 70 after 1 min 05 s"


def test_a_file_gets_lines_while_nothing_advances(monkeypatch):
    monkeypatch.setattr(module, "LINE_S", 0.001)
    stream, written = io.StringIO(), threading.Event()
    console = Console(stream)
    monkeypatch.setattr(stream, "flush", lambda: stream.getvalue().count("30 of 40") > 1 and written.set())
    with console.progress("encoding images", 40) as advance:
        advance(30)
        assert written.wait(120)
    assert "encoding images 30 of 40" in stream.getvalue()


@pytest.fixture
def records() -> list[dict]:
    chance = {"chance_loss": 5.545, "chance_accuracy": 1 / 256}
    return [{"loss": 4.0, "accuracy": 0.25, "pairs_per_s": 128.0, "step_ms": 1900.0, "between_ms": 100.0, **chance}]


def test_training_prints_a_line_every_half_minute(records):
    clock, stream = Clock(), io.StringIO()
    console = Console(stream, clock)
    with console.training(0, 90):
        for step in range(1, 61):
            clock.now += 2
            console.update_training(step, records, 90)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert (
        lines[0]
        == "step 15 of 90: loss 4.000, accuracy 25.0 % (chance 5.54, 0.4 %), 128 pairs/s, about 2 min 30 s left"
    )


def test_an_epoch_of_the_table_is_a_line_of_progress_too():
    clock = Clock()
    console = Console(io.StringIO(), clock)
    clock.now += 30
    assert console.needs_training_line()
    means = {"loss": 1.0, "accuracy": 0.5, "temperature": 0.07, "pairs_per_s": 9.0, "seconds": 3.0}
    console.print_epoch(1, 3, means, None)
    assert not console.needs_training_line()
