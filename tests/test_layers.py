"""Architecture: who may import whom, what starts without torch, and how large each part may be."""

import ast
import collections
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from m1clip.config import TrainConfig

ROOT = Path(__file__).parent.parent / "m1clip"
FILES = sorted(ROOT.rglob("*.py"))

BOTTOM = {"config", "run", "files", "format", "console", "devices", "sensors", "losses", "images", "decode", "parity"}
BOTTOM |= {"targets", "hub", "signals", "status", "prompts", "errors", "workers", "perceptual_hash"}
# What a sub-package or file may import of ours, beside itself. "" is the package: version and lazy names.
MAY_IMPORT = {
    **{name: {"files", "format", "config"} - {name} for name in BOTTOM},
    "format": set[str](),
    "files": set[str](),
    "run": {"files", "format", "config", "status"},
    "config": {"files", "format"},
    "decode": {"images"},
    "settings": {"config"},
    "document": {"format", "files"},
    "data": BOTTOM,
    "model": BOTTOM | {"export"},  # only inside CLIP.export
    "evals": BOTTOM | {"model", "data", "document"},
    "training": BOTTOM | {"evals", "model", "data", ""},
    "onnx_model": {"calibration", "config", "errors", "files", "images", "model", "workers"},  # never torch
    "inference": {"run", "onnx_model", "model"},
    "api": BOTTOM | {"settings", "training", "inference", "model", "data"},
    "evaluation": BOTTOM | {"api", "inference", "settings", "evals", "model", "data"},
    "bench": BOTTOM | {"training", "evals", "model", "data", "document", ""},
    "export": BOTTOM | {"calibration", "evaluation", "onnx_model", "settings", "evals", "model", "data", ""},
    "web": set[str](),
    "monitor": {"config", "run", "files", "format", "document", "web"},  # never torch
    "calibration": set[str](),
    "onnx_cache": {"console", "files", "onnx_model", "run"},
    "search": BOTTOM | {"onnx_model", "model", "web", ""},  # never torch
    "serve": {"decode", "images", "prompts", "workers", "model", "onnx_model", "search", "web", ""},  # never torch
    "commands": BOTTOM
    | {
        "api",
        "evaluation",
        "inference",
        "onnx_model",
        "onnx_cache",
        "monitor",
        "search",
        "serve",
        "bench",
        "export",
        "training",
        "evals",
        "model",
        "data",
    }
    | {"document", "web", ""},
    "cli": {"format", "signals", "commands", ""},
    "__main__": {"cli"},
    "": {"api", "evaluation", "inference", "model"},
}


def part_of(path: Path) -> str:
    """The sub-package or top-level file that a source file belongs to."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported_parts(tree: ast.AST) -> set[str]:
    """Sub-packages and files of ours that a file imports, at its top or inside a function."""
    parts = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            words = name.split(".")
            if words[0] == "m1clip":
                exists = len(words) > 1 and ((ROOT / words[1]).is_dir() or (ROOT / f"{words[1]}.py").is_file())
                parts.add(words[1] if exists else "")
    return parts


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_lower_layers(path):
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} has no layer"
    forbidden = imported_parts(ast.parse(path.read_text())) - MAY_IMPORT[part] - {part}
    assert not forbidden, f"{path.name} ({part}) must not import {forbidden}"


BACKENDS = {"cuda", "mps", "backends"}


def mentioned_names(node: ast.AST) -> set[str]:
    """Names a node mentions: an import, an attribute, or a string of that one word."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {part for alias in node.names for part in alias.name.split(".")} | set(
            (getattr(node, "module", None) or "").split(".")
        )
    if isinstance(node, ast.Attribute):
        return {node.attr}
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value}
    return set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_devices_names_a_backend_and_only_cli_imports_by_string(path):
    part, tree = part_of(path), ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert part == "devices" or not mentioned_names(node) & BACKENDS, f"{path}:{node.lineno}"
        imported = mentioned_names(node) if isinstance(node, ast.Import | ast.ImportFrom) else set[str]()
        by_string = "importlib" in imported and not imported & {"find_spec", "metadata"}
        assert part == "cli" or not by_string, f"{path}:{node.lineno} hides an import from this test"


WITHOUT_TORCH = [
    *("m1clip", "m1clip.cli", "m1clip.config", "m1clip.run", "m1clip.sensors", "m1clip.console"),
    *(f"m1clip.commands.{path.stem}" for path in sorted((ROOT / "commands").glob("[a-z]*.py"))),
    *("m1clip.web.access", "m1clip.web.server"),
    *(
        f"m1clip.{part}.{path.stem}"
        for part in ("monitor", "search", "serve")
        for path in sorted((ROOT / part).glob("[a-z]*.py"))
    ),
    *("m1clip.data.splits", "m1clip.data.check", "m1clip.data.convert"),
    *("m1clip.onnx_model", "m1clip.inference"),
    *("m1clip.model.tokenizer", "m1clip.model.inputs", "m1clip.model.classify"),
]


def test_help_monitoring_decoding_and_onnx_start_without_torch():
    check = "__import__(name)\n    assert 'torch' not in sys.modules, name"
    code = f"import sys\nfor name in sys.argv[1:]:\n    {check}"
    done = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Lines of Python by part. Growth is a decision: raise a budget in the commit that needs it.
BUDGETS = {
    "commands": 2_700,
    "model": 3_350,
    "data": 4_060,
    "training": 3_510,
    "evals": 1_760,
    "bench": 480,
    "export": 2_420,
    "monitor": 1_640,
    "search": 2_320,
    "serve": 1_450,
    "web": 440,
}
TOP_LEVEL, TOTAL_LINES, TOTAL_FILES = 5_180, 29_150, 165


def test_every_part_stays_within_its_size():
    lines = collections.Counter()
    for path in FILES:
        in_package = len(path.relative_to(ROOT).parts) > 1
        lines[path.relative_to(ROOT).parts[0] if in_package else "top level"] += path.read_text().count("\n")
    assert lines.keys() - BUDGETS.keys() == {"top level"}, "a new sub-package needs a budget"
    over = {part: lines[part] for part in lines if lines[part] > {**BUDGETS, "top level": TOP_LEVEL}[part]}
    assert not over
    assert lines.total() <= TOTAL_LINES
    assert len(FILES) <= TOTAL_FILES


def test_public_names_are_unique():
    """At most 2 % of the top-level functions and classes share a name; every command has parse, main, Args."""
    files_by_name = collections.defaultdict(set)
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                files_by_name[node.name].add(path)
    shared = {name for name, paths in files_by_name.items() if len(paths) > 1} - {"main", "parse", "Args"}
    assert len(shared) <= 0.02 * len(files_by_name), sorted(shared)


def test_functions_fit_a_screen():
    long = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 58:
                long.append(f"{path.name}:{node.lineno} {node.name}")
    assert not long


def test_the_number_of_settings_and_flags_is_bounded():
    assert len(fields(TrainConfig)) <= 58  # 57 and `model`, which has fields of its own
    done = subprocess.run(
        [sys.executable, "-m", "m1clip", "train", "--help"], capture_output=True, text=True, check=True
    )
    flags = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("│ --")}
    assert {"--lr", "--batch-size", "--model.vision.width"} <= flags
    assert len(flags) <= 76


TRACE = """
import os, sys
root, executed = sys.argv.pop(1) + os.sep, set()

def trace(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root) and code.co_flags & 1:  # a function, not a module or class
        executed.add(code.co_filename)
        if code.co_name == "backward_chunks":  # the first gradient of a weight
            sys.setprofile(None)
            files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
            loaded = [file for file in files if file.startswith(root) and not file.endswith("__init__.py")]
            print(repr((sorted(executed), sorted(loaded))), file=sys.stderr, flush=True)
            os._exit(0)

sys.setprofile(trace)
from m1clip.cli import run_command
run_command(sys.argv[1:])
"""


def test_few_files_lead_from_the_command_to_the_first_gradient(tmp_path):
    argv = ["train", "--data", "synthetic:40", "--val-size", "8", "--batch-size", "8", "--steps", "1"]
    command = [sys.executable, "-c", TRACE, str(ROOT), *argv, "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    executed, loaded = ast.literal_eval(done.stderr.splitlines()[-1])
    assert f"{ROOT}/training/loop.py" in executed
    assert len(executed) <= 40, executed
    assert len(loaded) <= 50, loaded


def test_the_training_loop_fits_a_screen():
    tree = ast.parse((ROOT / "training" / "loop.py").read_text())
    (loop,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "training_loop")
    assert loop.end_lineno - loop.lineno < 45
