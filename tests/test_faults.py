"""Every write fails once: commands end with one sentence, lose nothing, and continue when the disk works again."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pydantic
import pytest

from crash_modes import Mode, outputs
from faults import FaultyDisk, faulty
from m1clip import cli, commands
from m1clip.config import TrainConfig, to_json
from m1clip.export import export as exporting
from m1clip.monitor import report
from m1clip.training import checkpoint
from photos import write_photos

Files = dict[str, bytes]


class Workspace:
    """A folder with data, a cache and runs, in which commands run; it can be set back to an earlier state."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]):
        self.folder, self.saved, self.capsys = folder / "disk", folder / "saved", capsys
        self.folder.mkdir()
        names = write_photos(self.folder / "photos", 12)
        rows = "".join(f"photos/{name},a photo of {i}\n" for i, name in enumerate(names))
        (self.folder / "photos.csv").write_text("image,caption\n" + rows)

    def save(self) -> None:
        shutil.rmtree(self.saved, ignore_errors=True)
        shutil.copytree(self.folder, self.saved, symlinks=True)

    def restore(self) -> None:
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.saved, self.folder, symlinks=True, dirs_exist_ok=True)

    def call(self, argv: list[str], disk: FaultyDisk | None = None) -> tuple[int, str]:
        """Exit code and stderr of a command."""
        self.capsys.readouterr()
        with faulty(disk or FaultyDisk(self.folder)):
            code = cli.run_command(argv)
        return code, self.capsys.readouterr().err

    def files(self, *folders: str) -> Files:
        found = (path for name in folders for path in (self.folder / name).rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}

    def partial_files(self) -> list[Path]:
        """Without those of the index, which is removed when the process ends."""
        return [path for path in self.folder.rglob(".*") if "index-" not in str(path)]

    def fail_every_write(
        self,
        argv: Callable[[], list[str]],
        result: Callable[[], Files],
        unchanged: Callable[[], Files],
        faults: list[str],
    ) -> int:
        """Fail each write of a command in turn, then repeat it. Returns how many there are.

        After the failure each file of `unchanged` is the previous or the new one; after the repetition `result` is as
        if nothing had happened, and nothing partial is left.
        """
        self.save()
        before, disk = unchanged(), FaultyDisk(self.folder)
        assert self.call(argv(), disk)[0] == 0
        expected, wrong = result(), list[str]()
        for number, operation in enumerate(disk.operations):
            self.restore()
            fault = faults[number % len(faults)]
            if fault == "short" and not operation.startswith("write"):
                continue
            code, err = self.call(argv(), FaultyDisk(self.folder, fault, number))
            after = unchanged()
            problems = [
                f"{name} is damaged" for name in before if after.get(name) not in (before[name], expected.get(name))
            ]
            problems += wrong_ending(code, err, fault)
            if code or self.partial_files():
                code, err_again = self.call(argv())
                problems += [f"then it fails: {err_again}"] if code else []
            problems += changed_files(result(), expected)
            problems += [f"{path} is left" for path in self.partial_files()]
            wrong += [f"{fault} at {number}, {operation}: {'; '.join(problems)}\n{err}"] if problems else []
        assert not wrong, f"{len(wrong)} of {len(disk.operations)} writes\n" + "\n".join(wrong[:10])
        self.restore()
        return len(disk.operations)


def wrong_ending(code: int, err: str, fault: str) -> list[str]:
    """A command ends well, or with one sentence about the disk and exit code 1."""
    sentences = [line for line in err.splitlines() if line.startswith("m1clip: ")]
    reasons = ("No space left", "Input/output error", "is full", "could not be saved")
    if code == 0 or (code == 1 and fault != "short" and any(reason in sentences[-1] for reason in reasons)):
        is_wrong = len(sentences) != code or "Traceback" in err
        return ["it does not end with one sentence"] if is_wrong else []
    return [f"exit code {code}"]


def changed_files(actual: Files, expected: Files) -> list[str]:
    names = [name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)]
    return [f"{name} differs" for name in sorted(names)]


@pytest.fixture
def workspace(tmp_path, monkeypatch, capsys) -> Workspace:
    workspace = Workspace(tmp_path, capsys)
    monkeypatch.chdir(workspace.folder)
    monkeypatch.setenv("M1CLIP_CACHE", str(workspace.folder / "cache"))
    parse = cache(commands.parse_flags)  # it would take longer than the rest of a command
    monkeypatch.setattr(commands, "parse_flags", lambda kind, program, argv: parse(kind, program, tuple(argv)))
    monkeypatch.setattr(pydantic, "TypeAdapter", cache(pydantic.TypeAdapter))
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.0)
    monkeypatch.setattr(checkpoint, "WAIT_FOR_DISK_S", {"stopping": 0.0, "finishing": 0.0})
    return workspace


@pytest.fixture
def config(tiny_run) -> TrainConfig:
    """One step in an epoch, with a checkpoint."""
    config = replace(tiny_run, data="synthetic:8", val_size=4, batch_size=8, epochs=1)
    return replace(config, save_every="1", log_every=1, threads=1)


def train_argv() -> list[str]:
    resumed = Path("runs/r/config.json").exists()
    return ["train", "--name", "r", *(["--resume"] if resumed else ["--config", "config.json"])]


def trained() -> Files:
    """Weights, moments, model and log; which older checkpoints are kept depends on when one could not be saved."""
    return {name: data for name, data in outputs(Mode(), Path()).items() if name != "checkpoints"}


def intact_checkpoints() -> Files:
    """The checkpoints as they are; a damaged one fails the test."""
    found = sorted(Path("runs/r/checkpoints").glob("step_*"))
    for path in found:
        checkpoint.read_progress(path)
    return {}


def test_training_survives_a_failure_of_each_of_its_writes(workspace, config):
    (workspace.folder / "config.json").write_text(to_json(config))
    assert workspace.fail_every_write(train_argv, trained, intact_checkpoints, ["full", "broken"]) > 100


@pytest.mark.parametrize("faults", [["broken", "full"], ["short"]])
def test_a_resumed_run_survives_a_failure_of_each_of_its_writes(workspace, config, faults):
    (workspace.folder / "config.json").write_text(to_json(config))
    assert workspace.call(train_argv())[0] == 0
    (workspace.folder / "runs" / "r" / "config.json").write_text(to_json(replace(config, epochs=2, recipe="scratch")))
    assert workspace.fail_every_write(train_argv, trained, intact_checkpoints, faults) > 80


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_a_conversion_of_data_survives_a_failure_of_each_of_its_writes(workspace, to):
    argv = ["data", "convert", "photos.csv", "out", "--to", to, "--per-file", "6"]
    assert workspace.fail_every_write(lambda: argv, lambda: workspace.files("out"), dict, ["full", "broken"]) > 30


def test_a_report_survives_a_failure_of_each_of_its_writes(workspace, config, monkeypatch):
    (workspace.folder / "config.json").write_text(to_json(config))
    assert workspace.call(train_argv())[0] == 0
    for name in ("draw_curves", "draw_step_time", "draw_gradient_flow"):  # they would take minutes
        monkeypatch.setattr(report, name, write_figure)
    examples = json.loads(Path("runs/r/retrievals.json").read_text())
    Path("runs/r/retrievals.json").write_text(json.dumps({**examples, "queries": examples["queries"][:1]}))
    assert workspace.call(["report", "r"])[0] == 0
    for path in Path("runs/r/report").glob("*.*"):
        path.write_text("previous")

    def written() -> Files:
        return workspace.files("runs/r/report")

    assert workspace.fail_every_write(lambda: ["report", "r"], written, written, ["full", "broken"]) > 15


def write_figure(*args: object) -> None:
    path = next(path for path in args if isinstance(path, Path))
    path.write_bytes(b"figure")


def cache_first(function: Callable[..., Any]) -> Callable[..., Any]:
    results = list[Any]()

    def call(*args: Any) -> Any:
        if not results:
            results.append(function(*args))
        return results[0]

    return call


@pytest.mark.parametrize("to", ["transformers", "open_clip", "m1clip"])
def test_an_exported_model_survives_a_failure_of_each_of_its_writes(workspace, config, to, monkeypatch):
    (workspace.folder / "config.json").write_text(to_json(config))
    assert workspace.call(train_argv())[0] == 0
    (workspace.folder / "out").mkdir()
    (workspace.folder / "out" / "export.json").write_text("{}")  # an earlier export

    def written() -> Files:
        files = workspace.files("out")
        files["out/export.json"] = b"times and speeds" if "out/export.json" in files else b""
        return {"out": repr(sorted(files.items())).encode()}  # all files, or none

    # What the export is compared with is made once.
    monkeypatch.setattr(exporting, "open_reference", cache_first(exporting.open_reference))
    argv = ["export", "runs/r", "--to", to, "--out", "out", "--overwrite"]
    assert workspace.fail_every_write(lambda: argv, written, written, ["full", "broken"]) > 15


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["data", "check", "photos.csv", "--sheet", "sheet.jpg", "--workers", "1"], "sheet.jpg"),
        (["data", "preview", "photos.csv", "--rows", "1", "--columns", "2", "--out", "sheet.png"], "sheet.png"),
        (["data", "template", "photos", "--out", "table.csv", "--overwrite"], "table.csv"),
    ],
)
def test_a_file_about_data_survives_a_failure_of_each_of_its_writes(workspace, argv, output):
    (workspace.folder / output).write_bytes(b"previous")

    def written() -> Files:
        return {output: (workspace.folder / output).read_bytes()}

    assert workspace.fail_every_write(lambda: argv, written, written, ["full", "broken"]) >= 5
