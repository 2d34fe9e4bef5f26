"""Small image files for tests about data: drawn scenes saved as others would have them."""

import io
import json
import tarfile
from pathlib import Path

from m1clip.config import DataConfig
from m1clip.data.index import Indexed
from m1clip.data.sources import Source, open_sources
from m1clip.data.synthetic.scenes import SyntheticScenes

SCENES = SyntheticScenes(200)


def jpeg(number: int, side: int = 48) -> bytes:
    """The scene of that number; the same bytes every time."""
    made = io.BytesIO()
    SCENES.image(number).resize((side, side)).save(made, "JPEG", quality=90)
    return made.getvalue()


def photos(folder: Path, number: int, start: int = 0) -> list[str]:
    """Names of JPEGs written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{i:04d}.jpg" for i in range(start, start + number)]
    for i, name in enumerate(names, start):
        (folder / name).write_bytes(jpeg(i))
    return names


def tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def opened(spec: object, **flags: object) -> Source:
    (source,) = open_sources(DataConfig(data=str(spec), **{"max_bad": 1.0, **flags}))  # type: ignore[arg-type]
    return source


def listed(source: Source) -> dict[str, list[str]]:
    """Captions by the image's name, of whatever side."""
    pairs = source.every
    assert isinstance(pairs, Indexed)
    return {pairs._value("name", i): list(pairs.captions(i)) for i in range(len(pairs))}


def names(pairs: Indexed) -> set[str]:
    return {pairs._value("name", i) for i in range(len(pairs))}


def found(source: Source) -> set[tuple[str, str]]:
    """BadRows: kind and where, without folders."""
    return {(fault.kind, fault.where.rpartition("/")[2]) for fault in source.faults.named}


def coco_json(names: list[str], captions: int = 5, first: int = 1) -> str:
    """The layout of the official annotations."""
    images = [
        {"id": first + i, "file_name": name, "height": 48, "width": 48, "license": 3} for i, name in enumerate(names)
    ]
    notes = [
        {"id": 10 * one["id"] + k, "image_id": one["id"], "caption": f"caption {k} of {one['file_name']}"}
        for k in range(captions)
        for one in images
    ]
    return json.dumps({"info": {"year": 2017}, "licenses": [], "images": images, "annotations": notes})


def karpathy_json(sides: dict[str, str], dataset: str, filepath: str = "") -> str:
    """The layout of Karpathy's splits."""
    images = [
        {
            **({"filepath": filepath, "cocoid": i} if filepath else {}),
            "filename": name,
            "imgid": i,
            "split": side,
            "sentids": [5 * i + k for k in range(5)],
            "sentences": [
                {
                    "tokens": ["caption", str(k)],
                    "raw": f"Caption {k} of {name}.",
                    "imgid": i,
                    "sentid": 5 * i + k,
                }
                for k in range(5)
            ],
        }
        for i, (name, side) in enumerate(sides.items())
    ]
    return json.dumps({"images": images, "dataset": dataset})
