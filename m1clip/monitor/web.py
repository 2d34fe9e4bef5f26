"""The web monitor: serves the page and the JSON that it fetches. Writes nothing."""

import asyncio
import hmac
import json
import math
import re
import secrets
import shlex
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import numpy as np
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles

from m1clip.files import json_safe
from m1clip.monitor import LOOPBACK_HOSTS
from m1clip.monitor.curves import CURVES, PAGE, Curve, downsample, gradient_norms
from m1clip.monitor.log import RECENT_STEPS, STEP_PHASES, Log, Record, RunView, event_text, number_or_none
from m1clip.run import Run, is_run, run_summaries

POLL_S = 1.0
HEADERS = {
    # Nothing is loaded from or sent to other hosts; plotly sets inline styles.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class RunCache:
    """The runs of a folder, read incrementally; used by several threads."""

    def __init__(self, folder: Path, start: Run | None = None):
        self.folder, self.start = folder, start
        self.views: dict[str, RunView] = {}
        self.lock = threading.Lock()
        self.is_closing: Callable[[], bool] = lambda: False

    def rows(self) -> list[dict[str, Any]]:
        """A summary of each run, the newest first; it changes with every record that the run logs."""
        rows = run_summaries(self.folder)[::-1]
        for row in rows:
            path = self.folder / row["run"]
            config = Run(path).read_or_empty("config.json")
            row.update(data=str(config.get("data", "")), preset=str(config.get("preset", "")))
            with suppress(OSError):
                row["log_bytes"] = (path / "metrics.jsonl").stat().st_size
        return rows

    @contextmanager
    def open(self, name: str) -> Iterator[RunView]:
        """A run as it is now, locked for this thread; 404 for names outside of the folder."""
        is_plain = name not in ("", ".", "..") and not set(name) & set("/\\\0")
        if not (is_plain and is_run(self.folder / name)):
            raise HTTPException(404, f"no run {name!r} in {self.folder}/")
        with self.lock:
            run = self.views.setdefault(name, RunView(Run(self.folder / name)))
            run.refresh()
            yield run


def create_app(runs: RunCache, token: str | None = None) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def check_access(request: Request, respond: Callable[[Request], Awaitable[Response]]) -> Response:
        if refusal := refuse_access(request, token):
            return refusal
        response = await respond(request)
        is_api = request.url.path.startswith("/api/")
        response.headers.update({**HEADERS, "Cache-Control": "no-store" if is_api else "no-cache"})
        return response

    add_api(app, runs)
    # plotly is located without its import, which takes a second.
    app.mount("/", StaticFiles(directory=PAGE, packages=[("plotly", "package_data")], html=True))
    return app


def add_api(app: FastAPI, runs: RunCache) -> None:
    @app.get("/api/runs")
    def list_runs() -> dict[str, Any]:
        return {"runs": runs.rows(), "start": runs.start.name if runs.start else None}

    @app.get("/api/run/{name}")
    def describe(name: str) -> Response:
        with runs.open(name) as run:
            return json_response(describe_run(run))

    @app.get("/api/run/{name}/retrievals")
    def retrievals(name: str) -> Response:
        with runs.open(name) as run:
            return json_response(run.retrievals())

    @app.get("/api/run/{name}/metrics.csv")
    def metrics_csv(name: str) -> Response:
        import pyarrow.csv  # slow to import

        with runs.open(name) as run:
            columns = {name: run.log.column(name) for name in run.log.columns if name != "line"}
        table = pyarrow.table({name: pyarrow.array(column, from_pandas=True) for name, column in columns.items()})
        text = pyarrow.BufferOutputStream()  # unknown values are empty
        pyarrow.csv.write_csv(table, text, pyarrow.csv.WriteOptions(quoting_style="none"))
        file_name = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)
        headers = {"Content-Disposition": f'attachment; filename="{file_name}.csv"'}
        return Response(text.getvalue().to_pybytes(), media_type="text/csv", headers=headers)

    @app.get("/api/curves")
    def curves(
        run: Annotated[list[str], Query()],
        key: Annotated[list[str], Query()],
        x_axis: str = "step",
        smooth: Annotated[int, Query(ge=0, le=100_000)] = 1,
        max_points: Annotated[int, Query(ge=10, le=5000)] = 600,
        start: float = -math.inf,
        end: float = math.inf,
    ) -> Response:
        shown, curves = [CURVES[each] for each in key if each in CURVES], {}
        for name in run:
            with runs.open(name) as view:
                options = (view.log, x_axis, smooth, max_points, start, end)
                curves[name] = {curve.key: curve_json(curve, *options) for curve in shown}
        return json_response(curves)

    @app.get("/api/live")
    async def live(request: Request) -> StreamingResponse:
        return StreamingResponse(live_events(request, runs), media_type="text/event-stream")


def json_response(value: Any) -> Response:
    """Strict JSON: NaN and infinity become null."""
    return Response(json.dumps(json_safe(value)), media_type="application/json")


def refuse_access(request: Request, token: str | None) -> Response | None:
    """The error response for a request that is not allowed, or None.

    Without a token only local host names are served, which stops DNS rebinding by other web pages. A correct
    token in the address is moved to a cookie.
    """
    if token is None:
        host = re.fullmatch(r"\[?(.*?)\]?(:\d+)?", request.headers.get("host", ""))
        is_local = host is not None and host[1] in LOOPBACK_HOSTS
        return None if is_local else PlainTextResponse("not served under this host name", 421)
    cookie = f"m1clip-{request.url.port or 80}"  # cookies are shared between the ports of a host
    given = request.query_params.get("token")
    if given is not None and hmac.compare_digest(given.encode(), token.encode()):
        redirect = RedirectResponse("/", 303)
        redirect.set_cookie(cookie, token, httponly=True, samesite="strict", max_age=30 * 86400)
        return redirect
    if hmac.compare_digest(request.cookies.get(cookie, "").encode(), token.encode()):
        return None
    return PlainTextResponse("a token is needed: open the address that `m1clip monitor` printed", 401)


def describe_run(run: RunView) -> dict[str, Any]:
    log = run.log
    steps, blocks, norms = gradient_norms(log, 120)
    events = [
        {"time": number_or_none(event.get("time")), "step": event["step"]}
        | {"event": str(event.get("event")), "text": event_text(event)}
        for event in log.events[-200:]
    ]
    return {
        "summary": run.summary,
        "path": shlex.quote(str(run.path)),
        "last_step": log.last_step,
        "config": run.config,
        "preset_values": run.changed_settings(),
        "machine": run.machine,
        "data": {key: value for key, value in run.data.items() if not isinstance(value, list)},
        "phases_ms": {phase: log.recent_mean(f"{phase}_ms", RECENT_STEPS) for phase in STEP_PHASES},
        "recent_steps": min(RECENT_STEPS, len(log)),
        "current": {key: CURVES[key].current(log) for key in ("loss", "accuracy", "mean_r1", "temperature")},
        "chance": {key: CURVES[key].chance_level(log) for key in ("loss", "accuracy", "mean_r1")},
        "pairs_per_s": log.recent_rate(RECENT_STEPS),
        "diagnostics": log.last("diagnostics"),
        "epoch": log.last("epoch"),
        "gradient_flow": {"step": steps, "block": blocks, "norm": norms.tolist()},
        "events": events[::-1],
        "bad_lines": log.bad_lines[:5],
        "bad_line_count": len(log.bad_lines),
    }


def curve_json(curve: Curve, log: Log, x_axis: str, smooth: int, max_points: int, start: float, end: float) -> Record:
    """A curve, smoothed over all steps, cut to the range and downsampled."""
    x, y = curve.points(log, x_axis, smooth)
    inside = np.flatnonzero((x >= start) & (x <= end))
    if 0 < len(inside) < len(x):  # with one point beyond each end, so that lines reach the edges
        cut = slice(max(0, inside[0] - 1), inside[-1] + 2)
        x, y = x[cut], y[cut]
    x, y = downsample(x, y, max_points)
    short_x, short_y = ([float(f"{value:.7g}") for value in values.tolist()] for values in (x, y))
    return {"x": short_x, "y": short_y, "chance": curve.chance_level(log)}


async def live_events(request: Request, runs: RunCache) -> AsyncIterator[str]:
    """Server-sent events: the list of runs whenever it changes."""
    sent = None
    while not (runs.is_closing() or await request.is_disconnected()):
        rows = await asyncio.to_thread(runs.rows)
        if rows != sent:
            sent = rows
            yield f"data: {json.dumps(json_safe(rows))}\n\n"
        await asyncio.sleep(POLL_S)


def listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on one of the next twenty if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + 20, 65536)):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            reason = error.strerror
    raise OSError(f"cannot listen on {host}, ports {port} to {candidate}: {reason}")


def serve(folder: Path, start: Run | None, host: str, port: int, token: str | None, browse: bool) -> None:
    token = secrets.token_urlsafe(12) if token == "auto" else token
    runs = RunCache(start.path.parent if start else folder, start)
    with listen(host, port) as server_socket:
        port = server_socket.getsockname()[1]
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        address = f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
        print(f"monitoring {runs.folder}/ at {address}  (Ctrl-C stops)", flush=True)
        if host in LOOPBACK_HOSTS:
            print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
        if browse:
            webbrowser.open(address)
        config = uvicorn.Config(create_app(runs, token), log_level="warning", timeout_graceful_shutdown=3)
        server = uvicorn.Server(config)
        runs.is_closing = lambda: server.should_exit
        with suppress(KeyboardInterrupt):
            server.run(sockets=[server_socket])
