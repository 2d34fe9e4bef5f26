"""Random requests to the web monitor over real connections: counts the answers, errors of the server, and its log.

python benchmarks/fuzz_monitor.py --requests 2000
"""

import argparse
import collections
import random
import re
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from long_log import write_run

TOKEN = "a-secret"
METHODS = ["GET"] * 8 + ["HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "BREW", "get", "G\0ET"]
PATHS = ["/", "/api/runs", "/api/run/night", "/api/run/night/retrievals", "/api/run/night/metrics.csv", "/api/curves"]
PATHS += [
    "/openapi.json",
    "/page.js",
    "/curves.json",
    "/api/run/",
    "/api//runs",
    "/api/run/..%2f..%2fetc",
    "//x/",
    "*",
    "",
]
WORDS = [
    "night",
    "loss",
    "step",
    "minutes",
    "0",
    "-1",
    "1e400",
    "nan",
    "inf",
    "null",
    "true",
    "[]",
    "..",
    "\0",
    "ä",
    "🦊",
]
WORDS += [
    "%",
    "%zz",
    "\\",
    "../../../etc/passwd",
    "' OR 1=1",
    "<script>",
    "9" * 400,
    "x" * 3000,
    "\r\nX-Injected: 1",
    "",
]
KEYS = ["run", "key", "x_axis", "smooth", "max_points", "start", "end", "token", "name", "__proto__"]
HOSTS = ["localhost", "127.0.0.1:8265", "[::1]", "evil.example", "a:b", "[", "", "localhost:99999999", "ä", "x" * 500]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name) / "runs" / "night", 3000, (1000, 1200), (500, 501), 1800)
        for token in (None, TOKEN):
            fuzz(Path(name) / "runs", token, args.requests // 2, args.seed)


def fuzz(folder: Path, token: str | None, count: int, seed: int) -> None:
    command = [sys.executable, "-m", "m1clip", "monitor", "--web", "--runs", str(folder), "--port", "18365"]
    command += ["--token", token] if token else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = urlsplit(re.search(r"http://\S+", process.stdout.readline())[0])
    rng = random.Random(seed)
    requests = [random_request(rng, token) for _ in range(count)]
    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(lambda data: send((url.hostname, url.port), data), requests))
    is_alive = send((url.hostname, url.port), b"GET /page.css HTTP/1.1\r\nHost: localhost\r\n\r\n") in ("200", "401")
    process.terminate()
    log = process.communicate()[1]
    print(
        f"{count} requests {'with' if token else 'without'} a token:", dict(collections.Counter(statuses).most_common())
    )
    errors = [request for request, status in zip(requests, statuses, strict=True) if status.startswith("5")]
    print(f"  server errors: {len(errors)}; still answers: {is_alive}; exit code {process.returncode}; log: {log!r}")
    for request in errors[:5]:
        print("  ", request[:300])


def random_request(rng: random.Random, token: str | None) -> bytes:
    """A request line and headers, mostly well-formed; one in eight has some of its bytes changed."""
    path = rng.choice(PATHS)
    if rng.random() < 0.3:
        path = f"/api/run/{quote(rng.choice(WORDS), safe='%')}" + rng.choice(["", "/metrics.csv", "/retrievals", "/x"])
    pairs = [(rng.choice(KEYS), rng.choice(WORDS)) for _ in range(rng.choice([0, 0, 1, 3, 30]))]
    if token and rng.random() < 0.98:  # else nearly all answers were 429
        pairs = [(key, value) for key, value in pairs if key != "token"]
    pairs += [("run", "night"), ("key", "loss")] if path == "/api/curves" and rng.random() < 0.7 else []
    query = "&".join(f"{key}={quote(value, safe='%')}" for key, value in pairs)
    headers = [("Host", rng.choice(HOSTS) if rng.random() < 0.2 else "localhost")]
    names = [
        "Cookie",
        "Authorization",
        "Accept",
        "Range",
        "Origin",
        "Sec-Fetch-Site",
        "If-None-Match",
        "Content-Length",
    ]
    names += ["If-Modified-Since", "X-Forwarded-For", "Upgrade", "Transfer-Encoding", "Expect", "Accept-Encoding"]
    if token and rng.random() < 0.9:
        headers.append(("Authorization", f"Bearer {token}"))
    headers += [(rng.choice(names), rng.choice(WORDS).replace("\r\n", "")) for _ in range(rng.choice([0, 1, 4]))]
    head = "".join(f"{name}: {value}\r\n" for name, value in [*headers, ("Connection", "close")])
    data = f"{rng.choice(METHODS)} {path}{'?' + query if query else ''} HTTP/1.1\r\n{head}\r\n".encode()
    if rng.random() < 0.125:
        data = bytearray(data)
        for _ in range(rng.choice([1, 5, 50])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def send(address: tuple[str, int], data: bytes) -> str:
    """The status of the answer, or how the connection ended without one."""
    try:
        with socket.create_connection(address, timeout=60) as connection:
            connection.sendall(data)
            answer = connection.recv(65536)
            while connection.recv(65536):
                pass
            return answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/1.1 ") else "closed"
    except ConnectionError:
        return "closed"
    except TimeoutError:
        return "no answer in 60 s"


if __name__ == "__main__":
    main()
