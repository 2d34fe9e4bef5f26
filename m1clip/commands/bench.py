"""m1clip bench: what this machine does with single operations and with real training steps."""

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from m1clip import measurements, sensors
from m1clip.commands import flags, tables
from m1clip.config import get_preset

if TYPE_CHECKING:  # they bring torch
    from m1clip.bench.report import Sweep


@dataclass(frozen=True)
class Args(flags.OutputFlags):
    """Compare this machine's devices on the real training step: speed, memory, where one overtakes another.

    m1clip bench --quick                            a first look, in under a minute
    m1clip bench                                    the whole sweep, in under ten; may be interrupted
    m1clip bench --presets small --batches 8 32     what you are going to train
    m1clip bench --devices cpu mps vision=mps,text=cpu
    m1clip bench scaling                            from small to a billion parameters

    Tables are printed, images and a page go to --out, and every measurement is kept for this machine:
    `m1clip advise` and --device auto in training go by it.
    """

    quick: bool = False
    """Fewer sizes, less time for each."""
    presets: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Models to measure; by default those of a table that fits the time."""
    batches: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """BatchStream to measure for each of them."""
    devices: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Devices and placements (vision=A,text=B); by default all there are."""
    precisions: tuple[str, ...] = ()
    """bf16, fp16: beside fp32; by default those whose products are faster than in fp32."""
    threads: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """CPU threads beside torch's own number; by default one, the fast cores, and all."""
    compile: bool = False
    """Try torch.compile for every model, half a minute or more each; by default for two small ones."""
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Length of the captions; 0 is the longest that each model reads."""
    no_operations: bool = False
    """Leave out the single operations, and with them utilization."""


def parse(prog: str, words: list[str]) -> Args:
    args = flags.parse_flags(Args, prog, words)
    for name in args.presets:
        get_preset(name)
    if any(not 1 <= number <= 1024 for number in args.threads):
        raise ValueError(f"threads must be 1 to 1024, not {', '.join(map(str, args.threads))}")
    if any(not 2 <= batch <= 10**6 for batch in args.batches):
        raise ValueError(f"a batch has 2 to a million pairs, not {', '.join(map(str, args.batches))}")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file, and should be a folder")
    if args.tokens < 0 or args.tokens in (1, 2):
        raise ValueError(f"tokens must be 0 or at least 3 (start, one symbol, end), not {args.tokens}")
    for precision in args.precisions:
        if precision not in ("bf16", "fp16"):
            raise ValueError(f"no precision {precision!r}; there are bf16 and fp16, and fp32 is always measured")
    return args


def main(args: Args) -> int:
    with tables.loading():
        from m1clip import devices
        from m1clip.bench import report, sweep
        from m1clip.console import Console
        from m1clip.training import device_plan

    args.out.mkdir(parents=True, exist_ok=True)  # refused before anything is measured, if it will be
    names = args.devices or tuple(devices.available())
    single = list(dict.fromkeys(part for name in names for part in devices.tower_devices(name)))
    gains = {name: list(args.precisions) or device_plan.paying(name) for name in single}
    settings = sweep.Settings(
        args.presets,
        args.batches,
        names,
        args.precisions,
        args.threads or sweep.thread_numbers(),
        args.compile,
        args.tokens,
        args.quick,
    )
    known, console = measurements.here(), Console()
    groups = sweep.groups(settings, gains)
    count = 0 if args.no_operations else sweep.operation_count(settings, gains)
    with sweep.alone(known), console.progress_items(count + len(groups)) as step:
        session = sweep.session(known, settings, "bench", args.again)
        if count:
            sweep.run_operations(known, session, settings, gains, step)
        sweep.run_steps(known, session, groups, settings.seconds, step)
    made = report.read(known, session, {**sensors.machine(), "torch": measurements.torch_version()})
    if not args.json:
        show(made)
    page = report.write(made, args.out)
    known.add("ended", session=session)
    if args.json:
        print(json.dumps({**made.record(), "page": str(page)}))
    else:
        print(f"page:  {page}")
        next_up = tables.command("advise", "--preset", "nano", "--batch-size", 256)
        print(f"next:  {next_up}    what this means for a run")
    return 0


def show(made: "Sweep") -> None:
    from m1clip.bench import report

    for title, columns, rows in (
        ("operations", report.OPERATION_COLUMNS, report.operation_rows(made)),
        ("training steps", report.STEP_COLUMNS, report.step_rows(made)),
    ):
        tables.show_rows(title, columns, rows)
        print()
    for title, lines in (
        ("found", report.findings(made)),
        ("overtaking", [str(one) for one in made.crossings]),
        ("left out", report.left_out(made)),
    ):
        if lines:
            print(f"{title}\n  " + "\n  ".join(lines) + "\n")
