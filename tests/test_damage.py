"""Damaged files of a run: every command ends with one sentence, other runs are unaffected, checkpoints are found."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from conftest import tiny_config, tiny_run_config
from helpers import QuietConsole, train_run
from m1clip.cli import run_command
from m1clip.monitor import report
from m1clip.run import Run, list_checkpoints
from m1clip.training.checkpoint import newest_intact

FILES = ("config.json", "data.json", "machine.json", "status.json", "metrics.jsonl", "retrievals.json")
CHECKPOINT_FILES = ("state.json", "config.json", "tokenizer.json", "training.safetensors")
DEEP = b"[" * 200_000


def with_values(value):
    """Every field, but the kind of a record, has another value."""

    def damage(path: Path) -> None:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        records = [{key: value if key != "kind" else old for key, old in json.loads(line).items()} for line in lines]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return damage


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "NUL bytes": lambda path: path.write_bytes(bytes(300)),
    "not UTF-8": lambda path: path.write_bytes(b"\xff\xfe\xfa{}"),
    "deep lists first": lambda path: path.write_bytes(DEEP + b"\n" + path.read_bytes()),
    "deep objects": lambda path: path.write_bytes(
        b'{"kind": "event", "step": 1, "event": ' + b'{"a":' * 900 + b"1" * 901
    ),
    "a large integer": lambda path: path.write_bytes(b'{"kind": "step", "step": ' + b"9" * 5000 + b"}\n"),
    "infinity": lambda path: path.write_bytes(b'{"kind": "step", "step": 1, "loss": 1e999, "epochs": 1e999}\n'),
    "no step": lambda path: path.write_bytes(b'{"kind": "step"}\n'),
    "only steps": lambda path: path.write_bytes(b'{"kind": "step", "step": 5}\n{"kind": "epoch", "step": 8}\n'),
    "negative": with_values(-1),
    "null": with_values(None),
    "text": with_values("x"),
    "lists": with_values([1]),
    "half a surrogate pair": with_values("\ud800"),
    "a FIFO": replace_by_fifo,
    "a folder": replace_by_folder,
    "missing": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    config = replace(
        tiny_run_config(tiny_config()), epochs=1, save_every="2", precision="fp32", compile="off", threads=1
    )
    for name in ("r", "other"):
        train_run(config, folder / name)
    return folder


@pytest.fixture
def runs(intact, tmp_path, monkeypatch) -> Path:
    """A copy of a finished run and of another one."""
    monkeypatch.setattr(report, "save_figure", lambda figure, path: (path.write_bytes(b""), plt.close(figure)))
    return Path(shutil.copytree(intact, tmp_path / "runs", symlinks=True))


def call(capfd, runs: Path, *argv: str) -> tuple[int, str, str]:
    code = run_command([*argv, "--runs", str(runs)])
    out, err = capfd.readouterr()
    assert code in (0, 1, 2)
    assert "unexpected" not in err
    assert "Traceback" not in err
    return code, out, err


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_every_command_answers_for_a_run_with_a_damaged_file(runs, capfd, name, kind):
    DAMAGE[kind](runs / "r" / name)
    code, out, _ = call(capfd, runs, "runs")
    assert code == 0
    assert "\nr " in out
    assert "\nother " in out
    assert call(capfd, runs, "monitor", "r", "--once")[0] == 0
    assert call(capfd, runs, "stop", "r")[0] == 2
    assert list_checkpoints(Run(runs / "r"))[-1].name == "step_000004"
    if kind in ("deep lists first", "lists", "a FIFO"):  # the slower commands
        assert call(capfd, runs, "report", "r", "other", "--out", str(runs / "doc"))[0] == 0
        assert call(capfd, runs, "report", "r")[0] == 0
        code, _, err = call(capfd, runs, "eval", "r")
        assert code == 0 or name in err


@pytest.mark.parametrize("name", ["config.json", "data.json"])
@pytest.mark.parametrize("kind", ["half", "deep lists first", "missing", "a FIFO"])
def test_a_lost_config_is_restored_from_a_checkpoint(runs, capfd, name, kind):
    before = (runs / "r" / name).read_text()
    DAMAGE[kind](runs / "r" / name)
    if (name, kind) != ("data.json", "missing"):  # a run that was killed at its start has none
        assert f"{name} " in call(capfd, runs, "runs")[1].replace(": ", " ")
    assert call(capfd, runs, "eval", "r")[0] == 0
    code, _, err = call(capfd, runs, "train", "--resume", "--name", "r")
    assert code == 0, err
    assert f"{name} is" in err.replace("cannot be read", "is")
    assert "using the copy in" in err
    assert (runs / "r" / name).read_text() == before
    assert Run(runs / "r").summary()["problem"] is None


@pytest.mark.parametrize("name", ["config.json", "data.json"])
def test_without_a_copy_the_error_names_the_file_and_what_to_do(runs, capfd, name):
    for path in list_checkpoints(Run(runs / "r")):
        (path / "state.json").unlink()
    (runs / "r" / name).write_text("{")
    code, _, err = call(capfd, runs, "train", "--resume", "--name", "r")
    assert code == 2
    assert f"{name} is damaged" in err
    assert "no checkpoint has a copy: restore it from a backup" in err


@pytest.mark.parametrize(("name", "value"), [("config.json", "x"), ("config.json", -1), ("data.json", "x")])
def test_a_wrong_value_is_named_with_what_to_do(runs, capfd, name, value):
    with_values(value)(runs / "r" / name)
    code, _, err = call(capfd, runs, "train", "--resume", "--name", "r")
    assert code == 2
    assert f"{name}: " in err
    assert "delete" in err


@pytest.mark.parametrize("kind", ["deep lists first", "no step", "only steps", "half", "lists", "not UTF-8"])
def test_a_damaged_log_never_blocks_a_resumed_run_and_lines_are_counted(runs, capfd, kind):
    DAMAGE[kind](runs / "r" / "metrics.jsonl")
    code, _, err = call(capfd, runs, "train", "--resume", "--name", "r", "--epochs", "2")
    assert code == 0, err
    assert ("could not be read and were removed" in err) == (kind != "only steps")
    assert [record["step"] for record in Run(runs / "r").records("step")][-4:] == [5, 6, 7, 8]


def test_the_monitor_counts_lines_that_are_no_records(runs, capfd):
    with open(runs / "r" / "metrics.jsonl", "ab") as file:
        file.write(
            DEEP + b'\n{"kind": "step"}\n{"kind": "step", "step": true}\n' + b'{"a": "' + b"x" * 9_000_000 + b'"}\n'
        )
    assert "4 lines of metrics.jsonl cannot be parsed" in call(capfd, runs, "monitor", "r", "--once")[1]
    assert json.loads(call(capfd, runs, "monitor", "r", "--once", "--json")[1])["bad_lines"] == 4
    assert Run(runs / "r").truncate_log(4) == 4


@pytest.mark.parametrize("kind", ["empty", "deep lists first", "lists", "a FIFO", "a folder", "missing"])
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_does_not_hide_the_one_before(runs, name, kind):
    if kind == "lists" and name.endswith("safetensors"):
        pytest.skip("not JSON")
    DAMAGE[kind](runs / "r" / "checkpoints" / "step_000004" / name)
    path, damaged = newest_intact(Run(runs / "r"))
    assert path is not None
    assert path.name == "step_000002"
    assert [bad.name for bad in damaged] == ["step_000004"]


def test_a_damaged_model_names_a_checkpoint_that_can_be_used(runs, capfd):
    (runs / "r" / "model" / "config.json").write_bytes(DEEP)
    code, _, err = call(capfd, runs, "eval", "r")
    assert code == 2
    assert "model/config.json" in err
    assert call(capfd, runs, "eval", err.split("; ")[1].split(" is a checkpoint")[0])[0] == 0


def test_a_run_resumed_from_a_restored_config_ends_with_the_same_bits(intact, runs, tmp_path):
    config = replace(
        tiny_run_config(tiny_config()), epochs=3, save_every="2", precision="fp32", compile="off", threads=1
    )
    (runs / "r" / "config.json").write_text("{")
    (runs / "r" / "data.json").write_text("{")
    restored, note = Run(runs / "r").read_config()
    console = QuietConsole()
    train_run(replace(restored, epochs=3), runs / "r", console=console)
    train_run(config, runs / "other")
    assert "using the copy" in note
    assert any("data.json is damaged" in text for text in console.warnings)
    a, b = ((runs / name / "model" / "model.safetensors").read_bytes() for name in ("r", "other"))
    assert a == b
