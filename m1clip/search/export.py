"""The vectors of a library in files that vector databases and NumPy read."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.files import atomic_folder, atomic_write
from m1clip.search.index import Floats, ImageFile, Index

QDRANT_BATCH = 1_000  # points of one request
ROWS = 10_000  # of Parquet, at a time


def export_index(index: Index, folder: Path, kind: str, out: Path) -> int:
    """Write the images below a folder, a row for each file, and return their number."""
    with index.snapshot():
        files, vectors_RE = index.image_files(folder), index.open_vectors()
    if not files:
        raise ValueError(f"{folder} has no image in the index of this model; m1clip search makes it")
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[kind](files, vectors_RE, folder, out)
    return len(files)


def describe(file: ImageFile, folder: Path) -> dict[str, Any]:
    """What is known of a file; bytes of its name that are no text are replaced."""
    name = os.fsencode(file.path.relative_to(folder)).decode("utf-8", "replace")
    return {"path": name, "width": file.width, "height": file.height, "date": file.date.isoformat()}


def write_npy(files: list[ImageFile], vectors_RE: Floats, folder: Path, out: Path) -> None:
    """A folder with vectors.npy and, in the same order, a line of JSON for each file."""
    with atomic_folder(out) as partial:
        np.save(partial / "vectors.npy", vectors_RE[[file.row for file in files]])
        with open(partial / "images.jsonl", "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(describe(file, folder)) + "\n" for file in files)


def write_parquet(files: list[ImageFile], vectors_RE: Floats, folder: Path, out: Path) -> None:
    """One file with the columns id, path, width, height, date and vector: a list of fixed size, as LanceDB, DuckDB,
    pyarrow and datasets read it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    width = vectors_RE.shape[1]
    columns = [("id", pa.int64()), ("path", pa.string()), ("width", pa.int32()), ("height", pa.int32())]
    schema = pa.schema([*columns, ("date", pa.string()), ("vector", pa.list_(pa.float32(), width))])
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, schema, compression="zstd") as writer:
        for start in range(0, len(files), ROWS):
            part = files[start : start + ROWS]
            vectors = pa.array(vectors_RE[[file.row for file in part]].reshape(-1))
            table: dict[str, list[Any]] = {name: [] for name in ("path", "width", "height", "date")}
            for file in part:
                for name, value in describe(file, folder).items():
                    table[name].append(value)
            arrays = {"id": range(start, start + len(part)), **table}
            arrays["vector"] = pa.FixedSizeListArray.from_arrays(vectors, width)
            writer.write_table(pa.table(arrays, schema))
    atomic_write(out, buffer.getvalue().to_pybytes())


def write_qdrant(files: list[ImageFile], vectors_RE: Floats, folder: Path, out: Path) -> None:
    """A folder with the bodies of Qdrant's requests: PUT /collections/NAME, then PUT /collections/NAME/points."""
    settings = {"vectors": {"size": vectors_RE.shape[1], "distance": "Cosine"}}
    with atomic_folder(out) as partial:
        (partial / "collection.json").write_text(json.dumps(settings))
        for number, points in enumerate(qdrant_batches(files, vectors_RE, folder)):
            (partial / f"points-{number:05d}.json").write_text(json.dumps({"batch": points}))


def qdrant_batches(files: list[ImageFile], vectors_RE: Floats, folder: Path) -> Iterator[dict[str, Any]]:
    for start in range(0, len(files), QDRANT_BATCH):
        part = files[start : start + QDRANT_BATCH]
        vectors = [[float(f"{x:.7g}") for x in vectors_RE[file.row]] for file in part]
        payloads = [describe(file, folder) for file in part]
        yield {"ids": list(range(start, start + len(part))), "vectors": vectors, "payloads": payloads}


WRITERS: dict[str, Callable[[list[ImageFile], Floats, Path, Path], None]] = {
    "parquet": write_parquet,
    "npy": write_npy,
    "qdrant": write_qdrant,
}
