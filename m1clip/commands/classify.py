"""m1clip classify: the label of each image, without training on the labels."""

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from m1clip.config import require
from m1clip.console import Console, loading
from m1clip.format import percent, printable, with_interval
from m1clip.prompts import check_labels, label_key, parse_labels, parse_prompts
from m1clip.run import find_model

if TYPE_CHECKING:
    from m1clip.model.classify import Classification, ZeroShotModel

FOLDERS = "folders"


@dataclass(frozen=True)
class Args:
    """Zero-shot classification: print the best labels of each image with their probabilities.

    m1clip classify nano-1 photo.jpg --labels cat,dog,bus
    m1clip classify nano-1 photos/ --labels labels.txt --csv > labels.csv
    m1clip classify nano-1 pets/ --labels folders             the names of its folders; also prints the accuracy
    m1clip classify nano-1 photos/ --labels cat,dog --template "a photo of a {}." --template "a drawing of a {}."

    "none of these" is printed if a text without a label, such as "a photo.", fits at least as well as the best label.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|MODEL")]
    """A run (name or path), a model folder, or a CLIP of another library."""
    images: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="IMAGE|FOLDER ...")]
    """Images, and folders with images at any depth."""
    labels: Annotated[str, tyro.conf.arg(metavar="LABELS")] = FOLDERS
    """cat,dog,…, a file (one per line, or a JSON list), imagenet, or folders (the names of the images' folders)."""
    template: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT|FILE")] = ()
    """Prompt with {} for the label, file of prompts or descriptions (JSON), or openai; repeatable."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = 3
    """Labels that are printed for each image."""
    batch_size: int = 32
    """Images that are encoded at once."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one line of JSON for each image."""
    csv: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print CSV: image, label, probability, none_of_these, and truth where the folder names a label."""
    runs: Path = Path("runs")
    """Folder of all runs."""

    def check(self) -> None:
        require(bool(self.images), "which images? m1clip classify RUN IMAGE|FOLDER --labels cat,dog")
        require(not (self.json and self.csv), "--json and --csv cannot be combined")
        require(self.top_k >= 1, f"--top-k must be at least 1, not {self.top_k}")
        require(self.batch_size >= 1, f"--batch-size must be at least 1, not {self.batch_size}")


def main(args: Args) -> int:
    prompts = parse_prompts(args.template)
    console, empty = Console(), list[str]()
    files = list(dict.fromkeys(list_files(args.images, empty)))
    folder_labels = find_folder_labels(files)
    if args.labels == FOLDERS:
        if len(set(folder_labels.values())) < 2:
            raise ValueError("the images are in one folder, so its name is no label; --labels cat,dog,… names them")
        labels = check_labels(sorted(set(folder_labels.values())))
    else:
        labels = parse_labels(args.labels)
    known_labels = {*map(label_key, labels)}
    truth = {file: label for file, label in folder_labels.items() if label_key(label) in known_labels}
    from m1clip.model.classify import classify_images, make_classifier

    if empty:
        console.warn(f"without images: {', '.join(empty[:5])}{' …' if len(empty) > 5 else ''}")
    errors = list[str]()
    model = load_model(args, console)
    classifier = make_classifier(model, labels, prompts)

    def report(position: int, error: Exception) -> None:
        errors.append(str(error))
        console.warn(re.sub(r"^image \d+ \((.*?)\): ", r"\1: ", str(error)))

    show, correct, known = WRITERS["json" if args.json else "csv" if args.csv else "text"](), 0, 0
    bar = console.progress("classifying images", len(files)) if len(files) > args.batch_size else nullcontext()
    with bar as advance:
        for position, result in classify_images(model, files, classifier, args.top_k, args.batch_size, report):
            file = files[position]
            show(file, result, truth.get(file))
            is_correct = label_key(truth.get(file, "")) == label_key(result.label)
            known, correct = known + (file in truth), correct + is_correct
            if advance:
                advance(1)
    if known:
        share = "" if known == len(files) - len(errors) else f" of the {known:,} images whose folder is a label"
        line = f"accuracy{share}: {with_interval(correct / known, known)}, chance {percent(1 / len(labels))}"
        console.print(line) if args.json or args.csv else print(f"\n{line}")
    if errors:
        console.warn(f"{len(errors):,} of {len(files):,} images could not be decoded")
    return int(bool(errors))


def load_model(args: Args, console: Console) -> "ZeroShotModel":
    """A CLIP on the device, or an ONNX export, which runs on the CPU without torch."""
    from m1clip.inference import load_clip
    from m1clip.onnx_model import is_onnx, load_onnx

    folder = find_model(args.runs, args.model)
    if folder is not None and is_onnx(folder):
        require(args.device in ("auto", "cpu"), f"--device must be auto or cpu for an ONNX model, not {args.device}")
        return load_onnx(folder)
    with loading():
        from m1clip.api import use_device

    return use_device(load_clip(folder, args.model, args.runs), args.device, console)


def list_files(paths: Sequence[Path], empty: list[str]) -> Iterator[Path]:
    """Every image: files as they are given, those of folders by their suffix, in order, without hidden ones.

    Folders without images or folders are added to `empty`.
    """
    from m1clip.decode import IMAGE_SUFFIX

    for path in map(Path.expanduser, paths):
        if not path.is_dir():
            if not path.exists():
                raise FileNotFoundError(f"there is no image or folder {path}")
            yield path
            continue
        found = 0
        for folder, subfolders, names in os.walk(path):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            images = sorted(name for name in names if IMAGE_SUFFIX.search(name) and not name.startswith("."))
            found += len(images)
            if not images and not subfolders:
                empty.append(folder)
            yield from (Path(folder, name) for name in images)
        if not found:
            raise ValueError(f"{path} has no images in it")


def find_folder_labels(files: Sequence[Path]) -> dict[Path, str]:
    """The label that the folder of each image names."""
    from m1clip.data.caption_text import label_words

    return {file: label_words(file.absolute().parent.name) for file in files}


Writer = Callable[[Path, "Classification", str | None], None]


def text_writer() -> Writer:
    def write(file: Path, result: "Classification", truth: str | None) -> None:
        best = ", ".join(f"{label} {percent(probability)}" for label, probability in result.top)
        none = "none of these; best: " if result.none_of_these else ""
        print(printable(f"{file}: {none}{best}"))

    return write


def json_writer() -> Writer:
    def write(file: Path, result: "Classification", truth: str | None) -> None:
        top = [{"label": label, "probability": probability} for label, probability in result.top]
        record: dict[str, Any] = {"image": str(file), "label": result.label, "probability": result.probability}
        record |= {"none_of_these": result.none_of_these, "top": top} | ({"truth": truth} if truth else {})
        print(json.dumps(record))

    return write


def csv_writer() -> Writer:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(["image", "label", "probability", "none_of_these", "truth"])

    def write(file: Path, result: "Classification", truth: str | None) -> None:
        none = str(result.none_of_these).lower()
        table.writerow([file, result.label, f"{result.probability:.6g}", none, truth or ""])

    return write


WRITERS: dict[str, Callable[[], Writer]] = {"text": text_writer, "json": json_writer, "csv": csv_writer}
