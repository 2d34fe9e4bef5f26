"""Background runs: started, listed, killed, resumed, stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from m1clip import cli
from m1clip.commands import stop
from m1clip.config import to_json
from m1clip.run import Run, create_run


def call(capfd, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command, its child processes included."""
    code = cli.run_command(list(argv))
    out, err = capfd.readouterr()
    return code, out, err


def list_runs(capfd) -> list[dict]:
    return [json.loads(line) for line in call(capfd, "runs", "--json")[1].splitlines()]


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def endless_run(tiny_run, tmp_path, monkeypatch):
    """The config of a run that does not end by itself; whatever still trains after the test is killed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(to_json(replace(tiny_run, epochs=99999, save_every="5", threads=1)))
    run = Run(tmp_path / "runs" / "nano-1")
    yield run
    if run.path.is_dir() and run.is_alive:
        os.kill(run.read("status.json")["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_background_run_is_listed_killed_resumed_and_stopped(capfd, endless_run):
    run = endless_run
    code, out, _ = call(capfd, "train", "--config", "config.json", "--background")
    assert code == 0
    assert "runs/nano-1 is training in the background" in out
    for line in ("monitor runs/nano-1", "tail -f runs/nano-1/output.log", "stop runs/nano-1"):
        assert line in out
    wait_for((run.path / "last").exists)

    (row,) = list_runs(capfd)
    assert (row["run"], row["state"], row["device"]) == ("nano-1", "running", "cpu")
    assert os.getsid(row["pid"]) == row["pid"] != os.getsid(0)  # its own session: the terminal may be closed
    code, _, err = call(capfd, "train", "--resume", "--name", "nano-1")
    assert (code, "is being trained by another process" in err) == (1, True)

    os.kill(row["pid"], signal.SIGKILL)
    wait_for(lambda: not run.is_alive)
    assert list_runs(capfd)[0]["state"] == "dead"
    assert "train --resume --name runs/nano-1" in call(capfd, "runs")[1]
    assert call(capfd, "stop", "nano-1")[0] == 2

    assert call(capfd, "train", "--resume", "--background")[0] == 0
    wait_for(lambda: (run.path / "output.log").read_text().count("chance") == 2)  # one table per session
    code, out, _ = call(capfd, "stop")
    assert code == 0
    assert "runs/nano-1 is stopped at step" in out
    (row,) = list_runs(capfd)
    assert (row["state"], row["total"]) == ("stopped", 4 * 99999)
    assert 0 < row["best_score"] <= 1
    assert json.loads((run.path / "last" / "state.json").read_text())["position"]["step"] == row["step"]


@pytest.mark.slow
def test_a_command_refused_in_the_background_is_reported_in_the_foreground(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capfd, "train", "--background", "--data", "cifar")
    assert code == 2
    assert "cifar" in err
    assert "Traceback" not in err
    assert not [path for path in tmp_path.rglob("*") if path.name != "runs"]


@pytest.mark.slow
def test_an_overwritten_background_run_has_a_new_log(capfd, tmp_path, monkeypatch, tiny_run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(to_json(replace(tiny_run, epochs=1, threads=1)))
    run = Run(tmp_path / "runs" / "r")
    for overwrite in ([], ["--overwrite"]):
        argv = ["train", "--config", "config.json", "--name", "r", "--background", *overwrite]
        assert call(capfd, *argv)[0] == 0
        wait_for(lambda: "the model is runs/r/model" in (run.path / "output.log").read_text())  # the last lines
        assert (run.path / "output.log").read_text().count("validation retrieval") == 1
        assert run.read_status()["state"] == "finished"
    assert [path.name for path in run.path.parent.iterdir()] == ["r"]


def test_a_background_run_is_named_after_the_preset_of_its_config(tiny_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(to_json(replace(tiny_run, preset="tiny")))
    spawned = []
    monkeypatch.setattr("m1clip.commands.train.spawn_training", lambda *args: spawned.append(args) or 0)
    assert cli.run_command(["train", "--config", "config.json", "--background"]) == 0
    ((argv, run),) = spawned
    assert argv == ["--config", "config.json", "--name", "tiny-1"]
    assert run.path.is_dir()  # the number is reserved


def test_without_a_run_there_is_nothing_to_list_or_stop(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = call(capfd, "runs")
    assert (code, "no runs in runs/" in out) == (0, True)
    code, _, err = call(capfd, "stop")
    assert (code, "no run is running" in err) == (2, True)
    assert call(capfd, "stop", "gone")[0] == 2


def test_a_process_that_reuses_a_process_id_is_never_stopped(tmp_path):
    """A process that started after the status was written is not the one that wrote it."""
    run = create_run(tmp_path, "r", "x", overwrite=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with pytest.raises(RuntimeError, match="still starting"):
            stop.training_pid(run, {"pid": process.pid, "time": time.time() - 3600})
        with pytest.raises(ValueError, match="on elsewhere: stop it there"):
            stop.training_pid(run, {"pid": process.pid, "time": time.time(), "host": "elsewhere"})
        assert stop.training_pid(run, {"pid": process.pid, "time": time.time() + 60}) == process.pid
    finally:
        process.kill()
        process.wait()
