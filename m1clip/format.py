"""Numbers, sizes and durations as text, and text that is safe to print. An unknown value is a dash."""

import difflib
import html
import math
import re
import time
from collections.abc import Iterable

UNKNOWN = "–"
Z = 1.959964  # standard errors on each side of a 95 % interval


def number(value: float | None, digits: int = 3, unit: str = "") -> str:
    """Significant digits with thousands separators: 1,234, 0.0123."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    rounded = float(f"{value:.{digits}g}")
    places = max(0, digits - 1 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    text = f"{value:.{digits}g}" if places > 6 else f"{value:,.{places}f}"
    return f"{text} {unit}".rstrip()


def percent(fraction: float | None) -> str:
    if fraction is None or math.isnan(fraction):
        return UNKNOWN
    if 0.9995 <= fraction < 1:  # never rounded up to 100 %
        return f"{math.floor(1e4 * fraction) / 100:.2f} %"
    return f"{100 * fraction:.1f} %" if fraction >= 0.001 or fraction == 0 else f"{100 * fraction:.2g} %"


def wilson_interval(fraction: float, count: int) -> tuple[float, float]:
    """The 95 % interval of a fraction of `count` trials."""
    if count < 1:
        return 0.0, 1.0
    center = (fraction + Z * Z / (2 * count)) / (1 + Z * Z / count)
    variance = max(0.0, fraction * (1 - fraction) / count + Z * Z / (4 * count * count))
    half = Z / (1 + Z * Z / count) * math.sqrt(variance)
    return max(0.0, center - half), min(1.0, center + half)


def interval(fraction: float, count: float) -> str:
    """The 95 % interval of a fraction, in percent without its sign."""
    low, high = wilson_interval(fraction, int(count))
    return f"{100 * low:.1f}–{100 * high:.1f}"


def with_interval(fraction: float | None, count: float | None) -> str:
    """A fraction in percent with its 95 % interval."""
    if fraction is None or not count:
        return percent(fraction)
    return f"{percent(fraction)} ({interval(fraction, count)})"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    seconds = round(seconds)
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.1f} days"
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"


def milliseconds(ms: float) -> str:
    if ms >= 2e6:
        return f"{ms / 3.6e6:,.3g} h"
    return f"{ms / 1e3:,.4g} s" if ms >= 1e4 else f"{ms:,.0f} ms" if ms >= 100 else f"{ms:.3g} ms"


def ago(then: float | None) -> str:
    if then is None:
        return UNKNOWN
    seconds = max(0.0, time.time() - then)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def clock(then: float | None) -> str:
    """The local time of day, with the date if that is not today."""
    if then is None or not 0 < then < 1e11:
        return "an unknown time"
    moment, today = time.localtime(then), time.localtime()
    return time.strftime("%H:%M" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)


def file_size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Text from outside without control characters, which could change the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


def unescape_html(text: str) -> str:
    """Without HTML entities, twice, as CLIP's tokenizer does."""
    text = re.sub(r"&#(?=\d{4000})", "& #", text)  # a number that Python refuses to convert
    return html.unescape(html.unescape(text))


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error message: the names most like the one given, or all of them."""
    names = sorted(names)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(names)}"
