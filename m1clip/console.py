"""Terminal output: progress, warnings and the training table on stderr; result tables on stdout. No torch."""

import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table
from rich.text import Text

from m1clip.format import UNKNOWN, duration, number, percent, printable, wilson_interval

EPOCH_COLUMNS = {"epoch": 8, "loss": 8, "accuracy": 10, "labels": 10, "zero-shot": 11}  # names and widths
EPOCH_COLUMNS |= {"image→text": 12, "text→image": 12, "temp.": 9, "pairs/s": 9, "seconds": 9}
LINE_S, TRAINING_LINE_S = 10.0, 30.0  # between lines of progress where the output is not a terminal
NOTABLE_LEAK = 0.05  # fraction of validation captions that also occur in training
NUMERIC = re.compile(rf"[-+≈~<>]?[\d.,]+.*|{UNKNOWN}|")


class PipeConsole(RichConsole):
    """Leaves a closed pipe, as of `| head`, to the caller; rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class UnbreakableStream:
    """A terminal that may be closed while training goes on: write errors are ignored."""

    def __init__(self, stream: IO[str]):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self.stream.flush()


class ProgressLines:
    """Progress as lines of text: how much is done, and the time left at the rate of the last minute."""

    def __init__(self, description: str, total: int | None, clock: Callable[[], float], unit: str = ""):
        self.description, self.total, self.clock, self.done, self.unit = description, total, clock, 0, unit
        self.started = clock()
        self.recent = deque([(self.started, 0)], maxlen=round(60 / LINE_S))

    def advance(self, count: int) -> None:
        self.done += count

    def line(self) -> str:
        now, (then, before) = self.clock(), self.recent[0]
        self.recent.append((now, self.done))
        if self.total is None:
            return f"{self.description}: {self.done:,} after {duration(now - self.started)}"
        line = f"{self.description} {self.done:,} of {self.total:,}"
        if self.done == before:
            return line
        speed = (self.done - before) / (now - then)
        rate = f", {number(speed)} {self.unit}" if self.unit else ""
        return f"{line}{rate}, about {duration((self.total - self.done) / speed)} left"

    @contextmanager
    def printed(self, write: Callable[[str], None]) -> Iterator[None]:
        """Write a line every LINE_S, also while nothing advances."""
        ended = threading.Event()

        def write_lines() -> None:
            while not ended.wait(LINE_S):
                write(self.line())

        thread = threading.Thread(target=write_lines, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class SpeedColumn(ProgressColumn):
    def __init__(self, unit: str):
        super().__init__()
        self.unit = unit

    def render(self, task: Task) -> Text:
        return Text(f"{number(task.speed)} {self.unit}" if task.speed else "")


class Console:
    """Progress, warnings and the table of a run on stderr."""

    def __init__(self, stream: IO[str] | None = None, clock: Callable[[], float] = time.monotonic):
        stream = cast(IO[str], UnbreakableStream(stream or sys.stderr))
        self.console = RichConsole(file=stream, highlight=False)
        if self.console.is_jupyter:  # each line would be an HTML output of its own; plain text is one
            self.console = RichConsole(file=stream, highlight=False, force_jupyter=False, force_terminal=False)
        self.training_bar: Progress | None = None
        self.clock, self.line_at = clock, clock()  # when the last line of training progress was printed
        self.shown = {"labels": False, "zero-shot": False}  # columns of the epoch table that not every run has

    def print(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning; one line when the output is a file."""
        text = f"[bold yellow]{escape(printable(text))}[/]"
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def progress(self, description: str, total: int | None, unit: str = "") -> Iterator[Callable[[int], None]]:
        """A progress bar, or lines in a file; yields a function that advances it. Without a total it only counts.

        With a unit, such as images/s, it shows the speed.
        """
        if not self.console.is_terminal:
            lines = ProgressLines(description, total, self.clock, unit)
            with lines.printed(lambda line: self.print(escape(line))):
                yield lines.advance
            return
        with self._bar(escape(description), total, unit=unit) as bar:
            yield lambda count: bar.advance(bar.task_ids[0], count)

    @contextmanager
    def progress_items(self, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar that names its current item; yields a function that starts the next one."""
        with self._bar("", total, completed=-1) as bar:

            def start(item: str) -> None:
                bar.update(bar.task_ids[0], advance=1, description=escape(item))
                if not self.console.is_terminal:
                    self.print(escape(item))

            yield start

    def print_fact(self, name: str, fact: str) -> None:
        self.print(f"[dim]{name:>10}[/]  {escape(fact)}")

    def print_header(self, facts: dict[str, str], chance: dict[str, Any]) -> None:
        """What is about to be trained, and the head of the epoch table with chance as its first row."""
        for name, fact in facts.items():
            self.print_fact(name, fact)
        self.shown = {"labels": "chance_label" in chance, "zero-shot": "chance_zeroshot" in chance}
        keys = ("accuracy", "label", "zeroshot", "i2t_r1", "t2i_r1")
        scores = [percent(known_score(chance, f"chance_{key}")) for key in keys]
        self.print(f"\n[bold]{self._epoch_row(*EPOCH_COLUMNS)}[/]")
        self.print(f"[dim]{self._epoch_row('', '', 'in batch', 'accuracy', 'accuracy', 'R@1', 'R@1')}[/]")
        loss = f"{chance['chance_loss']:.3f}"
        self.print(f"[dim]{self._epoch_row('chance', loss, *scores)}[/]")

    @contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        self.line_at = self.clock()
        with self._bar("first steps", total, step) as self.training_bar:
            yield

    def update_training(self, step: int, records: list[dict[str, Any]], total: int) -> None:
        """Show means of the last steps."""
        assert self.training_bar is not None
        last, valid = records[-1], [record for record in records if not record.get("skipped")]
        loss = sum(record["loss"] for record in valid) / len(valid) if valid else float("nan")
        accuracies = [record["accuracy"] for record in valid if record["accuracy"] is not None]
        accuracy = sum(accuracies) / len(accuracies) if accuracies else None
        chance, speed = f"{last['chance_loss']:.2f}, {percent(last['chance_accuracy'])}", last["pairs_per_s"]
        metrics = f"loss {loss:.3f}, accuracy {percent(accuracy)} [dim](chance {chance})[/], {speed:.0f} pairs/s"
        self.training_bar.update(self.training_bar.task_ids[0], completed=step, total=total, description=metrics)
        if self.needs_training_line():
            self.line_at = self.clock()
            step_s = sum(record["step_ms"] + record["between_ms"] for record in records) / len(records) / 1e3
            self.print(f"step {step:,} of {total:,}: {metrics}, about {duration((total - step) * step_s)} left")

    def needs_training_line(self) -> bool:
        """Whether progress of the training is due in an output that is not a terminal."""
        return not self.console.is_terminal and self.clock() - self.line_at >= TRAINING_LINE_S

    def print_epoch(self, epoch: int, epochs: int | None, means: dict[str, Any], scores: dict[str, Any] | None) -> None:
        keys = ("label_accuracy", "zeroshot_accuracy", "i2t_r1", "t2i_r1")
        recalls = [percent(known_score(scores, key)) for key in keys] if scores else [""] * len(keys)
        loss = UNKNOWN if means["loss"] is None else f"{means['loss']:.3f}"
        speed = (f"{means['temperature']:.4f}", f"{means['pairs_per_s']:.0f}", f"{means['seconds']:.1f}")
        name = f"{epoch}/{epochs}" if epochs else f"{epoch}"
        self.line_at = self.clock()
        self.print(self._epoch_row(name, loss, percent(means["accuracy"]), *recalls, *speed))

    def _epoch_row(self, *cells: str) -> str:
        """One cell per column, without those that the run does not have."""
        columns = zip(cells, EPOCH_COLUMNS.items(), strict=False)
        return "".join(f"{cell:>{width}}" for cell, (name, width) in columns if self.shown.get(name, True))

    def _bar(self, description: str, total: int | None, completed: int = 0, unit: str = "") -> Progress:
        bar = BarColumn(max(4, min(40, self.console.width - 80)))
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), bar, MofNCompleteColumn()]
        columns += [SpeedColumn(unit)] if unit else []
        columns.append(TimeRemainingColumn(compact=True))
        disable = not self.console.is_terminal
        progress = Progress(*columns, console=self.console, transient=True, disable=disable)
        progress.add_task(description, total=total, completed=completed)
        return progress


def known_score(scores: Mapping[str, Any], key: str) -> float | None:
    """A recall; None where every answer is correct, because all captions are equal."""
    return None if scores.get(f"chance_{key.removeprefix('chance_')}") == 1 else scores.get(key)


def loading(description: str = "loading torch") -> Status:
    """A spinner while torch is imported or something else is waited for."""
    return RichConsole(stderr=True).status(description)


def command(*words: object) -> str:
    """A command line of this program that works here: the program may not be on the path."""
    program = ["m1clip"] if shutil.which("m1clip") else [min(os.path.relpath(sys.argv[0]), sys.argv[0], key=len)]
    if program[0].endswith("__main__.py"):
        program = ["python", "-m", "m1clip"]
    return shlex.join([*program, *map(str, words)])


def show_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of text without the columns in which nothing is known; numbers are right-aligned, chance is dim."""
    by_column = zip(columns, zip(*rows, strict=True), strict=False)  # not strict: there may be no rows
    known = {name: cells for name, cells in by_column if set(cells) != {UNKNOWN}}
    if not known:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, cells in known.items():
        if all(map(NUMERIC.fullmatch, cells)):
            table.add_column(name, justify="right")
        else:
            table.add_column(name, overflow="fold")
    for row in zip(*known.values(), strict=True):
        table.add_row(*row, style="dim" if row[0].partition(" ")[0] == "chance" else "")
    console = PipeConsole(highlight=False)
    if not console.is_terminal:  # a file has no width
        console.width = 200
    console.print(f"[bold]{title}[/]", soft_wrap=True)
    console.print(table)


def show_retrieval(
    scores: Mapping[str, Any], near_duplicates: int | None = None, what: str = "validation retrieval"
) -> None:
    """The record of a Retrieval, with chance; `near_duplicates`: validation images that look like a training image."""
    if "label_accuracy" in scores:
        low, high = wilson_interval(scores["label_accuracy"], scores["images"])
        keys, labels = ("label_accuracy", "chance_label", "most_frequent_label", "label_top5"), scores["labels"]
        accuracy, chance, majority, top5 = (percent(scores[key]) for key in keys)
        guesses = f"chance {chance}, most frequent label {majority}; 95 % interval {100 * low:.1f}–{100 * high:.1f}"
        top5 = f"; top-5 {top5} (chance {percent(5 / labels)})" if labels > 5 else ""
        print(f"accuracy over {labels:,} labels {accuracy} ({guesses}){top5}\n")
    prefixes = {"image→text": "i2t", "text→image": "t2i", "chance i→t": "chance_i2t", "chance t→i": "chance_t2i"}
    rows = []
    for name, prefix in prefixes.items():
        recalls = [percent(scores[f"{prefix}_{key}"]) for key in ("r1", "r5", "r10")]
        rows.append((name, *recalls, f"{round(scores[f'{prefix}_median_rank'], 1):g}"))
    if rows[2][1:] == rows[3][1:]:
        rows[2:] = [("chance", *rows[2][1:])]
    distinct = (
        "" if scores["distinct_captions"] == scores["captions"] else f", {scores['distinct_captions']:,} distinct"
    )
    title = f"{what}: {scores['images']:,} images, {scores['captions']:,} captions{distinct}"
    show_rows(title, ("", "R@1", "R@5", "R@10", "median rank"), rows)
    if scores["distinct_captions"] == 1:
        print("\nall captions are equal, so every answer is correct: these recalls say nothing")
    elif "label_accuracy" not in scores and scores.get("seen_captions", 0) >= NOTABLE_LEAK * scores["captions"]:
        show_seen_captions(scores)
    if type(near_duplicates) is int and near_duplicates > 0:  # of a file that may have been edited
        print(f"\n{near_duplicates:,} validation images look like a training image; m1clip data check lists them")


def show_seen_captions(scores: Mapping[str, Any]) -> None:
    """Scores of validation captions that also occur in training, and of the others."""
    keys = ("captions", "i2t_r1", "t2i_r1")
    rows = []
    for name in ("seen", "unseen"):
        captions, i2t, t2i = (scores[f"{name}_{key}"] for key in keys)
        rows.append((name, f"{captions:,}", percent(i2t), percent(t2i)))
    leaked = f"{scores['seen_captions']:,} of {scores['captions']:,} captions also occur in training"
    title = f"\n{leaked}; --group-by caption keeps equal captions in one split"
    show_rows(title, ("captions", "number", "image→text R@1", "text→image R@1"), rows)
