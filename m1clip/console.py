"""What a person sees of a run: a header, a bar that moves, a row an epoch. Everything on stderr."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from m1clip.format import percent, printable

if TYPE_CHECKING:
    from m1clip.evals.retrieval import Retrieval

COLUMNS = ("epoch", "loss", "accuracy", "image→text", "text→image", "temp.", "pairs/s", "seconds")
WIDTHS = (8, 8, 10, 12, 12, 9, 9, 9)


class Unbreakable:
    """A terminal that may be closed under us: training goes on without it."""

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
    def __init__(self, stream: IO[str] | None = None):
        self.console = RichConsole(file=cast(IO[str], Unbreakable(stream or sys.stderr)), highlight=False)
        self.bar: Progress | None = None

    def say(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something a person should know before the run is over; in a file, one line."""
        self.console.print(
            f"[bold yellow]{escape(printable(text))}[/]", soft_wrap=not self.console.is_terminal
        )

    @contextmanager
    def working(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A bar for work that has to be done first; one that only counts where the end is not known."""
        with self._bar(TextColumn(escape(what)), total) as bar:
            yield lambda done: bar.advance(bar.task_ids[0], done)

    @contextmanager
    def going_through(self, total: int) -> Iterator[Callable[[str], None]]:
        """A bar that names what it is at; each call is the next thing. In a file, a line each."""
        with self._bar(TextColumn("{task.fields[news]}"), total, completed=-1, news="") as bar:

            def at(news: str) -> None:
                bar.update(bar.task_ids[0], advance=1, news=escape(news))
                if not self.console.is_terminal:
                    self.say(escape(news))

            yield at

    def start(self, facts: dict[str, str], chance: dict[str, float], recall: float) -> None:
        """What is about to happen, the head of the table, and as its first row what guessing gives."""
        for name, fact in facts.items():
            self.say(f"[dim]{name:>8}[/]  {escape(fact)}")
        guess = (f"{chance['chance_loss']:.3f}", percent(chance["chance_accuracy"]), *2 * [percent(recall)])
        self.say(f"\n[bold]{row(COLUMNS)}[/]")
        self.say(f"[dim]{row(('', '', 'in batch', 'R@1', 'R@1'))}[/]")
        self.say(f"[dim]{row(('chance', *guess))}[/]")

    @contextmanager
    def training(self, step: int, total: int) -> Iterator[None]:
        news = TextColumn("{task.fields[news]}")
        with self._bar(news, total, completed=step, news="first steps") as self.bar:
            yield

    def step(self, step: int, rows: list[dict[str, Any]], total: int) -> None:
        """Means of the steps just read."""
        assert self.bar is not None
        known = [row for row in rows if not row.get("skipped")] or [{"loss": float("nan"), "accuracy": 0.0}]
        loss, right = (sum(row[key] for row in known) / len(known) for key in ("loss", "accuracy"))
        news = (
            f"loss {loss:.3f}, accuracy {percent(right)} [dim](chance "
            f"{rows[-1]['chance_loss']:.2f}, {percent(rows[-1]['chance_accuracy'])})[/] "
            f"{rows[-1]['pairs_per_s']:.0f} pairs/s"
        )
        self.bar.update(self.bar.task_ids[0], completed=step, total=total, news=news)

    def epoch(
        self, epoch: int, epochs: int | None, values: dict[str, Any], scores: "Retrieval | None"
    ) -> None:
        ways = (scores.image_to_text, scores.text_to_image) if scores else ()
        cells = (
            f"{epoch}/{epochs}" if epochs else f"{epoch}",
            "–" if values["loss"] is None else f"{values['loss']:.3f}",
            percent(values["accuracy"]),
            *([percent(way.r1) for way in ways] or ["", ""]),
            f"{values['temperature']:.4f}",
            f"{values['pairs_per_s']:.0f}",
            f"{values['seconds']:.1f}",
        )
        self.say(row(cells))

    def _bar(self, first: ProgressColumn, total: int | None, **fields: Any) -> Progress:
        bar = BarColumn(max(4, min(40, self.console.width - 80)))  # the words matter more
        columns = (first, bar, MofNCompleteColumn(), TimeRemainingColumn(compact=True))
        progress = Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        progress.add_task("", total=total, **fields)
        return progress


def row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False))
