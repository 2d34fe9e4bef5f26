"""Exact and approximate search of many vectors: memory, build time, recall@10 and latency.

    pip install numpy psutil faiss-cpu usearch
    python benchmarks/vectors.py --count 1000000 --engines numpy usearch-exact-i8 faiss-sq8 usearch-i8
    python benchmarks/vectors.py --count 10000000 --engines faiss-sq8 faiss-pq --folder /big/disk

The vectors are generated: 512 dimensions, unit length, 2,000 kinds of scenes of very different frequency with 50
variants each in a space of 96 dimensions, and noise. Their mean is not zero, as that of CLIP's images is not. They are
written once as float16 and read in chunks. Half of the queries are new images; the others are like texts: another mean,
and more noise, so that the best cosine is low.

Every engine is built in one process, which writes a file, and queried in another, which loads it. Recall is measured
against exact search of the float16 vectors. Queries are single, in one thread. m1clip is not needed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIM = 512
CHUNK = 50_000
TOP = 10
QUERIES = 200  # of each kind
KINDS = ("image", "text")
SCENES, VARIANTS, LATENT_DIM = 2_000, 50, 96
IMAGE_MEAN, TEXT_MEAN = 0.8, 0.9  # lengths, where the content has about 1
RERANKED = 200  # candidates of product quantization that are compared exactly
CONNECTIVITY, EXPANSION_ADD = 16, 128  # HNSW: usearch's defaults
Vectors = NDArray[np.float32]


def main() -> None:
    args = parse_args()
    if args.step:
        return run_step(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    write_vectors(args.folder, args.count)
    write_truth(args.folder, args.count)
    print(describe_machine(), end="\n\n")
    print("| vectors | engine | build, CPU min | file, GB | RSS, GB | setting", end="")
    print(" | recall@10 image, text | median, p95 ms | CPU ms |\n|---|---|---|---|---|---|---|---|---|")
    for engine in args.engines:
        built = run_self(args, engine, "build")
        found = run_self(args, engine, "query")
        for number, row in enumerate(found["settings"]):
            size = [f"{built['cpu_s'] / 60:.1f}", f"{built['file_gb']:.2f}", f"{found['rss_gb']:.2f}"]
            cells = [f"{args.count:,}", engine, *size] if not number else [""] * 5
            recall = ", ".join(f"{row['recall'][kind]:.3f}" for kind in KINDS)
            times = f"{row['median_ms']:.2f}, {row['p95_ms']:.2f} | {row['cpu_ms']:.2f}"
            print(f"| {' | '.join(cells)} | {row['setting']} | {recall} | {times} |", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=["numpy"], metavar="NAME", help=", ".join(ENGINES)
    )
    parser.add_argument("--folder", type=Path, default=Path("/tmp/vectors"), help="vectors and indexes (/tmp/vectors)")
    parser.add_argument("--build-threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--step", choices=["build", "query"], help=argparse.SUPPRESS)
    return parser.parse_args()


def run_self(args: argparse.Namespace, engine: str, step: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--count", str(args.count), "--engines", engine, "--folder", str(args.folder)]
    threads = args.build_threads if step == "build" else 1
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment = {**os.environ, **{name: str(threads) for name in names}, "OMP_WAIT_POLICY": "passive"}
    options = ["--step", step, "--build-threads", str(threads)]
    done = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True, env=environment)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_step(args: argparse.Namespace) -> None:
    """Print the result as JSON."""
    engine = ENGINES[args.engines[0]](args.folder, args.count)
    if args.step == "build":
        start = time.process_time()
        engine.build(args.build_threads)
        print(json.dumps({"cpu_s": time.process_time() - start, "file_gb": engine.path.stat().st_size / 1e9}))
    else:
        print(json.dumps(measure_queries(engine)))


# Vectors.
def generate_vectors(count: int, dim: int = DIM, seed: int = 0) -> Vectors:
    """All of them in memory."""
    return np.concatenate([*generate_chunks(count, dim, seed)])


def generate_chunks(count: int, dim: int = DIM, seed: int = 0) -> Iterator[Vectors]:
    world = World(dim, seed)
    for number, start in enumerate(range(0, count, CHUNK)):
        yield world.images(min(CHUNK, count - start), np.random.default_rng([seed, 1, number]))


class World:
    """The kinds of scenes that all vectors of a seed are made of."""

    def __init__(self, dim: int, seed: int):
        rng = np.random.default_rng([seed, 0])
        latent_dim, self.dim = min(LATENT_DIM, dim), dim
        self.spectrum = np.arange(1, latent_dim + 1, dtype=np.float32) ** -0.5
        self.spectrum /= np.linalg.norm(self.spectrum)
        self.scenes = rng.standard_normal((SCENES, latent_dim), np.float32) * 0.63
        self.variants = rng.standard_normal((SCENES * VARIANTS, latent_dim), np.float32) * 0.5
        self.basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0][:, : latent_dim + 2].T.astype(np.float32)
        frequency = 1 / np.arange(1, SCENES + 1) ** 0.7
        self.cumulative = np.cumsum(frequency / frequency.sum())

    def images(self, count: int, rng: np.random.Generator) -> Vectors:
        latent, noise = self.content(count, rng)
        latent += rng.standard_normal(latent.shape, np.float32) * 0.45
        return self.to_unit(latent, noise, 0.39, IMAGE_MEAN * self.basis[-1])

    def texts(self, count: int, rng: np.random.Generator) -> Vectors:
        latent, noise = self.content(count, rng)
        return self.to_unit(latent, noise, 1.0, TEXT_MEAN * self.basis[-2])

    def content(self, count: int, rng: np.random.Generator) -> tuple[Vectors, Vectors]:
        scene = np.searchsorted(self.cumulative, rng.random(count)).clip(0, SCENES - 1)
        latent = self.scenes[scene] + self.variants[scene * VARIANTS + rng.integers(VARIANTS, size=count)]
        return latent, rng.standard_normal((count, self.dim), np.float32)

    def to_unit(self, latent: Vectors, noise: Vectors, noise_length: float, mean: Vectors) -> Vectors:
        vectors = (latent * self.spectrum) @ self.basis[:-2]
        noise *= noise_length / self.dim**0.5
        vectors += noise
        vectors += mean
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


def make_queries() -> dict[str, Vectors]:
    world, rng = World(DIM, 0), np.random.default_rng([0, 2])
    return {"image": world.images(QUERIES, rng), "text": world.texts(QUERIES, rng)}


def vectors_path(folder: Path, count: int) -> Path:
    return folder / f"vectors-{count}.npy"


def write_vectors(folder: Path, count: int) -> None:
    path = vectors_path(folder, count)
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(np.float16)), "fortran_order": False}
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (count, DIM)})
        for chunk in generate_chunks(count):
            file.write(chunk.astype(np.float16).tobytes())
    partial.rename(path)


def read_chunks(folder: Path, count: int) -> Iterator[tuple[int, Vectors]]:
    vectors = np.load(vectors_path(folder, count), mmap_mode="r")
    for start in range(0, count, CHUNK):
        yield start, vectors[start : start + CHUNK].astype(np.float32)


def write_truth(folder: Path, count: int) -> None:
    """Rows of the exact top 10 of every query."""
    path, queries = folder / f"truth-{count}.npz", make_queries()
    if path.exists():
        return
    best = {kind: (np.full((QUERIES, TOP), -2, np.float32), np.zeros((QUERIES, TOP), np.int64)) for kind in KINDS}
    for start, chunk in read_chunks(folder, count):
        for kind in KINDS:
            scores = np.concatenate([best[kind][0], queries[kind] @ chunk.T], axis=1)
            rows = np.concatenate([best[kind][1], np.tile(np.arange(start, start + len(chunk)), (QUERIES, 1))], axis=1)
            top = np.argpartition(-scores, TOP, axis=1)[:, :TOP]
            best[kind] = np.take_along_axis(scores, top, 1), np.take_along_axis(rows, top, 1)
    for kind in KINDS:
        print(f"best cosine of {kind} queries: {median(best[kind][0].max(1)):.2f} (median)", file=sys.stderr)
    np.savez(path, **{kind: best[kind][1] for kind in KINDS})  # type: ignore[arg-type]


def search_exact(vectors: Vectors, query: Vectors, top: int = TOP) -> NDArray[np.int64]:
    scores = vectors @ query
    best = np.argpartition(-scores, top)[:top]
    return best[np.argsort(-scores[best])]


# Engines.
class Engine:
    def __init__(self, folder: Path, count: int):
        self.folder, self.count = folder, count
        self.path = folder / f"{type(self).__name__}-{self.name}-{count}.index"

    name = ""

    def build(self, threads: int) -> None:
        raise NotImplementedError

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        """Settings and functions that find the rows of one query."""
        raise NotImplementedError


class Numpy(Engine):
    def build(self, threads: int) -> None:
        with open(self.path, "wb") as file:
            for _, chunk in read_chunks(self.folder, self.count):
                file.write(chunk.tobytes())

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        vectors = np.fromfile(self.path, np.float32).reshape(-1, DIM)
        yield "exact, float32", lambda query: search_exact(vectors, query)


class UsearchExact(Engine):
    """Exact search of int8 vectors by usearch's SIMD kernels."""

    name = "i8"

    def build(self, threads: int) -> None:
        with open(self.path, "wb") as file:
            for _, chunk in read_chunks(self.folder, self.count):
                file.write(quantize(chunk).tobytes())

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        from usearch.index import MetricKind, search

        vectors = np.fromfile(self.path, np.int8).reshape(-1, DIM)
        options: dict[str, Any] = {"exact": True, "threads": 1}

        def find(query: Vectors) -> Any:
            return search(vectors, quantize(query), TOP, MetricKind.Cos, **options).keys

        yield "exact, int8", find


def quantize(vectors: Vectors) -> NDArray[np.int8]:
    """By the largest value of each vector: cosines do not depend on its length."""
    scale = 127 / np.abs(vectors).max(-1, keepdims=True)
    return np.rint(vectors * scale).astype(np.int8)


class FaissSQ8(Engine):
    name = "sq8"
    probes = (1, 4, 8, 16, 32, 64, 128)

    @property
    def lists(self) -> int:
        return max(64, min(4096, 2 ** round(np.log2(4 * self.count**0.5) - 1)))

    @property
    def description(self) -> str:
        return f"IVF{self.lists},SQ8"

    def build(self, threads: int) -> None:
        import faiss

        faiss.omp_set_num_threads(threads)
        index = faiss.index_factory(DIM, self.description, faiss.METRIC_INNER_PRODUCT)
        vectors = np.load(vectors_path(self.folder, self.count), mmap_mode="r")
        rows = np.linspace(0, self.count - 1, min(self.count, 40 * self.lists)).astype(np.int64)
        index.train(vectors[rows].astype(np.float32))
        for _, chunk in read_chunks(self.folder, self.count):
            index.add(chunk)
        faiss.write_index(index, str(self.path))

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        import faiss

        faiss.omp_set_num_threads(1)
        index = faiss.read_index(str(self.path))
        ivf = faiss.extract_index_ivf(index)
        for probes in self.probes:
            ivf.nprobe = probes
            yield f"{self.description}, {probes} probes", lambda query: self.find(index, query)

    def find(self, index: Any, query: Vectors) -> Any:
        return index.search(query[None], TOP)[1][0]


class FaissPQ(FaissSQ8):
    """64 bytes a vector; the best are compared again with the float16 vectors of the file, which is memory-mapped."""

    name = "pq64"
    probes = (8, 16, 32, 64, 128)

    @property
    def description(self) -> str:
        return f"PCAR256,IVF{self.lists},PQ64"  # OPQ needs many minutes of training

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        self.vectors = np.load(vectors_path(self.folder, self.count), mmap_mode="r")
        self.reranked = 0
        for setting, find in super().open():
            yield setting, find
            self.reranked = RERANKED
            yield f"the same, {RERANKED} compared again", find
            self.reranked = 0

    def find(self, index: Any, query: Vectors) -> Any:
        if not self.reranked:
            return super().find(index, query)
        rows = np.sort(index.search(query[None], self.reranked)[1][0])
        rows = rows[rows >= 0]
        return rows[search_exact(self.vectors[rows].astype(np.float32), query, min(TOP, len(rows) - 1))]


class UsearchF16(Engine):
    name = "f16"

    def build(self, threads: int) -> None:
        from usearch.index import Index

        options = {"connectivity": CONNECTIVITY, "expansion_add": EXPANSION_ADD}
        index = Index(ndim=DIM, metric="cos", dtype=self.name, **options)
        for start, chunk in read_chunks(self.folder, self.count):
            index.add(np.arange(start, start + len(chunk)), self.convert(chunk), threads=threads)
        index.save(str(self.path))

    def convert(self, vectors: Vectors) -> NDArray[Any]:
        return vectors

    def open(self) -> Iterator[tuple[str, Callable[[Vectors], Any]]]:
        from usearch.index import Index

        index = Index(ndim=DIM, metric="cos", dtype=self.name)
        index.load(str(self.path))
        for expansion in (32, 64, 128, 256, 512):
            index.expansion_search = expansion
            yield f"HNSW, ef {expansion}", lambda query: index.search(self.convert(query), TOP, threads=1).keys


class UsearchI8(UsearchF16):
    """usearch's own conversion multiplies by 127 whatever the values are: 100,000 vectors, recall 0.92 at best."""

    name = "i8"

    def convert(self, vectors: Vectors) -> NDArray[Any]:
        return quantize(vectors)


ENGINES: dict[str, type[Engine]] = {
    **{"numpy": Numpy, "usearch-exact-i8": UsearchExact, "faiss-sq8": FaissSQ8, "faiss-pq": FaissPQ},
    **{"usearch-i8": UsearchI8, "usearch-f16": UsearchF16},
}


# Measurement.
def measure_queries(engine: Engine) -> dict[str, Any]:
    import psutil

    queries = make_queries()
    truth = np.load(engine.folder / f"truth-{engine.count}.npz")
    before = psutil.Process().memory_info().rss
    rows = list[dict[str, Any]]()
    for setting, find in engine.open():
        recall, wall, cpu = dict[str, float](), list[float](), list[float]()
        for kind in KINDS:
            find(queries[kind][0])
            hits = 0
            for query, right in zip(queries[kind], truth[kind], strict=True):
                started, cpu_started = time.perf_counter(), time.process_time()
                found = find(query)
                wall.append(1e3 * (time.perf_counter() - started))
                cpu.append(1e3 * (time.process_time() - cpu_started))
                hits += len({*map(int, found)} & {*map(int, right)})
            recall[kind] = hits / QUERIES / TOP
        times = {"median_ms": median(wall), "p95_ms": quantiles(wall, n=20)[-1], "cpu_ms": median(cpu)}
        rows.append({"setting": setting, "recall": recall, **times})
    return {"settings": rows, "rss_gb": (psutil.Process().memory_info().rss - before) / 1e9}


def describe_machine() -> str:
    cpu = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    packages = []
    for name in ("numpy", "faiss-cpu", "usearch"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(packages)}"


if __name__ == "__main__":
    main()
