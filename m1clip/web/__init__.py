"""What all HTTP servers share: who may ask, sockets, connections. Never imports torch."""

from dataclasses import dataclass

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
SHARED_PAGE = ("m1clip", "web/page")  # package and folder of the files that all pages share


@dataclass(frozen=True)
class Address:
    """Where a server listens, and the secret that its clients need."""

    host: str
    port: int
    token: str | None = None
    browse: bool = False  # open the browser
    shows_token: bool = True  # in the address that is printed
