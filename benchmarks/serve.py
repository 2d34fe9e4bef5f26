"""m1clip serve, beside infinity if its environment is given: start, memory, latency, requests per second, endurance.

python benchmarks/serve.py MODEL                                       an ONNX export (m1clip export RUN --out MODEL)
python benchmarks/serve.py MODEL --load-minutes 10 --malformed 10000   64 clients; images with changed bytes
python benchmarks/serve.py MODEL --infinity FOLDER --infinity-venv VENV
    FOLDER is the same model for infinity (m1clip export RUN --to infinity --out FOLDER), VENV has infinity_emb
    installed. The servers take turns; every figure is the median of the rounds.
"""

import argparse
import asyncio
import base64
import collections
import io
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from photos import jpeg, mutated

WORDS = ["red", "blue", "green", "small", "large", "old", "new", "fast", "slow", "dark", "bright", "round"]
NOUNS = ["cat", "dog", "bus", "tree", "house", "boat", "lamp", "cup", "road", "bird", "hat", "door"]
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": ""}
Bodies = Iterator[dict[str, object]]


@dataclass(frozen=True)
class Server:
    name: str
    command: list[str]
    path: str
    environment: dict[str, str] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="ONNX export")
    parser.add_argument("--infinity", metavar="FOLDER", help="the same model for infinity")
    parser.add_argument("--infinity-venv", type=Path, metavar="VENV")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement of requests per second")
    parser.add_argument("--load-minutes", type=float, default=0.0, help="of 64 clients with texts and images")
    parser.add_argument("--malformed", type=int, default=0, metavar="N", help="images with changed bytes")
    parser.add_argument("--flags", default="", help='of m1clip serve, as in "--workers 2"')
    args = parser.parse_args()
    servers = [m1clip_server(args.model, args.flags)]
    if args.infinity:
        servers.append(infinity_server(args.infinity, args.infinity_venv))
    rows: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
    for number in range(args.rounds):
        for server in servers:
            rows[server.name].append(measure(server, args.seconds))
            print(f"round {number + 1}, {server.name}: {rows[server.name][-1]}", file=sys.stderr, flush=True)
    print_table(rows)
    if args.load_minutes:
        endure(servers[0], 60 * args.load_minutes)
    if args.malformed:
        send_malformed(servers[0], args.malformed)


def m1clip_server(model: str, flags: str) -> Server:
    command = [sys.executable, "-m", "m1clip", "serve", model, "--port", free_port(), *flags.split()]
    return Server("m1clip serve", command, "/v1/embeddings")


def infinity_server(folder: str, venv: Path) -> Server:
    command = [f"{venv}/bin/infinity_emb", "v2", "--model-id", folder, "--served-model-name", "m", "--engine", "torch"]
    command += ["--device", "cpu", "--no-bettertransformer", "--host", "127.0.0.1", "--port", free_port()]
    return Server("infinity", command, "/embeddings", OFFLINE)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return str(listener.getsockname()[1])


@contextmanager
def running(server: Server) -> Iterator[tuple[int, psutil.Process, float]]:
    """Its port, process, and the seconds until it answered."""
    port, start = int(server.command[server.command.index("--port") + 1]), time.perf_counter()
    environment = {**os.environ, **server.environment}
    process = subprocess.Popen(server.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, f"{server.name} has exited"
            time.sleep(0.01)
        yield port, psutil.Process(process.pid), time.perf_counter() - start
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


class Client(asyncio.Protocol):
    """Sends the next request when the previous one is answered. No HTTP library: the servers need the cores."""

    def __init__(self, requests: Iterator[bytes], seconds: list[float], statuses: collections.Counter[int]):
        self.requests, self.seconds, self.statuses = requests, seconds, statuses
        self.data, self.needed, self.done = b"", 0, asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        request = next(self.requests, None)
        if request is None:
            self.transport.close()
            return
        self.start = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.needed and (end := self.data.find(b"\r\n\r\n")) > 0:
            head = self.data[:end].lower()
            length = head.index(b"content-length: ") + 16
            self.needed = end + 4 + int(head[length : length + 12].split(b"\r")[0])
        if self.needed and len(self.data) >= self.needed:
            self.statuses[int(self.data[9:12])] += 1
            self.seconds.append(time.perf_counter() - self.start)
            self.data, self.needed = b"", 0
            self.send()

    def connection_lost(self, error: Exception | None) -> None:
        if error or self.data:
            self.statuses[0] += 1  # an answer is missing
        self.done.set_result(None)


def send_requests(port: int, clients: int, requests: Iterator[bytes]) -> tuple[list[float], collections.Counter[int]]:
    """Seconds of each request, and their statuses."""
    seconds, statuses = list[float](), collections.Counter[int]()

    async def send() -> None:
        loop = asyncio.get_running_loop()
        opened = [
            loop.create_connection(lambda: Client(requests, seconds, statuses), "127.0.0.1", port)
            for _ in range(clients)
        ]
        await asyncio.gather(*[client.done for _, client in await asyncio.gather(*opened)])

    asyncio.run(send())
    return seconds, statuses


def encode(path: str, bodies: Bodies, until: float = float("inf")) -> Iterator[bytes]:
    for body in bodies:
        if time.monotonic() > until:
            return
        data = json.dumps({"model": "m", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        yield head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def text_bodies() -> Bodies:
    """Texts that differ, of about ten tokens."""
    for number in itertools.count():
        first, second = WORDS[number % 12], WORDS[number // 12 % 12]
        yield {"input": f"a photo of a {first} {second} {NOUNS[number // 144 % 12]} {number % 97}"}


def image_bodies(size: int = 224) -> Bodies:
    uris = [f"data:image/jpeg;base64,{base64.b64encode(jpeg(number, size)).decode()}" for number in range(32)]
    return ({"input": uri, "modality": "image"} for uri in itertools.cycle(uris))


def mixed_bodies() -> Bodies:
    """Three texts for each image."""
    texts, images = text_bodies(), image_bodies()
    return (next(texts if number % 4 else images) for number in itertools.count())


def measure(server: Server, seconds: float) -> dict[str, float]:
    def rate(clients: int, bodies: Callable[[], Bodies]) -> float:
        times, statuses = send_requests(port, clients, encode(server.path, bodies(), time.monotonic() + seconds))
        assert set(statuses) == {200}, statuses
        return len(times) / seconds

    with running(server) as (port, process, ready_s):
        row = {"ready, s": ready_s, "memory when ready, MB": process.memory_info().rss / 1e6}
        send_requests(port, 1, encode(server.path, itertools.islice(text_bodies(), 50)))
        times, _ = send_requests(port, 1, encode(server.path, itertools.islice(text_bodies(), 300)))
        row |= {
            "one text, ms": 1000 * median(times),
            "one text, 99 %, ms": 1000 * sorted(times)[int(0.99 * len(times))],
        }
        row["one image, ms"] = 1000 * median(
            send_requests(port, 1, encode(server.path, itertools.islice(image_bodies(), 60)))[0]
        )
        used = cpu_seconds(process)
        row["texts/s, 32 clients"] = rate(32, text_bodies)
        row["CPU ms of a text"] = 1000 * (cpu_seconds(process) - used) / (seconds * row["texts/s, 32 clients"])
        row["images/s, 32 clients"] = rate(32, image_bodies)
        row["memory at the end, MB"] = process.memory_info().rss / 1e6
        return row


def cpu_seconds(process: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in [process, *process.children(recursive=True)])


def print_table(rows: dict[str, list[dict[str, float]]]) -> None:
    names = list(rows)
    print(f"| median of {len(rows[names[0]])} rounds | {' | '.join(names)} |{' ratio |' if len(names) > 1 else ''}")
    print("|---" * (len(names) + 1 + (len(names) > 1)) + "|")
    for key in rows[names[0]][0]:
        values = [median(row[key] for row in rows[name]) for name in names]
        ratio = f" {max(values) / min(values):.1f} |" if len(names) > 1 else ""
        print(
            f"| {key} | {' | '.join(f'{value:,.2f}' if value < 100 else f'{value:,.0f}' for value in values)} |{ratio}"
        )


def endure(server: Server, duration_s: float) -> None:
    """64 clients for minutes: errors, and memory as time passes."""
    with running(server) as (port, process, _):
        start, memory = time.monotonic(), list[tuple[float, float]]()

        def watched(requests: Iterator[bytes]) -> Iterator[bytes]:
            for request in requests:
                elapsed = time.monotonic() - start
                if not memory or elapsed > memory[-1][0] + 10:
                    memory.append((elapsed, process.memory_info().rss / 1e6))
                yield request

        requests = watched(encode(server.path, mixed_bodies(), start + duration_s))
        times, statuses = send_requests(port, 64, requests)
    print(f"64 clients for {duration_s / 60:g} min: {len(times):,} requests, by status {dict(statuses)}")
    print(
        "memory, MB:",
        ", ".join(f"{mb:.0f} after {elapsed:.0f} s" for elapsed, mb in memory[:: max(1, len(memory) // 12)]),
    )


def send_malformed(server: Server, count: int) -> None:
    from PIL import Image

    rng, files = random.Random(0), list[bytes]()
    for number, kind in enumerate(
        ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM", "TGA", "ICO", "JPEG2000")
    ):
        file = io.BytesIO()
        Image.open(io.BytesIO(jpeg(number, 64))).save(file, kind)
        files.append(file.getvalue())
    images = (base64.b64encode(mutated(files[number % len(files)], rng)).decode() for number in range(count))
    bodies = ({"input": f"data:image/png;base64,{image}", "modality": "image"} for image in images)
    with running(server) as (port, process, _):
        times, statuses = send_requests(port, 8, encode(server.path, bodies))
        memory = process.memory_info().rss / 1e6
    print(f"{len(times):,} malformed images: by status {dict(statuses)}; memory {memory:.0f} MB")


if __name__ == "__main__":
    main()
