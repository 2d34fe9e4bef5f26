"""README and docs: every snippet is executed or parsed, every flag, file, table and link is checked.

Fences: ```python is executed; in ```sh every command is parsed by its own parser, and cheap ones are run;
```text is program output; code for other programs is left alone. All of it happens in a folder with a small trained
run and a few photos.
"""

import contextlib
import csv
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip import cli
from m1clip.config import PRESETS
from m1clip.export import verify
from m1clip.model.clip import CLIP

ROOT = Path(__file__).parent.parent
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
TEXTS = {path.name: path.read_text() for path in DOCS}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHER_PROGRAMS = ("console", "py", "js", "swift")  # code for other products; benchmarks/products.py opens them
RUN = (
    "m1clip runs",
    "m1clip eval",
    "m1clip monitor nano-1 --once",
    "m1clip report nano-1",
    "m1clip report nano-1 nano-2",
    "m1clip data check photos/",
    "m1clip data check photos.csv",
    "m1clip data convert photos/ shards/",
    "m1clip data convert photos/ parquet/ --to parquet",
    "m1clip data preview photos/",
    "m1clip data template photos/",
)
"""Commands of the documents that take seconds, and are run."""


def snippets(language: str) -> list[Any]:
    """One pytest parameter per fenced block of a language."""
    found = []
    for name, text in TEXTS.items():
        blocks = [body for kind, body in FENCE.findall(text) if kind == language]
        found += [pytest.param(body, id=f"{name}-{number}") for number, body in enumerate(blocks, 1)]
    return found


def shell_lines(block: str) -> list[str]:
    """Commands without comments."""
    lines = block.replace("\\\n", " ").splitlines()
    return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents take for granted: runs, photos with captions, a table of them."""
    folder = tmp_path_factory.mktemp("docs")
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir()
    rows = []
    for number in range(40):
        name = f"photos/{number:02}.jpg"
        Image.fromarray(rng.integers(0, 256, (80, 80, 3), np.uint8)).save(folder / name)
        caption = f"{('a dog', 'a cat', 'a bus', 'a tree')[number % 4]} number {number}"
        (folder / name).with_suffix(".txt").write_text(caption)
        rows.append((name, caption))
    with open(folder / "photos.csv", "w", newline="") as file:
        csv.writer(file).writerows([("image", "caption"), *rows])
    shutil.copy(folder / "photos/01.jpg", folder / "cat.jpg")
    flags = "--data synthetic:64 --val-size 16 --batch-size 16 --epochs 2 --log-every 1 --device cpu"
    run = ["--runs", str(folder / "runs"), "--name", "nano-1"]
    assert cli.run_command(["train", *run, *flags.split()]) == 0
    for name in ("nano-2", "photos", "mine"):
        shutil.copytree(folder / "runs/nano-1", folder / "runs" / name, symlinks=True)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(verify, "SPEED_S", 0.001)  # exports of the documents are not for their speeds
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("snippet", snippets("python"))
def test_a_python_snippet_runs(snippet: str, here: Path) -> None:
    exec(compile(snippet, "snippet", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("snippet", snippets("sh"))
def test_a_shell_snippet_has_only_commands_that_exist(
    snippet: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in shell_lines(snippet):
        words = shlex.split(line)
        if words[0] == "m1clip":
            parse(words[1:], monkeypatch)
        elif words[0] == "make":
            assert set(words[1:]) <= make_targets(), line
        elif words[:2] == ["pip", "install"]:
            assert extras_of(words[2:]) <= pyproject_extras(), line
        elif words[0] == "python":
            assert ROOT / words[1] in SCRIPTS, line
        elif assigned := re.fullmatch(r"\w+=\$\(python -c '(.*)'\)", line):
            done = subprocess.run([sys.executable, "-c", assigned.group(1)], capture_output=True, text=True, check=True)
            assert Path(done.stdout.strip()).exists(), line
        else:
            pytest.fail(f"no rule for {line!r}")


def parse(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a command line to the command's own parser; what the command would do is left out."""
    command = next((name for name in (" ".join(argv[:2]), argv[0]) if name in cli.COMMANDS), None)
    assert command, argv
    module, parsed = import_module(f"m1clip.commands.{command.replace(' ', '_')}"), list[Any]()

    def main(*args: Any) -> int:
        parsed.extend(args)
        return 0

    monkeypatch.setattr(module, "main", main)
    try:
        assert cli.run_command(argv) == 0, argv
    except SystemExit:
        pytest.fail(f"not understood: m1clip {shlex.join(argv)}")
    assert parsed, argv


@pytest.mark.parametrize("line", RUN)
def test_a_cheap_command_of_the_documents_runs(line: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [body for text in TEXTS.values() for kind, body in FENCE.findall(text) if kind == "sh"]
    assert any(line in shell_lines(block) for block in blocks), "no longer in the documents"
    assert cli.run_command(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", TEXTS)
def test_every_fence_has_a_known_language(name: str) -> None:
    assert {kind for kind, _ in FENCE.findall(TEXTS[name])} <= {"python", "sh", "text", *OTHER_PROGRAMS}
    assert TEXTS[name].count("```") == 2 * len(FENCE.findall(TEXTS[name]))


@pytest.mark.parametrize("name", TEXTS)
def test_every_flag_in_the_prose_exists(name: str) -> None:
    prose = FENCE.sub("", TEXTS[name])
    unknown = set()
    for span in re.finditer(r"`([^`\n]+)`", prose):
        removed = "removed" in prose[span.end() : span.end() + 14]
        if not removed and not span.group(1).startswith(("python ", "pip ")):
            unknown |= set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", span.group(1))) - known_flags()
    assert not unknown


@pytest.mark.parametrize("name", TEXTS)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        path, _, anchor = target.partition("#")
        file = next(doc for doc in DOCS if doc.name == name).parent / path if path else ROOT / "docs" / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text()), target


def test_the_readme_is_short_and_lists_every_command() -> None:
    assert len(TEXTS["README.md"].splitlines()) <= 190
    listed = re.findall(r"^\| `m1clip ([a-z ]+)` \|", TEXTS["README.md"], re.MULTILINE)
    assert sorted(listed) == sorted(cli.COMMANDS)


def test_the_preset_table_has_the_computed_parameter_counts() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \|.*?\| ([\d,]{7,}) \|", TEXTS["training.md"], re.MULTILINE))
    counts = {}
    for name, config in PRESETS.items():
        with torch.device("meta"):
            counts[name] = f"{sum(weight.numel() for weight in CLIP(config.model).parameters()):,}"
    assert rows == counts


def test_the_log_has_the_kinds_and_fields_that_the_documents_list(here: Path) -> None:
    table = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", section("training.md", "metrics.jsonl"), re.M)
    lines = (here / "runs/nano-1/metrics.jsonl").read_text().splitlines()
    logged: dict[str, dict[str, Any]] = {}
    for record in map(json.loads, lines):
        logged.setdefault(record["kind"], {}).update(record)
    assert {kind for kind, _ in table} == logged.keys()
    labels = {"labels", "label_accuracy", "label_top5", "chance_label", "most_frequent_label"}
    duplicates = {"masked_negatives", "without_negative"}
    optional = {"skipped"} | labels | duplicates  # of steps without an update; of labelled images; of equal captions
    for kind, fields in table:
        assert set(re.findall(r"`(\w+)`", fields)) - optional <= logged[kind].keys(), kind


def test_the_run_folder_has_the_files_that_the_documents_list(here: Path) -> None:
    names = re.findall(r"^\| (`.*?`) \|", section("training.md", "Run folder"), re.MULTILINE)
    listed = {name.strip("/").split("/")[0] for cell in names for name in re.findall(r"`([^`]+)`", cell)}
    assert {path.name for path in (here / "runs/nano-1").iterdir()} <= listed


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_script_shows_its_help(script: Path) -> None:
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


FLAGS: set[str] = set()


def known_flags() -> set[str]:
    """Every flag of every command, from their help; and those of benchmark scripts and other programs."""
    if not FLAGS:
        FLAGS.update({"--help", "--debug", "--print-completion"})
        for command in cli.COMMANDS:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                cli.run_command([*command.split(), "--help"])
            FLAGS.update(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", out.getvalue()))
    return FLAGS


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def pyproject_extras() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return set(project["optional-dependencies"])


def extras_of(words: list[str]) -> set[str]:
    """Names in the brackets of 'm1clip[a,b]' or '.[a,b]'."""
    return {
        extra
        for word in words
        for inside in re.findall(r"^(?:m1clip|\.)\[(.*)\]$", word)
        for extra in inside.split(",")
    }


def section(name: str, title: str) -> str:
    """The text of one section, up to the next heading."""
    found = re.search(rf"^## {re.escape(title)}$(.*?)(?=^## |\Z)", TEXTS[name], re.MULTILINE | re.DOTALL)
    assert found, title
    return found.group(1)


def anchors(text: str) -> Iterator[str]:
    """As GitHub makes them of headings."""
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        yield plain.replace(" ", "-")
