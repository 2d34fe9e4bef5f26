"""Flags from a dataclass: its fields are the flags, its docstring is the head of the help."""

from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What every sweep has: where it goes, and whether it is begun anew."""

    again: bool = False
    """Begin anew where the same was interrupted less than a day ago."""
    out: Path = Path("bench")
    """Folder for the page and the images."""
    json: bool = False
    """Print everything as one line of JSON instead of tables."""


def read(kind: type[T], prog: str, words: list[str], default: T | None = None) -> T:
    """Prints the help, or what is wrong with the nearest flags, and exits by itself where that is due."""
    start: dict[str, Any] = {} if default is None else {"default": default}
    # tyro runs lines together, but not indented ones: these are the examples.
    shown = "\n  ".join(cleandoc(kind.__doc__ or "").splitlines())
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    made: T = tyro.cli(kind, prog=prog, args=words, description=shown, config=config, **start)
    return made
