"""Small image files for tests of datasets: drawn scenes in the formats of other tools."""

import io
import json
import tarfile
from pathlib import Path
from random import Random
from typing import Any

from m1clip.config import DataConfig
from m1clip.data.index import IndexedPairs
from m1clip.data.splits import Source, open_sources
from m1clip.data.synthetic import SyntheticScenes

SCENES = SyntheticScenes(200)


def jpeg(number: int, size: int = 48) -> bytes:
    """The scene of that number; the same bytes every time."""
    file = io.BytesIO()
    SCENES.image(number).resize((size, size)).save(file, "JPEG", quality=90)
    return file.getvalue()


def mutated(data: bytes, rng: Random) -> bytes:
    """A file with some bytes changed, cut, repeated or inserted."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 3, 20])):
        start = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[start] = rng.randrange(256)
            case 1:
                del changed[start : start + rng.choice([1, 10, 1000])]
            case 2:
                changed[start:start] = rng.randbytes(rng.choice([1, 4, 50]))
            case _:
                changed[start:start] = changed[start : start + 100]
        changed = changed or bytearray(b"x")
    return bytes(changed)


def write_photos(folder: Path, count: int, start: int = 0) -> list[str]:
    """Write JPEGs and return their names: 0000.jpg, 0001.jpg, …"""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:04d}.jpg" for i in range(start, start + count)]
    for i, name in enumerate(names, start):
        (folder / name).write_bytes(jpeg(i))
    return names


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def open_source(spec: object, **settings: Any) -> Source:
    """The only source of a spec; any number of bad rows is allowed."""
    (source,) = open_sources(DataConfig(data=str(spec), **{"max_bad_rows": 1.0, **settings}))
    return source


def captions_by_image(source: Source) -> dict[str, list[str]]:
    """Of all splits."""
    pairs = source.all
    assert isinstance(pairs, IndexedPairs)
    return {pairs.value("image", i): list(pairs.captions(i)) for i in range(len(pairs))}


def image_names(pairs: IndexedPairs) -> set[str]:
    return {pairs.value("image", i) for i in range(len(pairs))}


def bad_rows(source: Source) -> set[tuple[str, str]]:
    """Kind and location, without folders."""
    return {(row.kind, row.location.rpartition("/")[2]) for row in source.bad_rows.examples}


def coco_json(names: list[str], captions: int = 5, first: int = 1) -> str:
    """The format of the official COCO annotations."""
    images = [
        {"id": first + i, "file_name": name, "height": 48, "width": 48, "license": 3} for i, name in enumerate(names)
    ]
    annotations = [
        {"id": 10 * image["id"] + k, "image_id": image["id"], "caption": f"caption {k} of {image['file_name']}"}
        for k in range(captions)
        for image in images
    ]
    return json.dumps({"info": {"year": 2017}, "licenses": [], "images": images, "annotations": annotations})


def karpathy_json(splits: dict[str, str], dataset: str, filepath: str = "") -> str:
    """The format of Karpathy's splits."""
    images = [
        {
            **({"filepath": filepath, "cocoid": i} if filepath else {}),
            "filename": name,
            "imgid": i,
            "split": split,
            "sentids": [5 * i + k for k in range(5)],
            "sentences": [
                {"tokens": ["caption", str(k)], "raw": f"Caption {k} of {name}.", "imgid": i, "sentid": 5 * i + k}
                for k in range(5)
            ],
        }
        for i, (name, split) in enumerate(splits.items())
    ]
    return json.dumps({"images": images, "dataset": dataset})
