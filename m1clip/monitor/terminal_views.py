"""What a terminal shows of a run, as text of a given size. Knows no keys and no clocks."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from rich.text import Text

from m1clip.format import ago, duration, percent, printable
from m1clip.monitor import curves
from m1clip.monitor.log import Followed, number
from m1clip.monitor.text_plot import Line, bar, beside, block, plot
from m1clip.monitor.values import figure

# Colors by name are the terminal's own: they are readable on its background, dark or light.
COLORS = ("blue", "red", "green", "magenta", "yellow", "cyan")
STYLES = (*COLORS, *(f"bright_{color}" for color in COLORS))
STATES = {"running": "green", "finished": "blue", "dead": "red", "failed": "red", "gone": "red"}
PHASES = {"wait": "magenta", "copy": "cyan", "forward": "blue", "backward": "green", "optimizer": "yellow"}
LEARNING = ("loss", "accuracy", "mean_r1", "temperature", "lr", "grad_norm")
HEALTH = {
    "alignment (0 perfect, about 2 strangers)": ("alignment",),
    "uniformity image / text (0 collapsed, about -4 spread)": ("uniformity_image", "uniformity_text"),
    "modality gap (at most 2)": ("modality_gap",),
    "directions in use, images / captions": ("effective_rank_image", "effective_rank_text"),
}
RECENT = 50
AS_OF = {"loss": 10, "accuracy": 10, "grad_norm": 10, "lr": 1, "temperature": 1}
"""Of how many of the last steps the value shown is the mean; of others, RECENT."""
HIDDEN = ("kind", "step", "time", "event", "line", "rows")


def header(one: Followed, width: int) -> Text:
    """What and how far; why it is not going on, if so; how good."""
    now = one.summary
    state, total = now.get("state", "unknown"), now.get("total")
    step = now.get("step") or 0
    step = step if state == "running" else max(step, one.log.latest)  # the status may be older than the log
    first = Text.assemble((printable(one.name), "bold"), "  ", (state, STATES.get(state, "yellow")))
    first.append(f"  step {step:,}" + (f" of {total:,}" if total else ""))
    if total:
        first.append(f"  {percent(step / total)} ").append(bar(step / total, max(4, min(30, width - 62))), "green")
    if now.get("eta_s") is not None:
        first.append(f" {duration(now['eta_s'])} to go")
    first.append(f"  {printable(now.get('device') or '')}", "dim")
    first.truncate(width, overflow="ellipsis")
    last = standing(one)
    last.truncate(width, overflow="ellipsis")
    return Text("\n").join([first, *trouble(one, width), last])


def trouble(one: Followed, width: int) -> list[Text]:
    """What is wrong with it, and how a run that is dead goes on; in full, for it may have to be typed."""
    now = one.summary
    if not (now.get("trouble") or now.get("reason")):
        return []
    words = printable(now.get("trouble") or now["reason"]).replace("\n", " ")
    if now.get("state") in ("dead", "failed"):
        words += f"; m1clip train --resume --name {printable(shlex.quote(str(one.run.path)))} goes on"
    style = "yellow" if now.get("state") == "stopped" else "red"
    return [Text(line, style) for line in textwrap.wrap(words, width, break_on_hyphens=False)]


def standing(one: Followed) -> Text:
    now, log = one.summary, one.log
    if log.unread > 0.01 and log.size - log.offset > 1e6:
        return Text(f"reading its log: {percent(1 - log.unread)}", "dim")
    parts = []
    if (loss := log.recent("loss", AS_OF["loss"])) is not None:
        parts.append(f"loss {said(loss, 'loss')} (chance {said(curves.chance(log, 'loss'), 'loss')})")
    if (last := log.last("eval")) and last.get("mean_r1") is not None:
        parts.append(f"validation R@1 {percent(last['mean_r1'])} (chance {percent(last.get('chance_r1'))})")
    if now.get("state") != "running":
        parts.append(ago(now.get("time")))
    return Text(", ".join(parts) or "no step has been logged yet", "dim")


def said(value: float | None, key: str) -> str:
    return "–" if value is None or not math.isfinite(value) else curves.said(key)(value)


def learning(runs: Sequence[Followed], width: int, height: int, smooth: int = 0) -> Text:
    """The six curves of the first run, with those of the others behind."""
    keys, across = LEARNING, 3 if width >= 120 else 2
    down = len(keys) // across
    legend = names(runs, width) if len(runs) > 1 else None
    tall = max(4, (height - (1 if legend else 0)) // down)
    wide = width // across
    rows = [
        beside([curve(runs, key, wide - 1, tall, smooth) for key in keys[start : start + across]], wide)
        for start in range(0, len(keys), across)
    ]
    return Text("\n").join([*([legend] if legend else []), *rows])


def names(runs: Sequence[Followed], width: int) -> Text:
    made = Text()
    for one, style in zip(runs, STYLES, strict=False):
        made.append("━ ", style).append(f"{printable(one.name)}  ")
    made.truncate(width, overflow="ellipsis")
    return made


def curve(runs: Sequence[Followed], key: str, width: int, height: int, smooth: int = 0) -> Text:
    """One curve of all runs, each value the mean of `smooth` steps; 0 is a hundredth of all."""
    lines, levels = [], dict[float, None]()
    for one, style in zip(runs, STYLES, strict=False):
        x, y = curves.points(one.log, key, window=smooth)
        lines.append(Line(x, np.log10(np.where(y > 0, y, np.nan)) if curves.CURVES[key].log else y, style))
        if (level := curves.chance(one.log, key)) is not None:
            levels[level] = None
    kind, log = curves.CURVES[key].kind, runs[0].log
    now = log.recent(key, AS_OF.get(key, RECENT)) if kind == "step" else number((log.last(kind) or {}).get(key))
    title = f"{curves.CURVES[key].title.partition(',')[0]} {said(now, key)}"
    title += f"  (chance {', '.join(said(level, key) for level in levels)})" if levels else ""
    say = curves.said(key)
    if curves.CURVES[key].log:
        return plot(title, lines, width, height, lambda value, digits: say(10**value, digits))
    return plot(title, lines, width, height, say, list(levels))


def speed(one: Followed, width: int, height: int) -> Text:
    """What a step's time goes to, and how the machine fares."""
    left = [*phases(one, width // 2 - 1), Text(), *memory(one, width // 2 - 1)]
    right = machine(one, width // 2 - 1)
    tall = max(len(left), len(right))
    top = beside([block(left, tall), block(right, tall)], width // 2)
    room = height - tall - 1
    if room < 4:
        return top
    below = [curve([one], key, width // 2 - 1, room) for key in ("step_ms", "rss_gb")]
    return Text("\n").join([top, Text(), beside(below, width // 2)])


def phases(one: Followed, width: int) -> list[Text]:
    means = {name: one.log.recent(f"{name}_ms", RECENT) for name in PHASES}
    whole = one.log.recent("step_ms", RECENT)
    head = f"a step {said(whole, 'step_ms')}, {said(one.log.rate(RECENT), 'pairs_per_s')} pairs/s"
    lines = [Text.assemble((head, "bold"), (f" (last {min(RECENT, len(one.log))})", "dim"))]
    total = sum(value for value in means.values() if value is not None)
    for name, style in PHASES.items():
        value = means[name]
        if value is None or not total:
            lines.append(Text(f"{name:>9}  –", "dim"))
            continue
        made = Text(f"{name:>9} ").append(bar(value / total, max(4, width - 30)), style)
        lines.append(made.append(f" {said(value, 'step_ms'):>8} {100 * value / total:3.0f} %"))
    return lines


def memory(one: Followed, width: int) -> list[Text]:
    last = one.log.last("logger") or {}
    parts = {name: number(value) for name, value in (last.get("memory_gb") or {}).items()}
    parts = {name: value for name, value in parts.items() if value > 0}
    lines = [Text(f"memory {gb(last.get('rss_gb'))}, peak {gb(last.get('peak_rss_gb'))}", "bold")]
    most = max(parts.values(), default=0.0)
    for name, value in parts.items():
        made = Text(f"{name[:11]:>11} ").append(bar(value / most if most else 0, max(4, width - 24)), "cyan")
        lines.append(made.append(f" {gb(value):>9}"))
    device = f", device {gb(last['device_gb'])}" if last.get("device_gb") is not None else ""
    lines.append(Text(f"free {gb(last.get('available_gb'))}, swap {gb(last.get('swap_used_gb'))}{device}", "dim"))
    return lines


def machine(one: Followed, width: int) -> list[Text]:
    last = one.log.last("logger") or {}
    lines = [Text(printable(str(one.machine.get("chip") or "machine unknown"))[:width], "bold")]
    cores = last.get("cpu_percent") or []
    wide = max(4, width - 14)
    if len(cores) > 8:  # two a line
        wide = max(3, width // 2 - 12)
    cells = [
        Text(f"core {place:>2} ").append(bar(number(value) / 100, wide), "green").append(f"{number(value):4.0f}%")
        for place, value in enumerate(cores)
        if math.isfinite(number(value))
    ]
    step = 2 if len(cores) > 8 else 1
    lines += [Text("  ").join(cells[start : start + step]) for start in range(0, len(cells), step)]
    heat, watts, joules = (last.get(key) for key in ("temperature_c", "power_w", "joules"))
    lines.append(Text(f"heat {unit(heat, '°C')}, power {unit(watts, 'W')}, drawn {energy(joules)}"))
    lines.append(Text(f"disk free {gb(last.get('disk_free_gb'))}"))
    if last.get("time"):
        lines.append(Text(f"looked {ago(last['time'])}, at step {last['step']:,}", "dim"))
    else:
        every = one.config.get("inspect_every")
        lines.append(Text("not looked at yet" + (f"; every {every} steps" if every else ""), "dim"))
    return lines


def gb(value: Any) -> str:
    known = number(value)
    if not math.isfinite(known):
        return "–"
    return f"{known:.2f} GB" if known >= 0.1 or known == 0 else f"{1000 * known:.1f} MB"


def unit(value: Any, what: str) -> str:
    return f"{number(value):.0f} {what}" if math.isfinite(number(value)) else "–"


def energy(joules: Any) -> str:
    return f"{number(joules) / 3600:.2f} Wh" if math.isfinite(number(joules)) else "–"


def gradients(one: Followed, width: int) -> Text:
    """Norms by block, as they were at the last look; then whether the space of embeddings is in use."""
    last = one.log.last("logger")
    if not last:
        return Text("gradients are looked at every --logger-every steps; not yet", "dim")
    norms = {name: number(value) for name, value in (last.get("grad_norms") or {}).items()}
    weights = {name: number(value) for name, value in (last.get("weight_norms") or {}).items()}
    wide = width // 2 if width >= 70 else width
    head = Text(f"{'block':15} {'gradient':>{max(4, wide - 34) + 8}} {'/weight':>7}", "dim")
    rows = dict(zip(norms, norm_rows(norms, weights, wide), strict=True))
    towers = [[row for name, row in rows.items() if name.startswith(way)] for way in ("vision", "text")]
    rest = [row for name, row in rows.items() if not name.startswith(("vision", "text"))]
    tall = 1 + max(map(len, towers))
    sides = [block([head, *tower], tall if wide < width else 1 + len(tower)) for tower in towers]
    title = f"gradients by block at step {last['step']:,}, before clipping (bars: logarithmic)"
    lines = [Text(title, "bold"), *([beside(sides, wide)] if wide < width else sides), *rest, Text()]
    lines += [Text("the space of the last batch looked at", "bold")]
    for words, keys in HEALTH.items():
        lines.append(Text(f"{words}: " + " / ".join(figure(last.get(key), ".3g") for key in keys)))
    return Text("\n").join(lines)


def norm_rows(norms: dict[str, float], weights: dict[str, float], wide: int) -> list[Text]:
    """A bar for each norm on a logarithmic scale, the number, and its part of the weights' norm."""
    logs = {name: math.log10(value) for name, value in norms.items() if value > 0}
    low, high = min(logs.values(), default=0.0) - 0.3, max(logs.values(), default=1.0)
    made = []
    for name, value in norms.items():
        part = (logs.get(name, low) - low) / (high - low)
        ratio = value / weights[name] if weights.get(name) else math.nan
        line = Text(f"{name.replace('_projection', '.proj')[:15]:15} ")
        line.append(bar(part, max(4, wide - 34)), "blue").append(f" {figure(value, '.2g'):>7}")
        made.append(line.append(f" {figure(ratio, '.0e'):>7}"))
    return made


def events(one: Followed, width: int, most: int | None = None) -> Text:
    """What happened, the newest first; diagnoses stand out."""
    found = one.log.events[::-1]
    lines = []
    for event in found[:most]:
        time = number(event.get("time"))
        when = datetime.fromtimestamp(time).strftime("%d %b %H:%M:%S") if 0 < time < 1e11 else "–"
        words = told(event)
        bad = event.get("event") not in ("start", "resume", "chunk", "saved again", "loss scale halved")
        lines.append(Text.assemble((f"{when}  step {event['step']:>6,}  ", "dim"), (words, "yellow" if bad else "")))
    if broken := one.log.broken:
        words = "one line" if len(broken) == 1 else f"{len(broken):,} lines"
        lines.append(Text(f"{words} of metrics.jsonl cannot be read (the first: {broken[0]:,})", "red"))
    return Text("\n").join(lines or [Text("nothing has happened yet", "dim")])


def told(event: dict[str, Any]) -> str:
    """An event in words: its name, and what else its line says."""
    what = event.get("event")
    if what == "diagnosis":
        return printable(f"{event.get('about')}: {event.get('text')}")
    if what == "chunk":
        return printable(f"{event.get('chunk')} pairs at once: {event.get('reason')}")
    if what in ("start", "resume") and not event.get("skipped_rows"):
        return str(what)
    left = {key: value for key, value in event.items() if key not in HIDDEN}
    shown = ", ".join(
        f"{key.replace('_', ' ')} {', '.join(map(str, value[:3])) if isinstance(value, list) else value}"
        for key, value in left.items()
    )
    return printable(f"{what}" + (f": {shown}" if shown else ""))


def snapshot(runs: Sequence[Followed], width: int) -> Text:
    """Everything once, for a script or a mail."""
    one = runs[0]
    parts = [header(one, width), learning(runs, width, 21 if width < 120 else 16), speed(one, width, 0)]
    parts += [gradients(one, width), Text("events", "bold").append("\n").append(events(one, width, 12))]
    return Text("\n\n").join(parts)
