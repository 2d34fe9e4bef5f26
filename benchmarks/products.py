"""Open the folders of `m1clip export` in the products they are for, and compare the embeddings with ours.

    m1clip export RUN --to all --out DIR
    python benchmarks/products.py --export DIR --model RUN --images FOLDER [--captions FILE] [--only NAME …]

Each product has its own environment, which is created on first use (PyPI, and npm for transformers.js). Its opener
(benchmarks/openers) runs there with the hub switched off, reads the image files with the product's own
preprocessing, tokenizes with the product's own tokenizer, and does what the product is for: search, or zero-shot
classification. The table has the cosine similarity to the embeddings of `m1clip.load`.

Two differences are not errors of the export: rclip and open_clip round the position of the crop as m1clip does, the
others round it down, which is one pixel for some aspect ratios; and m1clip decodes large JPEG files at a reduced size.

The exit code is 1 if a product fails, or if its embeddings are too different from ours. Folders that were not
exported are listed. immich-ml is in no registry: its opener makes the same calls to onnxruntime and tokenizers.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.document import markdown_table

OPENERS = Path(__file__).parent / "openers"
VENVS = Path.home() / ".cache" / "m1clip-products"
TIMEOUT_S = 1800
CAPTIONS = (
    *("a dog running on the beach", "a cat sleeping on a couch", "Two people riding bikes.", "a red bus in the city"),
    *("a plate of food on a table", "a rocket before its launch", "a building with a garden", "an orange flower"),
    "a long caption, which has more tokens than any text encoder of a small CLIP can read, because the photographer"
    " describes everything that is visible: the dog, the cat, the two people with their bikes, the red bus, the plate"
    " on the table, the rocket before its launch, the building with its garden, the orange flower and the blue sky"
    " above all of them, on one warm and sunny afternoon in the middle of the summer by the sea",
)
OFFLINE = {
    **{"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
    **{"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"},  # nothing listens there
}


@dataclass(frozen=True)
class Product:
    name: str
    folder: str
    """Subfolder of the export."""
    opener: str
    packages: tuple[str, ...]
    version: str = ""
    """Shown if the product itself is not installed."""


TRANSFORMERS = ("transformers>=5,<6", "torch", "torchvision", "pillow")
OPEN_CLIP = ("open_clip_torch>=3,<4", "clip-benchmark>=1.6,<1.7", "requests", "numpy<2.4")
IMMICH = ("onnxruntime", "tokenizers", "pillow", "numpy")
PRODUCTS = (
    Product("rclip", "rclip", "open_rclip.py", ("rclip>=3.3,<3.4",)),
    Product("immich-ml", "immich", "open_immich.py", IMMICH, "as 3.1"),
    Product("fastembed", "fastembed", "open_fastembed.py", ("fastembed>=0.9,<0.10",)),
    Product("transformers.js", "transformers-js", "open_transformers_js.mjs", ("@huggingface/transformers@4",)),
    Product(
        "sentence-transformers",
        "sentence-transformers",
        "open_sentence_transformers.py",
        ("sentence-transformers>=6,<7", *TRANSFORMERS),
    ),
    Product("transformers", "transformers", "open_transformers.py", TRANSFORMERS),
    # aiohttp is missing in its own requirements.
    Product("infinity", "transformers", "open_infinity.py", ("infinity-emb[torch,vision,server]==0.0.78", "aiohttp")),
    Product("open_clip", "open_clip", "open_open_clip.py", OPEN_CLIP),
    Product("CLIP_benchmark", "open_clip", "open_clip_benchmark.py", OPEN_CLIP),
)
COLUMNS = ("product", "version", "images: min", "mean", "texts: min", "mean", "its own result", "status")
Vectors = NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """The images, the captions and their embeddings by m1clip."""

    images: list[str]
    captions: list[str]
    images_NE: Vectors
    texts_ME: Vectors

    @property
    def labels(self) -> list[int]:
        labels: list[int] = (self.images_NE @ self.texts_ME.T).argmax(1).tolist()
        return labels

    @property
    def top(self) -> list[list[int]]:
        top: list[list[int]] = (-self.texts_ME @ self.images_NE.T).argsort(1, kind="stable")[:, :3].tolist()
        return top


def main() -> int:
    args = parse_args()
    chosen = [product for product in PRODUCTS if not args.only or product.name in args.only]
    reference = embed_reference(args.model, list_photographs(args.images, args.count), read_captions(args.captions))
    rows = []
    for product in chosen:
        print(product.name, file=sys.stderr)
        folder = args.export / product.folder
        rows.append(check_product(product, folder, reference, args) if folder.is_dir() else missing_row(product))
    print(markdown_table(COLUMNS, rows))
    return int(any(row[-1] not in ("ok", "not exported") for row in rows))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", type=Path, required=True, help="output folder of m1clip export")
    parser.add_argument("--model", required=True, help="the run or model folder that was exported")
    parser.add_argument("--images", type=Path, required=True, help="folder of JPEG files")
    parser.add_argument("--count", type=int, default=20, help="images that are used (20)")
    parser.add_argument("--captions", type=Path, help="text file with one caption per line; default: nine captions")
    parser.add_argument("--venvs", type=Path, default=VENVS, help=f"folder of the environments ({VENVS})")
    names = [product.name for product in PRODUCTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"some of {', '.join(names)}")
    parser.add_argument("--min-images", type=float, default=0.95, help="least cosine similarity of images (0.95)")
    parser.add_argument("--min-texts", type=float, default=0.99, help="least cosine similarity of texts (0.99)")
    return parser.parse_args()


def list_photographs(folder: Path, count: int) -> list[str]:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not paths:
        sys.exit(f"--images {folder} has no JPEG files")
    step = max(1, len(paths) // count)
    return [str(path.resolve()) for path in paths[::step][:count]]


def read_captions(path: Path | None) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()] if path else [*CAPTIONS]


def embed_reference(model: str, images: list[str], captions: list[str]) -> Reference:
    import m1clip

    clip = m1clip.load(model)
    images_NE, texts_ME = clip.encode_image(images), clip.encode_text(captions)
    return Reference(images, captions, images_NE.double().numpy(), texts_ME.double().numpy())


def missing_row(product: Product) -> list[str]:
    return [product.name, product.version, *[""] * 5, "not exported"]


def check_product(product: Product, folder: Path, reference: Reference, args: argparse.Namespace) -> list[str]:
    """A row of the table."""
    try:
        answer = run_opener(product, make_environment(product, args.venvs), folder, reference)
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return [product.name, product.version, *[""] * 5, f"failed: {error}"]
    cells, different = list[str](), list[str]()
    for name, ours, least in (
        ("images", reference.images_NE, args.min_images),
        ("texts", reference.texts_ME, args.min_texts),
    ):
        if name not in answer:
            cells += ["", ""]
            continue
        theirs = np.array(answer[name])
        if not theirs[:, ours.shape[1] :].any():  # zeros may be added to reach the width that a product expects
            theirs = theirs[:, : ours.shape[1]]
        if theirs.shape != ours.shape:
            return [product.name, answer["version"], *[""] * 5, f"failed: {name} of shape {theirs.shape}"]
        cosine = (theirs * ours).sum(1) / np.linalg.norm(theirs, axis=1) / np.linalg.norm(ours, axis=1)
        cells += [f"{cosine.min():.7f}", f"{cosine.mean():.7f}"]
        if not cosine.min() >= least:  # NaN too
            different.append(f"{name} below {least:g}")
    status = f"differs: {', '.join(different)}" if different else "ok"
    return [product.name, answer["version"] or product.version, *cells, describe_result(answer, reference), status]


def describe_result(answer: dict[str, Any], reference: Reference) -> str:
    """What the product found, and how often m1clip finds the same."""
    first = Path(reference.images[0]).name
    if "accuracy" in answer:
        return f"acc1 {answer['accuracy']:.3f} where the labels are ours"
    if "labels" in answer:
        same = sum(a == b for a, b in zip(answer["labels"], reference.labels, strict=True))
        caption = reference.captions[answer["labels"][0]]
        return f"{same}/{len(reference.images)} labels as ours; {first}: {caption[:40]}"
    same = sum(a == b for a, b in zip(answer["top"], reference.top, strict=True))
    found = ", ".join(Path(reference.images[row]).name for row in answer["top"][0])
    return f"{same}/{len(reference.captions)} top 3 as ours; {reference.captions[0][:40]}: {found}"


# Environments and openers.
def make_environment(product: Product, venvs: Path) -> Path:
    """The folder of the environment with the product's packages; products with the same packages share it."""
    folder = venvs / next(other.name for other in PRODUCTS if other.packages == product.packages)
    done, wanted = folder / "installed.txt", "\n".join(product.packages)
    if done.is_file() and done.read_text() == wanted:
        return folder
    print(f"  installing {' '.join(product.packages)} in {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if product.opener.endswith(".mjs"):
        (folder / "package.json").write_text("{}")
        # Its CPU library comes with the package; what would be downloaded is for CUDA.
        run(["npm", "install", "--no-audit", *product.packages], folder, {"ONNXRUNTIME_NODE_INSTALL": "skip"})
    elif uv := shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"):
        run([uv, "venv", "--clear", "--python", sys.executable, str(folder)], venvs)
        run([uv, "pip", "install", "--python", str(folder / "bin" / "python"), *product.packages], venvs)
    else:
        run([sys.executable, "-m", "venv", str(folder)], venvs)
        run([str(folder / "bin" / "python"), "-m", "pip", "install", *product.packages], venvs)
    done.write_text(wanted)
    return folder


def run_opener(product: Product, environment: Path, folder: Path, reference: Reference) -> dict[str, Any]:
    program = ["node"] if product.opener.endswith(".mjs") else [str(environment / "bin" / "python")]
    with tempfile.TemporaryDirectory() as out:
        job = {"folder": str(folder.resolve()), "images": reference.images, "captions": reference.captions}
        job_path = Path(out) / "job.json"
        job_path.write_text(json.dumps({**job, "labels": reference.labels, "out": out}), encoding="utf-8")
        run([*program, str(OPENERS / product.opener), str(job_path)], environment, OFFLINE)
        answer: dict[str, Any] = json.loads((Path(out) / "answer.json").read_text(encoding="utf-8"))
    return answer


def run(command: list[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    """RuntimeError with the line of the output that names the error, if the command fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    options: dict[str, Any] = {"cwd": folder, "env": {**environment, **(variables or {})}, "timeout": TIMEOUT_S}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)
    if done.returncode:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        named = [line for line in lines if "Error" in line or "error:" in line]
        raise RuntimeError((named or lines or [f"exit code {done.returncode}"])[-1][:300])


if __name__ == "__main__":
    sys.exit(main())
