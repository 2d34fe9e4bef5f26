"""Runs that outlive the command that began them: started, listed, killed, resumed, stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from m1clip import cli
from m1clip import run as runs
from m1clip.commands import stop as stopping
from m1clip.commands.runs import ago
from m1clip.config import to_json


def said(capfd, *words: str) -> tuple[int, str, str]:
    code = cli.run_command(list(words))
    out, err = capfd.readouterr()
    return code, out, err


def test_a_run_in_the_background_from_its_start_to_its_end(capfd, tmp_path, monkeypatch, tiny_run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(to_json(replace(tiny_run, epochs=99999, save_every="5")))
    code, out, _ = said(capfd, "train", "--config", "c.json", "--background")
    assert code == 0
    assert "runs/nano-1 is being train_run in the background" in out
    assert "stop runs/nano-1" in out
    assert "monitor runs/nano-1" in out
    assert "tail -f runs/nano-1/output.log" in out
    run = runs.Run(tmp_path / "runs" / "nano-1")
    wait_for(lambda: (run.path / "last").exists())

    (row,) = listed(capfd)
    assert (row["run"], row["state"], row["device"]) == ("nano-1", "running", "cpu")
    assert os.getsid(row["pid"]) == row["pid"] != os.getsid(0)  # its own session: the terminal may close
    code, _, err = said(capfd, "train", "--resume", "--name", "nano-1")
    assert code == 1
    assert "is being train_run by another process" in err

    os.kill(row["pid"], signal.SIGKILL)
    wait_for(lambda: not run.is_alive)
    assert listed(capfd)[0]["state"] == "dead"
    code, out, _ = said(capfd, "runs")
    assert "dead" in out
    assert "train --resume --name runs/nano-1 goes on" in out
    assert said(capfd, "stop", "nano-1")[0] == 2

    assert said(capfd, "train", "--resume", "--background")[0] == 0
    wait_for(lambda: (run.path / "output.log").read_text().count("chance") == 2)  # both sessions' words
    code, out, _ = said(capfd, "stop")
    assert code == 0
    assert "runs/nano-1 is stopped at step" in out
    (row,) = listed(capfd)
    assert row["state"] == "stopped"
    assert 0 < row["best_score"] <= 1
    assert row["total"] == 4 * 99999
    position = json.loads((run.path / "last" / "state.json").read_text())
    assert position["position"]["step"] == row["step"]


def listed(capfd) -> list[dict]:
    return [json.loads(line) for line in said(capfd, "runs", "--json")[1].splitlines()]


def wait_for(true, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_is_refused_in_the_background_is_told_in_the_foreground(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capfd, "train", "--background", "--data", "cifar")
    assert code == 2
    assert "no data source 'cifar'" in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_fresh_run_in_the_background_has_its_own_log(capfd, tmp_path, monkeypatch, tiny_run):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(to_json(replace(tiny_run, epochs=1)))
    for overwrite in ([], ["--overwrite"]):
        words = ["train", "--config", "c.json", "--name", "r", "--background", *overwrite]
        assert said(capfd, *words)[0] == 0
        run = runs.Run(tmp_path / "runs" / "r")
        wait_for(lambda run=run: run.read_status()["state"] == "finished")
        assert (run.path / "output.log").read_text().count("validation retrieval") == 1
    assert {path.name for path in run.path.parent.iterdir()} == {"r"}


def test_no_run_is_a_sentence_and_so_is_more_than_one(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "no run in runs/" in said(capfd, "runs")[1]
    code, _, err = said(capfd, "stop")
    assert code == 2
    assert "none is running" in err
    assert said(capfd, "stop", "gone")[0] == 2


def test_no_stranger_is_stopped(tmp_path):
    """The number of a dead process may have been given to another: whoever began later is not ours."""
    run = runs.create_run(tmp_path, "r", "x", overwrite=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with pytest.raises(RuntimeError, match="only just starting"):
            stopping.owner(run, {"pid": process.pid, "time": time.time() - 3600})
        with pytest.raises(ValueError, match="on elsewhere: stop it there"):
            stopping.owner(run, {"pid": process.pid, "time": time.time(), "host": "elsewhere"})
        assert stopping.owner(run, {"pid": process.pid, "time": time.time() + 1}) == process.pid
    finally:
        process.kill()


def test_ages_are_said_as_people_say_them():
    now = time.time()
    assert [ago(now - age) for age in (3, 150, 7300, 2e5)] == ["3 s ago", "2 min ago", "2 h ago", "2 d ago"]
    assert ago(None) == "–"
