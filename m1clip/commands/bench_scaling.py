"""m1clip bench scaling: step time and memory of every model size, up to a billion parameters."""

import json
from dataclasses import dataclass, replace

from m1clip.commands.bench import SweepArgs
from m1clip.config import PRESETS, get_preset, require
from m1clip.console import loading, show_rows
from m1clip.files import json_safe

BATCH_SIZE = 4  # small, so that the activations of a large model fit beside its state


@dataclass(frozen=True, kw_only=True)
class Args(SweepArgs):
    """Time a few real training steps of every preset that fits; extrapolate the others.

    m1clip bench scaling                            about five minutes on two cores
    m1clip bench scaling --pairs 591753             with the time of an epoch of COCO captions
    m1clip bench scaling --presets tiny small base
    """

    pairs: int = 100_000
    """Pairs of an epoch."""

    def check(self) -> None:
        super().check()
        require(self.pairs >= 1, f"--pairs must be at least 1, not {self.pairs}")
        for name in self.devices:
            require("=" not in name, f"--devices takes single devices here, not {name!r}")


def main(args: Args) -> None:
    with loading():
        from m1clip import devices
        from m1clip.bench import report, sweep

    names = [devices.tower_devices(name)[0] for name in args.devices or devices.available()]
    presets = args.presets or tuple(PRESETS)
    configs = [replace(get_preset(name), batch_size=BATCH_SIZE, optimizer="adamw") for name in presets]
    plans = tuple(devices.Plan(name) for name in names)
    settings = {"presets": [*presets], "devices": names}
    with sweep.open_session("scaling", settings, args.restart, args.out) as session:
        session.run_operations((1024, 2048), dict.fromkeys(names, ()), 0.5)
        costs = session.run_comparisons([(config, plans) for config in configs], 3.0)
        result = report.Sweep.load(session)
        records = report.scaling_records(result, costs, names, args.pairs)
        page = report.write_scaling(result, records, names, args.out)
    if args.json:
        values = {"pairs": args.pairs, "models": records, "skipped": result.skipped, "page": str(page)}
        print(json.dumps(json_safe(values)))
        return
    show_rows("scaling", *report.make_table(report.SCALING_COLUMNS, records))
    print("", *result.skipped, f"epoch: {args.pairs:,} pairs", f"page:  {page}", sep="\n")
