"""The document of one run, from the run's own files: every number has its line in metrics.jsonl."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.format import duration, percent
from m1clip.monitor import curves, figures, terminal_views
from m1clip.monitor.finds import examples, negatives
from m1clip.monitor.log import Followed, Record, number
from m1clip.monitor.values import (
    figure,
    guessed,
    guessed_rank,
    interval,
    part,
    picked,
    shown,
    when,
    with_interval,
)
from m1clip.monitor.workings import energy, gradients, memory, step_time, temperature
from m1clip.pages import Page

FIRST = (1, 5, 10)


def write(one: Followed, folder: Path) -> Path:
    """report.md and report.html with their figures; the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(f"{one.name}: training report")
    page.text(standing(one))
    facts(page, one)
    for section in SECTIONS:
        section(page, one, folder)
    return page.write(folder, "report")


def standing(one: Followed) -> str:
    """The one paragraph that somebody in a hurry reads."""
    state, step = one.summary["state"], one.summary.get("step") or 0
    words = f"The run is {'unfinished and dead' if state == 'dead' else state} at step {step:,}. "
    count = max(1, min(50, len(one.log) // 10))
    loss, guess = one.log.recent("loss", count), curves.chance(one.log, "loss")
    known = int(np.isfinite(one.log.column("loss")[-count:]).sum())
    if loss is not None:
        steps = "step" if known == 1 else f"{known} steps"
        words += f"The loss of its last {steps} is {figure(loss, '.4g')}"
        words += f", where guessing gives {guess:.3f}. " if guess else ". "
    last = one.log.last("eval")
    if last is None:
        return f"{words}It was not evaluated on validation images: how well it generalises is unknown."
    return words + verdict(last)


def verdict(row: Record) -> str:
    """What an evaluation shows, and whether that is more than guessing."""
    score, guess, of = (number(row.get(key)) for key in ("mean_r1", "chance_r1", "images"))
    if not (math.isfinite(score) and math.isfinite(of)):
        return "Its last evaluation has no score."
    low, high = interval(score, int(of))
    if not math.isfinite(guess):
        return f"Its last evaluation (line {row['line']}) gives {percent(score)}, but not what guessing gives."
    words = (
        f"At its last evaluation (step {row['step']:,}, line {row['line']}) the right one of {of:,.0f} "
        f"validation images or captions came first in {percent(score)} of cases (95 % interval "
        f"{100 * low:.1f} to {100 * high:.1f} %); guessing gives {percent(guess)}. "
    )
    return words + ("That cannot be told from guessing." if low <= guess else "The interval lies above chance.")


def facts(page: Page, one: Followed) -> None:
    now, config, machine, data = one.summary, one.config, one.machine, one.data
    count = parameters(one)
    size = f"{count / 1e6:.2f} M parameters" if count else "size unknown: no weights are saved"
    chunk = one.log.recent("chunk", 1)
    whole = chunk is None or chunk >= number(config.get("batch"))
    plan = machine["plan"] if isinstance(machine.get("plan"), dict) else {}
    alone = "nothing to check: other devices are compared with the CPU" if machine else "–"
    rows = {
        "state": now["state"] + (f": {now['reason']}" if now.get("reason") else ""),
        "model": f"{config.get('preset', '–')}, {size}",
        "data": config.get("data"),
        "images": f"{shown(data.get('train'))} to learn from, {shown(data.get('val'))} validation",
        "division": data.get("split"),
        "batch": f"{shown(config.get('batch'))} pairs, " + ("whole" if whole else f"{chunk:.0f} at once"),
        "steps": f"{shown(now.get('step'))} of {shown(now.get('total'))}",
        "learning": ", ".join(f"{key} {config.get(key, '–')}" for key in ("optimizer", "lr", "seed")),
        "machine": ", ".join(str(machine.get(key) or "–") for key in ("chip", "os")),
        "size": f"{machine.get('cores', '–')} cores, {machine.get('ram_gb', '–')} GB of memory",
        "device": f"{machine.get('device', '–')}, because {machine.get('why', '–')}",
        "precision": f"{plan.get('precision', '–')}, {machine.get('cpu_threads', '–')} CPU threads",
        "checked": machine.get("parity") or alone,
        "began": when(next((event.get("time") for event in one.log.events), None)),
        "trained": trained(one),
    }
    page.table(["", ""], [[name, str(value or "–")] for name, value in rows.items()])
    lines = one.log.column("line")
    where = f" (lines {lines[0]:.0f} to {lines[-1]:.0f})" if len(lines) else ""
    page.text(
        "From `config.json`, `data.json`, `machine.json`, `status.json` and the "
        f"{len(one.log):,} step lines of `metrics.jsonl`{where}.",
        note=True,
    )


def trained(one: Followed) -> str:
    """Time of the steps themselves, and of everything from the first to the last."""
    spent = np.nansum(one.log.column("step_ms") + np.nan_to_num(one.log.column("between_ms"))) / 1e3
    times = one.log.column("time")
    times = times[np.isfinite(times)]
    if not len(times) or not spent:
        return "–"
    first = np.nan_to_num(one.log.column("step_ms")[:1]).sum() / 1e3  # times are those of their ends
    passed = duration(float(times.max() - times.min() + first))
    return f"{duration(float(spent))} of steps; {passed} from the first to the last, pauses included"


def result(page: Page, one: Followed, folder: Path) -> None:
    page.heading("validation retrieval")
    rows = [row for row in one.log.records["eval"] if math.isfinite(number(row.get("mean_r1")))]
    if not rows:
        page.text("Not measured: there was no evaluation.")
        return
    last = rows[-1]
    images, captions = (int(number(last.get(key)) if last.get(key) else 0) for key in ("images", "captions"))
    table = []
    for way, words in (("i2t", "image→text"), ("t2i", "text→image")):
        cells = [with_interval(last.get(f"{way}_{key}"), images) for key in ("r1", "r5", "r10")]
        table.append([words, *cells, shown(last.get(f"{way}_median_rank"))])
    chances = {"chance": (images, 1.0)} if captions == images else {}
    if captions > images > 0:  # an image may find any of its captions
        chances = {"chance i→t": (captions, captions / images), "chance t→i": (images, 1.0)}
    for name, (of, right) in chances.items():
        cells = [part(guessed(k, of, right)) for k in FIRST]
        table.append([name, *cells, figure(guessed_rank(of, right), ".1f")])
    page.table(["", "R@1", "R@5", "R@10", "median rank"], table)
    note = (
        f"Line {last['line']}: {images:,} images, {shown(last.get('captions'))} captions. In brackets "
        "the 95 % interval (Wilson's) for that many images."
    )
    if captions > images:
        note += " Captions of one image are not independent, so images are counted."
    page.text(note, note=True)
    best = max(rows, key=lambda row: float(row["mean_r1"]))
    if best["mean_r1"] > last["mean_r1"]:
        page.text(
            f"The best mean R@1 of {len(rows)} evaluations was {percent(best['mean_r1'])}, at step "
            f"{best['step']:,} (line {best['line']}). The best of several on the same images flatters."
        )


def learning(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Curves")
    if len(one.log) < 2:
        page.text("Not measured: fewer than two steps are logged.")
        return
    words = "loss, accuracy, validation recall, learning rate, gradient norm, speed"
    page.image(figures.learning(one, folder / "learning.png"), words)
    page.text(
        "Lines are means of a hundredth of all steps, the steps themselves faint behind them; the band "
        "around recall is its 95 % interval. Dashed is what guessing gives.",
        note=True,
    )


def epochs(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Epochs")
    rows = one.log.records["epoch"]
    if not rows:
        page.text("No epoch has ended.")
        return
    scores = {row["step"]: row for row in one.log.records["eval"]}
    kept = picked(rows)
    table = [
        [
            shown(row.get("epoch")),
            figure(row.get("loss"), ".3f"),
            part(row.get("accuracy")),
            part(scores.get(row["step"], {}).get("i2t_r1")),
            part(scores.get(row["step"], {}).get("t2i_r1")),
            figure(row.get("temperature"), ".4f"),
            figure(row.get("pairs_per_s"), ",.0f"),
            figure(row.get("seconds"), ",.1f"),
            str(row["line"]),
        ]
        for row in kept
    ]
    right, recall = (percent(curves.chance(one.log, key)) for key in ("accuracy", "mean_r1"))
    loss = figure(curves.chance(one.log, "loss"), ".3f")
    table.append(["chance", loss, right, recall, recall, "", "", "", ""])
    columns = ("epoch", "loss", "accuracy", "i→t R@1", "t→i R@1", "temperature", "pairs/s", "seconds", "line")
    page.table(columns, table)
    note = "Means of each epoch's steps; accuracy is among the pairs of a batch; R@1 is validation."
    page.text(note + left_out(len(rows), len(kept), "epochs"), note=True)


def left_out(rows: int, kept: int, what: str) -> str:
    return f" {rows - kept} of {rows} {what} are left out at equal distances." if kept < rows else ""


def happened(page: Page, one: Followed, folder: Path) -> None:
    page.heading("Diagnoses and events")
    found = [event for event in one.log.events if event.get("event") == "diagnosis"]
    rest = [event for event in one.log.events if event.get("event") != "diagnosis"]
    if found:
        page.points([f"Step {event['step']:,}, line {event['line']}: {terminal_views.told(event)}" for event in found])
    else:
        page.text("The run's own diagnoses found nothing to say.")
    if kept := picked(rest):
        rows = [[when(one.get("time")), f"{one['step']:,}", terminal_views.told(one), str(one["line"])] for one in kept]
        page.table(["when", "step", "what", "line"], rows)
    notes = [note for note in (left_out(len(rest), len(kept), "events").strip(), *oddities(one)) if note]
    if notes:
        page.points(notes)


def oddities(one: Followed) -> list[str]:
    """What is missing from the log or unusual in it."""
    log, notes = one.log, []
    steps = log.column("step")
    after = np.flatnonzero(np.diff(steps) > 1)
    gaps = [f"{steps[place] + 1:,.0f} to {steps[place + 1] - 1:,.0f}" for place in after]
    if gaps:
        notes.append(f"Steps without a line: {', '.join(gaps[:5])}{' and more' if len(gaps) > 5 else ''}.")
    if skipped := int(np.isfinite(log.column("skipped")).sum()):
        notes.append(f"{skipped} steps made no update: their loss or gradient was not finite.")
    if log.repeated:
        notes.append(f"Steps come again in {log.repeated} places, as after a restart; the later lines count.")
    if log.broken:
        named = ", ".join(map(str, log.broken[:5]))
        notes.append(f"Lines that cannot be read: {len(log.broken)} ({named}{', …' * (len(log.broken) > 5)}).")
    return notes


def repeat(page: Page, one: Followed, folder: Path) -> None:
    page.heading("How to repeat it")
    page.text(again(one))
    bits = "On a CPU of the same kind, with the same versions and as many threads, the same bits come out; "
    page.points([*made_with(one), bits + "other devices differ in rounding."])


def again(one: Followed) -> str:
    return f"`m1clip train --config {shlex.quote(str(one.run.path / 'config.json'))} --name again`"


def made_with(one: Followed) -> list[str]:
    machine, config = one.machine, one.config
    names = {"m1clip": "m1clip", "torch": "torch", "python": "Python"}
    versions = ", ".join(f"{words} {machine.get(key, '–')}" for key, words in names.items())
    return [
        f"{versions}; {machine.get('os', '–')}.",
        f"Seed {config.get('seed', '–')}; data {config.get('data', '–')}, whose rows and captions in "
        f"their order have the identity `{one.data.get('identity', '–')}`.",
    ]


def parameters(one: Followed) -> int | None:
    """Counted in the header of the saved weights, which is JSON."""
    for folder in (one.run.model, one.run.path / "last"):
        try:
            with open(folder / "model.safetensors", "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(min(size, 10**8)))
            shapes = [about["shape"] for name, about in header.items() if name != "__metadata__"]
            return sum(int(math.prod(shape)) for shape in shapes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


SECTIONS = (
    *(result, learning, epochs, step_time, memory, temperature, gradients),
    *(negatives, examples, energy, happened, repeat),
)
