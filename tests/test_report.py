"""The report: every number stands in the run's own files, and what was not measured is said to be so."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import tiny_config, tiny_run_config

from longlog import write_run
from m1clip.cli import run as command
from m1clip.monitor import report
from m1clip.monitor.log import Followed
from m1clip.monitor.values import interval
from m1clip.run import Run
from trained import trained


@pytest.fixture(scope="module")
def two(tmp_path_factory, own_cache):
    """Two real runs of 8 steps that differ in their rate."""
    folder = tmp_path_factory.mktemp("runs")
    config = replace(tiny_run_config(tiny_config()), inspect_every=3)
    for name, lr in (("a", 1e-3), ("b", 3e-3)):
        trained(replace(config, lr=lr), folder / name)
    return folder


@pytest.fixture(scope="module")
def written(two):
    assert command(["report", "a", "--runs", str(two)]) == 0
    return (two / "a" / "report" / "report.md").read_text(), (two / "a" / "report" / "report.html").read_text()


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def table_under(text, heading):
    part = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in part.splitlines() if line.startswith("|")]
    return rows[:1] + rows[2:]


def test_the_epoch_table_says_what_the_lines_it_names_say(two, written):
    lines = lines_of(two / "a")
    rows = table_under(written[0], "Epochs")
    assert rows[0][-1] == "line"
    for row in rows[1:-1]:
        record = lines[int(row[-1]) - 1]
        assert record["kind"] == "epoch"
        assert row[0] == str(record["epoch"])
        assert row[1] == f"{record['loss']:.3f}"
        assert float(row[2].rstrip(" %")) == pytest.approx(100 * record["accuracy"], abs=0.06)
        assert row[7] == f"{record['seconds']:,.1f}"
        score = next(one for one in lines if one["kind"] == "eval" and one["step"] == record["step"])
        assert float(row[3].rstrip(" %")) == pytest.approx(100 * score["i2t_r1"], abs=0.06)
    assert rows[-1][:2] == ["chance", f"{math.log(16):.3f}"]


def test_phases_memory_and_gradients_are_those_of_the_log(two, written):
    lines = lines_of(two / "a")
    steps = [one for one in lines if one["kind"] == "step"]
    logger = [one for one in lines if one["kind"] == "logger"]
    for row in table_under(written[0], "Where the time of a step goes")[1:]:
        key = f"{row[0]}_ms"
        middle = np.median([one[key] for one in steps])
        assert float(row[1].replace(",", "")) == pytest.approx(middle, rel=6e-3), key
    blocks = {row[0]: row for row in table_under(written[0], "Gradient flow by layer")[1:]}
    assert set(blocks) == set(logger[-1]["grad_norms"])
    for name, row in blocks.items():
        assert float(row[3]) == pytest.approx(logger[-1]["grad_norms"][name], rel=6e-3)
    parts = {row[0] for row in table_under(written[0], "Memory by part")[1:]}
    assert parts == {name for name, size in logger[-1]["memory_gb"].items() if size}


def test_negatives_by_difficulty_are_told_with_their_definition_and_chance(two, written):
    last = [one for one in lines_of(two / "a") if one["kind"] == "eval"][-1]
    rows = table_under(written[0], "Accuracy by difficulty of the negative")
    found = {row[0]: row for row in rows[1:]}
    for name in ("easy", "medium", "hard"):
        assert float(found[name][4].rstrip(" %")) == pytest.approx(100 * last["negatives"][name]["pairwise"], abs=0.06)
    assert found["chance"][3] == "50.0 %"
    assert "tf-idf" in written[0]


def test_what_was_not_measured_is_said_to_be_so(written):
    energy = written[0].split("## EnergyMeter and heat")[1].split("\n## ")[0]
    assert energy.count("not measured") >= 2 or "W in" in energy
    assert "Wh (line" in energy or "EnergyMeter was not measured." in energy


def test_how_to_repeat_it_names_the_command_the_versions_and_the_seed(two, written):
    part = written[0].split("## How to repeat it")[1]
    assert f"m1clip train --config {two / 'a' / 'config.json'}" in part
    assert "torch" in part
    assert "Seed 0" in part
    assert json.loads((two / "a" / "data.json").read_text())["identity"] in part


def test_the_html_holds_everything_and_the_markdown_its_images_beside_it(two, written):
    markdown, html = written
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "<script" not in html
    images = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(images) >= 5
    assert all((two / "a" / "report" / name).is_file() for name in images)
    assert html.count("data:image/png;base64,") == len(images)


def test_parameters_are_counted_from_the_saved_weights(two):
    from m1clip.model.clip import load

    count = sum(weight.numel() for weight in load(two / "a" / "model").parameters())
    assert report.parameters(Followed(Run(two / "a"))) == count


def test_two_runs_are_compared_by_what_differs(two, tmp_path, capsys):
    assert command(["report", "a", "b", "--runs", str(two), "--out", str(tmp_path / "doc"), "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)
    text = Path(paths["markdown"]).read_text()
    differs = {row[0]: row[1:] for row in table_under(text, "What differs")[1:]}
    assert differs["lr"] == ["0.001", "0.003"]
    assert "batch" not in differs
    scores = table_under(text, "validation retrieval at the last evaluation")
    for row, name in zip(scores[1:], "ab", strict=True):
        record = lines_of(two / name)[int(row[-1]) - 1]
        assert row[1].startswith(f"{100 * record['i2t_r1']:.1f} %")
    assert "chance can make such a difference between equals" in text  # with 16 validation images
    assert "data:image/png" in Path(paths["html"]).read_text()


def test_a_log_with_every_accident_has_its_report(tmp_path, capsys):
    folder = write_run(tmp_path / "night", 3000, (1000, 1200), (500, 501), 1800)
    assert command(["report", str(folder)]) == 0
    text = (folder / "report" / "report.md").read_text()
    assert "Steps without a line: 1,000 to 1,199." in text
    assert "2 steps made no update" in text
    assert "as after a restart" in text
    assert "Lines that cannot be read: 1" in text
    assert "dead: its process 1 is gone" in text
    assert "size unknown" in text


def test_a_run_of_which_nothing_is_known_has_a_report_that_says_so(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text('{"epochs": 1}')
    (folder / "retrievals.json").write_text('{"queries": [{"group"')
    assert command(["report", str(folder)]) == 0
    text = (folder / "report" / "report.md").read_text()
    assert text.count("Not measured") >= 4
    assert "No epoch has ended." in text
    assert (
        command(
            [
                "report",
                str(folder),
                str(write_run(tmp_path / "x", 40, (5, 9), (), None)),
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )


@pytest.mark.parametrize("words", [["nobody"], ["a", "a"], ["a", "RUNS/a"]])
def test_runs_that_are_not_there_or_named_twice_are_refused(two, words, capsys):
    words = [word.replace("RUNS", str(two)) for word in words]
    assert command(["report", *words, "--runs", str(two)]) == 2
    assert capsys.readouterr().err.startswith("m1clip: ")


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Of many draws from a known part, about 95 % of the intervals contain it."""
    rng = np.random.default_rng(0)
    for truth, of in ((0.5, 100), (0.9, 240), (0.02, 240)):
        ends = np.array([interval(count / of, of) for count in rng.binomial(of, truth, 2000)])
        held = ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean()
        assert 0.92 < held < 0.985
    assert interval(1.0, 240)[0] == pytest.approx(0.9843, abs=1e-4)
    assert interval(0.0, 0) == (0.0, 1.0)
