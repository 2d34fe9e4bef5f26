"""Downloads images from public addresses, for `--allow urls`: never from this machine or its network.

A host name is resolved once, its addresses are checked, and the connection goes to the checked address: a second answer
of the DNS server cannot redirect it. Every redirect is checked in the same way.
"""

import asyncio
import ipaddress
import socket
import ssl
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from urllib.parse import SplitResult, urljoin, urlsplit

import h11

from m1clip import __version__
from m1clip.serve.errors import RequestError

MAX_BYTES = 20_000_000
TOTAL_S = 10.0  # for a download with its redirects
MAX_REDIRECTS = 3
MAX_URL = 4096
MAX_DOWNLOADS = 16  # at once
NAT64 = IPv6Network("64:ff9b::/96")  # addresses of IPv4 in networks without it
SPECIAL = (IPv4Network("192.0.0.0/24"), IPv6Network("2002::/16"), IPv6Network("2001::/23"))  # protocols, 6to4, Teredo


class Fetcher:
    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes, self.slots = max_bytes, asyncio.Semaphore(MAX_DOWNLOADS)

    async def __call__(self, url: str) -> bytes:
        async with self.slots:
            try:
                async with asyncio.timeout(TOTAL_S):
                    return await self._follow(url)
            except TimeoutError:
                raise refused(url, f"it took longer than {TOTAL_S:.0f} s") from None
            except (OSError, h11.RemoteProtocolError, UnicodeError) as error:
                raise refused(url, str(error) or type(error).__name__) from None

    async def _follow(self, url: str) -> bytes:
        current = url
        for _ in range(MAX_REDIRECTS + 1):
            status, location, body = await self._get(parse_url(current), url)
            if status == 200:
                return body
            if status not in (301, 302, 303, 307, 308) or not location:
                raise refused(url, f"status {status}")
            current = urljoin(current, location)
        raise refused(url, f"more than {MAX_REDIRECTS} redirects")

    async def _get(self, parts: SplitResult, url: str) -> tuple[int, str, bytes]:
        """Status, redirect and body of one request."""
        is_tls, host = parts.scheme == "https", str(parts.hostname)
        port = parts.port or (443 if is_tls else 80)
        address = await public_address(host, port, url)
        options = {"ssl": tls_context(), "server_hostname": host} if is_tls else {}
        reader, writer = await asyncio.open_connection(address, port, **options)  # type: ignore[arg-type]
        try:
            connection = h11.Connection(h11.CLIENT)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            headers = [("Host", parts.netloc), ("User-Agent", f"m1clip/{__version__}"), ("Connection", "close")]
            request = h11.Request(
                method="GET", target=target.encode("ascii"), headers=[*headers, ("Accept", "image/*")]
            )
            writer.write((connection.send(request) or b"") + (connection.send(h11.EndOfMessage()) or b""))
            return await self._read(connection, reader, url)
        finally:
            writer.close()

    async def _read(self, connection: h11.Connection, reader: asyncio.StreamReader, url: str) -> tuple[int, str, bytes]:
        status, location, body = 0, "", bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Response):
                status, headers = event.status_code, dict(event.headers)
                location = headers.get(b"location", b"").decode("ascii", "replace")
                if status != 200:
                    return status, location, b""
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self.max_bytes:
                    raise refused(url, f"it is larger than {self.max_bytes / 1e6:.0f} MB")
            elif isinstance(event, h11.EndOfMessage):
                return status, location, bytes(body)


def parse_url(url: str) -> SplitResult:
    """The parts of an address that may be fetched, if its host is public."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url:
        raise refused(url, "it is not an http or https address")
    if "@" in parts.netloc:
        raise refused(url, "it has a user name")
    return parts


async def public_address(host: str, port: int, url: str) -> str:
    """An address of the host, if all of them are public."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise refused(url, "its host is not known") from None
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        raise refused(url, "its host is not a public address")
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an address is outside of this machine and its networks, also where IPv6 carries one of IPv4."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # with a scope: fe80::1%eth0
        return False
    if isinstance(ip, IPv6Address) and (ip.ipv4_mapped or ip in NAT64):
        return is_public(str(IPv4Address(int(ip) & 0xFFFFFFFF)))
    # Not is_global alone: which ranges it knows depends on the version of Python.
    is_special = ip.is_private or ip.is_reserved or ip.is_multicast or ip.is_loopback or ip.is_link_local
    return ip.is_global and not is_special and not any(ip in network for network in SPECIAL)


@lru_cache
def tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


def refused(url: str, reason: str) -> RequestError:
    return RequestError(400, f"{url[:200]} cannot be fetched: {reason}", "input")
