"""The browser's face of the monitor: files of the page, and what they ask for, as JSON. Writes nothing."""

import asyncio
import csv
import hmac
import io
import json
import math
import re
import secrets
import shlex
import socket
import threading
import time
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse, StreamingResponse

from m1clip.files import json_safe
from m1clip.monitor import LOCAL, curves, terminal_views
from m1clip.monitor.log import Column, Followed, known, number
from m1clip.run import Run, is_run, summaries

PAGE = Path(__file__).parent / "page"
EVERY_S = 1.0
# Nothing is fetched from elsewhere and nothing is sent there; plotly writes styles of its own.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
Names = Annotated[list[str], Query(alias="run")]


class Runs:
    """The runs of a folder, each read on from where it was left; asked by several threads."""

    def __init__(self, folder: Path, start: Run | None = None):
        self.folder, self.start = folder, start
        self.known: dict[str, Followed] = {}
        self.lock = threading.Lock()
        self.closing: Callable[[], bool] = lambda: False

    def all(self) -> list[dict[str, Any]]:
        """A line for each, the newest first."""
        rows = summaries(self.folder)[::-1]
        return [{**row, **self._made_with(row["run"])} for row in rows]

    def _made_with(self, name: str) -> dict[str, Any]:
        try:
            config = Run(self.folder / name).read("config.json")
        except (OSError, ValueError):
            config = {}
        return {key: str(config.get(key, "")) for key in ("data", "preset")}

    @contextmanager
    def reading(self, name: str) -> Iterator[Followed]:
        """One of them as it is now, for this thread alone. A name that would lead elsewhere is not found."""
        if not self.has(name):
            with self.lock:
                self.known.pop(name, None)
            raise HTTPException(404, f"there is no run {name!r} in {self.folder}/")
        with self.lock:
            one = self.known.setdefault(name, Followed(Run(self.folder / name)))
            one.refresh()
            yield one

    def has(self, name: str) -> bool:
        plain = name not in ("", ".", "..") and not set(name) & set("/\\\0")
        return plain and is_run(self.folder / name)

    def versions(self, names: list[str]) -> dict[str, Any]:
        """A value for each that changes when the run does; nothing is parsed for it."""
        found = {}
        for name in filter(self.has, names):
            files = [self.folder / name / file for file in ("metrics.jsonl", "status.json", "retrievals.json")]
            found[name] = [(stat.st_mtime_ns, stat.st_size) for file in files if (stat := status_of(file))]
        return found


def status_of(path: Path) -> Any:
    try:
        return path.stat()
    except OSError:
        return None


def app(runs: Runs, token: str | None = None) -> FastAPI:
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @made.middleware("http")
    async def guard(request: Request, go_on: Callable[[Request], Awaitable[Response]]) -> Response:
        if refused := entrance(request, token):
            return refused
        response = await go_on(request)
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        if request.url.path.startswith("/api/"):
            response.headers["Cache-Control"] = "no-store"
        return response

    serve_page(made)
    serve_runs(made, runs)
    return made


def serve_page(made: FastAPI) -> None:
    @made.get("/")
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    @made.get("/page/{name}")
    def part(name: str) -> FileResponse:
        if name not in {file.name for file in PAGE.iterdir()}:
            raise HTTPException(404)
        return FileResponse(PAGE / name, headers={"Cache-Control": "no-cache"})

    @made.get("/plotly.js")
    def plotly() -> FileResponse:
        return FileResponse(plotly_file(), headers={"Cache-Control": "max-age=86400"})


def serve_runs(made: FastAPI, runs: Runs) -> None:
    @made.get("/api/runs")
    def table() -> dict[str, Any]:
        start = runs.start.name if runs.start else None
        return {"runs": runs.all(), "start": start, "curves": titles()}

    @made.get("/api/run/{name}")
    def run(name: str) -> Response:
        with runs.reading(name) as one:
            return as_json(described(one))

    @made.get("/api/run/{name}/retrievals")
    def retrievals(name: str) -> Response:
        with runs.reading(name) as one:
            return as_json(one.retrievals())

    @made.get("/api/run/{name}/metrics.csv")
    def metrics(name: str) -> StreamingResponse:
        with runs.reading(name) as one:
            columns = {name: one.log.column(name) for name in one.log.columns if name != "line"}
        plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
        headers = {"Content-Disposition": f'attachment; filename="{plain}.csv"'}
        return StreamingResponse(as_csv(columns), media_type="text/csv", headers=headers)

    @made.get("/api/curves")
    def lines(
        run: Names,
        key: Annotated[list[str], Query()],
        over: str = "step",
        smooth: Annotated[int, Query(ge=0, le=100_000)] = 1,
        most: Annotated[int, Query(ge=10, le=5000)] = 600,
        start: float = -math.inf,
        end: float = math.inf,
    ) -> Response:
        keys, found = [each for each in key if each in curves.CURVES], {}
        for name in run:
            with runs.reading(name) as one:
                found[name] = {each: series(one, each, over, smooth, most, (start, end)) for each in keys}
        return as_json(found)

    @made.get("/api/live")
    async def live(request: Request, run: Annotated[list[str] | None, Query()] = None) -> StreamingResponse:
        return StreamingResponse(news(request, runs, run or []), media_type="text/event-stream")


def as_json(value: Any) -> Response:
    """What is not finite is null."""
    return Response(json.dumps(json_safe(value)), media_type="application/json")


def entrance(request: Request, token: str | None) -> Response | None:
    """What keeps a visitor out: a name that is not ours (a page elsewhere that asks in its own name), or no
    token where one is due. A right token in the address becomes a cookie, so that it does not stay there."""
    if token is None:
        asked = re.fullmatch(r"\[?(.*?)\]?(:\d+)?", request.headers.get("host", ""))
        return None if asked and asked[1] in LOCAL else PlainTextResponse("not served by that name", 421)
    cookie = f"m1clip-{request.url.port or 80}"  # cookies know no ports, and there may be several monitors
    given = request.query_params.get("token")
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        answer = RedirectResponse("/", 303)
        answer.set_cookie(cookie, token, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer
    if hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
        return None
    return PlainTextResponse("this page needs its token: open the address that m1clip monitor printed", 401)


def titles() -> list[dict[str, Any]]:
    return [
        {"key": one.key, "title": one.title, "unit": one.unit, "kind": one.kind, "log": one.log}
        for one in curves.CURVES.values()
    ]


def described(one: Followed) -> dict[str, Any]:
    """Everything of a run but its curves and images."""
    phases = {name: one.log.recent(f"{name}_ms", terminal_views.RECENT) for name in terminal_views.PHASES}
    events = [
        {"time": known(event.get("time")), "step": event["step"], "words": terminal_views.told(event)}
        | {"event": str(event.get("event"))}
        for event in one.log.events[-200:]
    ]
    return {
        "summary": one.summary,
        "path": shlex.quote(str(one.run.path)),
        "latest": one.log.latest,
        "config": one.config,
        "machine": one.machine,
        "data": {key: value for key, value in one.data.items() if not isinstance(value, list)},
        "phases_ms": phases,
        "now": {key: one.log.recent(key, count) for key, count in terminal_views.AS_OF.items()},
        "pairs_per_s": one.log.rate(terminal_views.RECENT),
        "recent": min(terminal_views.RECENT, len(one.log)),
        "chance": {key: curves.chance(one.log, key) for key in ("loss", "accuracy", "mean_r1")},
        "logger": one.log.last("logger"),
        "eval": one.log.last("eval"),
        "flow": flow(one),
        "events": events[::-1],
        "broken": one.log.broken[:5],
    }


def flow(one: Followed, most: int = 120) -> dict[str, Any]:
    """Gradient norms of every block over the steps that were looked at: at most `most` of these."""
    rows = one.log.records["logger"]
    if not rows:
        return {"step": [], "block": [], "norm": []}
    rows = [rows[place] for place in np.unique(np.linspace(0, len(rows) - 1, most).astype(int))]
    norms = [row.get("grad_norms") or {} for row in rows]
    found = [[listed(number(row.get(block))) for row in norms] for block in norms[-1]]
    return {"step": [row["step"] for row in rows], "block": list(norms[-1]), "norm": found}


def series(one: Followed, key: str, over: str, smooth: int, most: int, window: tuple[float, float]) -> dict[str, Any]:
    """A curve as the console can show it: smoothed over all steps, cut to the window, thinned."""
    x, y = curves.points(one.log, key, "minutes" if over == "minutes" else "step", smooth)
    inside = np.flatnonzero((x >= window[0]) & (x <= window[1]))
    if 0 < len(inside) < len(x):  # and one beyond each edge, so that lines leave the image
        cut = slice(max(0, inside[0] - 1), inside[-1] + 2)
        x, y = x[cut], y[cut]
    x, y = curves.thinned(x, y, most)
    return {"x": numbers(x), "y": numbers(y), "chance": curves.chance(one.log, key)}


def numbers(values: Column) -> list[float | None]:
    return [listed(value) for value in values.tolist()]


def listed(value: float) -> float | None:
    """As JSON can say it, short."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def as_csv(columns: dict[str, Column]) -> Iterator[str]:
    """A line for every step."""
    yield ",".join(columns) + "\r\n"  # names are plain words, or the log would not have kept them
    length = len(next(iter(columns.values()), ()))
    for start in range(0, length, 5000):
        page = io.StringIO()
        rows = zip(*(column[start : start + 5000].tolist() for column in columns.values()), strict=True)
        csv.writer(page).writerows(
            ["" if value != value else repr(value).removesuffix(".0") for value in row] for row in rows
        )
        yield page.getvalue()


async def news(request: Request, runs: Runs, names: list[str]) -> AsyncIterator[str]:
    """Server-sent events: the table when it changes, and which of the runs asked for have changed."""
    told: dict[str, Any] = {}
    quiet_since = time.monotonic()
    while not (runs.closing() or await request.is_disconnected()):
        table, versions = await asyncio.gather(asyncio.to_thread(runs.all), asyncio.to_thread(runs.versions, names))
        for kind, value in (("runs", table), ("changed", versions)):
            if told.get(kind) != value:
                told[kind] = value
                quiet_since = time.monotonic()
                yield f"event: {kind}\ndata: {json.dumps(json_safe(value))}\n\n"
        if time.monotonic() - quiet_since > 15:
            quiet_since = time.monotonic()
            yield ": still here\n\n"
        await asyncio.sleep(EVERY_S)


def plotly_file() -> Path:
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "package_data" / "plotly.min.js"


def listening(host: str, port: int) -> socket.socket:
    """A socket at the port, or at one of the next twenty."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for trial in range(port, min(port + 20, 65536)):
        made = socket.socket(family)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, trial))
            made.listen(128)
            return made
        except OSError as error:
            made.close()
            last = error
    raise OSError(f"cannot listen at {host}, port {port} and the next: {last.strerror}")


def serve(folder: Path, start: Run | None, host: str, port: int, token: str | None, browse: bool) -> int:
    token = secrets.token_urlsafe(12) if token == "auto" else token
    runs = Runs(start.path.parent if start else folder, start)
    with listening(host, port) as made:
        port = made.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else shown
        address = f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
        print(f"watching {runs.folder}/ at {address}  (Ctrl-C ends)", flush=True)
        if host in LOCAL:
            print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
        if browse:
            webbrowser.open(address)
        config = uvicorn.Config(app(runs, token), log_level="warning", timeout_graceful_shutdown=3)
        server = uvicorn.Server(config)
        runs.closing = lambda: server.should_exit
        with suppress(KeyboardInterrupt):  # how it is meant to end
            server.run(sockets=[made])
    return 0
