"""The rows of a spec: each path is listed by the reader of its format, image folders here. No torch.

A folder has captions in a table, in .txt files, or in its folder or file names; a note names what is used.
"""

import io
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from glob import glob
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from braceexpand import braceexpand

from m1clip.config import DataConfig
from m1clip.data import caption_text, containers, tables
from m1clip.data.index import MAX_CAPTION_FILE_BYTES, SPLIT_WORDS, BadRow, Listed, Listing, Note, Row
from m1clip.data.splits import COLUMNS, SCHEMES, refuse_flags
from m1clip.decode import IMAGE_SUFFIX
from m1clip.format import did_you_mean

# Text files about a folder, not about one of its images.
NOT_CAPTIONS = re.compile(r"(readme|licen[cs]e|notes?|credits|captions?|classes|labels|attribution)\.\w+", re.I)
MAX_FILES = 1_000_000  # that a path with braces may stand for
# Folder names that say nothing about the images.
NO_LABEL = re.compile(r"images?|imgs?|pictures?|photos?|jpe?gs?|data|(train|val|test)\d+|flickr.*", re.I)
# IMG_1.jpg.json and IMG_1.jpg.supplemental-metadata.json of a Google Takeout.
TAKEOUT = re.compile(rf"(.*{IMAGE_SUFFIX.pattern[:-1]})(\.supp[\w.-]*)?\.json", re.I)


class UnclearCaptions(ValueError):  # noqa: N818 - the data is wrong, not the program
    """A folder of images without captions, or with names that may not describe the images."""


def list_rows(spec: str, config: DataConfig) -> Listing:
    scheme, colon, path = spec.partition(":")
    if not colon or scheme not in SCHEMES:
        return _list_paths(expand_paths(spec), config)
    if scheme == "hf":
        refuse_flags(spec, "a table", config, ["caption_from"])
        return containers.list_dataset(path, config)
    folder = Path(path).expanduser()
    if not path or not folder.is_dir():
        raise FileNotFoundError(f"{spec} needs the folder of {scheme}; there is no folder {path!r}")
    refuse_flags(spec, "a dataset of known layout", config, (*COLUMNS, "caption_from"))
    return tables.list_caption_dataset(folder, scheme, config)


def _list_paths(paths: list[Path], config: DataConfig) -> Listing:
    """Shards, and Parquet files that contain images, are listed together; other paths one by one."""
    suffixes = {path.suffix.lower() for path in paths if path.is_file()}
    if suffixes == {".tar"} and not any(path.is_dir() for path in paths):
        refuse_flags(str(paths[0]), "a WebDataset shard", config, ("image_column", "caption_column", "caption_from"))
        return containers.list_shards(paths, config)
    if suffixes == {".parquet"} and tables.contains_images(paths[0]):
        return containers.list_parquet(paths, config)
    if len(paths) == 1:
        return _list_path(paths[0], config)
    listings = [_list_path(path, config) for path in paths]
    root = os.path.commonpath([os.path.abspath(listing.root) for listing in listings])
    splits = [containers.split_from_name(path.name) if path.is_file() else "" for path in paths]
    rows = (listing.relative_to(root, split) for listing, split in zip(listings, splits, strict=True))
    return Listing(root, chain.from_iterable(rows))


def _list_path(path: Path, config: DataConfig) -> Listing:
    suffix = path.suffix.lower()
    if path.is_dir():
        for pattern in ("*.tar", "*.parquet", "data/*.parquet"):
            if files := sorted(path.glob(pattern)):
                return _list_paths(files, config)
        if files := sorted(file for file in path.glob("*/*.tar") if file.parent.name.lower() in SPLIT_WORDS):
            return _list_paths(files, config)  # CLIP_benchmark has a folder for each split
        is_saved = any((path / name).is_file() for name in containers.SAVED)
        return containers.list_dataset(str(path), config) if is_saved else _list_folder(path, config)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    if suffix in (".zip", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar"):
        raise ValueError(f"{path} is an archive; unpack it and give --data the folder or file inside")
    if suffix not in tables.READERS:
        formats = ", ".join(tables.TABLE_SUFFIXES)
        raise ValueError(f"{path} cannot be read; expected a folder, {formats} or uncompressed .tar shards")
    refuse_flags(str(path), "a table", config, ["caption_from"])
    listing = tables.list_captions(path) if suffix in (".json", ".txt", ".token") else None
    return listing or tables.list_table(path, config)


def count_braces(spec: str) -> int:
    """At most so many names does a path with braces stand for."""
    count = 1
    for group in re.findall(r"\{([^{}]*)\}", spec):
        numbers = re.fullmatch(r"(-?\d{1,12})\.\.(-?\d{1,12})(\.\..*)?", group)
        is_too_long = ".." in group and re.search(r"\d{13}", group)
        count *= (
            MAX_FILES + 1
            if is_too_long
            else abs(int(numbers[2]) - int(numbers[1])) + 1
            if numbers
            else 1 + group.count(",")
        )
        count = min(count, MAX_FILES + 1)
    return count


def expand_paths(spec: str) -> list[Path]:
    """The files of a path that may contain {000..099} or *."""
    spec = os.path.expanduser(spec)
    if not os.path.exists(spec) and count_braces(spec) > MAX_FILES:
        raise ValueError(f"{spec[:100]!r} stands for more than {MAX_FILES:,} files")
    names = [spec] if os.path.exists(spec) else list(braceexpand(spec))
    names = [path for name in names for path in (sorted(glob(name)) if "*" in name else [name])]
    if not any(map(os.path.exists, names)):
        hint = f"; {did_you_mean(spec.partition(':')[0], SCHEMES)}" if ":" in spec else ""
        raise FileNotFoundError(f"no data source {spec!r}: there is no such file or folder{hint}")
    return [Path(name) for name in names]


def _list_folder(path: Path, config: DataConfig) -> Listing:
    """Captions from where --caption-from says; auto takes the first of a table, caption files and labels."""
    caption_from = config.caption_from
    if caption_from == "auto" and (listing := _list_captions_table(path, config)):
        return listing
    images = _inspect(path, config)
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in tables.TABLE_SUFFIXES and file.is_file())
    if caption_from == "auto" and not images.has_caption_files and len(files) == 1 and tables.names_images(files[0]):
        return _list_path(files[0], config).with_note(f"captions from {files[0]}")
    if not images.counts:
        hint = f"; or name a table: {', '.join(map(str, files))}" if files else ""
        raise ValueError(f"{path} has no images in it{hint}")
    if caption_from == "auto":
        caption_from = "text" if images.has_caption_files else "folder"
        if caption_from == "folder" and (doubt := _doubt_about_labels(images)):
            raise UnclearCaptions(_ask_for_captions(path, images, config, doubt, files))
    refuse_flags(str(path), "a folder of images", config, COLUMNS)
    is_text = caption_from == "text"
    origin = "files beside the images" if is_text else _examples(images, config, caption_from)
    rows = _caption_file_rows(path, config) if is_text else _name_rows(path, config)
    return Listing(str(path), rows).with_note(f"captions from {origin}")


def _list_captions_table(path: Path, config: DataConfig) -> Listing | None:
    """Captions in metadata tables, one caption table per sub-folder, or the files of a known dataset."""
    suffixes = {*tables.TABLE_SUFFIXES} - {".json"}  # metadata.json is about an album of a Google Takeout
    found = sorted(file for depth in ("", "*/") for file in path.glob(f"{depth}metadata.*") if file.suffix in suffixes)
    if not found:
        found = sorted(table for table in path.glob("*/captions.*") if table.suffix.lower() in tables.READERS)
        if len(found) < 2:
            return tables.list_known_dataset(path, config)
    rows = (_list_path(file, config).relative_to(str(path), split_from_path(file.relative_to(path))) for file in found)
    return Listing(str(path), chain.from_iterable(rows)).with_note(f"captions from {', '.join(map(str, found))}")


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
        stems = {name: Path(name).stem for name in names if IMAGE_SUFFIX.search(name)}
        others = sorted(texts[stem] for stem in texts.keys() - stems.keys() - set(stems.values()))
        takeout = {match[1]: match[0] for match in map(TAKEOUT.fullmatch, names) if match}
        images = {name: texts.get(stem) or texts.get(name) or takeout.get(name, "") for name, stem in stems.items()}
        yield os.path.relpath(folder, path).removeprefix("."), images, others, [] if follow else refused


class FolderImages(NamedTuple):
    counts: Counter[str]  # images by label; "" for those in no labelled folder
    first: dict[str, str]  # the first image of each label
    names: list[str]  # the first images
    has_caption_files: bool


def _inspect(path: Path, config: DataConfig) -> FolderImages:
    found = FolderImages(Counter(), {}, [], False)
    for folder, images, *_ in _walk(path, config):
        if images:
            label, files = _folder_label(folder), [os.path.join(folder, name) for name in images]
            found.counts[label] += len(images)
            found.first.setdefault(label, files[0])
            found.names.extend(files[: 1000 - len(found.names)])  # enough for a judgement
            found = found._replace(has_caption_files=found.has_caption_files or any(images.values()))
    return found


def _folder_label(folder: str) -> str:
    """The name of the innermost folder that is neither a split nor a word such as images."""
    names = list(Path(folder).parts)
    if split := next((name for name in names if name.lower() in SPLIT_WORDS), ""):
        names.remove(split)  # a second one is a label: train is a vehicle
    label = next((name for name in reversed(names) if not NO_LABEL.fullmatch(name)), "")
    return label or ("train" if folder == "train" else "")


def _doubt_about_labels(images: FolderImages) -> str:
    """Why the folder names are probably no labels; empty if they probably are."""
    counts = images.counts
    unlabelled = counts[""] + (counts["train"] if len(counts) < 3 else 0)  # among labels, train is a vehicle
    vague = [label for label in counts if caption_text.is_vague(label)]
    albums = [label for label in counts if label and not caption_text.is_label(label)]
    unlikely = next(iter(albums or (vague if 2 * len(vague) > len(counts) else [])), "")
    camera_names = sum(bool(caption_text.CAMERA_NAME.match(os.path.basename(name))) for name in images.names)
    if unlabelled:
        return f"{unlabelled:,} of {counts.total():,} images are in no folder with a label"
    if unlikely:
        return f"{unlikely!r} is the name of an album or an id, not a label"
    if len(counts) == 1:
        return f"{next(iter(counts))!r} is the only folder"
    if counts.total() < 2 * len(counts):
        return "most folders have a single image"
    if 2 * camera_names > len(images.names):
        return "the file names are those of a camera, so the folders may be albums"
    return ""


def _ask_for_captions(path: Path, images: FolderImages, config: DataConfig, doubt: str, files: list[Path]) -> str:
    """The message about images without captions: what names would give, and how to go on."""
    words = sum(bool(_name_caption(name, config, "filename")) for name in images.names)
    choices = {"filename": 2 * words > len(images.names), "folder": bool(set(images.first) - {"", "train"})}
    origin = "" if config.caption_from == "auto" else f" --caption-from {config.caption_from}"
    template = f"`m1clip data template {shlex.quote(str(path))}{origin}`"
    return "; ".join(
        [
            f"{path} has images but no captions, and {doubt}",
            *(
                f"--caption-from {k} would use {_examples(images, config, k)}"
                for k, possible in choices.items()
                if possible
            ),
            f"to write captions, add a .txt beside each image, or fill in the table that {template} makes",
            *(f"or name a table: {file}" for file in files),
        ]
    )


def _examples(images: FolderImages, config: DataConfig, caption_from: str) -> str:
    """The first three captions and the images that they are of."""
    files = [file for label, file in images.first.items() if label] if caption_from == "folder" else images.names
    captions = ((_name_caption(file, config, caption_from), file) for file in files)
    shown = islice((f'"{caption}" ({file})' for caption, file in captions if caption), 3)
    return f"{'folder' if caption_from == 'folder' else 'file'} names: {', '.join(shown)}"


def _name_caption(image: str, config: DataConfig, caption_from: str) -> str:
    folder, name = os.path.split(image)
    if caption_from == "filename":
        return caption_text.filename_caption(IMAGE_SUFFIX.sub("", name))
    label = _folder_label(folder) or os.path.basename(folder)
    return caption_text.label_caption(label, config.template) if label else ""


def _name_rows(path: Path, config: DataConfig) -> Iterator[Listed]:
    caption_from = "filename" if config.caption_from == "filename" else "folder"
    empty, folders = {"": True}, dict[str, set[str]]()
    for folder, images, _, refused in _walk(path, config):
        yield from refused
        empty[folder] = not images
        empty |= dict.fromkeys(map(str, Path(folder).parents), False)
        label = caption_text.label_words(_folder_label(folder)) if caption_from == "folder" else ""
        if images:
            folders.setdefault(label, set()).add(_folder_label(folder))
        for image in (os.path.join(folder, name) for name in images):
            if caption := _name_caption(image, config, caption_from):
                yield Row(image, [caption], split=split_from_path(Path(image)), label=label)
            else:
                yield BadRow("no caption", str(path / image), f"its {caption_from} gives no words")
    if names := [folder for folder, is_empty in empty.items() if is_empty and folder]:
        yield Note(f"folders without images, such as {names[0]}", len(names))
    for label, found in folders.items():
        if label and len(found) > 1:
            yield Note(f"{len(found)} folders have the same label, {label!r}: {', '.join(sorted(found)[:3])}")


def _caption_file_rows(path: Path, config: DataConfig) -> Iterator[Listed]:
    for folder, images, others, refused in _walk(path, config):
        yield from refused
        for name, text in images.items():
            yield from _read_caption_file(path, os.path.join(folder, name), path / folder / text)
        orphans = (path / folder / name for name in others if not NOT_CAPTIONS.fullmatch(name))
        yield from (BadRow("missing file", str(file), "a caption file without an image") for file in orphans)


def _read_caption_file(path: Path, image: str, file: Path) -> Iterator[Listed]:
    try:
        if not file.is_file():
            raise OSError(0, "there is no .txt file beside it")
        with open(file, "rb") as opened:
            data = opened.read(MAX_CAPTION_FILE_BYTES)
    except OSError as error:
        yield BadRow("no caption", str(path / image), str(error.strerror))
        return
    encoding, errors, _ = caption_text.detect_encoding(io.BytesIO(data))
    text = data.decode(encoding, errors)
    if encoding != "utf-8-sig":
        yield Note(f"caption files that are not UTF-8, read as {encoding}", 1)
    text = _takeout_description(text) if file.suffix.lower() == ".json" else text
    yield Row(image, text.splitlines() or [""], split=split_from_path(Path(image)))


def _takeout_description(text: str) -> str:
    try:
        return str(json.loads(text)["description"] or "").strip()
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def caption_table(folder: Path, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Every image of a folder with each of its captions, or with an empty one."""
    captions: dict[str, list[str]] = {}
    try:
        listing = _list_folder(folder, config)
        for row in listing.rows:
            if isinstance(row, Row):
                image = os.path.abspath(os.path.join(listing.root, row.image))
                captions.setdefault(image, []).extend(filter(str.strip, row.captions))
    except UnclearCaptions:
        pass  # the table is to be filled in
    for subfolder, images, *_ in _walk(folder, config):
        for image in (os.path.abspath(folder / subfolder / name) for name in images):
            yield from ((image, caption) for caption in captions.get(image) or [""])


def split_from_path(path: Path) -> str:
    """The split that one of a path's folders names, if any."""
    return next((SPLIT_WORDS[part.lower()] for part in path.parts[:-1] if part.lower() in SPLIT_WORDS), "")
