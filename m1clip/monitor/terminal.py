"""The terminal's face of the monitor: which run, which view, which keys. What is drawn is in terminal_views.py."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.css.query import NoMatches
from textual.widget import Widget
from textual.widgets import ContentSwitcher, DataTable, Footer, Static

from m1clip.format import ago, duration, percent, printable
from m1clip.monitor import terminal_views
from m1clip.monitor.log import Followed
from m1clip.run import Run, summaries

EVERY_S = 1.0
AT_ONCE = 8e6
"""Bytes of log read at a time, so that keys are answered meanwhile."""
SMOOTH = (0, 1, 10, 100, 1000)
THEMES = ("ansi-dark", "ansi-light", "textual-dark", "textual-light")


COLUMNS = (" ", "run", "state", "step", "done", "to go", "best", "device", "last sign")
VIEWS = ("learning", "speed", "gradients", "events", "runs")


class Drawn(Widget):
    """Text made anew for whatever room there is."""

    def __init__(self, draw: Callable[[int, int], Text], **named: Any):
        super().__init__(**named)
        self.draw = draw

    def render(self) -> Text:
        return self.draw(max(20, self.size.width), max(3, self.size.height))


class Monitor(App[None]):
    TITLE = "m1clip monitor"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #header { height: auto; padding: 0 1; }
    #tabs { height: 1; padding: 0 1; }
    ContentSwitcher { height: 1fr; padding: 0 1; }
    #learning, #speed { height: 100%; }
    DataTable { height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(place), f"view('{name}')", name, show=False) for place, name in enumerate(VIEWS, 1)),
        ("space", "mark", "compare"),
        ("s", "smooth", "smooth"),
        ("p", "pause", "pause"),
        ("t", "look", "colors"),
        ("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
    ]

    def __init__(self, runs: Path, start: Run):
        super().__init__()
        self.theme = THEMES[0]
        self.runs, self.shown = runs, Followed(start)
        self.marked: dict[str, Followed] = {}
        self.paused, self.smooth = False, 0
        self.known: list[dict[str, Any]] = []
        self.failed: Exception | None = None

    def _handle_exception(self, error: Exception) -> None:
        """What goes wrong ends as everywhere here: a sentence, and the traceback with --debug."""
        self.failed = error
        self.exit(return_code=1)

    def compose(self) -> ComposeResult:
        yield Drawn(lambda width, _: terminal_views.header(self.shown, width), id="header")
        yield Drawn(lambda width, _: self._tabs(width), id="tabs")
        with ContentSwitcher(initial="learning"):
            yield Drawn(self._learning, id="learning")
            yield Drawn(lambda width, height: terminal_views.speed(self.shown, width, height), id="speed")
            for name in ("gradients", "events"):
                with VerticalScroll(id=name):
                    yield Static(id=f"{name}-text")
            yield DataTable(id="runs", cursor_type="row", zebra_stripes=False)
        yield Footer()

    def on_mount(self) -> None:
        for name in COLUMNS:
            self.query_one(DataTable).add_column(name.strip(), key=name)
        self.look()
        self.set_interval(EVERY_S, self.look)

    def look(self) -> None:
        """Read what is new; a long log comes in parts, drawn as far as it is read."""
        if self.paused:
            return
        more = changed = False
        share = AT_ONCE / len(self.followed)
        for one in self.followed:
            before = one.log.offset
            changed |= one.refresh(share)
            more |= one.log.offset - before >= share
        with suppress(NoMatches):  # it is being closed
            self.list_runs()
            self.query_one("#header").refresh(layout=changed)  # says how long ago, and may have a line more
            if changed:
                self.redraw()
        if more:
            self.set_timer(0.01, self.look)

    def on_resize(self) -> None:
        self.redraw()

    @property
    def followed(self) -> list[Followed]:
        """What is shown first, then what it is compared with."""
        return [self.shown, *(one for name, one in self.marked.items() if name != self.shown.name)]

    def redraw(self) -> None:
        for drawn in self.query(Drawn):
            drawn.refresh()
        width = max(20, self.size.width - 4)
        self.query_one("#gradients-text", Static).update(terminal_views.gradients(self.shown, width))
        self.query_one("#events-text", Static).update(terminal_views.events(self.shown, width))

    def list_runs(self) -> None:
        """The table of runs; what has begun meanwhile is told of, and the cursor stays on its run."""
        rows, table = summaries(self.runs)[::-1], self.query_one(DataTable)
        names, before = [row["run"] for row in rows], [row["run"] for row in self.known]
        if before and (new := set(names) - set(before)):
            self.notify(f"{', '.join(sorted(new))} has begun: 5 shows all runs", markup=False)
        at = self._under_cursor()
        if rows == self.known and self.query_one(ContentSwitcher).current != "runs":
            return
        self.known = rows
        if names != before:
            table.clear()
            for row in rows:
                table.add_row(*self._cells(row), key=row["run"])
            table.move_cursor(row=names.index(at) if at in names else 0)
            return
        for row in rows:
            for column, cell in zip(COLUMNS, self._cells(row), strict=True):
                table.update_cell(row["run"], column, cell, update_width=True)

    def _cells(self, row: dict[str, Any]) -> list[Text]:
        """As text: a name may hold what a table would take for markup."""
        part = row["step"] / row["total"] if row["total"] else None
        mark = "●" if row["run"] == self.shown.name else "+" if row["run"] in self.marked else ""
        words = [mark, row["run"], row["state"], f"{row['step']:,}", percent(part), duration(row["eta_s"])]
        words += [percent(row["best_score"]), row["device"] or "–", ago(row["time"])]
        cells = [Text(printable(word)) for word in words]
        cells[2].stylize(terminal_views.STATES.get(row["state"], "yellow"))
        return cells

    def _learning(self, width: int, height: int) -> Text:
        return terminal_views.learning(self.followed, width, height, self.smooth)

    def _tabs(self, width: int) -> Text:
        current = self.query_one(ContentSwitcher).current
        made = Text()
        for place, name in enumerate(VIEWS, 1):
            made.append(f" {place} {name} ", "reverse" if name == current else "").append(" ")
        if self.paused:
            made.append(" paused ", "reverse yellow")
        if self.smooth:
            made.append(f" mean of {self.smooth:,} steps" if self.smooth > 1 else " every step", "dim")
        made.truncate(width)
        return made

    def action_view(self, name: str) -> None:
        self.query_one(ContentSwitcher).current = name
        if name == "runs":
            self.query_one(DataTable).focus()
        elif name in ("gradients", "events"):
            self.query_one(f"#{name}").focus()
        self.redraw()

    def _under_cursor(self) -> str | None:
        table = self.query_one(DataTable)
        return self.known[table.cursor_row]["run"] if 0 <= table.cursor_row < len(self.known) else None

    def action_mark(self) -> None:
        """Compare the run under the cursor with the one shown, or no longer."""
        name = self._under_cursor()
        if self.query_one(ContentSwitcher).current != "runs":
            self.action_view("runs")
            self.notify("space adds the run under the cursor to the curves, Enter shows it")
            return
        if name is None or name == self.shown.name:
            self.notify("this run is shown already; space on another lays it over")
            return
        if name in self.marked:
            del self.marked[name]
        else:
            self.marked[name] = Followed(Run(self.runs / name))
            self.marked[name].refresh(AT_ONCE)  # also while paused
        self.list_runs()
        self.redraw()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        name = str(event.row_key.value)
        self.shown = self.marked.get(name) or Followed(Run(self.runs / name))
        self.marked.pop(name, None)
        self.action_view("learning")
        self.paused = False
        self.look()
        self.redraw()

    def action_smooth(self) -> None:
        self.smooth = SMOOTH[(SMOOTH.index(self.smooth) + 1) % len(SMOOTH)]
        self.redraw()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self.look()
        self.redraw()

    def action_look(self) -> None:
        self.theme = THEMES[(THEMES.index(self.theme) + 1) % len(THEMES)]
        self.notify(f"colors: {self.theme}", timeout=2)
        self.redraw()
