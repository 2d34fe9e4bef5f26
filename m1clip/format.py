"""Numbers as people say them. What is unknown is a dash."""

import math
import time


def percent(part: float | None) -> str:
    if part is None:
        return "–"
    if 0.9995 <= part < 1:  # nearly all is not all
        return f"{math.floor(1e4 * part) / 100:.2f} %"
    return f"{100 * part:.1f} %" if part >= 0.001 or part == 0 else f"{100 * part:.2g} %"


def clock(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    seconds = round(seconds)
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def ago(then: float | None) -> str:
    if then is None:
        return "–"
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
