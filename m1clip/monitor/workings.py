"""Sections of a report about how the run worked: time, memory, temperature, gradients, energy."""

import math
from pathlib import Path

import numpy as np

from m1clip.format import percent
from m1clip.monitor import figures, terminal_views
from m1clip.monitor.log import Followed, number
from m1clip.monitor.values import figure, most, spread
from m1clip.pages import Page
from m1clip.plots import PHASES

UNSEEN = "Not measured: no look inside was logged (`--logger-every` says how often)."


def step_time(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Where the time of a step goes")
    whole = spread(one.log.column("step_ms"))
    if whole is None:
        page.text("Not measured.")
        return
    parts = {name: spread(one.log.column(f"{name}_ms")) for name in PHASES}
    timed = max(int(np.isfinite(one.log.column(f"{name}_ms")).sum()) for name in PHASES)
    spent = {name: float(np.nansum(one.log.column(f"{name}_ms"))) for name in PHASES}
    total = sum(spent.values()) or math.nan
    rows = [
        [name, *(f"{value:,.3g}" for value in found), percent(spent[name] / total)]
        if found
        else [name, "–", "–", "–", "–"]
        for name, found in parts.items()
    ]
    rows.append(["step", *(f"{value:,.4g}" for value in whole), ""])
    page.table(["phase", "median ms", "5th percentile", "95th percentile", "of all time"], rows)
    page.image(figures.timing(one, folder / "time.png"), "milliseconds a step, and its phases")
    page.text(schedule(one))
    page.text(
        f"From {len(one.log):,} step lines, of which {timed:,} have their phases timed. Medians of parts "
        "need not add up to that of the whole.",
        note=True,
    )


def schedule(one: Followed) -> str:
    """Did it stay as fast as it was?"""
    ms = one.log.column("step_ms")
    ms = ms[np.isfinite(ms)]
    if len(ms) < 100:
        return "There are too few steps to say whether it slowed down."
    fifth = len(ms) // 5
    first, last = float(np.median(ms[len(ms) // 20 : fifth])), float(np.median(ms[-fifth:]))
    return (
        f"The median step of the last fifth took {last / first:.2f} times as long as that of the first "
        f"({last:,.0f} ms, {first:,.0f} ms; the very first twentieth is left out)."
    )


def memory(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Memory by part")
    rows = [row for row in one.log.records["logger"] if row.get("memory_gb")]
    if not rows:
        page.text(UNSEEN)
        return
    last = rows[-1]
    table = [
        [name, terminal_views.gb(value), terminal_views.gb(most(row["memory_gb"].get(name) for row in rows))]
        for name, value in last["memory_gb"].items()
        if number(value) > 0
    ]
    page.table(["part", f"at step {last['step']:,}", "at most"], table)
    peak = most(row.get("peak_rss_gb") for row in rows)
    words = [
        "Parts are counted from the model and the batch.",
        f"The process as a whole held {terminal_views.gb(peak)} at most.",
    ]
    device = most(row.get("device_gb") for row in rows)
    if math.isfinite(device):
        words.append(f"The device held {terminal_views.gb(device)} at most.")
    swapped = number(last.get("swapped_out_gb")) - number(rows[0].get("swapped_out_gb"))
    if swapped > 0:
        words.append(f"The machine wrote {terminal_views.gb(swapped)} to swap meanwhile.")
    elif swapped == 0:
        words.append("Nothing was written to swap meanwhile.")
    page.text(" ".join(words))
    page.text(f"From {len(rows)} logger lines, the last is line {last['line']}.", note=True)


def temperature(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Temperature")
    values, lines, steps = (one.log.column(name) for name in ("temperature", "line", "step"))
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 2:
        page.text("Not measured.")
        return
    page.image(figures.temperature(one, folder / "temperature.png"), "temperature")
    ends = [
        f"{values[at]:.4f} (step {steps[at]:,.0f}, line {lines[at]:.0f})"
        for at in (known[0], known[-1], int(np.nanargmin(values)))
    ]
    words = "fell" if values[known[-1]] < values[known[0]] else "rose"
    page.text(
        f"It {words} from {ends[0]} to {ends[1]}; the least was {ends[2]}. The lower it is, the more the "
        "loss is about the most similar negatives; it usually falls as pairs become separable."
    )


def gradients(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Gradient flow by layer")
    rows = [row for row in one.log.records["logger"] if row.get("grad_norms")]
    if not rows:
        page.text(UNSEEN)
        return
    first, last = rows[0], rows[-1]
    table = []
    for name, value in last["grad_norms"].items():
        seen = np.array([number(row["grad_norms"].get(name)) for row in rows])
        middle = np.median(seen[np.isfinite(seen)]) if np.isfinite(seen).any() else None
        weight = number((last.get("weight_norms") or {}).get(name))
        cells = [figure(each, ".3g") for each in (first["grad_norms"].get(name), middle, value)]
        table.append([name, *cells, f"{number(value) / weight:.1e}" if weight > 0 else "–"])
    early, late = f"step {first['step']:,}", f"step {last['step']:,}"
    page.table(["block", early, "median", late, "of its weights"], table)
    if len(rows) > 1:
        page.image(figures.flow(one, folder / "gradients.png"), "gradient norms by block")
    norms = {name: number(value) for name, value in last["grad_norms"].items() if number(value) > 0}
    words = "Norms are before clipping. Blocks differ in their number of weights: compare each with itself."
    if norms:
        low, high = (choose(norms, key=lambda name: norms[name]) for choose in (min, max))
        ratio = norms[high] / norms[low]
        words = f"At the last look the largest ({high}) was {ratio:,.0f} times the smallest ({low}). {words}"
    page.text(words)
    page.text(f"From {len(rows)} logger lines, {first['line']} to {last['line']}.", note=True)


def energy(page: Page, one: Followed, folder: Path) -> None:
    page.heading("EnergyMeter and heat")
    rows = one.log.records["logger"]
    watts, heats = (
        [number(row[key]) for row in rows if row.get(key) is not None] for key in ("power_w", "temperature_c")
    )
    drawn = next((row for row in rows[::-1] if row.get("joules") is not None), None)
    points = []
    if watts:
        points.append(f"Power: {min(watts):.0f} to {max(watts):.0f} W in {len(watts)} looks.")
    else:
        points.append("Power was not measured: no counter of it could be read (`m1clip[energy]` helps).")
    if drawn:
        points.append(f"Drawn up to step {drawn['step']:,}: {drawn['joules'] / 3600:.2f} Wh (line {drawn['line']}).")
    else:
        points.append("EnergyMeter was not measured.")
    if heats:
        points.append(f"Heat: {min(heats):.0f} to {max(heats):.0f} °C in {len(heats)} looks.")
    else:
        points.append("Heat was not measured: the system shows no sensor of the processor.")
    cores = [float(np.mean(row["cpu_percent"])) for row in rows if row.get("cpu_percent")]
    if cores:
        points.append(f"Cores: {np.mean(cores):.0f} % in use on average, of {len(cores)} looks.")
    page.points(points)
