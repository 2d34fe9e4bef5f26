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
from uvicorn.protocols.http.h11_impl import H11Protocol

from m1clip.web import LOOPBACK_HOSTS, Address

MAX_CONNECTIONS = 256
IDLE_S = 10.0  # then a connection without a complete request is closed


def listen(host: str, port: int) -> socket.socket:
    """A socket on the port, or on one of the next twenty if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + 20, 65536)):
        try:
            return socket.create_server((host, candidate), family=family)
        except OSError as error:
            reason = error.strerror
    raise OSError(f"cannot listen on {host}, ports {port} to {candidate}: {reason}")


class Connection(H11Protocol):
    """Closed when no complete request came for IDLE_S, whether nothing was sent or a byte now and then."""

    last_cycle: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(IDLE_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self.last_cycle:
            self.transport.close()
        elif not self.transport.is_closing():
            self.last_cycle = self.cycle
            self.loop.call_later(IDLE_S, self._close_if_idle)


def create_server(app: FastAPI) -> uvicorn.Server:
    """Only errors are logged: malformed requests of others would fill the terminal."""
    options: dict[str, Any] = {"http": Connection, "ws": "none", "limit_concurrency": MAX_CONNECTIONS}
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
