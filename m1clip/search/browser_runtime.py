"""What a static page runs in the browser: ONNX Runtime and tokenizers. Fetched once by npm, and verified.

They are not part of m1clip: together they have 14 MB, and only static pages need them.
"""

import base64
import hashlib
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from m1clip.console import Console
from m1clip.files import atomic_folder, cache_folder, read_file

FETCH_S = 900.0
MAX_FILE_BYTES = 64_000_000


@dataclass(frozen=True)
class NpmPackage:
    name: str
    version: str
    archive: str  # that `npm pack` writes
    sha512: str  # of the archive, as the registry publishes it
    files: dict[str, str]  # members of the archive, with the SHA-256 of each

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"


ONNX_RUNTIME = NpmPackage(
    "onnxruntime-web",
    "1.30.0",
    "onnxruntime-web-1.30.0.tgz",
    "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
    {
        "package/dist/ort.wasm.bundle.min.mjs": "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
        "package/dist/ort-wasm-simd-threaded.wasm": "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    },
)
TOKENIZERS = NpmPackage(
    "@huggingface/tokenizers",
    "0.2.0",
    "huggingface-tokenizers-0.2.0.tgz",
    "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
    {
        "package/dist/tokenizers.min.mjs": "258e46332101335ce8d95aed7745b19ac3b46d37f3e159a89cf894c2ea9b1d3a",
        "package/LICENSE": "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4",
    },
)
PACKAGES = (ONNX_RUNTIME, TOKENIZERS)
CHECKSUMS = {Path(member).name: sha256 for package in PACKAGES for member, sha256 in package.files.items()}
MIT = """Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without limitation the
rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the Software, and to permit
persons to whom the Software is furnished to do so, subject to the following conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions of the
Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED TO THE
WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR
COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR
OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
"""


@dataclass(frozen=True)
class BrowserRuntime:
    """The files, by the names that a page imports: .js, because some hosts do not know .mjs."""

    ort_js: bytes
    ort_wasm: bytes
    tokenizers_js: bytes
    licenses: str


def browser_runtime(console: Console) -> BrowserRuntime:
    """From the cache; fetched if they are not there yet."""
    folder = runtime_folder()
    if not all((folder / name).is_file() for name in CHECKSUMS):
        fetch_runtime(folder, console)
    files = {name: read_verified(folder / name, sha256) for name, sha256 in CHECKSUMS.items()}
    licenses = (
        f"ort.js, ort.wasm.gz: ONNX Runtime Web {ONNX_RUNTIME.version}\n\nMIT License\n\n"
        f"Copyright (c) Microsoft Corporation\n\n{MIT}\n\n"
        f"tokenizers.js: {TOKENIZERS.name} {TOKENIZERS.version}\n\n{files['LICENSE'].decode()}"
    )
    ort_js, ort_wasm = files["ort.wasm.bundle.min.mjs"], files["ort-wasm-simd-threaded.wasm"]
    return BrowserRuntime(ort_js, ort_wasm, files["tokenizers.min.mjs"], licenses)


def runtime_folder() -> Path:
    return cache_folder() / f"browser-runtime-{'-'.join(package.version for package in PACKAGES)}"


def read_verified(path: Path, sha256: str) -> bytes:
    data = read_file(path, MAX_FILE_BYTES)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(f"{path} is damaged or of another version: remove it, and run the command again")
    return data


def fetch_runtime(folder: Path, console: Console) -> None:
    npm = shutil.which("npm")
    if npm is None:
        specs = " and ".join(package.spec for package in PACKAGES)
        raise ValueError(
            f"a static page runs {specs}: install npm, which comes with Node.js, to fetch them, or put "
            f"{', '.join(CHECKSUMS)} of these npm packages into {folder}"
        )
    console.print(f"fetching {' and '.join(package.spec for package in PACKAGES)} with npm, once")
    with TemporaryDirectory() as temporary, atomic_folder(folder) as new:
        run_npm(npm, Path(temporary))
        for package in PACKAGES:
            unpack(package, Path(temporary), new)


def run_npm(npm: str, folder: Path) -> None:
    """Not in the current folder, whose .npmrc could come from anyone. `npm pack` runs no scripts of what it fetches."""
    specs = [package.spec for package in PACKAGES]
    options = [
        "--loglevel=error",
        "--ignore-scripts",
        "--pack-destination",
        str(folder),
        "--fetch-retry-mintimeout=1000",
    ]
    try:
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
        done = subprocess.run([npm, "pack", *options, *specs], cwd=folder, timeout=FETCH_S, **pipes)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"npm cannot fetch {' and '.join(specs)}: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        reason = lines[0].removeprefix("npm error ")[:200]
        raise ValueError(f"npm cannot fetch {' and '.join(specs)}: {reason}; is there a connection?")


def unpack(package: NpmPackage, folder: Path, target: Path) -> None:
    """Copy the files that are needed, by name, after the archive is verified."""
    archive = read_file(folder / package.archive, MAX_FILE_BYTES)
    if base64.b64encode(hashlib.sha512(archive).digest()).decode() != package.sha512:
        raise ValueError(f"npm fetched another {package.spec} than the one that m1clip was tested with")
    with tarfile.open(folder / package.archive) as members:
        for name in package.files:
            file = members.extractfile(name)
            assert file is not None
            (target / Path(name).name).write_bytes(file.read())
