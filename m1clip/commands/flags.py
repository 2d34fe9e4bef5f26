"""Flags from a dataclass: fields are flags, field docstrings are help lines, the class docstring heads the help."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

T = TypeVar("T")
RunName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]


@dataclass(frozen=True)
class RunsFolder:
    runs: Path = Path("runs")
    """Folder of the runs."""


def parse_flags(kind: type[T], program: str, argv: Sequence[str], default: Any = tyro.MISSING_NONPROP) -> T:
    """Parse argv; prints help or an error with suggestions and exits where that is due."""
    # tyro joins lines, but not indented ones: these are the examples.
    description = "\n  ".join(cleandoc(kind.__doc__ or "").splitlines())
    config = (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)
    parsed: T = tyro.cli(kind, prog=program, args=argv, description=description, config=config, default=default)
    return parsed


def given_flags(argv: Sequence[str]) -> set[str]:
    """Names of the flags on a command line as field paths: --no-hflip is hflip, --model.head is model.head."""
    names = {word.partition("=")[0][2:].replace("-", "_") for word in argv if word.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}
