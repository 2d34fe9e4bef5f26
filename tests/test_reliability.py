"""Reliability of a run that is left alone: kills, damaged checkpoints, full disks, out of memory, non-finite data."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers import QuietConsole, make_state, train_run
from m1clip import cli
from m1clip.config import TrainConfig, to_json
from m1clip.data.batches import BatchStream, Images
from m1clip.evals.retrieval import Direction, Retrieval
from m1clip.model.clip import CLIP, load
from m1clip.model.tokenizer import Tokenizer
from m1clip.run import Run, create_run
from m1clip.training import checkpoint, logger
from m1clip.training.checkpoint import CheckpointManager, Progress, save_checkpoint

HERE = Path(__file__).parent


def assert_same_end(one: Path, other: Path) -> None:
    """Weights, optimizer state, random state and step of two runs' last checkpoints are equal bit for bit."""
    a, b = (checkpoint.list_checkpoints(Run(path))[-1] for path in (one, other))
    assert a.name == b.name
    for name in ("model.safetensors", "training.safetensors"):
        tensors, expected = load_file(a / name), load_file(b / name)
        assert tensors.keys() == expected.keys()
        assert [key for key in tensors if not torch.equal(tensors[key], expected[key])] == []


def losses(path: Path, kind: str = "step") -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in Run(path).records(kind)]


def events(path: Path, name: str) -> list[dict]:
    return [record for record in Run(path).records("event") if record["event"] == name]


@pytest.fixture
def stateful_run(tiny_run) -> TrainConfig:
    """Saves every second step, and uses everything whose state could be lost."""
    return replace(
        tiny_run,
        epochs=12,
        save_every="2",
        threads=1,
        crop_scale=0.6,
        hflip=True,
        patch_dropout=0.2,
        ema=0.9,
        optimizer="muon",
        chunk=5,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "moments"),
    [
        (["lora"], ["evaluation", "final-save", "checkpoint"]),
        (["frozen", "shards"], ["clock", "cache", "index", "append", "fsync", "rename", "replace"]),
    ],
)
def test_runs_killed_many_times_end_with_the_bits_of_unbroken_ones(modes, moments, tmp_path):
    """In each mode: a few kills inside these functions or at any time, then weights, moments, model and log."""
    flags = ["--kills", str(4 * len(modes)), "--commands", "0", "--out", tmp_path / "results.json"]
    command = [
        sys.executable,
        HERE.parent / "benchmarks" / "crash.py",
        *flags,
        "--modes",
        *modes,
        "--moments",
        *moments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {result["mode"]: (result["kills"], result["bits"]) for result in results} == dict.fromkeys(modes, (4, 0))


def test_a_fine_tuning_run_killed_before_its_initial_model_was_written_can_be_resumed(tiny_run, tiny, tmp_path):
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "pretrained")
    config = replace(tiny_run, init=str(tmp_path / "pretrained"), recipe="lora", lora_rank=2)
    train_run(config, tmp_path / "whole")
    run = create_run(tmp_path, "r", "x", overwrite=False)
    (run.path / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    assert train_run(config, run.path).finished
    assert_same_end(run.path, tmp_path / "whole")


def test_a_model_is_not_there_without_its_adapter(tiny_run, tiny, tmp_path, monkeypatch):
    CLIP(tiny, Tokenizer.characters()).save(tmp_path / "pretrained")
    config = replace(tiny_run, init=str(tmp_path / "pretrained"), recipe="lora", lora_rank=2)
    monkeypatch.setattr(checkpoint, "save_adapter", lambda model, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_run(config, tmp_path / "r")
    monkeypatch.undo()
    assert not (tmp_path / "r" / "model").exists()
    assert train_run(config, tmp_path / "r").finished
    assert (tmp_path / "r" / "model" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_tokenizer_that_cannot_be_written_is_a_disk_error(tmp_path):
    """The library's own error is none, and would have ended the training."""
    with pytest.raises(OSError, match="No space left"):
        Tokenizer.characters().save(Path("/dev/full"))


@pytest.mark.slow
def test_the_command_killed_twice_and_resumed_ends_with_the_same_bits(stateful_run, tmp_path):
    (tmp_path / "config.json").write_text(to_json(stateful_run))
    run = Run(tmp_path / "runs" / "r")
    command = [sys.executable, "-m", "m1clip", "train", "--name", "r"]
    for flags in (["--config", "config.json"], ["--resume"]):
        before = checkpoint.list_checkpoints(run)
        process = subprocess.Popen([*command, *flags], cwd=tmp_path, stderr=subprocess.DEVNULL)
        wait_for_checkpoint(run, before, process)
        process.kill()
        process.wait()
        assert run.read_status()["state"] == "dead"
    subprocess.run([*command, "--resume"], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    train_run(stateful_run, tmp_path / "whole")
    assert_same_end(run.path, tmp_path / "whole")


def wait_for_checkpoint(run: Run, before: list[Path], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 300
    while checkpoint.list_checkpoints(run)[-1:] in ([], before[-1:]):
        assert process.poll() is None, "the process ended before it saved"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-9]), "does not match its checksum"),
        ("training.safetensors", flip_bit, "does not match its checksum"),
        ("state.json", lambda file: file.write_text("{}"), "state.json is damaged"),
        (
            "state.json",
            lambda file: file.write_text(file.read_text().replace('"step": 8', '"step": 9')),
            "state.json is damaged",
        ),
        ("tokenizer.json", lambda file: file.unlink(), "tokenizer.json missing"),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(tiny_run, tmp_path, name, damage, reason):
    config, path, console = replace(tiny_run, save_every="3"), tmp_path / "r", QuietConsole()
    train_run(config, path)
    damage(path / "checkpoints" / "step_000008" / name)
    assert train_run(replace(config, epochs=3), path, console=console).finished
    warning = next(text for text in console.warnings if "step_000008 is damaged" in text)
    assert reason in warning
    assert "resuming from" in warning
    assert "step_000006" in warning
    assert [event["checkpoint"] for event in events(path, "damaged checkpoint")] == ["step_000008"]
    assert not list((path / "checkpoints").glob("damaged*"))  # deleted after the next save
    assert [step for step, _ in losses(path)] == list(range(1, 13))


def test_a_run_with_only_damaged_checkpoints_is_not_started_again(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "r")
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        flip_bit(path / "training.safetensors")
    before = (tmp_path / "r" / "status.json").read_text()
    with pytest.raises(ValueError, match=r"no intact checkpoint in .*--overwrite"):
        train_run(tiny_run, tmp_path / "r")
    assert (tmp_path / "r" / "status.json").read_text() == before


def constant_scores(score: float) -> Retrieval:
    return Retrieval(*4 * [Direction(score, score, score, 1.0)], images=16, captions=16, distinct_captions=16)


class Evaluated:
    """A CheckpointManager that is given scores, on a disk that may be full."""

    def __init__(self, config: TrainConfig, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.state, self.run = make_state(config), create_run(folder, "r", "x", False)
        self.progress, self.warnings, self.disk_is_full = Progress(), list[str](), False
        self.manager = CheckpointManager(self.run, self.state, self.progress, self.warnings.append)

        def save(*args):
            if self.disk_is_full:
                raise OSError(28, "No space left on device")
            return save_checkpoint(*args)

        monkeypatch.setattr(checkpoint, "save_checkpoint", save)

    def evaluate(self, step: int, score: float, disk_is_full: bool = False) -> None:
        self.progress.step, self.disk_is_full = step, disk_is_full
        self.manager.update_best(constant_scores(score).record())
        self.manager.save()

    @property
    def best(self) -> tuple[float | None, int | None, int]:
        return self.progress.best_score, self.progress.best_step, self.progress.evals_since_best


def test_the_best_checkpoint_is_kept_beside_the_newest_two(tiny_run, tmp_path, monkeypatch):
    evaluated = Evaluated(tiny_run, tmp_path, monkeypatch)
    for step, score in ((4, 0.2), (8, 0.9), (12, 0.3), (16, 0.3), (20, 0.5), (24, 0.4)):
        evaluated.evaluate(step, score)
    run = evaluated.run
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_000008", "step_000020", "step_000024"}
    assert (run.path / "best").resolve().name == "step_000008"
    assert (run.path / "last").resolve().name == "step_000024"
    assert evaluated.best == (0.9, 8, 4)
    assert checkpoint.read_progress(run.checkpoints / "step_000024") == evaluated.progress


def test_of_equal_scores_the_later_is_the_best_but_counts_against_patience(tiny_run, tmp_path, monkeypatch):
    evaluated = Evaluated(replace(tiny_run, patience=2), tmp_path, monkeypatch)
    for step, expected in ((4, (0.5, 4, 0)), (8, (0.5, 8, 1)), (12, (0.5, 12, 2))):
        evaluated.evaluate(step, 0.5)
        assert evaluated.best == expected
    assert evaluated.manager.out_of_patience


def test_a_best_that_could_not_be_saved_is_forgotten_once_training_moved_on(tiny_run, tmp_path, monkeypatch):
    evaluated = Evaluated(replace(tiny_run, patience=1), tmp_path, monkeypatch)
    evaluated.evaluate(4, 0.2)
    evaluated.evaluate(8, 0.9, disk_is_full=True)
    assert not evaluated.manager.out_of_patience
    assert evaluated.run.read("status.json")["problem"] == "disk full"
    evaluated.manager.retry_at = 0.0
    evaluated.evaluate(12, 0.1)
    assert not evaluated.run.failures
    assert evaluated.best == (0.2, 4, 1)
    assert (evaluated.run.path / "best").resolve().name == "step_000004"


def test_a_best_that_is_saved_on_a_retry_is_the_best(tiny_run, tmp_path, monkeypatch):
    evaluated = Evaluated(tiny_run, tmp_path, monkeypatch)
    evaluated.evaluate(4, 0.2)
    evaluated.evaluate(8, 0.9, disk_is_full=True)
    evaluated.disk_is_full = False
    evaluated.manager.finish(completed=True)
    assert evaluated.best == (0.9, 8, 0)
    assert (evaluated.run.path / "best").resolve().name == "step_000008"


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda path: flip_bit(path / "model.safetensors")])
def test_a_lost_best_checkpoint_is_reported_and_replaced(tiny_run, tmp_path, monkeypatch, damage):
    evaluated = Evaluated(replace(tiny_run, patience=9), tmp_path, monkeypatch)
    evaluated.evaluate(4, 0.9)
    evaluated.evaluate(8, 0.1)
    damage(evaluated.run.checkpoints / "step_000004")
    evaluated.manager.finish(completed=True)
    assert "the last state is kept" in evaluated.warnings[-1]
    assert evaluated.run.model.is_dir()
    CheckpointManager(evaluated.run, evaluated.state, evaluated.progress, evaluated.warnings.append)  # as on resume
    assert "the next best replaces it" in evaluated.warnings[-1]
    assert evaluated.best == (None, None, 0)


def test_patience_ends_a_run_and_keeps_the_best_model(tiny_run, tmp_path, monkeypatch):
    scores, update_best = iter((0.2, 0.9, 0.5, 0.4)), CheckpointManager.update_best
    monkeypatch.setattr(
        CheckpointManager, "update_best", lambda self, _: update_best(self, constant_scores(next(scores)).record())
    )
    config, path = replace(tiny_run, epochs=99, patience=2), tmp_path / "r"
    result = train_run(config, path)
    assert (result.finished, result.step, result.best_step, result.restored) == (True, 16, 8, True)
    model, best = (load_file(path / name / "model.safetensors") for name in ("model", "best"))
    assert all(torch.equal(model[key], best[key]) for key in model)
    eval_of_best = next(record for record in Run(path).records("eval") if record["step"] == 8)
    assert result.scores.record().items() <= eval_of_best.items()
    assert [event["best_step"] for event in events(path, "out of patience")] == [8]
    assert train_run(config, path).step == 16  # nothing is left to do


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill_disk(path: Path, spare: int = 0) -> None:
    """Fill the disk with one file, but for some bytes."""
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(path, path.stat().st_size - spare)


class DiskFiller(QuietConsole):
    """Fills the disk after one step, and frees it after another."""

    def __init__(self, folder: Path, full_at: int, free_at: int):
        super().__init__()
        self.file, self.full_at, self.free_at = folder / "filler", full_at, free_at

    def update_training(self, step, records, total):
        super().update_training(step, records, total)
        if step == self.full_at:
            fill_disk(self.file)
        if step == self.free_at:
            self.file.unlink()


def test_training_continues_on_a_full_disk_and_saves_when_there_is_room(tiny_run, tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.0)
    config = replace(tiny_run, epochs=4, save_every="1", log_every=1)
    console = DiskFiller(small_disk, full_at=5, free_at=11)
    assert train_run(config, small_disk / "r", console=console).finished
    failed = [text for text in console.warnings if text.startswith("CANNOT SAVE")]
    assert "No space left" in failed[0]
    assert "step_000004" in failed[0]  # the last one saved, which is still there
    assert "saved again at step 11" in console.warnings[-1]
    train_run(config, tmp_path / "whole")
    assert_same_end(small_disk / "r", tmp_path / "whole")
    assert losses(small_disk / "r") == losses(tmp_path / "whole")  # no line of the log was lost


def test_a_final_state_that_cannot_be_saved_is_an_error_after_some_retries(tiny_run, small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint, "RETRY_S", 0.01)
    monkeypatch.setattr(checkpoint, "WAIT_FOR_DISK_S", {"stopping": 0.05, "finishing": 0.05})
    console = DiskFiller(small_disk, full_at=6, free_at=99)
    with pytest.raises(OSError, match=r"step 8 could not be saved; the last checkpoint is .*step_000004"):
        train_run(replace(tiny_run, log_every=1), small_disk / "r", console=console)
    assert len([text for text in console.warnings if text.startswith("CANNOT SAVE")]) >= 2
    console.file.unlink()
    assert train_run(tiny_run, small_disk / "r").finished


@pytest.mark.parametrize("to", ["shards", "parquet"])
def test_a_conversion_on_a_full_disk_continues_when_there_is_room(to, small_disk, tmp_path, monkeypatch, capsys):
    """With the libraries' own writers, which a test double replaces."""
    monkeypatch.chdir(tmp_path)
    argv = ["data", "convert", "synthetic:40", "--val-size", "8", "--to", to, "--per-file", "8"]
    assert cli.run_command([*argv, "whole"]) == 0
    expected, codes = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}, []
    for spare in (0, 8192, 40960, 65536, 10**7):
        fill_disk(small_disk / "filler", spare)
        codes.append(cli.run_command([*argv, str(small_disk / "out")]))
        (small_disk / "filler").unlink()
    assert codes[0] == 1
    assert codes[-1] == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("m1clip: ")]
    assert len(lines) == sum(codes)
    assert all("No space left" in line for line in lines)
    assert {path.name: path.read_bytes() for path in (small_disk / "out").iterdir()} == expected


def test_non_finite_weights_are_never_saved(tiny_run, tmp_path):
    state, run = make_state(tiny_run), create_run(tmp_path, "r", "x", False)
    save_checkpoint(run, state, Progress(step=8))
    state.model.text_projection.weight.data[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"step 9; the last checkpoint is .*step_000008"):
        save_checkpoint(run, state, Progress(step=9))
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000008"]


def test_a_run_killed_after_its_config_was_written_can_be_resumed(tiny_run, tmp_path):
    run = create_run(tmp_path, "r", "x", overwrite=False)
    (run.path / "config.json").write_text(to_json(replace(tiny_run, recipe="scratch")))
    assert train_run(tiny_run, run.path).finished


def test_a_chunk_that_was_reduced_for_memory_is_kept_on_resume(tiny_run, tmp_path):
    train_run(replace(tiny_run, chunk=16), tmp_path / "r", stop_at=4)
    last = checkpoint.list_checkpoints(Run(tmp_path / "r"))[-1]
    state = json.loads((last / "state.json").read_text())
    state.pop("sum")
    state["position"]["chunk"] = 8  # as after running out of memory
    (last / "state.json").write_text(json.dumps({**state, "sum": checkpoint.record_checksum(state)}))
    train_run(replace(tiny_run, chunk=16), tmp_path / "r")
    chunks = {record["step"]: record["chunk"] for record in Run(tmp_path / "r").records("step")}
    assert (chunks[1], chunks[8]) == (16, 8)


def poison(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """The image of that row is NaN in every batch."""
    original = BatchStream.batch

    def batch_with_nan(self, step):
        batch = original(self, step)
        images = batch.image.images_BHWC.float()
        images[torch.from_numpy(batch.rows == row)] = float("nan")
        return replace(batch, image=Images(images))

    monkeypatch.setattr(BatchStream, "batch", batch_with_nan)


def test_a_batch_with_a_non_finite_row_is_skipped_and_the_row_is_named(tiny_run, tmp_path, monkeypatch):
    poison(monkeypatch, row=17)
    console, path = QuietConsole(), tmp_path / "r"
    assert train_run(tiny_run, path, console=console).finished
    skipped = [record for record in Run(path).records("step") if record.get("skipped")]
    assert [record["loss"] for record in skipped] == [None, None]  # once per epoch
    for event in events(path, "skipped"):
        assert 17 in event["rows"]
        assert len(event["rows"]) == 16
        assert event["names"] == ["synthetic train scene 17"]
    assert len(events(path, "skipped")) == 2
    assert "rows of the batch: synthetic train scene 17. The step was skipped" in console.warnings[0]
    assert all(weight.isfinite().all() for weight in load(path).state_dict().values())
    for line in (path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON: no NaN


def test_too_many_skipped_steps_stop_the_run_and_name_the_last_checkpoint(tiny_run, tmp_path, monkeypatch):
    poison(monkeypatch, row=17)
    monkeypatch.setattr(logger, "MAX_SKIPPED", 1)
    with pytest.raises(FloatingPointError, match=r"More than 1 steps were skipped; the last checkpoint is .*step_0"):
        train_run(replace(tiny_run, save_every="1"), tmp_path / "r")
    assert Run(tmp_path / "r").read("status.json")["state"] == "failed"


OUT_OF_MEMORY = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import psutil
from helpers import train_run
from m1clip.config import get_preset
config = replace(get_preset("nano"), data="synthetic:512", val_size=8, batch_size=512, epochs=1, chunk=512, threads=1)
config = replace(config, device="cpu", precision="fp32", compile="off")
train_run(replace(config, batch_size=16, chunk=16, log_every=99), Path(sys.argv[1]) / "warm-up", stop_at=32)
limit = psutil.Process().memory_info().vms + 360_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
train_run(config, Path(sys.argv[1]) / "r")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
def test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_chunks(tmp_path):
    """A real limit of 360 MB: the forward pass of 512 pairs takes 490 MB, a whole step in chunks of 256 takes 270.

    Closer to what the backward pass needs, small allocations fail in native libraries, which crash.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE), str(HERE.parent)))}
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path)]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "r")
    retries = events(run.path, "out of memory")
    assert retries[0]["step"] == 0
    assert retries[-1]["chunk"] < 512
    assert [record["step"] for record in run.records("step")] == [1]
    assert checkpoint.read_progress(checkpoint.list_checkpoints(run)[-1]).chunk == retries[-1]["chunk"]
