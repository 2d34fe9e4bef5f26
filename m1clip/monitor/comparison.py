"""The document of several runs side by side: what differs in how they were made, and in what came of it."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.format import duration, percent
from m1clip.monitor import curves, figures, terminal_views
from m1clip.monitor.log import Followed, Record, number, tree
from m1clip.monitor.report import again, made_with, oddities, parameters, standing, trained
from m1clip.monitor.values import Z, figure, most, part, spread, with_interval
from m1clip.pages import Page


def write(runs: Sequence[Followed], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(" and ".join(one.name for one in runs) + ": comparison")
    page.text(caution(runs))
    differences(page, runs)
    scores(page, runs)
    speed(page, runs)
    page.heading("Curves")
    if any(len(one.log) > 1 for one in runs):
        page.image(figures.together(runs, folder / "together.png"), "loss, validation recall, temperature")
        note = "Means of a hundredth of each run's steps. Minutes are those of training steps alone."
        page.text(note, note=True)
    said(page, runs)
    odd = [f"{one.name}: {note}" for one in runs for note in oddities(one)]
    if odd:
        page.heading("What is odd in their logs")
        page.points(odd)
    page.heading("How they ended")
    page.points([f"{one.name}: {standing(one)}" for one in runs])
    page.heading("How to repeat them")
    for one in runs:
        page.points([f"{one.name}: {again(one)}", *made_with(one)])
    return page.write(folder, "comparison")


def comparable(runs: Sequence[Followed]) -> bool:
    """Whether all were scored, on validation images of the same data, divided in the same way."""
    scored = {(one.log.last("eval") or {}).get("images") for one in runs}
    data = {(str(one.config.get("data")), str(one.data.get("identity"))) for one in runs}
    return len(scored) == len(data) == 1 and None not in scored


def caution(runs: Sequence[Followed]) -> str:
    """Which comparisons the files allow."""
    words = [f"{len(runs)} runs, from their own files."]
    unscored = [one.name for one in runs if one.log.last("eval") is None]
    if unscored:
        words.append(f"Not evaluated: {', '.join(unscored)}.")
    elif comparable(runs):
        words.append("They learned from the same rows and were scored on as many validation images.")
    else:
        words.append("They differ in their data or in how many images were validation: recalls do not compare.")
    if len({str(one.machine.get("chip")) for one in runs}) > 1:
        words.append("They ran on different machines, so times are about machines as well as about runs.")
    words.append("One run of each says nothing of how much another seed would change.")
    return " ".join(words)


def differences(page: Page, runs: Sequence[Followed]) -> None:
    page.heading("What differs")
    made = [{key: one.data.get(key) for key in ("identity", "train", "val")} for one in runs]
    flats = [
        flat(one.config) | flat(rows, "data.") | flat(one.machine, "machine.")
        for one, rows in zip(runs, made, strict=True)
    ]
    names = list(dict.fromkeys(name for each in flats for name in each))
    unlike = [name for name in names if len({str(each.get(name)) for each in flats}) > 1]
    if not unlike:
        page.text("Nothing: the same settings and rows on the same machine.")
        return
    rows = [[name, *(str(each.get(name, "–")) for each in flats)] for name in unlike]
    page.table(["setting", *(one.name for one in runs)], rows)
    page.text("From `config.json`, `data.json` and `machine.json`; whatever else they say is equal.", note=True)


def flat(tree: Record, before: str = "") -> Record:
    made: Record = {}
    for key, value in tree.items():
        made |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return made


def scores(page: Page, runs: Sequence[Followed]) -> None:
    page.heading("validation retrieval at the last evaluation")
    rows = []
    for one in runs:
        last = one.log.last("eval") or {}
        of = int(last.get("images") or 0)
        cells = [with_interval(last.get(key), of) for key in ("i2t_r1", "t2i_r1")]
        cells += [part(last.get(key)) for key in ("i2t_r10", "t2i_r10")]
        row = [one.name, *cells, part(last.get("chance_r1")), part(hard_of(one).get("first")), f"{of:,}"]
        rows.append([*row, str(last.get("step", "–")), str(last.get("line", "–"))])
    columns = ["run", "i→t R@1", "t→i R@1", "i→t R@10", "t→i R@10", "chance R@1", "hard", "images"]
    page.table([*columns, "step", "line"], rows)
    counts = sorted({among - 1 for one in runs if (among := hard_of(one).get("among"))})
    several = " or ".join(f"{count:.0f} (chance {percent(1 / (count + 1))})" for count in counts) or "some"
    page.text(
        f"In brackets the 95 % interval (Wilson's). Hard: how often the truth scores above {several} of the "
        "most similar negatives at once, as the report of a single run defines them.",
        note=True,
    )
    page.text(judged(runs))


def hard_of(one: Followed) -> Record:
    return tree(tree((one.log.last("eval") or {}).get("negatives")).get("hard"))


def judged(runs: Sequence[Followed]) -> str:
    """Whether the best is better than the next, as far as single scores can tell."""
    if not comparable(runs):
        return "These scores are not compared: see above."
    scored = [(number((one.log.last("eval") or {}).get("mean_r1")), one) for one in runs]
    scored = sorted((pair for pair in scored if math.isfinite(pair[0])), key=lambda pair: -pair[0])
    if len(scored) < 2:
        return "Fewer than two have a score: there is nothing to compare."
    (first, best), (second, next_best) = scored[:2]
    of = int(number((best.log.last("eval") or {}).get("images")))
    both = (first + second) / 2
    error = math.sqrt(max(1e-12, 2 * both * (1 - both) / of))
    named = f"{best.name} has the highest mean R@1 ({percent(first)}), "
    named += f"then {next_best.name} ({percent(second)}). "
    if first - second > Z * error:
        return f"{named}For {of:,} images that is more than chance would make of equals (95 %)."
    return (
        f"{named}For {of:,} images chance can make such a difference between equals (95 %); which images "
        "each got right is not in the log, and would tell more."
    )


def speed(page: Page, runs: Sequence[Followed]) -> None:
    page.heading("Time, memory, energy")
    goal = common_goal(runs) if comparable(runs) else None
    rows = []
    for one in runs:
        ms, watches = spread(one.log.column("step_ms")), one.log.records["logger"]
        peak = most(row.get("peak_rss_gb") for row in watches)
        drawn = next((row["joules"] for row in watches[::-1] if row.get("joules") is not None), None)
        count, pairs = parameters(one), spread(one.log.column("pairs_per_s"))
        rows.append(
            [
                one.name,
                f"{count / 1e6:.2f}" if count else "–",
                f"{ms[0]:,.4g} ({ms[1]:,.4g}–{ms[2]:,.4g})" if ms else "–",
                figure(pairs[0] if pairs else None, ",.0f"),
                trained(one).partition(" of steps")[0],
                duration(reached(one, goal)) if goal is not None else "–",
                terminal_views.gb(peak),
                figure(None if drawn is None else drawn / 3600, ".2f"),
            ]
        )
    until = "to a common R@1" if goal is None else f"to R@1 {percent(goal)}"
    columns = ["run", "M parameters", "ms a step (5–95 %)", "pairs/s", "trained", until, "peak memory", "Wh"]
    page.table(columns, rows)
    page.text(
        "Medians of all step lines. The time to a score is that of training steps up to the first evaluation "
        "that reached the best mean R@1 of the run with the lowest, where scores compare. A dash: unknown.",
        note=True,
    )


def common_goal(runs: Sequence[Followed]) -> float | None:
    """The highest validation score that every one of them reached."""
    best = [one.log.recorded("eval", "mean_r1") for one in runs]
    known = [scores[np.isfinite(scores)] for scores in best]
    return min(float(scores.max()) for scores in known) if all(len(scores) for scores in known) else None


def reached(one: Followed, goal: float) -> float | None:
    """Seconds of training up to the first evaluation with that score."""
    steps = one.log.recorded("eval", "step")[one.log.recorded("eval", "mean_r1") >= goal]
    return float(curves.minutes_at(one.log, steps[:1])[0] * 60) if len(steps) else None


def said(page: Page, runs: Sequence[Followed]) -> None:
    page.heading("What the diagnoses said")
    points: list[Any] = [
        f"{one.name}, step {event['step']:,}, line {event['line']}: {terminal_views.told(event)}"
        for one in runs
        for event in one.log.events
        if event.get("event") == "diagnosis"
    ]
    if points:
        page.points(points)
    else:
        page.text("Nothing, of any of them.")
