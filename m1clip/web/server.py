"""Sockets, connections and the event loop of a server."""

import asyncio
import socket
import time
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from m1clip.web import LOOPBACK_HOSTS, Address

if TYPE_CHECKING:
    from starlette.types import ASGIApp  # not at run time: serve loads its model while FastAPI is imported

MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 65_536  # of a request line with its headers
IDLE_S = 10.0  # then a connection without a complete request is closed
START_S = 60.0  # for a worker to be ready
KILL_S = 10.0  # for a worker to end, after the time for the requests that it answers
STALLED_S = 60.0  # then a client that still sends the same request, or does not read its response, is disconnected


def listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on one of the next twenty if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + 20, 65536)):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            reason = error.strerror
    raise OSError(f"cannot listen on {host}, ports {port} to {candidate}: {reason}")


class JoinedWrites:
    """A transport that sends what is written in one step of the event loop at once.

    uvicorn writes the head of a response and then its body: two system calls, and for each the thread of an encoder
    takes the interpreter lock (58 µs with 32 clients).
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self.transport, self.loop, self.parts = transport, loop, list[bytes]()

    def write(self, data: bytes) -> None:
        if not self.parts:
            self.loop.call_soon(self.flush)
        self.parts.append(data)

    def flush(self) -> None:
        parts, self.parts = self.parts, []
        if parts and not self.transport.is_closing():
            self.transport.write(b"".join(parts))

    def close(self) -> None:
        self.flush()
        self.transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)


class Connection(HttpToolsProtocol):
    """Closed when no complete request came for IDLE_S, whether nothing was sent or a byte now and then.

    On httptools: h11 takes 200 µs more of each request, a third of the time of a small embedding.
    """

    last_cycle: Any = None
    stalled_s = 0.0
    head_bytes = 0  # received, and not part of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(JoinedWrites(transport, self.loop))  # type: ignore[arg-type]
        # asyncio does it only for sockets with a protocol number. Without it a response waits 40 ms for an ACK.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        cycle, is_same = self.cycle, self.cycle is self.last_cycle
        is_idle = cycle is None or cycle.response_complete
        is_stalled = is_same and not is_idle and (cycle.more_body or self.flow.write_paused)
        self.stalled_s = self.stalled_s + IDLE_S if is_stalled else 0.0
        if (is_idle and is_same) or self.stalled_s >= STALLED_S:
            self.transport.abort() if self.stalled_s else self.transport.close()
        elif not self.transport.is_closing():
            self.last_cycle = cycle
            self.loop.call_later(IDLE_S, self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        self.head_bytes += len(data)
        super().data_received(data)
        if self.head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            is_idle = self.cycle is None or self.cycle.response_complete
            self.send_400_response("The headers are too large.") if is_idle else self.transport.close()

    def on_url(self, url: bytes) -> None:
        """Keep an address such as http://other.example/api/ from being served as /api/."""
        super().on_url(url if self.url or url.startswith(b"/") else b"/" + url)

    def on_body(self, body: bytes) -> None:
        self.head_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.head_bytes = 0
        super().on_message_complete()


def server_config(app: Any, **options: Any) -> uvicorn.Config:
    """Only errors are logged: malformed requests of others would fill the terminal."""
    protocol: dict[str, Any] = {"http": Connection, "loop": "asyncio", "ws": "none"}
    protocol |= {"log_level": "error", "server_header": False}
    limits = {"limit_concurrency": MAX_CONNECTIONS, "timeout_graceful_shutdown": 3}
    return uvicorn.Config(app, **{**protocol, **limits, **options})


class ReadyServer(uvicorn.Server):
    """Calls `on_ready` once it accepts connections and answers signals; ends without a traceback on a second Ctrl-C."""

    on_ready: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn leaves the application to asyncio, which cancels it
            await self.lifespan.shutdown()


def create_server(app: "ASGIApp", **options: Any) -> ReadyServer:
    return ReadyServer(server_config(app, **options))


def announce(what: str, address: Address, port: int) -> None:
    host = address.host
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/"
    url_with_token = f"{url}?token={quote(address.token, safe='')}" if address.token else url
    print(f"{what} at {url_with_token if address.shows_token else url}  (Ctrl-C stops)", flush=True)
    if host in LOOPBACK_HOSTS:
        print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
    if address.browse:
        webbrowser.open(url_with_token)


def run_server(
    what: str, make_app: Callable[[str | None, Callable[[], bool]], "ASGIApp"], address: Address, **options: Any
) -> None:
    """Serve until Ctrl-C. `make_app` gets the token, and a function that tells whether the server is closing."""
    with listen(address.host, address.port) as listener:
        server = create_server(make_app(address.token, lambda: server.should_exit), **options)
        server.on_ready = partial(announce, what, address, listener.getsockname()[1])
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])


class Workers(Multiprocess):
    """Processes that accept the connections of one socket; one that dies is replaced."""

    is_ready = False

    def __init__(self, config: uvicorn.Config, listener: socket.socket, on_ready: Callable[[], None]):
        super().__init__(config, [listener])
        self.on_ready = on_ready

    def init_processes(self) -> None:
        super().init_processes()
        self.is_ready = all(process.wait_until_ready(START_S, self.should_exit) for process in self.processes)
        self.on_ready() if self.is_ready else self.should_exit.set()

    def terminate_all(self) -> None:
        for listener in self.sockets:
            listener.close()  # new clients are refused at once, instead of queueing for nobody
        super().terminate_all()

    def join_all(self) -> None:
        until = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + KILL_S
        for worker in self.processes:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.process.kill()  # one that was stopped, or hangs


def run_workers(what: str, make_app: Callable[[], "ASGIApp"], address: Address, count: int, **options: Any) -> None:
    """Serve in several processes until Ctrl-C. Each of them calls `make_app`, which it gets as a pickle."""
    with listen(address.host, address.port) as listener:
        config = server_config(make_app, factory=True, workers=count, **options)
        workers = Workers(config, listener, partial(announce, what, address, listener.getsockname()[1]))
        workers.run()
    if not workers.is_ready or STARTUP_FAILURE in [process.exitcode for process in workers.processes]:
        raise RuntimeError("a worker could not be started")
