"""The status of a run: full disks, silent and stalled processes, and its fallback."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from test_reliability import DiskFiller, small_disk  # noqa: F401 - a fixture

from helpers import train_run
from m1clip import run as runs
from m1clip import status
from m1clip.cli import run_command
from m1clip.commands import stop
from m1clip.monitor import web
from m1clip.run import Run, create_run
from m1clip.training import checkpoint, logger


def running(path: Path, **values) -> Run:
    """A run whose status was written by this process; call inside of `locked`."""
    run = create_run(path.parent, path.name, "x", overwrite=False)
    run.write("config.json", {"epochs": 1})
    run.write_status("running", 120, total=500, **values)
    return run


def rewrite(run: Run, **values) -> None:
    run.write("status.json", {**run.read("status.json"), **values})


class Watcher(DiskFiller):
    """Reads the run as another process would, while its disk is full."""

    def update_training(self, step, records, total):
        super().update_training(step, records, total)
        if step == self.full_at + 3:
            self.seen = Run(self.file.parent / "r").summary()
            self.places = [path for folder in status.fallback_folders() for path in folder.glob("*.json")]


def test_a_full_disk_is_seen_from_outside_with_the_current_step(tiny_run, small_disk, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.0)
    monkeypatch.setattr(logger, "HEARTBEAT_S", 0.0)
    monkeypatch.setattr(status, "fallback_folders", lambda: [tmp_path / "memory"])
    config = replace(tiny_run, epochs=4, save_every="2", log_every=1)
    watcher = Watcher(small_disk, full_at=5, free_at=11)
    assert train_run(config, small_disk / "r", console=watcher).finished
    assert (watcher.seen["step"], watcher.seen["state"], watcher.seen["warning"]) == (7, "running", "disk full")
    assert watcher.seen["problem"].startswith("disk full since ")
    assert watcher.seen["problem"].endswith("; step 7 of 16; nothing has been saved since step 4")
    assert len(watcher.places) == 1
    assert not (tmp_path / "memory").exists()  # removed once the disk had room
    assert Run(small_disk / "r").summary()["problem"] is None


def test_runs_and_every_monitor_show_the_problem(tmp_path, capsys):
    run = running(tmp_path / "r")
    (run.checkpoints / "step_000080").mkdir(parents=True)
    run.note_failure("a checkpoint", OSError(28, "No space left on device"))
    run.write_status("running", 120, total=500)
    sentence = "step 120 of 500; nothing has been saved since step 80"
    with run.locked():
        for argv in (["runs"], ["runs", "--json"], ["monitor", "r", "--once"], ["monitor", "r", "--once", "--json"]):
            assert run_command([*argv, "--runs", str(tmp_path)]) == 0
            out = " ".join(capsys.readouterr().out.split())
            assert "disk full since" in out
            assert sentence in out
        client = TestClient(web.create_app(web.RunCache(tmp_path)), base_url="http://127.0.0.1")
        assert sentence in client.get("/api/runs").json()["runs"][0]["problem"]
        assert sentence in client.get("/api/run/r").json()["summary"]["problem"]


def test_a_disk_that_is_full_everywhere_is_still_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "fallback_folders", lambda: [Path("/proc/nowhere/m1clip")])
    monkeypatch.setattr(status, "is_full", lambda folder: True)
    monkeypatch.setattr(status, "SILENCE_S", 0.0)
    run = running(tmp_path / "r")
    with run.locked():
        row = run.summary()
    assert row["warning"] == "disk full"
    assert "disk full; no sign of life since" in row["problem"]


def test_the_reason_of_a_run_that_failed_on_a_full_disk_is_known(tmp_path, monkeypatch):
    run = running(tmp_path / "r")

    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "atomic_write", refuse)
        with pytest.raises(OSError, match="could not be saved"), run.locked():
            raise OSError("step 8 could not be saved")
    assert run.read("status.json")["state"] == "running"
    row = Run(run.path).summary()
    assert (row["state"], row["reason"]) == ("failed", "step 8 could not be saved")
    run.write_status("stopped", 120)
    assert status.read_fallback(run.path) == {}


@pytest.mark.parametrize("kind", ["a link", "open to others", "a file"])
def test_a_second_place_that_others_could_have_made_is_not_used(tmp_path, monkeypatch, kind):
    folder, target = tmp_path / "shared" / "m1clip", tmp_path / "target"
    folder.parent.mkdir()
    target.mkdir(mode=0o700)
    monkeypatch.setattr(status, "fallback_folders", lambda: [folder])
    if kind == "a link":
        folder.symlink_to(target)
    elif kind == "a file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    status.write_fallback(tmp_path, {"time": 1.0})
    assert not [*target.iterdir(), *folder.parent.rglob("*.json")]
    assert status.read_fallback(tmp_path) == {}


def test_a_silent_process_is_reported_and_a_starting_one_is_not(tmp_path, monkeypatch):
    run = running(tmp_path / "r")
    with run.locked():
        assert run.summary()["problem"] is None
        monkeypatch.setattr(status, "SILENCE_S", 0.0)
        assert run.summary()["warning"] == "no sign of life"
        rewrite(run, pid=2**30)  # of an earlier session: the process that holds the lock has not written yet
        assert run.summary()["problem"] is None
        rewrite(run, host="elsewhere")
        assert "no sign of life since" in run.summary()["problem"]
        rewrite(run, host=socket.gethostname(), pid=os.getpid(), state="finished")  # it compares images after that
        assert run.summary()["problem"] is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, None),
        ({"progress_time": -500}, None),
        ({"progress_time": -3600}, "no progress since"),
        ({"progress_time": -3600, "report_s": 1000.0}, None),  # steps are that slow
        ({"progress_time": -3600, "phase": "evaluating"}, "evaluating since"),
    ],
)
def test_a_process_that_lives_but_does_not_progress_is_reported(tmp_path, values, text):
    run, now = running(tmp_path / "r"), time.time()
    with run.locked():
        rewrite(run, **{"phase": "", "time": now, **values, "progress_time": now + values.get("progress_time", 0)})
        problem = run.summary()["problem"]
    assert problem is None if text is None else text in problem


def test_the_heartbeat_goes_on_in_a_long_phase_but_claims_no_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "BEAT_S", 0.01)
    run = running(tmp_path / "r")
    with run.locked(), run.in_phase("evaluating"):
        started, first = time.monotonic(), run.read("status.json")
        while run.read("status.json")["time"] < first["time"] + 0.2:
            assert time.monotonic() < started + 120
            time.sleep(0.01)
        last = run.read("status.json")
        assert last["phase"] == "evaluating"
        assert last["time"] - last["progress_time"] > 0.1
    ended = run.read("status.json")["time"]
    time.sleep(0.05)
    assert run.read("status.json")["time"] == ended  # the thread has ended


HOLD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from m1clip.run import Run
run = Run(Path(sys.argv[1]))
with run.locked():
    run.write_status("running", 7, total=9)
    print("started", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_suspended_process_is_reported_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "SILENCE_S", 0.0)
    run = running(tmp_path / "r")
    child = subprocess.Popen([sys.executable, "-c", HOLD, run.path], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"started\n"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert f"process {child.pid} is suspended; kill -CONT {child.pid}" in Run(run.path).summary()["problem"]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("pid", [True, 0, 1, -1, "7", 2**40, None, [3]])
def test_a_status_never_makes_stop_signal_another_process(tmp_path, pid):
    run = create_run(tmp_path, "r", "x", overwrite=False)
    for written in (time.time() + 60, "x", None, 10**400):
        with pytest.raises(RuntimeError, match="still starting"):
            stop.training_pid(run, {"pid": pid, "time": written})


def test_a_log_that_cannot_be_written_is_a_problem_of_the_run(tmp_path):
    run = running(tmp_path / "r")
    (run.path / "metrics.jsonl").mkdir()
    with run.locked():
        run.log("step", 121)
        run.write_status("running", 121, total=500)
        assert "cannot write metrics.jsonl: Is a directory since" in run.summary()["problem"]
        (run.path / "metrics.jsonl").rmdir()
        run.log("step", 122)
        run.write_status("running", 122, total=500)
        assert run.summary()["problem"] is None
    assert [record["step"] for record in run.records()] == [121, 122]
    assert json.loads((run.path / "status.json").read_text())["step"] == 122
