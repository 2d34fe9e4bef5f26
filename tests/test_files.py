"""Files that are complete or absent: atomic writes, locks, JSON lines."""

import fcntl
import json
import math
import os

import pytest

from m1clip import files


def test_a_failed_write_leaves_the_old_file(tmp_path):
    files.atomic_write(tmp_path / "f", "old")
    with pytest.raises(UnicodeEncodeError):
        files.atomic_write(tmp_path / "f", "\udc80")
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "old"


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    with files.atomic_folder(tmp_path / "m") as folder:
        (folder / "new").touch()
        assert [path.name for path in (tmp_path / "m").iterdir()] == ["old"]
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"m", "m/new"}


def test_a_block_that_fails_leaves_the_old_folder(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    with pytest.raises(FileNotFoundError), files.atomic_folder(tmp_path / "m") as folder:
        (folder / "gone").rename(folder / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "old"]


def test_an_interrupt_between_the_two_renames_leaves_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "old").touch()
    rename = type(tmp_path).rename

    def fail_on_the_second(self, target):
        if self.name.endswith(".new"):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", fail_on_the_second)
    with pytest.raises(KeyboardInterrupt), files.atomic_folder(tmp_path / "m") as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["m", "old"]


def test_partial_files_of_a_killed_process_are_removed_and_a_moved_folder_is_restored(tmp_path):
    for name in (".model.77.new", ".model.77.old", ".best.77.old", "best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name.strip(".")).touch()
    (tmp_path / ".status.json.77.new").touch()
    (tmp_path / ".hidden.2024").touch()  # not ours
    files.remove_partial(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "best", ".hidden.2024"}
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["model.77.old"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == ["best"]  # the complete one wins


def test_a_lock_excludes_others_and_shared_locks_do_not(tmp_path):
    with files.lock_folder(tmp_path) as first, files.lock_folder(tmp_path) as second:
        assert (first, second) == (True, False)
        with files.lock_folder(tmp_path, fcntl.LOCK_SH) as reader:
            assert not reader
    with files.lock_folder(tmp_path, fcntl.LOCK_SH) as first, files.lock_folder(tmp_path, fcntl.LOCK_SH) as second:
        assert (first, second) == (True, True)
    with files.lock_folder(tmp_path) as free:
        assert free


def test_lines_that_are_no_json_objects_are_skipped(tmp_path):
    lines = ['{"step": 1}', "[2]", '{"step": 3', b"\xff".decode("latin1"), '{"step": 4}', '{"st']
    (tmp_path / "f").write_text("\n".join(lines), encoding="latin1")
    assert list(files.read_jsonl(tmp_path / "f")) == [{"step": 1}, {"step": 4}]
    assert list(files.read_jsonl(tmp_path / "gone")) == []


def test_numbers_that_json_lacks_become_none():
    value = {"a": [1.5, math.nan, (math.inf, 2)], "b": {"c": -math.inf, "d": "nan"}, "e": None, "f": True}
    safe = files.json_safe(value)
    assert safe == {"a": [1.5, None, [None, 2]], "b": {"c": None, "d": "nan"}, "e": None, "f": True}
    json.dumps(safe, allow_nan=False)


def test_a_cache_folder_that_cannot_be_made_names_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "deep" / "cache"))
    assert files.cache_folder().is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match="set M1CLIP_CACHE to another"):
        files.cache_folder()


def test_files_of_an_atomic_folder_may_be_read_by_all_that_the_umask_allows(tmp_path):
    with files.atomic_folder(tmp_path / "m") as folder:
        os.close(os.open(folder / "weights", os.O_CREAT, 0o600))
    assert (tmp_path / "m" / "weights").stat().st_mode & 0o777 == 0o666 & ~files.UMASK


def test_what_a_killed_process_left_is_removed_by_the_next_write_of_the_same_file(tmp_path):
    dead, alive = 2**22 + 1, os.getppid()  # Linux has no larger process id than 2**22
    for name in (f".f.{dead}.new", f".f.{dead}.removed", f".f.{alive}.new", f".other.{dead}.new", ".f.2024"):
        (tmp_path / name).touch()
    files.atomic_write(tmp_path / "f", b"data")
    assert {path.name for path in tmp_path.iterdir()} == {"f", f".f.{alive}.new", f".other.{dead}.new", ".f.2024"}


def test_lines_are_appended_whole_and_end_one_that_a_crash_has_cut(tmp_path, monkeypatch):
    path, write = tmp_path / "log", os.write
    path.write_bytes(b'{"a": 1}\n{"b"')
    files.append_lines(path, b'{"c": 3}\n')
    assert path.read_bytes() == b'{"a": 1}\n{"b"\n{"c": 3}\n'

    def fail_after_a_part(handle, data):
        if len(data) < 9:
            raise OSError(28, "No space left on device")
        return write(handle, data[:4])

    monkeypatch.setattr(os, "write", fail_after_a_part)
    with pytest.raises(OSError, match="No space left"):
        files.append_lines(path, b'{"d": 4}\n')
    assert list(files.read_jsonl(path)) == [{"a": 1}, {"c": 3}]
    assert path.read_bytes().endswith(b'{"c": 3}\n')


def test_files_are_replaced_together_or_not_at_all(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("a", "other"):
        (tmp_path / "out" / name).write_text("previous")
    for folder in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(UnicodeEncodeError), files.replace_files(folder) as partial:
            (partial / "a").write_text("half \udc80")
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        ("a", "other"), "previous"
    )
    assert not (tmp_path / "new").exists()
    with files.replace_files(tmp_path / "out") as partial:
        (partial / "a").write_text("next")
        (partial / "folder").mkdir()
        (partial / "folder" / "b").write_text("next")
    assert {path.name for path in (tmp_path / "out").rglob("*")} == {"a", "other", "folder", "b"}
    assert (tmp_path / "out" / "a").read_text() == "next"


def test_a_folder_whose_removal_is_interrupted_is_gone_under_its_name(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "file").touch()
    monkeypatch.setattr(files.shutil, "rmtree", lambda *args, **kwargs: None)  # killed here
    files.remove_folder(tmp_path / "m")
    monkeypatch.undo()
    assert not (tmp_path / "m").exists()
    files.remove_partial(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_file_and_not_its_partial_copy(tmp_path):
    with pytest.raises(OSError, match="/model'") as raised, files.naming(tmp_path / "model"):
        raise OSError(28, "No space left on device", f"{tmp_path}/.model.77.new/weights")
    assert raised.value.filename == f"{tmp_path}/model"
    with pytest.raises(OSError, match="elsewhere"), files.naming(tmp_path / "model"):
        raise OSError(5, "Input/output error", "/elsewhere")
