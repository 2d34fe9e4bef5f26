"""One file per command. The fields of its `Args` are flags, and their docstrings are help lines; `Args.check`
refuses flags that contradict each other; `main` runs the command and returns the exit code, or None for 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Any

import tyro

RunName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]


@dataclass(frozen=True)
class RunsFolder:
    runs: Path = Path("runs")
    """Folder of all runs."""


def parse_flags(kind: Any, program: str, argv: Sequence[str]) -> Any:
    """Parse argv; prints help or an error with suggestions and exits where that is due."""
    # tyro joins lines, but not indented ones: these are the examples.
    description = "\n  ".join(cleandoc(kind.__doc__ or "").splitlines())
    config = (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)
    keeps_argv = any(field.name == "argv" for field in fields(kind))  # to know which flags were given
    default = kind(argv=tuple(argv)) if keeps_argv else tyro.MISSING_NONPROP
    args = tyro.cli(kind, prog=program, args=argv, description=description, config=config, default=default)
    if hasattr(args, "check"):
        args.check()
    return args
