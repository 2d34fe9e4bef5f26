"""WebDataset shards: tar files in which the members of a pair share a name. Read in place, never unpacked."""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m1clip.data.rows import MOST_TEXT, BadRow, Listing, Row
from m1clip.data.tables import IMAGE, several

PICKLES = re.compile(r"\.(pyd|pkl|pickle|pt|pth|joblib|npy|npz)$", re.I)  # what readers of shards unpickle
TEXTS = ("txt", "text", "caption", "cap")
SIDE = re.compile(r"(train|val|valid|validation|dev|validation|test)[-_.]", re.I)


def shards(paths: list[Path]) -> Listing:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{len(missing)} of {len(paths)} shards are missing, the first is {missing[0]}"
        )
    return Listing(
        os.path.dirname(os.path.commonpath(paths)) or ".", (row for path in paths for row in shard(path))
    )


def shard(path: Path) -> Iterator[Row | BadRow]:
    """The pairs of one tar; a truncated one gives those that are whole."""
    try:
        with tarfile.open(path, "r:") as tar:  # not compressed: images are read by their place in the file
            key, members, before = "", dict[str, tarfile.TarInfo](), 0
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header it has seen
                if tar.offset <= before:  # it says that it has less than no bytes
                    raise ValueError(
                        f"{path} is refused: the size of its member {member.name!r} is impossible"
                    )
                before = tar.offset
                if member.isdir() or os.path.basename(member.name).startswith("."):  # ._x is what a Mac adds
                    continue
                _refuse(path, member)
                name, ending = split_name(member.name)
                if name != key or ending.lower() in members:
                    yield from _pair(path, tar, key, members)
                    key, members = name, {}
                members[ending.lower()] = member
            yield from _pair(path, tar, key, members)
            if not _ended(path, tar):
                yield BadRow(
                    "truncated", str(path), "the shard ends before its end mark: pairs may be missing"
                )
    except (tarfile.TarError, EOFError, OSError) as error:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        what = "gunzip it first" if packed else error if os.path.getsize(path) else "it is empty"
        yield BadRow("truncated", str(path), f"the shard breaks off or is no plain tar ({what})")


def _ended(path: Path, tar: tarfile.TarFile) -> bool:
    with open(path, "rb") as file:
        file.seek(tar.offset)
        return file.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)


def split_name(name: str) -> tuple[str, str]:
    """a/b.c.d → a/b and c.d: the key of a pair, and what the member is of it."""
    folder, _, base = name.rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, ending


def _refuse(path: Path, member: tarfile.TarInfo) -> None:
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise ValueError(f"{path} is refused: its member {member.name!r} leads out of the archive")
    if member.issym() or member.islnk():
        raise ValueError(f"{path} is refused: its member {member.name!r} is a link to {member.linkname!r}")
    if member.size < 0:
        raise ValueError(f"{path} is refused: the size of its member {member.name!r} is impossible")
    if not member.isfile() or member.issparse():
        raise ValueError(f"{path} is refused: its member {member.name!r} is not a plain file")
    if PICKLES.search(member.name):
        raise ValueError(f"{path} is refused: its member {member.name!r} may be a pickle, which can run code")


def _pair(
    path: Path, tar: tarfile.TarFile, key: str, members: dict[str, tarfile.TarInfo]
) -> Iterator[Row | BadRow]:
    if not members:
        return
    where = f"{path}: {key}"
    image = next((one for ending, one in members.items() if IMAGE.search(f".{ending}")), None)
    if image is None:
        yield BadRow("missing file", where, f"no image among its members ({', '.join(sorted(members))})")
        return
    if image.offset_data + image.size > os.path.getsize(path):
        yield BadRow("truncated", where, "the shard ends inside the image")
        return
    text = next((members[ending] for ending in TEXTS if ending in members), None)
    lines = _read(tar, text).decode("utf-8-sig", "surrogateescape").splitlines() if text else []
    values: Any = {}
    if "json" in members:
        try:
            values = json.loads(_read(tar, members["json"]))
        except (ValueError, RecursionError) as error:
            if not lines:
                yield BadRow("broken line", f"{where}.json", f"not JSON ({error})")
                return
    said = values if isinstance(values, dict) else {}
    captions = (
        several(said.get("captions")) or lines or several(said.get("caption") or said.get("text")) or [""]
    )
    side = SIDE.match(path.name)
    split = side.group(1) if side else ""
    yield Row(image.name, captions, 0, "", split, str(path), image.offset_data, image.size)


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # it is a file: links were refused
    return file.read(MOST_TEXT)
