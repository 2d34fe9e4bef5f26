"""Tables of images and captions, and caption datasets as they are distributed: COCO, Flickr30k, Flickr8k. No torch.

A broken line affects no other line.
"""

import csv
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from m1clip.config import DataConfig
from m1clip.data.caption_text import detect_encoding
from m1clip.data.columns import CAPTION_COLUMNS, MAX_LINE, SAMPLED_ROWS, Record, caption_texts, is_image, parse_records
from m1clip.data.index import BadRow, Listed, Listing, Note, Row, table_location
from m1clip.decode import IMAGE_SUFFIX
from m1clip.sensors import available_gb
from m1clip.signals import ended_by_signals

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
MAX_QUOTED_LINES = 50  # a longer quoted field counts as a missing quotation mark
LARGE_JSON_BYTES = 20_000_000  # that take about as long to parse as Ctrl-C may
BYTES_PER_ITEM = 100  # of a JSON text, once it is parsed


def list_table(path: Path, config: DataConfig) -> Listing:
    return find_images(path.parent, parse_records(str(path), READERS[path.suffix.lower()](path), config))


def find_images(folder: Path, rows: Iterator[Listed]) -> Listing:
    """The rows, relative to the folder with most of their images: this one, one beside or above it, or the current."""
    head = list(islice(rows, SAMPLED_ROWS))
    images = [row.image for row in head if isinstance(row, Row) and row.image]
    above = folder.absolute().parent
    patterns = ("*/", "images/*/", "[Ff]lick*/*/")
    below, beside = (sorted(sub for p in patterns for sub in parent.glob(p))[:50] for parent in (folder, above))
    folders = list(map(str, (folder, *below, above, ".", *beside)))
    found = [sum(os.path.isfile(os.path.join(root, image)) for image in images) for root in folders]
    best = next((k for k, count in enumerate(found) if 2 * count > len(images)), found.index(max(found)))
    return Listing(folders[best], chain(head, rows))


# Readers, one per format.
@contextmanager
def open_text(path: Path, newline: str | None = None) -> Iterator[tuple[TextIO, list[Note]]]:
    """The file, decoded, and a note if it is not UTF-8."""
    with open(path, "rb") as file:
        encoding, errors, example = detect_encoding(file)
    note = Note(f"{path} is not UTF-8; read as {encoding}" + (f', such as "{example}"' if example else ""))
    with open(path, encoding=encoding, errors=errors, newline=newline) as text:
        yield text, [] if encoding == "utf-8-sig" else [note]


def read_csv(path: Path) -> Iterator[Record]:
    """One record per line. A line that does not fit the header, or lacks a quotation mark, is broken."""
    with open_text(path, newline="") as (file, notes):
        yield from ((0, note) for note in notes)
        lines = read_lines(file)
        number, text = next(((n, line) for n, line in lines if line.strip()), (0, ""))
        delimiter = _find_delimiter(text)
        if text.strip().strip('"') == f"sep={delimiter}":  # Excel's first line
            number, text = next(lines, (0, ""))
        names = [name.strip() for name in _split_fields(text, delimiter) or []]
        if any(IMAGE_SUFFIX.search(name) or "://" in name for name in names):  # no header: this is a row
            head = list(islice(lines, SAMPLED_ROWS))
            lines = chain(head, lines)
            widths = {len(_split_fields(line, delimiter) or names) for _, line in head}
            is_pair = IMAGE_SUFFIX.search(names[0]) and (2 in widths or delimiter == ":")
            names = [f"column {i + 1}" for i in range(2 if is_pair else len(names))]
        else:
            number, text = next(lines, (0, ""))
        ends_with_caption = len(names) == 2 or (names and names[-1].lower() in CAPTION_COLUMNS)
        while number:
            fields, extra = _split_fields(text, delimiter), list[tuple[int, str]]()
            if fields and len(fields) > len(names) and ends_with_caption:  # unquoted commas can only belong to it
                fields = [*fields[: len(names) - 1], delimiter.join(fields[len(names) - 1 :])]
            while fields is None and may_continue(extra) and (following := next(lines, None)):
                extra.append(following)
                fields = _split_fields(text + "".join(line for _, line in extra), delimiter, strict=True)
            if fields and len(fields) == len(names):
                yield number, dict(zip(names, map(str.strip, fields), strict=True))
            elif fields != []:  # if it has several lines, a quote is missing in the first
                yield number, ValueError(f"expected {len(names)} fields ({', '.join(names)})")
                lines = chain(extra, lines) if extra else lines  # a chain of chains would take quadratic time
            number, text = next(lines, (0, ""))


def read_lines(file: TextIO) -> Iterator[tuple[int, str]]:
    """The lines with their numbers, from 1; of a line longer than MAX_LINE only the beginning."""
    for number in count(1):
        line = rest = file.readline(MAX_LINE)
        if not line:
            return
        while len(rest) == MAX_LINE and rest[-1] not in "\r\n":
            rest = file.readline(MAX_LINE)
        yield number, line


def may_continue(lines: Sequence[tuple[int, str]]) -> bool:
    """Whether a quoted field may have still more lines than these."""
    return len(lines) < MAX_QUOTED_LINES and sum(len(line) for _, line in lines) < MAX_LINE


def _find_delimiter(text: str) -> str:
    """Of a first line: what follows the name of an image, or the commonest delimiter of a header."""
    if first := re.match(rf'[^\t,;|]*?{IMAGE_SUFFIX.pattern[:-1]}"?\s*?([\t,;|]|:(?=\s))', text, re.I):
        return first[2]
    return "\t" if "\t" in text else max(",;|", key=text.count)


def _split_fields(text: str, delimiter: str, strict: bool = False) -> list[str] | None:
    """The fields of a line; [] if it is empty, None if a quotation is open and may end on a later line."""
    if '"' not in text:
        bare = text.rstrip("\r\n")
        return bare.split(delimiter) if bare else []
    lines = [line + "\n" for line in text.split("\n")]
    for exact in (True, strict):
        try:
            return next(csv.reader(lines, delimiter=delimiter, strict=exact), [])
        except csv.Error as error:
            if "unexpected end" in str(error):
                return None
    return [text]  # one field fits no header


def read_json_lines(path: Path) -> Iterator[Record]:
    with open_text(path) as (file, notes):
        yield from ((0, note) for note in notes)
        for number, line in read_lines(file):
            try:
                if line.strip():
                    yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                yield number, ValueError(f"not JSON ({error})")


def read_json_table(path: Path) -> Iterator[Record]:
    values = load_json(path)
    if isinstance(values, dict):
        lists = [v for v in values.values() if isinstance(v, list) and v and isinstance(v[0], dict)]
        if 2 * sum(map(is_image, values)) > len(values):  # {"a.jpg": "a caption" or several}
            values = [{"image": image, "caption": captions} for image, captions in values.items()]
        elif len(lists) == 1:  # {"data": [{…}, {…}]}
            values = lists[0]
    if not isinstance(values, list):
        raise ValueError(f"{path} must be a list of objects, or in the format of COCO or Karpathy")
    yield from enumerate(values, 1)


def require_memory_for(path: Path, data: bytes) -> None:
    """Raise MemoryError for a JSON text that would not fit into memory once parsed: `[],[],…` grows 26 times."""
    items = sum(map(data.count, (b",", b"[", b"{")))
    needed, free = (3 * len(data) + BYTES_PER_ITEM * items) / 1e9, available_gb()
    if needed > free:
        advice = "JSON lines, CSV or Parquet need less"
        raise MemoryError(f"{path} needs about {needed:,.1f} GB of memory, {free:,.1f} GB are available; {advice}")


def load_json(path: Path) -> Any:
    try:
        data = path.read_bytes()
        require_memory_for(path, data)
        with ended_by_signals() if len(data) > LARGE_JSON_BYTES else nullcontext():
            return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def read_parquet(path: Path) -> Iterator[Record]:
    """Rows of a Parquet file whose images are paths; columns of bytes are skipped."""
    try:
        file = pq.ParquetFile(path)
        names = [field.name for field in file.schema_arrow if not holds_images(field.type)]
        batches = file.iter_batches(2000, columns=names)
        yield from enumerate(chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def names_images(path: Path) -> bool:
    """Whether one of the first rows of a table names an image; a list of classes does not."""
    try:
        if path.suffix.lower() == ".parquet" and contains_images(path):
            return True
        head = [values for _, values in islice(READERS[path.suffix.lower()](path), SAMPLED_ROWS)]
    except ValueError:  # COCO's and Karpathy's JSON are no tables
        return path.suffix.lower() == ".json" and list_captions(path) is not None
    return any(is_image(value) for values in head if isinstance(values, dict) for value in values.values())


def contains_images(path: Path) -> bool:
    """Whether a Parquet file contains images, not only their paths."""
    try:
        return any(holds_images(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {error}") from None


def holds_images(arrow_type: Any) -> bool:
    """Whether an Arrow column holds bytes, or the struct that `datasets` makes of images."""
    if pa.types.is_struct(arrow_type):
        return bool(arrow_type.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type))


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".token"), read_csv),
    ".jsonl": read_json_lines,
    ".json": read_json_table,
    ".parquet": read_parquet,
}


# Caption datasets.
def list_caption_dataset(path: Path, dataset: str, config: DataConfig) -> Listing:
    """The folder of coco, flickr30k or flickr8k, as it is distributed or with Karpathy's JSON."""
    if karpathy := _karpathy_file(path, dataset):
        listing = find_images(path, _karpathy_rows(karpathy, load_json(karpathy)))
        return listing.with_note(f"captions from {karpathy}")
    if dataset != "coco":
        config = replace(config, image_column="auto", caption_column="auto")  # the flags are about other sources
        if flickr := _list_flickr(path, config):
            return flickr
        expected = f"a .token file, captions.txt, results.csv or dataset_{dataset}.json"
        raise FileNotFoundError(f"{path} has none of the files of {dataset}: {expected}")
    files = sorted([*path.glob("annotations/captions_*.json"), *path.glob("captions_*.json")])
    if not files:
        raise FileNotFoundError(f"{path} has neither annotations/captions_*.json nor dataset_coco.json")
    listings = (find_images(path, _coco_rows(file, load_json(file))) for file in files)
    rows = chain.from_iterable(listing.relative_to(str(path)) for listing in listings)
    return Listing(str(path), rows).with_note(f"captions from {', '.join(map(str, files))}")


def list_known_dataset(path: Path, config: DataConfig) -> Listing | None:
    """A plain folder that is one of these datasets, else None."""
    found = [name for name in ("coco", "flickr30k", "flickr8k") if _karpathy_file(path, name, exact=True)]
    found = [name for name in found if name in path.resolve().name.lower()] or found
    if len(found) > 1:
        raise ValueError(f"{path} has the captions of {' and '.join(found)}: name one, as in {found[0]}:{path}")
    if not found and (any(path.glob("annotations/captions_*.json")) or any(path.glob("captions_*20??.json"))):
        found = ["coco"]
    return list_caption_dataset(path, found[0], config) if found else _list_flickr(path, config)


def list_captions(path: Path) -> Listing | None:
    """A JSON file of COCO or Karpathy, or a text file of Flickr (name.jpg#0, a tab and a caption); else None."""
    if path.suffix.lower() != ".json":
        with open_text(path) as (file, _):
            is_token_file = re.match(r"[^\t]+#\d+\t", file.readline(MAX_LINE))
        return find_images(path.parent, _token_rows(path)) if is_token_file else None
    values = load_json(path)
    if not isinstance(values, dict) or not isinstance(values.get("images"), list):
        return None
    rows = _coco_rows if "annotations" in values else _karpathy_rows
    return find_images(path.parent, rows(path, values))


def _coco_rows(path: Path, values: Any) -> Iterator[Listed]:
    """The official annotations: a list of images and a list of captions, joined by the image's id."""
    images, annotations = (_objects(path, values, key) for key in ("images", "annotations"))
    split = re.search(r"train|val|test", path.stem)
    files = {item["id"]: str(item.get("file_name") or "") for item in images if isinstance(item.get("id"), int | str)}
    captions: dict[Any, list[str]] = {image_id: [] for image_id in files}
    unknown = list[BadRow]()
    del values, images
    for number, annotation in enumerate(annotations, 1):
        image_id = annotation.get("image_id")
        if isinstance(image_id, int | str) and image_id in captions:
            captions[image_id] += caption_texts(annotation.get("caption"))
        else:
            reason = f"its image_id {image_id!r} is none of the images"
            unknown.append(BadRow("broken line", f"{path} annotation {number}", reason))
    yield from (Row(file, captions[i], 0, str(path), split[0] if split else "") for i, file in files.items())
    yield from unknown


def _objects(path: Path, values: Any, key: str) -> list[dict[str, Any]]:
    items = values.get(key) if isinstance(values, dict) else None
    if not isinstance(items, list):
        raise ValueError(f"{path} has no list {key!r}: not COCO captions")
    return [item for item in items if isinstance(item, dict)]


def _karpathy_rows(path: Path, values: Any) -> Iterator[Listed]:
    """{"images": [{"filename", "filepath", "split", "sentences": [{"raw"}]}]}"""
    for line, image in enumerate(_objects(path, values, "images"), 1):
        name = os.path.join(image.get("filepath") or "", str(image.get("filename") or ""))
        yield Row(name, caption_texts(image.get("sentences")), line, str(path), str(image.get("split") or ""))


def _karpathy_file(path: Path, dataset: str, exact: bool = False) -> Path | None:
    """The JSON file of Karpathy's splits; dataset.json, which may be anything, unless `exact`."""
    patterns = (f"dataset_{dataset}.json", f"*/dataset_{dataset}.json", *(() if exact else ("dataset.json",)))
    return next((file for pattern in patterns for file in sorted(path.glob(pattern)) if file.is_file()), None)


def _list_flickr(path: Path, config: DataConfig) -> Listing | None:
    """Flickr8k or Flickr30k: token files or Kaggle's CSVs, and lists of the splits; None without captions."""
    patterns = ("*.t*", "*.csv", "*/*.t*", "*/*.csv")
    files = sorted(file for pattern in patterns for file in path.glob(pattern) if file.is_file())
    names = (r"(?!.*lemma)(.*\.)?token(\.txt)?", r"captions\.(txt|csv|tsv)|results\.csv", r".*annotations.*\.csv")
    captions = next((file for name in names for file in files if re.fullmatch(name, file.name, re.I)), None)
    if captions is None:
        return None
    is_table = captions.suffix in TABLE_SUFFIXES or captions.stem == "captions"
    listing = list_captions(captions) if is_table else find_images(path, _token_rows(captions))
    listing = (listing or list_table(captions, config)).with_note(f"captions from {captions}")
    splits = {}  # from lists such as Flickr_8k.trainImages.txt, train.txt, dev.txt
    for file in files:
        if split := re.search(r"(?:^|[._])(train|val|dev|test)(?:images)?\.txt$", file.name, re.I):
            with open(file, errors="replace") as text:
                for _, line in read_lines(text):
                    splits[os.path.splitext(line.strip())[0]] = split[1].lower()
    if not splits:
        return listing
    rows = (
        row._replace(split=splits.get(os.path.splitext(row.image)[0], "unlisted")) if isinstance(row, Row) else row
        for row in listing.rows
    )
    return Listing(listing.root, rows)


def _token_rows(path: Path) -> Iterator[Listed]:
    """1000268201_693b08cb0e.jpg#0<tab>A child in a pink dress is climbing up the stairs ."""
    with open_text(path) as (file, notes):
        yield from notes
        for number, line in read_lines(file):
            name, tab, caption = line.rstrip("\n").partition("\t")
            image, mark, _ = name.partition("#")
            if tab and mark and IMAGE_SUFFIX.search(re.sub(r"\.\d+$", "", image)):
                yield Row(re.sub(r"(\.jpg)\.\d+$", r"\1", image), [caption], number, str(path))
            elif line.strip():
                yield BadRow("broken line", table_location(str(path), number), "expected name.jpg#0, tab, caption")
