"""The rows of a spec: each path is listed by the reader of its format, image folders here. No torch.

A folder has captions in .txt files, in a metadata table, or folder names as labels.
"""

import os
import re
from collections.abc import Iterator
from glob import glob
from itertools import chain, islice
from pathlib import Path

from braceexpand import braceexpand

from m1clip.config import DataConfig
from m1clip.data import containers, tables
from m1clip.data.index import MAX_CAPTION_BYTES, SPLIT_WORDS, BadRow, Listing, Row
from m1clip.data.splits import SCHEMES
from m1clip.format import did_you_mean

# Text files about a folder, not about one of its images.
NOT_CAPTIONS = re.compile(r"(readme|licen[cs]e|notes?|credits|captions?|classes|labels|attribution)\.\w+", re.I)
# Folder names that say nothing about the images.
NO_LABEL = re.compile(r"|images?|imgs?|pictures?|photos?|jpe?gs?|data|(train|val|test)\d+|flick\w+", re.I)
MAX_INSPECTED = 20_000


def list_rows(spec: str, config: DataConfig) -> Listing:
    scheme, colon, path = spec.partition(":")
    if not colon or scheme not in SCHEMES:
        return _list_paths(expand_paths(spec), config)
    if scheme == "hf":
        return containers.list_dataset(path, config)
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{spec} needs the folder of {scheme}; there is no folder {path!r}")
    return tables.list_caption_dataset(folder, scheme, config)


def _list_paths(paths: list[Path], config: DataConfig) -> Listing:
    """Shards, and Parquet files that contain images, are listed together; other paths one by one."""
    suffixes = {path.suffix.lower() for path in paths if path.is_file()}
    if suffixes == {".tar"} and not any(path.is_dir() for path in paths):
        return containers.list_shards(paths)
    if suffixes == {".parquet"} and tables.contains_images(paths[0]):
        return containers.list_parquet(paths, config)
    if len(paths) == 1:
        return _list_path(paths[0], config)
    listings = [_list_path(path, config) for path in paths]
    root = os.path.commonpath([os.path.abspath(listing.root) for listing in listings])
    return Listing(root, chain.from_iterable(listing.relative_to(root) for listing in listings))


def _list_path(path: Path, config: DataConfig) -> Listing:
    suffix = path.suffix.lower()
    if path.is_dir():
        for pattern in ("*.tar", "*.parquet", "data/*.parquet"):
            if files := sorted(path.glob(pattern)):
                return _list_paths(files, config)
        is_saved = any((path / name).is_file() for name in containers.SAVED)
        return containers.list_dataset(str(path), config) if is_saved else _list_folder(path, config)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if suffix not in tables.READERS:
        formats = ", ".join(tables.TABLE_SUFFIXES)
        raise ValueError(f"{path} cannot be read; expected a folder, {formats} or uncompressed .tar shards")
    listing = tables.list_captions(path) if suffix in (".json", ".txt", ".token") else None
    return listing or tables.list_table(path, config)


def expand_paths(spec: str) -> list[Path]:
    """The files of a path that may contain {000..099} or *."""
    spec = os.path.expanduser(spec)
    names = [spec] if os.path.exists(spec) else list(braceexpand(spec))
    names = [path for name in names for path in (sorted(glob(name)) if "*" in name else [name])]
    if not any(map(os.path.exists, names)):
        hint = f"; {did_you_mean(spec.partition(':')[0], SCHEMES)}" if ":" in spec else ""
        raise FileNotFoundError(f"no data source {spec!r}: there is no such file or folder{hint}")
    return [Path(name) for name in names]


def _list_folder(path: Path, config: DataConfig) -> Listing:
    patterns = (f"{parent}metadata{suffix}" for suffix in tables.TABLE_SUFFIXES for parent in ("", "*/"))
    if metadata := sorted(table for pattern in patterns for table in path.glob(pattern)):
        splits = [(table, split_from_path(table.relative_to(path))) for table in metadata]
        rows = (tables.list_table(table, config).relative_to(str(path), split) for table, split in splits)
        return Listing(str(path), chain.from_iterable(rows))
    files = [file for file in path.iterdir() if file.suffix.lower() in tables.TABLE_SUFFIXES and file.is_file()]
    found = _inspect(path, config)
    if "caption file" in found:
        return Listing(str(path), _caption_file_rows(path, config))
    if listing := tables.list_known_dataset(path, config):
        return listing
    if len(files) == 1:
        return tables.list_table(files[0], config)
    if found == {"label"}:
        return Listing(str(path), _labeled_rows(path, config))
    hint = f"; or name a table: {', '.join(map(str, sorted(files)))}" if files else ""
    if not found:
        raise ValueError(f"{path} has no images in it{hint}")
    raise ValueError(
        f"{path} has images but no captions: add a .txt beside each image, list them in a metadata.csv "
        f"(file_name, text), or sort them into one folder per label{hint}"
    )


def _walk(path: Path, config: DataConfig) -> Iterator[tuple[str, dict[str, str], list[str], list[BadRow]]]:
    """Every folder, relative to the path: its images with their caption files, other caption files, refused links."""
    follow, visited = "links" in config.allow, set[tuple[int, int]]()
    for folder, subfolders, files in os.walk(path, followlinks=follow):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # a cycle of symlinks
            subfolders[:] = []
            continue
        visited.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        links = [os.path.join(folder, name) for name in subfolders if os.path.islink(os.path.join(folder, name))]
        refused = [BadRow("refused", link, "a symlink to a folder; --allow links follows it") for link in links]
        names = sorted(name for name in files if not name.startswith("."))
        texts = {Path(name).stem: name for name in names if name.lower().endswith((".txt", ".caption"))}
        stems = {name: Path(name).stem for name in names if tables.IMAGE_SUFFIX.search(name)}
        images = {name: texts.get(stem) or texts.get(name, "") for name, stem in stems.items()}
        others = sorted(texts[stem] for stem in texts.keys() - stems.keys() - set(stems.values()))
        yield os.path.relpath(folder, path).removeprefix("."), images, others, [] if follow else refused


def _inspect(path: Path, config: DataConfig) -> set[str]:
    """What describes the first images: a "caption file", a folder name that is a "label", or "no label"."""
    found = set[str]()
    images = ((folder, text) for folder, images, *_ in _walk(path, config) for text in images.values())
    for folder, text in islice(images, MAX_INSPECTED):
        label = os.path.basename(folder)
        is_label = label.lower() not in SPLIT_WORDS and not NO_LABEL.fullmatch(label)
        found.add("caption file" if text else "label" if is_label else "no label")
    return found


def _caption_file_rows(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    for folder, images, others, refused in _walk(path, config):
        yield from refused
        for name, text in images.items():
            yield _read_caption_file(path, os.path.join(folder, name), path / folder / text)
        orphans = (path / folder / name for name in others if not NOT_CAPTIONS.fullmatch(name))
        yield from (BadRow("missing file", str(file), "a caption file without an image") for file in orphans)


def _read_caption_file(path: Path, image: str, file: Path) -> Row | BadRow:
    if not file.is_file():
        return BadRow("no caption", str(path / image), "there is no .txt file beside it")
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_CAPTION_BYTES).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        return BadRow("no caption", str(file), f"cannot be read ({error.strerror})")
    return Row(image, text.splitlines() or [""], split=split_from_path(Path(image)))


def _labeled_rows(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    for folder, images, _, refused in _walk(path, config):
        yield from refused
        caption = tables.label_caption(os.path.basename(folder), config.template)
        for image in (os.path.join(folder, name) for name in images):
            yield Row(image, [caption], split=split_from_path(Path(image)))


def split_from_path(path: Path) -> str:
    """The split that one of a path's folders names, if any."""
    return next((SPLIT_WORDS[part.lower()] for part in path.parts[:-1] if part.lower() in SPLIT_WORDS), "")
