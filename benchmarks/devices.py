"""Measure this machine and write it down: its section of docs/devices.md, made anew.

python benchmarks/devices.py            doctor, bench, bench scaling, compare: about a quarter of an hour
python benchmarks/devices.py --quick    a first look, in a few minutes

Or `make devices`. Sections of other machines stay as they are.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TokenizedCaptions = dict[str, Any]
DOCS = Path(__file__).parent.parent / "docs" / "devices.md"
START, END = "<!-- measured: {} -->", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, and no scaling beyond small")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    quick = ["--quick"] if args.quick else []
    few = ["--presets", "nano", "tiny", "small"] if args.quick else []
    told = {"doctor": asked("doctor"), "bench": asked("bench", *quick)}
    told |= {"scaling": asked("bench", "scaling", *few), "compare": asked("compare")}
    write(args.docs, told["doctor"]["machine"], section(**told))
    print(f"written to {args.docs}")


def asked(*words: str) -> dict[str, Any]:
    """One verb in a process of its own; its progress is shown, its result is JSON."""
    print(f"m1clip {' '.join(words)}", file=sys.stderr)
    command = [sys.executable, "-m", "m1clip", *words, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        sys.exit(f"m1clip {' '.join(words)} ended with {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def section(
    doctor: TokenizedCaptions, bench: TokenizedCaptions, scaling: TokenizedCaptions, compare: TokenizedCaptions
) -> str:
    machine = doctor["machine"]
    name = f"{machine['chip']}, {machine['cores']} cores, {machine['ram_gb']:.0f} GB"
    peaks = [f"{one['device']} {one['gflops']:,.0f} GFLOP/s in {one['precision']}" for one in bench["peaks"]]
    day = f"{time.strftime('%d %B %Y')}, {machine['os']}, torch {machine['torch']}"
    lines = [f"### {name}", f"{day}. Best product: {', '.join(peaks)}."]
    trust = [one for one in doctor["checks"] if one["about"] in ("cuda", "mps")]
    lines += [f"{one['about']}: {one['state']}, {one['found']}." for one in trust]
    columns = ("model", "batch", "plan", "ms a step", "middle half", "pairs/s", "of peak", "GB")
    lines.append(table(columns, [step_row(row) for row in bench["steps"]]))
    lines.append("\n".join(f"- {one['text']}" for one in bench["crossings"]))
    columns = ("model", "parameters", "batch", "ms a pair", "extrapolated", "GB", "documents' GPU/CPU")
    lines.append(table(columns, [size_row(one) for one in scaling["sizes"]]))
    columns = ("trained on", "ms a step", "pairs/s", "speed", "GB", "losses apart")
    lines.append(table(columns, [run_row(one) for one in compare["runs"]]))
    return "\n\n".join(lines)


def step_row(row: dict[str, Any]) -> list[str]:
    plan = [row["device"], *([row["precision"]] if row["precision"] != "fp32" else [])]
    plan += ["compiled"] if row["compile"] else []
    plan += [f"{row['threads']} thread{'s' * (row['threads'] > 1)}"] if row["threads"] else []
    used = "–" if row["utilization"] is None else f"{100 * row['utilization']:.0f} %"
    spread = f"{number(row['low_ms'])}–{number(row['high_ms'])}"
    speeds = (number(row["step_ms"]), spread, number(row["pairs_per_s"]), used, f"{row['peak_gb']:.2f}")
    return [row["preset"], f"{row['batch']}", ", ".join(plan), *speeds]


def size_row(one: dict[str, Any]) -> list[str]:
    times = [row["step_ms"] / row["batch"] for row in one["measured"].values()]
    told = "–"
    if one["fitted_ms"]:
        told = f"{number(one['fitted_ms'])} ({number(one['low_ms'])}–{number(one['high_ms'])})"
    real = number(times[0]) if times else f"not run: {one['reason']}"
    batch = str(one["batch"]) if times else "–"
    rest = (batch, real, told, f"{one['memory_gb']:.2f}", f"{one['documents_speedup']:g}")
    return [one["name"], f"{number(one['parameters'] / 1e6)} M", *rest]


def run_row(one: dict[str, Any]) -> list[str]:
    if "failed" in one:
        return [one["requested"], one["failed"], *["–"] * 4]
    speeds = (number(one["step_ms"]), number(one["pairs_per_s"]), f"{one['speed']:.2f}×")
    return [one["requested"], *speeds, f"{one['peak_gb']:.2f}", f"{one['losses_apart']:.1e}"]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(docs: Path, machine: dict[str, Any], text: str) -> None:
    """In place of what the page has of this machine, or after the others."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['chip']} {machine['cores']} {machine['ram_gb']:.0f}".lower())
    start, old = START.format(name), docs.read_text()
    whole = f"{start}\n\n{text}\n\n{END}"
    if start in old:
        before, after = old.split(start, 1)
        docs.write_text(before + whole + after.split(END, 1)[1])
    else:
        docs.write_text(old.rstrip() + "\n\n" + whole + "\n")


if __name__ == "__main__":
    main()
