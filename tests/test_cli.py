"""The command line: wrong commands are refused in one sentence with exit code 2, and leave nothing behind."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tyro
from PIL import Image

from m1clip import api, cli
from m1clip.commands import parse_flags, train
from m1clip.config import PRESETS, get_preset, requested_config, to_json
from photos import jpeg, write_photos, write_tar

FROM_TEXT = "--caption-from text"
TINY = [
    *("--data", "synthetic:32", "--val-size", "8", "--batch-size", "8", "--epochs", "1", "--device", "cpu"),
    *("--model.vision.image-size", "32", "--model.vision.width", "32", "--model.vision.layers", "1"),
    *("--model.text.width", "32", "--model.text.layers", "1"),
]


def call(capsys, *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, in this process."""
    try:
        code = cli.run_command(list(argv))
    except SystemExit as exit_:  # raised by the flag parser
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trian", "no command 'trian'; did you mean train?"),
        ("--print-completion tcsh", "takes bash, zsh, fish, not 'tcsh'"),
        ("--print-completion", "takes bash, zsh, fish, not ''"),
        ("data previw", "did you mean data preview"),
        ("train --preset nanno", "no preset 'nanno'; did you mean nano?"),
        ("train --preset nano --preset tyni", "did you mean tiny"),
        ("train --batch-size 1", "batch_size must be at least 2, not 1"),
        ("train --lr -1", "lr must be above 0"),
        ("train --lr nan", "lr must be finite"),
        ("train --epochs 0", "epochs must be at least 1"),
        ("train --ema 1", "ema must be below 1"),
        ("train --patience -1", "patience must be at least 0"),
        ("train --chunk 0", "chunk must be at least 1 or 'auto'"),
        ("train --budget soon", "such as 90s, 10m or 2h, not 'soon'"),
        ("train --save-every often", "such as 90s, 10m or 2h, not 'often'"),
        ("train --model.vision.patch_size 7", "image_size 64 is not a multiple of patch_size 7"),
        ("train --device gpu", "no device 'gpu'"),
        ("train --data synthetic:5 --batch-size 6", "batch_size 6 is larger than the 5 training pairs"),
        ("train --data cifar", "no data source 'cifar'"),
        ("train --tokenizer bep", "there is no file 'bep'"),
        ("train --recipe lora", "--recipe lora needs pretrained weights"),
        ("train --init x --vision timm:x", "cannot be combined"),
        ("train --init x --model.vision.width 64", "--model.vision.width cannot change it"),
        ("train --text hf:x --model.text.layers 64", "--model.text.layers cannot change it"),
        ("train --config nowhere.json", "no configuration at nowhere.json"),
        ("train --config c.json --preset tiny", "--config and --preset cannot be combined"),
        ("train --budget 10m --epochs 3", "--budget and --epochs cannot be combined"),
        ("train --resume", "no run in runs/"),
        ("train --resume --name gone", "no run 'gone'"),
        ("train --resume --overwrite", "--resume and --overwrite cannot be combined"),
        ("train --resume --preset tiny", "--resume and --preset cannot be combined"),
        ("train --overwrite", "--name says which"),
        ("train --name ../up", "plain folder name"),
        ("train --lr -1 --background", "lr must be above 0"),
        ("stop", "no run is running"),
        ("stop gone", "no run 'gone'"),
        ("eval gone", "no run 'gone'"),
        ("info --preset nanno", "did you mean nano"),
        ("info --batch-size 0", "at least 1"),
        ("data preview --out sheet.nothing", "must end in .png"),
        ("data preview --rows 0", "1 to 1000"),
        # Flags and values that the parser refuses.
        ("train --batch-sizee 3", "no flag --batch-sizee; did you mean --batch-size"),
        ("train --batch-size many", "--batch-size must be a whole number, not 'many'"),
        ("train --epochs=1.5", "--epochs must be a whole number, not '1.5'"),
        ("train --lr fast", "--lr must be a number, not 'fast'"),
        ("train --lr", "--lr needs a number"),
        ("train --chunk lots", "--chunk must be a whole number or auto, not 'lots'"),
        ("train --model.loss hinge", "--model.loss must be softmax or sigmoid, not 'hinge'"),
        ("train --model.inside 0", "no flag --model.inside"),
        ("train --model.vision.mean nan nan nan", "no flag --model.vision.mean"),
        ("train --lock vision", "no flag --lock"),
        ("train --recipe locked", "--recipe must be auto, scratch, frozen, lora or full, not 'locked'"),
        ("train --epochs " + "9" * 5000, "--epochs must be a whole number, not '999"),
        ("train nano", "unexpected argument 'nano'"),
        ("eval --split trian", "--split must be auto, val, test or all, not 'trian'"),
        ("data convert photos", "m1clip data convert needs OUT"),
        ("bench --batch-sizes 8 x", "--batch-sizes must be a whole number, one or several"),
        # Numbers that no run could use.
        ("train --epochs 100000000000000000000000", "epochs must be at most 1000000000"),
        ("train --steps 100000000000000000000000", "steps must be at most 1000000000"),
        ("train --weight-decay inf", "weight_decay must be finite"),
        ("train --weight-decay nan", "weight_decay must be finite"),
        ("train --budget 1e300h", "such as 90s, 10m or 2h, not '1e300h'"),
        # Settings that say nothing about this run.
        ("train --freeze vision", "from scratch all weights are random"),
        ("train --unfreeze 2", "from scratch all layers are trained"),
        ("data check coco:", "there is no folder ''"),
        ("train --data synthetic:", "must be a whole number of scenes, as in synthetic:12000"),
        ("train --data synthetic:1e4", "'1e4' must be a whole number of scenes"),
        ("data check synthetic:", "must be a whole number of scenes"),
        ("train --image-column nope", "--image-column nope does not apply to synthetic:12000"),
        ("train --name " + "a" * 300, "--name must have at most 200 bytes"),
        ("train --background --name " + "a" * 300, "--name must have at most 200 bytes"),
        ("train --name a\x1b[2Jb", "all printable"),
        ("bench --devices tpu", "no device 'tpu'"),
        ("bench scaling --devices tpu", "no device 'tpu'"),
        ("compare --on tpu", "no device 'tpu'"),
        ("data convert synthetic:4 out --seed -1", "seed must be at least 0"),
        ("data convert nope out", "no data source 'nope'"),
        ("data preview nope", "no data source 'nope'"),
    ],
)
def test_a_wrong_command_gets_one_sentence_and_exit_code_2(capsys, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, *line.split())
    assert (code, out) == (2, "")
    assert err.startswith("m1clip: ")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_background_run_that_is_refused_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "m1clip", "train", "--background", "--data", "nope"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 2
    assert "no data source 'nope'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("source", "flag"), [("photos", "--image-column x"), ("table.csv", "--caption-from folder"), ("t.tar", FROM_TEXT)]
)
def test_flags_about_another_kind_of_data_are_refused(capsys, tmp_path, monkeypatch, source, flag):
    monkeypatch.chdir(tmp_path)
    for label in ("cat", "dog"):
        write_photos(tmp_path / "photos" / label, 2)
    (tmp_path / "table.csv").write_text("image,caption\nphotos/cat/0000.jpg,a cat\n")
    write_tar(tmp_path / "t.tar", {"a.jpg": jpeg(0), "a.txt": b"a cat"})
    code, _, err = call(capsys, "data", "check", source, *flag.split())
    assert code == 2
    assert f"{flag} does not apply to {source}" in err


def test_a_wrong_setting_is_refused_before_torch_is_imported(tmp_path):
    code = "import sys; from m1clip import cli; print(cli.run_command(['train', '--lr', '-1']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.stdout == "2 False\n"


def test_an_unwritable_folder_is_a_failure_in_one_sentence(capsys, tmp_path):
    (tmp_path / "file").touch()
    code, _, err = call(capsys, "train", *TINY, "--runs", str(tmp_path / "file" / "runs"))
    assert code == 1
    assert err.splitlines()[-1].startswith("m1clip: ")
    assert "Not a directory" in err


def test_debug_shows_the_traceback(capsys):
    code, _, err = call(capsys, "train", "--preset", "nanno", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_help_lists_every_command(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(f"  {name} " in out for name in cli.COMMANDS)
    assert call(capsys)[1] == out
    _, out, _ = call(capsys, "data")
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["m1clip", *name.split()] for name in cli.COMMANDS if name.startswith("data ")
    ]


@pytest.fixture(scope="module")
def completion_scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "m1clip", "--print-completion", shell]
        (folder / shell).write_text(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return folder


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["tr"], {"train"}),
        (["train", "--batch"], {"--batch-size"}),
        (["train", "--optimizer", ""], {"adamw", "muon"}),
        (["eval", "--split", ""], {"auto", "val", "test", "all"}),
        (["data", ""], {"-h", "--help", "check", "convert", "preview", "template"}),
        (["train", "--da"], {"--data"}),  # whose help has two lines
        (["bench", "sc"], {"scaling"}),
        (["bench", "scaling", "--pa"], {"--pairs"}),
        (["bench", "--qu"], {"--quick"}),
    ],
)
def test_bash_completes_commands_flags_and_choices(completion_scripts, line, expected):
    words = shlex.join(["m1clip", *line])
    drive = f"COMP_WORDS=({words}); COMP_CWORD={len(line)}; _tyro_m1clip; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"source {shlex.quote(str(completion_scripts / 'bash'))}; {drive}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_completion_of_other_shells_has_valid_syntax(completion_scripts, shell):
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", completion_scripts / shell], check=True)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(capsys, command):
    code, out, _ = call(capsys, *command.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: m1clip {command} ")
    assert "show this help message" in out


def test_help_of_train_shows_every_flag_with_its_default(capsys):
    code, out, _ = call(capsys, "train", "--help")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    for flag, default in {
        "--batch-size INT": "256",
        "--lr FLOAT": "0.003",
        "--epochs INT": "3",
        "--optimizer {adamw,muon}": "muon",
        "--data STR": "synthetic:12000",
        "--hflip, --no-hflip": "False",
        "--model.vision.width INT": "128",
    }.items():
        assert text.partition(flag)[2].partition("(default: ")[2].partition(")")[0] == default, flag


def test_without_flags_nothing_is_given_and_nano_is_trained():
    args = parse_flags(train.Args, "m1clip train", [])
    assert args.settings() == {}
    assert requested_config({}) == args.training == PRESETS["nano"]


def test_given_settings_are_those_on_the_command_line():
    argv = [
        "--preset=tiny",
        "--lr",
        "0.003",
        "--no-hflip",
        "--model.vision.patch_size",
        "8",
        "--allow",
        "urls",
        "links",
    ]
    args = parse_flags(train.Args, "m1clip train", [*argv, "--name", "x", "--json", "--chunk=auto"])
    assert args.settings() == {
        **{"preset": "tiny", "lr": 0.003, "hflip": False, "model.vision.patch_size": 8},
        **{"allow": ("urls", "links"), "chunk": "auto"},
    }
    assert {"name", "json", "model.vision.patch_size", "hflip"} <= train.given_flags([*argv, "--name", "x", "--json"])


def test_given_settings_survive_a_preset():
    argv = ["--preset", "small", "--epochs", "9", "--lr", "0.003", "--model.text.layers", "3"]
    config = requested_config(parse_flags(train.Args, "m1clip train", argv).settings())
    assert (config.epochs, config.lr, config.model.text.layers) == (9, 0.003, 3)
    small = get_preset("small")
    assert (config.batch_size, config.model.vision) == (small.batch_size, small.model.vision)


def test_argv_is_parsed_once(capsys, monkeypatch, tmp_path):
    parsed, called, parse = [], [], tyro.cli

    def count(*args, **kwargs):
        parsed.append(kwargs["args"])
        return parse(*args, **kwargs)

    def fake_train(**kwargs):
        called.append(kwargs)
        return api.TrainResult(tmp_path / "r", True, 1, 1.0, None, None)

    monkeypatch.setattr(tyro, "cli", count)
    monkeypatch.setattr(api, "train", fake_train)
    argv = ["--preset", "tiny", "--lr", "0.5", "--runs", str(tmp_path), "--name", "r", "--overwrite", "--json"]
    assert call(capsys, "train", *argv)[0] == 0
    assert parsed == [argv]
    options = {"config": None, "name": "r", "runs": tmp_path, "resume": False, "overwrite": True}
    assert called == [{**options, "preset": "tiny", "lr": 0.5}]


def test_train_eval_and_repeat(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "train", *TINY)
    assert code == 0
    assert "chance" in out
    assert "the model is runs/nano-1/model" in out
    assert "eval runs/nano-1" in out
    assert "1/1" in err

    code, out, _ = call(capsys, "eval", "--device", "cpu", "--json")
    scores = json.loads(out)
    assert scores["images"] == 8
    assert {edit["changed"] for edit in scores["edits"]} >= {"color", "sky"}
    for folder in ("model", "best", "checkpoints/step_000004"):
        _, out, _ = call(capsys, "eval", f"runs/nano-1/{folder}", "--device", "cpu", "--json")
        assert json.loads(out)["edits"] == scores["edits"]  # on the run's own validation split

    code, out, _ = call(capsys, "train", "--config", "runs/nano-1/config.json", "--json")
    repeated = json.loads(out)
    assert repeated["run"] == "runs/nano-2"
    assert repeated["mean_r1"] == scores["mean_r1"]


def test_an_existing_run_is_refused_overwritten_or_resumed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["train", *TINY, "--name", "r"]
    assert call(capsys, *command)[0] == 0
    code, _, err = call(capsys, *command)
    assert code == 2
    assert "--resume continues it, --overwrite deletes it" in err
    assert call(capsys, *command, "--overwrite")[0] == 0
    code, out, _ = call(capsys, "train", "--resume", "--name", "r", "--epochs", "2", "--json")
    assert (code, json.loads(out)["step"]) == (0, 8)
    code, _, err = call(capsys, "train", "--resume", "--name", "r", "--epochs", "1")
    assert code == 2
    assert "is at step 8; 1 epochs end at step 4" in err


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--batch-size 4 --seed 3", "seed, batch_size"),
        ("--best-metric i2t_r5", "best_metric"),
        ("--model.vision.width 64", "model"),
        ("--data synthetic:33 --lr 0.5", "data"),
    ],
)
def test_a_resumed_run_cannot_change_what_its_weights_depend_on(capsys, tmp_path, monkeypatch, flags, names):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.json").write_text(to_json(get_preset("nano")))
    code, _, err = call(capsys, "train", "--resume", *flags.split())
    assert code == 2
    assert f"a resumed run cannot change {names}: " in err


def test_preview_writes_a_contact_sheet(capsys, tmp_path):
    sheet = tmp_path / "sheet.png"
    code, out, _ = call(capsys, "data", "preview", "--rows", "1", "--columns", "2", "--out", str(sheet))
    assert code == 0
    assert "2 train pairs" in out
    with Image.open(sheet) as image:
        assert image.width > image.height  # two images side by side
        assert len(image.convert("RGB").getcolors(image.width * image.height)) > 100


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_real_process_with_its_state_saved(tmp_path, number, tiny_run):
    (tmp_path / "config.json").write_text(to_json(replace(tiny_run, threads=1)))
    command = [sys.executable, "-m", "m1clip", "train", "--config", "config.json", "--name", "r", "--epochs", "99999"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "r"
    wait_for(lambda: '"kind": "step"' in read_text(folder / "metrics.jsonl"), process)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "--resume --name runs/r" in out
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == "stopped"
    assert json.loads((folder / "last" / "state.json").read_text())["position"]["step"] == status["step"]


def read_text(path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition, process: subprocess.Popen[str], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("argv", [["--version"], ["info"]])  # a few bytes in a buffer, and more than one
def test_output_that_cannot_be_written_is_one_sentence(argv):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "m1clip", *argv]
        environment = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("m1clip: ")
    assert "No space left" in done.stderr
    assert len(done.stderr.splitlines()) == 1
