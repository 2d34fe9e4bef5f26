"""The views of the terminal monitor: a run as Rich text, tables, and line plots of Braille characters."""

import math
import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import numpy as np
from numpy.typing import NDArray
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from m1clip.format import UNKNOWN, ago, duration, file_size, number, percent, printable
from m1clip.monitor.curves import CURVES
from m1clip.monitor.log import RECENT_STEPS, STEP_PHASES, Array, Record, RunView, event_text, float_or_nan

Line = tuple[Array, Array, str]  # x, y and style
Range = tuple[float, float]
Dots = NDArray[np.bool_]
Tick = Callable[[float, int], str]  # formats a y value with a number of significant digits
# The terminal's own colors are readable on its background, dark or light.
COLORS = ("blue", "red", "green", "magenta", "yellow", "cyan")
LINE_STYLES = (*COLORS, *(f"bright_{color}" for color in COLORS))
STATE_STYLES = {"running": "green", "finished": "blue", "dead": "red", "failed": "red", "gone": "red"}
CURVES_SHOWN = ("loss", "accuracy", "mean_r1", "temperature", "lr", "grad_norm")
EMBEDDING_STATISTICS = ["alignment", "uniformity_image", "uniformity_text", "modality_gap"]
EMBEDDING_STATISTICS += ["effective_rank_image", "effective_rank_text"]
ROUTINE_EVENTS = ("start", "resume", "chunk", "saved again", "loss scale halved")
# Bits of the 4 x 2 dots of a Braille character.
BRAILLE_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])


def state_text(state: str, warning: str | None = None) -> Text:
    if warning:
        return Text(printable(f"{state}, {warning}"), "red")
    return Text(printable(state), STATE_STYLES.get(state, "yellow"))


def header_view(run: RunView, width: int) -> Text:
    """Name, state, progress and device; then problems, if any; then the scores."""
    summary = run.summary
    state, total, step = summary.get("state", "unknown"), summary.get("total"), summary.get("step") or 0
    if state != "running":
        step = max(step, run.log.last_step)  # the status may be older than the log
    progress = f"  step {step:,} of {total:,}  {percent(step / total)}" if total else f"  step {step:,}"
    device = f"  {printable(summary['device'])}" if summary.get("device") else ""
    left = f"  {duration(summary['eta_s'])} left" if summary.get("eta_s") is not None else ""
    name = Text(printable(run.name), "bold")
    name.truncate(max(20, width - len(f"  {state}{device}{progress}{left}")), overflow="ellipsis")
    line = Text.assemble(name, "  ", state_text(state), device, progress, left)
    lines = [line, *problem_lines(run, width), score_line(run)]
    for text in lines:
        text.truncate(width, overflow="ellipsis")
    return Text("\n").join(lines)


def problem_lines(run: RunView, width: int) -> list[Text]:
    """What is wrong with a run, and the command that resumes it if it is dead; never truncated."""
    state, problems = run.summary.get("state"), [run.summary.get("problem"), run.summary.get("reason")]
    if not any(problems):
        return []
    text = printable("; ".join(filter(None, problems))).replace("\n", " ")
    if state in ("dead", "failed"):
        text += f"; resume: m1clip train --resume --name {printable(shlex.quote(str(run.path)))}"
    style = "yellow" if state == "stopped" else "red"
    return [Text(line, style) for line in textwrap.wrap(text, width, break_on_hyphens=False)]


def score_line(run: RunView) -> Text:
    log = run.log
    reading = [f"newest steps; reading the history: {percent(run.fraction_read)}"] if log.start else []
    scores = [
        f"{curve.title} {curve.text(value)} (chance {curve.text(curve.chance_level(log))})"
        for curve in (CURVES["loss"], CURVES["mean_r1"], CURVES["zeroshot_accuracy"])
        if (value := curve.current(log)) is not None
    ]
    if run.summary.get("state") != "running":
        scores.append(ago(run.summary.get("time")))
    return Text(", ".join(reading + scores), "dim")


def in_columns(blocks: Sequence[RenderableType], columns: int) -> Table:
    headers = [Column(ratio=1, no_wrap=True, overflow="ellipsis") for _ in range(columns)]
    grid = Table.grid(*headers, padding=(0, 1, 0, 0), expand=True)
    for start in range(0, len(blocks), columns):
        grid.add_row(*blocks[start : start + columns])
    return grid


def bar_table(rows: Mapping[str, tuple[float, str]], color: str) -> Table:
    """A name, a bar of a fraction and a label per row."""
    columns = (Column(no_wrap=True), Column(ratio=1, min_width=4), Column(no_wrap=True, justify="right"))
    table = Table.grid(*columns, padding=(0, 1, 0, 0), expand=True)
    for name, (fraction, label) in rows.items():
        table.add_row(Text(name), Bar(1.0, 0.0, fraction, color=color), Text(label))
    return table


def curves_view(runs: Sequence[RunView], width: int, height: int, smooth: int = 0) -> Group:
    """Six curves of the first run, with those of the others behind them."""
    columns = 3 if width >= 120 else 2
    styled = zip(runs, LINE_STYLES, strict=False)
    names = Text.assemble(*(part for run, style in styled for part in (("━ ", style), f"{printable(run.name)}  ")))
    legend = [in_columns([names], 1)] if len(runs) > 1 else []
    plot_height = max(4, (height - len(legend)) // (len(CURVES_SHOWN) // columns))
    plots = [curve_plot(runs, key, width // columns - 1, plot_height, smooth) for key in CURVES_SHOWN]
    return Group(*legend, in_columns(plots, columns))


def curve_plot(runs: Sequence[RunView], key: str, width: int, height: int, smooth: int = 0) -> Text:
    """One curve of all runs; `smooth` is the averaging window in steps, 0 is 1 % of all steps."""
    curve, lines = CURVES[key], []
    for run, style in zip(runs, LINE_STYLES, strict=False):
        x, y = curve.points(run.log, window=smooth)
        lines.append((x, np.log10(np.where(y > 0, y, np.nan)) if curve.log_axis else y, style))
    chances = [curve.chance_level(run.log) for run in runs]
    levels = list(dict.fromkeys(level for level in chances if level is not None))
    title = f"{curve.title} {curve.text(curve.current(runs[0].log))}"
    note = "  (log)" if curve.log_axis else f"  (chance {', '.join(map(curve.text, levels))})" if levels else ""
    title += note if len(title + note) <= width else ""

    def tick(value: float, digits: int) -> str:
        value = 10**value if curve.log_axis else 100 * value if curve.unit == "%" else value
        return number(value, digits, curve.unit)

    return line_plot(title, lines, width, height, tick, levels)


def line_plot(title: str, lines: list[Line], width: int, height: int, tick: Tick, levels: Sequence[float] = ()) -> Text:
    """A title, the lines with ticks on the left, and the range of x below; `levels` are dotted."""
    rows, x_range = height - 2, value_range([x for x, _, _ in lines])
    y_range = value_range([*(without_outliers(y) for _, y, _ in lines), np.array(levels)])
    if x_range is None or y_range is None or rows < 1:
        return Text.assemble((title[:width], "bold"), ("\n  no data yet", "dim"), "\n" * (height - 2))
    top, middle, bottom = tick_labels(y_range, tick)
    label_width = max(map(len, (top, middle, bottom))) + 1
    plot_width = max(4, width - label_width - 1)
    labels = {(rows - 1) // 2: middle, rows - 1: bottom, 0: top}  # the last one wins if they share a row
    level_dots = np.zeros((4 * rows, 2 * plot_width), bool)
    level_dots[np.rint(dot_rows(np.array(levels), y_range, 4 * rows)).astype(int), ::4] = True
    layers = [(level_dots, "dim")]
    for x, y, style in reversed(lines):  # the first is drawn last, over the others
        layers.append((line_dots(x, y, x_range, y_range, level_dots.shape), style))
    body = [
        Text.assemble((f"{labels.get(index, ''):>{label_width - 1}} ", "dim"), row)
        for index, row in enumerate(braille_rows(layers))
    ]
    first, last = f"{x_range[0]:,.0f}", f"{x_range[1]:,.0f}"
    x_labels = " " * label_width + first + last.rjust(max(1, plot_width - len(first)))
    return Text("\n").join([Text(title[:width], "bold"), *body, Text(x_labels, "dim")])


def tick_labels(y_range: Range, tick: Tick) -> list[str]:
    """The top, the middle and the bottom of the axis, with enough digits to differ."""
    low, high = y_range
    for digits in (3, 4, 5, 6):
        labels = [tick(value, digits) for value in (high, (low + high) / 2, low)]
        if len(set(labels)) == len(labels):
            break
    return labels


def line_dots(x: Array, y: Array, x_range: Range, y_range: Range, shape: tuple[int, ...]) -> Dots:
    """Each column of dots spans its values and reaches to the column before it, unless there is a gap."""
    height, width = shape
    if not len(x):
        return np.zeros(shape, bool)
    position = (x - x_range[0]) / (x_range[1] - x_range[0]) * (width - 1)
    rows = dot_rows(y, y_range, height)
    between = np.interp(np.arange(width), position, rows, math.nan, math.nan)  # NaN next to a NaN
    before = np.where(np.isfinite(between), np.concatenate([[math.nan], between[:-1]]), math.nan)
    low, high = np.fmin(between, before), np.fmax(between, before)
    columns = np.clip(position + 0.5, 0, width - 1).astype(int)
    np.fmin.at(low, columns, rows)
    np.fmax.at(high, columns, rows)
    row = np.arange(height)[:, None]
    return (np.rint(low) <= row) & (row <= np.rint(high))


def dot_rows(y: Array, y_range: Range, height: int) -> Array:
    """Rows of dots from the bottom; NaN where y is."""
    return np.clip((y - y_range[0]) / (y_range[1] - y_range[0]), 0, 1) * (height - 1)


def braille_rows(layers: Sequence[tuple[Dots, str]]) -> list[Text]:
    """Characters of 4 x 2 dots from the top; each has the style of the last layer with a dot in it."""
    height, width = layers[0][0].shape
    blocks = [(dots[::-1].reshape(height // 4, 4, width // 2, 2), style) for dots, style in layers]
    styles = np.full((height // 4, width // 2), "", object)
    for dots, style in blocks:
        styles[dots.any((1, 3))] = style
    bits = np.einsum("hrwc,rc->hw", np.any([dots for dots, _ in blocks], axis=0), BRAILLE_BITS)
    return [
        Text.assemble(*((chr(0x2800 + bit) if bit else " ", style) for bit, style in zip(*row, strict=True)))
        for row in zip(bits.tolist(), styles.tolist(), strict=True)
    ]


def without_outliers(y: Array) -> Array:
    """The range of the values without the 1 % that would flatten the curve."""
    known = np.extract(np.isfinite(y), y)
    return known if len(known) < 50 else np.array([*np.quantile(known, [0.005, 0.995]), known[-1]])


def value_range(arrays: Sequence[Array]) -> Range | None:
    """Minimum and maximum of the known values, never equal; None if there are none."""
    values = np.concatenate([[], *arrays])
    known = np.extract(np.isfinite(values), values)
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    margin = 0.0 if high > low else 0.5 * (abs(high) or 1.0)
    return low - margin, high + margin


def speed_view(run: RunView, width: int) -> Group:
    """Step time by phase, memory by part, and the machine; below, their curves."""
    left = Group(*phase_lines(run), Text(), *memory_lines(run.log.last("diagnostics")))
    plots = [curve_plot([run], key, width // 2 - 1, 8) for key in ("step_ms", "rss_gb")]
    return Group(in_columns([left, Group(*machine_lines(run))], 2), Text(), in_columns(plots, 2))


def phase_lines(run: RunView) -> list[RenderableType]:
    means = {phase: run.log.recent_mean(f"{phase}_ms", RECENT_STEPS) for phase in STEP_PHASES}
    known = {phase: ms for phase, ms in means.items() if ms is not None}
    total = sum(known.values()) or 1.0
    step_ms, speed = run.log.recent_mean("step_ms", RECENT_STEPS), run.log.recent_rate(RECENT_STEPS)
    title = (f"step {number(step_ms, unit='ms')}, {number(speed)} pairs/s", "bold")
    rows = {phase: (ms / total, f"{number(ms, unit='ms')} {100 * ms / total:3.0f} %") for phase, ms in known.items()}
    return [Text.assemble(title, (f" (last {min(RECENT_STEPS, len(run.log))})", "dim")), bar_table(rows, "blue")]


def memory_lines(record: Record) -> list[RenderableType]:
    parts = {name: gb for name, gb in (record.get("memory_gb") or {}).items() if float_or_nan(gb) > 0}
    bars = {name: (gb / max(parts.values()), gigabytes(gb)) for name, gb in parts.items()}
    title = f"memory {gigabytes(record.get('rss_gb'))} RSS, peak {gigabytes(record.get('peak_rss_gb'))}"
    machine = f"available {gigabytes(record.get('available_gb'))}, swap {gigabytes(record.get('swap_used_gb'))}"
    machine += "" if record.get("device_gb") is None else f", device {gigabytes(record['device_gb'])}"
    return [Text(title, "bold"), bar_table(bars, "cyan"), Text(machine, "dim")]


def machine_lines(run: RunView) -> list[RenderableType]:
    record, epoch = run.log.last("diagnostics"), run.log.last("epoch")
    loads = enumerate(record.get("cpu_percent") or [])
    cores = [bar_table({f"core {core}": (load / 100, f"{load:.0f}%")}, "green") for core, load in loads]
    sensors = (number(record.get("temperature_c"), 2, "°C"), number(record.get("power_w"), 2, "W"))
    lines = [f"CPU {sensors[0]}, power {sensors[1]}, energy {watt_hours(record.get('joules'))}"]
    if epoch.get("joules") is not None:
        lines.append(f"last epoch {watt_hours(epoch['joules'])}, R@1 per Wh {number(epoch.get('mean_r1_per_wh'))}")
    lines.append(f"disk free {gigabytes(record.get('disk_free_gb'))}")
    measured = f"measured {ago(record['time'])}, at step {record['step']:,}" if record.get("time") else None
    title = Text(printable(str(run.machine.get("chip") or "machine unknown")), "bold")
    bars = in_columns(cores, 2 if len(cores) > 8 else 1)
    return [title, bars, *map(Text, lines), Text(measured or "no diagnostics logged yet", "dim")]


def gigabytes(gb: float | None) -> str:
    return UNKNOWN if gb is None or not math.isfinite(gb) else file_size(1e9 * gb)


def watt_hours(joules: float | None) -> str:
    return number(None if joules is None else joules / 3600, unit="Wh")


def gradients_view(run: RunView, width: int) -> RenderableType:
    record = run.log.last("diagnostics")
    if not record:
        return Text("gradient norms are logged with the diagnostics (every 5 x --log-every steps); none yet", "dim")
    norms, weights = record.get("grad_norms", {}), record.get("weight_norms", {})
    logs = {name: math.log10(norm) for name, norm in norms.items() if float_or_nan(norm) > 0}
    low, high = min(logs.values(), default=0.0) - 0.3, max(logs.values(), default=1.0)
    towers: dict[str, dict[str, tuple[float, str]]] = {"vision": {}, "text": {}, "": {}}
    for name, norm in norms.items():
        ratio = f"{norm / weights[name]:.0e}" if norm is not None and weights.get(name) else UNKNOWN
        bar = (logs.get(name, low) - low) / (high - low), f"{number(norm, 2):>7} {ratio:>6}"
        tower = next(tower for tower in towers if name.startswith(tower))
        towers[tower][f"{name.replace('_projection', '.proj'):15}"] = bar  # one width: bars of towers are compared
    title = f"gradient norms at step {record['step']:,}, before clipping; / weight norm (log bars)"
    statistics = [Text(f"{CURVES[key].title}: {number(record.get(key))}") for key in EMBEDDING_STATISTICS]
    blocks = in_columns([bar_table(tower, "blue") for tower in towers.values()], 2 if width >= 70 else 1)
    return Group(Text(title, "bold"), blocks, Text(), Text("embeddings of that batch", "bold"), *statistics)


def events_view(run: RunView, limit: int | None = None) -> Text:
    """Events, the newest first; what is not routine is colored."""
    lines = []
    for event in run.log.events[::-1][:limit]:
        style = "" if event.get("event") in ROUTINE_EVENTS else "yellow"
        head = f"{local_time(event.get('time'))}  step {event['step']:>6,}  "
        lines.append(Text.assemble((head, "dim"), (event_text(event), style)))
    if bad := run.log.bad_line_count:
        count = "1 line" if bad == 1 else f"{bad:,} lines"
        lines.append(Text(f"{count} of metrics.jsonl cannot be parsed (first: line {run.log.bad_lines[0]:,})", "red"))
    return Text("\n").join(lines or [Text("no events yet", "dim")])


def local_time(seconds: object) -> str:
    time = float_or_nan(seconds)
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S") if 0 < time < 1e11 else UNKNOWN


def snapshot(run: RunView, width: int) -> Group:
    """All views of a run, for a script or a mail."""
    curves = curves_view([run], width, 21 if width < 120 else 16)
    events = Group(Text("events", "bold"), events_view(run, 12))
    views = (header_view(run, width), curves, speed_view(run, width), gradients_view(run, width), events)
    return Group(*(part for view in views for part in (view, Text())))
