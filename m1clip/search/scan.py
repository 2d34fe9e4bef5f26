"""The image files of a folder: which there are, and whether they have changed."""

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import NamedTuple

from m1clip.decode import IMAGE_SUFFIX, RAW_SUFFIX

PLACEHOLDER = re.compile(r"\..+\.icloud")  # what older versions of macOS leave of a file that is only in iCloud
SF_DATALESS = 0x40000000  # macOS: the content is not on this disk, and reading would download it


class Version(NamedTuple):
    """Equal as long as a file is the same. The change time notices edits that keep size and modification time."""

    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> "Version":
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass
class Found:
    """Files by their path in bytes, as the system has it, and what was passed over."""

    files: dict[bytes, Version] = field(default_factory=dict)
    placeholders: int = 0  # files whose content is only in iCloud
    unreadable: dict[bytes, str] = field(default_factory=dict)  # folders that cannot be listed, with the reason


def scan_folder(folder: Path, exclude: Sequence[str] = (), follow_links: bool = False) -> Found:
    """All images below a folder, without hidden ones. A folder is visited once, whatever links to it."""
    found, visited = Found(), set[tuple[int, int]]()
    patterns = [nfc(os.path.normpath(pattern)) for pattern in exclude if pattern]  # thumbs/ is thumbs
    patterns += [os.path.join(escape(nfc(str(folder))), pattern) for pattern in patterns if "/" in pattern]
    pending = [os.fsencode(folder)]
    while pending:
        path = pending.pop()
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                pending += list(scan_entries(entries, found, patterns, follow_links))
        except OSError as error:
            found.unreadable[path] = error.strerror or str(error)
    return found


def scan_entries(
    entries: Iterable[os.DirEntry[bytes]], found: Found, exclude: Sequence[str], follow_links: bool
) -> Iterator[bytes]:
    """Add the images of one folder, and yield its folders."""
    for entry in entries:
        name = os.fsdecode(entry.name)
        if name.startswith("."):  # also the ._ files of macOS on foreign disks
            found.placeholders += PLACEHOLDER.fullmatch(name) is not None
        elif exclude and is_excluded(name, os.fsdecode(entry.path), exclude):
            continue
        elif entry.is_dir(follow_symlinks=follow_links):
            yield entry.path
        elif IMAGE_SUFFIX.search(name) or RAW_SUFFIX.search(name):
            try:
                status = entry.stat()
            except OSError:  # a link to nothing, or a file that has just been removed
                continue
            if getattr(status, "st_flags", 0) & SF_DATALESS:
                found.placeholders += 1
            elif stat.S_ISREG(status.st_mode):
                found.files[entry.path] = Version.of(status)


def is_excluded(name: str, path: str, patterns: Sequence[str]) -> bool:
    """Whether a name or a whole path matches one of the patterns, in any Unicode form."""
    name, path = nfc(name), nfc(path)
    return any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in patterns)


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def existing_folder(folder: Path) -> Path:
    """A folder by the names that its disk has, so that one folder has one path.

    A name may be given with composed letters where the disk has them decomposed (é as e and an accent), or the
    other way round.
    """
    path = Path(os.path.abspath(folder.expanduser()))
    if not path.is_dir():
        path = respelled(path)
    if not path.is_dir():
        if path.exists():
            raise ValueError(f"{folder} is a file; search needs a folder of images")
        raise FileNotFoundError(f"there is no folder {folder}")
    return respelled(path.resolve())


def respelled(path: Path) -> Path:
    """The path with the spelling of each of its names that is on the disk."""
    spelled = Path(path.anchor)
    for name in path.parts[1:]:
        if not name.isascii():
            try:
                names = os.listdir(spelled)
            except OSError:
                names = []
            same = [other for other in names if nfc(other) == nfc(name)]
            name = name if name in names else next(iter(same), name)
        spelled /= name
    return spelled
