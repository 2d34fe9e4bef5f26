"""Reports: every number is in the run's own files, and what was not measured is reported as such."""

import base64
import io
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import tiny_config, tiny_run_config
from long_log import MEMORY_GB, write_eval, write_run
from m1clip.cli import run_command
from m1clip.monitor.report import wilson_interval
from m1clip.run import Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of 2,000 steps that differ in their learning rate; the energy of `a` was measured."""
    folder = tmp_path_factory.mktemp("runs")
    for name, lr, watts in (("a", 1e-3, 36.0), ("b", 3e-3, None)):
        write_run(folder / name, 2000, (1510, 1511), (), None, watts=watts, seed=0)
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {"lr": lr}))
        (folder / name / "data.json").write_text(json.dumps({"identity": "rows-1", "train": 12_000, "val": 240}))
        (folder / name / "machine.json").write_text(json.dumps({"torch": "2.9", "python": "3.11", "os": "Linux"}))
    return folder


@pytest.fixture(scope="module")
def report(runs):
    """The Markdown and the HTML of the report of `a`."""
    assert run_command(["report", "a", "--runs", str(runs)]) == 0
    return tuple((runs / "a" / "report" / f"report.{kind}").read_text() for kind in ("md", "html"))


def read_records(folder):
    return [json.loads(line) if line[-1] == "}" else {} for line in (folder / "metrics.jsonl").read_text().splitlines()]


def section(text, heading):
    return text.split(f"## {heading}\n")[1].split("\n## ")[0]


def table_rows(text, heading):
    lines = [line for line in section(text, heading).splitlines() if line.startswith("|")]
    rows = [re.split(r"\s*\|\s*", line.strip("| ")) for line in lines]
    return rows[:1] + rows[2:]


def as_fraction(cell):
    return float(cell.split("%")[0]) / 100


def test_the_epoch_table_has_the_values_of_the_lines_it_names(runs, report):
    records = read_records(runs / "a")
    header, *rows, chance = table_rows(report[0], "Epochs")
    assert header[-1] == "line"
    assert len(rows) == 2
    for row in rows:
        epoch = records[int(row[-1]) - 1]
        assert epoch["kind"] == "epoch"
        assert row[0] == str(epoch["epoch"])
        assert float(row[1]) == pytest.approx(epoch["loss"], rel=1e-3)
        assert as_fraction(row[2]) == pytest.approx(epoch["accuracy"], abs=6e-4)
        assert float(row[7]) == epoch["seconds"]
        score = next(one for one in records if one.get("kind") == "eval" and one["step"] == epoch["step"])
        assert as_fraction(row[3]) == pytest.approx(score["i2t_r1"], abs=6e-4)
    assert chance[0] == "chance"
    assert float(chance[1]) == pytest.approx(math.log(256), abs=1e-3)


def test_the_energy_of_each_epoch_is_reported_if_it_was_measured(runs, report, tmp_path):
    header, *rows, _ = table_rows(report[0], "Epochs")
    assert header[-4:] == ["Wh", "Wh so far", "R@1 per Wh", "line"]
    score = next(one for one in read_records(runs / "a") if one.get("kind") == "eval")["mean_r1"]
    assert [float(cell) for cell in rows[0][-4:-1]] == pytest.approx([4.8, 4.8, score / 4.8], abs=6e-3)
    assert float(rows[1][-3]) == pytest.approx(9.6)
    energy = section(report[0], "Energy and CPU temperature")
    assert "Power: 36 to 36 W in 40 readings." in energy
    assert "Energy up to step 2,000: 9.60 Wh (line " in energy
    assert run_command(["report", "b", "--runs", str(runs), "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Wh" not in " ".join(table_rows(text, "Epochs")[0])
    assert "Power was not measured" in text
    assert "Energy was not measured" in text
    assert "CPU temperature was not measured" in text


def test_step_times_are_medians_of_the_log(runs, report):
    steps = [one for one in read_records(runs / "a") if one.get("kind") == "step"]
    rows = table_rows(report[0], "Step time by phase")[1:]
    assert [row[0] for row in rows] == ["data", "copy", "forward", "backward", "optimizer", "step"]
    for row in rows:
        expected = np.median([one[f"{row[0]}_ms"] for one in steps if f"{row[0]}_ms" in one])
        assert float(row[1]) == pytest.approx(expected, rel=6e-3), row
    assert sum(as_fraction(row[-1]) for row in rows[:-1]) == pytest.approx(1, abs=2e-3)


def test_all_parts_of_the_memory_and_the_rss_are_reported(report):
    rows = {row[0]: row[1:] for row in table_rows(report[0], "Memory by part")[1:]}
    assert set(rows) == {*MEMORY_GB, "process (RSS)"}
    for name, gb in MEMORY_GB.items():
        assert rows[name] == 2 * [f"{1000 * gb:.1f} MB"]
    assert rows["process (RSS)"] == 2 * ["1.20 GB"]


def test_gradient_norms_are_those_of_the_first_and_the_last_record(runs, report):
    diagnostics = [one for one in read_records(runs / "a") if one.get("kind") == "diagnostics"]
    rows = {row[0]: row[1:] for row in table_rows(report[0], "Gradient flow by layer")[1:]}
    assert set(rows) == set(diagnostics[-1]["grad_norms"])
    for name, cells in rows.items():
        norms = [one["grad_norms"][name] for one in diagnostics]
        expected = [norms[0], np.median(norms), norms[-1], norms[-1] / 10]
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=6e-2)


def test_recalls_have_intervals_and_chance(runs, report):
    last = [one for one in read_records(runs / "a") if one.get("kind") == "eval"][-1]
    rows = table_rows(report[0], "Validation retrieval")[1:]
    assert [row[0] for row in rows] == ["image→text", "chance", "text→image", "chance"]
    low, high = wilson_interval(last["i2t_r1"], 240)
    assert rows[0][1] == f"{100 * last['i2t_r1']:.1f} % ({100 * low:.1f}–{100 * high:.1f})" or last["i2t_r1"] > 0.9995
    assert rows[1][1:] == ["0.4 %", "2.1 %", "4.2 %", "120.5"]


def test_accuracy_by_difficulty_has_its_definition_and_chance(runs, report):
    last = [one for one in read_records(runs / "a") if one.get("kind") == "eval"][-1]
    header, *rows = table_rows(report[0], "Accuracy by difficulty of the negatives")
    assert header[3:] == ["1 of 2, step 1,000", "1 of 2, step 2,000", "1 of 11, step 1,000", "1 of 11, step 2,000"]
    by_tier = {row[0]: row for row in rows}
    for name in ("easy", "medium", "hard"):
        assert as_fraction(by_tier[name][4]) == pytest.approx(last["hard_negatives"][name]["pairwise"], abs=6e-4)
    assert by_tier["chance"][3:] == ["50.0 %", "50.0 %", "9.1 %", "9.1 %"]
    assert "tf-idf" in section(report[0], "Accuracy by difficulty of the negatives")


def test_how_to_repeat_it_has_the_command_the_versions_and_the_changed_settings(runs, report):
    text = section(report[0], "How to repeat it")
    assert f"m1clip train --config {runs / 'a' / 'config.json'}" in text
    assert "torch 2.9, Python 3.11; Linux" in text
    assert "identity rows-1" in text
    assert "- epochs 100 (preset 3)\n" in text
    assert "- lr 0.001 (preset 0.003)\n" in text
    assert "batch_size" not in text


def test_the_html_has_all_figures_embedded_and_loads_nothing(runs, report):
    markdown, html = report
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert "<script" not in html
    figures = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert figures == ["training.png", "step_time.png", "temperature.png", "gradients.png"]
    assert all((runs / "a" / "report" / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    assert html.count("data:image/png;base64,") == len(figures)


def test_captions_and_reasons_cannot_add_html_or_markdown(tmp_path):
    folder = write_run(tmp_path / "x_<b>*", 60, (5, 9), (), None)
    status = {"state": "failed", "step": 60, "reason": "<img src=x>\n\n# Heading\n| a | b |"}
    (folder / "status.json").write_text(json.dumps(status))
    hit = {"row": 0, "score": 0.5}
    query = {
        "group": "errors",
        "text": "![](http://x) <script>",
        "truth": 0,
        "rank": 1,
        "true_score": 0.5,
        "top": [hit],
    }
    (folder / "retrievals.json").write_text(json.dumps({"step": 1, "queries": [query], "shown": {}}))
    assert run_command(["report", str(folder)]) == 0
    page = (folder / "report" / "report.html").read_text()
    assert "<h1>x_&lt;b&gt;*: training report</h1>" in page
    assert "failed: &lt;img src=x&gt;  # Heading | a | b |</td>" in page
    assert "“![](http://x) &lt;script&gt;”" in page
    assert len(re.findall("<h1>", page)) == 1


def test_the_images_of_example_queries_are_embedded_and_the_true_one_is_marked(tmp_path):
    folder = write_run(tmp_path / "x", 60, (5, 9), (), None)
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(buffer, "JPEG")
    images = {"3": {"jpeg": base64.b64encode(buffer.getvalue()).decode(), "caption": "a|b"}, "4": {"jpeg": "broken"}}
    top = [{"row": row, "score": 0.9 - row / 10, "same_caption": row == 4} for row in (4, 5)]
    query = {"group": "errors", "text": "red", "truth": 3, "rank": 9, "true_score": 0.25, "top": top}
    (folder / "retrievals.json").write_text(json.dumps({"step": 1, "queries": [query], "shown": images}))
    assert run_command(["report", str(folder)]) == 0
    text = section((folder / "report" / "report.md").read_text(), "Example queries")
    assert "| 1. 0.500 same caption | 2. 0.400 | 9. 0.250 true |\n| --- | --- | --- |\n" in text
    assert '| no image | no image | ![a\\|b](examples/errors-1-3.jpg "the true image") |' in text
    assert (folder / "report" / "examples" / "errors-1-3.jpg").read_bytes() == buffer.getvalue()
    page = (folder / "report" / "report.html").read_text()
    assert re.search('<img src="data:image/jpeg;base64,[^"]+" alt="a.b" title="the true image"', page)


def test_two_runs_are_compared_by_what_differs(runs, tmp_path, capsys):
    assert run_command(["report", "a", "b", "--runs", str(runs), "--out", str(tmp_path / "doc"), "--json"]) == 0
    paths = json.loads(capsys.readouterr().out)
    text = Path(paths["markdown"]).read_text()
    assert table_rows(text, "What differs")[1:] == [["lr", "0.001", "0.003"]]
    for row, name in zip(table_rows(text, "Validation retrieval at the last evaluation")[1:], "ab", strict=True):
        record = read_records(runs / name)[int(row[-1]) - 1]
        assert row[0] == name
        assert as_fraction(row[1]) == pytest.approx(record["i2t_r1"], abs=6e-4)
    assert "the difference is not significant" in text
    costs = {row[0]: row for row in table_rows(text, "Time, memory, energy")[1:]}
    assert costs["a"][-2] == "9.60 Wh"
    assert costs["b"][-2:] == ["–", "–"]
    assert costs["a"][4] == "16 min 00 s"  # 1,999 steps of 480.3 ms
    assert Path(paths["html"]).read_text().count("data:image/png") == 1


def test_a_clear_difference_is_significant(runs, tmp_path):
    for name, steps in (("low", 20_000), ("high", 1000)):
        folder = write_run(tmp_path / name, 40, (5, 9), (), None, partial_line=False)
        with open(folder / "metrics.jsonl", "a") as file:
            write_eval(file, 1000, steps)
    assert run_command(["report", str(tmp_path / "low"), str(tmp_path / "high"), "--out", str(tmp_path / "doc")]) == 0
    text = (tmp_path / "doc" / "comparison.md").read_text()
    assert "high has the highest mean R@1" in text
    assert "the difference is significant" in text


def test_gaps_restarts_skipped_steps_and_bad_lines_are_reported(tmp_path):
    folder = write_run(tmp_path / "night", 3000, (1000, 1200), (500, 501), 1800)
    assert run_command(["report", str(folder)]) == 0
    text = (folder / "report" / "report.md").read_text()
    assert "Steps that are not logged: 1,000 to 1,199." in text
    assert "was not finite: 2." in text
    assert "after a restart, in 2 places" in text
    assert "Lines that cannot be parsed: 1 (" in text
    assert "dead: its process 1 is gone" in text
    assert "unknown number of parameters" in text


def test_the_report_of_an_empty_run_says_what_was_not_measured(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text('{"epochs": 1}')
    (folder / "retrievals.json").write_text('{"queries": [{"group"')
    assert run_command(["report", str(folder)]) == 0
    text = (folder / "report" / "report.md").read_text()
    sections = ("Validation retrieval", "Curves", "Step time by phase", "Memory by part", "Temperature")
    sections += ("Gradient flow by layer", "Accuracy by difficulty of the negatives", "Example queries")
    for heading in sections:
        assert section(text, heading).strip().startswith("Not measured"), heading
    assert "No epoch has ended." in text
    other = write_run(tmp_path / "x", 40, (5, 9), (), None)
    assert run_command(["report", str(folder), str(other), "--out", str(tmp_path / "o")]) == 0
    assert "Not evaluated: empty, x." in (tmp_path / "o" / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("names", "message"),
    [(["nobody"], "no run 'nobody'"), (["a", "a"], "named twice"), (["a", "RUNS/a"], "named twice")],
)
def test_missing_and_repeated_runs_are_usage_errors(runs, names, message, capsys):
    names = [name.replace("RUNS", str(runs)) for name in names]
    assert run_command(["report", *names, "--runs", str(runs)]) == 2
    assert message in capsys.readouterr().err


def test_intervals_contain_the_truth_as_often_as_they_claim():
    rng = np.random.default_rng(0)
    for truth, count in ((0.5, 100), (0.9, 240), (0.02, 240)):
        bounds = np.array([wilson_interval(hits / count, count) for hits in rng.binomial(count, truth, 2000)])
        covered = ((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])).mean()
        assert 0.92 < covered < 0.985
    assert wilson_interval(1.0, 240)[0] == pytest.approx(0.9843, abs=1e-4)
    assert wilson_interval(0.0, 0) == (0.0, 1.0)


@pytest.mark.slow
def test_the_report_of_a_real_run_has_every_section(tmp_path, own_cache):
    """The field names that training writes are those that the report reads."""
    from helpers import train_run
    from m1clip.model.clip import load

    config = replace(tiny_run_config(tiny_config()), log_every=1)
    train_run(config, tmp_path / "a")
    assert run_command(["report", str(tmp_path / "a")]) == 0
    text = (tmp_path / "a" / "report" / "report.md").read_text()
    assert "Not measured" not in text.replace("Not measured: no evaluation, or too few validation pairs.", "")
    for heading in ("Epochs", "Step time by phase", "Memory by part", "Gradient flow by layer"):
        cells = [cell for row in table_rows(text, heading)[1:] for cell in row[:4]]
        assert "–" not in cells, (heading, cells)
    assert {row[0] for row in table_rows(text, "Memory by part")[1:]} >= {"libraries", "allocator"}
    assert [row[1] for row in table_rows(text, "Validation retrieval")[1:]][1::2] != ["–", "–"]
    parameters = sum(weight.numel() for weight in load(Run(tmp_path / "a").model).parameters())
    assert f"{parameters / 1e6:.3g} M parameters" in text
