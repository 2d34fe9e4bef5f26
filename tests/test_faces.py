"""Whatever stands in a run's files, every face of the monitor shows it or says that it is not known."""

import json
import re

import matplotlib.pyplot as plt
import pytest
from starlette.testclient import TestClient

from longlog import write_run
from m1clip.cli import run as command
from m1clip.monitor import figures, web

LINES = {
    "lists for trees": {
        "kind": "logger",
        "grad_norms": [1],
        "weight_norms": 3,
        "memory_gb": [2],
        "cpu_percent": 7,
    },
    "nulls in lists": {
        "kind": "logger",
        "cpu_percent": [None, 3, "x"],
        "grad_norms": {"vision.a": None, "b": "x"},
    },
    "words for numbers": {
        "kind": "logger",
        "joules": "x",
        "power_w": "y",
        "temperature_c": [],
        "time": "noon",
        "rss_gb": {},
    },
    "nothing inside": {"kind": "logger"},
    "an evaluation of words": {
        "kind": "eval",
        "mean_r1": "x",
        "images": "x",
        "captions": [],
        "chance_r1": {},
    },
    "an evaluation without images": {"kind": "eval", "mean_r1": 0.5},
    "negatives as a list": {"kind": "eval", "mean_r1": 0.5, "images": 9, "negatives": [1]},
    "negatives of nothing": {
        "kind": "eval",
        "mean_r1": 0.5,
        "images": 9,
        "negatives": {"hard": {}, "easy": 3},
    },
    "an epoch of nothing": {"kind": "epoch", "loss": "x"},
    "an event of nothing": {"kind": "event", "event": None, "time": "x"},
    "an event with marks": {
        "kind": "event",
        "event": "diagnosis",
        "about": "<script>[/x]",
        "text": "$x_$ \x1b[2J\n\n# y",
    },
    "enormous": {"kind": "step", "loss": 1e308, "grad_norm": -1e308, "step_ms": 1e308, "accuracy": 10**400},
    "words in a step": {"kind": "step", "loss": "x", "time": [], "step_ms": None, "a,b": 1, "=cmd()": 2},
}
FILES = {
    "status.json": [
        "[]",
        "{}",
        '{"state": 3, "step": "x", "total": -1, "time": "x", "eta_s": []}',
        "[" * 20_000,
    ],
    "machine.json": ["[]", '{"plan": [], "device": {}, "chip": 3}', "\x00"],
    "config.json": ['{"epochs": 1, "batch": "x", "data": ["a"], "inspect_every": {}}'],
    "data.json": ['{"identity": 3, "train": "x"}', "3"],
    "retrievals.json": [
        '{"queries": {}, "shown": []}',
        '{"queries": [{"text": "x"}, 3, {"group": "errors", "text": "$a_$", "truth": 1, "rank": 2, '
        '"true_score": 0.1, "top": [{"row": 3, "score": 0.5}]}], "shown": {"3": {"jpeg": "none"}, "1": 7}}',
        '{"queries": [',
    ],
}


@pytest.fixture(autouse=True)
def quick_images(request, monkeypatch):
    """Drawing takes a second a report; it is done where the values themselves could stop it."""
    if not {"enormous", "$x_$", "日本"} & {str(value) for value in request.node.callspec.params.values()}:
        monkeypatch.setattr(figures, "save", undrawn)


def undrawn(figure, path):
    path.write_bytes(b"")
    plt.close(figure)
    return path


def faces(folder):
    """The text, the JSON, the page's answers and the report of a run; none may fail."""
    assert command(["monitor", str(folder), "--once"]) == 0
    assert command(["monitor", str(folder), "--once", "--json"]) == 0
    client = TestClient(web.app(web.Runs(folder.parent)), base_url="http://127.0.0.1")
    keys = "&".join(f"key={key}" for key in web.curves.CURVES)
    for path in (
        "runs",
        f"run/{folder.name}",
        f"run/{folder.name}/retrievals",
        f"curves?run={folder.name}&{keys}",
    ):
        answer = client.get(f"/api/{path}")
        assert answer.status_code == 200, path
        json.loads(answer.text, parse_constant=pytest.fail)  # strict: no NaN
    header = client.get(f"/api/run/{folder.name}/metrics.csv").text.splitlines()[0]
    assert re.fullmatch(r"[\w,]+", header)
    assert command(["report", str(folder)]) == 0
    return (folder / "report" / "report.md").read_text()


@pytest.mark.parametrize("what", LINES)
def test_odd_lines(tmp_path, capsys, what):
    folder = write_run(tmp_path / "odd", 60, (10, 12), (), None, half=False)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 61, **LINES[what]}) + "\n")
    text = faces(folder)
    assert "nan" not in text.lower().replace("nano", "")
    assert "<script>" not in text
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in FILES.items() for text in texts])
def test_odd_files(tmp_path, name, text):
    folder = write_run(tmp_path / "odd", 60, (10, 12), (), None)
    write_run(tmp_path / "other", 60, (10, 12), (), None)
    (folder / name).write_text(text)
    faces(folder)
    assert command(["report", str(folder), str(tmp_path / "other"), "--out", str(tmp_path / "doc")]) == 0
    assert command(["runs", "--runs", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["a b", "日本", "#1", "100%", 'it\'s "x"', "[b]", "$x_$", "-dash", "a&b=c"])
def test_odd_names(tmp_path, name):
    folder = write_run(tmp_path / name, 60, (10, 12), (), None)
    assert command(["monitor", str(folder), "--once"]) == 0
    assert command(["report", str(folder)]) == 0
    client = TestClient(web.app(web.Runs(tmp_path)), base_url="http://127.0.0.1")
    assert client.get("/api/runs").json()["runs"][0]["run"] == name
    assert client.get("/api/curves", params={"run": name, "key": "loss"}).json()[name]["loss"]["x"]
