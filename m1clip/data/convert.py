"""Any dataset as WebDataset shards or Parquet files. No torch.

Every file is complete or absent. A manifest has their checksums, so that an interrupted conversion continues.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import file_digest
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from m1clip.data.index import BadRow, BadRows, IndexedPairs, PairDataset, ProgressFactory
from m1clip.data.splits import Source
from m1clip.decode import BadImage, decode, read_header
from m1clip.files import PARTIAL, append_lines, atomic_write, fsync, lock_folder, naming, read_jsonl, remove_partial
from m1clip.workers import row_chunks

Format = Literal["shards", "parquet"]
Sample = tuple[str, bytes, str, list[str], str, str]  # key, image file, its suffix, captions, label, location
SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "HEIF": "heic", "JPEG2000": "jp2"}


def convert_dataset(
    sources: list[Source], out: Path, to: Format, per_file: int, max_bad_rows: float, progress: ProgressFactory
) -> dict[str, Any]:
    splits = [(src.spec, split) for src in sources for split in (src.train, src.val, src.test) if split]
    identities = [[spec, split.fingerprint, split.identity] for spec, split in splits]
    bad_rows = sum((source.bad_rows for source in sources), BadRows())
    files = list(_plan_files(sources, per_file))
    suffix, write = ("tar", write_shard) if to == "shards" else ("parquet", write_parquet)
    count, settings = sum(len(rows) for *_, rows in files), {"from": identities, "to": to, "per_file": per_file}
    with open_manifest(out, settings) as manifest, progress("converting", count) as advance:
        for name, pairs, rows in files:
            path = out / f"{name}.{suffix}"
            if not manifest.has(path):
                samples = list(_samples(pairs, rows, name, bad_rows))
                bad_rows.require_at_most(max_bad_rows)
                manifest.write(path, samples, write)
            advance(len(rows))
    totals = {key: sum(entry[key] for entry in manifest.entries.values()) for key in ("pairs", "bytes")}
    return {"out": str(out), "files": len(manifest.entries), **totals, "bad_rows": bad_rows.record()}


def _plan_files(sources: list[Source], per_file: int) -> Iterator[tuple[str, PairDataset, range]]:
    """Name, dataset and rows of each file. A test split that is also used for validation is written as test."""
    for split in ("train", "val", "test"):
        datasets = [getattr(source, split) for source in sources if split != "val" or source.val is not source.test]
        chunks = ((pairs, rows) for pairs in filter(None, datasets) for rows in row_chunks(len(pairs), per_file))
        for number, (pairs, rows) in enumerate(chunks):
            yield f"{split}-{number:06d}", pairs, rows


def _samples(pairs: PairDataset, rows: range, name: str, bad_rows: BadRows) -> Iterator[Sample]:
    """Pairs whose image can be decoded; the image bytes are copied."""

    def sample(row: int) -> Sample | BadRow:
        key, location = f"{name}-{row - rows.start:06d}", pairs.location(row)
        try:
            return key, *_image_file(pairs, row), list(pairs.captions(row)), pairs.label(row), location
        except BadImage as error:
            return BadRow(error.kind, location, str(error))

    with ThreadPoolExecutor() as pool:  # decoding releases the GIL
        for result in pool.map(sample, rows):
            if isinstance(result, BadRow):
                bad_rows.add(result, image=True)
            else:
                yield result


def _image_file(pairs: PairDataset, row: int) -> tuple[bytes, str]:
    if isinstance(pairs, IndexedPairs):
        data = pairs.read(row)
        decode(data)
        image_format = read_header(data).format or ""
        return data, SUFFIXES.get(image_format, image_format.lower())
    file = BytesIO()
    pairs.image(row).save(file, "PNG")
    return file.getvalue(), "png"


def write_shard(samples: list[Sample], path: Path) -> None:
    import webdataset

    with open(path, "wb") as file, webdataset.TarWriter(file, encoder=False, mtime=0) as tar:
        for key, data, suffix, captions, label, location in samples:
            values = {"caption": captions[0], "captions": captions, "source": location}
            values |= {"label": label} if label else {}
            text = {"txt": captions[0].encode(), "json": json.dumps(values, ensure_ascii=False).encode()}
            tar.write({"__key__": key, suffix: data, **text})


def write_parquet(samples: list[Sample], path: Path) -> None:
    import datasets

    text = datasets.Value("string")
    columns = {"image": datasets.Image(), "captions": datasets.List(text), "label": text, "source": text}
    features, rows = datasets.Features(columns), list[dict[str, Any]]()
    for key, data, suffix, captions, label, location in samples:
        image = {"bytes": data, "path": f"{key}.{suffix}"}
        rows.append({"image": image, "captions": captions, "label": label or None, "source": location})
    compression = {"captions.list.element": "zstd"}  # images are compressed already
    pq.write_table(pa.Table.from_pylist(rows, features.arrow_schema), path, compression=compression)


class Manifest:
    """manifest.jsonl: the data and settings of the conversion, then one line per complete file."""

    def __init__(self, out: Path, settings: dict[str, Any]):
        self.path = out / "manifest.jsonl"
        if not self.path.exists():
            if any(path for path in out.iterdir() if not PARTIAL.fullmatch(path.name)):
                raise ValueError(f"{out} is neither empty nor a conversion by m1clip; choose a new folder")
            atomic_write(self.path, json.dumps(settings) + "\n")
        header, *entries = lines = [*read_jsonl(self.path)] or [{}]
        if header != settings:
            raise ValueError(f"{out} is a conversion of other data or settings; choose another folder")
        remove_partial(out)
        intact = "".join(json.dumps(line) + "\n" for line in lines)
        if self.path.read_text(errors="replace") != intact:
            atomic_write(self.path, intact)  # without a line that a crash has cut
        files = (entry for entry in entries if isinstance(entry.get("file"), str))  # a bad line is written again
        self.entries: dict[str, dict[str, Any]] = {entry["file"]: entry for entry in files}

    def has(self, path: Path) -> bool:
        """Whether the file exists with the bytes that were written."""
        entry = self.entries.get(path.name)
        return bool(entry and path.is_file() and _sha256(path) == entry.get("sha256"))

    def write(self, path: Path, samples: list[Sample], write: Callable[[list[Sample], Path], None]) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            write(samples, temporary)
            fsync(temporary)  # before the manifest mentions it
            size, checksum = temporary.stat().st_size, _sha256(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        entry = {"file": path.name, "pairs": len(samples), "bytes": size, "sha256": checksum}
        append_lines(self.path, json.dumps(entry).encode() + b"\n")
        self.entries[path.name] = entry


@contextmanager
def open_manifest(out: Path, settings: dict[str, Any]) -> Iterator[Manifest]:
    """The manifest of a folder that nobody else writes meanwhile."""
    out.mkdir(parents=True, exist_ok=True)
    with lock_folder(out) as acquired, naming(out):
        if not acquired:
            raise RuntimeError(f"another process is writing {out}")
        yield Manifest(out, settings)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()
