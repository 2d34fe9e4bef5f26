"""The ladder: who may import whom. Reads the source, so nothing has to run for it to be broken."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "m1clip"
FLOOR = {"shapes", "starts", "config", "run", "devices", "sensors", "images", "words"}
TOOLS = {"measurements", "estimates", "advisor", "pages", "plots"}
# What a room or file may import of ours, beside itself. "" is the package: its version, its lazy names.
MAY_IMPORT = {
    **{floor: set[str]() for floor in FLOOR},
    "starts": {"shapes"},
    "config": {"shapes", "starts"},
    "": {"model"},
    "losses": FLOOR,
    "measurements": FLOOR,
    "pages": FLOOR,
    "plots": set[str](),
    "estimates": FLOOR,
    "advisor": FLOOR | {"estimates"},
    "data": FLOOR,
    "model": FLOOR | {"losses"},
    "evals": FLOOR | {"model", "data"},
    "train": FLOOR | {"evals", "model", "losses", "data", "estimates", "advisor", "measurements", ""},
    "monitor": {"run", "config", "words", "pages", "plots"},  # never torch, and nothing that it watches
    "bench": FLOOR | {"train", "model", "data", *TOOLS, ""},
    "verbs": FLOOR | {"monitor", "bench", "train", "evals", "model", "losses", "data", *TOOLS, ""},
    "cli": {"config", "verbs", ""},
    "__main__": {"cli"},
}
FILES = sorted(ROOT.rglob("*.py"))


def place(path: Path) -> str:
    """The room or file of the ladder that a source file belongs to."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imports(tree: ast.AST) -> set[str]:
    """Places of ours that a file imports, at its head or inside a function."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "m1clip":
                known = len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").is_file())
                found.add(parts[1] if known else "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_stands_below_it(path):
    here = place(path)
    assert here in MAY_IMPORT, f"{here} has no place in the ladder"
    beyond = imports(ast.parse(path.read_text())) - MAY_IMPORT[here] - {here}
    assert not beyond, f"{path.name} ({here}) must not import {beyond}"


BACKENDS = {"cuda", "mps", "backends"}


def names(node: ast.AST) -> set[str]:
    """Every way a line can name something: an import, an attribute, a string of that one word."""
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
    here, tree = place(path), ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert here == "devices" or not names(node) & BACKENDS, f"{path}:{node.lineno} names a backend"
        imported = names(node) if isinstance(node, ast.Import | ast.ImportFrom) else set[str]()
        looking = imported & {"find_spec", "metadata"}
        by_string = "importlib" in imported and not looking
        assert here == "cli" or not by_string, f"{path}:{node.lineno} hides an import from the ladder"


WITHOUT_TORCH = (
    "m1clip",
    "m1clip.cli",
    "m1clip.shapes",
    "m1clip.starts",
    "m1clip.config",
    "m1clip.run",
    "m1clip.sensors",
    "m1clip.measurements",
    "m1clip.pages",
    "m1clip.plots",
    "m1clip.monitor.terminal",
    "m1clip.monitor.web",
    "m1clip.monitor.report",
    "m1clip.monitor.comparison",
    "m1clip.commands.monitor",
    "m1clip.commands.report",
    "m1clip.data.splits",
    "m1clip.data.check",
    "m1clip.data.convert",
    "m1clip.commands.train",
    "m1clip.commands.eval",
    "m1clip.commands.convert",
    "m1clip.commands.info",
    "m1clip.commands.runs",
    "m1clip.commands.stop",
    "m1clip.commands.detach",
    "m1clip.commands.bench",
    "m1clip.commands.bench_scaling",
    "m1clip.commands.compare",
    "m1clip.commands.advise",
    "m1clip.commands.doctor",
    "m1clip.commands.data_check",
    "m1clip.commands.data_convert",
    "m1clip.commands.data_preview",
)


def test_what_starts_without_torch():
    """Help, watching a run and the workers that decode images must not wait for torch."""
    each = "__import__(name)\n    assert 'torch' not in sys.modules, name"
    code = f"import sys\nfor name in sys.argv[1:]:\n    {each}"
    done = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
