"""Images inside larger files: WebDataset shards, and tables read through the `datasets` library. No torch.

An image is a byte range of such a file, which is never unpacked: `datasets` writes uncompressed Arrow files.
"""

import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from hashlib import sha256
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from m1clip import hub
from m1clip.config import DataConfig
from m1clip.data.caption_text import label_caption, label_words
from m1clip.data.columns import LABEL_COLUMNS, caption_texts, class_name, group_value, parse_records
from m1clip.data.index import MAX_CAPTION_FILE_BYTES, BadRow, Listed, Listing, Row
from m1clip.data.tables import holds_images
from m1clip.decode import IMAGE_SUFFIX
from m1clip.files import cache_folder, replace_files
from m1clip.prompts import check_labels, parse_labels, read_label_file

Dataset = Any  # of the `datasets` library, which is imported when it is needed
PICKLES = re.compile(r"\.(pyd|pkl|pickle|pt|pth|joblib|npy|npz)$", re.I)  # what WebDataset readers unpickle
CAPTION_MEMBERS = ("txt", "text", "caption", "cap")
Members = dict[str, tarfile.TarInfo]
STREAM_CHUNK = 1000  # rows per file of a stream that is kept
SAVED = ("dataset_info.json", "dataset_dict.json")  # in folders of save_to_disk


# WebDataset shards: tar files in which the members of a pair share a name.
def list_shards(paths: list[Path], config: DataConfig) -> Listing:
    if missing := [str(path) for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards are missing, such as {missing[0]}")
    root = os.path.dirname(os.path.commonpath(paths)) or "."
    class_names = _class_names(paths[0].parent, config)
    return Listing(root, (row for path in paths for row in _shard_rows(path, config, class_names)))


def _class_names(folder: Path, config: DataConfig) -> list[str]:
    """Names of the numbers in .cls members: classnames.txt beside the shards or one folder above, else --labels."""
    files = (folder / "classnames.txt" for folder in (folder, folder.absolute().parent))
    found = next((check_labels(read_label_file(file)) for file in files if file.is_file()), [])
    return found or (parse_labels(config.labels) if config.labels else [])


def _shard_rows(path: Path, config: DataConfig, class_names: list[str]) -> Iterator[Row | BadRow]:
    """The pairs of one tar; a truncated one gives its complete pairs."""
    try:
        with tarfile.open(path, "r:") as tar:  # uncompressed: images are read by their offset
            key, members, last_offset = "", Members(), 0
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it would keep every header in memory
                if tar.offset <= last_offset:  # a negative size sent tarfile back for ever (CVE-2025-8194)
                    raise ValueError(f"{path} is refused: the size of its member {member.name!r} is invalid")
                last_offset = tar.offset
                if member.isdir() or os.path.basename(member.name).startswith("."):  # macOS adds ._name
                    continue
                _refuse_unsafe(path, member)
                folder, slash, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if folder + slash + stem != key or suffix.lower() in members:
                    if members:
                        yield _pair(path, tar, key, members, config, class_names)
                    key, members = folder + slash + stem, {}
                members[suffix.lower()] = member
            if members:
                yield _pair(path, tar, key, members, config, class_names)
            with open(path, "rb") as file:
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    yield BadRow("truncated", str(path), "the shard has no end mark: pairs may be missing")
    except (tarfile.TarError, EOFError, OSError) as error:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        reason = "gunzip it first" if is_gzip else error if os.path.getsize(path) else "it is empty"
        yield BadRow("truncated", str(path), f"the shard is truncated or not an uncompressed tar ({reason})")


def _refuse_unsafe(path: Path, member: tarfile.TarInfo) -> None:
    problems = {
        "points outside the archive": member.name.startswith("/") or ".." in member.name.split("/"),
        f"is a link to {member.linkname!r}": member.issym() or member.islnk(),
        "has an invalid size": member.size < 0,
        "is not a regular file": not member.isfile() or member.issparse(),
        "may be a pickle, which can run code": PICKLES.search(member.name),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{path} is refused: its member {member.name!r} {problem}")


def _pair(
    path: Path, tar: tarfile.TarFile, key: str, members: Members, config: DataConfig, class_names: list[str]
) -> Row | BadRow:
    location, values = f"{path}: {key}", None
    image = next((member for suffix, member in members.items() if IMAGE_SUFFIX.search(f".{suffix}")), None)
    if image is None:
        return BadRow("missing file", location, f"no image among its members ({', '.join(sorted(members))})")
    if image.offset_data + image.size > os.path.getsize(path):
        return BadRow("truncated", location, "the shard ends inside the image")
    text = next((members[suffix] for suffix in CAPTION_MEMBERS if suffix in members), None)
    lines = _read(tar, text).decode("utf-8-sig", "surrogateescape").splitlines() if text else []
    try:
        values = json.loads(_read(tar, members["json"])) if "json" in members else None
    except (ValueError, RecursionError) as error:
        if not lines:
            return BadRow("broken line", f"{location}.json", f"not JSON ({error})")
    values = values if isinstance(values, dict) else {}
    caption = caption_texts(values.get("caption") or values.get("text"))
    captions = caption_texts(values.get("captions")) or lines or caption
    label = _shard_label(tar, members, values, config, class_names)
    if label.isdecimal() and not class_names and config.label_column == "auto":
        if not captions:
            return BadRow("no caption", location, f"class {label} has no name: --labels, or classnames.txt beside it")
        label = ""
    if label and not captions:
        captions = [label_caption(label, config.template)]
    group = group_value(values.get(config.group_by))
    split = split_from_name(path.name) or _split_from_folder(path)
    place = (split, str(path), image.offset_data, image.size)
    return Row(image.name, captions or [""], 0, "", *place, label, group)


def _shard_label(
    tar: tarfile.TarFile, members: Members, values: Mapping[str, Any], config: DataConfig, class_names: list[str]
) -> str:
    """The class of a .cls member, or of a key of the .json member."""
    if config.label_column == "auto" and "cls" in members:
        return class_name(_read(tar, members["cls"]).decode("utf-8", "replace"), class_names)
    keys = LABEL_COLUMNS if config.label_column == "auto" else (config.label_column,)
    found = next((values[key] for key in keys if values.get(key) is not None), "")
    is_name = isinstance(found, str) or class_names or config.label_column != "auto"
    return class_name(found, class_names) if is_name else ""


def _split_from_folder(path: Path) -> str:
    """CLIP_benchmark has the shards of a split in a folder of that name, beside classnames.txt."""
    name = path.absolute().parent.name.lower()
    return name if name in ("train", "val", "valid", "validation", "test") else ""


def split_from_name(name: str) -> str:
    """The split that the name of a shard or Parquet file starts with, if any."""
    prefix = re.match(r"(train|val|valid|validation|dev|held-out|test)[-_.]", name, re.I)
    return prefix[1] if prefix else ""


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # links were refused
    return file.read(MAX_CAPTION_FILE_BYTES)


# `hf:NAME`, and Parquet files with images.
def list_dataset(name: str, config: DataConfig) -> Listing:
    """hf:NAME, optionally with ?config=…&split=…&stream=N (download only the first N rows)."""
    name, _, query = name.partition("?")
    options = dict(parse_qsl(query))
    if not name or options.keys() - {"config", "split", "stream"}:
        raise ValueError(f"hf:{name}?{query}: the options are config=, split= and stream=, joined by &")
    if "stream" in options:
        return _listing(_load_stream(name, options), name, config)
    return _listing(_load(name, options.get("config"), options.get("split")), name, config)


def list_parquet(paths: list[Path], config: DataConfig) -> Listing:
    """Files whose names start with train-, val- or test- form these splits."""
    splits: dict[str, list[str]] = {}
    for path in paths:
        splits.setdefault(split_from_name(path.name).lower().replace("-", "_") or "train", []).append(str(path))
    return _listing(_load_parquet(splits), str(paths[0].parent), config, splits)


def _load_parquet(files: Any) -> dict[str, Dataset]:
    return _load("parquet", None, None, data_files=files, cache_dir=str(cache_folder() / "datasets"))


def _load(name: str, config: str | None, split: str | None, **options: Any) -> dict[str, Dataset]:
    with _explain_errors(name) as datasets:
        if any((Path(name) / file).is_file() for file in SAVED):
            loaded = datasets.load_from_disk(name)
            if split and isinstance(loaded, dict):
                if split not in loaded:
                    raise ValueError(f"there is no split {split!r}; there are {', '.join(loaded)}")
                loaded = loaded[split]
        else:
            is_local = name == "parquet" or Path(name).expanduser().exists()
            with nullcontext() if is_local else hub.downloading(f"the dataset {name}"):
                loaded = datasets.load_dataset(name, config, split=split, **options)
        return loaded if isinstance(loaded, dict) else {split or "": loaded}


def _load_stream(name: str, options: dict[str, str]) -> dict[str, Dataset]:
    """The first N rows of a stream, kept as they arrive, so that an interrupted download continues."""
    if not options["stream"].isdecimal() or int(options["stream"]) < 1:
        raise ValueError(f"stream={options['stream']} must be the number of rows to download")
    folder = cache_folder() / f"streamed-{sha256(f'{name}/{sorted(options.items())}'.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    done = len(list(folder.glob("*.parquet"))) * STREAM_CHUNK
    with _explain_errors(name) as datasets:
        split = options.get("split", "train")
        with hub.downloading(f"the dataset {name}"):
            stream = datasets.load_dataset(name, options.get("config"), split=split, streaming=True)
        stream = stream.decode(False) if stream.features else stream
        rest = iter(stream.skip(done).take(max(0, int(options["stream"]) - done)))
        while rows := list(islice(rest, STREAM_CHUNK)):
            with replace_files(folder) as partial:
                part = partial / f"{done:09d}.parquet"
                datasets.Dataset.from_list(rows, features=stream.features).to_parquet(str(part))
            done += STREAM_CHUNK
    return _load_parquet([str(part) for part in sorted(folder.glob("*.parquet"))])


@contextmanager
def _explain_errors(name: str) -> Iterator[Any]:
    """Import `datasets`, quietly; its errors and those of the network become one sentence."""
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    try:
        yield datasets
    except (OSError, ValueError, RuntimeError, ImportError, DatasetsError, pa.ArrowException) as error:
        detail = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{name} cannot be loaded by `datasets`: {detail[0]}") from None


def _listing(
    splits: dict[str, Dataset], name: str, config: DataConfig, files: Mapping[str, list[str]] | None = None
) -> Listing:
    """`files` are the Parquet files of each split, by which rows are located; else the dataset's name is."""
    named = splits.items() if len(splits) > 1 else [("", data) for data in splits.values()]
    by_name = (zip(repeat(f"{name} {split}".strip()), count(1)) for split, _ in named)
    locations = map(_parquet_locations, (files[split] for split in splits)) if files else by_name
    parts = zip(named, locations, strict=True)
    return Listing(".", (row for (split, data), where in parts for row in _rows(data, name, split, where, config)))


def _parquet_locations(files: list[str]) -> Iterator[tuple[str, int]]:
    return ((file, row + 1) for file in files for row in range(pq.read_metadata(file).num_rows))


def _rows(
    data: Dataset, name: str, split: str, locations: Iterator[tuple[str, int]], config: DataConfig
) -> Iterator[Listed]:
    import datasets

    data, features = _materialize(data), dict(data.features)
    schema, requested = data.data.schema, config.image_column
    images = [column for column, feature in features.items() if isinstance(feature, datasets.Image)]
    images += [c for c in data.column_names if c not in images and holds_images(schema.field(c).type)]
    image = next((column for column in images if requested in ("auto", column)), None)
    if image is None:
        raise ValueError(f"{name} has no column of images (--image-column {requested}); it has {', '.join(features)}")
    kinds = {c: feature for c, feature in features.items() if isinstance(feature, datasets.ClassLabel)}
    labels = {column: [label_words(name) or name for name in kind.names] for column, kind in kinds.items()}
    others = data.data.table.select([column for column in data.column_names if column not in images])
    records = ({image: "", **record} for batch in others.to_batches(1000) for record in batch.to_pylist())
    parsed = parse_records(name, enumerate(records, 1), replace(config, image_column=image), labels)
    ranges = _byte_ranges(data, image)
    for row in parsed:
        if not isinstance(row, Row):
            yield row
            continue
        file, offset, length, path = next(ranges)
        row = row._replace(image=path or (f"row {row.line}" if length else ""), split=split or row.split)
        table, line = next(locations)
        row = row._replace(table=table, line=line)
        yield row._replace(container=file, offset=offset, length=length) if length else row


def _materialize(data: Dataset) -> Dataset:
    """The same rows in Arrow files that hold no others: a slice of a split is written to the cache."""
    import datasets

    files = [pa.memory_map(file["filename"]) for file in data.cache_files]
    rows = sum(batch.num_rows for file in files for batch in pa.ipc.open_stream(file))
    if data.cache_files and rows == len(data) and data._indices is None:
        return data
    folder = cache_folder() / "datasets" / f"rows-{data._fingerprint}"
    if not folder.exists():
        data.save_to_disk(folder)
    return datasets.Dataset.load_from_disk(str(folder))


def _byte_ranges(data: Dataset, column: str) -> Iterator[tuple[str, int, int, str | None]]:
    """Where the bytes of each image are in the Arrow files: file, offset, length; and the image's own path."""
    for file in (cached["filename"] for cached in data.cache_files):
        with pa.memory_map(file) as source:
            file_address = source.read_buffer().address
            source.seek(0)
            for chunk in pa.ipc.open_stream(source).read_all()[column].chunks:
                paths: list[str | None] = [None] * len(chunk)
                if pa.types.is_struct(chunk.type):
                    fields = dict(zip([field.name for field in chunk.type], chunk.flatten(), strict=True))
                    chunk, paths = fields["bytes"], fields["path"].to_pylist() if "path" in fields else paths
                _, offsets, values = chunk.buffers()
                dtype = np.int64 if pa.types.is_large_binary(chunk.type) else np.int32
                stop = chunk.offset + len(chunk) + 1
                ends = np.frombuffer(offsets, dtype)[chunk.offset : stop].astype(np.int64)
                start = values.address - file_address if values else 0
                offsets, lengths = (start + ends[:-1]).tolist(), np.diff(ends).tolist()
                yield from zip(repeat(file), offsets, lengths, paths, strict=False)
