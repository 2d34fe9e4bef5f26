"""Step time and memory over the model size: measured where a model fits, extrapolated from the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m1clip.bench.report import Sweep, make_table
from m1clip.document import write_document
from m1clip.format import UNKNOWN, duration, number
from m1clip.plots import COLORS, annotate, axes, log_axis, save_figure
from m1clip.training.advice import fit_step_time
from m1clip.training.memory import PEAK
from m1clip.training.timing import StepCost

SCALING_COLUMNS = {"model": "preset", "M parameters": "millions", "GFLOP/pair": "gflop"}
SCALING_COLUMNS |= {"ms/pair": "first_ms", "extrapolated": "extrapolated", "MFU": "utilization"}
SCALING_COLUMNS |= {"GB": "memory_gb", "epoch": "epoch", "GPU/CPU": "speedup"}
ModelRecords = list[dict[str, Any]]


def scaling_records(sweep: Sweep, costs: list[StepCost], devices: Sequence[str], pairs: int) -> ModelRecords:
    """Time and memory per model, smallest first; extrapolated from the other models on the first device."""
    records = []
    for cost in sorted(costs, key=lambda cost: cost.parameters):
        rows = {row.device: row for row in sweep.steps if row.preset == cost.preset}
        pair_ms = {device: row.step_ms / cost.batch_size for device, row in rows.items()}
        first, last = (pair_ms.get(device) for device in (devices[0], devices[-1]))
        others = [row for row in sweep.steps if row.preset != cost.preset and row.device == devices[0]]
        ms, factor = fit_step_time(others, cost) if len(others) >= 3 else (float("nan"), 1.0)
        range_ms = [value / cost.batch_size for value in (ms, ms / factor, ms * factor)]
        text = f"{number(range_ms[0])} ({number(range_ms[1])}–{number(range_ms[2])})" if others[2:] else UNKNOWN
        need_gb = cost.state_gb + PEAK * cost.activation_gb * cost.batch_size
        record = {"preset": cost.preset, "millions": cost.parameters / 1e6, "gflop": cost.gflop}
        record |= {"pair_ms": pair_ms, "first_ms": first, "range_ms": range_ms, "extrapolated": text}
        record |= {"memory_gb": next((row.peak_gb for row in rows.values()), need_gb)}
        record |= {"utilization": sweep.utilization(rows[devices[0]]) if first else None}
        record |= {"speedup": first / last if first and last and len(devices) > 1 else None}
        epoch_s = pairs * (first or range_ms[0]) / 1e3
        records.append(record | {"epoch": duration(epoch_s) if first or others[2:] else UNKNOWN})
    return records


def plot_scaling(records: ModelRecords, devices: Sequence[str], ram_gb: float, path: Path) -> Path:
    """Time and memory over parameters; a model that was not run has a hollow marker."""
    figure, (times, memory) = axes(2, 5.5, 4.2)
    for index, record in enumerate(records):
        x, (ms, low, high) = record["millions"], record["range_ms"]
        for device, color in zip(devices, COLORS, strict=False):
            label = "" if index else f"measured, {device}"
            times.plot(x, record["pair_ms"].get(device, float("nan")), "o", color=color, label=label)
        times.errorbar(x, ms, [[ms - low], [high - ms]], fmt="_", color=COLORS[6], capsize=3, zorder=0)
        face = COLORS[0] if record["pair_ms"] else "white"
        memory.plot(x, record["memory_gb"], "o", mfc=face, color=COLORS[0])
        annotate(memory, record["preset"], (x, record["memory_gb"]), (8, -9))
    memory.axhline(ram_gb, color=COLORS[1], ls="--", lw=1, label=f"RAM of this machine: {ram_gb:.0f} GB")
    for panel, label in ((times, "ms per pair (gray: extrapolated)"), (memory, "GB")):
        for axis in "xy":
            log_axis(panel, axis)
        panel.set(xlabel="million parameters", ylabel=label)
        panel.legend(frameon=False, fontsize=8)
    return save_figure(figure, path)


def write_scaling(sweep: Sweep, records: ModelRecords, devices: Sequence[str], folder: Path) -> Path:
    """Write scaling.md, scaling.html and a figure; return the path of the HTML file."""
    plot_scaling(records, devices, sweep.machine["ram_gb"], folder / "scaling.png")
    title, template = "Training time and memory by model size", "bench/templates/scaling.md.j2"
    models = make_table(SCALING_COLUMNS, records)
    return write_document(folder, "scaling", title, template, sweep=sweep, models=models, devices=devices)
