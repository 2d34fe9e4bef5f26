"""Report a sweep: tables, crossover points, figures, a page and JSON. Measures nothing."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from m1clip import sensors
from m1clip.bench.sweep import OperationRow, Session, peak_gflops
from m1clip.devices import Plan, tower_devices
from m1clip.document import write_document
from m1clip.format import milliseconds, number
from m1clip.plots import COLORS, annotate, axes, legend, log_axis, save_figure
from m1clip.training.advice import RowPair, is_significant
from m1clip.training.timing import HIGH_LOAD, StepRow

Table = tuple[list[str], list[list[str]]]
MIN_POINTS = 3  # batch sizes or models at which plans must have been compared to look for a crossover
OPERATION_COLUMNS = {"operation": "operation", "size": "size", "device": "device", "precision": "precision"}
OPERATION_COLUMNS |= {f"{name} ms": f"{name}_ms" for name in ("launch", "transfer", "compute")}
OPERATION_COLUMNS |= {"GFLOP/s": "gflops", "GB/s": "gb_per_s"}
STEP_COLUMNS = {"model": "preset", "batch size": "batch_size", "plan": "plan", "ms": "step_ms"}
STEP_COLUMNS |= {"IQR": "iqr_ms", "pairs/s": "pairs_per_s", "GFLOP/s": "gflops", "MFU": "utilization"}
STEP_COLUMNS |= {"GB": "peak_gb", "W": "watts", "pairs/J": "pairs_per_joule"}


def make_table(columns: Mapping[str, str], records: Sequence[Mapping[str, Any]]) -> Table:
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
    """A warning if other programs were running."""
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
    def load(cls, session: Session) -> "Sweep":
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


def plot_throughput(sweep: Sweep, path: Path) -> Path:
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
    return save_figure(figure, path)


def plot_roofline(sweep: Sweep, path: Path) -> Path:
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
            points.append(("step", f"{row.preset} {row.batch_size}", (step_intensity(row), row.gflops)))
        for kind, marker, color in zip(("matmul", "attention", "step"), "sDo", COLORS, strict=False):
            for index, (_, size, at) in enumerate(point for point in points if point[0] == kind):
                panel.plot(*at, marker, color=color, ms=5, label="" if index else kind)
                annotate(panel, size, at, (4, -9), fontsize=7, color=color)
        for axis in "xy":
            log_axis(panel, axis)
        panel.set(title=device, xlabel="FLOP per byte", ylabel="GFLOP/s")
        panel.legend(frameon=False, fontsize=8, loc="lower right")
    return save_figure(figure, path)


def step_intensity(row: StepRow) -> float:
    """FLOP per byte of a step: activations are written and read once; 40 bytes per parameter are moved."""
    return row.step_gflop / (2 * row.activation_gb * row.batch_size + 40e-9 * row.parameters)


def write_sweep(sweep: Sweep, folder: Path) -> Path:
    """Write bench.md, bench.html and figures; return the path of the HTML file."""
    if sweep.steps:
        plot_throughput(sweep, folder / "throughput.png")
    if sweep.operations:
        plot_roofline(sweep, folder / "roofline.png")
    values = {"sweep": sweep, "plain": [row for row in sweep.steps if row.plan == Plan(row.device)]}
    values |= {"steps": make_table(STEP_COLUMNS, sweep.step_records())}
    values |= {"operations": make_table(OPERATION_COLUMNS, sweep.operations)}
    return write_document(folder, "bench", "Training steps on this machine", "bench/templates/bench.md.j2", **values)
