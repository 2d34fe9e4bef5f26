"""A run is a folder: created, opened, logged to, owned by one process, and never deleted by mistake."""

import json
import os
import shutil

import pytest

from m1clip import run as runs
from m1clip.run import Run, all_runs, create_run, new_run_path, open_run


def started_run(path) -> Run:
    """A run as training leaves it once it has begun."""
    run = create_run(path.parent, path.name, "nano", overwrite=False)
    run.write("config.json", {"epochs": 1})
    run.write_status("running", 0)
    return run


def test_records_are_read_back_and_a_truncated_line_is_skipped(tmp_path):
    run = started_run(tmp_path / "r")
    run.log("step", 1, loss=2.5, power_w=None, grad_norm=float("nan"))
    run.log("eval", 1, mean_r1=0.5)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    assert [record["kind"] for record in run.records()] == ["step", "eval"]
    (step,) = run.records("step")
    assert (step["loss"], step["power_w"], step["grad_norm"]) == (2.5, None, None)


def test_new_runs_are_numbered(tmp_path):
    assert new_run_path(tmp_path, None, "nano", overwrite=False).name == "nano-1"
    for name in ("nano-2", "nano-10", "nano-x", "nano-tiny-50"):
        started_run(tmp_path / name)
    assert new_run_path(tmp_path, None, "nano", overwrite=False).name == "nano-11"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up", "a\\b", "a\0b"])
def test_a_name_that_is_a_path_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="must be a plain folder name"):
        new_run_path(tmp_path, name, "nano", overwrite=True)


def test_an_existing_run_is_refused_unless_it_may_be_overwritten(tmp_path):
    started_run(tmp_path / "mine")
    with pytest.raises(FileExistsError, match=r"--resume continues it, --overwrite deletes it"):
        new_run_path(tmp_path, "mine", "nano", overwrite=False)
    create_run(tmp_path, "mine", "nano", overwrite=True)
    assert not list((tmp_path / "mine").iterdir())


def test_an_empty_folder_may_become_a_run(tmp_path):
    (tmp_path / "mine").mkdir()
    assert create_run(tmp_path, "mine", "nano", overwrite=False).path == tmp_path / "mine"


def test_a_folder_with_only_partial_files_may_become_a_run(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".config.json.77.new").touch()
    run = create_run(tmp_path, "r", "x", overwrite=False)
    assert not list(run.path.iterdir())
    run.write("config.json", {"epochs": 1})  # the first file a run writes
    with pytest.raises(FileExistsError, match="--overwrite"):
        new_run_path(tmp_path, "r", "x", overwrite=False)


def test_a_number_taken_by_another_process_is_not_taken_twice(tmp_path, monkeypatch):
    started_run(tmp_path / "nano-1")
    names = iter(("nano-1", "nano-2"))
    monkeypatch.setattr(runs, "new_run_path", lambda *args: tmp_path / next(names))
    monkeypatch.setattr(runs, "is_run", lambda path: False)  # as it was when the number was chosen
    assert create_run(tmp_path, None, "nano", overwrite=False).name == "nano-2"
    assert (tmp_path / "nano-1" / "config.json").exists()


def test_overwrite_never_deletes_what_is_not_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(FileExistsError, match="not a run"):
        create_run(tmp_path, "photos", "nano", overwrite=True)
    assert (tmp_path / "photos" / "cat.jpg").exists()


def test_the_newest_run_is_the_default(tmp_path):
    for age, name in ((30, "old"), (10, "new"), (20, "middle")):
        os.utime(started_run(tmp_path / name).path / "config.json", (1e9 - age, 1e9 - age))
    assert open_run(tmp_path, None).name == "new"
    assert open_run(tmp_path, "old").name == open_run(tmp_path, str(tmp_path / "old")).name == "old"
    with pytest.raises(FileNotFoundError, match="no run 'gone'"):
        open_run(tmp_path, "gone")
    with pytest.raises(FileNotFoundError, match="m1clip train"):
        open_run(tmp_path / "empty", None)


def test_an_error_is_written_to_the_status_and_raised(tmp_path):
    run = started_run(tmp_path / "r")
    run.write_status("running", 7, total=9, eta_s=3.0)
    with pytest.raises(RuntimeError), run.locked():
        raise RuntimeError("the device is lost")
    status = json.loads((run.path / "status.json").read_text())
    assert (status["state"], status["reason"], status["step"]) == ("failed", "the device is lost", 7)
    assert (status["total"], status["eta_s"]) == (9, None)


def test_ctrl_c_is_a_stop_and_not_a_failure(tmp_path):
    run = started_run(tmp_path / "r")
    with pytest.raises(KeyboardInterrupt), run.locked():
        raise KeyboardInterrupt
    assert run.read_status()["state"] == "stopped"


def test_an_error_before_the_first_status_changes_nothing(tmp_path):
    started_run(tmp_path / "r").write_status("finished", 9)
    with pytest.raises(ValueError, match="a setting"), Run(tmp_path / "r").locked():
        raise ValueError("a setting is wrong")
    assert Run(tmp_path / "r").read_status()["state"] == "finished"


def test_an_error_of_a_full_disk_names_the_run(tmp_path):
    run = started_run(tmp_path / "r")
    with pytest.raises(OSError, match="No space left") as caught, run.locked():
        raise OSError(28, "No space left on device")
    assert caught.value.filename == str(run.path)


def test_log_lines_refused_by_a_full_disk_are_written_when_there_is_room(tmp_path, monkeypatch):
    run = started_run(tmp_path / "r")
    run.log("step", 1)
    write, room = os.write, [30]  # bytes, less than a line

    def write_to_small_disk(handle, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        written, room[0] = write(handle, data[: room[0]]), 0
        return written

    monkeypatch.setattr(os, "write", write_to_small_disk)
    run.log("step", 2)
    run.write_status("running", 2)
    run.log("step", 3)
    assert [record["step"] for record in run.records()] == [1]
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"\n")  # never half a line
    room[0] = 10**9
    run.log("step", 4)
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]


def test_truncating_the_log_removes_steps_to_be_repeated_and_a_partial_line(tmp_path):
    run = started_run(tmp_path / "r")
    for step in (1, 2, 3):
        run.log("step", step)
    run.log("event", 3, event="skipped")
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')
    run.truncate_log(2)
    run.log("step", 3)
    records = [(record["kind"], record["step"]) for record in run.records()]
    assert records == [("step", 1), ("step", 2), ("event", 3), ("step", 3)]


def test_a_run_that_claims_to_run_without_a_process_is_dead(tmp_path):
    run = started_run(tmp_path / "r")
    assert run.read_status()["state"] == "dead"
    with run.locked():
        assert Run(run.path).read_status()["state"] == "running"
    run.write_status("finished", 9)
    assert run.read_status()["state"] == "finished"
    (run.path / "status.json").write_text("{")
    assert run.read_status() == {"step": 0, "state": "unknown"}


def test_owning_a_run_removes_partial_files_and_restores_a_moved_folder(tmp_path):
    run = started_run(tmp_path / "r")
    for name in (".model.77.new", ".model.77.old", "checkpoints", "checkpoints/.step_000004.77.new"):
        (run.path / name).mkdir()
    (run.path / ".status.json.77.new").touch()
    (run.path / ".model.77.old" / "weights").touch()
    with run.locked():
        pass
    assert {path.name for path in run.path.iterdir()} == {"config.json", "status.json", "model", "checkpoints"}
    assert (run.path / "model" / "weights").exists()
    assert not list(run.checkpoints.iterdir())


def test_a_run_has_one_owner(tmp_path):
    run = started_run(tmp_path / "r")
    with run.locked():
        with pytest.raises(RuntimeError, match="another process"), Run(run.path).locked():
            pass
        with pytest.raises(FileExistsError, match="another process"):
            new_run_path(tmp_path, "r", "nano", overwrite=True)
    with run.locked():
        pass


def test_a_summary_reads_any_status_that_somebody_may_have_edited(tmp_path):
    run = started_run(tmp_path / "r")
    run.write("machine.json", {"device": "cpu"})
    run.write_status("stopped", 5, total=8, best_metric="mean_r1", best_score=0.25, reason="Ctrl-C")
    row = run.summary()
    assert (row["run"], row["state"], row["step"], row["total"]) == ("r", "stopped", 5, 8)
    assert (row["best_score"], row["device"], row["reason"], row["pid"]) == (0.25, "cpu", "Ctrl-C", None)
    run.write("status.json", {"state": "stopped", "step": "many", "total": True, "best_score": 1e300, "time": None})
    (run.path / "machine.json").unlink()
    row = run.summary()
    assert (row["step"], row["total"], row["best_score"], row["time"], row["device"]) == (0, None, None, None, None)


def test_a_model_folder_is_not_a_run(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"embed_dim": 24}')
    assert not runs.is_run(tmp_path / "model")
    assert runs.all_runs(tmp_path) == runs.run_summaries(tmp_path) == []


def test_a_run_whose_deletion_was_interrupted_is_not_in_the_way(tmp_path, monkeypatch):
    run = create_run(tmp_path, "r", "x", overwrite=False)
    run.write("config.json", {"epochs": 1})
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed here
    create_run(tmp_path, "r", "x", overwrite=True).path.rmdir()
    monkeypatch.undo()
    assert all_runs(tmp_path) == []  # not even while it is deleted
    assert not list(create_run(tmp_path, "r", "x", overwrite=False).path.iterdir())


def test_a_run_that_fails_before_it_writes_anything_leaves_no_folder(tmp_path):
    run = create_run(tmp_path, "r", "x", False)
    with pytest.raises(KeyboardInterrupt), run.locked():
        raise KeyboardInterrupt
    assert not run.path.exists()


def test_something_else_in_place_of_the_checkpoints_is_named(tmp_path):
    run = create_run(tmp_path, "r", "x", False)
    run.checkpoints.touch()
    with pytest.raises(FileExistsError, match="checkpoints is not a folder; move it away"), run.locked():
        pass
