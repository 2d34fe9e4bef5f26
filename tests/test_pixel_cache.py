import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np
import pytest

from m1clip.config import Preprocess
from m1clip.data import pixel_cache
from m1clip.data.pixel_cache import PixelCache, build_pixel_cache, decode_rows, decode_to_memory
from m1clip.data.splits import OnTheFlyImages
from m1clip.data.synthetic import SyntheticScenes
from m1clip.decode import BadImage
from m1clip.files import cache_folder
from m1clip.workers import WorkerPool

SIZE = Preprocess(16)


@pytest.fixture(autouse=True)
def small_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pixel_cache, "CHUNK_ROWS", 8)


@dataclass(frozen=True)
class BrokenScenes:
    """Scenes of which some cannot be decoded; picklable, for worker processes."""

    size: int = 40
    bad: tuple[int, ...] = (3, 4, 39)
    fingerprint: str = "broken"
    identity: str = "broken"

    def __len__(self) -> int:
        return self.size

    def image(self, index, min_size=0):
        if index in self.bad:
            raise BadImage("truncated", "the file ends before the image does")
        return SyntheticScenes(self.size).image(index)

    def captions(self, index):
        return SyntheticScenes(self.size).captions(index)

    def location(self, index):
        return f"row {index}"


def test_images_are_decoded_once_and_verified_afterwards():
    progress = []
    first = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1, progress.append)
    assert (sum(progress), first.pixels().shape) == (20, (20, 16, 16, 3))
    written_at = first.data.stat().st_mtime_ns
    again = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1, progress.append)
    assert sum(progress) == 40
    assert again.data.stat().st_mtime_ns == written_at
    assert np.array_equal(first.pixels(), decode_rows(SyntheticScenes(20), SIZE, range(20)).pixels)


def test_a_damaged_byte_is_detected_and_only_its_chunk_decoded_again(monkeypatch):
    cache = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    expected = np.array(cache.pixels())
    with open(cache.data, "r+b") as file:
        file.seek(9 * 16 * 16 * 3 + 5)  # in the second chunk
        file.write(b"\xff")
    decoded = []
    monkeypatch.setattr(
        pixel_cache, "decode_rows", lambda *args, **options: decoded.append(args[2]) or decode_rows(*args)
    )
    del cache
    assert np.array_equal(build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1).pixels(), expected)
    assert decoded == [range(8, 16)]


@pytest.mark.parametrize("damage", ["data cut", "data gone", "journal cut", "journal gone"])
def test_an_incomplete_cache_is_completed(damage):
    cache = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    expected = np.array(cache.pixels())
    file = cache.journal if "journal" in damage else cache.data
    if "gone" in damage:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-30])
    assert np.array_equal(build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1).pixels(), expected)


BUILD = """
import time
from m1clip.config import Preprocess
from m1clip.data import pixel_cache
from m1clip.data.synthetic import SyntheticScenes
from m1clip.workers import WorkerPool
pixel_cache.CHUNK_ROWS = 8

class SlowScenes(SyntheticScenes):
    def image(self, index, min_size=0):
        time.sleep(0.02)
        return super().image(index)

pixel_cache.build_pixel_cache(SlowScenes(200), Preprocess(16), 1, 1, lambda n: print(n, flush=True))
"""


@pytest.mark.slow
def test_a_killed_build_continues():
    child = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        child.stdout.readline()
    child.kill()
    child.wait()
    cache = PixelCache(SyntheticScenes(200), SIZE)
    assert 5 <= len(cache.entries()) < 25
    written, progress = cache.data.stat().st_size, []
    cache = build_pixel_cache(SyntheticScenes(200), SIZE, 1, 1, progress.append)
    assert sum(progress) == 200
    assert written < cache.data.stat().st_size == 200 * 16 * 16 * 3
    assert np.array_equal(cache.pixels(), decode_rows(SyntheticScenes(200), SIZE, range(200)).pixels)


@pytest.mark.slow
def test_two_processes_do_not_decode_the_same_images_twice():
    child = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    cache = build_pixel_cache(SyntheticScenes(200), SIZE, 1, 1)  # waits for the other process
    assert child.wait() == 0
    assert len([line for line in cache.journal.read_text().splitlines() if line]) == 25
    expected = decode_rows(SyntheticScenes(200), SIZE, range(0, 200, 20)).pixels
    assert np.array_equal(cache.pixels()[::20], expected)


def test_worker_processes_decode_what_the_main_process_does():
    progress = []
    pixels = [decode_to_memory(SyntheticScenes(20), SIZE, workers, progress.append)[0] for workers in (1, 2)]
    assert np.array_equal(*pixels)
    assert sum(progress) == 40


def test_rows_that_cannot_be_decoded_are_listed():
    bad = dict.fromkeys((3, 4, 39), ("truncated", "the file ends before the image does"))
    assert build_pixel_cache(BrokenScenes(), SIZE, 1, 1).bad_images() == bad
    assert decode_to_memory(BrokenScenes(), SIZE, 1, lambda done: None).bad == bad


def test_a_bad_row_whose_cause_may_be_gone_is_tried_again(monkeypatch):
    installed = False

    def image(self, index, min_size=0):
        if index == 3 and not installed:
            raise BadImage("HEIC", "HEIC images need pip install 'm1clip[heic]'")
        return SyntheticScenes(40).image(index)

    monkeypatch.setattr(BrokenScenes, "image", image)
    assert list(build_pixel_cache(BrokenScenes(), SIZE, 1, 1).bad_images()) == [3]
    installed = True
    assert not build_pixel_cache(BrokenScenes(), SIZE, 1, 1).bad_images()


def test_a_failed_build_releases_its_lock(monkeypatch):
    def fail(*_, **options):
        raise OSError("no")

    monkeypatch.setattr(pixel_cache, "decode_rows", fail)
    with pytest.raises(OSError, match="no"):
        build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    monkeypatch.setattr(pixel_cache, "decode_rows", decode_rows)
    assert build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1) is not None  # otherwise it would wait for ever


@dataclass(frozen=True)
class DeadlyScenes(BrokenScenes):
    def image(self, index, min_size=0):
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().image(index)


def test_a_killed_worker_is_one_sentence():
    with pytest.raises(RuntimeError, match=r"a worker process was killed near image \d+"):
        build_pixel_cache(DeadlyScenes(), SIZE, 1, 2)


def test_a_dataset_above_the_limit_is_not_cached():
    assert build_pixel_cache(SyntheticScenes(20), SIZE, 10e-6, 1) is None
    assert not list(cache_folder().glob("pixels-*"))


def test_the_oldest_unused_cache_is_removed_first():
    dataset_gb = 20 * 16 * 16 * 3 / 1e9
    used, unused = (build_pixel_cache(SyntheticScenes(20, seed), SIZE, 1, 1) for seed in (0, 1))
    for age, cache in enumerate((used, unused)):
        os.utime(cache.folder, (1e9 + age, 1e9 + age))
    unused.close()
    assert build_pixel_cache(SyntheticScenes(20, 2), SIZE, 2.5 * dataset_gb, 1) is not None
    assert used.folder.exists()
    assert not unused.folder.exists()


def test_a_cache_that_only_used_entries_could_make_room_for_is_not_built():
    dataset_gb = 20 * 16 * 16 * 3 / 1e9
    used = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    assert build_pixel_cache(SyntheticScenes(20, 1), SIZE, 1.5 * dataset_gb, 1) is None
    assert [path.name for path in cache_folder().glob("pixels-*")] == [used.folder.name]


def test_a_full_disk_is_refused_with_a_solution(monkeypatch):
    monkeypatch.setattr(pixel_cache, "free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match=r"M1CLIP_CACHE.*--cache-gb 0"):
        build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)


def test_on_the_fly_images_are_those_of_the_cache_and_a_bad_row_is_replaced_by_the_next():
    expected = decode_rows(BrokenScenes(), SIZE, range(40)).pixels
    images = OnTheFlyImages(BrokenScenes(), SIZE, 2, max_bad_rows=0.1)
    rows, pixels = images.take(np.array([5, 3, 39, 0]))
    images.pool.close()
    assert rows.tolist() == [5, 5, 0, 0]
    assert np.array_equal(pixels, expected[rows])
    assert {row.location for row in images.bad_rows.examples} == {"row 3", "row 4", "row 39"}


def test_too_many_bad_rows_stop_on_the_fly_decoding():
    images = OnTheFlyImages(BrokenScenes(), SIZE, 1, max_bad_rows=0.01)
    with pytest.raises(ValueError, match=r"1 truncated.*row 3"):
        images.take(np.array([0, 3]))
    images.pool.close()


def test_closing_a_pool_ends_workers_that_are_busy():
    pool = WorkerPool(time.sleep, 2)
    results = pool.map([0, *[600] * 20])
    next(results)
    workers = list(pool.executor._processes.values())
    pool.close()
    deadline = time.monotonic() + 120
    while any(worker.is_alive() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [worker.is_alive() for worker in workers] == [False, False]


BAD_LINES = {
    "deep": b"[" * 200_000,
    "no chunk": b'{"crc": 1, "notes": {}}',
    "a large chunk": b'{"chunk": 99, "crc": 1, "notes": {}}',
    "a list for a chunk": b'{"chunk": [], "crc": 1, "notes": {}}',
    "text for notes": b'{"chunk": 0, "crc": 1, "notes": "x"}',
    "a note on no row": b'{"chunk": 0, "crc": 1, "notes": {"x": ["a", "b"]}}',
    "a note of numbers": b'{"chunk": 0, "crc": 1, "notes": {"3": [1, 2, 3]}}',
    "NUL bytes": bytes(100),
    "not UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_in_the_journal_is_skipped(line):
    cache = build_pixel_cache(BrokenScenes(), SIZE, 1, 1)
    expected = cache.bad_images()
    with open(cache.journal, "ab") as file:
        file.write(line + b"\n")
    assert build_pixel_cache(BrokenScenes(), SIZE, 1, 1).bad_images() == expected
    cache.journal.write_bytes(line + b"\n")  # nothing else is left
    rebuilt = build_pixel_cache(BrokenScenes(), SIZE, 1, 1)
    assert rebuilt.bad_images() == expected
    assert np.array_equal(rebuilt.pixels(), decode_rows(BrokenScenes(), SIZE, range(40)).pixels)


@pytest.mark.parametrize("name", ["journal.jsonl", "rows.bin"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_something_else_in_place_of_a_cache_file_is_replaced(name, make):
    cache = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    (cache.folder / name).unlink()
    make(cache.folder / name)
    again = build_pixel_cache(SyntheticScenes(20), SIZE, 1, 1)
    assert np.array_equal(again.pixels(), decode_rows(SyntheticScenes(20), SIZE, range(20)).pixels)
