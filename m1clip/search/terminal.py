"""Thumbnails in terminals that show images: the protocols of kitty and iTerm2."""

import io
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from m1clip.decode import MAX_BYTES
from m1clip.files import read_file
from m1clip.search.thumbnails import make_thumbnail

ROWS = 8  # lines of text that a thumbnail is high
KITTY_CHUNK = 4096  # bytes of base64 in one command
MIN_KONSOLE = 220400  # 22.04


def image_protocol(variables: Mapping[str, str]) -> str | None:
    """`kitty` or `iterm`, by the environment variables of a terminal; None if it shows no images or is not known.

    tmux and screen do not pass images on by default.
    """
    term, program = variables.get("TERM", ""), variables.get("TERM_PROGRAM", "")
    if "TMUX" in variables or re.match(r"screen|tmux|dumb", term):
        return None
    if "KITTY_WINDOW_ID" in variables or term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return "kitty"
    if program in ("iTerm.app", "WezTerm", "mintty") or variables.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    version = variables.get("KONSOLE_VERSION", "")
    return "kitty" if version.isdecimal() and int(version) >= MIN_KONSOLE else None


def inline_image(jpeg: bytes, protocol: str) -> str:
    """The escape sequence that shows an image below the cursor."""
    if protocol == "iterm":
        data = b64encode(jpeg).decode()
        return f"\33]1337;File=inline=1;size={len(jpeg)};height={ROWS};preserveAspectRatio=1:{data}\a\n"
    png = io.BytesIO()
    Image.open(io.BytesIO(jpeg)).save(png, "PNG", compress_level=1)
    data = b64encode(png.getvalue()).decode()
    chunks = [data[start : start + KITTY_CHUNK] for start in range(0, len(data), KITTY_CHUNK)]
    control = [f"a=T,f=100,q=2,r={ROWS},"] + [""] * (len(chunks) - 1)
    is_more = [1] * (len(chunks) - 1) + [0]
    parts = zip(control, is_more, chunks, strict=True)
    return "".join(f"\33_G{keys}m={more};{chunk}\33\\" for keys, more, chunk in parts) + "\n"


def inline_thumbnail(path: Path, variables: Mapping[str, str]) -> str:
    """The escape sequence of an image file; nothing if the terminal shows none or the file cannot be read any more."""
    protocol = image_protocol(variables)
    try:
        return inline_image(make_thumbnail(path, read_file(path, MAX_BYTES)), protocol) if protocol else ""
    except (OSError, ValueError):
        return ""
