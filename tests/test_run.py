import json
import os

import pytest

from m1clip import run as runs
from m1clip.run import Run


def made(path) -> Run:
    run = runs.create_run(path.parent, path.name, "nano", overwrite=False)
    run.write("config.json", {"epochs": 1})
    run.write_status("running", 0)
    return run


def test_records_come_back_and_a_cut_line_is_passed_over(tmp_path):
    run = made(tmp_path / "r")
    run.log("step", 1, loss=2.5, power_w=None)
    run.log("eval", 1, mean_r1=0.5)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    assert [record["kind"] for record in run.records()] == ["step", "eval"]
    (step,) = run.records("step")
    assert (step["loss"], step["power_w"]) == (2.5, None)


def test_new_runs_are_numbered(tmp_path):
    assert runs.new_run_path(tmp_path, None, "nano", overwrite=False).name == "nano-1"
    for name in ("nano-2", "nano-10", "nano-x", "nano-tiny-50"):
        made(tmp_path / name)
    assert runs.new_run_path(tmp_path, None, "nano", overwrite=False).name == "nano-11"


def test_an_existing_run_is_refused_with_the_ways_out(tmp_path):
    made(tmp_path / "mine")
    with pytest.raises(FileExistsError, match=r"--resume continues it, --overwrite deletes it"):
        runs.new_run_path(tmp_path, "mine", "nano", overwrite=False)
    runs.create_run(tmp_path, "mine", "nano", overwrite=True)
    assert not list((tmp_path / "mine").iterdir())


def test_an_empty_folder_may_become_a_run(tmp_path):
    (tmp_path / "mine").mkdir()
    assert runs.create_run(tmp_path, "mine", "nano", overwrite=False).path == tmp_path / "mine"


def test_a_number_taken_meanwhile_is_not_taken_twice(tmp_path, monkeypatch):
    made(tmp_path / "nano-1")
    names = iter(("nano-1", "nano-2"))
    monkeypatch.setattr(runs, "new_path", lambda *a: tmp_path / next(names))
    monkeypatch.setattr(runs, "is_run", lambda path: False)  # as it was when the number was chosen
    assert runs.create_run(tmp_path, None, "nano", overwrite=False).name == "nano-2"
    assert (tmp_path / "nano-1" / "config.json").exists()


def test_a_swap_that_fails_half_way_keeps_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    rename = type(tmp_path).rename

    def fail_on_the_second(self, target):
        if self.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail_on_the_second)
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(tmp_path / "m") as aside:
        (aside / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "old"]


def test_fresh_never_deletes_what_is_not_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(FileExistsError, match="not a run"):
        runs.new_run_path(tmp_path, "photos", "nano", overwrite=True)


def test_the_newest_run_is_the_default(tmp_path):
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        os.utime(made(tmp_path / name).path / "config.json", (1e9 - age, 1e9 - age))
    assert runs.open_run(tmp_path, None).name == "new"
    assert runs.open_run(tmp_path, "old").name == "old"
    with pytest.raises(FileNotFoundError, match="no run 'gone'"):
        runs.open_run(tmp_path, "gone")
    with pytest.raises(FileNotFoundError, match="m1clip train"):
        runs.open_run(tmp_path / "empty", None)


def test_an_error_is_written_in_the_status_and_goes_on(tmp_path):
    run = made(tmp_path / "r")
    run.write_status("running", 7)
    with pytest.raises(RuntimeError), run.locked():
        raise RuntimeError("the disk is full")
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("failed", "the disk is full", 7)


def test_a_full_disk_is_told_with_its_place(tmp_path):
    run = made(tmp_path / "r")
    with pytest.raises(OSError, match="No space left") as caught, run.locked():
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(run.path)


def test_what_a_full_disk_refuses_of_the_log_follows_when_there_is_room(tmp_path, monkeypatch):
    run = made(tmp_path / "r")
    run.log("step", 1)
    write, room = os.write, [30]  # bytes, less than a line

    def small(handle, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken, room[0] = write(handle, data[: room[0]]), 0
        return taken

    monkeypatch.setattr(os, "write", small)
    run.log("step", 2)
    run.write_status("running", 2)
    run.log("step", 3)
    assert [record["step"] for record in run.records()] == [1]
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"\n")  # never half a line
    room[0] = 10**9
    run.log("step", 4)
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]


def test_rewinding_forgets_what_will_be_done_again_and_mends_a_cut_line(tmp_path):
    run = made(tmp_path / "r")
    for step in (1, 2, 3):
        run.log("step", step)
    run.log("event", 3, event="skipped")
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    run.truncate_log(2)
    run.log("step", 3)
    assert [(one["kind"], one["step"]) for one in run.records()] == [
        *(("step", 1), ("step", 2), ("event", 3), ("step", 3))
    ]


def test_a_run_that_says_it_runs_and_has_no_process_is_dead(tmp_path):
    run = made(tmp_path / "r")
    assert run.read_status()["state"] == "dead"
    with run.locked():
        assert Run(run.path).read_status()["state"] == "running"
    run.write_status("finished", 9)
    assert run.read_status()["state"] == "finished"
    (run.path / "status.json").write_text("{")
    assert run.read_status()["state"] == "unknown"


def test_what_a_killed_process_left_is_swept_and_what_it_moved_is_put_back(tmp_path):
    run = made(tmp_path / "r")
    for name in (".model.77.new", ".model.77.old", "checkpoints", "checkpoints/.step_000004.77.new"):
        (run.path / name).mkdir()
    (run.path / ".status.json.77").touch()
    (run.path / ".kept").touch()
    (run.path / ".model.77.old" / "weights").touch()
    with run.locked():
        pass
    assert {path.name for path in run.path.iterdir()} == {
        *("config.json", "status.json", "model", "checkpoints", ".kept")
    }
    assert (run.path / "model" / "weights").exists()
    assert not list(run.checkpoints.iterdir())


def test_a_run_has_one_owner(tmp_path):
    run = made(tmp_path / "r")
    with run.locked():
        with pytest.raises(RuntimeError, match="another process"), Run(run.path).locked():
            pass
        with pytest.raises(FileExistsError, match="another process"):
            runs.new_run_path(tmp_path, "r", "nano", overwrite=True)
    with run.locked():
        pass


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path):
    files.atomic_write(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        files.atomic_write(tmp_path / "f", "\udc80")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"
