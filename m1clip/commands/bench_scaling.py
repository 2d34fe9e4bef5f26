"""m1clip bench scaling: time and memory from the smallest preset to a billion parameters."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from m1clip import measurements
from m1clip.commands import flags, tables
from m1clip.config import PRESETS, get_preset


@dataclass(frozen=True)
class Args(flags.OutputFlags):
    """A few real steps of every preset that fits; of the rest, what these extrapolate and what memory they need.

    m1clip bench scaling                            about five minutes on two cores
    m1clip bench scaling --pairs 591753             how long a pass over COCO's captions takes at each size
    m1clip bench scaling --presets tiny small seed  only these
    """

    presets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Models, by default all; m1clip info lists them."""
    devices: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """By default all there are."""
    pairs: Annotated[int, tyro.conf.arg(metavar="N")] = 100_000
    """PairDataset of the data whose time is extrapolated, for one pass."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    for name in args.presets:
        get_preset(name)
    if args.pairs < 1:
        raise ValueError(f"pairs must be at least 1, not {args.pairs}")
    return args


def main(args: Args) -> int:
    with tables.loading():
        from m1clip import devices
        from m1clip.bench import scaling, sweep
        from m1clip.console import Console

    args.out.mkdir(parents=True, exist_ok=True)
    names, here = args.presets or tuple(PRESETS), args.devices or tuple(devices.available())
    for name in here:
        if "=" in name:
            raise ValueError(f"scaling takes single devices, not {name!r}")
        devices.tower_devices(name)
    settings = sweep.Settings(names, (), here, (), (), False, 0, False)
    known = measurements.here()
    with sweep.alone(known), Console().going_through(1 + len(names)) as step:
        session = sweep.session(known, settings, "scaling", args.again)
        scaling.run(known, session, names, here, step)
    peaks = sweep.peaks(known.rows("operation"))
    made = scaling.sizes(known, session, names, here)
    made.sort(key=lambda one: one.parameters)
    page = scaling.page(made, here, peaks, args.pairs, args.out)
    known.add("ended", session=session)
    if args.json:
        print(json.dumps({**scaling.record(made, args.pairs), "page": str(page)}))
        return 0
    tables.show_rows("scaling", scaling.COLUMNS, scaling.table(made, here, peaks, args.pairs))
    for one in made:
        if one.reason and not one.measured:
            print(f"{one.name} was not run: {one.reason}")
    print(f"\nthe data: one pass over {args.pairs:,} pairs; documents: GPU/CPU by their predicted_speedup")
    print(f"page:  {page}")
    return 0
