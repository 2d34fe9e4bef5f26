"""What all HTTP servers share: who may ask, sockets, connections. Never imports torch."""

import secrets
from dataclasses import dataclass, replace

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
SHARED_PAGE = ("m1clip", "web/page")  # package and folder of the files that all pages share


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the secret that its clients need; the token `auto` is replaced by a random one."""

    host: str
    port: int
    token: str | None = None
    browse: bool = False  # open the browser

    def with_token(self) -> "Address":
        return replace(self, token=secrets.token_urlsafe(12)) if self.token == "auto" else self
