"""The web server against its OpenAPI schema, requests without a token, and a run that is slow to read."""

import itertools
import re
import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks
from starlette.testclient import TestClient

from helpers import serve_in_thread
from long_log import write_run
from m1clip.monitor import web
from m1clip.monitor.log import Log
from m1clip.web import access, server

TOKEN = "a-Secret"
SCHEMA_CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        write_run(folder / name, 300, (100, 120), (50,), None)
    (folder / "empty").mkdir()
    (folder / "empty" / "config.json").write_text('{"epochs": 1, "data": "a", "preset": {}}')
    return folder


def client_of(folder, token=None, address="http://127.0.0.1:8265", clock=lambda: 0.0):
    return TestClient(web.create_app(web.RunCache(folder), token, clock), base_url=address, follow_redirects=False)


def operations(token):
    return client_of(None, token).app.openapi()["paths"]


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize("path", operations(None))
def test_every_answer_conforms_to_the_published_schema(folder, monkeypatch, path, token):
    """Requests that schemathesis generates from the schema, valid and invalid, also with names of real runs."""
    monkeypatch.setattr(web, "POLL_S", 0.0)
    runs = web.RunCache(folder)
    runs.is_closing = itertools.cycle([False, True]).__next__  # a stream ends after its first event
    app = web.create_app(runs, token)
    headers = {"host": "127.0.0.1", **({"authorization": f"Bearer {token}"} if token else {})}
    operation = schemathesis.openapi.from_asgi("/openapi.json", app, headers=headers)[path]["GET"]
    names = st.sampled_from(["a", "b", "empty", "nobody"])
    modes = list(GenerationMode) if operation.query or operation.path_parameters else [GenerationMode.POSITIVE]
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in modes))

    @seed(0)
    @settings(
        max_examples=20, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(case=cases, name=names, is_real=st.booleans())
    def check(case, name, is_real):
        is_real &= case.meta.generation.mode == GenerationMode.POSITIVE  # an invalid request stays invalid
        if is_real and "{name}" in path:
            case.path_parameters = {"name": name}
        elif is_real and "run" in (case.query or {}):
            case.query |= {"run": [name], "key": ["loss", "mean_r1", "nonsense"]}
        response = case.call(headers=headers)
        case.validate_response(response, checks=SCHEMA_CHECKS, headers=headers)

    check()


@pytest.mark.parametrize("token", [None, TOKEN])
def test_the_schema_names_every_route_with_its_answers(folder, token):
    paths = operations(token)
    assert set(paths) == {
        f"/api/{end}"
        for end in ("runs", "curves", "live", *(f"run/{{name}}{each}" for each in ("", "/retrievals", "/metrics.csv")))
    }
    refusals = {"401", "429"} if token else {"421"}
    for path, methods in paths.items():
        responses = methods["get"]["responses"]
        assert {"200", "403"} | refusals <= set(responses), path
        assert all(response.get("content") for response in responses.values()), path
    limits = {each["name"]: each["schema"] for each in paths["/api/curves"]["get"]["parameters"]}
    assert (limits["max_points"]["minimum"], limits["max_points"]["maximum"]) == (10, 5000)
    assert limits["run"]["maxItems"] == 100


def test_the_schema_needs_the_token_and_there_is_no_page_that_loads_other_hosts(folder):
    client = client_of(folder, TOKEN)
    assert client.get("/openapi.json").status_code == 401
    answer = client.get("/openapi.json", headers={"authorization": f"Bearer {TOKEN}"})
    assert answer.json()["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    for path in ("/docs", "/redoc"):
        assert client.get(path, headers={"authorization": f"Bearer {TOKEN}"}).status_code == 404


def test_the_cookie_does_not_hold_the_token_and_ends_with_the_server(folder):
    client = client_of(folder, TOKEN)
    cookie = client.get(f"/?token={TOKEN}").headers["set-cookie"]
    name, value = re.match(r"([^=]+)=([^;]+)", cookie).groups()
    assert TOKEN not in cookie
    assert len(value) >= 43  # 256 random bits
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert client.get("/api/runs").status_code == 200
    assert client_of(folder, TOKEN).get("/api/runs", headers={"cookie": f"{name}={value}"}).status_code == 401
    assert client_of(folder, TOKEN).get("/api/runs", headers={"cookie": f"{name}={TOKEN}"}).status_code == 401


def test_scripts_give_the_token_in_a_header(folder):
    client = client_of(folder, TOKEN)
    for value, status in ((f"Bearer {TOKEN}", 200), (f"bearer {TOKEN}", 200), (f"Basic {TOKEN}", 401), ("Bearer", 401)):
        assert client.get("/api/runs", headers={"authorization": value}).status_code == status, value
    assert not client.cookies


@pytest.mark.parametrize("given", ["ä", "\x00", "a-Secre", "a-Secrett", "", "%ff", "%00", "🦊", "x" * 9000])
def test_any_wrong_token_is_refused_without_an_error(folder, given):
    client = client_of(folder, TOKEN)
    assert client.get("/", params={"token": given}).status_code == 401
    assert client.get(f"/?token={given if given.startswith('%') else ''}").status_code == 401
    assert client.get("/", headers={"authorization": b"Bearer " + given.encode()}).status_code == 401
    assert client.get("/", headers={"cookie": b"m1clip-8265=" + given.encode()}).status_code == 401


def test_tokens_and_cookies_are_compared_in_constant_time(folder, monkeypatch):
    compared = []
    monkeypatch.setattr(access.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    client_of(folder, TOKEN).get("/?token=x", headers={"cookie": "m1clip-8265=y"})
    assert len(compared) == 2  # the cookie and the token
    assert {len(digest) for pair in compared for digest in pair} == {32}  # also independent of the length


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_wrong_tokens_are_limited_per_client_and_a_right_one_waits_seconds(folder):
    clock = Clock()
    client = client_of(folder, TOKEN, clock=clock)
    assert client.get(f"/?token={TOKEN}").status_code == 303
    session = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    client.cookies.clear()
    answers = [client.get("/?token=wrong").status_code for _ in range(12)]
    assert answers == [401] * 10 + [429] * 2
    refused = client.get(f"/?token={TOKEN}")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "6")
    assert client.get("/api/runs", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 429
    assert client.get("/api/runs", headers={"cookie": session}).status_code == 200  # who is in stays in
    client.cookies.clear()
    clock.now = 6.0
    assert client.get(f"/?token={TOKEN}").status_code == 303


def test_requests_without_a_token_are_not_counted(folder):
    client = client_of(folder, TOKEN)
    assert {client.get("/api/runs", headers={"cookie": "m1clip-8265=old"}).status_code for _ in range(50)} == {401}
    assert client.get(f"/?token={TOKEN}").status_code == 303


def test_wrong_tokens_of_many_clients_are_limited_together_and_need_bounded_memory():
    clock = Clock()
    limit = access.RateLimit(clock)
    tries = 0
    for client in range(5000):
        if limit.wait_s(f"client {client}") == 0:
            tries += 1
        limit.add(f"client {client}")
    assert tries == 100
    assert len(limit.client_until) <= access.MAX_CLIENTS
    clock.now = 5000 * 0.5
    assert limit.wait_s("a visitor") == 0


@pytest.mark.parametrize(("host", "name"), [("10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64")])
def test_clients_are_addresses_and_networks_of_64_bits(host, name):
    request = web.Request({"type": "http", "client": (host, 1), "headers": []})
    assert access.client_name(request) == name


@pytest.mark.parametrize("host", ["a:b", "[", "[::1", "x:99999999", "ä", "", "a b", ":80", "127.0.0.1:-1"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_malformed_host_is_refused_without_an_error(folder, host, token):
    answer = client_of(folder, token).get("/api/runs", headers={"host": host.encode()})
    assert answer.status_code == (401 if token else 421)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_pages_of_other_sites_get_nothing_from_the_api(folder):
    client = client_of(folder)
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        assert client.get("/api/runs", headers={"sec-fetch-site": site}).status_code == status
    assert client.get("/", headers={"sec-fetch-site": "cross-site"}).status_code == 200  # a link to the page


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW"])
def test_the_api_answers_only_get(folder, method):
    client = client_of(folder)
    for path in ("/api/runs", "/api/run/a", "/api/live"):
        answer = client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET"), path
    assert client.request(method, "/").status_code == (200 if method == "HEAD" else 405)


class Gate:
    """Holds every read of one log until it is opened."""

    def __init__(self, monkeypatch, name):
        self.reached, self.opened = threading.Event(), threading.Event()
        refresh = Log.refresh

        def wait(log, *args):
            if log.path.parent.name == name:
                self.reached.set()
                assert self.opened.wait(120)
            return refresh(log, *args)

        monkeypatch.setattr(Log, "refresh", wait)


def test_one_run_that_is_slow_to_read_does_not_block_the_others(folder, monkeypatch):
    gate, client, answers = Gate(monkeypatch, "a"), client_of(folder), []
    slow = [threading.Thread(target=lambda: answers.append(client.get("/api/run/a").status_code)) for _ in range(60)]
    for thread in slow:
        thread.start()
    assert gate.reached.wait(120)
    assert client.get("/api/run/b").json()["last_step"] == 300
    assert client.get("/api/curves?run=b&key=loss").status_code == 200
    assert len(client.get("/api/runs").json()["runs"]) == 3
    gate.opened.set()
    for thread in slow:
        thread.join(120)
    assert set(answers) == {200, 503}
    assert answers.count(503) >= 60 - web.MAX_WAITING - 1  # no more than that may wait for one run


def test_the_history_of_a_long_log_is_read_behind_its_newest_steps(folder, monkeypatch):
    expected = client_of(folder).get("/api/run/a").json()
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 20_000)
    monkeypatch.setattr(web, "PART_BYTES", 10_000)
    parts, refresh = threading.Semaphore(1), web.SharedRun.refresh

    def refresh_one_part(run, *args):
        assert parts.acquire(timeout=120)
        return refresh(run, *args)

    monkeypatch.setattr(web.SharedRun, "refresh", refresh_one_part)
    runs = web.RunCache(folder)
    with runs.open("a") as run:
        first = web.asdict(web.describe_run(run))
        thread = run.history_thread
    assert 0 < first["fraction_read"] < 1
    assert first["last_step"] == 300
    assert next(row for row in runs.rows() if row.run == "a").fraction_read < 1
    parts.release(1000)
    thread.join(120)
    client = TestClient(web.create_app(runs), base_url="http://127.0.0.1")
    assert client.get("/api/run/a").json() == expected
    assert expected["fraction_read"] == 1


def test_the_csv_waits_for_the_history(folder, monkeypatch):
    expected = client_of(folder).get("/api/run/a/metrics.csv").text
    monkeypatch.setattr("m1clip.monitor.log.TAIL_BYTES", 20_000)
    monkeypatch.setattr(web, "PART_BYTES", 10_000)
    monkeypatch.setattr(web, "CSV_ROWS", 7)
    assert client_of(folder).get("/api/run/a/metrics.csv").text == expected
    assert expected.count("\n") == 281
    assert client_of(folder).get("/api/run/empty/metrics.csv").text.strip() == '"step"'


def test_runs_that_nobody_asks_for_are_dropped_from_memory(folder):
    clock = Clock()
    runs = web.RunCache(folder, clock=clock)
    for name, now in (("a", 0.0), ("b", 500.0), ("b", 700.0)):
        clock.now = now
        with runs.open(name):
            pass
    assert list(runs.views) == ["b"]


def test_open_streams_are_bounded(folder, monkeypatch):
    runs = web.RunCache(folder)
    client = TestClient(web.create_app(runs), base_url="http://127.0.0.1")
    runs.live_count = web.MAX_LIVE
    answer = client.get("/api/live")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    runs.live_count, runs.is_closing = 0, lambda: runs.live_count > 0
    assert client.get("/api/live").status_code == 200
    assert runs.live_count == 0  # also after the stream has ended


@pytest.fixture
def address(folder):
    """A real server in a thread, without a token."""
    with serve_in_thread(web.RunCache(folder)) as url:
        yield "127.0.0.1", urlsplit(url).port


def exchange(address, data):
    """What the server answers to these bytes, until it closes the connection."""
    with socket.create_connection(address, timeout=120) as connection:
        answer = b""
        with suppress(ConnectionResetError, BrokenPipeError):  # it does not read all of a request that is too large
            connection.sendall(data)
            while part := connection.recv(65536):
                answer += part
        return answer


LOCAL = b"Host: localhost\r\nConnection: close\r\n"
RAW_REQUESTS = {
    "no HTTP": (b"\x16\x03\x01\x00\xff\r\n\r\n", b"400"),
    "a header of a megabyte": (b"GET / HTTP/1.1\r\nX: " + b"x" * 1_000_000, b""),
    "a query of a megabyte": (b"GET /?" + b"x" * 1_000_000, b""),
    "a query of 50 KB": (b"GET /api/curves?run=" + b"x" * 50_000 + b"&key=loss HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "a query that is not UTF-8": (b"GET /api/runs?%ff%fe=%c3 HTTP/1.1\r\n" + LOCAL + b"\r\n", b"200"),
    "a path that is not UTF-8": (b"GET /api/run/%ff%fe HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "a path out of the folder": (b"GET /../../etc/passwd HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "a file name with NUL": (b"GET /page%00.js HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "a file name of 10 KB": (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "an absolute address": (b"GET http://evil.example/api/runs HTTP/1.1\r\n" + LOCAL + b"\r\n", b"404"),
    "a WebSocket": (
        b"GET /api/live2 HTTP/1.1\r\n" + LOCAL.replace(b"close", b"Upgrade") + b"Upgrade: websocket\r\n\r\n",
        b"404",
    ),
    "two hosts": (b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n" + LOCAL + b"\r\n", b"400"),
    "no host": (b"GET /api/runs HTTP/1.0\r\n\r\n", b"421"),
    "a cookie of garbage": (b"GET /api/runs HTTP/1.1\r\nCookie: \xff=;;==\x80;\r\n" + LOCAL + b"\r\n", b"200"),
}


@pytest.mark.parametrize("kind", RAW_REQUESTS)
def test_a_strange_request_gets_an_answer_and_logs_nothing(address, capfd, monkeypatch, kind):
    monkeypatch.setattr(server, "IDLE_S", 0.5)
    data, status = RAW_REQUESTS[kind]
    assert exchange(address, data).partition(b" ")[2].startswith(status)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("data", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET /api"])
def test_a_connection_without_a_complete_request_is_closed(address, monkeypatch, data):
    monkeypatch.setattr(server, "IDLE_S", 0.1)
    assert exchange(address, data).startswith(b"HTTP/1.1 200" if b"localhost" in data else b"")
