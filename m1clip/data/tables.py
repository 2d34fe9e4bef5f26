"""Tables of images and captions: .csv, .tsv, .jsonl, .json, .parquet. A broken line costs no other."""

import ast
import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from m1clip.config import DataConfig
from m1clip.data.rows import BadRow, Listing, Row, is_utf8

TABLES = (".csv", ".tsv", ".jsonl", ".json", ".parquet")
IMAGE = re.compile(r"\.(jpe?g|jpe|jfif|png|webp|gif|bmp|tiff?|avif|heic|heif|jp2|ppm|pgm)$", re.I)
# As they are called in the wild, the likeliest first.
IMAGES = (
    *("image", "filepath", "file_path", "image_path", "img_path", "filename", "file_name", "image_name"),
    *("image_file", "img", "path", "file", "images", "picture", "photo", "jpg", "png", "url", "image_url"),
)
CAPTIONS = (
    *("caption", "captions", "text", "texts", "title", "description", "sentence", "sentences", "comment"),
    *("raw", "txt", "alt_text", "alt", "prompt", "conversations", "label"),
)
SPLITS = ("split", "set", "partition", "subset")
LONGEST = 50  # lines that one quoted field may go over before it is taken for a lost quotation mark
LOOK = 200  # rows that columns are guessed from


class Record(NamedTuple):
    line: int
    values: dict[str, Any]


class Columns(NamedTuple):
    image: str
    captions: tuple[str, ...]
    split: str | None


def table(path: Path, config: DataConfig) -> Listing:
    """The rows of one table; images are looked for beside it."""
    records = RECORDS[path.suffix.lower()](path)
    first = list(islice(records, LOOK))
    known = [record for record in first if isinstance(record, Record)]
    if not known:
        faults = [fault for fault in first if isinstance(fault, BadRow)]
        raise ValueError(f"{path} has no rows" + (f" that can be read: {faults[0]}" if faults else ""))
    columns = guess(path, known, config)
    root = find_root(path, [str(record.values.get(columns.image) or "") for record in known])

    def rows() -> Iterator[Row | BadRow]:
        for source in (first, records):
            for record in source:
                yield record if isinstance(record, BadRow) else _row(path, record, columns)

    return Listing(root, rows())


def _row(path: Path, record: Record, columns: Columns) -> Row:
    image = str(record.values.get(columns.image) or "").strip()
    image = image if "/" in image else image.replace("\\", "/")  # as Windows writes them
    texts = [text for column in columns.captions for text in several(record.values.get(column))]
    split = str(record.values.get(columns.split) or "") if columns.split else ""
    return Row(image, texts, record.line, str(path), split)


def several(value: Any) -> list[str]:
    """One caption or many, in the shapes they come in: text, a list, a list written as text, objects."""
    if isinstance(value, dict):
        turn = value.get("value") if value.get("from") in ("gpt", "assistant") else None  # of a conversation
        value = turn or value.get("raw") or value.get("caption") or value.get("text")
    if isinstance(value, list | tuple):
        return [text for one in value for text in several(one)]
    if not isinstance(value, str):
        return []
    if value.startswith("[") and value.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(found, list) and found and all(isinstance(one, str) for one in found):
                return found
    return [value]


def guess(path: Path, records: Sequence[Record], config: DataConfig) -> Columns:
    """Which columns are meant: as the flags say, else by name, else by what they hold."""
    names = _names(records)
    image = _pick(path, records, names, ("image", config.image_column), IMAGES, _like_images)
    others = [Record(line, {k: v for k, v in values.items() if k != image}) for line, values in records]
    lower = {name.strip().lower(): name for name in reversed(names)}
    split = next((lower[name] for name in SPLITS if name in lower), None)
    return Columns(image, guess_captions(path, others, config), split)


def guess_captions(path: Path, records: Sequence[Record], config: DataConfig) -> tuple[str, ...]:
    names, requested = _names(records), config.caption_column
    numbered = [name for name in names if re.fullmatch(r"(caption|text|sentence)s?[_ ]?\d+", name.lower())]
    if requested == "auto" and numbered and not any(name.lower() in CAPTIONS for name in names):
        return tuple(numbered)
    # Where no name is known, the column with the most words.
    names.sort(key=lambda name: -_words([record.values.get(name) for record in records]))
    return (_pick(path, records, names, ("caption", requested), CAPTIONS, _like_text),)


def _names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record.values))


def _pick(
    path: Path,
    records: Sequence[Record],
    names: Sequence[str],
    asked: tuple[str, str],
    usual: Iterable[str],
    fits: Callable[[Sequence[Any]], bool],
) -> str:
    what, requested = asked
    if requested != "auto":
        if requested not in names:
            raise ValueError(f"{path} has no column {requested!r}; it has {', '.join(map(repr, names))}")
        return requested
    lower = {name.strip().lower(): name for name in reversed(names)}
    likely = [name for name in names if fits([record.values.get(name) for record in records])]
    by_name = [lower[name] for name in usual if name in lower]
    said = [
        name
        for name in likely
        if not re.search(r"(^|_)(id|ids|key|index|idx|hash|sha256|md5)$", name.lower())
    ]
    for name in (*(name for name in by_name if name in likely), *said, *by_name):
        return name
    shown = ", ".join(repr(name[:40]) for name in names)
    raise ValueError(f"{path}: which column is the {what}? --{what}-column says it; there are {shown}")


def _like_images(values: Sequence[Any]) -> bool:
    texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    likely = [text for text in texts if IMAGE.search(text) or re.match(r"https?://", text)]
    return len(likely) * 2 > len(values)


def _like_text(values: Sequence[Any]) -> bool:
    return sum(bool(several(value)) for value in values) * 2 > len(values)


def _words(values: Sequence[Any]) -> float:
    return sum(len(text.split()) for value in values for text in several(value)) / max(1, len(values))


def find_root(path: Path, images: Sequence[str]) -> str:
    """The folder that the first images are found in: the table's own, one beside it or above, or here."""
    here, up = path.parent, path.absolute().parent.parent
    beside = [[str(one) for one in sorted(where.iterdir()) if one.is_dir()][:50] for where in (here, up)]
    folders = [str(here), *beside[0], str(up), ".", *beside[1]]
    images = [name if "/" in name else name.replace("\\", "/") for name in images if name]
    found = [sum(os.path.isfile(os.path.join(folder, name)) for name in images) for folder in folders]
    near = next((k for k, number in enumerate(found) if 2 * number > len(images)), found.index(max(found)))
    return folders[near]


def csv_records(path: Path, delimiter: str = "", header: Sequence[str] = ()) -> Iterator[Record | BadRow]:
    """Lines of a CSV, a record each. A line that does not fit the header, or has lost a quote, is a fault."""
    with open(path, "rb") as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")  # as Excel saves "Unicode text"
    coding = "utf-16" if wide else "utf-8-sig"
    with open(path, encoding=coding, errors="replace" if wide else "surrogateescape", newline="") as file:
        lines: Iterator[tuple[int, str]] = enumerate(file, 1)
        number, text = next(((n, line) for n, line in lines if line.strip()), (0, ""))
        delimiter = delimiter or ("\t" if "\t" in text else max(",;|", key=text.count))
        names = list(header)
        if not names:
            names = [name.strip() for name in fields_of(text, delimiter) or []]
            if any(
                IMAGE.search(name) or "://" in name for name in names
            ):  # no header: the first line is a row
                names = [f"column {i + 1}" for i in range(len(names))]
            else:
                number, text = next(lines, (0, ""))
        while number:
            fields, ahead = fields_of(text, delimiter), list[tuple[int, str]]()
            while fields is None and len(ahead) < LONGEST and (following := next(lines, None)):
                ahead.append(following)
                fields = fields_of(text + "".join(line for _, line in ahead), delimiter, strict=True)
                if fields and len(fields) != len(names):  # not one row over several lines: a quote was lost
                    fields = ["\0"]
            if (
                fields and len(fields) > len(names) == 2
            ):  # commas that nobody quoted: they can only be the caption's
                fields = [fields[0], delimiter.join(fields[1:])]
            if fields and len(fields) == len(names):
                yield Record(number, dict(zip(names, map(str.strip, fields), strict=True)))
            elif fields != []:
                yield _misfit(f"{path} line {number}", text, names)
                lines = chain(ahead, lines)
            number, text = next(lines, (0, ""))


def _misfit(where: str, text: str, names: Sequence[str]) -> BadRow:
    if not is_utf8(text):
        return BadRow("not UTF-8", where, "the text is not UTF-8: save it as such")
    return BadRow("broken line", where, f"{len(names)} fields were expected ({', '.join(names)})")


def fields_of(text: str, delimiter: str, strict: bool = False) -> list[str] | None:
    """The fields of a line; none of an empty one. None: a quotation is open, and may end on a later line."""
    if '"' not in text:  # most lines: nothing to unquote
        bare = text.rstrip("\r\n")
        return bare.split(delimiter) if bare else []
    lines = [line + "\n" for line in text.split("\n")]
    for exact in (True, strict):
        try:
            return next(csv.reader(lines, delimiter=delimiter, strict=exact), [])
        except csv.Error as error:
            if "unexpected end" in str(error):
                return None
    return ["\0"]  # fits no header


def json_lines(path: Path) -> Iterator[Record | BadRow]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path} line {number}"
            if not line.strip():
                continue
            try:
                values = json.loads(line)
            except UnicodeDecodeError:
                yield BadRow("not UTF-8", where, "not UTF-8")
                continue
            except (ValueError, RecursionError) as error:
                yield BadRow("broken line", where, f"not JSON ({error})")
                continue
            if isinstance(values, dict):
                yield Record(number, values)
            else:
                yield BadRow("broken line", where, "an object in {} was expected")


def json_array(path: Path) -> Iterator[Record | BadRow]:
    values = load_json(path)
    if isinstance(values, dict):
        inside = [
            one for one in values.values() if isinstance(one, list) and one and isinstance(one[0], dict)
        ]
        if _like_images(list(values)):  # {"a.jpg": "a caption" or several}
            values = [{"image": image, "caption": said} for image, said in values.items()]
        elif len(inside) == 1:  # {"data": [{…}, {…}]}
            values = inside[0]
    if not isinstance(values, list):
        raise ValueError(f"{path} should be a list of objects, or COCO's or Karpathy's layout")
    for number, one in enumerate(values, 1):
        if isinstance(one, dict):
            yield Record(number, one)
        else:
            yield BadRow("broken line", f"{path} item {number}", "an object in {} was expected")


def load_json(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return json.load(file)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def parquet_records(path: Path) -> Iterator[Record | BadRow]:
    """Rows of a Parquet file whose images are paths; columns of bytes are left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        light = [field.name for field in file.schema_arrow if not holds_bytes(field.type)]
        number = 0
        for batch in file.iter_batches(2000, columns=light):
            for values in batch.to_pylist():
                number += 1
                yield Record(number, values)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not Parquet that can be read: {error}") from None


def has_images(path: Path) -> bool:
    """Whether a Parquet file holds images, and not only their names."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return any(holds_bytes(field.type) for field in pq.read_schema(path))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not Parquet that can be read: {error}") from None


def holds_bytes(kind: Any) -> bool:
    """Whether an Arrow column holds images: bytes, or the structure that `datasets` gives them."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


RECORDS = {
    ".csv": csv_records,
    ".tsv": lambda path: csv_records(path, "\t"),
    ".txt": csv_records,
    ".jsonl": json_lines,
    ".json": json_array,
    ".parquet": parquet_records,
}
