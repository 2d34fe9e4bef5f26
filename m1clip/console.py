"""Terminal output: progress, warnings and the training table on stderr; result tables on stdout. No torch."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from m1clip.format import UNKNOWN, percent, printable

EPOCH_COLUMNS = {"epoch": 8, "loss": 8, "accuracy": 10, "image→text": 12, "text→image": 12}  # names and widths
EPOCH_COLUMNS |= {"temp.": 9, "pairs/s": 9, "seconds": 9}
NUMERIC = re.compile(rf"[-+≈~<>]?[\d.,]+.*|{UNKNOWN}|")


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


class Console:
    """Progress, warnings and the table of a run on stderr."""

    def __init__(self, stream: IO[str] | None = None):
        stream = cast(IO[str], UnbreakableStream(stream or sys.stderr))
        self.console = RichConsole(file=stream, highlight=False)
        if self.console.is_jupyter:  # each line would be an HTML output of its own; plain text is one
            self.console = RichConsole(file=stream, highlight=False, force_jupyter=False, force_terminal=False)
        self.training_bar: Progress | None = None

    def print(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """A warning; one line when the output is a file."""
        text = f"[bold yellow]{escape(printable(text))}[/]"
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    @contextmanager
    def progress(self, description: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A progress bar; yields a function that advances it. Without a total it only counts."""
        with self._bar(escape(description), total) as bar:
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

    def print_header(self, facts: dict[str, str], chance: dict[str, float], recalls: tuple[float, float]) -> None:
        """What is about to be trained, and the head of the epoch table with chance as its first row."""
        for name, fact in facts.items():
            self.print(f"[dim]{name:>10}[/]  {escape(fact)}")
        cells = (f"{chance['chance_loss']:.3f}", percent(chance["chance_accuracy"]), *map(percent, recalls))
        self.print(f"\n[bold]{_epoch_row(*EPOCH_COLUMNS)}[/]")
        self.print(f"[dim]{_epoch_row('', '', 'in batch', 'R@1', 'R@1')}[/]")
        self.print(f"[dim]{_epoch_row('chance', *cells)}[/]")

    @contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        with self._bar("first steps", total, step) as self.training_bar:
            yield

    def update_training(self, step: int, records: list[dict[str, Any]], total: int) -> None:
        """Show means of the last steps."""
        assert self.training_bar is not None
        last, valid = records[-1], [record for record in records if not record.get("skipped")]
        valid = valid or [{"loss": float("nan"), "accuracy": 0.0}]
        loss, accuracy = (sum(record[key] for record in valid) / len(valid) for key in ("loss", "accuracy"))
        chance, speed = f"{last['chance_loss']:.2f}, {percent(last['chance_accuracy'])}", last["pairs_per_s"]
        metrics = f"loss {loss:.3f}, accuracy {percent(accuracy)} [dim](chance {chance})[/] {speed:.0f} pairs/s"
        self.training_bar.update(self.training_bar.task_ids[0], completed=step, total=total, description=metrics)

    def print_epoch(self, epoch: int, epochs: int | None, means: dict[str, Any], scores: dict[str, Any] | None) -> None:
        recalls = [percent(scores[key]) for key in ("i2t_r1", "t2i_r1")] if scores else ["", ""]
        loss = UNKNOWN if means["loss"] is None else f"{means['loss']:.3f}"
        speed = (f"{means['temperature']:.4f}", f"{means['pairs_per_s']:.0f}", f"{means['seconds']:.1f}")
        name = f"{epoch}/{epochs}" if epochs else f"{epoch}"
        self.print(_epoch_row(name, loss, percent(means["accuracy"]), *recalls, *speed))

    def _bar(self, description: str, total: int | None, completed: int = 0) -> Progress:
        bar = BarColumn(max(4, min(40, self.console.width - 80)))
        columns = (TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        disable = not self.console.is_terminal
        progress = Progress(*columns, console=self.console, transient=True, disable=disable)
        progress.add_task(description, total=total, completed=completed)
        return progress


def _epoch_row(*cells: str) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, EPOCH_COLUMNS.values(), strict=False))


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
    console = RichConsole(highlight=False)
    if not console.is_terminal:  # a file has no width
        console.width = 200
    console.print(f"[bold]{title}[/]", soft_wrap=True)
    console.print(table)


def show_retrieval(scores: Mapping[str, float]) -> None:
    """The record of a Retrieval, with chance."""
    prefixes = {"image→text": "i2t", "text→image": "t2i", "chance i→t": "chance_i2t", "chance t→i": "chance_t2i"}
    rows = []
    for name, prefix in prefixes.items():
        recalls = [percent(scores[f"{prefix}_{key}"]) for key in ("r1", "r5", "r10")]
        rows.append((name, *recalls, f"{round(scores[f'{prefix}_median_rank'], 1):g}"))
    if rows[2][1:] == rows[3][1:]:
        rows[2:] = [("chance", *rows[2][1:])]
    title = f"validation retrieval: {scores['images']:,} images, {scores['captions']:,} captions"
    show_rows(title, ("", "R@1", "R@5", "R@10", "median rank"), rows)
