"""How time and memory grow with the model: real steps of what fits, and what they extrapolate of the rest."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from m1clip import plots, sensors
from m1clip.bench import operations, sweep
from m1clip.bench.documents import predicted_speedup
from m1clip.bench.report import short
from m1clip.config import get_preset
from m1clip.devices import Plan
from m1clip.estimates import extrapolate, plan_of
from m1clip.format import duration
from m1clip.measurements import Measurements
from m1clip.pages import Page
from m1clip.training import device_plan, memory, timing

Row = dict[str, Any]
BATCHES = (4, 2)  # small, so that a large model's activations fit beside its state
SECONDS = 3.0
COLUMNS = (
    *("model", "parameters", "GFLOP/pair", "batch", "ms/pair", "extrapolated", "of peak", "GB"),
    *("the data", "GPU/CPU", "documents"),
)


@dataclass(frozen=True)
class Size:
    """One model: measured, or only planned."""

    name: str
    parameters: int
    gflop: float
    batch: int
    memory_gb: float
    measured: dict[str, Row]
    """By device; empty where nothing fits."""
    fitted_ms: float | None
    """Per pair, on the first device."""
    low_ms: float | None
    high_ms: float | None
    reason: str | None
    """Why it was not measured."""

    def ms(self, device: str) -> float | None:
        row = self.measured.get(device)
        return None if row is None else float(row["step_ms"]) / self.batch


def run(
    known: Measurements,
    session: str,
    names: Sequence[str],
    devices: Sequence[str],
    step: Callable[[str], None],
) -> None:
    """A product for the peak, and a few real steps of each model that fits; none that was done already."""
    done = {row["preset"] for kind in ("step", "skipped") for row in sweep.of(known, session, kind)}
    products = [one for one in operations.operations((1024, 2048)) if one.name == "product"]
    step("the best product")
    if not sweep.of(known, session, "operation"):
        for device in devices:
            for one in products:
                known.add("operation", session=session, **operations.measure(one, device, "fp32", 1.0))
    for name in names:
        step(name)
        if name in done:
            continue
        config = get_preset(name)
        tokens = config.model.text.context_length
        work = device_plan.work_of(config, BATCHES[0], tokens, known)
        free = sensors.available_gb()
        batch = next((b for b in BATCHES if need_gb(work, b, len(devices)) < 0.9 * free), None)
        if batch is None:
            need = need_gb(work, BATCHES[-1], len(devices))
            reason = f"it needs {need:.1f} GB at batch {BATCHES[-1]}, {free:.1f} GB are free"
            known.add("skipped", session=session, preset=name, batch=BATCHES[-1], reason=reason)
            continue
        config = replace(config, batch_size=batch, optimizer="adamw")  # one for all sizes
        work = device_plan.work_of(config, batch, tokens, known)
        plans = [Plan(device) for device in devices]
        timings = timing.time_plans(config, plans, timing.some_batch(config, batch, tokens), SECONDS)
        device_plan.keep_contest(known, config, work, tokens, timings, session=session)


def need_gb(work: Any, batch: int, copies: int) -> float:
    return float(copies * work.state_gb + memory.PEAK * work.activation_gb * batch)


def sizes(known: Measurements, session: str, names: Sequence[str], devices: Sequence[str]) -> list[Size]:
    """Every model, with what the other ones extrapolate of it."""
    rows = sweep.of(known, session, "step")
    reasons = {row["preset"]: row["reason"] for row in sweep.of(known, session, "skipped")}
    first = [row for row in rows if plan_of(row) == Plan(devices[0])]
    made = []
    for name in names:
        config = replace(get_preset(name), optimizer="adamw")
        work = device_plan.work_of(config, BATCHES[0], config.model.text.context_length, known)
        mine = {row["device"]: row for row in rows if row["preset"] == name}
        batch = next(iter(mine.values()))["batch"] if mine else BATCHES[-1]
        others = [row for row in first if row["preset"] != name]
        told = extrapolate(others, work.gflop * batch, work.parameters)
        fitted: tuple[float | None, float | None, float | None] = (None, None, None)
        if told:
            ms, wide = told[0] / batch, told[1]
            fitted = (ms, ms / wide, ms * wide)
        measured_gb = [row["peak_gb"] for row in mine.values() if row["peak_gb"]]
        held = measured_gb[0] if measured_gb else need_gb(work, batch, 1)
        made.append(Size(name, work.parameters, work.gflop, batch, held, mine, *fitted, reasons.get(name)))
    return made


def table(
    made: Sequence[Size], devices: Sequence[str], peaks: dict[tuple[str, str], float], pairs: int
) -> list[list[str]]:
    lines = []
    for one in made:
        ms, gpu = one.ms(devices[0]), one.ms(devices[-1]) if len(devices) > 1 else None
        row, shown = one.measured.get(devices[0]), ms or one.fitted_ms
        used = sweep.utilization(row, peaks) if row else None
        seconds = None if shown is None else pairs * shown / 1e3
        lines.append(
            [
                one.name,
                f"{short(one.parameters / 1e6)} M",
                short(one.gflop),
                str(one.batch) if one.measured else "–",
                short(ms),
                "–" if one.fitted_ms is None else f"{short(one.fitted_ms)} ({short(one.low_ms)}–{short(one.high_ms)})",
                "–" if used is None else f"{100 * used:.0f} %",
                f"{one.memory_gb:.1f}" + ("" if one.measured else " planned"),
                "–" if seconds is None else duration(seconds) + ("" if ms else " extrapolated"),
                "–" if ms is None or gpu is None else f"{ms / gpu:.2f}",
                f"{predicted_speedup(one.parameters):g}",
            ]
        )
    return lines


def image(made: Sequence[Size], devices: Sequence[str], path: Path) -> Path:
    """Time and memory over parameters; what was not run is hollow."""
    figure, (times, memories) = plots.axes(2, 5.5, 4.2)
    draw_times(times, made, devices)
    draw_memory(memories, made)
    for panel, what in ((times, "ms a pair, forward, backward and update"), (memories, "GB of a step")):
        plots.log_axis(panel, "x", [tick for tick in (1, 10, 100, 1000) if tick <= 3 * made[-1].parameters / 1e6])
        plots.log_axis(panel, "y")
        panel.set_xlabel("million parameters")
        panel.set_ylabel(what)
        panel.legend(frameon=False, fontsize=8, loc="upper left" if panel is times else "lower right")
    return plots.save(figure, path)


def draw_times(panel: Axes, made: Sequence[Size], devices: Sequence[str]) -> None:
    for device, color in zip(devices, plots.COLORS, strict=False):
        points = [(one.parameters / 1e6, one.ms(device) or 0.0) for one in made if device in one.measured]
        if points:
            panel.plot(*zip(*points, strict=True), "o", color=color, label=f"measured, {device}")
    fitted = [one for one in made if one.fitted_ms]
    if fitted:
        told, low, high = np.array([(one.fitted_ms, one.low_ms, one.high_ms) for one in fitted], dtype=float).T
        style: dict[str, Any] = {"fmt": "_", "color": plots.COLORS[6], "ms": 14, "capsize": 3, "zorder": 0}
        at = [one.parameters / 1e6 for one in fitted]
        panel.errorbar(at, told, [told - low, high - told], label="extrapolated by the others", **style)
    for one in made:
        if value := one.ms(devices[0]) or one.fitted_ms:
            plots.note(panel, one.name, (one.parameters / 1e6, value), (8, -9))


def draw_memory(panel: Axes, made: Sequence[Size]) -> None:
    x = [one.parameters / 1e6 for one in made]
    panel.plot(x, [one.memory_gb for one in made], "-", color=plots.COLORS[6], lw=1)
    for measured, face, words in (
        (True, plots.COLORS[0], "measured"),
        (False, "white", "planned, not run"),
    ):
        points = [(one.parameters / 1e6, one.memory_gb) for one in made if bool(one.measured) is measured]
        if points:
            panel.plot(*zip(*points, strict=True), "o", mfc=face, color=plots.COLORS[0], label=words)
    ram = sensors.machine()["ram_gb"]
    panel.axhline(ram, color=plots.COLORS[1], ls="--", lw=1)
    panel.text(min(x), ram * 1.1, f"{ram:.0f} GB in this machine", fontsize=8, color=plots.COLORS[1])


def page(
    made: Sequence[Size],
    devices: Sequence[str],
    peaks: dict[tuple[str, str], float],
    pairs: int,
    folder: Path,
) -> Path:
    document = Page("How training a CLIP grows with its size on this machine")
    machine = sensors.machine()
    document.text(f"{machine['chip']}, {machine['cores']} cores, {machine['ram_gb']:.0f} GB, {machine['os']}.")
    document.image(image(made, devices, folder / "scaling.png"), "time and memory over parameters")
    document.table(COLUMNS, table(made, devices, peaks, pairs))
    document.text(
        f"A few real steps each, AdamW, on {devices[0]}. Foretold: a constant, a part that grows with the "
        f"work and one with the parameters, fitted to the other models, so that each line is a test of it; "
        f"in brackets, 90 %. The data: one pass over {pairs:,} pairs. GPU/CPU: how many times as fast the "
        "GPU was; – where there is none. Documents: what their predicted_speedup says for that many "
        "parameters; it rests on one model, which was never trained on a GPU."
    )
    left = [f"{one.name}: {one.reason}" for one in made if one.reason and not one.measured]
    if left:
        document.text("Not run:")
        document.points(left)
    return document.write(folder, "scaling")


def record(made: Sequence[Size], pairs: int) -> dict[str, Any]:
    return {
        "pairs": pairs,
        "sizes": [{**asdict(one), "documents_speedup": predicted_speedup(one.parameters)} for one in made],
    }
