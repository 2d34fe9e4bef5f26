"""One file per command. The fields of its `Args` are flags, and their docstrings are help lines; `Args.check`
refuses flags that contradict each other, `Args.arrange` may change the order of words and flags; `main` runs the
command and returns the exit code, or None for 0.
"""

import re
import secrets
from collections.abc import Sequence, Set
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import cleandoc
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, NoReturn

import tyro
from tyro import _errors  # where tyro reports a wrong flag; the public interface only prints a box

from m1clip.config import require
from m1clip.files import read_file
from m1clip.web import LOOPBACK_HOSTS, Address

RunName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")]
KINDS = {"INT": "a whole number", "FLOAT": "a number"}  # of values, by tyro's words in the help


@dataclass(frozen=True)
class RunsFolder:
    runs: Path = Path("runs")
    """Folder of all runs."""


@dataclass(frozen=True)
class ServerFlags:
    """Where to listen. Fields that a command has only with --web are refused without it by `check_server`."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own needs --token."""
    port: int = 8265
    """Port; if it is taken, one of the next twenty."""
    token: str | None = None
    """Secret that clients need; `auto` generates one, @FILE is read from a file, as all users see flags."""
    open: bool = False
    """Open the browser."""

    def check_server(self, shows: str, is_server: bool = True) -> None:
        token = read_token(self.token)
        is_ascii = token is None or re.fullmatch(r"[!-~]+", token) is not None
        require(is_ascii, "--token must be ASCII without spaces; `auto` generates one")
        default = {
            field.name: field.default for field in fields(type(self)) if field.name in ServerFlags.__annotations__
        }
        are_default = all(getattr(self, name) == value for name, value in default.items())
        require(is_server or are_default, "--host, --port, --token and --open need --web")
        is_safe = self.host in LOOPBACK_HOSTS or bool(self.token)
        danger = f"--host {self.host} shows {shows} to other machines"
        require(is_safe, f"{danger}: it needs a --token (--token auto generates one)")
        require(0 < self.port < 65536, f"--port must be 1–65535, not {self.port}")

    @property
    def address(self) -> Address:
        is_file = str(self.token).startswith("@")
        return Address(self.host, self.port, read_token(self.token), self.open, shows_token=not is_file)


def read_token(given: str | None) -> str | None:
    """The token that --token asks for."""
    if given == "auto":
        return secrets.token_urlsafe(12)
    if given and given[0] == "@":
        return read_file(Path(given[1:]), 10_000).decode(errors="replace").strip()
    return given


def parse_flags(kind: Any, program: str, argv: Sequence[str]) -> Any:
    """Parse argv; prints help and exits where that is asked for. A wrong flag is a ValueError of one sentence."""
    # tyro joins lines, but not indented ones: these are the examples.
    description = "\n  ".join(cleandoc(kind.__doc__ or "").splitlines())
    keeps_argv = any(field.name == "argv" for field in fields(kind))  # to know which flags were given
    options: dict[str, Any] = {"prog": program, "description": description}
    options["config"] = (tyro.conf.AvoidSubcommands, tyro.conf.HelptextFromCommentsOff)
    options["default"] = kind(argv=tuple(argv)) if keeps_argv else tyro.MISSING_NONPROP

    def refuse(event: _errors.ParseErrorEvent) -> NoReturn:
        with redirect_stdout(StringIO()) as text, suppress(SystemExit):
            tyro.cli(kind, args=["--help"], **options)
        raise ValueError(explain_flag(event, program, argv, {*re.findall(r"--[a-z][\w.-]*", text.getvalue())}))

    with _errors.on_parse_error(refuse):
        args = tyro.cli(kind, args=kind.arrange(argv) if hasattr(kind, "arrange") else argv, **options)
    if hasattr(args, "check"):
        args.check()
    return args


def explain_flag(event: _errors.ParseErrorEvent, program: str, argv: Sequence[str], flags: Set[str]) -> str:
    """What is wrong with a command line, and what was expected; `flags` are those of the command."""
    see_help = f"{program} --help lists the flags"
    match event:
        case _errors.UnrecognizedArgs():
            word = event.tokens[0]
            if not word.startswith("-"):
                return f"unexpected argument {word!r}; {see_help}"
            close = get_close_matches(word.partition("=")[0], sorted(flags), n=3)
            suggestion = f"did you mean {' or '.join(close)}?" if close else see_help
            return f"no flag {word}; {suggestion}"
        case _errors.MissingArgs():
            names = [missing.arg.display_name() for missing in event.missing_arguments]
            names = [name if name.startswith("-") else name.upper() for name in names]
            return f"{program} needs {' and '.join(names)}; {see_help}"
        case _errors.InvalidChoice():
            return f"{event.argument.display_name()} must be {one_of(event.choices)}, not {event.value!r}"
        case _errors.BadValue():
            return f"{event.argument.display_name()} needs {describe_values(event.argument)}"
        case _errors.InstantiationFailure() if event.argument is not None:
            name = event.argument.display_name()
            return f"{name} must be {describe_values(event.argument)}, not {given_value(name, argv)!r}"[:300]
    return f"the flags cannot be parsed; {see_help}"


def one_of(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def describe_values(argument: Any) -> str:
    """INT|{auto} → a whole number or auto."""
    metavar = str(argument.lowered.metavar)
    words = [KINDS.get(word, word) for word in dict.fromkeys(re.findall(r"[\w.-]+", metavar))]
    is_list = metavar.startswith("[") and "..." in metavar
    return " or ".join(word for word in words if word.strip(".")) + (", one or several" if is_list else "")


def given_value(name: str, argv: Sequence[str]) -> str:
    """The value of a flag on a command line, as `--flag value` or `--flag=value`; its name may be `-f/--flag`."""
    names = name.replace("_", "-").split("/")
    for index, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") in names:
            return value if equals else " ".join(argv[index + 1 : index + 2])
    return " ".join(argv)
