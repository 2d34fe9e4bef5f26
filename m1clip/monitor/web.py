"""The web monitor: serves the page and the JSON that it fetches. Writes nothing."""

import asyncio
import json
import re
import shlex
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from m1clip.files import json_safe
from m1clip.monitor.curves import CURVES, PAGE, Curve, downsample, gradient_norms
from m1clip.monitor.log import PART_BYTES, RECENT_STEPS, STEP_PHASES, Log, RunView, event_text, number_or_none
from m1clip.monitor.schema import CurvePoints, Event, GradientFlow, Retrievals, RunDescription, RunList, RunRow
from m1clip.run import Run, is_run, run_summaries
from m1clip.web import SHARED_PAGE, Address
from m1clip.web.access import Access, secured_app
from m1clip.web.server import run_server

POLL_S = 1.0
MAX_LIVE = 64  # open streams of events
MAX_WAITING, MAX_WAIT_S = 8, 10.0  # requests for a run that is being read
FORGET_S = 600.0  # then a run that nobody asks for is dropped from memory
CSV_ROWS = 10_000  # at a time
HEADLINE = ("loss", "accuracy", "mean_r1", "zeroshot_accuracy")  # curves whose current values are shown first
Names = Annotated[list[str], Query(min_length=1, max_length=100)]
JSON_ERROR: dict[str, Any] = {"content": {"application/json": {"schema": {"type": "object"}}}}
Answers = dict[int | str, dict[str, Any]]
RUN_ERRORS: Answers = {
    404: {"description": "No such run.", **JSON_ERROR},
    503: {"description": "The run is being read by others; try again.", **JSON_ERROR},
}
ROWS = {"type": "array", "items": {"$ref": "#/components/schemas/RunRow"}}
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "contentMediaType": "application/json", "contentSchema": ROWS}},
    "required": ["data"],
}
LIVE_ANSWERS: Answers = {
    200: {"description": "The list of runs.", "content": {"text/event-stream": {"itemSchema": EVENT}}},
    503: {"description": "Too many streams are open.", **JSON_ERROR},
}


class SharedRun(RunView):
    """A run that several threads read, each while it holds the lock."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.lock, self.places = threading.Lock(), threading.BoundedSemaphore(MAX_WAITING)
        self.history_thread: threading.Thread | None = None
        self.used_at = 0.0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for the lock, but not for long, and not with many: the server has few threads for all runs."""
        if not self.places.acquire(blocking=False):
            raise busy(self.name)
        try:
            if not self.lock.acquire(timeout=MAX_WAIT_S):
                raise busy(self.name)
            try:
                yield
            finally:
                self.lock.release()
        finally:
            self.places.release()


def busy(name: str) -> HTTPException:
    return HTTPException(503, f"run {name!r} is being read; try again", {"Retry-After": "5"})


class RunCache:
    """The runs of a folder, read incrementally; used by several threads."""

    def __init__(self, folder: Path, start: Run | None = None, clock: Callable[[], float] = time.monotonic):
        self.folder, self.start, self.clock = folder, start, clock
        self.views: dict[str, SharedRun] = {}
        self.lock = threading.Lock()  # of `views` alone: no file is read while it is held
        self.is_closing: Callable[[], bool] = lambda: False
        self.live_count = 0

    def rows(self) -> list[RunRow]:
        return [self._row(summary) for summary in run_summaries(self.folder)[::-1]]

    def _row(self, summary: dict[str, Any]) -> RunRow:
        name, log_bytes = summary["run"], None
        config = Run(self.folder / name).read_or_empty("config.json")
        with suppress(OSError):
            log_bytes = (self.folder / name / "metrics.jsonl").stat().st_size
        view = self.views.get(name)
        fraction = None if view is None else round(view.fraction_read, 3)
        data, preset = (str(config.get(key, "")) for key in ("data", "preset"))
        known = {key: value for key, value in summary.items() if key in RunRow.__annotations__}
        return RunRow(**known, data=data, preset=preset, log_bytes=log_bytes, fraction_read=fraction)

    @contextmanager
    def open(self, name: str) -> Iterator[SharedRun]:
        """A run as it is now, locked for this thread; 404 for names outside of the folder."""
        is_plain = name not in ("", ".", "..") and not set(name) & set("/\\\0")
        if not (is_plain and is_run(self.folder / name)):
            raise HTTPException(404, f"no run {name!r} in {self.folder}/")
        run = self._view(name)
        with run.locked():
            run.refresh(PART_BYTES)
            if run.fraction_read < 1 and run.history_thread is None:
                run.history_thread = threading.Thread(target=self._read_history, args=[run], daemon=True)
                run.history_thread.start()
            yield run

    def _view(self, name: str) -> SharedRun:
        now = self.clock()
        with self.lock:
            for old in [old for old, run in self.views.items() if run.used_at < now - FORGET_S]:
                del self.views[old]
            run = self.views.setdefault(name, SharedRun(Run(self.folder / name)))
            run.used_at = now
            return run

    def _read_history(self, run: SharedRun) -> None:
        """Read the rest of a long log in parts, so that requests are answered between them."""
        while run.history_thread:
            with run.lock:
                run.refresh(PART_BYTES)
                if run.fraction_read == 1 or self.is_closing():
                    run.history_thread = None
            time.sleep(0.001)  # a thread that waits for the lock gets it now


def create_app(runs: RunCache, token: str | None = None, clock: Callable[[], float] = time.monotonic) -> FastAPI:
    app = secured_app("m1clip monitor", Access(token, clock))
    add_api(app, runs)
    # The last resort, not a mount: that would also answer wrong methods of the API.
    # plotly is located without its import, which takes a second.
    app.router.default = StaticFiles(directory=PAGE, packages=[SHARED_PAGE, ("plotly", "package_data")], html=True)
    return app


class EventStream(StreamingResponse):
    media_type = "text/event-stream"

    def __init__(self, request: Request, runs: RunCache):
        super().__init__(live_events(request, runs))
        self.runs = runs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.runs.live_count += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.runs.live_count -= 1


class CsvStream(StreamingResponse):
    media_type = "text/csv"


def add_api(app: FastAPI, runs: RunCache) -> None:
    @app.get("/api/runs", response_model=RunList)
    def list_runs() -> Response:
        return json_response(asdict(RunList(runs.rows(), runs.start.name if runs.start else None)))

    @app.get("/api/run/{name}", response_model=RunDescription, responses=RUN_ERRORS)
    def describe(name: str) -> Response:
        with runs.open(name) as run:
            return json_response(asdict(describe_run(run)))

    @app.get("/api/run/{name}/retrievals", response_model=Retrievals, responses=RUN_ERRORS)
    def retrievals(name: str) -> Response:
        with runs.open(name) as run:
            return json_response({"step": None, "queries": [], "shown": {}, **run.retrievals()})

    @app.get("/api/run/{name}/metrics.csv", response_class=CsvStream, responses=RUN_ERRORS)
    def metrics_csv(name: str) -> Response:
        fraction_read = 0.0
        while fraction_read < 1:
            with runs.open(name) as run:
                fraction_read = run.fraction_read
        file_name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
        headers = {"Content-Disposition": f'attachment; filename="{file_name}.csv"'}
        return CsvStream(csv_blocks(run), headers=headers)

    @app.get("/api/curves", response_model=dict[str, dict[str, CurvePoints]], responses=RUN_ERRORS)
    def curves(
        run: Names,
        key: Names,
        x_axis: Literal["step", "minutes"] = "step",
        smooth: Annotated[int, Query(ge=0, le=100_000)] = 1,
        max_points: Annotated[int, Query(ge=10, le=5000)] = 600,
        start: float | None = None,
        end: float | None = None,
    ) -> Response:
        shown, curves = [CURVES[each] for each in dict.fromkeys(key) if each in CURVES], {}
        for name in dict.fromkeys(run):
            with runs.open(name) as view:
                options = (view.log, x_axis, smooth, max_points, start, end)
                curves[name] = {curve.key: vars(curve_points(curve, *options)) for curve in shown}
        return json_response(curves)

    @app.get("/api/live", response_class=Response, responses=LIVE_ANSWERS)
    async def live(request: Request) -> Response:
        """Server-sent events: the list of runs, whenever it changes."""
        if runs.live_count >= MAX_LIVE:
            raise HTTPException(503, "too many pages are open", {"Retry-After": "5"})
        return EventStream(request, runs)


def json_response(value: Any) -> Response:
    return Response(as_json(value), media_type="application/json")


def as_json(value: Any) -> str:
    """Strict JSON: NaN and infinity become null, and what is not UTF-8 is escaped."""
    return json.dumps(json_safe(value))


def csv_blocks(run: SharedRun) -> Iterator[bytes]:
    """The step records as CSV, in parts: a slow client holds neither the lock nor a copy of the log."""
    import pyarrow.csv  # slow to import

    names = [name for name in {"step": None, **run.log.columns} if name != "line"]
    step, is_first = -1.0, True
    while True:
        with run.lock:
            first = bisect_right(run.log.columns["step"], step)
            columns = {name: run.log.column(name, rows=slice(first, first + CSV_ROWS)) for name in names}
        if not is_first and not len(columns["step"]):
            return
        table = pyarrow.table({name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()})
        text = pyarrow.BufferOutputStream()  # unknown values are empty
        pyarrow.csv.write_csv(table, text, pyarrow.csv.WriteOptions(include_header=is_first, quoting_style="none"))
        yield text.getvalue().to_pybytes()
        step, is_first = columns["step"][-1] if len(columns["step"]) else step, False


def describe_run(run: RunView) -> RunDescription:
    log = run.log
    steps, blocks, norms = gradient_norms(log, 120)
    events = [
        Event(number_or_none(event.get("time")), event["step"], str(event.get("event")), event_text(event))
        for event in log.events[-200:]
    ]
    return RunDescription(
        summary=run.summary,
        path=shlex.quote(str(run.path)),
        fraction_read=run.fraction_read,
        last_step=log.last_step,
        config=run.config,
        preset_values=run.changed_settings(),
        machine=run.machine,
        data={key: value for key, value in run.data.items() if not isinstance(value, list)},
        phases_ms={phase: log.recent_mean(f"{phase}_ms", RECENT_STEPS) for phase in STEP_PHASES},
        recent_steps=min(RECENT_STEPS, len(log)),
        current={key: CURVES[key].current(log) for key in (*HEADLINE, "temperature")},
        chance={key: CURVES[key].chance_level(log) for key in HEADLINE},
        pairs_per_s=log.recent_rate(RECENT_STEPS),
        diagnostics=log.last("diagnostics"),
        epoch=log.last("epoch"),
        gradient_flow=GradientFlow(steps, blocks, norms.tolist()),
        events=events[::-1],
        bad_lines=log.bad_lines[:5],
        bad_line_count=log.bad_line_count,
    )


def curve_points(
    curve: Curve, log: Log, x_axis: str, smooth: int, max_points: int, start: float | None, end: float | None
) -> CurvePoints:
    """A curve, smoothed over all steps, cut to the range and downsampled."""
    x, y = curve.points(log, x_axis, smooth)
    inside = np.flatnonzero((x >= (-np.inf if start is None else start)) & (x <= (np.inf if end is None else end)))
    if 0 < len(inside) < len(x):  # with one point beyond each end, so that lines reach the edges
        cut = slice(max(0, inside[0] - 1), inside[-1] + 2)
        x, y = x[cut], y[cut]
    x, y = downsample(x, y, max_points)
    short_x, short_y = ([float(f"{value:.7g}") for value in values.tolist()] for values in (x, y))
    return CurvePoints(short_x, short_y, curve.chance_level(log))


async def live_events(request: Request, runs: RunCache) -> AsyncIterator[str]:
    sent: list[RunRow] | None = None
    while not (runs.is_closing() or await request.is_disconnected()):
        rows = await asyncio.to_thread(runs.rows)
        if rows != sent:
            sent = rows
            yield f"data: {as_json(list(map(vars, rows)))}\n\n"
        await asyncio.sleep(POLL_S)


def serve(folder: Path, start: Run | None, address: Address) -> None:
    runs = RunCache(start.path.parent if start else folder, start)

    def make_app(token: str | None, is_closing: Callable[[], bool]) -> FastAPI:
        runs.is_closing = is_closing
        return create_app(runs, token)

    run_server(f"monitoring {runs.folder}/", make_app, address)
