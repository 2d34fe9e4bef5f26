"""Measure this machine and write its section of docs/devices.md.

python benchmarks/devices.py            doctor, bench, bench scaling, compare: about a quarter of an hour
python benchmarks/devices.py --quick    a few minutes

Or `make devices`. Sections of other machines stay as they are.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from m1clip.bench.report import SCALING_COLUMNS, STEP_COLUMNS, make_table
from m1clip.commands.compare import COMPARE_COLUMNS
from m1clip.document import markdown_table

DOCS = Path(__file__).parent.parent / "docs" / "devices.md"
START, END = "<!-- measured: {} -->", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, and no model larger than small")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    doctor, bench = run_m1clip("doctor"), run_m1clip("bench", *["--quick"] * args.quick)
    scaling = run_m1clip("bench", "scaling", *(["--presets", "nano", "tiny", "small"] if args.quick else []))
    section = describe_machine(doctor, bench, scaling, run_m1clip("compare"))
    replace_section(args.docs, doctor["machine"], section)
    print(f"written to {args.docs}")


def run_m1clip(*arguments: str) -> dict[str, Any]:
    """The JSON of a command; its progress is shown."""
    print(f"m1clip {' '.join(arguments)}", file=sys.stderr)
    command = [sys.executable, "-m", "m1clip", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(f"m1clip {' '.join(arguments)} ended with exit code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def describe_machine(
    doctor: dict[str, Any], bench: dict[str, Any], scaling: dict[str, Any], compare: dict[str, Any]
) -> str:
    machine = doctor["machine"]
    peaks = [f"{peak['device']} {peak['gflops']:,.0f} GFLOP/s in {peak['precision']}" for peak in bench["peaks"]]
    day = f"{time.strftime('%d %B %Y')}, {machine['os']}, PyTorch {machine['torch']}"
    gpus = [check for check in doctor["checks"] if check["name"] in ("cuda", "mps")]
    blocks = [
        f"### {machine['chip']}, {machine['cores']} cores, {machine['ram_gb']:.0f} GB",
        f"{day}. Fastest matrix product: {', '.join(peaks)}.",
        *(f"{check['name']}: {check['status']}, {check['result']}." for check in gpus),
        markdown_table(*make_table(STEP_COLUMNS, bench["steps"])),
        bullets([crossover["text"] for crossover in bench["crossovers"]]),
        markdown_table(*make_table(SCALING_COLUMNS, scaling["models"])),
        bullets(scaling["skipped"]),
        markdown_table(*make_table(COMPARE_COLUMNS, compare["runs"])),
        bullets(compare["warnings"]),
    ]
    return "\n\n".join(block for block in blocks if block)


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def replace_section(docs: Path, machine: dict[str, Any], text: str) -> None:
    """Replace the section of this machine, or append one."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['chip']} {machine['cores']} {machine['ram_gb']:.0f}".lower())
    start, old = START.format(name), docs.read_text()
    section = f"{start}\n\n{text}\n\n{END}"
    if start in old:
        before, after = old.split(start, 1)
        docs.write_text(before + section + after.split(END, 1)[1])
    else:
        docs.write_text(old.rstrip() + "\n\n" + section + "\n")


if __name__ == "__main__":
    main()
