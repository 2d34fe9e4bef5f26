"""Image folders with captions in .txt files, a metadata table, or folder names as labels. No torch."""

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from m1clip.config import DataConfig
from m1clip.data import caption_datasets
from m1clip.data.rows import MAX_CAPTION_BYTES, SPLIT_WORDS, BadRow, Listing, Row
from m1clip.data.tables import IMAGE_SUFFIX, TABLE_SUFFIXES, list_table

CAPTION_SUFFIXES = (".txt", ".caption")
# Text files about a folder, not about one of its images.
NOT_CAPTIONS = re.compile(
    r"(readme|licen[cs]e|notes?|credits|captions?|classes|labels|attribution|\..*)\.(txt|caption)", re.I
)
# Folder names that say nothing about the images.
NO_LABEL = re.compile(r"|images?|imgs?|pictures?|photos?|jpe?gs?|data|(train|val|test)\d+|flick\w+", re.I)
MAX_INSPECTED = 20_000


def list_folder(path: Path, config: DataConfig) -> Listing:
    patterns = (f"{parent}metadata{suffix}" for suffix in TABLE_SUFFIXES for parent in ("", "*/"))
    if metadata := sorted(table for pattern in patterns for table in path.glob(pattern)):
        splits = (split_from_path(table.relative_to(path)) for table in metadata)
        listings = (list_table(table, config) for table in metadata)
        rows = (_rebase(listing, str(path), split) for listing, split in zip(listings, splits, strict=True))
        return Listing(str(path), chain.from_iterable(rows))
    tables = [file for file in path.iterdir() if file.suffix.lower() in TABLE_SUFFIXES and file.is_file()]
    has_caption_files, labels, has_unlabeled = _inspect(path, config)
    if has_caption_files:
        return Listing(str(path), _caption_file_rows(path, config))
    if listing := caption_datasets.recognize(path, config):
        return listing
    if len(tables) == 1:
        return list_table(tables[0], config)
    if labels and not has_unlabeled:
        return Listing(str(path), _labeled_rows(path, config))
    hint = f"; or name a table: {', '.join(map(str, sorted(tables)))}" if tables else ""
    if not labels and not has_unlabeled:
        raise ValueError(f"{path} has no images in it{hint}")
    raise ValueError(
        f"{path} has images but no captions: add a .txt beside each image, list them in a metadata.csv "
        f"(file_name, text), or sort them into one folder per label{hint}"
    )


def join_listings(listings: list[Listing]) -> Listing:
    """Several listings as one, relative to their common folder."""
    if len(listings) == 1:
        return listings[0]
    root = os.path.commonpath([os.path.abspath(listing.root) for listing in listings])
    return Listing(root, chain.from_iterable(_rebase(listing, root) for listing in listings))


def _rebase(listing: Listing, root: str, split: str = "") -> Iterator[Row | BadRow]:
    """The rows of a listing relative to another root, with a default split."""
    prefix = os.path.relpath(listing.root, root)
    for row in listing.rows:
        if isinstance(row, Row) and not row.container:
            image = row.image if "://" in row.image else os.path.normpath(os.path.join(prefix, row.image))
            row = row._replace(image=image, split=row.split or split)
        yield row


def _walk(path: Path, config: DataConfig) -> Iterator[tuple[str, list[str], list[BadRow]]]:
    """Every folder, relative to the path, its files, and its links that are refused; sorted, none hidden."""
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
        yield os.path.relpath(folder, path).removeprefix("."), names, [] if follow else refused


def _inspect(path: Path, config: DataConfig) -> tuple[bool, set[str], bool]:
    """Whether there are caption files, which folder names are labels, and whether some images have none."""
    has_caption_files, has_unlabeled, labels, count = False, False, set[str](), 0
    for folder, names, _ in _walk(path, config):
        images = [name for name in names if IMAGE_SUFFIX.search(name)]
        texts = {Path(name).stem for name in names if Path(name).suffix.lower() in CAPTION_SUFFIXES}
        has_caption_files |= any(name in texts or Path(name).stem in texts for name in images)
        label = os.path.basename(folder)
        if images and (label.lower() in SPLIT_WORDS or NO_LABEL.fullmatch(label)):
            has_unlabeled = True
        elif images:
            labels.add(label)
        count += len(images)
        if count > MAX_INSPECTED:
            break
    return has_caption_files, labels, has_unlabeled


def _caption_file_rows(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    for folder, names, refused in _walk(path, config):
        yield from refused
        images = [name for name in names if IMAGE_SUFFIX.search(name)]
        for name in images:
            yield _read_caption_file(path, os.path.join(folder, name))
        captioned = {stem for name in images for stem in (name, Path(name).stem)}
        for name in names:
            stem, suffix = os.path.splitext(name)
            if suffix.lower() in CAPTION_SUFFIXES and stem not in captioned and not NOT_CAPTIONS.fullmatch(name):
                yield BadRow("missing file", str(path / folder / name), "a caption file without an image")


def _read_caption_file(path: Path, image: str) -> Row | BadRow:
    stems = (os.path.splitext(image)[0], image)
    candidates = (path / (stem + suffix) for stem in stems for suffix in (*CAPTION_SUFFIXES, ".TXT"))
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        return BadRow("no caption", str(path / image), "there is no .txt file beside it")
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_CAPTION_BYTES).decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        return BadRow("no caption", str(file), f"cannot be read ({error.strerror})")
    return Row(image, text.splitlines() or [""], split=split_from_path(Path(image)))


def _labeled_rows(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    for folder, names, refused in _walk(path, config):
        yield from refused
        caption = label_caption(os.path.basename(folder), config.template)
        for image in (os.path.join(folder, name) for name in names if IMAGE_SUFFIX.search(name)):
            yield Row(image, [caption], split=split_from_path(Path(image)))


def label_caption(label: str, template: str) -> str:
    """n02099601-golden_retriever or 042.golden_retriever → a photo of a golden retriever."""
    name = re.sub(r"^(n\d{8}[-_ ]|\d{3}\.)", "", label).replace("_", " ").strip() or label
    if name.lower().startswith(tuple("aeiou")):
        template = re.sub(r"\b(a|A) \{\}", r"\1n {}", template)
    return template.replace("{}", name)


def split_from_path(path: Path) -> str:
    """The split that one of a path's folders names, if any."""
    return next((SPLIT_WORDS[part.lower()] for part in path.parts[:-1] if part.lower() in SPLIT_WORDS), "")
