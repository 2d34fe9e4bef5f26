"""The command line as a person meets it: a wrong line gets a sentence, the right code, and leaves nothing."""

import json
import os
import subprocess
import sys
import time

import pytest

from m1clip import cli
from m1clip.commands import train
from m1clip.config import PRESETS, to_json

TINY = [
    *("--data", "synthetic:32", "--val-size", "8", "--batch-size", "8", "--epochs", "1", "--device", "cpu"),
    *("--model.vision.image-size", "32", "--model.vision.width", "32", "--model.vision.layers", "1"),
    *("--model.text.width", "32", "--model.text.layers", "1"),
]


def said(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, in this process."""
    try:
        code = cli.run_command(list(words))
    except SystemExit as end:  # the flag parser's own way out
        code = int(end.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trian", "did you mean train"),
        ("data previw", "did you mean data preview"),
        ("train --preset nanno", "did you mean nano"),
        ("train --batchh 3", "--batch-size"),
        ("train --batch-size many", "many"),
        ("train --batch-size 1", "at least 2"),
        ("train --lr -1", "above 0"),
        ("train --lr nan", "above 0"),
        ("train --epochs 0", "at least 1"),
        ("train --model.vision.patch_size 7", "not a multiple of patch"),
        ("train --model.loss hinge", "hinge"),
        ("train --device gpu", "no device 'gpu'"),
        ("train --data synthetic:5 --batch-size 6", "larger than the 5 training pairs"),
        ("train --data cifar", "no data source"),
        ("train --tokenizer bep", "there is no file"),
        ("train --config nowhere.json", "nowhere.json"),
        ("train --resume", "no run in"),
        ("train --resume --overwrite", "give one of them"),
        ("train --config c.json --preset tiny", "give one of them"),
        ("train --preset nano --preset tyni", "did you mean tiny"),
        ("train --resume --name gone", "no run 'gone'"),
        ("train --name ../up", "plain word"),
        ("train --chunk 0", "auto or at least 1"),
        ("train --chunk lots", "lots"),
        ("train --keep 0", "at least 1"),
        ("train --layer-decay 0", "above 0"),
        ("train --start-size 30", "in steps of a patch"),
        ("train --ema 1", "below 1"),
        ("train --patience -1", "0 or more"),
        ("train --track tensorbord", "tensorbord"),
        ("train --best-metric r1", "r1"),
        ("stop", "no run is running"),
        ("stop gone", "no run 'gone'"),
        ("eval gone", "no run 'gone'"),
        ("info --preset sead", "did you mean seed"),
        ("info --batch-size 0", "at least 1"),
        ("data preview --out sheet.nothing", "end it with .png"),
        ("data preview --rows 0", "1 to 1000"),
    ],
)
def test_a_wrong_line_gets_a_sentence_and_code_2(capsys, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = said(capsys, *line.split())
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place_is_a_failure_with_a_sentence(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = said(capsys, "train", *TINY, "--runs", str(tmp_path / "file" / "runs"))
    assert code == 1
    assert "Not a directory" in err


def test_debug_shows_the_traceback(capsys):
    code, _, err = said(capsys, "train", "--preset", "nanno", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_help_lists_every_verb_and_every_verb_has_help(capsys):
    code, out, _ = said(capsys, "--help")
    assert code == 0
    for verb in cli.COMMANDS:
        assert verb in out
        code, text, _ = said(capsys, *verb.split(), "--help")
        assert code == 0
        assert "--" in text
    assert said(capsys)[1] == out


def test_help_is_instant():
    """Under half a second on a free machine; three times that here, where other work may share the core."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "m1clip", "--help"], check=True, stdout=subprocess.DEVNULL)
    assert time.perf_counter() - start < 1.5


def test_train_eval_and_repeat_from_the_command_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = said(capsys, "train", *TINY)
    assert code == 0
    assert "chance" in out
    assert "eval runs/nano-1" in out
    assert "1/1" in err

    code, out, _ = said(capsys, "eval", "--device", "cpu", "--json")
    scores = json.loads(out)
    assert scores["images"] == 8
    assert {edit["changed"] for edit in scores["edits"]} >= {"color", "sky"}
    for folder in ("model", "best", "checkpoints/step_000004"):
        _, out, _ = said(capsys, "eval", f"runs/nano-1/{folder}", "--device", "cpu", "--json")
        assert json.loads(out)["edits"] == scores["edits"]  # of the run's own validation pairs

    code, out, _ = said(capsys, "train", "--config", "runs/nano-1/config.json", "--json")
    again = json.loads(out)
    assert again["run"] == "runs/nano-2"
    assert again["mean_r1"] == scores["mean_r1"]

    code, _, err = said(capsys, "train", *TINY, "--name", "nano-2")
    assert code == 2
    assert "--resume" in err
    assert "--overwrite" in err
    assert said(capsys, "train", *TINY, "--name", "nano-2", "--overwrite")[0] == 0
    code, out, _ = said(capsys, "train", "--resume", "--name", "nano-2", "--epochs", "2", "--json")
    assert json.loads(out)["step"] == 8

    code, _, err = said(capsys, "train", "--resume", "--name", "nano-2", "--batch-size", "4", "--seed", "3")
    assert code == 2
    assert "keeps its seed, batch" in err
    code, _, err = said(capsys, "train", "--resume", "--name", "nano-2", "--best-metric", "i2t_r5")
    assert code == 2
    assert "keeps its best_metric" in err
    code, _, err = said(capsys, "train", "--resume", "--name", "nano-2", "--epochs", "1")
    assert code == 2
    assert "is at step 8; 1 epochs have only 4" in err


def test_no_flags_at_all_mean_the_nano_preset():
    assert train.parse("m1clip train", []).training == PRESETS["nano"]
    assert train.parse("m1clip train", ["--preset=tiny", "--epochs", "3"]).training.model == PRESETS["tiny"].model


def test_preset_flags_show_that_presets_defaults(capsys):
    _, out, _ = said(capsys, "train", "--preset", "seed", "--help")
    assert "synthetic:216" in out


def test_info_counts_the_seed_preset(capsys):
    _, out, _ = said(capsys, "info", "--preset", "seed", "--json")
    row = json.loads(out)
    assert row["total"] == 105_426_433
    assert row["forward_gflop"] == pytest.approx(34.7, rel=0.01)  # 38.1 if the last blocks did all tokens
    assert row["memory_gb"]["optimizer"] == pytest.approx(2 * row["memory_gb"]["parameters"])
    assert "105,426,433" in said(capsys, "info", "seed")[1]


def test_preview_writes_a_sheet(capsys, tmp_path):
    code, _, _ = said(capsys, "data", "preview", "--rows", "1", "--columns", "2", "--out", str(tmp_path / "s.png"))
    assert code == 0
    assert (tmp_path / "s.png").stat().st_size > 5000


@pytest.mark.parametrize("signal", ["INT", "TERM"])
def test_a_signal_ends_a_real_process_cleanly_with_its_state_saved(tmp_path, signal, tiny_run):
    (tmp_path / "c.json").write_text(to_json(tiny_run))
    command = [sys.executable, "-m", "m1clip", "train", "--config", "c.json", "--name", "r", "--epochs", "9999"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    until(lambda: metrics.exists() and '"kind": "step"' in metrics.read_text(), process)
    os.kill(process.pid, {"INT": 2, "TERM": 15}[signal])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "--resume --name runs/r" in out
    status = json.loads((tmp_path / "runs" / "r" / "status.json").read_text())
    assert status["state"] == "stopped"
    assert (tmp_path / "runs" / "r" / "last" / "state.json").exists()


def until(true, process: subprocess.Popen[str], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
