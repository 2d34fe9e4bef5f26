"""A sweep's rows as tables, images, a page and one line of JSON. Measures nothing."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from m1clip.bench import figures
from m1clip.bench.crossover import Crossing, crossings
from m1clip.bench.sweep import of, peaks, utilization
from m1clip.estimates import BUSY, plan_of
from m1clip.format import milliseconds
from m1clip.measurements import Measurements
from m1clip.pages import Page

Row = dict[str, Any]
OPERATION_COLUMNS = (
    *(
        "operation",
        "size",
        "device",
        "alone ms",
        "issued ms",
        "launch ms",
        "transfer ms",
        "compute ms",
        "GFLOP/s",
        "GB/s",
    ),
)
STEP_COLUMNS = (
    *("model", "batch", "plan", "ms", "middle half", "pairs/s", "GFLOP/s", "of peak", "GB", "W", "pairs/J"),
)


@dataclass(frozen=True)
class Sweep:
    """What one sweep has measured."""

    session: str
    machine: dict[str, Any]
    operations: list[Row]
    steps: list[Row]
    skipped: list[Row]
    refused: list[Row]
    """Operations that a device would not do."""
    peaks: dict[tuple[str, str], float]
    """GFLOP/s of the best product that this machine has ever shown: a busy moment must not flatter."""

    @cached_property
    def crossings(self) -> list[Crossing]:
        return crossings(self.steps)

    def record(self) -> dict[str, Any]:
        steps = [{**row, "utilization": utilization(row, self.peaks)} for row in self.steps]
        best = [{"device": d, "precision": p, "gflops": peak} for (d, p), peak in self.peaks.items()]
        crossing = [one.record() for one in self.crossings]
        return {
            **{"session": self.session, "machine": self.machine, "peaks": best},
            **{
                "operations": self.operations,
                "steps": steps,
                "skipped": self.skipped + self.refused,
                "crossings": crossing,
            },
        }


def read(known: Measurements, session: str, machine: dict[str, Any]) -> Sweep:
    done, steps, skipped, refused = (of(known, session, kind) for kind in ("operation", "step", "skipped", "refused"))
    return Sweep(session, machine, done, steps, skipped, refused, peaks(known.rows("operation")))


def operation_rows(sweep: Sweep) -> Iterator[list[str]]:
    for row in sorted(sweep.operations, key=lambda row: (row["device"], row["precision"])):
        where = row["device"] if row["precision"] == "fp32" else f"{row['device']}, {row['precision']}"
        times = (row[key] for key in ("alone_ms", "issued_ms", "launch_ms", "transfer_ms", "compute_ms"))
        rates = (short(row["gflops"]), short(row["gb_per_s"]))
        yield [row["operation"], row["size"], where, *map(short, times), *rates]


def step_rows(sweep: Sweep) -> Iterator[list[str]]:
    for row in sorted(sweep.steps, key=lambda row: (row["parameters"], row["batch"])):
        used = utilization(row, sweep.peaks)
        yield [
            row["preset"],
            f"{row['batch']:,}",
            str(plan_of(row)),
            short(row["step_ms"]),
            f"{short(row['low_ms'])}–{short(row['high_ms'])}",
            short(row["pairs_per_s"]),
            short(figures.rate(row)),
            "–" if used is None else f"{100 * used:.0f} %",
            "–" if row["peak_gb"] is None else f"{row['peak_gb']:.2f}",
            short(row["watts"]),
            short(row["pairs_per_joule"]),
        ]


def short(value: float | None) -> str:
    """Three digits; what is unknown is a dash."""
    if value is None:
        return "–"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2g}"


def findings(sweep: Sweep) -> list[str]:
    """What the figures say, in sentences."""
    said = [
        f"{device}, {precision}: the best product of two matrices ran at {peak:,.0f} GFLOP/s"
        for (device, precision), peak in sweep.peaks.items()
    ]
    fastest: dict[str, Row] = {}
    for row in sweep.steps:
        if row["preset"] not in fastest or row["pairs_per_s"] > fastest[row["preset"]]["pairs_per_s"]:
            fastest[row["preset"]] = row
    said += [
        f"{name}: up to {row['pairs_per_s']:,.3g} pairs a second ({plan_of(row)}, batch {row['batch']:,}, "
        f"{milliseconds(row['step_ms'])} a step)"
        for name, row in fastest.items()
    ]
    busy = [row for row in sweep.steps if (row.get("busy") or 0.0) > BUSY]
    if busy:
        most = max(row["busy"] for row in busy)
        said.append(
            f"other programs took up to {100 * most:.0f} % of the cores during {len(busy)} of "
            f"{len(sweep.steps)} timings: those are not gone by; measure again when the machine is quiet"
        )
    return said


def left_out(sweep: Sweep) -> list[str]:
    said = [f"{row['operation']} {row['size']} on {row['device']}: {row['reason']}" for row in sweep.refused]
    for row in sweep.skipped:
        plan = f", {plan_of(row)}" if "device" in row else ""
        said.append(f"{row['preset']}, batch {row['batch']:,}{plan}: {row['reason']}")
    return said


def write(sweep: Sweep, folder: Path) -> Path:
    """Images and page; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = sweep.machine
    page = Page("What this machine does with a CLIP training step")
    day = time.strftime("%d %B %Y", time.strptime(sweep.session[:8], "%Y%m%d"))
    page.text(
        f"{machine['chip']}, {machine['cores']} cores, {machine['ram_gb']:.0f} GB, {machine['os']}, "
        f"Python {machine['python']}, torch {machine['torch']}; measured on {day} by m1clip bench."
    )
    page.points(findings(sweep))
    if sweep.steps:
        about_steps(page, sweep, folder)
    if left := left_out(sweep):
        page.heading("Left out")
        page.points(left)
    if sweep.operations:
        about_operations(page, sweep, folder)
    return page.write(folder, "bench")


def about_steps(page: Page, sweep: Sweep, folder: Path) -> None:
    found = sweep.crossings
    page.heading("Steps")
    page.text(
        "Real training steps (train/step.py) on random images and captions, after a warm-up; plans for the "
        "same model and batch took turns. ms is the median, then the middle half; of peak is the model's own "
        "FLOPs against the best product measured below; GB is what stays from step to step and the most that "
        "a step took beside it, or on a GPU the most that torch held."
    )
    page.image(figures.throughput(sweep.steps, folder / "throughput.png"), "pairs a second over the batch")
    page.table(STEP_COLUMNS, list(step_rows(sweep)))
    page.heading("Where one overtakes another")
    page.text(
        "Along the batch, or the parameters at one batch: how many times as fast one plan is as the other is "
        "taken to rise or to fall, and where it passes one is read between the measured points. In brackets, "
        "90 % of 400 such curves through times drawn anew from those measured."
    )
    page.points([str(one) for one in found] or ["nothing was measured at three batches, or for three models"])
    page.image(figures.ratios(sweep.steps, found, folder / "crossover.png"), "speed against the plain plan")
    page.heading("What a step is made of")
    page.image(figures.phases(sweep.steps, folder / "phases.png"), "phases of a step")


def about_operations(page: Page, sweep: Sweep, folder: Path) -> None:
    page.heading("Operations")
    page.text(
        "alone: one call and a wait for its end. issued: the same without the wait. compute: one of many in "
        "a row. launch: what a call on its own takes beyond that, asking and waiting. transfer: its inputs "
        "from the host. A CPU has no queue, so there the call is the computation. GB/s counts each number "
        "read or written once."
    )
    page.table(OPERATION_COLUMNS, list(operation_rows(sweep)))
    page.image(figures.roofline(sweep.operations, sweep.steps, folder / "roofline.png"), "roofline")
    page.text(
        "The bytes of a step are an estimate: activations written and read once, and ten passes over the "
        "weights, their gradients and moments.",
        note=True,
    )
