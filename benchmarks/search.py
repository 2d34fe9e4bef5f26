"""`m1clip search` beside rclip: index of phone photographs, cold and warm text queries.

    python benchmarks/search.py photos PHOTOS --images COCO/train2017
    python benchmarks/search.py index --photos PHOTOS --rclip-venv VENV --rclip-model SHIP/rclip --model SHIP/onnx …
    python benchmarks/search.py cold --rclip-venv VENV --rclip-model SHIP/rclip --model SHIP/onnx
    python benchmarks/search.py warm --rclip-venv VENV --rclip-model SHIP/rclip

`photos` writes 12-megapixel JPEG files. `index` starts each program with an empty index, and then again with nothing
changed. `cold` asks one text query of an index of 100,000 generated vectors, each time in a new process (the files are
in the page cache). `warm` repeats a query in one process. All programs take turns, the order is reversed in every other
round, and the tables have medians; × is the median of the ratios within a round. CPU time is user and system time of
the whole process tree, and the peak of memory is the sum over the tree. Both programs run the same weights if the
folders of --rclip-model and --model were exported from the same model; no hub can be reached.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from threading import Event, Thread

import numpy as np
import psutil
from PIL import Image
from products import OFFLINE
from vectors import Vectors, generate_vectors, search_exact

from m1clip.document import markdown_table

QUERY = "a dog on the beach"
DIM = 512
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


# Hooks: to be written together with `m1clip search`. M1CLIP_CACHE is set while they run.
def fill_index(folder: Path, vectors: Vectors, model_key: str) -> None:
    """Write an index of `library_paths(folder, len(vectors))` as if the model had embedded these files."""
    raise NotImplementedError


def open_index(folder: Path, model_key: str) -> Callable[[Vectors], object]:
    """A function that finds the top 10 of a unit vector in the index, as the warm process of --web does."""
    raise NotImplementedError


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
            fill_index(folder, vectors, str(self.model))

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
    available = not subprocess.run([sys.executable, "-m", "m1clip", "search", "--help"], capture_output=True).returncode
    if not available:
        print("m1clip search: no such command in this version", file=sys.stderr)
    for model in args.model if available else []:
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
            programs = fill_all(make_programs(args, Path(folder)), Path(folder) / "library", count)
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
            programs = fill_all(make_programs(args, Path(folder)), library, count)
            times = {"numpy, float32 in memory": time_numpy(count, args.rounds)}
            for program in programs:
                times[program.name] = time_warm(program, library, args.rounds)
        for name, measured in times.items():
            wall, cpu = (1e3 * median(column) for column in zip(*measured, strict=True))
            rows.append([f"{count:,}", name, f"{wall:.1f}", f"{cpu:.1f}"])
    print(markdown_table(("images", "program", "wall ms", "CPU ms"), rows))


def fill_all(programs: list[Program], library: Path, count: int) -> list[Program]:
    """The programs whose index could be filled."""
    library.mkdir()
    filled, vectors = list[Program](), generate_vectors(count, DIM)
    for program in programs:
        program.reset()
        try:
            program.fill(library, vectors)
            filled.append(program)
        except NotImplementedError:
            print(f"{program.name}: fill_index of this file is not written yet", file=sys.stderr)
    return filled


def time_numpy(count: int, rounds: int) -> list[tuple[float, float]]:
    vectors = generate_vectors(count, DIM)
    query = vectors[count // 2].copy()
    return time_calls(lambda: search_exact(vectors, query), rounds)


def time_warm(program: Program, library: Path, rounds: int) -> list[tuple[float, float]]:
    """Wall and CPU seconds of queries in one process; rclip's include the text encoder."""
    if isinstance(program, Rclip):
        command = [program.python, "-c", WARM_RCLIP, QUERY, str(rounds)]
        times: list[tuple[float, float]] = json.loads(run_measured(command, library, program.environment).output)
        return times
    assert isinstance(program, M1clip)
    query = generate_vectors(1, DIM)[0]
    with program.variables():
        search = open_index(library, str(program.model))
        return time_calls(lambda: search(query), rounds)


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


if __name__ == "__main__":
    sys.exit(main())
