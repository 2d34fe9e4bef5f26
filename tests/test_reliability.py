"""What happens to a run that is left alone: killed, out of disk, out of memory, fed with nonsense."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers import QuietConsole, make_state, train_run
from m1clip import run as runs
from m1clip.config import TrainConfig, to_json
from m1clip.data.batches import BatchStream
from m1clip.model.clip import load
from m1clip.training import checkpoint
from m1clip.training.checkpoint import Progress

HERE = Path(__file__).parent


def same_end(one: Path, other: Path) -> bool:
    """Weights, moments, random state and position of two runs' last checkpoints, bit for bit."""
    a, b = (checkpoint.list_checkpoints(runs.Run(path))[-1] for path in (one, other))
    for name in ("model.safetensors", "training.safetensors"):
        ours, theirs = load_file(a / name), load_file(b / name)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
            return False
    return a.name == b.name


def losses(path: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in runs.Run(path).records("step")]


@pytest.fixture
def often(tiny_run) -> TrainConfig:
    """Saves all the time, and uses everything whose state could be lost."""
    return replace(
        tiny_run, epochs=12, save_every="2", threads=1, crop_scale=0.6, hflip=True, ema=0.9, optimizer="muon", chunk=5
    )


def test_killed_again_and_again_it_ends_with_the_bits_of_an_unbroken_run(often, tmp_path):
    (tmp_path / "c.json").write_text(to_json(often))
    command = [sys.executable, HERE / "killed.py", tmp_path / "c.json", tmp_path, "1", "14"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=240).stdout
    assert output.count("killed") >= 6, output
    assert output.endswith("exit 0\n"), output
    train_run(often, tmp_path / "whole")
    assert same_end(tmp_path / "r", tmp_path / "whole")
    assert losses(tmp_path / "r") == losses(tmp_path / "whole")  # each step told once, as it was
    epochs = [list(runs.Run(tmp_path / name).records("epoch")) for name in ("r", "whole")]
    assert [row["loss"] for row in epochs[0]] == [row["loss"] for row in epochs[1]]
    assert not list((tmp_path / "r").rglob(".*"))


def test_the_command_itself_killed_and_resumed(often, tmp_path):
    """As a user would: the program, kill -9 at some moment, --resume."""
    (tmp_path / "c.json").write_text(to_json(often))
    rng, path = random.Random(0), tmp_path / "runs" / "r"
    command = [sys.executable, "-m", "m1clip", "train", "--name", "r"]
    for extra in (["--config", "c.json"], ["--resume"]):
        process = subprocess.Popen([*command, *extra], cwd=tmp_path, stderr=subprocess.DEVNULL)
        before = checkpoint.list_checkpoints(runs.Run(path))
        end = time.monotonic() + 60
        while checkpoint.list_checkpoints(runs.Run(path)) == before and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.wait()
        assert runs.Run(path).read_status()["state"] == "dead"
    subprocess.run([*command, "--resume"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    train_run(often, tmp_path / "whole")
    assert same_end(path, tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-9])),
        ("training.safetensors", lambda file: flip(file)),
        ("state.json", lambda file: file.write_text("{}")),
        ("state.json", lambda file: file.write_text(file.read_text().replace('"step": 8', '"step": 9'))),
        ("tokenizer.json", lambda file: file.unlink()),
    ],
)
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_used(tiny_run, tmp_path, name, damage):
    config = replace(tiny_run, save_every="3")
    train_run(replace(config, epochs=2), tmp_path / "r")
    damage(tmp_path / "r" / "checkpoints" / "step_000008" / name)
    console = QuietConsole()
    longer = replace(config, epochs=3)
    assert train_run(longer, tmp_path / "r", console=console).finished
    assert "step_000008 is damaged" in console.warnings[0]
    assert "step_000006 instead" in console.warnings[0]
    events = [row["event"] for row in runs.Run(tmp_path / "r").records("event")]
    assert "damaged checkpoint" in events
    assert not list((tmp_path / "r" / "checkpoints").glob("damaged*"))  # gone once newer ones were whole
    assert [step for step, _ in losses(tmp_path / "r")] == list(range(1, 13))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_where_every_checkpoint_is_damaged_nothing_is_begun_anew(tiny_run, tmp_path):
    train_run(tiny_run, tmp_path / "r")
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        flip(path / "training.safetensors")
    before = (tmp_path / "r" / "status.json").read_text()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole .*--overwrite"):
        train_run(tiny_run, tmp_path / "r")
    assert (tmp_path / "r" / "status.json").read_text() == before


def test_the_best_is_kept_beside_the_newest(tiny_run, tmp_path, monkeypatch):
    scores = iter([0.2, 0.9, 0.3, 0.3, 0.5, 0.4])
    monkeypatch.setattr(checkpoint.Retrieval, "record", lambda self: {"mean_r1": next(scores), "images": 16})
    state, run = make_state(tiny_run), runs.create_run(tmp_path, "r", "x", False)
    progress = Progress()
    watched = checkpoint.CheckpointManager(run, state, progress, lambda text: None)
    for step in (4, 8, 12, 16, 20, 24):
        progress.step = step
        watched.judge(checkpoint.Retrieval(*4 * [None]))
        watched.save()
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_000008", "step_000020", "step_000024"}
    assert (run.path / "best").resolve().name == "step_000008"
    assert (run.path / "last").resolve().name == "step_000024"
    assert (progress.best_score, progress.best_step, progress.stale) == (0.9, 8, 4)
    again = checkpoint.read_progress(run.checkpoints / "step_000024")
    assert again == progress


class Judged:
    """A checkpoints fed with scores, on a disk that may refuse."""

    def __init__(self, config, tmp_path, monkeypatch):
        self.state, self.run = make_state(config), runs.create_run(tmp_path, "r", "x", False)
        self.progress, self.warnings, self.full = Progress(), list[str](), False
        self.checkpoints = checkpoint.CheckpointManager(self.run, self.state, self.progress, self.warnings.append)
        plain = checkpoint.save_checkpoint

        def save(*args, **kwargs):
            if self.full:
                raise OSError(28, "No space left on device")
            return plain(*args, **kwargs)

        monkeypatch.setattr(checkpoint, "save", save)
        monkeypatch.setattr(checkpoint.Retrieval, "record", lambda scores: {"mean_r1": scores.images})

    def evaluate(self, step: int, score: float, full: bool = False) -> None:
        self.progress.step, self.full = step, full
        self.checkpoints.judge(checkpoint.Retrieval(None, None, score, 0))
        self.checkpoints.save()

    @property
    def best(self):
        return self.progress.best_score, self.progress.best_step, self.progress.stale


def test_of_equal_scores_the_later_is_the_best_but_patience_runs_on(tiny_run, tmp_path, monkeypatch):
    judged = Judged(replace(tiny_run, patience=2), tmp_path, monkeypatch)
    for step, expected in ((4, (0.5, 4, 0)), (8, (0.5, 8, 1)), (12, (0.5, 12, 2))):
        judged.evaluate(step, 0.5)
        assert judged.best == expected
    assert judged.checkpoints.out_of_patience


def test_a_best_that_the_disk_refused_is_none_once_training_has_moved_on(tiny_run, tmp_path, monkeypatch):
    judged = Judged(replace(tiny_run, patience=1), tmp_path, monkeypatch)
    judged.evaluate(4, 0.2)
    judged.evaluate(8, 0.9, full=True)
    assert not judged.checkpoints.out_of_patience
    assert judged.run.read("status.json")["trouble"] == "cannot save: No space left on device"
    judged.checkpoints.retry_at = 0.0
    judged.evaluate(12, 0.1)
    assert judged.run.trouble is None
    assert judged.best == (0.2, 4, 1)
    assert (judged.run.path / "best").resolve().name == "step_000004"


def test_a_best_that_the_disk_takes_in_the_end_is_the_best(tiny_run, tmp_path, monkeypatch):
    judged = Judged(tiny_run, tmp_path, monkeypatch)
    judged.evaluate(4, 0.2)
    judged.evaluate(8, 0.9, full=True)
    judged.full = False
    judged.checkpoints.finish(final=True)
    assert judged.best == (0.9, 8, 0)
    assert (judged.run.path / "best").resolve().name == "step_000008"


@pytest.mark.parametrize("damage", [shutil.rmtree, lambda path: flip(path / "model.safetensors")])
def test_a_best_that_is_lost_is_told_and_another_is_found(tiny_run, tmp_path, monkeypatch, damage):
    judged = Judged(replace(tiny_run, patience=9), tmp_path, monkeypatch)
    judged.evaluate(4, 0.9)
    judged.evaluate(8, 0.1)
    damage(judged.run.checkpoints / "step_000004")
    judged.checkpoints.finish(final=True)  # at the end: the model is the last state
    assert "the model is the last state" in judged.warnings[-1]
    assert judged.run.model.is_dir()
    checkpoint.CheckpointManager(judged.run, judged.state, judged.progress, judged.warnings.append)  # on a resume
    assert "another will be found" in judged.warnings[-1]
    assert judged.best == (None, None, 0)


def test_patience_ends_a_run_and_keeps_the_best(tiny_run, tmp_path):
    config = replace(tiny_run, epochs=200, lr=0.3, warmup=0.0, patience=2)  # a rate that destroys
    result = train_run(config, tmp_path / "r")
    assert result.finished
    assert result.step < 800
    progress = checkpoint.read_progress(checkpoint.list_checkpoints(runs.Run(tmp_path / "r"))[-1])
    assert progress.stale == 2
    model, best = (load_file(tmp_path / "r" / name / "model.safetensors") for name in ("model", "best"))
    assert all(torch.equal(model[key], best[key]) for key in model)
    assert result.scores.mean_r1 == progress.best_score
    assert train_run(config, tmp_path / "r").step == result.step  # nothing more to do
    events = [row for row in runs.Run(tmp_path / "r").records("event") if row["event"] == "out of patience"]
    assert events[0]["best_step"] == progress.best_step


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


class Filling(QuietConsole):
    """Fills the disk after some step, and makes room again after another."""

    def __init__(self, folder: Path, full_at: int, free_at: int):
        super().__init__()
        self.plug, self.full_at, self.free_at = folder / "plug", full_at, free_at

    def step(self, step, rows, total):
        super().step(step, rows, total)
        if step == self.full_at:
            with open(self.plug, "wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        if step == self.free_at:
            self.plug.unlink()


def test_a_full_disk_is_told_training_goes_on_and_it_saves_when_there_is_room(
    tiny_run, tmp_path, small_disk, monkeypatch
):
    monkeypatch.setattr(checkpoint_manager, "RETRY_S", 0.0)
    config = replace(tiny_run, epochs=4, save_every="1", log_every=1)
    console = Filling(small_disk, full_at=5, free_at=11)
    assert train_run(config, small_disk / "r", console=console).finished
    failed = [text for text in console.warnings if text.startswith("CANNOT SAVE")]
    assert "No space left" in failed[0]
    assert "step_000004" in failed[0]  # the last that was written, and still there
    assert "saved again at step 11" in console.warnings[-1]
    train_run(config, tmp_path / "whole")
    assert same_end(small_disk / "r", tmp_path / "whole")
    assert losses(small_disk / "r") == losses(tmp_path / "whole")  # no line of the log was lost


def test_what_cannot_be_saved_at_the_end_is_waited_for_and_then_an_error(tiny_run, small_disk, monkeypatch):
    monkeypatch.setattr(checkpoint_manager, "RETRY_S", 0.01)
    monkeypatch.setattr(checkpoint_manager, "PATIENCE_S", {"stopping": 0.05, "finishing": 0.05})
    console = Filling(small_disk, full_at=6, free_at=99)
    with pytest.raises(OSError, match=r"step 8 could not be saved; the last good state is .*step_000004"):
        train_run(replace(tiny_run, log_every=1), small_disk / "r", console=console)
    assert len([text for text in console.warnings if text.startswith("CANNOT SAVE")]) >= 3
    console.plug.unlink()
    assert train_run(tiny_run, small_disk / "r").finished


def test_broken_weights_are_not_saved_over_good_ones(tiny_run, tmp_path):
    state, run = make_state(tiny_run), runs.create_run(tmp_path, "r", "x", False)
    checkpoint.save_checkpoint(run, state, Progress(step=8), keep=1)
    state.model.text_projection.weight.data[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"the last good state is .*step_000008"):
        checkpoint.save_checkpoint(run, state, Progress(step=9), keep=1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000008"]


def test_a_folder_killed_before_its_first_files_can_be_used_again(tiny_run, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / ".config.json.77").touch()
    assert runs.new_run_path(tmp_path, "r", "x", overwrite=False) == tmp_path / "r"
    run = runs.create_run(tmp_path, "r", "x", overwrite=False)
    assert not list(run.path.iterdir())
    (run.path / "config.json").write_text(to_json(tiny_run))  # the first thing that a run writes
    with pytest.raises(FileExistsError, match="--overwrite"):
        runs.new_run_path(tmp_path, "r", "x", overwrite=False)
    assert train_run(tiny_run, run.path).finished


def test_a_chunk_that_memory_decided_is_kept_by_a_resumed_run(tiny_run, tmp_path):
    train_run(replace(tiny_run, chunk=16), tmp_path / "r", stop_at=4)
    last = checkpoint.list_checkpoints(runs.Run(tmp_path / "r"))[-1]
    state = json.loads((last / "state.json").read_text())
    state.pop("sum")
    state["position"]["chunk"] = 8  # as if memory had run out
    (last / "state.json").write_text(json.dumps({**state, "sum": checkpoint.record_checksum(state)}))
    train_run(replace(tiny_run, chunk=16), tmp_path / "r")
    chunks = {row["step"]: row["chunk"] for row in runs.Run(tmp_path / "r").records("step")}
    assert (chunks[1], chunks[8]) == (16, 8)


def poisoned(monkeypatch, row: int) -> None:
    """That row's image is not a number, whenever it comes."""
    plain = BatchStream.at

    def at(self, step):
        batch = plain(self, step)
        images = batch.images_BHWC.float()
        images[torch.from_numpy(batch.rows == row)] = float("nan")
        return replace(batch, images_BHWC=images)

    monkeypatch.setattr(BatchStream, "at", at)


def test_a_row_that_is_not_finite_is_named_and_its_batch_passed_over(tiny_run, tmp_path, monkeypatch):
    poisoned(monkeypatch, row=17)
    console = QuietConsole()
    assert train_run(replace(tiny_run), tmp_path / "r", console=console).finished
    skipped = [row for row in runs.Run(tmp_path / "r").records("step") if row.get("skipped")]
    assert len(skipped) == 2  # once an epoch
    assert skipped[0]["loss"] is None
    events = [row for row in runs.Run(tmp_path / "r").records("event") if row["event"] == "skipped"]
    assert all(17 in row["rows"] and len(row["rows"]) == 16 for row in events)
    assert events[0]["names"] == ["synthetic train scene 17"]
    assert "the batch held synthetic train scene 17. No step was taken" in console.warnings[0]
    assert np.isfinite(load(tmp_path / "r").text_projection.weight.detach().numpy()).all()
    for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_too_many_of_them_stop_the_run_with_the_last_good_state_named(tiny_run, tmp_path, monkeypatch):
    poisoned(monkeypatch, row=17)
    with pytest.raises(FloatingPointError, match=r"--max-skips 1 such steps; the last good state is .*step_0"):
        train_run(replace(tiny_run, max_skips=1, save_every="1"), tmp_path / "r")
    assert runs.Run(tmp_path / "r").read("status.json")["state"] == "failed"


OUT_OF_MEMORY = """
import resource, sys
from dataclasses import replace
from pathlib import Path
import psutil
from helpers import train_run
from m1clip.config import get_preset
config = replace(get_preset("nano"), data="synthetic:512", val_size=8, batch_size=512, epochs=1, chunk=512, threads=1)
train_run(replace(config, batch_size=16, chunk=16, log_every=99), Path(sys.argv[1]) / "warm-up", stop_at=32)
limit = psutil.Process().memory_info().vms + 450_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
train_run(config, Path(sys.argv[1]) / "r")
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not keep to RLIMIT_AS")
def test_out_of_memory_the_batch_is_divided_and_the_same_step_done(tmp_path):
    """A real limit: 512 pairs of nano want about 600 MB at once, and get 450."""
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path)]
    subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True)
    run = runs.Run(tmp_path / "r")
    divided = [row for row in run.records("event") if row["event"] == "out of memory"]
    assert divided[0]["step"] == 0
    assert divided[-1]["chunk"] < 512
    assert [row["step"] for row in run.records("step")] == [1]
    assert checkpoint.read_progress(checkpoint.list_checkpoints(run)[-1]).chunk == divided[-1]["chunk"]
