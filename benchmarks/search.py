"""`m1clip search` beside rclip: index of phone photographs, cold and warm text queries; and an index that is killed.

    python benchmarks/search.py photos PHOTOS --images COCO/train2017
    python benchmarks/search.py index --photos PHOTOS --rclip-venv VENV --rclip-model SHIP/rclip --model SHIP/onnx …
    python benchmarks/search.py cold --rclip-venv VENV --rclip-model SHIP/rclip --model SHIP/onnx
    python benchmarks/search.py warm --rclip-venv VENV --rclip-model SHIP/rclip --model SHIP/onnx
    python benchmarks/search.py kills --kills 100 --model EXPORT

`photos` writes 12-megapixel JPEG files. `index` starts each program with an empty index, and then again with nothing
changed. `cold` asks one text query of an index of 100,000 generated vectors, each time in a new process (the files are
in the page cache). `warm` repeats a query in one process. All programs take turns, the order is reversed in every other
round, and the tables have medians; × is the median of the ratios within a round. CPU time is user and system time of
the whole process tree, and the peak of memory is the sum over the tree. Both programs run the same weights if the
folders of --rclip-model and --model were exported from the same model; no hub can be reached.

`kills` ends `m1clip search` with SIGKILL at random moments, in turn the whole process group and the main process alone,
while it indexes a folder whose files another thread adds, removes, renames and changes. After each kill it checks that
the index is complete in itself, and at the end that it equals a new index of the folder. A small model is enough.
"""

import argparse
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from threading import Event, Thread

import numpy as np
import psutil
from PIL import Image
from products import OFFLINE
from vectors import Vectors, generate_vectors, search_exact

from m1clip.document import markdown_table
from m1clip.onnx_model import OnnxCLIP, load_onnx
from m1clip.perceptual_hash import HASH
from m1clip.search.index import FileRecord, ImageFacts, Index, index_of
from m1clip.search.query import Library, Searcher, best_first, parse_query
from m1clip.search.scan import Version, existing_folder

QUERY = "a dog on the beach"
DIM = 512
ROWS_PER_WRITE = 50_000
MEGAPIXELS_12 = (4000, 3000)
EXIF_IFD, ORIENTATION, DATE_TIME, DATE_TIME_ORIGINAL, MAKE, MODEL = 0x8769, 0x0112, 0x0132, 0x9003, 0x010F, 0x0110
# Orientation of the file, and what is done to an upright image before it is stored with that tag.
ORIENTATIONS = (
    (1, None),
    (6, Image.Transpose.ROTATE_90),  # a portrait: the sensor is landscape
    (1, None),
    (8, Image.Transpose.ROTATE_270),
    (3, Image.Transpose.ROTATE_180),
)
FILL_RCLIP = """
import sys, numpy as np
from rclip.db import DB, NewImage
vectors, paths, database = np.load(sys.argv[1], mmap_mode="r"), open(sys.argv[2]).read().splitlines(), DB(sys.argv[3])
for row, path in enumerate(paths):
    meta = dict(modified_at=1.6e9 + row, size=3_000_000 + row, hash=f"{row:064x}")
    database.upsert_image(NewImage(filepath=path, vector=vectors[row].tobytes(), **meta), commit=False)
database.close()
"""
WARM_RCLIP = """
import json, os, sys, time
from rclip.main import init_rclip
rclip, model, database = init_rclip(os.getcwd(), 8, no_indexing=True)
times = []
for _ in range(int(sys.argv[2]) + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    assert rclip.search(sys.argv[1], os.getcwd())
    times.append([time.perf_counter() - wall, time.process_time() - cpu])
print(json.dumps(times[1:]))
"""


# The index, while M1CLIP_CACHE is that of the benchmark.
def fill_index(folder: Path, vectors: Vectors, model: OnnxCLIP) -> None:
    """Write an index of `library_paths(folder, len(vectors))` as if the model had embedded these files."""
    index, paths = index_of(model), library_paths(folder, len(vectors))
    with closing(index), index.locked(wait=True):
        for start in range(0, len(vectors), ROWS_PER_WRITE):
            rows = range(start, min(start + ROWS_PER_WRITE, len(vectors)))
            images = [ImageFacts(b"%016d" % row, *MEGAPIXELS_12, 1.6e9 + row, bytes(HASH.itemsize)) for row in rows]
            versions = (Version(3_000_000 + row, 10**18 + row, 10**18 + row) for row in rows)
            files = [FileRecord(os.fsencode(paths[row]), next(versions), row) for row in rows]
            index.add(images, vectors[rows.start : rows.stop], files)


def open_searches(folder: Path, model: OnnxCLIP) -> dict[str, Callable[[], object]]:
    """A text query in a process that has opened the library: with the text encoder, as rclip's, and without."""
    library = Library(index_of(model), existing_folder(folder))
    searcher, terms = Searcher(model, library), parse_query(QUERY)
    query_E = model.encode_text(QUERY)[0]

    def search_vector() -> object:
        scores_N = library.scores(query_E)
        return library.hits(best_first(scores_N, 10), scores_N)

    return {"": lambda: searcher.search(terms), ", without the text encoder": search_vector}


@dataclass(frozen=True)
class Usage:
    wall_s: float
    cpu_s: float
    peak_mb: float
    output: str = ""


def main() -> int:
    args = parse_args()
    return int(args.run(args) or 0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    photos = commands.add_parser("photos", help="write 12-megapixel JPEG files")
    photos.add_argument("out", type=Path)
    photos.add_argument("--images", type=Path, required=True, help="folder of small photographs they are made from")
    photos.add_argument("--count", type=int, default=40)
    photos.set_defaults(run=lambda args: write_photos(args.out, args.images, args.count))
    for name, run in (("index", compare_index), ("cold", compare_cold), ("warm", compare_warm)):
        command = commands.add_parser(name)
        command.add_argument("--rclip-venv", type=Path, help="environment with rclip; without it, m1clip runs alone")
        command.add_argument("--rclip-model", type=Path, help="folder of m1clip export --to rclip")
        command.add_argument("--model", type=Path, nargs="+", default=[], help="folders of m1clip export --to onnx")
        command.add_argument("--rounds", type=int, default=3)
        command.set_defaults(run=run)
        if name == "index":
            command.add_argument("--photos", type=Path, required=True)
        else:
            default = [100_000] if name == "cold" else [100_000, 1_000_000]
            command.add_argument("--count", type=int, nargs="+", default=default, help="images in the index")
    kills = commands.add_parser("kills", help="kill the search while it indexes, and check the index")
    kills.add_argument("--model", type=Path, required=True, help="folder of m1clip export --to onnx; a small one")
    kills.add_argument("--kills", type=int, default=100)
    kills.add_argument("--images", type=int, default=1_500, help="files at the start")
    kills.add_argument("--seed", type=int, default=0)
    kills.set_defaults(run=kill_and_check)
    return parser.parse_args()


# Photographs.
def write_photos(out: Path, images: Path, count: int) -> None:
    sources = sorted(images.glob("*.jpg"))
    if not sources:
        sys.exit(f"--images {images} has no .jpg files")
    out.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        write_photo(out / f"IMG_{20_000 + number}.jpg", sources, number)


def write_photo(path: Path, sources: list[Path], number: int) -> None:
    """A JPEG of about 3 MB with the size, noise, chroma subsampling and tags of a phone's.

    A photograph is enlarged, which leaves no detail, so others are added as texture at their own resolution.
    """
    rng = np.random.default_rng(number)
    orientation, transpose = ORIENTATIONS[number % len(ORIENTATIONS)]
    portrait = number % 4 == 3 or orientation in (6, 8)
    width, height = MEGAPIXELS_12[::-1] if portrait else MEGAPIXELS_12
    scene = np.asarray(open_rgb(sources[number % len(sources)]).resize((width, height), Image.Resampling.BICUBIC))
    texture = tile_texture(sources, (height, width), rng)
    # The noise of a sensor: mostly in brightness, stronger in the dark.
    noise = rng.standard_normal((height, width, 1), np.float32) * (
        7 - scene.mean(2, keepdims=True, dtype=np.float32) / 64
    )
    pixels = (scene + 0.35 * texture + noise).clip(0, 255).astype(np.uint8)
    image = Image.fromarray(pixels)
    image = image.transpose(transpose) if transpose is not None else image
    image.save(path, quality=86, subsampling="4:2:0", exif=make_exif(orientation, number))


def open_rgb(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def tile_texture(sources: list[Path], shape: tuple[int, int], rng: np.random.Generator) -> Vectors:
    """Detail of many photographs side by side, each without its mean color."""
    size, (height, width) = 160, shape
    texture_HWC = np.zeros((height, width, 3), np.float32)
    for top in range(0, height, size):
        for left in range(0, width, size):
            source = open_rgb(sources[rng.integers(len(sources))]).resize((size, size))
            tile_HWC = np.asarray(source, np.float32)
            part_HWC = texture_HWC[top : top + size, left : left + size]
            part_HWC += (tile_HWC - tile_HWC.mean((0, 1)))[: part_HWC.shape[0], : part_HWC.shape[1]]
    return texture_HWC


def make_exif(orientation: int, number: int) -> Image.Exif:
    exif, taken = Image.Exif(), datetime(2019, 3, 1, 9) + timedelta(hours=31 * number)
    text = taken.strftime("%Y:%m:%d %H:%M:%S")
    exif[ORIENTATION], exif[DATE_TIME], exif[MAKE], exif[MODEL] = orientation, text, "m1clip", "generated"
    exif.get_ifd(EXIF_IFD)[DATE_TIME_ORIGINAL] = text
    return exif


# Programs.
@dataclass(frozen=True)
class Program:
    """A search program; `cache` is the folder of its index, which is made anew."""

    name: str
    cache: Path
    environment: dict[str, str]
    model: Path

    def reset(self) -> None:
        shutil.rmtree(self.cache, ignore_errors=True)
        self.cache.mkdir(parents=True)

    def command(self, folder: Path, update: bool) -> list[str]:
        raise NotImplementedError

    def fill(self, folder: Path, vectors: Vectors) -> None:
        raise NotImplementedError

    def search(self, folder: Path, update: bool) -> Usage:
        usage = run_measured(self.command(folder, update), folder, self.environment)
        if ".jpg" not in usage.output:
            raise RuntimeError(f"{self.name} found nothing: {usage.output[:500]!r}")
        return usage


class Rclip(Program):
    @property
    def python(self) -> str:
        return self.environment["RCLIP_PYTHON"]

    def reset(self) -> None:
        super().reset()
        for path in self.model.iterdir():  # its index lies beside the model
            (self.cache / path.name).symlink_to(path.resolve())

    def command(self, folder: Path, update: bool) -> list[str]:
        return [self.python, "-m", "rclip", "--filepath-only", *([] if update else ["--no-indexing"]), QUERY]

    def fill(self, folder: Path, vectors: Vectors) -> None:
        np.save(self.cache / "vectors.npy", vectors)
        (self.cache / "paths.txt").write_text("\n".join(map(str, library_paths(folder, len(vectors)))))
        files = [str(self.cache / name) for name in ("vectors.npy", "paths.txt", "db.sqlite3")]
        subprocess.run([self.python, "-c", FILL_RCLIP, *files], check=True)
        (self.cache / "vectors.npy").unlink()


class M1clip(Program):
    def command(self, folder: Path, update: bool) -> list[str]:
        start = [sys.executable, "-m", "m1clip", "search", QUERY, str(folder), "--model", str(self.model.resolve())]
        return [*start, "--json", *([] if update else ["--no-update"])]

    def fill(self, folder: Path, vectors: Vectors) -> None:
        with self.variables():
            fill_index(folder, vectors, load_onnx(self.model))

    @contextmanager
    def variables(self) -> Iterator[None]:
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def make_programs(args: argparse.Namespace, folder: Path) -> list[Program]:
    programs = list[Program]()
    if args.rclip_venv:
        if not args.rclip_model:
            sys.exit("--rclip-venv needs --rclip-model, a folder of m1clip export --to rclip")
        cache, python = folder / "rclip", str(args.rclip_venv.absolute() / "bin" / "python")
        environment = {**OFFLINE, "RCLIP_DATADIR": str(cache), "RCLIP_PYTHON": python, "RCLIP_USE_ONNX_ON_MACOS": "1"}
        programs.append(Rclip("rclip", cache, environment, args.rclip_model))
    for model in args.model:
        if (width := json.loads((model / "config.json").read_text())["embed_dim"]) != DIM:
            sys.exit(f"--model {model} has embeddings of {width} dimensions, not of {DIM}")
        cache = folder / f"m1clip-{model.name}"
        programs.append(M1clip(f"m1clip, {model.name}", cache, {**OFFLINE, "M1CLIP_CACHE": str(cache)}, model))
    if not programs:
        sys.exit("nothing to run: give --rclip-venv or --model")
    return programs


def run_measured(command: list[str], folder: Path, variables: dict[str, str]) -> Usage:
    """CPU time and peak memory of a command with all of its descendants."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=folder, env={**os.environ, **variables}, stdout=out, stderr=errors)
        peak, done = [0.0], Event()
        sampler = Thread(target=sample_memory, args=(process.pid, peak, done))
        sampler.start()
        _, status, usage = os.wait4(process.pid, 0)  # with the descendants that it waited for
        wall_s = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        done.set()
        sampler.join()
        errors.seek(0), out.seek(0)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()[-2000:]}")
        unit = 1 if sys.platform == "darwin" else 1024
        peak_mb = max(usage.ru_maxrss * unit / 1e6, peak[0])  # exact for one process
        return Usage(wall_s, usage.ru_utime + usage.ru_stime, peak_mb, out.read())


def sample_memory(pid: int, peak: list[float], done: Event) -> None:
    """The largest sum of the memory of a process and its descendants; on Linux shared pages count once."""
    while not done.wait(0.2):
        try:
            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            if len(tree) > 1:
                peak[0] = max(peak[0], sum(proportional_mb(process) for process in tree))
        except psutil.Error:
            continue  # one of them has ended


def proportional_mb(process: psutil.Process) -> float:
    memory = process.memory_full_info()
    return float(getattr(memory, "pss", memory.rss)) / 1e6


# Comparisons.
def compare_index(args: argparse.Namespace) -> None:
    photos = args.photos.resolve()
    files = sorted(photos.glob("*.jpg"))
    size_mb = sum(path.stat().st_size for path in files) / len(files) / 1e6
    print(f"index of {len(files)} photographs of {size_mb:.1f} MB, {args.rounds} rounds\n")
    first, again = dict[str, list[Usage]](), dict[str, list[Usage]]()
    with tempfile.TemporaryDirectory() as folder:
        programs = make_programs(args, Path(folder))
        for program in take_turns(programs, args.rounds):
            program.reset()
            first.setdefault(program.name, []).append(program.search(photos, update=True))
            again.setdefault(program.name, []).append(program.search(photos, update=True))
            report_progress(program.name, first[program.name][-1])
    rows, base = list[list[str]](), programs[0].name
    speeds = {name: [len(files) / usage.cpu_s for usage in usages] for name, usages in first.items()}
    for name, usages in first.items():
        # What a photograph costs, without the start of the program.
        each = median((a.cpu_s - b.cpu_s) / len(files) for a, b in zip(usages, again[name], strict=True))
        cells = [f"{median(speeds[name]):.2f}", f"{ratio(speeds[name], speeds[base]):.2f}", f"{1e3 * each:.0f}"]
        cells += [f"{median(usage.wall_s for usage in usages):.1f}", f"{median(usage.peak_mb for usage in usages):.0f}"]
        unchanged = f"{median(usage.cpu_s for usage in again[name]):.2f}"
        rows.append([name, *cells, unchanged])
    columns = ("program", "images per CPU-s", "×", "CPU ms per image without start", "wall s", "peak MB")
    print(markdown_table((*columns, "CPU s if nothing changed"), rows))


def compare_cold(args: argparse.Namespace) -> None:
    for count in args.count:
        print(f"\ncold query, {count:,} images, {args.rounds} rounds\n")
        usages = dict[str, list[Usage]]()
        with tempfile.TemporaryDirectory() as folder:
            programs = make_programs(args, Path(folder))
            fill_all(programs, Path(folder) / "library", count)
            for program in take_turns(programs, args.rounds):
                usage = program.search(Path(folder) / "library", update=False)
                usages.setdefault(program.name, []).append(usage)
                report_progress(program.name, usage)
        rows, base = list[list[str]](), [usage.cpu_s for usage in usages[programs[0].name]]
        for name, measured in usages.items():
            cpu = [usage.cpu_s for usage in measured]
            cells = [f"{median(cpu):.2f}", f"{ratio(base, cpu):.2f}"]
            cells += [f"{median(usage.wall_s for usage in measured):.2f}"]
            rows.append([name, *cells, f"{median(usage.peak_mb for usage in measured):.0f}"])
        print(markdown_table(("program", "CPU s", "× faster", "wall s", "peak MB"), rows))


def compare_warm(args: argparse.Namespace) -> None:
    """The exact search of NumPy is the first row, because nothing that is exact can be much faster."""
    rows = list[list[str]]()
    for count in args.count:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "library"
            programs = make_programs(args, Path(folder))
            fill_all(programs, library, count)
            times = {"numpy, float32 in memory": time_numpy(count, args.rounds)}
            for program in programs:
                times |= time_warm(program, library, args.rounds)
        for name, measured in times.items():
            wall, cpu = (1e3 * median(column) for column in zip(*measured, strict=True))
            rows.append([f"{count:,}", name, f"{wall:.1f}", f"{cpu:.1f}"])
    print(markdown_table(("images", "program", "wall ms", "CPU ms"), rows))


def fill_all(programs: list[Program], library: Path, count: int) -> None:
    """In another process: the peak of memory of a new process is at least that of the one which starts it."""
    library.mkdir()
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(fill_programs, programs, library, count).result()


def fill_programs(programs: list[Program], library: Path, count: int) -> None:
    vectors = generate_vectors(count, DIM)
    for program in programs:
        program.reset()
        program.fill(library, vectors)


def time_numpy(count: int, rounds: int) -> list[tuple[float, float]]:
    vectors = generate_vectors(count, DIM)
    query = vectors[count // 2].copy()
    return time_calls(lambda: search_exact(vectors, query), rounds)


def time_warm(program: Program, library: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of queries in one process, by what they include."""
    if isinstance(program, Rclip):
        command = [program.python, "-c", WARM_RCLIP, QUERY, str(rounds)]
        return {program.name: json.loads(run_measured(command, library, program.environment).output)}
    assert isinstance(program, M1clip)
    with program.variables():
        searches = open_searches(library, load_onnx(program.model))
    return {program.name + part: time_calls(search, rounds) for part, search in searches.items()}


def time_calls(call: Callable[[], object], rounds: int) -> list[tuple[float, float]]:
    call()
    times = list[tuple[float, float]]()
    for _ in range(max(rounds, 7)):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def library_paths(folder: Path, count: int) -> list[Path]:
    """A library of 500 photographs a month."""
    months = [folder / f"{2000 + month // 12}" / f"{month % 12 + 1:02d}" for month in range(count // 500 + 1)]
    return [months[row // 500] / f"IMG_{row:07d}.jpg" for row in range(count)]


def take_turns(programs: list[Program], rounds: int) -> Iterator[Program]:
    for number in range(rounds):
        yield from programs if number % 2 == 0 else reversed(programs)


def ratio(ours: list[float], base: list[float]) -> float:
    return median(a / b for a, b in zip(ours, base, strict=True))


def report_progress(name: str, usage: Usage) -> None:
    print(f"{name}: {usage.wall_s:.2f} s, {usage.cpu_s:.2f} CPU-s, {usage.peak_mb:.0f} MB", file=sys.stderr, flush=True)


# Kills.
CHANGES_S = 0.004  # between changes of files while the search runs
CHANGES_BETWEEN = 200  # changes between two searches, so that each of them has work
ALL_FILES = """SELECT path, size, mtime_ns, ctime_ns, kind, reason, content, width, height, taken, hash, row
    FROM file LEFT JOIN image USING (row)"""


class ChangingFolder:
    """Small images that are added, removed, renamed, copied and changed at random."""

    def __init__(self, folder: Path, seed: int, count: int):
        self.folder, self.random, self.paths, self.number = folder, Random(seed), list[Path](), 0
        for part in ("2024", "2025/march", "räksmörgås"):
            (folder / part).mkdir(parents=True)
        self.folders = [folder, *(path for path in folder.rglob("*"))]
        for _ in range(count):
            self.add()

    def new_path(self) -> Path:
        self.number += 1
        return self.random.choice(self.folders) / f"{self.number}{self.random.choice(['.jpg', '.PNG', '.bmp'])}"

    def write(self, path: Path) -> None:
        """An image of noise, or now and then bytes that are none; in two steps, so that it may be read in between."""
        width, height = self.random.randrange(16, 60), 40
        size = (40, 40) if path.suffix == ".bmp" else (width, height)  # all .bmp files have the same number of bytes
        file = io.BytesIO()
        image = Image.frombytes("RGB", (5, 5), self.random.randbytes(75)).resize(size, Image.Resampling.BICUBIC)
        image.save(file, {".jpg": "JPEG", ".PNG": "PNG", ".bmp": "BMP"}[path.suffix])
        data = self.random.randbytes(100) if self.random.random() < 0.03 else file.getvalue()
        with open(path, "wb") as out:
            out.write(data[: len(data) // 2])
            out.flush()
            out.write(data[len(data) // 2 :])

    def add(self) -> None:
        path = self.new_path()
        self.write(path)
        self.paths.append(path)

    def change(self) -> None:
        position = self.random.randrange(len(self.paths))
        path, new = self.paths[position], self.new_path().with_suffix(self.paths[position].suffix)
        kind = self.random.choices(["add", "remove", "rename", "copy", "edit"], [30, 20, 15, 5, 30])[0]
        if kind == "add":
            self.add()
        elif kind == "remove" and len(self.paths) > 100:
            self.paths.pop(position).unlink()
        elif kind == "rename":
            self.paths[position] = path.rename(new)
        elif kind == "copy":
            self.paths.append(Path(shutil.copy2(path, new)))
        else:
            self.write(path)

    @contextmanager
    def changing(self) -> Iterator[None]:
        ended = Event()

        def run() -> None:
            while not ended.wait(CHANGES_S):
                self.change()

        thread = Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


@dataclass
class KillTest:
    model: Path
    folder: Path
    cache: Path
    counts: Counter[str]
    seen: dict[bytes, Vectors]  # the first vector of each content
    row_count: int = 0

    def command(self) -> list[str]:
        model = ["--model", str(self.model.resolve())]
        return [sys.executable, "-m", "m1clip", "search", QUERY, str(self.folder), *model, "--paths", "--workers", "2"]

    def start(self, cache: Path) -> subprocess.Popen[bytes]:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "start_new_session": True}
        return subprocess.Popen(self.command(), env={**os.environ, "M1CLIP_CACHE": str(cache)}, **options)  # type: ignore[call-overload, no-any-return]

    def finish(self, cache: Path) -> float:
        """Seconds of an unbroken search."""
        started, process = time.monotonic(), self.start(cache)
        _, errors = process.communicate()
        if process.returncode:
            sys.exit(f"the search failed:\n{errors.decode()[-2000:]}")
        return time.monotonic() - started

    def kill(self, delay: float, whole_group: bool) -> None:
        process = self.start(self.cache)
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay)
            self.counts["searches that ended before"] += 1
            if process.returncode:
                self.counts["FAILED"] += 1
                print(process.communicate()[1].decode()[-2000:], file=sys.stderr)
        self.counts["kills"] += process.returncode is None
        workers = psutil.Process(process.pid).children(recursive=True) if process.returncode is None else []
        if process.returncode is None and whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 60
        while any(map(is_alive, workers)):
            if time.monotonic() > deadline:
                self.counts["PROCESSES LEFT"] += sum(map(is_alive, workers))
                break
            time.sleep(0.05)

    def check(self, inode: int) -> None:
        """Is the index what it was, complete in itself, and are its vectors those that it had?"""
        (folder,) = self.cache.glob("search-*")
        with closing(sqlite3.connect(folder / "files.sqlite")) as database:
            self.counts["DAMAGED"] += database.execute("PRAGMA integrity_check").fetchone()[0] != "ok"
        with closing(open_index(self.model, self.cache)) as index:
            self.counts["DAMAGED"] += not index.is_intact
            self.counts["BUILT AGAIN"] += (folder / "files.sqlite").stat().st_ino != inode
            self.counts["searches that had added images"] += index.row_count != self.row_count
            self.row_count = index.row_count
            for facts, vector in read_rows(index).values():
                self.counts["ROWS OF NO IMAGE"] += facts[4] is None and vector is None
                if vector is not None:
                    first = self.seen.setdefault(facts[5], vector)
                    self.counts["WRONG VECTORS"] += bool(np.abs(first - vector).max() > 1e-6)

    def compare(self) -> None:
        """With a new index of the same folder."""
        fresh = self.cache.with_name("fresh")
        self.finish(self.cache), self.finish(fresh)
        with closing(open_index(self.model, self.cache)) as old, closing(open_index(self.model, fresh)) as new:
            rows, expected = read_rows(old), read_rows(new)
            (self.counts["compactions"],) = old.database.execute("SELECT generation FROM vectors").fetchone()
        self.counts["rows compared"] = len(expected)
        self.counts["MISSING ROWS"] = len(expected.keys() - rows.keys())
        self.counts["ORPHANED ROWS"] = len(rows.keys() - expected.keys())
        for path in rows.keys() & expected.keys():
            (facts, vector), (right_facts, right_vector) = rows[path], expected[path]
            self.counts["WRONG ROWS"] += facts != right_facts
            if vector is not None and right_vector is not None:
                difference = float(np.abs(vector - right_vector).max())
                self.counts["VECTORS OF OTHER IMAGES"] += difference > 1e-6
        vectors = {facts[5]: vector for facts, vector in expected.values() if vector is not None}
        known = vectors.keys() & self.seen.keys()
        self.counts["WRONG VECTORS"] += sum(np.abs(vectors[key] - self.seen[key]).max() > 1e-6 for key in known)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_index(model: Path, cache: Path) -> Index:
    os.environ["M1CLIP_CACHE"] = str(cache)
    return index_of(load_onnx(model))


def read_rows(index: Index) -> dict[bytes, tuple[tuple[object, ...], Vectors | None]]:
    """What is known of each file, and its vector."""
    vectors_RE = np.array(index.open_vectors())
    rows = index.database.execute(ALL_FILES).fetchall()
    return {path: (tuple(facts), None if row is None else vectors_RE[row]) for path, *facts, row in rows}


def kill_and_check(args: argparse.Namespace) -> int:
    random = Random(args.seed)
    with tempfile.TemporaryDirectory() as temporary:
        library = ChangingFolder(Path(temporary) / "library", args.seed, args.images)
        test = KillTest(args.model, library.folder, Path(temporary) / "cache", Counter(), {})
        test.finish(test.cache)
        start_s = test.finish(test.cache)
        (database,) = test.cache.glob("search-*/files.sqlite")
        while (kills := test.counts["kills"]) < args.kills:
            for _ in range(CHANGES_BETWEEN):
                library.change()
            with library.changing():
                test.kill(random.uniform(0.6 * start_s, start_s + 1.5), whole_group=kills % 2 == 0)
            test.check(database.stat().st_ino)
            start_s *= 1.03 if test.counts["kills"] > kills else 0.9  # the machine may be faster or slower by now
            print(f"{kills} kills: {dict(test.counts)}", file=sys.stderr)
        test.compare()
    print(markdown_table(("", "count"), [[name, str(count)] for name, count in test.counts.items()]))
    return int(any(count for name, count in test.counts.items() if name.isupper()))


if __name__ == "__main__":
    sys.exit(main())
