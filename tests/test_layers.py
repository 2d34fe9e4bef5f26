"""Architecture: who may import whom, what starts without torch, and how large each part may be."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "m1clip"
FILES = sorted(ROOT.rglob("*.py"))

BOTTOM = {"config", "run", "files", "format", "console", "devices", "sensors", "losses", "images"}
# What a sub-package or file may import of ours, beside itself. "" is the package: version and lazy names.
MAY_IMPORT = {
    **{name: {"files", "format", "config"} - {name} for name in BOTTOM},
    "format": set[str](),
    "files": set[str](),
    "config": {"format"},
    "parity": BOTTOM,
    "plots": set[str](),
    "document": {"format", "files", "plots"},
    "data": BOTTOM,
    "model": BOTTOM,
    "evals": BOTTOM | {"model", "data", "parity"},
    "training": BOTTOM | {"evals", "model", "data", "parity", ""},
    "api": BOTTOM | {"training", "evals", "model", "data"},
    "bench": BOTTOM | {"training", "evals", "model", "data", "parity", "plots", "document", ""},
    "monitor": {"config", "run", "files", "format", "plots", "document"},  # never torch
    "commands": BOTTOM | {"api", "monitor", "bench", "training", "evals", "model", "data", "parity", "document", ""},
    "cli": {"format", "commands", ""},
    "__main__": {"cli"},
    "": {"api", "model"},
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
    *(f"m1clip.monitor.{path.stem}" for path in sorted((ROOT / "monitor").glob("[a-z]*.py"))),
    *("m1clip.data.splits", "m1clip.data.check", "m1clip.data.convert"),
]


def test_help_monitoring_and_decoding_start_without_torch():
    check = "__import__(name)\n    assert 'torch' not in sys.modules, name"
    code = f"import sys\nfor name in sys.argv[1:]:\n    {check}"
    done = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# Lines of Python by part. Growth is a decision: raise a budget in the commit that needs it.
BUDGETS = {
    "commands": 1_700,
    "model": 1_800,
    "data": 3_600,
    "training": 3_800,
    "evals": 600,
    "bench": 600,
    "monitor": 1_600,
}
TOP_LEVEL, TOTAL_LINES, TOTAL_FILES = 2_400, 15_600, 102
