"""Reading a log while it grows, its curves, and the terminal monitor."""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from rich.console import Console

from long_log import MEMORY_GB, write_record, write_run, write_step
from m1clip.cli import run_command
from m1clip.monitor import curves, terminal_views
from m1clip.monitor.log import Log, RunView
from m1clip.monitor.terminal import Monitor
from m1clip.run import Run, create_run


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """3,000 steps with a gap, a restart, NaN, a line that is not JSON, and an incomplete last line."""
    return write_run(tmp_path_factory.mktemp("runs") / "night", 3000, (1000, 1200), (500, 501), 1800)


def read_log(path):
    log = Log(path)
    log.refresh()
    return log


def read_view(path):
    view = RunView(Run(path))
    view.refresh()
    return view


def render(view, width=100):
    """A view as plain text."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(view)
    return console.file.getvalue()


def append(path, text):
    with open(path, "a") as file:
        file.write(text)


def test_a_log_with_gaps_restarts_and_bad_lines_is_read_to_its_last_complete_line(night):
    log = read_log(night / "metrics.jsonl")
    steps = log.column("step")
    assert steps.tolist() == [step for step in range(1, 3001) if not 1000 <= step < 1200]
    lines = (night / "metrics.jsonl").read_text().split("\n")
    assert [lines[number - 1] for number in log.bad_lines] == ["this is not JSON"]
    assert log.restarts == 2  # 1,000 steps are repeated, and the record with a NaN repeats a step
    assert np.isnan(log.column("loss")[steps == 500])
    assert np.nansum(log.column("skipped")) == 2
    assert [record["step"] for record in log.records["eval"]] == [2000, 3000]
    assert all(json.loads(lines[record["line"] - 1])["step"] == record["step"] for record in log.records["eval"])


def test_appended_records_are_read_once_and_an_incomplete_line_when_it_is_complete(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = Log(path)
    assert not log.refresh()
    append(path, '{"kind": "step", "step": 1, "loss": 2.0}\n{"kind": "step", "st')
    assert log.refresh()
    assert not log.refresh()
    append(path, 'ep": 2, "loss": 1.5}\n')
    assert log.refresh()
    assert log.column("loss").tolist() == [2.0, 1.5]
    assert log.bad_lines == []


def test_the_log_of_a_resumed_or_deleted_run_is_read_again(tmp_path):
    run = create_run(tmp_path, "a", "x", False)
    for step in (1, 2, 3):
        run.log("step", step, loss=float(step))
    log = read_log(run.path / "metrics.jsonl")
    run.truncate_log(1)  # replaces the file, as a resumed run does
    run.log("step", 2, loss=9.0)
    assert log.refresh()
    assert log.column("loss").tolist() == [1.0, 9.0]
    os.remove(log.path)
    assert log.refresh()
    assert len(log) == 0


def test_a_new_log_with_the_inode_of_the_old_one_is_read_from_its_start(tmp_path):
    """As after --overwrite."""
    path = tmp_path / "metrics.jsonl"
    append(path, "".join(f'{{"kind": "step", "step": {step}, "loss": 1.0}}\n' for step in range(1, 6)))
    log = read_log(path)
    path.write_text("".join(f'{{"kind": "step", "step": {step}, "loss": 9.0}}\n' for step in range(1, 9)))
    log.refresh()
    assert log.column("loss").tolist() == 8 * [9.0]


def test_repeated_steps_replace_the_records_from_there_on_but_not_events(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in (1, 2, 3, 4):
            write_record(file, "step", step, loss=1.0)
        write_record(file, "eval", 4, mean_r1=0.5)
        write_record(file, "event", 4, event="start")
        write_record(file, "step", 3, loss=2.0)
    log = read_log(path)
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
def test_a_line_that_is_not_a_record_is_counted_and_skipped(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    append(path, f'{{"kind": "step", "step": 1, "loss": 2.0}}\n{line}\n{{"kind": "step", "step": 2, "loss": "x"}}\n')
    log = read_log(path)
    assert log.bad_lines == [2]
    assert log.column("step").tolist() == [1, 2]
    assert np.isnan(log.column("loss")[1])


def test_a_moving_average_is_the_mean_of_the_known_values_in_the_window():
    rng = np.random.default_rng(0)
    y = np.where(rng.random(200) < 0.1, np.nan, rng.normal(size=200))
    for window in (2, 7, 500):
        expected = [np.nan if np.isnan(y[i]) else np.nanmean(y[max(0, i - window + 1) : i + 1]) for i in range(200)]
        assert np.allclose(curves.moving_average(y, window), expected, equal_nan=True)


def test_an_outlier_does_not_change_later_averages():
    y = np.full(1000, 2.0)
    y[300] = 1e17
    assert (curves.moving_average(y, 10)[310:] == 2).all()


def test_downsampling_keeps_ends_extremes_and_gaps():
    x, y = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    y[777], y[55_555], y[90_000:90_500] = 40.0, -40.0, np.nan
    few_x, few_y = curves.downsample(x, y, 600)
    assert len(few_x) <= 900
    assert (few_x[0], few_x[-1]) == (0, 99_999)
    assert (np.nanmax(few_y), np.nanmin(few_y)) == (40.0, -40.0)
    assert np.isnan(few_y[(few_x >= 90_000) & (few_x < 90_500)]).any()
    assert (np.diff(few_x) > 0).all()


def test_a_gap_in_the_steps_is_a_gap_in_the_curve(night):
    x, y = curves.CURVES["loss"].points(read_log(night / "metrics.jsonl"))
    at = np.flatnonzero(x == 1200)
    assert np.isnan(y[at[0]])
    assert np.isfinite(y[at[1]])


def test_an_average_starts_again_after_a_gap(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in [*range(1, 101), *range(300, 401)]:
            write_record(file, "step", step, loss=1.0 if step < 200 else 3.0)
    _, y = curves.CURVES["loss"].points(read_log(tmp_path / "metrics.jsonl"), window=50)
    assert set(y[np.isfinite(y)]) == {1.0, 3.0}
    assert np.isnan(y).sum() == 1


def test_a_log_of_every_tenth_step_has_no_gaps(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(10, 1000, 10):
            write_record(file, "step", step, loss=1.0)
    assert np.isfinite(curves.CURVES["loss"].points(read_log(tmp_path / "metrics.jsonl"))[1]).all()


def test_pairs_per_second_is_all_pairs_by_all_time(tmp_path):
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step, ms in enumerate((100.0, 900.0), 1):
            write_record(file, "step", step, step_ms=ms, pairs_per_s=32 / ms * 1e3)
    assert read_log(tmp_path / "metrics.jsonl").recent_rate(50) == pytest.approx(64 / 1.0)


def test_a_long_log_read_in_parts_equals_one_read_at_once(night):
    log, parts = Log(night / "metrics.jsonl"), 0
    while log.refresh(100_000):
        parts += 1
    assert parts > 5
    assert_equals_plain_reader(log)


def assert_equals_plain_reader(log):
    """A log against its file: every line parsed by itself, and the last record of a step kept."""
    expected = read_log(log.path)
    steps, bad = {}, []
    for number, line in enumerate(log.path.read_bytes().split(b"\n")[:-1], 1):
        try:
            record = json.loads(line)
        except ValueError:
            bad.append(number)
            continue
        if record["kind"] == "step":
            if steps and record["step"] <= next(reversed(steps)):
                steps = {step: value for step, value in steps.items() if step < record["step"]}
            steps[record["step"]] = record["loss"]
    assert log.column("step").tolist() == list(steps)
    assert np.array_equal(log.column("loss"), np.array(list(steps.values()), float), equal_nan=True)
    assert (log.bad_lines, log.bad_line_count) == (bad, len(bad))
    assert log.columns.keys() == expected.columns.keys()
    for name in log.columns:
        assert np.array_equal(log.column(name), expected.column(name), equal_nan=True), name
    assert (log.records, log.events, log.last_step) == (expected.records, expected.events, expected.last_step)


def change_nothing(path):
    pass


def restart(path):
    append(path, "\n" + "".join(f'{{"kind": "step", "step": {step}, "loss": 7.0}}\n' for step in range(40, 4000)))


def replace(path):
    lines = path.read_text().split("\n")
    path.unlink()
    path.write_text("\n".join(lines[500:]))


def delete_most(path):
    path.write_text('{"kind": "step", "step": 1, "loss": 1.0}\n')


@pytest.mark.parametrize("change", [change_nothing, restart, replace, delete_most])
@pytest.mark.parametrize("parts", [1, 6])
def test_a_long_log_shows_its_newest_steps_first_and_then_equals_the_plain_reader(
    night, tmp_path, monkeypatch, change, parts
):
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 30_000)
    path = shutil.copytree(night, tmp_path / "run") / "metrics.jsonl"
    view = RunView(Run(path.parent))
    for _ in range(parts):
        view.refresh(100_000)
        assert view.fraction_read < 1
        assert view.log.column("step").tolist() == list(range(3001 - len(view.log), 3001))
        assert 10 < len(view.log) < 200
        assert view.log.last("eval")["step"] == 3000
    change(path)
    while view.fraction_read < 1 or view.refresh(100_000):
        view.refresh(100_000)
    assert_equals_plain_reader(view.log)


def test_the_terminal_says_that_the_history_is_being_read(night, monkeypatch):
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 30_000)
    view = RunView(Run(night))
    view.refresh(100_000)
    assert "newest steps; reading the history: 7.2 %, loss" in terminal_views.header_view(view, 100).plain
    assert len(curves.CURVES["loss"].points(view.log, "minutes")[0]) == 0  # unknown without the start
    view.refresh()
    assert "history" not in terminal_views.header_view(view, 100).plain


def test_the_terminal_reads_a_long_log_to_its_start(night, monkeypatch):
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 30_000)
    monkeypatch.setattr("m1clip.monitor.terminal.PART_BYTES", 100_000)

    shown, poll = [], Monitor.poll
    monkeypatch.setattr(Monitor, "poll", lambda app: (poll(app), shown.append(app.shown.log.column("step").tolist())))

    async def act(app, pilot):
        while app.shown.fraction_read < 1:
            await pilot.pause(0.01)

    app, screen = use_monitor(night, (100, 30), act)
    assert shown[0] == list(range(3001 - len(shown[0]), 3001))  # the newest steps
    assert len(shown[0]) < 200
    assert len(app.shown.log) == 2800
    assert "history" not in screen


def test_once_reads_a_long_log_in_parts(night, monkeypatch, capsys):
    monkeypatch.setattr("m1clip.monitor.log.PART_BYTES", 100_000)
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 30_000)
    assert run_command(["monitor", str(night), "--once"]) == 0
    in_parts = capsys.readouterr().out
    monkeypatch.undo()
    assert run_command(["monitor", str(night), "--once"]) == 0
    assert in_parts == capsys.readouterr().out


MANY = {
    "columns": [f'{{"kind": "step", "step": {step}, "a{step}": 1}}' for step in range(1, 2000)],
    "records": [f'{{"kind": "eval", "step": {step}}}' for step in range(1, 2000)],
    "events": [f'{{"kind": "event", "step": {step}}}' for step in range(1, 2000)],
    "bad lines": ["x" for _ in range(2000)],
    "numbers": [f'{{"kind": "step", "step": {step}, "loss": 1}}' for step in range(1, 2000)],
}


@pytest.mark.parametrize("content", MANY)
def test_one_log_holds_a_bounded_number_of_values_and_keeps_the_newest(tmp_path, monkeypatch, content):
    for name, limit in (("MAX_RECORDS", 100), ("MAX_NUMBERS", 4000), ("BLOCK_SIZE", 1024)):
        monkeypatch.setattr(f"m1clip.monitor.log.{name}", limit)
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(MANY[content]) + "\n")
    log = read_log(path)
    assert len(log.columns) <= 128
    assert len(log) * len(log.columns) <= 4000
    assert max(len(records) for records in (log.events, log.bad_lines, *log.records.values())) <= 100
    newest = [
        log.last_step,
        log.bad_line_count - 1,
        log.last("eval").get("step"),
        *(each["step"] for each in log.events),
    ]
    assert 1999 in newest


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_line_of_a_hundred_megabytes_is_not_held_in_memory(tmp_path, ending):
    """With 64 MB more than the imports need."""
    path = tmp_path / "metrics.jsonl"
    with open(path, "wb") as file:
        file.write(b'{"kind": "step", "step": 1, "loss": 1.0}\n')
        for _ in range(100):
            file.write(b"x" * 1_000_000)
        file.write(ending.encode())
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom m1clip.monitor.log import Log\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 64_000_000, -1))\n"
        "log = Log(Path(sys.argv[1]))\nlog.refresh()\nprint(log.last_step, log.bad_lines)\n"
    )
    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout == ("1 [2]\n" if ending else "1 []\n"), done.stderr


def test_a_log_that_is_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert len(read_log(tmp_path / "metrics.jsonl")) == 0


def test_an_endless_line_is_read_only_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    append(path, '{"kind": "step", "step": 1, "loss": 1.0}\n' + "x" * 3_000_000)
    log = read_log(path)
    with monkeypatch.context() as patch:
        patch.setattr(Log, "_read_blocks", lambda *_: pytest.fail("the file was read again"))
        assert not log.refresh()
    append(path, '\n{"kind": "step", "step": 2, "loss": 1.0}\n')
    log.refresh()
    assert log.column("step").tolist() == [1, 2]
    assert log.bad_lines == [2]


def test_minutes_are_those_of_the_steps(night):
    x, _ = curves.CURVES["mean_r1"].points(read_log(night / "metrics.jsonl"), "minutes")
    assert x[-1] == pytest.approx(2799 * 480.3 / 60_000, rel=1e-3)  # one of 2,800 steps has another time


def test_a_line_plot_has_ticks_and_a_dotted_chance_level():
    line = (np.arange(10.0), np.arange(10.0), "blue")
    plot = terminal_views.line_plot("title", [line], 40, 8, lambda value, digits: f"{value:.0f}", [0.0])
    rows = plot.plain.split("\n")
    assert len(rows) == 8
    assert rows[1].strip().startswith("9")
    assert rows[6].strip().startswith("0")
    assert "⡀" in rows[6]  # chance, along the bottom
    assert rows[7].split() == ["0", "9"]
    first = [next(i for i, letter in enumerate(row[4:]) if letter not in " ⡀") for row in rows[1:6]]
    assert first == sorted(first, reverse=True)  # it rises to the right


def test_a_line_without_points_is_drawn_beside_others():
    full, empty = ((np.arange(9.0), np.arange(9.0), ""), (np.empty(0), np.empty(0), ""))
    plots = [
        terminal_views.line_plot("", lines, 40, 8, lambda value, _: f"{value:.0f}").plain
        for lines in ([full], [empty, full])
    ]
    assert plots[0] == plots[1]


def test_a_line_plot_is_connected_between_points_and_broken_at_a_gap():
    x, y = np.array([0.0, 40.0, 60.0, 100.0]), np.array([0.0, 1.0, np.nan, 1.0])
    plot = terminal_views.line_plot("", [(x, y, "blue")], 60, 8, lambda value, _: f"{value:.0f}")
    rows = [row[2:] for row in plot.plain.split("\n")[1:7]]
    drawn = [any(row[column : column + 1].strip() for row in rows) for column in range(57)]
    assert all(drawn[:22])
    assert not any(drawn[25:54])
    assert drawn[56]


def test_a_bar_table_has_names_bars_and_labels():
    rows = {"forward": (0.5, "150 ms"), "[red]": (1.0, "x")}
    lines = render(terminal_views.bar_table(rows, "blue"), 26).split("\n")
    assert lines[0].split() == ["forward", "█████▌", "150", "ms"]
    assert lines[1].split() == ["[red]", 11 * "█", "x"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_every_view_fits_its_width(night, tmp_path, width):
    empty = create_run(tmp_path, "empty", "x", False)
    empty.write("config.json", {"epochs": 1})
    for path in (night, empty.path):
        run = read_view(path)
        header = terminal_views.header_view(run, width).plain
        assert all(len(row) <= width for row in header.split("\n")), header
        grid = render(terminal_views.curves_view([run], width, 20), width).rstrip("\n").split("\n")
        assert len(grid) <= 20
        assert "…" not in "".join(grid), grid  # nothing is cut off
    assert render(terminal_views.gradients_view(run, width), width)
    assert render(terminal_views.speed_view(run, width), width)


@pytest.mark.parametrize("device", ["cpu", "vision=mps,text=cpu"])
@pytest.mark.parametrize("name", ["nano-1", "a-run-with-a-name-of-more-than-forty-characters"])
def test_the_header_shows_the_device_at_80_columns(tmp_path, device, name):
    run = create_run(tmp_path, name, "x", False)
    run.write("config.json", {"epochs": 1})
    run.write("machine.json", {"device": device})
    with run.locked():
        run.write_status("running", 12_345, total=123_456, eta_s=9000.0)
        line = terminal_views.header_view(read_view(run.path), 80).plain.split("\n")[0]
    assert line.startswith(name[:6])
    assert f"  running  {device}  step 12,345 of 123,456" in line
    assert len(line) <= 80


def test_log_axes_are_labelled(night):
    run = read_view(night)
    titles = {key: terminal_views.curve_plot([run], key, 40, 6).plain.split("\n")[0] for key in curves.CURVES}
    assert [key for key, title in titles.items() if "(log)" in title] == ["grad_norm"]


def test_all_parts_of_the_memory_and_the_total_are_shown(night):
    text = render(terminal_views.speed_view(read_view(night), 100))
    assert "memory 1.20 GB RSS, peak 1.50 GB" in text
    for part, gb in MEMORY_GB.items():
        assert (f"{part} " in text and f"{1000 * gb:.1f} MB" in text) == (gb > 0), part


def test_energy_is_shown_where_it_was_measured(tmp_path, night):
    run = write_run(tmp_path / "measured", 1000, (5, 9), (), None, watts=36.0)
    text = render(terminal_views.speed_view(read_view(run), 100))
    assert "power 36 W, energy 4.80 Wh" in text  # 36 W for 1,000 steps of 0.48 s
    assert "last epoch 4.80 Wh, R@1 per Wh 0.208" in text
    assert "last epoch" not in render(terminal_views.speed_view(read_view(night), 100))


def test_unexpected_values_do_not_break_a_view(tmp_path):
    run = create_run(tmp_path, "odd", "x", False)
    run.write("config.json", {"epochs": 1})
    norms = {"vision.a": None, "text.b": 0.0, "c": "x"}
    run.log("diagnostics", 1, grad_norms=norms, memory_gb=None, cpu_percent=[None, 3])
    run.log("event", 1, event="diagnosis", about="\x1b[2Jx", text=None)
    run.log("eval", 1, mean_r1=None)
    append(run.path / "metrics.jsonl", '{"kind": "event", "step": 1}\n')
    text = render(terminal_views.snapshot(read_view(run.path), 80), 80)
    assert "\x1b" not in text
    assert "core 0" in text
    assert "?[2Jx: None" in text


def test_a_run_without_a_process_is_shown_as_dead_with_the_reason(night):
    lines = terminal_views.header_view(read_view(night), 100).plain.split("\n")
    assert lines[0].startswith("night  dead  cpu  step 3,000 of 3,000  100.0 %")
    assert lines[1].startswith("its process 1 is gone; resume: m1clip train --resume --name")


def test_once_prints_all_views_and_how_to_resume_a_dead_run(night, capsys):
    assert run_command(["monitor", str(night), "--once"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("night  dead")
    for text in ("(chance 5.55)", "validation R@1", "forward", "text.blocks.3", "throttling"):
        assert text in out, text
    assert out.rstrip().split("\n")[-1].startswith("resume: ")
    assert run_command(["monitor", str(night), "--once", "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["state"], state["last_step"]["step"], state["eval"]["step"]) == ("dead", 3000, 3000)
    assert state["diagnostics"]["memory_gb"] == MEMORY_GB


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--json"], "--json needs --once"),
        (["--once", "--web"], "exclude each other"),
        (["--token", "x"], "need --web"),
        (["--web", "--token", ""], "--token must be ASCII"),
        (["--web", "--token", "пароль"], "--token must be ASCII"),
        (["--web", "--host", "0.0.0.0"], "needs a --token"),
        (["--web", "--port", "0"], "--port must be 1–65535, not 0"),
        (["nowhere"], "no run 'nowhere'"),
    ],
)
def test_wrong_flags_are_usage_errors(flags, message, capsys, tmp_path):
    assert run_command(["monitor", *flags, "--runs", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_without_a_terminal_the_error_names_the_alternatives(night, capsys):
    assert run_command(["monitor", str(night)]) == 2
    assert "--once" in capsys.readouterr().err


def screen_text(app):
    return "\n".join("".join(part.text for part in strip) for strip in app.screen._compositor.render_strips())


def use_monitor(path, size, act):
    """Run the real application at a terminal size, driven by keys; return it and its last screen."""

    async def run():
        app = Monitor(path.parent, Run(path))
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(app, pilot)
            await pilot.pause()
            assert app.error is None
            return app, screen_text(app)

    return asyncio.run(run())


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (50, 15)])
def test_every_view_of_the_terminal_opens(night, size):
    screens = {}

    async def act(app, pilot):
        for key in "12345":
            await pilot.press(key)
            await pilot.pause()
            screens[key] = screen_text(app)

    use_monitor(night, size, act)
    expected = {"1": "loss", "2": "forward", "3": "vision.blocks", "4": "throttling", "5": "night"}
    for key, text in expected.items():
        assert text in screens[key], screens[key]
        assert "dead" in screens[key]


def test_the_list_of_runs_shows_the_device_at_80_columns(tmp_path):
    write_run(tmp_path / "a-run-with-a-name-of-more-than-forty-characters", 60, (5, 9), (), None)
    write_run(tmp_path / "b", 60, (5, 9), (), None)

    async def act(app, pilot):
        await pilot.press("5")

    _, screen = use_monitor(tmp_path / "b", (80, 24), act)
    rows = [line for line in screen.split("\n") if "100.0 %" in line and "cpu" in line]
    assert len(rows) == 3  # the header and both runs
    assert any("a-run-with-a-na…" in row for row in rows)


def test_markup_in_names_is_text_and_the_cursor_stays_on_its_run(tmp_path):
    for number, name in enumerate(("[x]", "b[red]")):
        write_run(tmp_path / name, 60, (5, 9), (), None)
        (tmp_path / name / "machine.json").write_text('{"device": "[/x]", "chip": "[bold"}')
        os.utime(tmp_path / name / "config.json", (number, number))

    async def act(app, pilot):
        await pilot.press("5", "down")
        write_run(tmp_path / "third", 60, (5, 9), (), None)
        (tmp_path / "b[red]" / "status.json").write_text('{"state": ["x"], "step": "many", "total": {}}')
        app.poll()
        await pilot.pause()
        assert app._selected() == "[x]"
        shutil.rmtree(tmp_path / "third")
        app.poll()
        await pilot.press("2", "4", "5")

    _, screen = use_monitor(tmp_path / "b[red]", (120, 30), act)
    assert "b[red]" in screen
    assert "[/x]" in screen


def test_runs_are_listed_selected_and_compared(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, 300, (100, 110), (), None)
        os.utime(tmp_path / name / "config.json", (1, 1) if name == "one" else (2, 2))

    async def compare(app, pilot):
        await pilot.press("5", "down", "space")  # the newest is first: below it, "one"
        await pilot.press("1")
        await pilot.pause()

    app, screen = use_monitor(tmp_path / "two", (100, 30), compare)
    assert [view.name for view in app.views] == ["two", "one"]
    assert "━ two  ━ one" in screen

    async def select(app, pilot):
        await pilot.press("5", "down", "enter")
        await pilot.pause()

    app, screen = use_monitor(tmp_path / "two", (100, 30), select)
    assert app.shown.name == "one"
    assert screen.lstrip().startswith("one")


def test_the_terminal_follows_a_growing_log_pauses_and_changes_colors(tmp_path):
    path = write_run(tmp_path / "a", 300, (100, 110), (), None, partial_line=False)

    async def act(app, pilot):
        for step, key in ((301, "p"), (302, "t")):
            with open(path / "metrics.jsonl", "a") as file:
                write_step(file, step, 400, 0.0)
            app.poll()
            assert app.shown.log.column("step")[-1] == 301  # paused before step 302
            await pilot.press(key)
        await pilot.press("s")
        assert app.theme == "ansi-light"

    _, screen = use_monitor(path, (100, 30), act)
    assert "paused" in screen
    assert "every step" in screen


@pytest.mark.slow
def test_a_run_that_is_killed_while_shown_becomes_dead(tmp_path):
    """A real process that holds the lock of the run, as training does, and is killed with SIGKILL."""
    run = create_run(tmp_path, "a", "x", False)
    run.write("config.json", {"epochs": 1})
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom m1clip.run import Run\n"
        "run = Run(Path(sys.argv[1]))\nwith run.locked():\n    run.write_status('running', 5, total=9)\n"
        "    print('up', flush=True)\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE, text=True)
    process.stdout.readline()

    async def act(app, pilot):
        assert app.shown.summary["state"] == "running"
        process.kill()
        process.wait()
        app.poll()
        await pilot.pause()

    app, screen = use_monitor(run.path, (80, 24), act)
    assert app.shown.summary["state"] == "dead"
    assert f"its process {process.pid} is gone" in screen


@pytest.mark.parametrize("module", ["terminal", "web"])
def test_slow_libraries_are_not_imported_before_the_first_screen(module):
    slow = ["torch", "matplotlib", "pandas", "pyarrow", "plotly", "jinja2", "markdown_it", "m1clip.training"]
    code = f"import sys, m1clip.monitor.{module}; print([name for name in {slow} if name in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() in ("[]", "['markdown_it']")  # Rich and Textual use markdown_it for their own


def test_an_error_of_the_application_is_one_sentence_and_exit_code_1(night, monkeypatch, capsys):
    """Textual alone would print a traceback and exit with 0."""
    monkeypatch.setattr("m1clip.monitor.terminal.curves_view", lambda *_: 1 / 0)
    for stream in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    run_app = Monitor.run
    monkeypatch.setattr(Monitor, "run", lambda app: run_app(app, headless=True))
    assert run_command(["monitor", str(night)]) == 1
    assert capsys.readouterr().err == "m1clip: division by zero\n"
