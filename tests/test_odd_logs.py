"""Whatever is in a run's files, every view of the monitor shows it or says that it is unknown."""

import csv
import json

import matplotlib.pyplot as plt
import pytest
from starlette.testclient import TestClient

from long_log import write_run
from m1clip.cli import run_command
from m1clip.monitor import report, web

RECORDS = {
    "wrong containers": {
        "kind": "diagnostics",
        "grad_norms": [1],
        "weight_norms": 3,
        "memory_gb": [2],
        "cpu_percent": 7,
    },
    "nulls and text in containers": {
        "kind": "diagnostics",
        "cpu_percent": [None, 3, "x"],
        "grad_norms": {"vision.a": None, "b": "x"},
        "memory_gb": {"data": None, "batch": "x", "ema": -1},
    },
    "text for numbers": {
        "kind": "diagnostics",
        **{"joules": "x", "power_w": "y", "temperature_c": [], "time": "noon", "rss_gb": {}},
    },
    "empty diagnostics": {"kind": "diagnostics"},
    "an evaluation of text": {"kind": "eval", "mean_r1": "x", "images": "x", "captions": [], "chance_r1": {}},
    "an evaluation without images": {"kind": "eval", "mean_r1": 0.5},
    "hard negatives as a list": {"kind": "eval", "mean_r1": 0.5, "images": 9, "hard_negatives": [1]},
    "empty hard negatives": {"kind": "eval", "mean_r1": 0.5, "images": 9, "hard_negatives": {"hard": {}, "easy": 3}},
    "an epoch of text": {"kind": "epoch", "loss": "x", "joules": "x", "wh_so_far": 0, "mean_r1_per_wh": []},
    "an empty event": {"kind": "event", "event": None, "time": "x"},
    "an event with markup": {
        "kind": "event",
        "event": "diagnosis",
        "about": "<script>[/x]",
        "text": "$x_$ \x1b[2J\n\n# y",
    },
    "huge numbers": {"kind": "step", "loss": 1e308, "grad_norm": -1e308, "step_ms": 1e308, "accuracy": 10**400},
    "text in a step": {"kind": "step", "loss": "x", "time": [], "step_ms": None, "a,b": 1, "=cmd()": 2},
    "a log of an older version": {"kind": "watch", "grad_norms": {"a": 1.0}, "side": 64, "wait_ms": 1.0},
}
FILES = {
    "status.json": ["[]", "{}", '{"state": 3, "step": "x", "total": -1, "time": "x", "eta_s": []}', "[" * 20_000],
    "machine.json": ["[]", '{"plan": [], "device": {}, "chip": 3}', "\x00"],
    "config.json": ['{"epochs": 1, "batch_size": "x", "data": ["a"], "preset": {}, "seed": null}'],
    "data.json": ['{"identity": 3, "train": "x"}', "3"],
    "retrievals.json": [
        '{"queries": {}, "shown": []}',
        '{"queries": [{"text": "x"}, 3, {"group": "errors", "text": "$a_$", "truth": 1, "rank": 2, '
        '"true_score": 0.1, "top": [{"row": 3, "score": 0.5}]}], "shown": {"3": {"jpeg": 5}, "1": 7}}',
        '{"queries": [',
    ],
}


@pytest.fixture(autouse=True)
def quick_figures(request, monkeypatch):
    """Saving takes a second per report; it is done where the values themselves could break it."""
    if not {"huge numbers", "$x_$", "日本"} & {str(value) for value in request.node.callspec.params.values()}:
        monkeypatch.setattr(report, "save_figure", save_nothing)


def save_nothing(figure, path):
    path.write_bytes(b"")
    plt.close(figure)


def show_everywhere(folder):
    """Text, JSON, web API and report of a run; none may fail. Returns the report."""
    assert run_command(["monitor", str(folder), "--once"]) == 0
    assert run_command(["monitor", str(folder), "--once", "--json"]) == 0
    client = TestClient(web.create_app(web.RunCache(folder.parent)), base_url="http://127.0.0.1")
    keys = "&".join(f"key={key}" for key in web.CURVES)
    name = folder.name
    for path in ("runs", f"run/{name}", f"run/{name}/retrievals", f"curves?run={name}&{keys}"):
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 200, path
        json.loads(answer.text, parse_constant=pytest.fail)  # strict: no NaN
    header = next(csv.reader([client.get(f"/api/run/{name}/metrics.csv").text.splitlines()[0]]))
    assert all(field.isidentifier() for field in header)
    assert run_command(["report", str(folder)]) == 0
    return (folder / "report" / "report.md").read_text()


@pytest.mark.parametrize("name", RECORDS)
def test_unexpected_records_are_shown_or_unknown(tmp_path, capsys, name):
    folder = write_run(tmp_path / "odd", 60, (10, 12), (), None, partial_line=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 61, **RECORDS[name]}) + "\n")
    markdown = show_everywhere(folder)
    assert "nan" not in markdown.lower().replace("nano", "")
    assert "<script>" not in markdown
    assert "\n# y" not in markdown
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FILES.items() for text in texts])
def test_unexpected_files_are_shown_or_unknown(tmp_path, name, text):
    folder = write_run(tmp_path / "odd", 60, (10, 12), (), None)
    write_run(tmp_path / "other", 60, (10, 12), (), None)
    (folder / name).write_text(text)
    show_everywhere(folder)
    assert run_command(["report", str(folder), str(tmp_path / "other"), "--out", str(tmp_path / "doc")]) == 0
    assert run_command(["runs", "--runs", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["a b", "日本", "#1", "100%", 'it\'s "x"', "[b]", "$x_$", "-dash", "a&b=c", "a|b"])
def test_unusual_run_names_work_everywhere(tmp_path, name, capsys):
    folder = write_run(tmp_path / name, 60, (10, 12), (), None)
    assert run_command(["runs", "--runs", str(tmp_path)]) == 0
    assert f"\n{name} " in capsys.readouterr().out
    assert run_command(["monitor", str(folder), "--once"]) == 0
    assert run_command(["report", str(folder)]) == 0
    client = TestClient(web.create_app(web.RunCache(tmp_path)), base_url="http://127.0.0.1")
    assert client.get("/api/runs").json()["runs"][0]["run"] == name
    assert client.get("/api/curves", params={"run": name, "key": "loss"}).json()[name]["loss"]["x"]
