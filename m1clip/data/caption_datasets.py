"""Caption datasets as they are distributed: COCO, Flickr30k, Flickr8k, and Karpathy's JSON. No torch."""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from m1clip.config import DataConfig
from m1clip.data.rows import BadRow, Listing, Row
from m1clip.data.tables import IMAGE_SUFFIX, caption_texts, find_images, list_table, load_json


def list_coco(path: Path) -> Listing:
    """annotations/captions_train2017.json, captions_val2017.json, those of 2014, or Karpathy's JSON."""
    if karpathy := _karpathy_file(path, "coco"):
        return find_images(path, _karpathy_rows(karpathy))
    files = sorted([*path.glob("annotations/captions_*.json"), *path.glob("captions_*.json")])
    if not files:
        raise FileNotFoundError(f"{path} has neither annotations/captions_*.json nor dataset_coco.json")
    return Listing(str(path), chain.from_iterable(_coco_rows(file, path) for file in files))


def _coco_rows(path: Path, root: Path) -> Iterator[Row | BadRow]:
    """The official annotations: a list of images and a list of captions, joined by the image's id."""
    values = load_json(path)
    images, annotations = (_objects(path, values, key) for key in ("images", "annotations"))
    split = re.search(r"(train|val|test)(\d*)", path.stem)
    files = {item["id"]: item.get("file_name") for item in images if isinstance(item.get("id"), int | str)}
    captions: dict[Any, list[str]] = {image_id: [] for image_id in files}
    del values, images
    for number, annotation in enumerate(annotations, 1):
        image_id = annotation.get("image_id")
        if isinstance(image_id, int | str) and image_id in captions:
            captions[image_id] += caption_texts(annotation.get("caption"))
        else:
            location = f"{path} annotation {number}"
            yield BadRow("broken line", location, f"its image_id {image_id!r} is none of the images")
    folder = _image_folder(root, split[0] if split else "", files.values())
    for image_id, file in files.items():
        image = os.path.join(folder, file) if isinstance(file, str) else ""
        yield Row(image, captions[image_id], 0, str(path), split[1] if split else "")


def _objects(path: Path, values: Any, key: str) -> list[dict[str, Any]]:
    items = values.get(key) if isinstance(values, dict) else None
    if not isinstance(items, list):
        raise ValueError(f"{path} has no list {key!r}: not COCO captions")
    return [item for item in items if isinstance(item, dict)]


def _image_folder(root: Path, split: str, files: Iterable[Any]) -> str:
    """The folder, relative to the root, that contains the first files."""
    first = list(islice((file for file in files if isinstance(file, str)), 5))
    names = [name for name in (split, "train2017", "val2017", "train2014", "val2014") if name]
    folders = [folder for name in names for folder in (name, f"images/{name}")]
    folders += ["", "images", "Images"]
    return next((f for f in folders if any((root / f / file).is_file() for file in first)), folders[0])


def _karpathy_rows(path: Path) -> Iterator[Row | BadRow]:
    """{"images": [{"filename", "filepath", "split", "sentences": [{"raw"}]}]}"""
    for line, image in enumerate(_objects(path, load_json(path), "images"), 1):
        name = os.path.join(image.get("filepath") or "", str(image.get("filename") or ""))
        yield Row(name, caption_texts(image.get("sentences")), line, str(path), str(image.get("split") or ""))


def _karpathy_file(path: Path, dataset: str) -> Path | None:
    names = (f"dataset_{dataset}.json", f"annotations/dataset_{dataset}.json", "dataset.json")
    return next((path / name for name in names if (path / name).is_file()), None)


def list_captions(path: Path) -> Listing | None:
    """A JSON file of COCO or Karpathy, or a text file of Flickr (name.jpg#0, a tab and a caption); else None."""
    if path.suffix.lower() != ".json":
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            is_token_file = re.match(r"[^\t]+#\d+\t", file.readline())
        return find_images(path.parent, _token_rows(path)) if is_token_file else None
    values = load_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("images"), list):
        return None
    if "annotations" not in values:
        return find_images(path.parent, _karpathy_rows(path))
    root = path.parent.parent if path.parent.name == "annotations" else path.parent
    return Listing(str(root), _coco_rows(path, root))


def recognize(path: Path, config: DataConfig) -> Listing | None:
    """A plain folder that is one of these datasets, else None."""
    if any(path.glob("annotations/captions_*.json")) or _karpathy_file(path, "coco"):
        return list_coco(path)
    has_captions = (path / "captions.txt").is_file() or (path / "results.csv").is_file()
    for dataset in ("flickr8k", "flickr30k"):
        if has_captions or _karpathy_file(path, dataset):
            return list_flickr(path, dataset, config)
    return None


def list_flickr(path: Path, dataset: str, config: DataConfig) -> Listing:
    """Flickr8k or Flickr30k: token files, Kaggle's CSVs or Karpathy's JSON, and lists of the splits."""
    if karpathy := _karpathy_file(path, dataset):
        return find_images(path, _karpathy_rows(karpathy))
    patterns = ("*.t*", "*.csv", "*/*.t*", "*/*.csv")
    files = sorted(file for pattern in patterns for file in path.glob(pattern) if file.is_file())
    tokens = [file for file in files if re.search(r"(\.|^)token(\.txt)?$", file.name)]
    tokens = [file for file in tokens if "lemma" not in file.name] or tokens
    csvs = [file for file in files if re.fullmatch(r"captions\.(txt|csv)|results\.csv", file.name)]
    if not tokens and not csvs:
        if annotations := sorted(path.glob("*annotations*.csv")):
            return list_table(annotations[0], config)
        expected = f"a .token file, captions.txt, results.csv or dataset_{dataset}.json"
        raise FileNotFoundError(f"{path} has none of the files of {dataset}: {expected}")
    config = replace(config, image_column="auto", caption_column="auto")  # the flags are about other sources
    listing = find_images(path, _token_rows(tokens[0])) if tokens else list_table(csvs[0], config)
    splits = {}  # from lists such as Flickr_8k.trainImages.txt, train.txt, dev.txt
    for file in files:
        if split := re.search(r"(?:^|[._])(train|val|dev|test)(?:images)?\.txt$", file.name, re.I):
            for line in file.read_text(errors="replace").splitlines():
                splits[os.path.splitext(line.strip())[0]] = split[1].lower()
    if not splits:
        return listing
    rows = (
        row._replace(split=splits.get(os.path.splitext(row.image)[0], "unlisted")) if isinstance(row, Row) else row
        for row in listing.rows
    )
    return Listing(listing.root, rows)


def _token_rows(path: Path) -> Iterator[Row | BadRow]:
    """1000268201_693b08cb0e.jpg#0<tab>A child in a pink dress is climbing up the stairs ."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            name, tab, caption = line.rstrip("\n").partition("\t")
            image, mark, _ = name.partition("#")
            if tab and mark and IMAGE_SUFFIX.search(re.sub(r"\.\d+$", "", image)):
                yield Row(re.sub(r"(\.jpg)\.\d+$", r"\1", image), [caption], number, str(path))
            elif line.strip():
                yield BadRow("broken line", f"{path} line {number}", "expected name.jpg#0, tab, caption")
