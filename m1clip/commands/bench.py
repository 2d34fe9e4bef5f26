"""m1clip bench: time single operations and real training steps on every device of this machine."""

import json
from dataclasses import dataclass
from pathlib import Path

from m1clip.config import get_preset, require
from m1clip.console import command, loading, show_rows


@dataclass(frozen=True, kw_only=True)
class SweepArgs:
    presets: tuple[str, ...] = ()
    """Models to time, of those in `m1clip info`; all of the sweep if none is given."""
    devices: tuple[str, ...] = ()
    """Devices to time; all if none is given."""
    restart: bool = False
    """Start again instead of resuming a sweep that was interrupted less than a day ago."""
    out: Path = Path("bench")
    """Folder of the page and its figures."""
    json: bool = False
    """Print one line of JSON instead of tables."""

    def check(self) -> None:
        for name in self.presets:
            get_preset(name)
        require(not self.out.exists() or self.out.is_dir(), f"--out {self.out} is not a folder")


@dataclass(frozen=True, kw_only=True)
class Args(SweepArgs):
    """Compare devices, placements, precisions and thread counts on the real training step.

    m1clip bench --quick                                a first impression, in under a minute
    m1clip bench                                        everything, in under ten; can be interrupted
    m1clip bench --presets small --batch-sizes 8 32     the model that you want to train
    m1clip bench --devices cpu mps vision=mps,text=cpu

    All timings are stored for this machine; `m1clip advise` and `m1clip train --device auto` use them.
    """

    quick: bool = False
    """Fewer sizes, less time per plan."""
    batch_sizes: tuple[int, ...] = ()
    """Batch sizes for every preset; those of the sweep if none is given."""
    threads: tuple[int, ...] = ()
    """CPU threads beside PyTorch's default; if none is given: 1, performance cores, all cores."""
    compile: bool = False
    """Also time torch.compile for every model (half a minute each), not only for two small ones."""
    operations: bool = True
    """Also time single operations; the utilization (MFU) needs them."""

    def check(self) -> None:
        super().check()
        for count in self.threads:
            require(1 <= count <= 1024, f"--threads must be 1 to 1,024, not {count}")
        for size in self.batch_sizes:
            require(2 <= size <= 10**6, f"--batch-sizes must be 2 to 1,000,000, not {size}")


def main(args: Args) -> None:
    with loading():
        from m1clip import devices
        from m1clip.bench import report, sweep
        from m1clip.training.timing import faster_precisions

    names = args.devices or tuple(devices.available())
    single = dict.fromkeys(device for name in names for device in devices.tower_devices(name))
    precisions = {name: faster_precisions(name) for name in single}
    plans = sweep.make_plans(names, precisions, args.threads)
    table, compiled = (sweep.QUICK_SWEEP, set()) if args.quick else (sweep.SWEEP, sweep.COMPILED)
    comparisons = [
        sweep.make_comparison(preset, size, plans, args.compile or (preset, size) in compiled)
        for preset in args.presets or table
        for size in args.batch_sizes or table.get(preset, (4, get_preset(preset).batch_size))
    ]
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("out", "json", "restart")}
    with sweep.open_session("bench", {**settings, "devices": str(names)}, args.restart, args.out) as session:
        if args.operations:
            sizes = sweep.QUICK_MATMULS if args.quick else sweep.MATMULS
            session.run_operations(sizes, precisions, 0.2 if args.quick else 1.0)
        session.run_comparisons(comparisons, 1.0 if args.quick else 4.0)
        result = report.Sweep.load(session)
        page = report.write_sweep(result, args.out)
    if args.json:
        print(json.dumps({**result.record(), "page": str(page)}))
        return
    show_rows("operations", *report.make_table(report.OPERATION_COLUMNS, result.operations))
    show_rows("\ntraining steps", *report.make_table(report.STEP_COLUMNS, result.step_records()))
    texts = [crossover.text for crossover in result.crossovers]
    for title, lines in (("findings", result.findings()), ("crossover", texts), ("skipped", result.skipped)):
        if lines:
            print(f"\n{title}", *lines, sep="\n  ")
    print(f"\npage:  {page}\nnext:  {command('advise', '--preset', 'nano')}    the fastest plan for a run")
