"""Files in the current folder are data: no module beside the images is imported, by any process of a command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import TINY

from photos import write_photos

pytestmark = pytest.mark.slow

# Modules that Python, multiprocessing, torch or m1clip import when a process starts.
MODULES = ("socket", "torch", "m1clip", "numpy", "json", "PIL", "rich", "tyro", "pickle", "threading", "selectors")
MODULES += ("sitecustomize", "usercustomize", "multiprocessing", "uvicorn", "matplotlib", "simplejpeg", "psutil")
PHOTOS = ["--data", "photos.csv", *TINY[2:8], *TINY[10:], "--workers", "2"]  # without --device


@pytest.fixture
def folder(tmp_path):
    names = write_photos(tmp_path / "images", 300)
    (tmp_path / "photos.csv").write_text("image,caption\n" + "".join(f"images/{n},a cat {n}\n" for n in names))
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'a').write('{name} ')")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: module://socket\n")
    return tmp_path


def run(folder: Path, *argv: str) -> str:
    """Run the installed script in that folder, with an empty cache."""
    environment = os.environ | {"M1CLIP_CACHE": str(folder / "cache")}
    command = [Path(sys.executable).with_name("m1clip"), *argv]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_decoding_workers_import_nothing_from_the_current_folder(folder):
    run(folder, "data", "check", "photos.csv", "--workers", "2")
    assert not (folder / "RAN").exists()


def test_a_background_run_and_its_workers_import_nothing_from_the_current_folder(folder):
    run(folder, "train", "--background", "--name", "r", *PHOTOS, "--steps", "2")
    for _ in range(600):
        if (state := json.loads(run(folder, "runs", "--json"))["state"]) != "running":
            break
    assert state == "finished"
    run(folder, "report", "r")
    assert not (folder / "RAN").exists()


def test_compared_runs_import_nothing_from_the_current_folder(folder):
    run(folder, "compare", "--on", "cpu", *PHOTOS, "--steps", "2")
    assert not (folder / "RAN").exists()


def test_python_dash_m_imports_nothing_from_the_current_folder(folder):
    (folder / "m1clip.py").unlink()  # Python itself would take it for the program
    environment = os.environ | {"M1CLIP_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "m1clip", "data", "check", "photos.csv", "--workers", "2"]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=300)
    assert not (folder / "RAN").exists()


def test_workers_of_a_python_script_import_nothing_from_the_current_folder(folder, tmp_path_factory):
    script = tmp_path_factory.mktemp("project") / "script.py"
    call = "list(map_chunks(len, [range(3), range(4)], 2))"
    code = f"from m1clip.workers import map_chunks\nif __name__ == '__main__':\n    print({call})\n"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.stdout == "[3, 4]\n", done.stderr
    assert not (folder / "RAN").exists()
