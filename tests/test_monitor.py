"""Watching a run: its log as it grows, its curves, and the terminal that shows them."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest

from longlog import put, write_run, write_step
from m1clip import run as runs
from m1clip.cli import run as command
from m1clip.monitor import curves, terminal_views, text_plot
from m1clip.monitor.log import Followed, Log
from m1clip.monitor.terminal import Monitor


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """3,000 steps with a gap, a restart, NaN, a line that is no JSON, and half a line at the end."""
    return write_run(tmp_path_factory.mktemp("runs") / "night", 3000, (1000, 1200), (500, 501), 1800)


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_a_log_with_every_accident_is_read_to_its_last_whole_line(night):
    log = Log(night / "metrics.jsonl")
    assert log.refresh()
    steps = log.column("step")
    assert steps.tolist() == [step for step in range(1, 3001) if not 1000 <= step < 1200]
    lines = (night / "metrics.jsonl").read_text().split("\n")
    assert [lines[number - 1] for number in log.broken] == ["this is no JSON"]
    assert log.repeated >= 1
    assert np.isnan(log.column("loss")[steps == 500])
    assert np.nansum(log.column("skipped")) == 2
    assert [row["step"] for row in log.records["eval"]] == [2000, 3000]
    assert all(json.loads(lines[row["line"] - 1])["step"] == row["step"] for row in log.records["eval"])


def test_what_is_appended_is_read_once_and_half_a_line_not_before_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = Log(path)
    assert not log.refresh()
    append(path, '{"kind": "step", "step": 1, "loss": 2.0}\n{"kind": "step", "st')
    assert log.refresh()
    assert not log.refresh()
    append(path, 'ep": 2, "loss": 1.5}\n')
    assert log.refresh()
    assert log.column("loss").tolist() == [2.0, 1.5]
    assert log.broken == []


def test_a_run_that_is_resumed_or_begun_anew_is_read_anew(tmp_path):
    run = runs.create(tmp_path, "a", "x", False)
    for step in (1, 2, 3):
        run.log("step", step, loss=float(step))
    log = Log(run.path / "metrics.jsonl")
    log.refresh()
    run.rewind(1)  # replaces the file, as a resumed run does
    run.log("step", 2, loss=9.0)
    assert log.refresh()
    assert log.column("loss").tolist() == [1.0, 9.0]
    os.remove(log.path)
    assert log.refresh()
    assert len(log) == 0


def test_another_log_in_the_place_of_the_old_one_is_read_anew_even_if_it_has_its_number(tmp_path):
    """As after --overwrite: the system may give the new file the number of the old one."""
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(f'{{"kind": "step", "step": {step}, "loss": 1.0}}\n' for step in range(1, 6)))
    log = Log(path)
    log.refresh()
    path.write_text("".join(f'{{"kind": "step", "step": {step}, "loss": 9.0}}\n' for step in range(1, 9)))
    log.refresh()
    assert log.column("loss").tolist() == 8 * [9.0]


def test_steps_that_come_again_replace_what_was_measured_from_there_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in (1, 2, 3, 4):
            put(file, "step", step, loss=1.0)
        put(file, "eval", 4, mean_r1=0.5)
        put(file, "event", 4, event="start")
        put(file, "step", 3, loss=2.0)
    log = Log(path)
    log.refresh()
    assert log.column("step").tolist() == [1, 2, 3]
    assert log.column("loss").tolist() == [1, 1, 2]
    assert log.records["eval"] == []
    assert len(log.events) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step"}',
        '{"kind": 3, "step": 1}',
        '{"kind": "step", "step": 1.5}',
        '{"kind": "step", "step": -1}',
        '{"kind": "step", "step": true}',
        '{"kind": "step", "step": 1e999}',
        "[]",
        "null",
        "\x00\x01",
        "[" * 5000,
    ],
)
def test_a_line_that_is_no_record_is_counted_and_passed_over(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    append(
        path,
        f'{{"kind": "step", "step": 1, "loss": 2.0}}\n{line}\n{{"kind": "step", "step": 2, "loss": "x"}}\n',
    )
    log = Log(path)
    log.refresh()
    assert log.broken == [2]
    assert log.column("step").tolist() == [1, 2]
    assert np.isnan(log.column("loss")[1])


def test_smoothing_is_the_mean_of_what_is_known_in_the_window():
    rng = np.random.default_rng(0)
    y = np.where(rng.random(200) < 0.1, np.nan, rng.normal(size=200))
    for window in (2, 7, 500):
        slow = [np.nan if np.isnan(y[i]) else np.nanmean(y[max(0, i - window + 1) : i + 1]) for i in range(200)]
        assert np.allclose(curves.smoothed(y, window), slow, equal_nan=True)


def test_a_spike_does_not_swallow_what_comes_after_it():
    y = np.full(1000, 2.0)
    y[300] = 1e17
    assert (curves.smoothed(y, 10)[310:] == 2).all()


def test_thinning_keeps_the_ends_the_extremes_and_the_breaks():
    x, y = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    y[777], y[55_555], y[90_000:90_500] = 40.0, -40.0, np.nan
    few_x, few_y = curves.thinned(x, y, 600)
    assert len(few_x) <= 900
    assert (few_x[0], few_x[-1]) == (0, 99_999)
    assert (np.nanmax(few_y), np.nanmin(few_y)) == (40.0, -40.0)
    assert np.isnan(few_y[(few_x >= 90_000) & (few_x < 90_500)]).any()
    assert (np.diff(few_x) > 0).all()


def test_a_gap_in_the_steps_is_a_break_in_the_curve(night):
    log = Log(night / "metrics.jsonl")
    log.refresh()
    x, y = curves.points(log, "loss")
    at = np.flatnonzero(x == 1200)
    assert np.isnan(y[at[0]])
    assert np.isfinite(y[at[1]])


def test_a_mean_begins_anew_after_a_hole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in [*range(1, 101), *range(300, 401)]:
            put(file, "step", step, loss=1.0 if step < 200 else 3.0)
    log = Log(path)
    log.refresh()
    _, y = curves.points(log, "loss", window=50)
    assert set(y[np.isfinite(y)]) == {1.0, 3.0}
    assert np.isnan(y).sum() == 1


def test_where_only_some_steps_are_logged_the_curve_is_still_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(10, 1000, 10):
            put(file, "step", step, loss=1.0)
    log = Log(path)
    log.refresh()
    assert np.isfinite(curves.points(log, "loss")[1]).all()


def test_speed_is_all_pairs_by_all_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step, ms in enumerate((100.0, 900.0), 1):
            put(file, "step", step, step_ms=ms, pairs_per_s=32 / ms * 1e3)
    log = Log(path)
    log.refresh()
    assert log.rate(50) == pytest.approx(64 / 1.0)


def test_a_long_log_can_be_read_in_parts(night):
    log, whole, looks = Log(night / "metrics.jsonl"), Log(night / "metrics.jsonl"), 0
    whole.refresh()
    while log.refresh(100_000):
        looks += 1
    assert looks > 5
    assert log.column("loss").tolist()[-100:] == whole.column("loss").tolist()[-100:]
    assert len(log) == len(whole)
    assert log.unread < 0.001


def test_an_endless_line_is_read_once_and_in_no_time(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"kind": "step", "step": 1, "loss": 1.0}\n' + "x" * 30_000_000)
    log, began = Log(path), time.perf_counter()
    log.refresh()
    for _ in range(50):
        log.refresh()
    assert time.perf_counter() - began < 3
    append(path, '\n{"kind": "step", "step": 2, "loss": 1.0}\n')
    log.refresh()
    assert log.column("step").tolist() == [1, 2]
    assert log.broken == [2]


def test_minutes_are_those_of_the_steps(night):
    log = Log(night / "metrics.jsonl")
    log.refresh()
    x, _ = curves.points(log, "mean_r1", "minutes")
    assert x[-1] == pytest.approx(2799 * 480.3 / 60_000, rel=1e-3)  # one of 2,800 steps has another time


def test_a_curve_is_drawn_where_it_is_and_its_level_is_dotted():
    line = text_plot.Line(np.arange(10.0), np.arange(10.0), "blue")
    rows = text_plot.plot("title", [line], 40, 8, "{:.0f}".format, [0.0]).plain.split("\n")
    assert len(rows) == 8
    assert rows[1].strip().startswith("9")
    assert rows[6].strip().startswith("0")
    assert "⡀" in rows[6]  # chance, along the bottom
    assert rows[7].split() == ["0", "9"]
    drawn = [next(i for i, letter in enumerate(row[4:]) if letter not in " ⡀") for row in rows[1:6]]
    assert drawn == sorted(drawn, reverse=True)  # it rises to the right


def test_bars_have_eighths():
    assert text_plot.bar(0.5, 4) == "██  "
    assert text_plot.bar(1 / 32, 4) == "▏   "
    assert text_plot.bar(7.0, 2) == "██"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_view_fits_its_width_whatever_the_log_holds(night, tmp_path, width):
    empty = runs.create(tmp_path, "empty", "x", False)
    empty.write("config.json", {"epochs": 1})
    for path in (night, empty.path):
        one = Followed(runs.Run(path))
        one.refresh()
        for text in (
            terminal_views.header(one, width),
            terminal_views.learning([one], width, 20),
            terminal_views.speed(one, width, 20),
        ):
            assert all(len(row) <= width for row in text.plain.split("\n")), text.plain
        terminal_views.events(one, width)
        rows = terminal_views.gradients(one, width).plain.split("\n")
        assert all(len(row) <= width for row in rows if ".blocks." in row)


def test_odd_values_do_not_stop_a_view(tmp_path):
    run = runs.create(tmp_path, "odd", "x", False)
    run.write("config.json", {"epochs": 1})
    run.log(
        "logger",
        1,
        grad_norms={"vision.a": None, "text.b": 0.0, "c": "x"},
        memory_gb=None,
        cpu_percent=[None, 3],
    )
    run.log("event", 1, event="diagnosis", about="\x1b[2Jx", text=None)
    run.log("eval", 1, mean_r1=None)
    append(run.path / "metrics.jsonl", '{"kind": "event", "step": 1}\n')
    one = Followed(run)
    one.refresh()
    text = terminal_views.snapshot([one], 80).plain
    assert "\x1b" not in text


def test_a_dead_run_is_shown_as_dead_with_its_reason(night):
    one = Followed(runs.Run(night))
    one.refresh()
    text = terminal_views.header(one, 100).plain
    assert "dead" in text
    assert "its process 1 is gone" in text


def test_once_prints_a_snapshot_and_a_dead_run_how_to_go_on(night, capsys):
    assert command(["monitor", str(night), "--once"]) == 0
    out = capsys.readouterr().out
    for words in (
        "night  dead",
        "loss",
        "chance 5.55",
        "validation R@1",
        "forward",
        "text.blocks.3",
        "throttling",
        "--resume",
    ):
        assert words in out, words
    assert command(["monitor", str(night), "--once", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["last_step"]["step"], found["eval"]["step"]) == ("dead", 3000, 3000)


@pytest.mark.parametrize(
    "words",
    [
        ["--json"],
        ["--once", "--web"],
        ["--token", "x"],
        ["--web", "--token", ""],
        ["--web", "--token", "пароль"],
        ["--web", "--host", "0.0.0.0"],
        ["--web", "--port", "0"],
        ["nowhere"],
    ],
)
def test_what_does_not_go_together_is_refused_with_a_sentence(words, capsys, tmp_path):
    assert command(["monitor", *words, "--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("m1clip: ")


def test_without_a_terminal_the_monitor_says_what_to_do(night, capsys):
    assert command(["monitor", str(night)]) == 2
    assert "--once" in capsys.readouterr().err


def pilot(night, size, act):
    """The real application on a console of that size, driven by keys; what it shows at the end."""

    async def go():
        app = Monitor(night.parent, runs.Run(night))
        async with app.run_test(size=size) as keys:
            await keys.pause()
            await act(app, keys)
            await keys.pause()
            assert app.failed is None
            return app, "\n".join(
                "".join(part.text for part in strip) for strip in app.console._compositor.render_strips()
            )

    return asyncio.run(go())


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (50, 15)])
def test_every_view_of_the_terminal_opens(night, size):
    shown = {}

    async def act(app, keys):
        for key in "12345":
            await keys.press(key)
            await keys.pause()
            shown[key] = "\n".join(
                "".join(part.text for part in strip) for strip in app.console._compositor.render_strips()
            )

    pilot(night, size, act)
    for key, words in {
        "1": "loss",
        "2": "forward",
        "3": "vision.blocks",
        "4": "throttling",
        "5": "night",
    }.items():
        assert words in shown[key], shown[key]
        assert "dead" in shown[key]


def test_names_are_words_and_the_cursor_stays_on_its_run(tmp_path):
    for number, name in enumerate(("[x]", "b[red]")):
        write_run(tmp_path / name, 60, (5, 9), (), None)
        (tmp_path / name / "machine.json").write_text('{"device": "[/x]", "chip": "[bold"}')
        os.utime(tmp_path / name / "config.json", (number, number))

    async def act(app, keys):
        await keys.press("5", "down")
        write_run(tmp_path / "third", 60, (5, 9), (), None)
        (tmp_path / "b[red]" / "status.json").write_text('{"state": ["x"], "step": "many", "total": {}}')
        app.look()
        await keys.pause()
        assert app._under_cursor() == "[x]"
        shutil.rmtree(tmp_path / "third")
        app.look()
        await keys.press("2", "4", "5")

    _, console = pilot(tmp_path / "b[red]", (120, 30), act)
    assert "b[red]" in console
    assert "[/x]" in console


def test_runs_are_listed_chosen_and_compared(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, 300, (100, 110), (), None)
        os.utime(tmp_path / name / "config.json", (1, 1) if name == "one" else (2, 2))

    async def act(app, keys):
        await keys.press("5", "down", "space")  # the newest is first: under it, "one"
        await keys.press("1")
        await keys.pause()

    app, console = pilot(tmp_path / "two", (100, 30), act)
    assert [one.name for one in app.followed] == ["two", "one"]
    assert "━ two  ━ one" in console

    async def choose(app, keys):
        await keys.press("5", "down", "enter")
        await keys.pause()

    app, console = pilot(tmp_path / "two", (100, 30), choose)
    assert app.shown.name == "one"
    assert console.lstrip().startswith("one")


def test_the_terminal_follows_a_log_that_grows_pauses_and_changes_its_colors(tmp_path):
    path = write_run(tmp_path / "a", 300, (100, 110), (), None, half=False)

    async def act(app, keys):
        with open(path / "metrics.jsonl", "a") as file:
            write_step(file, 301, 400, 0.0)
        app.look()
        assert app.shown.log.column("step")[-1] == 301
        await keys.press("p")
        with open(path / "metrics.jsonl", "a") as file:
            write_step(file, 302, 400, 0.0)
        app.look()
        assert app.shown.log.column("step")[-1] == 301
        await keys.press("t", "s")
        assert app.theme == "ansi-light"

    _, console = pilot(path, (100, 30), act)
    assert "paused" in console
    assert "every step" in console


def test_a_run_killed_while_watched_is_shown_dead(tmp_path):
    """A real process that holds the run's lock, as training does, and is killed with -9."""
    run = runs.create(tmp_path, "a", "x", False)
    run.write("config.json", {"epochs": 1})
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom m1clip.run import Run\n"
        "run = Run(Path(sys.argv[1]))\nwith run.owned():\n    run.status('running', 5, total=9)\n"
        "    print('up', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()

    async def act(app, keys):
        assert app.shown.summary["state"] == "running"
        process.kill()
        process.wait()
        app.look()
        await keys.pause()

    app, console = pilot(run.path, (80, 24), act)
    assert app.shown.summary["state"] == "dead"
    assert f"its process {process.pid} is gone" in console


def test_little_is_imported_before_the_first_image():
    """Half a second of a processor here, of the one that it may take to open; others' work is not counted."""
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run([sys.executable, "-c", "import m1clip.monitor.terminal"], check=True)
        after = os.times()
        times.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(times) < 1.0


def test_an_error_of_the_application_is_one_sentence_and_not_0(night, monkeypatch, capsys):
    """As any error of the program; Textual alone would print its traceback and let the command end well."""
    monkeypatch.setattr(terminal_views, "learning", lambda *_: 1 / 0)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    run_it = Monitor.run
    monkeypatch.setattr(Monitor, "run", lambda app: run_it(app, headless=True))
    assert command(["monitor", str(night)]) == 1
    assert capsys.readouterr().err == "m1clip: division by zero\n"
