"""Folders with Core ML packages, for apps of one's own and for Queryable, verified on any system.

Shapes: B items, L tokens, C colors, H W pixels, E embedding.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.config import Target
from m1clip.console import Console
from m1clip.evals.retrieval import Retrieval
from m1clip.export.coreml import CoreMLPrecision, PixelInput, convert_image, convert_text
from m1clip.export.graph import make_encoders
from m1clip.export.layouts import RCLIP_MODEL, ProductLayout, write_json, write_tokenizer
from m1clip.export.mil import MILProgram, NativeProgram
from m1clip.export.verify import SAMPLE, Array, Encode, FileCheck, Reference, Tower, check_encoder

IMAGES = 200  # images that packages are compared on: the program is executed op by op
BATCHES = (1, 3)


@dataclass(frozen=True)
class Package:
    """A package of a target; the first one of each tower is run on all images, the others on a sample."""

    file: str
    tower: Tower
    batch: int = 1
    input_name: str = ""
    output_name: str = ""
    pixels: PixelInput = "image"
    float_ids: bool = False


PACKAGES: dict[str, tuple[Package, ...]] = {
    "coreml": (
        Package("ImageEncoder.mlpackage", "vision", 1, "image", "image_embeds"),
        Package("TextEncoder.mlpackage", "text", 1, "input_ids", "text_embeds"),
        Package("ImageEncoderBatch8.mlpackage", "vision", 8, "pixels", "image_embeds", pixels="bytes"),
        Package("TextEncoderBatch8.mlpackage", "text", 8, "input_ids", "text_embeds"),
    ),
    # What rclip prefers on macOS, beside its ONNX files.
    "rclip": (Package(f"{RCLIP_MODEL}/visual.mlpackage", "vision", 8, "input", "output", pixels="normalized"),),
    # The names of the files, inputs and outputs that the app's source has.
    "queryable": (
        Package("ImageEncoder_mobileCLIP_s2.mlpackage", "vision", 1, "colorImage", "embOutput"),
        Package("TextEncoder_mobileCLIP_s2.mlpackage", "text", 1, "input_ids", "text_embeddings", float_ids=True),
    ),
}


def write_packages(
    target: Target, reference: Reference, precision: CoreMLPrecision, folder: Path, console: Console
) -> tuple[list[FileCheck], Retrieval, Reference, list[str]]:
    """Convert, load each package again and run it; the recall of the first two, what it is compared with, and notes."""
    encoders = make_encoders(reference.model, finite_masks=True)
    reference, checks, found = reference.first(IMAGES), list[FileCheck](), dict[Tower, Array]()
    packages = PACKAGES[target]
    with console.progress("converting to Core ML", len(packages)) as advance:
        for package in packages:
            path, names = folder / package.file, (package.input_name, package.output_name)
            if package.tower == "vision":
                convert_image(encoders.image, path, precision, package.batch, *names, package.pixels)
            else:
                convert_text(encoders.text, path, precision, package.batch, *names, package.float_ids)
            advance(1)
    for package in packages:
        load = partial(load_package, package=package, reference=reference)
        arguments = (folder / package.file, package.file, package.tower, precision, load, reference, console.progress)
        is_first = package.tower not in found
        check, embeddings, _ = check_encoder(*arguments, batches=BATCHES, limit=None if is_first else SAMPLE)
        found.setdefault(package.tower, embeddings)
        checks.append(replace(check, checked_by="MIL program, op by op"))
    notes = ["Core ML: checked by executing the saved MIL program op by op with its declared types"]
    if sys.platform == "darwin":
        checks += check_native(packages, reference, precision, folder)
        notes.append("and by Core ML's own predictions")
    else:
        notes.append(f"not by Core ML's own predictions, which need macOS (this is {sys.platform})")
    if target != "rclip":
        write_tokenizer_files(target, reference, folder)
    after = reference.retrieval(found["vision"], found.get("text", reference.text_KE))
    return checks, after, reference, ["; ".join(notes)]


def load_package(path: Path, package: Package, reference: Reference) -> Encode:
    return adapt(MILProgram(path).embed, package, reference)


def adapt(embed: Encode, package: Package, reference: Reference) -> Encode:
    """From normalized pixels and ids of any length to what a package takes: bytes, ids of the full length."""
    model = reference.model
    mean_C11, std_C11 = model.mean_C11.numpy(), model.std_C11.numpy()
    length, pad_id = model.config.text.context_length, model.tokenizer.settings.pad_id  # type: ignore[union-attr]

    def encode(batch: Array) -> Array:
        if package.tower == "vision":
            is_bytes = package.pixels != "normalized"
            return embed(np.rint(batch * std_C11 + mean_C11).astype(np.float32) if is_bytes else batch)
        full_BL = np.pad(batch, ((0, 0), (0, length - batch.shape[1])), constant_values=pad_id)
        return embed(full_BL.astype(np.float32 if package.float_ids else np.int32))

    return encode


def check_native(
    packages: Sequence[Package], reference: Reference, precision: CoreMLPrecision, folder: Path
) -> list[FileCheck]:
    """Core ML's own predictions on this Mac, compared like those of the program."""
    checks = []
    for package in packages:
        encode = adapt(NativeProgram(folder / package.file).embed, package, reference)
        load = partial(lambda path, encode: encode, encode=encode)
        arguments = (folder / package.file, package.file, package.tower, precision, load, reference)
        check, _, _ = check_encoder(*arguments, batches=BATCHES, limit=SAMPLE)
        checks.append(replace(check, checked_by="Core ML"))
    return checks


def write_tokenizer_files(target: Target, reference: Reference, folder: Path) -> None:
    """tokenizer.json for swift-transformers; for Queryable, the vocabulary and merges of OpenAI's tokenizer."""
    layout = ProductLayout(reference.model)
    if target == "coreml":
        write_tokenizer(layout, folder)
        write_json(folder / "preprocessor_config.json", layout.preprocessor_config)
        return
    bpe: dict[str, Any] = layout.tokenizer_json["model"]
    write_json(folder / "vocab.json", bpe["vocab"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n", encoding="utf-8")
