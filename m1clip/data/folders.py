"""A folder of images: captions beside them (.txt), in a metadata table, or the folders' names as labels."""

import os
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from m1clip.config import DataConfig
from m1clip.data import caption_datasets
from m1clip.data.rows import MOST_TEXT, BadRow, Listing, Row
from m1clip.data.tables import IMAGE, TABLES, table

BESIDE = (".txt", ".caption")
# Texts that are about a folder, not about one of its images.
ABOUT = re.compile(
    r"(readme|licen[cs]e|notes?|credits|captions?|classes|labels|attribution|\..*)\.(txt|caption)", re.I
)
NO_LABEL = re.compile(r"|images?|imgs?|pictures?|photos?|jpe?gs?|data|(train|val|test)\d+|flick\w+", re.I)
"""Folders that say nothing of the images in them."""
SIDES = {
    **dict.fromkeys(("train", "training", "restval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "held-out", "held_out"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What the sides of a split are called in the wild."""


def folder(path: Path, config: DataConfig) -> Listing:
    tables = sorted(
        one for suffix in TABLES for deep in ("", "*/") for one in path.glob(f"{deep}metadata{suffix}")
    )
    if tables:
        return _joined(path, [table(one, config) for one in tables], tables)
    lonely = [one for one in path.iterdir() if one.suffix.lower() in TABLES and one.is_file()]
    text, labels, flat = _look(path, config)
    if text:
        return Listing(str(path), _beside(path, config))
    if known := caption_datasets.recognized(path, config):
        return known
    if len(lonely) == 1:
        return table(lonely[0], config)
    if labels and not flat:
        return Listing(str(path), _labelled(path, config))
    if not labels and not flat:
        raise ValueError(f"{path} has no images in it" + _tables_there(lonely))
    raise ValueError(
        f"{path} has images but no captions: put a .txt beside each, list them in a metadata.csv "
        f"(file_name, text), or sort them into one folder for each label" + _tables_there(lonely)
    )


def _tables_there(tables: list[Path]) -> str:
    return f"; or name a table: {', '.join(map(str, sorted(tables)))}" if tables else ""


def _joined(path: Path, listings: list[Listing], tables: list[Path]) -> Listing:
    parts = (
        moved(listing, str(path), side_of(where.relative_to(path)))
        for listing, where in zip(listings, tables, strict=True)
    )
    return Listing(str(path), chain.from_iterable(parts))


def joined(listings: list[Listing]) -> Listing:
    """Several listings as one, told from the folder that they share."""
    if len(listings) == 1:
        return listings[0]
    root = os.path.commonpath([os.path.abspath(one.root) for one in listings])
    return Listing(root, chain.from_iterable(moved(one, root) for one in listings))


def moved(listing: Listing, root: str, split: str = "") -> Iterator[Row | BadRow]:
    """The rows of a listing, told from another root."""
    way = os.path.relpath(listing.root, root)
    for row in listing.rows:
        if isinstance(row, Row) and not row.file:
            image = row.image if "://" in row.image else os.path.normpath(os.path.join(way, row.image))
            row = row._replace(image=image, split=row.split or split)
        yield row


def walk(path: Path, config: DataConfig) -> Iterator[str | BadRow]:
    """Every file under the folder, in order, from the folder; what is hidden is passed over."""
    links, seen = "links" in config.allow, set[tuple[int, int]]()
    for here, folders, files in os.walk(path, followlinks=links):
        about = os.stat(here)
        if (about.st_dev, about.st_ino) in seen:  # links that lead in a circle
            folders[:] = []
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in folders:
            if not links and os.path.islink(os.path.join(here, name)):
                yield BadRow(
                    "refused", os.path.join(here, name), "a link to a folder; --allow links would follow it"
                )
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(here, name), path)


def _look(path: Path, config: DataConfig) -> tuple[bool, set[str], bool]:
    """Whether captions lie beside, which folders may be labels, and whether images lie in none."""
    images, texts, labels = set[str](), set[str](), set[str]()
    flat = False
    for name in walk(path, config):
        if isinstance(name, BadRow):
            continue
        stem, ending = os.path.splitext(name)
        if IMAGE.search(name):
            label = os.path.basename(os.path.dirname(name))
            if label.lower() in SIDES or NO_LABEL.fullmatch(label):
                flat = True
            else:
                labels.add(label)
            images.update((stem, name))
        elif ending.lower() in BESIDE:
            texts.add(stem)
        if len(images) > 20_000:  # enough to know
            break
    return not images.isdisjoint(texts), labels, flat


def _beside(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    waiting, taken, here = dict[str, str](), set[str](), ""

    def orphans() -> Iterator[BadRow]:
        for stem in sorted(waiting.keys() - taken):
            if not ABOUT.fullmatch(os.path.basename(waiting[stem])):
                yield BadRow("missing file", str(path / waiting[stem]), "a caption without an image")

    for name in walk(path, config):
        if isinstance(name, BadRow):
            yield name
            continue
        if os.path.dirname(name) != here:  # texts are beside their images: only one folder is remembered
            yield from orphans()
            waiting, taken, here = {}, set(), os.path.dirname(name)
        stem, ending = os.path.splitext(name)
        if ending.lower() in BESIDE:
            waiting[stem] = name
        if not IMAGE.search(name):
            continue
        taken.update((stem, name))
        ways = (one + end for one in (stem, name) for end in (*BESIDE, ".TXT"))
        found = next((path / one for one in ways if (path / one).is_file()), None)
        if found is None:
            yield BadRow("no caption", str(path / name), "no .txt lies beside it")
            continue
        try:
            with open(found, "rb") as file:
                text = file.read(MOST_TEXT).decode("utf-8-sig", "surrogateescape")
        except OSError as error:
            yield BadRow("no caption", str(found), f"cannot be read ({error.strerror})")
            continue
        yield Row(name, text.splitlines() or [""], split=side_of(Path(name)))
    yield from orphans()


def _labelled(path: Path, config: DataConfig) -> Iterator[Row | BadRow]:
    for name in walk(path, config):
        if isinstance(name, BadRow):
            yield name
        elif IMAGE.search(name):
            label = os.path.basename(os.path.dirname(name))
            yield Row(name, [prompted(label, config.template)], split=side_of(Path(name)))


def prompted(label: str, prompt: str) -> str:
    """n02099601-golden_retriever, or 042.golden_retriever → a photo of a golden retriever."""
    words = re.sub(r"^(n\d{8}[-_ ]|\d{3}\.)", "", label).replace("_", " ").strip() or label
    if words[0].lower() in "aeiou":
        prompt = re.sub(r"\b(a|A) \{\}", r"\1n {}", prompt)
    return prompt.replace("{}", words)


def side_of(path: Path) -> str:
    """The side of the split that one of a path's folders names, if one does."""
    return next((SIDES[part.lower()] for part in path.parts[:-1] if part.lower() in SIDES), "")
