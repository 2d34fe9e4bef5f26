"""Images by URL: only from public addresses, whatever a host name or a redirect says; bounded in size and time."""

import asyncio
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from m1clip.serve import fetch
from m1clip.serve.errors import RequestError
from m1clip.serve.fetch import Fetcher, is_public

PRIVATE = [
    "127.0.0.1",
    "127.8.9.1",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
]
PRIVATE += ["192.0.0.8", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "::", "::1"]
PRIVATE += ["fe80::1", "fe80::1%eth0", "fc00::1", "fd12::3", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1"]
PRIVATE += [
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "2002:7f00:1::",
    "2002:a00:1::1",
]
PRIVATE += ["2001:0:4136:e378:8000:63bf:3fff:fdd2", "localhost", ""]
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_of_this_machine_or_its_networks_is_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address):
    assert is_public(address)


class Site(BaseHTTPRequestHandler):
    """Answers by path; keeps the Host headers of all requests."""

    hosts: list[str]

    def do_GET(self):
        self.hosts.append(self.headers["Host"])
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
            return
        self.send_response(404 if self.path == "/missing" else 200)
        self.end_headers()
        if self.path == "/slow":
            for _ in range(600):
                self.wfile.write(b"x")
                self.server.stopped.wait(0.05)
        self.wfile.write(b"x" * 3000 if self.path == "/large" else b"an image")

    def log_message(self, *args):
        pass


@contextmanager
def site():
    handler = type("Handler", (Site,), {"hosts": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.stopped = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, handler.hosts
    finally:
        server.stopped.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def resolved(monkeypatch):
    """Host names and their addresses. 127.0.0.1 counts as public if it is the address of `public.example`."""
    answers = {
        "public.example": ["127.0.0.1"],
        "private.example": ["127.0.0.1"],
        "both.example": ["1.1.1.1", "10.0.0.1"],
    }
    asked = []

    async def getaddrinfo(loop, host, port, **options):
        asked.append(host)
        addresses = answers.get(host, [host])
        return [(2, 1, 6, "", (address, port)) for address in addresses]

    def only_there(address):
        return asked[-1] == "public.example" or is_public(address)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(fetch, "is_public", only_there)
    return asked


def get(url, max_bytes=2000):
    async def main():
        return await asyncio.wait_for(Fetcher(max_bytes)(url), 120)

    return asyncio.run(main())


def refusal(url):
    with pytest.raises(RequestError) as refused:
        get(url)
    assert refused.value.status_code == 400
    return refused.value.detail


def test_an_image_of_a_public_host_is_downloaded_from_the_address_that_was_checked(resolved):
    with site() as (port, hosts):
        assert get(f"http://public.example:{port}/photo.jpg?size=2") == b"an image"
        assert hosts == [f"public.example:{port}"]
        assert resolved == ["public.example"]  # once: a second answer could be another address


@pytest.mark.parametrize("host", ["private.example", "both.example", "127.0.0.1", "[::1]", "10.0.0.1", "0", "0x7f.1"])
def test_a_host_with_a_private_address_gets_no_request(resolved, host):
    with site() as (port, hosts):
        assert "is not a public address" in refusal(f"http://{host}:{port}/")
        assert hosts == []


def test_redirects_are_followed_and_checked_like_the_first_address(resolved):
    with site() as (port, hosts):
        start = f"http://public.example:{port}/to/"
        assert get(f"{start}http://public.example:{port}/to//photo.jpg") == b"an image"
        before = len(hosts)
        assert "is not a public address" in refusal(f"{start}http://private.example:{port}/")
        assert "is not an http or https address" in refusal(f"{start}file:///etc/passwd")
        assert len(hosts) == before + 2
        assert "more than 3 redirects" in refusal(f"{start}{start}{start}{start}{start}/")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://public.example/", "is not an http or https address"),
        ("http:///x", "is not an http or https address"),
        ("http://public.example:99999/", "is not an http or https address"),
        ("http://public.example/\r\nX: y", "is not an http or https address"),
        ("http://public.example/ä", "is not an http or https address"),
        ("http://" + "x" * 5000, "is not an http or https address"),
        ("http://user:secret@public.example/", "has a user name"),
        ("http://[::1", "is not an http or https address"),
        ("http://public.example:1/", "cannot be fetched"),
        ("https://public.example:1/", "cannot be fetched"),
    ],
)
def test_a_strange_address_is_one_sentence(resolved, url, words):
    assert words in refusal(url)


def test_size_and_time_are_bounded(resolved, monkeypatch):
    monkeypatch.setattr(fetch, "TOTAL_S", 0.3)
    with site() as (port, _):
        assert "status 404" in refusal(f"http://public.example:{port}/missing")
        assert "larger than 0 MB" in refusal(f"http://public.example:{port}/large")
        assert "took longer than 0 s" in refusal(f"http://public.example:{port}/slow")


def test_a_server_that_does_not_speak_http_is_refused(resolved):
    async def main():
        async def answer(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            with pytest.raises(RequestError, match="cannot be fetched"):
                await Fetcher()(f"http://public.example:{server.sockets[0].getsockname()[1]}/")

    asyncio.run(main())
