"""Who may read a server's pages: host names, the token, the session cookie, and the rate of wrong tokens."""

import asyncio
import hashlib
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from fastapi import FastAPI, Request, Response, Security
from fastapi.responses import PlainTextResponse, RedirectResponse
from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from m1clip.web import LOOPBACK_HOSTS

HEADERS = {
    # Nothing is loaded from or sent to other hosts; plotly sets inline styles.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
# Wrong tokens: at once, and seconds until one more is allowed.
CLIENT_LIMIT, TOTAL_LIMIT = (10, 6.0), (100, 0.5)
MAX_CLIENTS = 1000
HOST = re.compile(r"\[?(.*?)\]?(?::(\d+))?")  # name or address, and port
BEARER = HTTPBearer(auto_error=False, description="The token that was printed at the start; a browser has a cookie.")


class RateLimit:
    """Bounds the wrong tokens of each client, and of all clients together, as the generic cell rate algorithm does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.total_until = 0.0  # when all wrong tokens so far are forgotten
        self.client_until: dict[str, float] = {}

    def wait_s(self, client: str) -> float:
        """Seconds until the client may try a token; 0 if it may now."""
        now, until = self.clock(), (self.client_until.get(client, 0.0), self.total_until)
        limits = zip(until, (CLIENT_LIMIT, TOTAL_LIMIT), strict=True)
        return max(0.0, *(time - now - (burst - 1) * interval for time, (burst, interval) in limits))

    def add(self, client: str) -> None:
        """Count a wrong token."""
        now = self.clock()
        self.total_until = max(now, self.total_until) + TOTAL_LIMIT[1]
        until = max(now, self.client_until.pop(client, 0.0)) + CLIENT_LIMIT[1]
        if len(self.client_until) >= MAX_CLIENTS:
            self.client_until = {name: time for name, time in self.client_until.items() if time > now}
        if len(self.client_until) >= MAX_CLIENTS:
            del self.client_until[next(iter(self.client_until))]  # the limit for all clients remains
        self.client_until[client] = until


class Access:
    """Decides which requests are answered.

    Without a token, only local host names are served, which stops DNS rebinding by other web pages. With one, a
    request needs it in its Authorization header, or the session cookie that a correct token in the address
    becomes. The cookie's value is random: it does not reveal the token, and ends with this process.
    """

    def __init__(
        self,
        token: str | None,
        clock: Callable[[], float] = time.monotonic,
        session: str = "",
        api_prefix: str = "/api/",
    ):
        self.token, self.session, self.api_prefix = token, session or secrets.token_urlsafe(32), api_prefix
        self.limit = RateLimit(clock)

    def is_api(self, path: str) -> bool:
        """Whether pages of other sites may not even link to it."""
        return path.startswith(self.api_prefix)

    def refuse(self, scope: Scope) -> Response | None:
        """The response to a request that is not answered, or None."""
        headers = scope["headers"]  # not as Starlette's Headers, which decode all of them
        hosts = [value for name, value in headers if name == b"host"]
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if not {b"cross-site", b"same-site"}.isdisjoint(sites) and self.is_api(scope["path"]):
            return PlainTextResponse("not served to pages of other sites", 403)
        if len(hosts) > 1:
            return PlainTextResponse("a request has one Host header", 400)
        name, port = split_host(hosts[0] if hosts else b"")
        if self.token is not None:
            return self._refuse_request(Request(scope), self.token, f"m1clip-{port or 80}")
        return None if name in LOOPBACK_HOSTS else PlainTextResponse("not served under this host name", 421)

    def _refuse_request(self, request: Request, token: str, cookie: str) -> Response | None:
        has_session = is_equal(request.cookies.get(cookie, ""), self.session)
        scheme, _, header = request.headers.get("authorization", "").partition(" ")
        query = request.query_params.get("token")
        given = header.strip() if scheme.lower() == "bearer" else query
        if given is None:
            return None if has_session else refuse_token(401)
        client = client_name(request)
        if not has_session and (wait_s := self.limit.wait_s(client)):
            return refuse_token(429, {"Retry-After": str(math.ceil(wait_s))})
        if is_equal(given, token):
            return None if query is None else self._start_session(cookie)
        if has_session:
            return None
        self.limit.add(client)
        return refuse_token(401)

    def _start_session(self, cookie: str) -> Response:
        """Move the token from the address to a cookie, which has one name per port: ports share their cookies."""
        redirect = RedirectResponse("/", 303, {"Cache-Control": "no-store"})
        redirect.set_cookie(cookie, self.session, httponly=True, samesite="strict", max_age=30 * 86400)
        return redirect


@lru_cache(100)
def split_host(host: bytes) -> tuple[str, str]:
    """Name or address, and port, of a Host header; empty if it is malformed."""
    found = HOST.fullmatch(host.decode("latin-1"))
    return (found[1], found[2] or "") if found else ("", "")


def is_equal(given: str, secret: str) -> bool:
    """Compare in a time that depends neither on the secret nor on its length."""
    digests = (hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in (given, secret))
    return hmac.compare_digest(*digests)


def client_name(request: Request) -> str:
    """The address of a client; for IPv6 its network of 64 bits, which one person has whole."""
    host = request.client.host if request.client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((int(address), 64), strict=False))


def refuse_token(status: int, headers: dict[str, str] | None = None) -> Response:
    reasons = {401: "a token is needed", 429: "too many wrong tokens; wait a moment"}
    text = f"{reasons[status]}: open the address that was printed at the start, or send Authorization: Bearer TOKEN"
    return PlainTextResponse(
        text, status, {"WWW-Authenticate": "Bearer", "Cache-Control": "no-store", **(headers or {})}
    )


class AccessMiddleware:
    """Passes on the requests that `access` permits, and adds the security headers to every response.

    Not Starlette's BaseHTTPMiddleware, which starts a task and two streams for each request.
    """

    def __init__(self, app: ASGIApp, access: Access):
        self.app, self.access = app, access
        common = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        self.api_headers, self.page_headers = (
            [*common, (b"cache-control", each)] for each in (b"no-store", b"no-cache")
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = self.api_headers if self.access.is_api(scope["path"]) else self.page_headers
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            has_started = True
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(header for header in headers if header[0] not in given)]
            await send(message)

        respond = self.access.refuse(scope) or self.app
        try:
            await respond(scope, receive, send_with_headers)
        except asyncio.CancelledError:  # the server stops, and has waited long enough
            if not has_started:
                stopped = PlainTextResponse("the server is stopping", 503, {"Retry-After": "5"})
                await stopped(scope, receive, send_with_headers)


def secured_app(title: str, access: Access) -> FastAPI:
    app = published_app(title, access)
    app.add_middleware(AccessMiddleware, access=access)
    return app


def published_app(title: str, access: Access, **options: Any) -> FastAPI:
    """An application that publishes its OpenAPI schema, without pages of documentation: those load other hosts."""
    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    reasons = {403: "A page of another site asks."}
    reasons |= (
        {421: "Not a local host name."} if access.token is None else {401: "No token.", 429: "Too many wrong tokens."}
    )
    return FastAPI(
        title=title,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={status: {"description": reason, **text} for status, reason in reasons.items()},
        dependencies=[] if access.token is None else [Security(BEARER)],
        **options,
    )
