"""Terminal output: progress, warnings and the training table on stderr; result tables on stdout. No torch."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, Protocol, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.table import Table

from m1clip.format import UNKNOWN, percent, printable

EPOCH_COLUMNS = {
    "epoch": 8,
    "loss": 8,
    "accuracy": 10,
    "image→text": 12,
    "text→image": 12,
    "temp.": 9,
    "pairs/s": 9,
    "seconds": 9,
}
NUMERIC = re.compile(rf"[-+≈~<>]?[\d.,]+.*|{UNKNOWN}|")


class RecallScores(Protocol):
    """R@1 of an evaluation, as the epoch table shows it."""

    @property
    def image_to_text(self) -> Any: ...
    @property
    def text_to_image(self) -> Any: ...


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
        with self._bar(TextColumn(escape(description)), total) as bar:
            yield lambda count: bar.advance(bar.task_ids[0], count)

    @contextmanager
    def progress_items(self, total: int) -> Iterator[Callable[[str], None]]:
        """A progress bar that names its current item; yields a function that starts the next one."""
        with self._bar(TextColumn("{task.fields[item]}"), total, completed=-1, item="") as bar:

            def start(item: str) -> None:
                bar.update(bar.task_ids[0], advance=1, item=escape(item))
                if not self.console.is_terminal:
                    self.print(escape(item))

            yield start

    def print_header(
        self, facts: dict[str, str], chance: dict[str, float], chance_recalls: tuple[float, float]
    ) -> None:
        """What is about to be trained, and the head of the epoch table with chance as its first row."""
        for name, fact in facts.items():
            self.print(f"[dim]{name:>10}[/]  {escape(fact)}")
        recalls = map(percent, chance_recalls)
        cells = (f"{chance['chance_loss']:.3f}", percent(chance["chance_accuracy"]), *recalls)
        self.print(f"\n[bold]{_row(list(EPOCH_COLUMNS))}[/]")
        self.print(f"[dim]{_row(('', '', 'in batch', 'R@1', 'R@1'))}[/]")
        self.print(f"[dim]{_row(('chance', *cells))}[/]")

    @contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        column = TextColumn("{task.fields[metrics]}")
        with self._bar(column, total, completed=step, metrics="first steps") as self.training_bar:
            yield

    def update_training(self, step: int, records: list[dict[str, Any]], total: int) -> None:
        """Show means of the last steps."""
        assert self.training_bar is not None
        valid = [record for record in records if not record.get("skipped")]
        valid = valid or [{"loss": float("nan"), "accuracy": 0.0}]
        loss, accuracy = (sum(record[key] for record in valid) / len(valid) for key in ("loss", "accuracy"))
        last = records[-1]
        metrics = (
            f"loss {loss:.3f}, accuracy {percent(accuracy)} [dim](chance {last['chance_loss']:.2f}, "
            f"{percent(last['chance_accuracy'])})[/] {last['pairs_per_s']:.0f} pairs/s"
        )
        self.training_bar.update(self.training_bar.task_ids[0], completed=step, total=total, metrics=metrics)

    def print_epoch(self, epoch: int, epochs: int | None, means: dict[str, Any], scores: RecallScores | None) -> None:
        recalls = [percent(way.r1) for way in (scores.image_to_text, scores.text_to_image)] if scores else ["", ""]
        cells = (
            f"{epoch}/{epochs}" if epochs else f"{epoch}",
            UNKNOWN if means["loss"] is None else f"{means['loss']:.3f}",
            percent(means["accuracy"]),
            *recalls,
            f"{means['temperature']:.4f}",
            f"{means['pairs_per_s']:.0f}",
            f"{means['seconds']:.1f}",
        )
        self.print(_row(cells))

    def _bar(self, first: ProgressColumn, total: int | None, **fields: Any) -> Progress:
        bar = BarColumn(max(4, min(40, self.console.width - 80)))
        columns = (first, bar, MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        hidden = not self.console.is_terminal
        progress = Progress(*columns, console=self.console, transient=True, disable=hidden)
        progress.add_task("", total=total, **fields)
        return progress


def _row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, EPOCH_COLUMNS.values(), strict=False))


def loading(description: str = "loading torch") -> Status:
    """A spinner while torch is imported or something else is waited for."""
    return RichConsole(stderr=True).status(description)


def command(*words: object) -> str:
    """A command line of this program that works here: the program may not be on the path."""
    program = ["m1clip"]
    if not shutil.which("m1clip"):
        program = [min(os.path.relpath(sys.argv[0]), sys.argv[0], key=len)]
    if program[0].endswith("__main__.py"):
        program = ["python", "-m", "m1clip"]
    return shlex.join([*program, *map(str, words)])


def table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    return made


def show(title: str, made: Table) -> None:
    console = RichConsole(highlight=False)
    if not console.is_terminal:  # a file has no width
        console.width = 200
    console.print(f"[bold]{title}[/]", soft_wrap=True)
    console.print(made)


def show_rows(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table of text without the columns in which nothing is known; numbers are right-aligned."""
    lines = [list(row) for row in rows]
    if not lines:
        return
    kept = [i for i in range(len(columns)) if any(line[i] != UNKNOWN for line in lines)]
    made = table(*(columns[i] for i in kept))
    for column, i in zip(made.columns, kept, strict=True):
        numeric = all(NUMERIC.fullmatch(line[i]) for line in lines)
        column.justify, column.overflow = ("right", "ellipsis") if numeric else ("left", "fold")
    for line in lines:
        made.add_row(*(line[i] for i in kept))
    show(title, made)
