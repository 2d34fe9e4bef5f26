"""WebDataset shards: tar files in which the members of a pair share a name. Never unpacked. No torch."""

import json
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from m1clip.data.rows import MAX_CAPTION_BYTES, BadRow, Listing, Row
from m1clip.data.tables import IMAGE_SUFFIX, caption_texts

PICKLES = re.compile(r"\.(pyd|pkl|pickle|pt|pth|joblib|npy|npz)$", re.I)  # what WebDataset readers unpickle
CAPTION_MEMBERS = ("txt", "text", "caption", "cap")
Members = dict[str, tarfile.TarInfo]


def list_shards(paths: list[Path]) -> Listing:
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} of {len(paths)} shards are missing, such as {missing[0]}")
    root = os.path.dirname(os.path.commonpath(paths)) or "."
    return Listing(root, (row for path in paths for row in _shard_rows(path)))


def _shard_rows(path: Path) -> Iterator[Row | BadRow]:
    """The pairs of one tar; a truncated one gives its complete pairs."""
    try:
        with tarfile.open(path, "r:") as tar:  # uncompressed: images are read by their offset
            key, members, last_offset = "", Members(), 0
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # or it would keep every header in memory
                if tar.offset <= last_offset:  # a negative size sent tarfile back for ever (CVE-2025-8194)
                    raise ValueError(f"{path} is refused: the size of its member {member.name!r} is invalid")
                last_offset = tar.offset
                if member.isdir() or os.path.basename(member.name).startswith("."):  # macOS adds ._name
                    continue
                _refuse_unsafe(path, member)
                folder, slash, name = member.name.rpartition("/")
                stem, _, suffix = name.partition(".")
                if folder + slash + stem != key or suffix.lower() in members:
                    if members:
                        yield _pair(path, tar, key, members)
                    key, members = folder + slash + stem, {}
                members[suffix.lower()] = member
            if members:
                yield _pair(path, tar, key, members)
            with open(path, "rb") as file:
                file.seek(tar.offset)
                if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    yield BadRow("truncated", str(path), "the shard has no end mark: pairs may be missing")
    except (tarfile.TarError, EOFError, OSError) as error:
        with open(path, "rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        reason = "gunzip it first" if is_gzip else error if os.path.getsize(path) else "it is empty"
        yield BadRow("truncated", str(path), f"the shard is truncated or not an uncompressed tar ({reason})")


def _refuse_unsafe(path: Path, member: tarfile.TarInfo) -> None:
    problems = {
        "points outside the archive": member.name.startswith("/") or ".." in member.name.split("/"),
        f"is a link to {member.linkname!r}": member.issym() or member.islnk(),
        "has an invalid size": member.size < 0,
        "is not a regular file": not member.isfile() or member.issparse(),
        "may be a pickle, which can run code": PICKLES.search(member.name),
    }
    for problem, found in problems.items():
        if found:
            raise ValueError(f"{path} is refused: its member {member.name!r} {problem}")


def _pair(path: Path, tar: tarfile.TarFile, key: str, members: Members) -> Row | BadRow:
    location, values = f"{path}: {key}", None
    image = next((member for suffix, member in members.items() if IMAGE_SUFFIX.search(f".{suffix}")), None)
    if image is None:
        return BadRow("missing file", location, f"no image among its members ({', '.join(sorted(members))})")
    if image.offset_data + image.size > os.path.getsize(path):
        return BadRow("truncated", location, "the shard ends inside the image")
    text = next((members[suffix] for suffix in CAPTION_MEMBERS if suffix in members), None)
    lines = _read(tar, text).decode("utf-8-sig", "surrogateescape").splitlines() if text else []
    try:
        values = json.loads(_read(tar, members["json"])) if "json" in members else None
    except (ValueError, RecursionError) as error:
        if not lines:
            return BadRow("broken line", f"{location}.json", f"not JSON ({error})")
    values = values if isinstance(values, dict) else {}
    caption = caption_texts(values.get("caption") or values.get("text"))
    captions = caption_texts(values.get("captions")) or lines or caption or [""]
    return Row(image.name, captions, 0, "", split_from_name(path.name), str(path), image.offset_data, image.size)


def split_from_name(name: str) -> str:
    """The split that the name of a shard or Parquet file starts with, if any."""
    prefix = re.match(r"(train|val|valid|validation|dev|held-out|test)[-_.]", name, re.I)
    return prefix[1] if prefix else ""


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None  # links were refused
    return file.read(MAX_CAPTION_BYTES)
