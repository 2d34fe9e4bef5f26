"""Flags from a dataclass: its fields are the flags, its docstring is the head of the help."""

from inspect import cleandoc
from typing import Any, TypeVar

import tyro

T = TypeVar("T")


def read(kind: type[T], prog: str, words: list[str], default: T | None = None) -> T:
    """Prints the help, or what is wrong with the nearest flags, and exits by itself where that is due."""
    start: dict[str, Any] = {} if default is None else {"default": default}
    # tyro runs lines together, but not indented ones: these are the examples.
    shown = "\n  ".join(cleandoc(kind.__doc__ or "").splitlines())
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)
    made: T = tyro.cli(kind, prog=prog, args=words, description=shown, config=config, **start)
    return made
