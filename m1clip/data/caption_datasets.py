"""The captioned sets of the field as they are distributed: COCO, Flickr30k, Flickr8k; Karpathy's JSON."""

import os
import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from m1clip.config import DataConfig
from m1clip.data.rows import BadRow, Listing, Row
from m1clip.data.tables import IMAGE, csv_records, find_root, load_json, several, table


def coco(path: Path, config: DataConfig) -> Listing:
    """COCO: annotations/captions_train2017.json, captions_val2017.json, those of 2014, or Karpathy's JSON."""
    if karpathy := _karpathy_file(path, "coco"):
        return karpathy_json(karpathy, path)
    found = sorted(chain(path.glob("annotations/captions_*.json"), path.glob("captions_*.json")))
    if not found:
        raise FileNotFoundError(
            f"{path} has no annotations/captions_train2017.json (or 2014), nor Karpathy's dataset_coco.json"
        )
    return Listing(str(path), chain.from_iterable(coco_json(one, path) for one in found))


def coco_json(path: Path, root: Path) -> Iterator[Row | BadRow]:
    """The official annotations: images and captions apart, joined by the image's number."""
    values = load_json(path)
    images, notes = (_objects(path, values, key) for key in ("images", "annotations"))
    name = re.search(r"(train|val|test)(\d*)", path.stem)
    files = {one.get("id"): one.get("file_name") for one in images if isinstance(one.get("id"), int | str)}
    captions: dict[Any, list[str]] = {number: [] for number in files}
    del values, images
    for i, note in enumerate(notes, 1):
        number = note.get("image_id")
        if isinstance(number, int | str) and number in captions:
            captions[number] += several(note.get("caption"))
        else:
            what = f"its image_id {number!r} is none of the images"
            yield BadRow("broken line", f"{path} annotation {i}", what)
    folder = _folder(
        root,
        [name.group() if name else "", *("train2017", "val2017", "train2014", "val2014")],
        files.values(),
    )
    for number, file in files.items():
        where = os.path.join(folder, file) if isinstance(file, str) else ""
        yield Row(where, captions[number], 0, str(path), name.group(1) if name else "")


def _objects(path: Path, values: Any, key: str) -> list[dict[str, Any]]:
    found = values.get(key) if isinstance(values, dict) else None
    if not isinstance(found, list):
        raise ValueError(f"{path} has no list {key!r}: not COCO's captions")
    return [one for one in found if isinstance(one, dict)]


def _folder(root: Path, names: list[str], files: Any) -> str:
    """The folder, from the root, in which the first of the files is found."""
    first = [file for file, _ in zip((f for f in files if isinstance(f, str)), range(5), strict=False)]
    choices = [os.path.join(*parts) for name in names if name for parts in ((name,), ("images", name))]
    choices += ["", "images", "Images", "train2017", "val2017"]
    return next((one for one in choices if any((root / one / file).is_file() for file in first)), choices[0])


def karpathy_json(path: Path, root: Path) -> Listing:
    """{"images": [{"filename", "filepath", "split", "sentences": [{"raw"}]}]}"""
    images = _objects(path, load_json(path), "images")

    def name(one: dict[str, Any]) -> str:
        return os.path.join(str(one.get("filepath") or ""), str(one.get("filename") or ""))

    where = find_root(root / "here", [name(one) for one in images[:50]])
    rows = (
        Row(name(one), several(one.get("sentences")), i, str(path), str(one.get("split") or ""))
        for i, one in enumerate(images, 1)
    )
    return Listing(where, rows)


def text_table(path: Path, config: DataConfig) -> Listing:
    """A .txt that lists images: name.jpg#0, a tab and a caption, or a CSV in all but name."""
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        tokens = bool(re.match(r"[^\t]+#\d+\t", file.readline()))
    return _rooted(path, _tokens(path)) if tokens else table(path, config)


def _rooted(path: Path, rows: Iterator[Row | BadRow]) -> Listing:
    """The rows, and where their images are: beside `path`, as the first of them show."""
    first = list(islice(rows, 50))
    root = find_root(path, [row.image for row in first if isinstance(row, Row)])
    return Listing(root, chain(first, rows))


def recognized(path: Path, config: DataConfig) -> Listing | None:
    """A folder that is one of these sets, though nobody said so."""
    if any(path.glob("annotations/captions_*.json")) or _karpathy_file(path, "coco"):
        return coco(path, config)
    for name in ("flickr8k", "flickr30k"):
        if (
            _karpathy_file(path, name)
            or (path / "captions.txt").is_file()
            or (path / "results.csv").is_file()
        ):
            return flickr(path, name, config)
    return None


def known_json(path: Path) -> Listing | None:
    """A JSON file that has COCO's or Karpathy's layout."""
    values = load_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("images"), list):
        return None
    if "annotations" in values:
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
        return Listing(str(root), coco_json(path, root))
    return karpathy_json(path, path.parent)


def _karpathy_file(path: Path, name: str) -> Path | None:
    places = (
        path / f"dataset_{name}.json",
        path / "annotations" / f"dataset_{name}.json",
        path / "dataset.json",
    )
    return next((one for one in places if one.is_file()), None)


def flickr(path: Path, name: str, config: DataConfig) -> Listing:
    """Flickr8k or Flickr30k: token files, Kaggle's CSVs or Karpathy's JSON; lists of images say the split."""
    if karpathy := _karpathy_file(path, name):
        return karpathy_json(karpathy, path)
    tokens = [one for one in _texts(path) if re.search(r"(\.|^)token(\.txt)?$", one.name)]
    tokens = [one for one in tokens if "lemma" not in one.name] or tokens
    csvs = [one for one in _texts(path) if re.fullmatch(r"captions\.(txt|csv)|results\.csv", one.name)]
    other = sorted(path.glob("*annotations*.csv"))
    if tokens:
        rows = _tokens(tokens[0])
    elif csvs:
        rows = _csv(csvs[0])
    elif other:
        return table(other[0], config)
    else:
        raise FileNotFoundError(
            f"{path} has none of the files {name} comes with: a .token file, captions.txt, results.csv or "
            f"dataset_{name}.json"
        )
    sides, (root, rows) = _sides(path), _rooted(path / "here", rows)
    return Listing(root, (_with_side(row, sides) for row in rows))


def _texts(path: Path) -> list[Path]:
    """The lists that come with the images: in the folder, or in one just below."""
    found = [*path.glob("*.t*"), *path.glob("*.csv"), *path.glob("*/*.t*"), *path.glob("*/*.csv")]
    return sorted(one for one in found if one.is_file())


def _tokens(path: Path) -> Iterator[Row | BadRow]:
    """1000268201_693b08cb0e.jpg#0<tab>A child in a pink dress is climbing up the stairs ."""
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            name, tab, caption = line.rstrip("\n").partition("\t")
            image, mark, _ = name.partition("#")
            if tab and mark and IMAGE.search(re.sub(r"\.\d+$", "", image)):
                yield Row(re.sub(r"(\.jpg)\.\d+$", r"\1", image), [caption], number, str(path))
            elif line.strip():
                yield BadRow(
                    "broken line", f"{path} line {number}", "name.jpg#0, a tab and a caption were expected"
                )


def _csv(path: Path) -> Iterator[Row | BadRow]:
    """image,caption, or Kaggle's image_name| comment_number| comment."""
    for record in csv_records(path):
        if isinstance(record, BadRow):
            yield record
        else:
            values = list(record.values.values())
            yield Row(values[0], [values[-1]], record.line, str(path))


def _sides(path: Path) -> dict[str, str]:
    """Which side each image is on, by the lists: Flickr_8k.trainImages.txt, train.txt, dev.txt …"""
    sides = {}
    for one in _texts(path):
        name = re.search(r"(?:^|[._])(train|val|dev|test)(?:images)?\.txt$", one.name, re.I)
        if name:
            for line in one.read_text(errors="replace").splitlines():
                sides[os.path.splitext(line.strip())[0]] = name.group(1).lower()
    return sides


def _with_side(row: Row | BadRow, sides: dict[str, str]) -> Row | BadRow:
    """An image on none of the lists belongs to no side."""
    if isinstance(row, BadRow) or not sides:
        return row
    return row._replace(split=sides.get(os.path.splitext(row.image)[0], "unlisted"))
