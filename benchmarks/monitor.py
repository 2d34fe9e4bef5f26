"""Latency of the monitors with ten logs of 100,000 steps, with gaps, restarts and NaN.

python benchmarks/monitor.py            (the browser part needs Chromium and playwright)
python benchmarks/monitor.py --runs 1 --steps 2080000       a log of 1 GB
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from long_log import write_run
from m1clip.monitor.log import RunView
from m1clip.monitor.terminal_views import curves_view
from m1clip.run import Run

REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "runs"
        first = write_run(folder / "night-0", args.steps)
        for index in range(1, args.runs):
            shutil.copytree(first, folder / f"night-{index}")
        size = (first / "metrics.jsonl").stat().st_size / 1e6
        print(f"{args.runs} runs of {args.steps:,} steps, {size:.0f} MB of log each")
        report("read a whole log", [seconds(lambda: RunView(Run(first)).refresh()) for _ in range(REPEATS)])
        run = RunView(Run(first))
        run.refresh()
        console = Console(width=160, file=open(os.devnull, "w"))  # noqa: SIM115
        draw = [seconds(lambda: console.print(curves_view([run], 160, 48))) for _ in range(REPEATS)]
        report("draw six curves as text", draw)
        command = [sys.executable, "-m", "m1clip", "monitor", "--runs", str(folder)]
        once = [*command, "--once"]
        snapshot = [seconds(lambda: subprocess.run(once, capture_output=True)) for _ in range(REPEATS)]
        report("monitor --once", snapshot)
        report("terminal: start to first screen", [terminal_start(command) for _ in range(REPEATS)])
        measure_browser(command, args.runs)


def seconds(act) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def report(name: str, times: list[float]) -> None:
    print(f"{name:55} {median(times):6.2f} s  ({min(times):.2f}–{max(times):.2f})", flush=True)


def terminal_start(command: list[str]) -> float:
    """Seconds until the name of the run is on a pseudo-terminal of 80 x 24."""
    import pty

    start = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(command[0], command)
    output = b""
    while b"night-" not in output:
        output += os.read(terminal, 65536)
    elapsed = time.perf_counter() - start
    os.write(terminal, b"q")
    while True:  # until it ends: it would block if nobody read its output
        try:
            if not os.read(terminal, 65536):
                break
        except OSError:
            break
    os.waitpid(pid, 0)
    os.close(terminal)
    return elapsed


def measure_browser(command: list[str], runs: int) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    entries = "...performance.getEntriesByType('paint'), ...performance.getEntriesByType('mark')"
    marks = f"Object.fromEntries([{entries}].reverse().map(entry => [entry.name, entry.startTime / 1000]))"
    draws = "performance.getEntriesByName('curves').length"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        times: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            with serve(command) as address:
                page = browser.new_page(viewport={"width": 1400, "height": 900})
                page.goto(address, wait_until="commit")
                wait_until(page, f"{draws} > 0")
                for name, value in page.evaluate(marks).items():
                    times.setdefault(name, []).append(value)
                wait_until(page, "document.getElementById('reading').textContent === ''")
                times.setdefault("history", []).append(page.evaluate("performance.now() / 1000"))
                page.close()
        report("browser: first paint", times["first-contentful-paint"])
        report("browser: list of runs", times["table"])
        report("browser: curves of one run (with the start of plotly)", times["curves"])
        report("browser: the history of its log is read", times["history"])
        with serve(command) as address:
            page = browser.new_page(viewport={"width": 1400, "height": 900})
            others = "".join(f"&with=night-{index}" for index in range(1, runs))
            start = time.perf_counter()
            page.goto(f"{address}#run=night-0{others}")
            wait_until(page, f"document.getElementById('chart-loss')?.data?.length === {runs + 1}")
            report(f"browser: curves of {runs} runs, no log read yet", [time.perf_counter() - start])
            changes = []
            for value in 3 * ("100", "0"):
                count, start = page.evaluate(draws), time.perf_counter()
                page.select_option("#smooth", value)
                wait_until(page, f"{draws} > {count}")
                changes.append(time.perf_counter() - start)
            report(f"browser: change the smoothing of {runs} runs", changes)
            page.close()
        browser.close()


def wait_until(page, condition: str) -> None:
    while not page.evaluate(condition):
        time.sleep(0.01)


@contextmanager
def serve(command: list[str]):
    """The web monitor in its own process; yields the address."""
    process = subprocess.Popen([*command, "--web"], stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        status = Path(f"/proc/{process.pid}/status")  # ru_maxrss would include this process, which forked it
        if status.exists() and (peak := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
            print(f"    peak memory of the server: {int(peak[1]) * 1024 / 1e9:.2f} GB")
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
