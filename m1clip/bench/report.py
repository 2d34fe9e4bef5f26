"""Report a sweep: tables, crossover points, scaling with the model size, figures, pages. Measures nothing."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from m1clip import sensors
from m1clip.bench.sweep import OperationRow, SweepSession, peak_gflops
from m1clip.devices import Plan, tower_devices
from m1clip.document import COLORS, annotate, axes, legend, log_axis, save_figure, write_document
from m1clip.files import replace_files
from m1clip.format import UNKNOWN, duration, milliseconds, number
from m1clip.training.device_plan import HIGH_LOAD, RowPair, StepCost, StepRow, fit_step_time, is_significant
from m1clip.training.memory import PEAK

ModelRecords = list[dict[str, Any]]  # of the models in a scaling report
MIN_POINTS = 3  # batch sizes or models at which plans must have been compared to look for a crossover
OPERATION_COLUMNS = {"operation": "operation", "size": "size", "device": "device", "precision": "precision"}
OPERATION_COLUMNS |= {f"{name} ms": f"{name}_ms" for name in ("launch", "transfer", "compute")}
OPERATION_COLUMNS |= {"GFLOP/s": "gflops", "GB/s": "gb_per_s"}
STEP_COLUMNS = {"model": "preset", "batch size": "batch_size", "plan": "plan", "ms": "step_ms"}
STEP_COLUMNS |= {"IQR": "iqr_ms", "pairs/s": "pairs_per_s", "GFLOP/s": "gflops", "MFU": "utilization"}
STEP_COLUMNS |= {"GB": "peak_gb", "W": "watts", "pairs/J": "pairs_per_joule"}
SCALING_COLUMNS = {"model": "preset", "M parameters": "millions", "GFLOP/pair": "gflop"}
SCALING_COLUMNS |= {"ms/pair": "first_ms", "extrapolated": "extrapolated", "MFU": "utilization"}
SCALING_COLUMNS |= {"GB": "memory_gb", "epoch": "epoch", "GPU/CPU": "speedup"}


def make_table(columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Titles and cells of a table whose columns show these keys of the records."""

    def cell(value: Any) -> str:
        return str(value) if isinstance(value, str | int) else number(value)

    return list(columns), [[cell(record.get(key)) for key in columns.values()] for record in records]


@dataclass(frozen=True)
class Crossover:
    """`first` is the faster plan below `at`, which lies between the measured points `low` and `high`."""

    subject: str
    first: str
    second: str
    at: float | None
    low: float
    high: float
    text: str


def crossovers(rows: Sequence[StepRow]) -> list[Crossover]:
    """For all plans that were compared at three or more batch sizes, or models at one batch size."""
    groups: dict[tuple[str, str], list[StepRow]] = {}
    for row in sorted(rows, key=lambda row: (row.parameters, row.batch_size)):
        groups.setdefault((row.preset, "batch_size"), []).append(row)
        groups.setdefault((f"batch size {row.batch_size}", "parameters"), []).append(row)
    found = []
    for (subject, axis), group in groups.items():
        for plans in itertools.combinations(dict.fromkeys(row.plan for row in group), 2):
            first, second = ({row.comparison: row for row in group if row.plan == plan} for plan in plans)
            pairs = [(first[key], second[key]) for key in first if key in second]
            if len({getattr(row, axis) for row, _ in pairs}) >= MIN_POINTS:
                found.append(find_crossover(pairs, subject, axis))
    return found


def find_crossover(pairs: list[RowPair], subject: str, axis: str) -> Crossover:
    """The lead changes if opposite plans are significantly faster at the two ends of the axis."""
    if math.prod(b.step_ms / a.step_ms for a, b in pairs) < 1:
        pairs = [(b, a) for a, b in pairs]
    speedups, certain = [b.step_ms / a.step_ms for a, b in pairs], [is_significant(a, b) for a, b in pairs]
    first, second = (str(row.plan) for row in pairs[0])
    x = [float(getattr(row, axis)) for row, _ in pairs]
    load = ", under background load" if any(row.is_loaded for pair in pairs for row in pair) else ""
    name, leads = axis.replace("_", " "), [speedup > 1 for speedup in speedups]
    if not (certain[0] and certain[-1] and leads[0] != leads[-1]):
        answer = "no crossover" if all(certain) and all(leads) else "no significant crossover"
        lead = f"{first} is {min(speedups):.2f}x to {max(speedups):.2f}x as fast as {second}{load}"
        text = f"{subject}: {answer} from {name} {x[0]:,.0f} to {x[-1]:,.0f}; {lead}"
        return Crossover(subject, first, second, None, x[0], x[-1], text)
    low = max(i for i, lead in enumerate(leads) if certain[i] and lead == leads[0])
    high = min(i for i, lead in enumerate(leads) if certain[i] and lead == leads[-1])
    points = sorted((math.log(speedups[i]), math.log(x[i])) for i in range(low, high + 1))
    at = math.exp(np.interp(0, [y for y, _ in points], [x for _, x in points]))
    first, second = (first, second) if leads[0] else (second, first)
    between = f"{name} {at:,.0f} (between {x[low]:,.0f} and {x[high]:,.0f})"
    text = f"{subject}: {second} overtakes {first} at {between}{load}"
    return Crossover(subject, first, second, at, x[low], x[high], text)


def load_warning(loads: Sequence[float], measured: str) -> list[str]:
    high = [load for load in loads if load > HIGH_LOAD]
    used = f"background load: other programs used up to {100 * max(high, default=0):.0f} % of the cores"
    return [f"{used} during {len(high)} of {len(loads)} {measured}; repeat on an idle machine"] if high else []


@dataclass(frozen=True)
class Sweep:
    session: str
    machine: dict[str, Any]
    operations: list[OperationRow]
    steps: list[StepRow]  # smallest model and batch size first
    skipped: list[str]
    peaks: dict[tuple[str, str], float]  # of all sessions: background load must not raise the utilization

    @classmethod
    def load(cls, session: SweepSession) -> "Sweep":
        store, key = session.store, {"session": session.name}
        steps = sorted(store.steps(**key), key=lambda row: (row.parameters, row.batch_size))
        skipped = [f"{row['item']}: {row['reason']}" for row in store.rows("skipped", **key)]
        peaks = peak_gflops(store.rows("operation"))
        return cls(session.name, sensors.machine(), store.rows("operation", **key), steps, skipped, peaks)

    @cached_property
    def crossovers(self) -> list[Crossover]:
        return crossovers(self.steps)

    @property
    def presets(self) -> list[str]:
        return list(dict.fromkeys(row.preset for row in self.steps))

    def utilization(self, row: StepRow) -> float | None:
        """Model FLOPs utilization: GFLOP/s of the step over the peak; None for two different devices."""
        names = set(tower_devices(row.device))
        peak = self.peaks.get((names.pop(), row.precision)) if len(names) == 1 else None
        return peak and row.gflops / peak

    def step_records(self) -> list[dict[str, Any]]:
        records = []
        for row in self.steps:
            derived: dict[str, Any] = {"plan": str(row.plan), "utilization": self.utilization(row)}
            derived |= {"iqr_ms": f"{number(row.q1_ms)}–{number(row.q3_ms)}", "gflops": row.gflops}
            derived |= {"pairs_per_joule": row.pairs_per_s / row.watts if row.watts else None}
            records.append({**asdict(row), **derived, "pairs_per_s": row.pairs_per_s})
        return records

    def record(self) -> dict[str, Any]:
        peaks = [{"device": d, "precision": p, "gflops": gflops} for (d, p), gflops in self.peaks.items()]
        lists = {"steps": self.step_records(), "crossovers": [asdict(one) for one in self.crossovers]}
        names = ("session", "machine", "operations", "skipped")
        return {**{name: getattr(self, name) for name in names}, "peaks": peaks, **lists}

    def findings(self) -> list[str]:
        lines = [f"{Plan(*key)}: up to {peak:,.0f} GFLOP/s in a matmul" for key, peak in self.peaks.items()]
        for preset in self.presets:
            row = max((row for row in self.steps if row.preset == preset), key=lambda row: row.pairs_per_s)
            best = f"{row.plan}, batch size {row.batch_size:,}, {milliseconds(row.step_ms)} per step"
            lines.append(f"{preset}: up to {number(row.pairs_per_s)} pairs/s ({best})")
        return lines + load_warning([row.background_load for row in self.steps], "timings")


def plot_throughput(sweep: Sweep, path: Path) -> None:
    """Pairs/s over the batch size: one panel per model, one line per plan, crossovers of the plain plans."""
    plans = dict.fromkeys(str(row.plan) for row in sweep.steps)
    colors = dict(zip(plans, itertools.cycle(COLORS), strict=False))
    plain = {row.device for row in sweep.steps if not row.plan.is_split}
    figure, panels = axes(len(sweep.presets), 3.6 if len(sweep.presets) > 1 else 5.5, 3.3)
    for panel, preset in zip(panels, sweep.presets, strict=True):
        rows = [row for row in sweep.steps if row.preset == preset]
        for plan in dict.fromkeys(str(row.plan) for row in rows):
            line = [row for row in rows if str(row.plan) == plan]
            size, *times = np.array([(row.batch_size, row.step_ms, row.q3_ms, row.q1_ms) for row in line]).T
            speed, slow, fast = (1e3 * size / ms for ms in times)
            style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "color": colors[plan]}
            panel.errorbar(size, speed, np.abs([speed - slow, fast - speed]), label=plan, **style)
        for one in sweep.crossovers:
            if one.subject == preset and one.at and {one.first, one.second} <= plain:
                panel.axvspan(one.low, one.high, color=colors[one.second], alpha=0.1, lw=0)
                panel.axvline(one.at, color=colors[one.second], ls=":", lw=1.2)
        panel.set_title(f"{preset}, {rows[0].parameters / 1e6:.3g} M", fontsize=10)
        panel.set(xlabel="batch size", ylabel="pairs/s")
        log_axis(panel, "x", sorted({row.batch_size for row in rows}))
        panel.set_ylim(bottom=0)
    legend(figure, panels)
    save_figure(figure, path)


def plot_roofline(sweep: Sweep, path: Path) -> None:
    """GFLOP/s over FLOP per byte in fp32, under the roofs of the fastest matmul and the highest bandwidth."""
    peaks = {name: peak for (name, kind), peak in peak_gflops(sweep.operations).items() if kind == "fp32"}
    figure, panels = axes(len(peaks), 7.0, 4.6)
    for panel, (device, peak) in zip(panels, peaks.items(), strict=True):
        rows = [row for row in sweep.operations if (row["device"], row["precision"]) == (device, "fp32")]
        bandwidths = {row["operation"]: row["gb_per_s"] for row in rows if not row["gflops"]}
        x = np.geomspace(0.5, 3000, 200)
        panel.plot(x, np.minimum(peak, max(bandwidths.values(), default=math.inf) * x), color="black", lw=1.2)
        roofs = [f"{name}: {number(gb_per_s)} GB/s" for name, gb_per_s in bandwidths.items()]
        roofs.append(f"fastest matmul: {number(peak)} GFLOP/s")
        annotate(panel, "\n".join(roofs), (0.02, 0.02), (0, 0), xycoords="axes fraction")
        points = [(row["operation"], row["size"], (row["flop_per_byte"], row["gflops"])) for row in rows]
        for row in (row for row in sweep.steps if row.plan == Plan(device)):
            # A step writes and reads its activations once, and moves 40 bytes per parameter.
            gb = 2 * row.activation_gb * row.batch_size + 40e-9 * row.parameters
            points.append(("step", f"{row.preset} {row.batch_size}", (row.step_gflop / gb, row.gflops)))
        for kind, marker, color in zip(("matmul", "attention", "step"), "sDo", COLORS, strict=False):
            for index, (_, size, at) in enumerate(point for point in points if point[0] == kind):
                panel.plot(*at, marker, color=color, ms=5, label="" if index else kind)
                annotate(panel, size, at, (4, -9), fontsize=7, color=color)
        for axis in "xy":
            log_axis(panel, axis)
        panel.set(title=device, xlabel="FLOP per byte", ylabel="GFLOP/s")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, path)


def write_sweep(sweep: Sweep, out: Path) -> Path:
    """Write bench.md, bench.html and figures; return the path of the HTML file."""
    values = {"sweep": sweep, "plain": [row for row in sweep.steps if row.plan == Plan(row.device)]}
    values |= {"steps": make_table(STEP_COLUMNS, sweep.step_records())}
    values |= {"operations": make_table(OPERATION_COLUMNS, sweep.operations)}
    title, template = "Training steps on this machine", "bench/templates/bench.md.j2"
    with replace_files(out) as folder:
        if sweep.steps:
            plot_throughput(sweep, folder / "throughput.png")
        if sweep.operations:
            plot_roofline(sweep, folder / "roofline.png")
        page = write_document(folder, "bench", title, template, **values)
    return out / page.name


def scaling_records(sweep: Sweep, costs: list[StepCost], devices: Sequence[str], pairs: int) -> ModelRecords:
    """Time and memory per model, smallest first; extrapolated from the other models on the first device."""
    records = []
    for cost in sorted(costs, key=lambda cost: cost.parameters):
        rows = {row.device: row for row in sweep.steps if row.preset == cost.preset}
        pair_ms = {device: row.step_ms / cost.batch_size for device, row in rows.items()}
        first, last = (pair_ms.get(device) for device in (devices[0], devices[-1]))
        others = [row for row in sweep.steps if row.preset != cost.preset and row.device == devices[0]]
        ms, factor = fit_step_time(others, cost) if len(others) >= 3 else (math.nan, 1.0)
        range_ms = [value / cost.batch_size for value in (ms, ms / factor, ms * factor)]
        extrapolated, low, high = map(number, range_ms)
        epoch_s = pairs * (first or range_ms[0]) / 1e3
        need_gb = cost.state_gb + PEAK * cost.activation_gb * cost.batch_size
        record = {"preset": cost.preset, "millions": cost.parameters / 1e6, "gflop": cost.gflop}
        record |= {"pair_ms": pair_ms, "first_ms": first, "range_ms": range_ms}
        record |= {"extrapolated": UNKNOWN if math.isnan(ms) else f"{extrapolated} ({low}–{high})"}
        record |= {"memory_gb": next((row.peak_gb for row in rows.values()), need_gb)}
        record |= {"utilization": sweep.utilization(rows[devices[0]]) if first else None}
        record |= {"speedup": first / last if first and last and len(devices) > 1 else None}
        records.append({**record, "epoch": UNKNOWN if math.isnan(epoch_s) else duration(epoch_s)})
    return records


def plot_scaling(records: ModelRecords, devices: Sequence[str], ram_gb: float, path: Path) -> None:
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
    save_figure(figure, path)


def write_scaling(sweep: Sweep, records: ModelRecords, devices: Sequence[str], out: Path) -> Path:
    """Write scaling.md, scaling.html and a figure; return the path of the HTML file."""
    title, template = "Training time and memory by model size", "bench/templates/scaling.md.j2"
    models = make_table(SCALING_COLUMNS, records)
    with replace_files(out) as folder:
        plot_scaling(records, devices, sweep.machine["ram_gb"], folder / "scaling.png")
        page = write_document(folder, "scaling", title, template, sweep=sweep, models=models, devices=devices)
    return out / page.name
