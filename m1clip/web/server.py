"""Sockets, connections and the event loop of a server."""

import asyncio
import secrets
import socket
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from m1clip.web import LOOPBACK_HOSTS, Address

MAX_CONNECTIONS = 256
MAX_HEAD_BYTES = 65_536  # of a request line with its headers
IDLE_S = 10.0  # then a connection without a complete request is closed
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


class Connection(HttpToolsProtocol):
    """Closed when no complete request came for IDLE_S, whether nothing was sent or a byte now and then.

    On httptools: h11 takes 200 µs more of each request, a third of the time of a small embedding.
    """

    last_cycle: Any = None
    stalled_s = 0.0
    head_bytes = 0  # received, and not part of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        if self.head_bytes > MAX_HEAD_BYTES:
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        """Keep an address such as http://other.example/api/ from being served as /api/."""
        super().on_url(url if self.url or url.startswith(b"/") else b"/" + url)

    def on_body(self, body: bytes) -> None:
        self.head_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.head_bytes = 0
        super().on_message_complete()


def create_server(app: FastAPI) -> uvicorn.Server:
    """Only errors are logged: malformed requests of others would fill the terminal."""
    options: dict[str, Any] = {
        "http": Connection,
        "loop": "asyncio",
        "ws": "none",
        "limit_concurrency": MAX_CONNECTIONS,
    }
    return uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=3, **options))


def run_server(what: str, make_app: Callable[[str | None, Callable[[], bool]], FastAPI], address: Address) -> None:
    """Serve until Ctrl-C. `make_app` gets the token, and a function that tells whether the server is closing."""
    host, token = address.host, secrets.token_urlsafe(12) if address.token == "auto" else address.token
    with listen(host, address.port) as server_socket:
        port = server_socket.getsockname()[1]
        name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        url = f"http://{name}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
        print(f"{what} at {url}  (Ctrl-C stops)", flush=True)
        if host in LOOPBACK_HOSTS:
            print(f"from another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}", flush=True)
        if address.browse:
            webbrowser.open(url)
        server = create_server(make_app(token, lambda: server.should_exit))
        with suppress(KeyboardInterrupt):
            server.run(sockets=[server_socket])
