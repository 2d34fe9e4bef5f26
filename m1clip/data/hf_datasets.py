"""Images that lie inside tables: `hf:NAME` and Parquet with bytes, by way of the `datasets` library.

It keeps each as an uncompressed Arrow file; an image is then a place in that file, as in a shard.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np

from m1clip.config import DataConfig
from m1clip.data.folders import prompted
from m1clip.data.rows import BadRow, Listing, Row
from m1clip.data.tables import Record, guess_captions, holds_bytes, several
from m1clip.data.webdataset import SIDE

if TYPE_CHECKING:
    from datasets import Dataset

STREAMED = 1000  # rows of a stream that are kept at a time


def hub(name: str, config: DataConfig, keep: Path) -> Listing:
    """hf:NAME, with ?config=…, ?split=…, ?stream=N (the first N, fetched as they are needed), joined by &."""
    name, _, words = name.partition("?")
    options = dict(parse_qsl(words))
    unknown = options.keys() - {"config", "split", "stream"}
    if unknown or not name:
        raise ValueError(
            f"hf:{name}?{words}: after the name there may be config=, split= and stream=, joined by &"
        )
    if "stream" in options:
        return _listing(_streamed(name, options, keep), name, config, keep)
    found = _load(name, options.get("config"), options.get("split"))
    return _listing(found, name, config, keep)


def parquet(paths: list[Path], config: DataConfig, keep: Path) -> Listing:
    """Files that are called train-…, val-… or test-… are these sides."""
    sides: dict[str, list[str]] = {}
    for path in paths:
        side = SIDE.match(path.name)
        sides.setdefault(side.group(1).lower().replace("-", "_") if side else "train", []).append(str(path))
    found = _load("parquet", None, None, data_files=sides, cache_dir=str(keep / "datasets"))
    return _listing(found, str(paths[0].parent), config, keep)


def _load(name: str, part: str | None, split: str | None, **more: Any) -> "dict[str, Dataset]":
    import datasets

    _quiet()
    with _explained(name):
        if any(
            (Path(name) / info).is_file() for info in ("dataset_info.json", "dataset_dict.json", "state.json")
        ):
            found = datasets.load_from_disk(name)
            if split and isinstance(found, dict):
                if split not in found:
                    raise ValueError(f"there is no split {split!r}; there are {', '.join(found)}")
                found = found[split]
        else:
            found = datasets.load_dataset(name, part, split=split, **more)
        return found if isinstance(found, dict) else {split or "": found}


def _streamed(name: str, options: dict[str, str], keep: Path) -> "dict[str, Dataset]":
    """The first N rows of a stream, kept as they come: what was broken off goes on where it was."""
    import datasets

    if not options["stream"].isdecimal() or int(options["stream"]) < 1:
        raise ValueError(f"stream={options['stream']} should be the number of rows to take")
    number = int(options["stream"])
    folder = keep / f"streamed-{sha256(f'{name}/{sorted(options.items())}'.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    done = len(list(folder.glob("*.parquet"))) * STREAMED
    _quiet()
    with _explained(name):
        stream = datasets.load_dataset(
            name, options.get("config"), split=options.get("split", "train"), streaming=True
        )
        for column, feature in (stream.features or {}).items():
            if isinstance(feature, datasets.Image):
                stream = stream.cast_column(column, datasets.Image(decode=False))
        rest = iter(stream.skip(done).take(max(0, number - done)))
        while rows := list(islice(rest, STREAMED)):
            aside = folder / f"part.{os.getpid()}"
            datasets.Dataset.from_list(rows, features=stream.features).to_parquet(str(aside))
            os.replace(aside, folder / f"{done:09d}.parquet")
            done += STREAMED
    parts = [str(part) for part in sorted(folder.glob("*.parquet"))]
    return _load("parquet", None, None, data_files=parts, cache_dir=str(keep / "datasets"))


def _quiet() -> None:
    import datasets

    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it would tell of every try


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """What the library and the network may raise, as a sentence of ours."""
    import pyarrow as pa
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, RuntimeError, ImportError, DatasetsError, pa.ArrowException) as error:
        detail = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{name} cannot be loaded by `datasets`: {detail[0]}") from None


def _aligned(data: "Dataset", keep: Path) -> "Dataset":
    """The same rows in files that hold these and no others: a slice of a split is written out."""
    import datasets
    import pyarrow as pa

    rows = 0
    for file in data.cache_files:
        with pa.memory_map(file["filename"]) as source:
            rows += sum(batch.num_rows for batch in pa.ipc.open_stream(source))
    if data.cache_files and rows == len(data) and data._indices is None:
        return data
    folder = keep / "datasets" / f"rows-{data._fingerprint}"
    if not folder.exists():
        data.save_to_disk(folder)
    return datasets.Dataset.load_from_disk(str(folder))


def _listing(splits: "dict[str, Dataset]", name: str, config: DataConfig, keep: Path) -> Listing:
    def rows() -> Iterator[Row | BadRow]:
        for split, data in splits.items():
            yield from _rows(data, name, "" if len(splits) == 1 else split, config, keep)

    return Listing(".", rows())


def _rows(data: "Dataset", name: str, split: str, config: DataConfig, keep: Path) -> Iterator[Row | BadRow]:
    import datasets

    data, kinds = _aligned(data, keep), dict(data.features)
    images = [one for one, kind in kinds.items() if isinstance(kind, datasets.Image)]
    images += [
        one
        for one in data.column_names
        if one not in images and holds_bytes(data.data.schema.field(one).type)
    ]
    image = config.image_column if config.image_column in images else next(iter(images), None)
    if image is None or config.image_column not in ("auto", image):
        raise ValueError(f"{name} has no column of images{_called(config)}; it has {', '.join(kinds)}")
    labels = {one: kind.names for one, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)}
    light = [one for one in data.column_names if one not in images]
    places, caption = _places(data, image), None
    number = 0
    for batch in data.data.table.select(light).to_batches(1000):
        records = [Record(0, _worded(values, labels, config.template)) for values in batch.to_pylist()]
        caption = caption or guess_captions(Path(name), records, config)
        for record in records:
            number += 1
            texts = [text for column in caption for text in several(record.values.get(column))]
            side = split or str(record.values.get("split") or "")
            yield _row(next(places), Row("", texts, number, f"{name} {split}".strip(), side))


def _called(config: DataConfig) -> str:
    return "" if config.image_column == "auto" else f" called {config.image_column!r}"


def _worded(values: dict[str, Any], labels: dict[str, list[str]], prompt: str) -> dict[str, Any]:
    """Numbers of classes become prompts."""
    for column, names in labels.items():
        if isinstance(values.get(column), int) and 0 <= values[column] < len(names):
            values[column] = prompted(names[values[column]], prompt)
    return values


def _row(place: "Place", row: Row) -> Row | BadRow:
    file, offset, length, path = place
    if length:
        return row._replace(image=path or f"row {row.line}", file=file, offset=offset, length=length)
    if path:
        return row._replace(image=path)
    return BadRow("missing file", f"{row.table} row {row.line}", "the row has no image")


Place = tuple[str, int, int, str | None]


def _places(data: "Dataset", column: str) -> Iterator[Place]:
    """(file, offset, length, path) of each row's image, where its bytes lie in the Arrow files."""
    import pyarrow as pa

    for file in [one["filename"] for one in data.cache_files]:
        with pa.memory_map(file) as source:
            start = source.read_buffer().address
            source.seek(0)
            for chunk in pa.ipc.open_stream(source).read_all()[column].chunks:
                path: list[str | None] = [None] * len(chunk)
                if pa.types.is_struct(chunk.type):
                    names = [field.name for field in chunk.type]
                    parts = dict(zip(names, chunk.flatten(), strict=True))
                    chunk, path = parts["bytes"], parts["path"].to_pylist() if "path" in parts else path
                wide = np.int64 if pa.types.is_large_binary(chunk.type) else np.int32
                _, ends, values = chunk.buffers()
                at = np.frombuffer(ends, wide)[chunk.offset : chunk.offset + len(chunk) + 1].astype(np.int64)
                base = values.address - start if values else 0
                yield from zip(
                    repeat(file), (base + at[:-1]).tolist(), np.diff(at).tolist(), path, strict=False
                )
