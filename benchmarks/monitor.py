"""How soon and how smoothly a long run is shown: ten logs of 100,000 steps, with gaps, restarts and NaN.

python benchmarks/monitor.py            (the browser's part needs Chromium and playwright)
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # longlog writes what the tests read
from longlog import write_run
from m1clip.monitor.log import Followed
from m1clip.monitor.terminal_views import learning
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
        for number in range(1, args.runs):
            shutil.copytree(first, folder / f"night-{number}")
        size = (first / "metrics.jsonl").stat().st_size / 1e6
        print(f"{args.runs} runs of {args.steps:,} steps, {size:.0f} MB of log each")
        say("read a whole log", [timed(lambda: Followed(Run(first)).refresh()) for _ in range(REPEATS)])
        one = Followed(Run(first))
        one.refresh()
        say("draw six curves as text", [timed(lambda: learning([one], 160, 48)) for _ in range(REPEATS)])
        words = [sys.executable, "-m", "m1clip", "monitor", "--runs", str(folder)]
        once = [*words, "--once"]
        say(
            "monitor --once",
            [timed(lambda: subprocess.run(once, capture_output=True)) for _ in range(REPEATS)],
        )
        say("terminal: from the command to its first image", [terminal(words) for _ in range(REPEATS)])
        browser(words, args.runs)


def timed(act) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def say(what: str, seconds: list[float]) -> None:
    print(f"{what:55} {median(seconds):6.2f} s  ({min(seconds):.2f}–{max(seconds):.2f})", flush=True)


def terminal(words: list[str]) -> float:
    """On a pseudo-terminal of 80 × 24, until the name of the run stands there."""
    import pty

    began = time.perf_counter()
    pid, console = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS="80", LINES="24")
        os.execv(words[0], words)
    seen = b""
    while b"night-" not in seen:
        seen += os.read(console, 65536)
    took = time.perf_counter() - began
    os.write(console, b"q")
    while True:  # until it has ended: it would wait for somebody to read what it draws
        try:
            if not os.read(console, 65536):
                break
        except OSError:
            break
    os.waitpid(pid, 0)
    os.close(console)
    return took


def browser(words: list[str], runs: int) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    entries = "...performance.getEntriesByType('paint'), ...performance.getEntriesByType('mark')"
    marks = f"Object.fromEntries([{entries}].reverse().map(one => [one.name, one.startTime / 1000]))"
    drawn = "performance.getEntriesByName('curves').length"
    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        found: dict[str, list[float]] = {}
        for _ in range(REPEATS):
            with serving(words) as address:
                page = made.new_page(viewport={"width": 1400, "height": 900})
                page.goto(address, wait_until="commit")
                until(page, f"{drawn} > 0")
                for name, seconds in page.evaluate(marks).items():
                    found.setdefault(name, []).append(seconds)
                page.close()
        say("browser: first paint", found["first-contentful-paint"])
        say("browser: the table of runs", found["table"])
        say("browser: curves of one run (plotly's start included)", found["curves"])
        with serving(words) as address:
            page = made.new_page(viewport={"width": 1400, "height": 900})
            others = "".join(f"&with=night-{number}" for number in range(1, runs))
            began = time.perf_counter()
            page.goto(f"{address}#run=night-0{others}")
            until(page, f"document.getElementById('chart-loss')?.data?.length === {runs + 1}")
            say(f"browser: curves of {runs} runs, all logs unread", [time.perf_counter() - began])
            changes = []
            for value in 3 * ("100", "0"):
                count, began = page.evaluate(drawn), time.perf_counter()
                page.select_option("#smooth", value)
                until(page, f"{drawn} > {count}")
                changes.append(time.perf_counter() - began)
            say(f"browser: another smoothing of {runs} runs", changes)
            page.close()
        made.close()


def until(page, condition: str) -> None:
    while not page.evaluate(condition):
        time.sleep(0.01)


@contextmanager
def serving(words: list[str]):
    """The page's server, in a process of its own; its address."""
    process = subprocess.Popen([*words, "--web"], stdout=subprocess.PIPE, text=True)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
