"""Records of a table as rows: which column is the image, the caption, the label, the split, the group. No torch."""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from m1clip.config import DataConfig
from m1clip.data.caption_text import label_caption, label_words
from m1clip.data.index import BadRow, Listed, Note, Row, table_location
from m1clip.data.splits import GROUP_KINDS, parse_spec
from m1clip.decode import IMAGE_SUFFIX
from m1clip.prompts import MAX_LABEL_LENGTH, parse_labels

# Usual column names, the likeliest first.
IMAGE_COLUMNS = (
    *("image", "filepath", "file_path", "image_path", "img_path", "filename", "file_name", "image_name"),
    *("image_file", "img", "path", "file", "images", "picture", "photo", "jpg", "png", "url", "image_url"),
)
CAPTION_COLUMNS = (
    *("caption", "captions", "text", "texts", "title", "description", "sentence", "sentences", "comment"),
    *("raw", "txt", "alt_text", "alt", "prompt", "conversations", "label"),
)
SPLIT_COLUMNS = ("split", "set", "partition", "subset")
LABEL_COLUMNS = (
    *("label", "class", "class_name", "classname", "label_name", "category", "category_name", "target", "species"),
    *("cls", "class_id", "label_id", "category_id"),
)
# Columns that may name one thing with several images.
GROUP_COLUMN = re.compile(
    r"(product|item|person|subject|patient|user|concept|object|sku|group|scene|video|animal|identity|model|article|shop)"
    r"([_ ]?(id|name|key|number|code))?",
    re.I,
)
MAX_GROUPED, MIN_GROUPS = 20_000, 10  # images in which values of such columns are counted; fewer groups are classes
NUMBERED_CAPTION = re.compile(r"(caption|text|sentence)s?[_ ]?\d+")
NAMED_CAPTION = re.compile("|".join([*CAPTION_COLUMNS, NUMBERED_CAPTION.pattern]))
ID_COLUMN = re.compile(r"(^|_)(id|ids|key|index|idx|hash|sha256|md5)$")
SAMPLED_ROWS = 200  # columns are guessed from these
MAX_LINE = 1_000_000  # characters; the rest of a longer line is not read
MAX_NESTING = 8  # of lists of captions

Values = dict[str, Any]
Record = tuple[int, Any]  # line number, from 1, and values: a dict by column, the ValueError of a broken line, a Note
ClassNames = Mapping[str, Sequence[str]]  # of columns that hold class numbers


def parse_records(
    table: str, records: Iterator[Record], config: DataConfig, classes: ClassNames | None = None
) -> Iterator[Listed]:
    """One row for each record; which column is which is guessed from the first ones."""
    head, classes = list(islice(records, SAMPLED_ROWS)), classes or {}
    good: list[Values] = [values for _, values in head if isinstance(values, dict)]
    if not good:
        first = next((f" that can be read; line {line}: {error!s:.200}" for line, error in head if line), "")
        raise ValueError(f"{table} has no rows{first}")
    names = list(dict.fromkeys(chain.from_iterable(good)))
    image_column = _guess_column(table, good, names, "image", config.image_column)
    others = [{name: value for name, value in values.items() if name != image_column} for values in good]
    label_column = _guess_label_column(table, others, config, classes)
    class_names = classes.get(label_column) or (parse_labels(config.labels) if config.labels else ())
    given_names = len(class_names) if label_column not in classes else 0
    caption_columns = _guess_caption_columns(table, others, config, label_column, bool(class_names))
    groups = GroupColumns(table, names, {image_column, *caption_columns, label_column}, image_column, config)
    lower = {name.strip().lower(): name for name in reversed(names)}
    split_column = next((lower[name] for name in SPLIT_COLUMNS if name in lower), "")
    for line, values in chain(head, records):
        if isinstance(values, dict):
            image = str(values.get(image_column) or "").strip()
            image = image if "/" in image else image.replace("\\", "/")
            label = class_name(values.get(label_column), class_names) if label_column else ""
            if given_names and not label and str(number := values.get(label_column)).isdecimal():
                raise ValueError(
                    f"{table}: class number {number} has no name; --labels has {given_names} names, from 0"
                )
            captions = caption_texts([values.get(column) for column in caption_columns])
            if not caption_columns and label:
                captions = [label_caption(label, config.template)]
            split, group = str(values.get(split_column) or ""), groups.add(values)
            yield Row(image, captions, line, table, split, label=label, group=group)
        elif isinstance(values, Note):
            yield values
        else:
            reason = str(values) if isinstance(values, ValueError) else "expected an object in {}"
            yield BadRow("broken line", table_location(table, line), reason)
    yield from groups.notes()


def caption_texts(value: Any, depth: int = 0) -> list[str]:
    """One or several captions, from a string, a list, a list written as a string, or objects."""
    if isinstance(value, dict):
        # In a conversation, the answer is the caption.
        answer = value.get("value") if value.get("from") in ("gpt", "assistant") else None
        value = answer or value.get("raw") or value.get("caption") or value.get("text")
    if isinstance(value, list | tuple) and depth < MAX_NESTING:
        return [text for item in value for text in caption_texts(item, depth + 1)]
    if not isinstance(value, str):
        return []
    if value.startswith("[") and value.endswith("]") and len(value) <= MAX_LINE:
        for parse in (json.loads, ast.literal_eval):
            try:
                items = parse(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
            if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
                return items
    return [value]


# Which column is which: as the flags say, else by usual names, else by contents.
def _guess_caption_columns(
    table: str, records: Sequence[Values], config: DataConfig, label_column: str, has_names: bool
) -> tuple[str, ...]:
    """None where the only text is the label of a class number: the caption is made of that."""
    names, requested = list(dict.fromkeys(chain.from_iterable(records))), config.caption_column
    if has_names and requested == label_column:
        return ()
    if requested == "auto" and label_column and (has_names or not _is_text(records, label_column)):
        names = [name for name in names if name != label_column and NAMED_CAPTION.fullmatch(name.strip().lower())]
        records = [{name: values.get(name) for name in names} for values in records]
        if not names:
            return ()
    numbered = [name for name in names if NUMBERED_CAPTION.fullmatch(name.lower())]
    if requested == "auto" and numbered and not any(name.lower() in CAPTION_COLUMNS for name in names):
        return tuple(numbered)

    def word_count(name: str) -> int:
        return sum(len(text.split()) for values in records for text in caption_texts(values.get(name)))

    names.sort(key=word_count, reverse=True)  # if no name is known, the column with the most words
    return (_guess_column(table, records, names, "caption", requested),)


def _guess_column(table: str, records: Sequence[Values], names: Sequence[str], role: str, requested: str) -> str:
    if requested != "auto":
        if requested not in names:
            raise ValueError(f"{table} has no column {requested!r}; it has {', '.join(map(repr, names))}")
        return requested
    usual, fits = (IMAGE_COLUMNS, is_image) if role == "image" else (CAPTION_COLUMNS, caption_texts)
    lower = {name.strip().lower(): name for name in reversed(names)}
    by_name = [lower[name] for name in usual if name in lower]
    fitting = [name for name in names if 2 * sum(bool(fits(values.get(name))) for values in records) > len(records)]
    both = [name for name in by_name if name in fitting]
    by_contents = [name for name in fitting if not ID_COLUMN.search(name.lower())]
    if candidates := [*both, *by_contents, *by_name]:
        return candidates[0]
    columns = ", ".join(repr(name[:40]) for name in names)
    raise ValueError(f"{table}: which column is the {role}? Set --{role}-column to one of {columns}")


def is_image(value: Any) -> bool:
    text = value.strip() if isinstance(value, str) else ""
    return bool(IMAGE_SUFFIX.search(text) or re.match(r"https?://", text))


def _guess_label_column(table: str, records: Sequence[Values], config: DataConfig, classes: ClassNames) -> str:
    """The column with the class of each image; empty without one. Class numbers need names, or the flag."""
    names, requested = list(dict.fromkeys(chain.from_iterable(records))), config.label_column
    if requested != "auto":
        if requested not in names:
            raise ValueError(f"{table} has no column {requested!r}; it has {', '.join(map(repr, names))}")
        return requested
    if config.caption_column in classes:  # one of several columns with classes
        return config.caption_column
    lower = {name.strip().lower(): name for name in reversed(names)}
    candidates = [*classes, *(lower[name] for name in LABEL_COLUMNS if name in lower)]
    named = [name for name in candidates if config.labels or name in classes or _is_text(records, name)]
    return next((name for name in named if name != config.caption_column), "")


def _is_text(records: Sequence[Values], name: str) -> bool:
    """Whether most values of a column are text, and not numbers as text."""
    texts = [text for values in records for text in caption_texts(values.get(name))]
    return 2 * sum(not re.fullmatch(r"[\s\d.,-]*", text) for text in texts) > len(records)


def class_name(value: Any, names: Sequence[str]) -> str:
    """The label of a value; a class number by its name, where names are known."""
    text = " ".join(str(value if value is not None else "").split())[:MAX_LABEL_LENGTH]
    if names and re.fullmatch(r"-?\d{1,9}(\.0)?", text):  # -1 is no class
        return names[int(float(text))] if 0 <= float(text) < len(names) else ""
    return label_words(text) or text


def group_value(value: Any) -> str:
    return "" if value is None else str(value).strip()[:MAX_LABEL_LENGTH]


class GroupColumns:
    """Columns that name one thing with several images: the values of --group-by, or what it could be."""

    def __init__(self, table: str, names: Sequence[str], known: set[str], image_column: str, config: DataConfig):
        self.image_column, self.column = image_column, "" if config.group_by in GROUP_KINDS else config.group_by
        if self.column and self.column not in names and len(parse_spec(config.data)) == 1:
            columns = ", ".join(repr(name[:40]) for name in names)
            given = f"{', '.join(GROUP_KINDS)} or a column of {table} ({columns}), not {self.column!r}"
            raise ValueError(f"--group-by must be {given}")
        candidates = [name for name in names if name not in known and GROUP_COLUMN.fullmatch(name.strip())]
        self.candidates = candidates if config.group_by == "none" else []
        self.images, self.values = set[int](), {name: set[int]() for name in self.candidates}

    def add(self, values: Values) -> str:
        """Count the values of the candidates; the value of --group-by."""
        if self.candidates and len(self.images) < MAX_GROUPED:
            self.images.add(hash(str(values.get(self.image_column))))
            for name in self.candidates:
                self.values[name].add(hash(str(values.get(name))))
        return group_value(values.get(self.column)) if self.column else ""

    def notes(self) -> Iterator[Note]:
        """A suggestion for columns whose values have two or more images on average, but are not a few classes."""
        for name, values in self.values.items():
            if 2 * len(values) <= len(self.images) and len(values) >= MIN_GROUPS:
                ratio = f"{len(values):,} values for {len(self.images):,} images"
                yield Note(f"column {name!r} has {ratio}; --group-by {name} keeps images of one value in one split")
