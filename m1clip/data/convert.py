"""PairDataset to files that other tools read: WebDataset shards or Parquet. Each file is whole or absent.

A manifest has the checksum of every file, so that a conversion that was broken off goes on where it was.
"""

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import file_digest
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple

from m1clip.data.decode import BadImage, decode, header
from m1clip.data.index import Indexed
from m1clip.data.pairs import PairDataset, ProgressFactory
from m1clip.data.rows import BadRow, BadRows
from m1clip.data.sources import Source

Format = Literal["shards", "parquet"]
ENDINGS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "HEIF": "heic", "JPEG2000": "jp2"}


class Sample(NamedTuple):
    key: str
    data: bytes
    ending: str
    captions: list[str]
    row: str


def convert(
    sources: list[Source], out: Path, to: Format, each: int, max_bad: float, bars: ProgressFactory
) -> dict[str, Any]:
    """Write every pair that is on a side; what was done."""
    out.mkdir(parents=True, exist_ok=True)
    made_of = [
        [
            one.spec,
            *(f"{side.fingerprint}/{side.identity}" for side in (one.train, one.val, one.test) if side),
        ]
        for one in sources
    ]
    manifest = Manifest(out, made_of, to, each)
    faults = sum((source.faults for source in sources), BadRows())
    parts = list(_parts(sources, each))
    pairs = sum(len(rows) for *_, rows in parts)
    with bars("converting", pairs) as advance:
        for name, side, rows in parts:
            path = out / f"{name}.{'tar' if to == 'shards' else 'parquet'}"
            if not manifest.has(path):
                samples = list(_samples(side, rows, name, faults))
                faults.require_few(max_bad)
                manifest.add(path, len(samples), partial(WRITERS[to], samples))
            advance(len(rows))
    done = manifest.entries.values()
    return {
        "out": str(out),
        "files": len(done),
        "pairs": sum(entry["pairs"] for entry in done),
        "bytes": sum(entry["bytes"] for entry in done),
        "skipped": len(faults),
        "faults": dict(faults.counts),
        "named": [fault._asdict() for fault in faults.named],
    }


def _parts(sources: list[Source], each: int) -> Iterator[tuple[str, PairDataset, range]]:
    """Names of the files, and what goes into each."""
    for word, name in (("train", "train"), ("val", "val"), ("test", "test")):
        number = 0
        for source in sources:
            side: PairDataset | None = getattr(source, word)
            if word == "val" and side is source.test:  # written as test, once
                continue
            for start in range(0, len(side) if side is not None else 0, each):
                assert side is not None
                yield f"{name}-{number:06d}", side, range(start, min(start + each, len(side)))
                number += 1


def _samples(side: PairDataset, rows: range, name: str, faults: BadRows) -> Iterator[Sample]:
    """The pairs that can be decoded; the images' bytes as they are."""

    def sample(row: int) -> Sample | BadRow:
        try:
            data, ending = _bytes(side, row)
        except BadImage as error:
            return BadRow(error.kind, side.row(row), str(error))
        key = f"{name}-{row - rows.start:06d}"
        return Sample(key, data, ending, list(side.captions(row)), side.row(row))

    with ThreadPoolExecutor() as pool:  # decoding lets other threads run
        for made in pool.map(sample, rows):
            if isinstance(made, BadRow):
                faults.add(made, image=True)
            else:
                yield made


def _bytes(side: PairDataset, row: int) -> tuple[bytes, str]:
    if isinstance(side, Indexed):
        data = side.read(row)
        decode(data)
        kind = header(data).format or ""
        return data, ENDINGS.get(kind, kind.lower())
    drawn = BytesIO()
    side.image(row).save(drawn, "PNG")
    return drawn.getvalue(), "png"


def write_shard(samples: list[Sample], path: Path) -> None:
    import webdataset

    with open(path, "wb") as file, webdataset.TarWriter(file, encoder=False, mtime=0) as tar:
        for one in samples:
            about = {"caption": one.captions[0], "captions": one.captions, "source": one.row}
            tar.write(
                {
                    "__key__": one.key,
                    one.ending: one.data,
                    "txt": one.captions[0].encode(),
                    "json": json.dumps(about, ensure_ascii=False).encode(),
                }
            )


def write_parquet(samples: list[Sample], path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = datasets.Value("string")
    kinds = datasets.Features({"image": datasets.Image(), "captions": datasets.List(text), "source": text})
    rows = [
        {
            "image": {"bytes": one.data, "path": f"{one.key}.{one.ending}"},
            "captions": one.captions,
            "source": one.row,
        }
        for one in samples
    ]
    # The images are compressed already.
    pq.write_table(
        pa.Table.from_pylist(rows, kinds.arrow_schema), path, compression={"captions.list.element": "zstd"}
    )


WRITERS: dict[Format, Callable[[list[Sample], Path], None]] = {
    "shards": write_shard,
    "parquet": write_parquet,
}


class Manifest:
    """What is in the folder: a head that says what it is made from, then a line for each whole file."""

    def __init__(self, out: Path, sources: list[list[str]], to: Format, each: int):
        self.path = out / "manifest.jsonl"
        head = {"from": sources, "to": to, "each": each}
        self.entries: dict[str, dict[str, Any]] = {}
        if not self.path.exists():
            if any(out.iterdir()):
                raise ValueError(f"{out} is not empty and not a conversion of ours: name a new folder")
            self.path.write_text(json.dumps(head) + "\n")
            return
        lines = self.path.read_text(errors="replace").splitlines()
        if not lines or _parsed(lines[0]) != head:
            raise ValueError(
                f"{out} holds a conversion of other data or with other settings: name another folder"
            )
        for line in lines[1:]:
            entry = _parsed(line)
            if entry:
                self.entries[entry["file"]] = entry

    def has(self, path: Path) -> bool:
        """Whether the file is there with the bytes that were written."""
        entry = self.entries.get(path.name)
        return bool(entry and path.is_file() and checksum(path) == entry["sha256"])

    def add(self, path: Path, pairs: int, write: Callable[[Path], None]) -> None:
        aside = path.with_name(f".{path.name}.new")
        try:
            write(aside)
            entry = {
                "file": path.name,
                "pairs": pairs,
                "bytes": aside.stat().st_size,
                "sha256": checksum(aside),
            }
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        self.entries[path.name] = entry
        with open(self.path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _parsed(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()
