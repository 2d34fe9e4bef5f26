"""Around every request: limits on its size and on all of them together, the access log and the figures."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m1clip.serve import MAX_REQUESTS, Limits
from m1clip.serve.errors import RequestError, busy
from m1clip.serve.metrics import Metrics

FLUSH_S = 0.05  # between two writes of the access log


class LineWriter:
    """Writes lines together, a moment later: each write lets an encoder take the interpreter lock."""

    def __init__(self, write: Callable[[bytes], object]):
        self.write, self.lines = write, list[bytes]()

    def __call__(self, line: bytes) -> None:
        if not self.lines:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        self.lines.append(line + b"\n")

    def flush(self) -> None:
        lines, self.lines = self.lines, []
        with suppress(OSError, ValueError):  # a closed pipe must not stop the server
            self.write(b"".join(lines))


class RequestMiddleware:
    """Bodies are counted as they arrive, so that neither a wrong Content-Length nor many clients exhaust memory.

    `log` takes a line of JSON for each request: never its query, where a token may be, and nothing of its body.
    """

    def __init__(self, app: ASGIApp, limits: Limits, metrics: Metrics, log: LineWriter | None):
        self.app, self.limits, self.metrics, self.log = app, limits, metrics, log
        self.active = self.bytes = 0  # requests and bytes of their bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        start, status, received = time.perf_counter(), 0, 0

        async def receive_within_limits() -> Message:
            nonlocal received
            if not received:
                self.check_start(scope)
            message = await receive()
            size = len(message.get("body", b""))
            received, self.bytes = received + size, self.bytes + size
            self.check_size(received)
            return message

        async def send_and_count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.active += 1
        try:
            await self.app(scope, receive_within_limits, send_and_count)
        finally:
            self.active, self.bytes = self.active - 1, self.bytes - received
            self.report(scope, status, time.perf_counter() - start, received)

    def check_start(self, scope: Scope) -> None:
        """Refuse a body before it is read, if its declared length is too much."""
        if self.active > MAX_REQUESTS:
            raise busy(f"{MAX_REQUESTS:,} requests are being answered")
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                self.check_size(int(value[:20]))

    def check_size(self, size: int) -> None:
        if size > self.limits.max_bytes:
            limit = f"{self.limits.max_bytes / 1e6:g} MB (--max-mb)"
            raise RequestError(413, f"the body is larger than {limit}")
        if self.bytes > self.limits.max_bytes_in_flight:
            raise busy("the bodies of other requests take all memory that is set aside for them")

    def report(self, scope: Scope, status: int, seconds: float, received: int) -> None:
        route = scope.get("route")
        self.metrics.add_request(getattr(route, "path", "other"), status, seconds)
        if self.log is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "client": (scope.get("client") or ("",))[0], "method": scope["method"][:20]}
        line |= {"path": scope["path"][:200], "status": status, "ms": round(1000 * seconds, 2)}
        self.log(orjson.dumps({**line, "items": scope.get("items", 0), "bytes": received}))
