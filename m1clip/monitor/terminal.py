"""The terminal monitor: which run, which view, which keys. terminal_views.py renders the views."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from m1clip.format import ago, duration, percent, printable
from m1clip.monitor.log import PART_BYTES, RunView
from m1clip.monitor.terminal_views import curves_view, events_view, gradients_view, header_view, speed_view, state_text
from m1clip.run import Run, run_summaries

POLL_S = 1.0
SMOOTHING = (0, 1, 10, 100, 1000)
THEMES = ("ansi-dark", "ansi-light", "textual-dark", "textual-light")
COLUMNS = (" ", "run", "state", "done", "left", "best", "device", "updated")
VIEWS = ("curves", "speed", "gradients", "events", "runs")


@dataclass(frozen=True)
class View:
    """A Rich renderable that is drawn again for every width and height."""

    draw: Callable[[int, int], RenderableType]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(max(20, options.max_width), max(3, options.height or 0))


class Monitor(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: auto; padding: 0 1; }
    #tabs { height: 1; padding: 0 1; }
    ContentSwitcher { height: 1fr; padding: 0 1; }
    #curves, DataTable { height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(key), f"view('{name}')", name, show=False) for key, name in enumerate(VIEWS, 1)),
        ("space", "compare", "compare"),
        ("s", "smooth", "smooth"),
        ("p", "pause", "pause"),
        ("t", "theme", "colors"),
        ("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, folder: Path, run: Run):
        super().__init__()
        self.theme = THEMES[0]
        self.folder, self.shown = folder, RunView(run)
        self.compared: dict[str, RunView] = {}
        self.paused, self.smooth = False, 0
        self.rows: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def _handle_exception(self, error: Exception) -> None:
        """Leave it to the command line, which prints one sentence, or the traceback with --debug."""
        self.error = error
        self.exit(return_code=1)

    def compose(self) -> ComposeResult:
        yield Static(View(lambda width, _: header_view(self.shown, width)), id="header")
        yield Static(View(lambda width, _: self._tabs(width)), id="tabs")
        with ContentSwitcher(initial="curves"):
            yield Static(View(lambda width, height: curves_view(self.views, width, height, self.smooth)), id="curves")
            with VerticalScroll(id="speed"):
                yield Static(View(lambda width, _: speed_view(self.shown, width)))
            with VerticalScroll(id="gradients"):
                yield Static(View(lambda width, _: gradients_view(self.shown, width)))
            with VerticalScroll(id="events"):
                yield Static(View(lambda *_: events_view(self.shown)))
            yield DataTable(id="runs", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(DataTable).add_columns(*((name.strip(), name) for name in COLUMNS))
        self.tick()

    def tick(self) -> None:
        """Poll every second; at once while a long log is read, but answer keys in between."""
        self.poll()
        is_reading = not self.paused and any(run.fraction_read < 1 for run in self.views)
        self.set_timer(0.01 if is_reading else POLL_S, self.tick)

    def poll(self) -> None:
        """Read what is new, or a part of it, and draw it."""
        if self.paused:
            return
        changed = sum(run.refresh(PART_BYTES / len(self.views)) for run in self.views) > 0
        with suppress(NoMatches):  # the application is closing
            self.update_runs()
            self.query_one("#header").refresh(layout=changed)  # it may have more lines
            if changed:
                self.redraw()

    @property
    def views(self) -> list[RunView]:
        """The run shown, then those compared with it."""
        return [self.shown, *(run for name, run in self.compared.items() if name != self.shown.name)]

    def redraw(self) -> None:
        self.query(Static).refresh(layout=True)

    def update_runs(self) -> None:
        """Update the table of runs; announce new runs; keep the cursor on its run."""
        rows, table = run_summaries(self.folder)[::-1], self.query_one(DataTable)
        names, old_names = [row["run"] for row in rows], [row["run"] for row in self.rows]
        if old_names and (new := set(names) - set(old_names)):
            self.notify(f"new run: {', '.join(sorted(new))}; press 5 for all runs", markup=False)
        selected = self._selected()
        if rows == self.rows and self.query_one(ContentSwitcher).current != "runs":
            return
        self.rows = rows
        if names != old_names:
            table.clear()
            for name in names:
                table.add_row(key=name)
            table.move_cursor(row=names.index(selected) if selected in names else 0)
        for row in rows:
            for column, cell in zip(COLUMNS, self._cells(row), strict=True):
                table.update_cell(row["run"], column, cell, update_width=True)

    def _cells(self, row: dict[str, Any]) -> list[Text]:
        """As Text, because a name may contain Textual's markup."""
        done = percent(row["step"] / row["total"] if row["total"] else None)
        mark = "●" if row["run"] == self.shown.name else "+" if row["run"] in self.compared else ""
        name = Text(printable(row["run"]))
        name.truncate(max(12, self.size.width - 64), overflow="ellipsis")  # so that the device fits
        values = (done, duration(row["eta_s"]), percent(row["best_score"]), row["device"] or "–", ago(row["time"]))
        state = state_text(row["state"], row["warning"])
        return [Text(mark), name, state, *(Text(printable(value)) for value in values)]

    def _tabs(self, width: int) -> Text:
        current = self.query_one(ContentSwitcher).current
        tabs = Text()
        for key, name in enumerate(VIEWS, 1):
            tabs.append(f" {key} {name} ", "reverse" if name == current else "").append(" ")
        if self.paused:
            tabs.append(" paused ", "reverse yellow")
        if self.smooth:
            tabs.append(f" mean of {self.smooth:,} steps" if self.smooth > 1 else " every step", "dim")
        tabs.truncate(width)
        return tabs

    def action_view(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        if name != "curves":
            self.query_one(f"#{name}").focus()
        self.redraw()

    def _selected(self) -> str | None:
        row = self.query_one(DataTable).cursor_row
        return self.rows[row]["run"] if 0 <= row < len(self.rows) else None

    def action_compare(self) -> None:
        name = self._selected()
        if self.query_one(ContentSwitcher).current != "runs":
            self.action_view("runs")
            self.notify("space adds the selected run to the curves, Enter shows it alone")
        elif name is None or name == self.shown.name:
            self.notify("this run is shown already; select another to compare")
        elif self.compared.pop(name, None) is None:
            self.compared[name] = RunView(Run(self.folder / name))
            self.compared[name].refresh(PART_BYTES)  # also while paused
        self.update_runs()
        self.redraw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        name = str(event.row_key.value)
        self.shown = self.compared.pop(name, RunView(Run(self.folder / name)))
        self.paused = False
        self.action_view("curves")
        self.poll()

    def action_smooth(self) -> None:
        self.smooth = SMOOTHING[(SMOOTHING.index(self.smooth) + 1) % len(SMOOTHING)]
        self.redraw()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.poll()
        self.redraw()

    def action_theme(self) -> None:
        self.theme = THEMES[(THEMES.index(self.theme) + 1) % len(THEMES)]
        self.notify(f"colors: {self.theme}", timeout=2)
        self.redraw()
