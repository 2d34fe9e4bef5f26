"""The sdist and the wheel: built offline, complete, and working from an unpacked wheel."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """`build` makes the wheel from the sdist, so both are complete."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def installed(dist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site-packages")
    (wheel,) = dist.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_installed(installed: Path, *words: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_contains_every_file_of_the_package(installed):
    packaged = {path.relative_to(installed) for path in (installed / "m1clip").rglob("*") if path.is_file()}
    source = {path.relative_to(ROOT) for path in (ROOT / "m1clip").rglob("*") if path.is_file()}
    assert packaged == {path for path in source if path.suffix != ".pyc"}
    assert Path("m1clip/py.typed") in packaged


@pytest.mark.slow
def test_sdist_and_wheel_have_valid_metadata(dist):
    command = [sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "CHANGELOG.md", "tests/test_packaging.py"} <= names


@pytest.mark.slow
def test_an_installed_wheel_prints_help_and_trains(installed, tmp_path):
    where = run_installed(installed, "-c", "import m1clip; print(m1clip.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed)
    assert "usage: m1clip COMMAND" in run_installed(installed, "-m", "m1clip", "--help", cwd=tmp_path)
    assert "nano" in run_installed(installed, "-m", "m1clip", "info", cwd=tmp_path)
    flags = "--data synthetic:32 --val-size 8 --batch-size 8 --steps 1 --device cpu --json"
    assert '"finished": true' in run_installed(installed, "-m", "m1clip", "train", *flags.split(), cwd=tmp_path)
    assert "m1clip = m1clip.cli:main" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()
