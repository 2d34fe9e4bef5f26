"""Benchmarks in which an image chooses among captions, as they are distributed: SugarCrepe, ARO, Winoground. No torch.

A choice has one image and two captions, the first of which is correct, or two images and a caption for each.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from PIL import Image

from m1clip.config import require
from m1clip.data.index import Row
from m1clip.data.tables import find_images, load_json, read_json_lines
from m1clip.decode import MAX_BYTES, BadImage, decode
from m1clip.files import open_regular
from m1clip.prompts import MAX_LABEL_LENGTH

MAX_TEXT = 10_000  # characters
Box = tuple[int, int, int, int]  # left, upper, right, lower


class Choice(NamedTuple):
    kind: str
    images: tuple[int, ...]  # rows of ChoiceImages
    texts: tuple[str, ...]


@dataclass(frozen=True)
class ChoiceImages:
    """The distinct images of a benchmark, cropped where it says so."""

    files: tuple[tuple[str, Box | None], ...]

    @cached_property
    def fingerprint(self) -> str:
        hash_ = blake2b(digest_size=16)
        for path, box in self.files:
            status = os.stat(path) if os.path.isfile(path) else None
            stamp = f"{status.st_size}/{status.st_mtime_ns}" if status else "missing"
            hash_.update(f"{os.path.abspath(path)}/{box}/{stamp}\n".encode(errors="replace"))
        return hash_.hexdigest()

    @property
    def identity(self) -> str:
        return self.fingerprint

    def __len__(self) -> int:
        return len(self.files)

    def image(self, index: int, min_size: int = 0) -> Image.Image:
        path, box = self.files[index]
        try:
            with open_regular(Path(path)) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise BadImage("refused", f"{size:,} bytes are too many for an image")
                image = decode(file.read(size), 0 if box else min_size)
        except OSError as error:
            raise BadImage("missing file", f"cannot be read ({error.strerror or error})") from None
        if box is None:
            return image
        left, upper, right, lower = box[0], box[1], min(box[2], image.width), min(box[3], image.height)
        if right <= left or lower <= upper:
            raise BadImage("damaged", f"the box {box} is outside of the image")
        return image.crop((left, upper, right, lower))

    def captions(self, index: int) -> list[str]:
        return []

    def label(self, index: int) -> str:
        return ""

    def label_names(self) -> list[str]:
        return []

    def location(self, index: int) -> str:
        return self.files[index][0]


class RawChoice(NamedTuple):
    kind: str
    images: tuple[tuple[str, Box | None], ...]  # names as in the file
    texts: tuple[str, ...]


def is_choice_spec(spec: str) -> bool:
    return spec.partition(":")[0] in READERS


def open_choices(spec: str) -> tuple[ChoiceImages, list[Choice]]:
    """Images and choices of sugarcrepe:DIR, aro:DIR or winoground:DIR, optionally with ?images=DIR."""
    name, _, path = spec.partition(":")
    path, _, query = path.partition("?")
    folder, options = Path(path).expanduser(), dict(parse_qsl(query))
    require(not options.keys() - {"images"}, f"{spec}: the only option is ?images=DIR")
    if not path or not folder.is_dir():
        raise FileNotFoundError(f"{spec} needs the folder of {name}; there is no folder {path!r}")
    raw = list(READERS[name](folder))
    if not raw:
        raise FileNotFoundError(f"{folder} has none of the files of {name}: {FILES[name]}")
    image_root = Path(options.get("images", folder)).expanduser()
    names = list(dict.fromkeys(image for choice in raw for image in choice.images))
    root = find_images(image_root, iter([Row(image, ()) for image, _ in names[:200]])).root
    row = {image: number for number, image in enumerate(names)}
    files = tuple((os.path.join(root, image), box) for image, box in names)
    return ChoiceImages(files), [Choice(c.kind, tuple(row[image] for image in c.images), c.texts) for c in raw]


def _text(path: Path, item: Any, key: str) -> str:
    value = item.get(key) if isinstance(item, dict) else None
    require(isinstance(value, str) and bool(value.strip()), f"{path}: an entry has no text {key!r}")
    return str(value)[:MAX_TEXT]


def _name(path: Path, item: Any, key: str) -> str:
    """The name of an image; it stays below the folder of images."""
    name = _text(path, item, key)
    is_safe = not os.path.isabs(name) and ".." not in Path(name).parts and "\0" not in name
    require(is_safe, f"{path}: the image {name[:80]!r} is outside of the folder of images")
    return name


def _sugarcrepe(folder: Path) -> Iterator[RawChoice]:
    """add_att.json, replace_rel.json …: {"0": {"filename", "caption", "negative_caption"}}"""
    for path in sorted(file for pattern in ("*.json", "data/*.json") for file in folder.glob(pattern)):
        if re.fullmatch(r"(add|replace|swap)_(att|obj|rel)", path.stem):
            items = load_json(path)
            for item in items.values() if isinstance(items, dict) else items:
                images = ((_name(path, item, "filename"), None),)
                yield RawChoice(
                    path.stem, images, (_text(path, item, "caption"), _text(path, item, "negative_caption"))
                )


def _aro(folder: Path) -> Iterator[RawChoice]:
    """visual_genome_relation.json and visual_genome_attribution.json, whose images are cropped to a box."""
    for path in sorted(folder.glob("visual_genome_*.json")):
        for item in load_json(path):
            texts = (_text(path, item, "true_caption"), _text(path, item, "false_caption"))
            edges = [item.get(f"bbox_{key}") for key in ("x", "y", "w", "h")]
            box = None
            if all(isinstance(edge, int | float) and 0 <= edge < 1e6 for edge in edges):
                x, y, width, height = (int(edge) for edge in edges)
                box = (x, y, x + max(1, width), y + max(1, height))
            yield RawChoice(path.stem.removeprefix("visual_genome_"), ((_name(path, item, "image_path"), box),), texts)


def _winoground(folder: Path) -> Iterator[RawChoice]:
    """examples.jsonl: {"image_0", "image_1", "caption_0", "caption_1", "collapsed_tag"}; images without a suffix."""
    for path in (folder / "examples.jsonl", folder / "data" / "examples.jsonl"):
        for _, item in read_json_lines(path) if path.is_file() else ():
            names = (_name(path, item, key) for key in ("image_0", "image_1"))
            images = tuple((name if Path(name).suffix else f"{name}.png", None) for name in names)
            kind = str(item.get("collapsed_tag") or "all")[:MAX_LABEL_LENGTH]
            yield RawChoice(kind, images, (_text(path, item, "caption_0"), _text(path, item, "caption_1")))


READERS: dict[str, Callable[[Path], Iterator[RawChoice]]] = {}
READERS |= {"sugarcrepe": _sugarcrepe, "aro": _aro, "winoground": _winoground}
FILES = {
    "sugarcrepe": "add_att.json, replace_obj.json, swap_att.json …",
    "aro": "visual_genome_relation.json and visual_genome_attribution.json",
    "winoground": "examples.jsonl",
}


def known_choices(choices: Sequence[Choice], good: Sequence[int]) -> list[Choice]:
    """The choices whose images could be decoded, with rows among `good`."""
    position = {row: number for number, row in enumerate(good)}
    kept = [choice for choice in choices if all(row in position for row in choice.images)]
    return [choice._replace(images=tuple(position[row] for row in choice.images)) for choice in kept]
