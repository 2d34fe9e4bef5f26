import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from m1clip.data import cache_space, pixel_cache
from m1clip.data.decode import BadImage
from m1clip.data.pixel_cache import Store, decoded, stored
from m1clip.data.splits import OnTheFly
from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.data.workers import decode_rows


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("m1clip.data.store.PART", 8)


@dataclass(frozen=True)
class Spoiled:
    """Scenes of which some cannot be decoded; can be sent to workers."""

    size: int = 40
    bad: tuple[int, ...] = (3, 4, 39)
    fingerprint: str = "spoiled"
    identity: str = "spoiled"

    def __len__(self) -> int:
        return self.size

    def image(self, index, least=0):
        if index in self.bad:
            raise BadImage("truncated", "the file ends before the image does")
        return SyntheticScenes(self.size).image(index)

    def captions(self, index):
        return SyntheticScenes(self.size).captions(index)

    def row(self, index):
        return f"row {index}"


def test_images_are_decoded_once_and_then_verified():
    heard = []
    first = stored(SyntheticScenes(20), 16, 1, 1, heard.append)
    assert (sum(heard), first.pixels().shape) == (20, (20, 16, 16, 3))
    before = first.bytes.stat().st_mtime_ns
    again = stored(SyntheticScenes(20), 16, 1, 1, heard.append)
    assert sum(heard) == 40  # counted as done at once, not drawn again
    assert again.bytes.stat().st_mtime_ns == before
    assert np.array_equal(first.pixels(), decode_rows(SyntheticScenes(20), 16, range(20)).pixels)


def test_a_byte_that_the_disk_has_changed_is_noticed_and_only_its_part_made_again(monkeypatch):
    store = stored(SyntheticScenes(20), 16, 1, 1)
    sound = np.array(store.pixels())
    with open(store.bytes, "r+b") as file:
        file.seek(9 * 16 * 16 * 3 + 5)  # in the second part
        file.write(b"\xff")
    again = []
    monkeypatch.setattr(pixel_cache, "decode_rows", lambda *args: again.append(args[2]) or decode_rows(*args))
    del store
    assert np.array_equal(stored(SyntheticScenes(20), 16, 1, 1).pixels(), sound)
    assert again == [range(8, 16)]


@pytest.mark.parametrize("damage", ["cut", "gone", "journal cut", "journal gone"])
def test_a_store_that_is_not_whole_is_completed(damage):
    store = stored(SyntheticScenes(20), 16, 1, 1)
    sound = np.array(store.pixels())
    file = store.journal if "journal" in damage else store.bytes
    if "gone" in damage:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-30])
    assert np.array_equal(stored(SyntheticScenes(20), 16, 1, 1).pixels(), sound)


BUILD = """
import sys, time
from m1clip.data import pixel_cache
from m1clip.data import row_store
from m1clip.data.synthetic.scenes import SyntheticScenes
store.PART = 8

class Slow(SyntheticScenes):
    def image(self, index, least=0):
        time.sleep(0.02)
        return super().image(index)

done = []
pixel_cache.stored(Slow(200), 16, 1, 1, lambda n: print(n, flush=True))
"""


def test_a_build_that_is_killed_goes_on_where_it_was():
    child = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    for _ in range(5):
        child.stdout.readline()
    child.send_signal(signal.SIGKILL)
    child.wait()
    store = Store(SyntheticScenes(200), 16)
    assert 5 <= len(store.entries()) < 25
    kept = store.bytes.stat().st_size
    heard = []
    store = stored(SyntheticScenes(200), 16, 1, 1, heard.append)
    assert sum(heard) == 200
    assert kept < store.bytes.stat().st_size == 200 * 16 * 16 * 3
    assert np.array_equal(store.pixels(), decode_rows(SyntheticScenes(200), 16, range(200)).pixels)


def test_two_processes_make_it_together_without_doing_it_twice():
    child = subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
    store = stored(SyntheticScenes(200), 16, 1, 1)  # waits for the other
    assert child.wait() == 0
    lines = [line for line in store.journal.read_text().splitlines() if line]
    assert len(lines) == 25
    assert np.array_equal(store.pixels()[::20], decode_rows(SyntheticScenes(200), 16, range(0, 200, 20)).pixels)


def test_many_processes_make_what_one_does():
    many, one = decoded(SyntheticScenes(20), 16, 2), decoded(SyntheticScenes(20), 16, 1)
    assert np.array_equal(many.pixels, one.pixels)


def test_rows_that_cannot_be_decoded_are_named():
    store = stored(Spoiled(), 16, 1, 1)
    assert {row: (fault.kind, fault.where) for row, fault in store.bad().items()} == {
        row: ("truncated", f"row {row}") for row in (3, 4, 39)
    }


def test_a_fault_that_another_day_may_mend_is_tried_again(monkeypatch):
    monkeypatch.setattr(Spoiled, "image", lambda self, index, least=0: mend(index))

    def mend(index):
        if index == 3 and not mended:
            raise BadImage("HEIC", "HEIC images need pip install 'm1clip[heic]'")
        return SyntheticScenes(40).image(index)

    mended = False
    assert list(stored(Spoiled(), 16, 1, 1).bad()) == [3]
    mended = True
    assert not stored(Spoiled(), 16, 1, 1).bad()


def test_a_build_that_fails_lets_go(monkeypatch):
    def fail(*_):
        raise OSError("no")

    monkeypatch.setattr(pixel_cache, "decode_rows", fail)
    with pytest.raises(OSError, match="no"):
        stored(SyntheticScenes(20), 16, 1, 1)
    monkeypatch.undo()
    assert stored(SyntheticScenes(20), 16, 1, 1) is not None  # it would wait for ever


@dataclass(frozen=True)
class Deadly(Spoiled):
    def image(self, index, least=0):
        if index == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().image(index)


def test_a_worker_that_is_killed_is_one_sentence():
    with pytest.raises(RuntimeError, match="a process that decodes images was killed"):
        stored(Deadly(), 16, 1, 2)


def test_what_does_not_fit_into_the_cache_is_not_stored():
    assert stored(SyntheticScenes(20), 16, 10e-6, 1) is None
    assert not [one for one in cache_space.cache_folder().iterdir() if one.name.startswith("pixels-")]


def test_older_images_make_room_for_newer_unless_in_use():
    size = 20 * 16 * 16 * 3 / 1e9
    used, old = (stored(SyntheticScenes(20, seed), 16, 1, 1) for seed in (0, 1))
    for age, store in enumerate((used, old)):
        os.utime(store.folder, (1e9 + age, 1e9 + age))
    old.close()
    new = stored(SyntheticScenes(20, 2), 16, 2.5 * size, 1)
    assert new is not None
    assert used.folder.exists()
    assert not old.folder.exists()


def test_a_disk_without_room_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setattr(cache_space, "free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match=r"M1CLIP_CACHE.*--cache-gb 0"):
        stored(SyntheticScenes(20), 16, 1, 1)


def test_live_images_are_those_of_the_cache_and_a_bad_row_gives_its_place_to_the_next():
    whole = decode_rows(Spoiled(), 16, range(40)).pixels
    live = OnTheFly(Spoiled(), 16, 2, max_bad=0.1)
    rows, pixels = live.take(np.array([5, 3, 39, 0]))
    live.workers.close()
    assert rows.tolist() == [5, 5, 0, 0]
    assert np.array_equal(pixels, whole[rows])
    assert len(live.faults) == 3
    assert "row 4" in [fault.where for fault in live.faults.named]


def test_too_many_bad_rows_end_a_live_run():
    live = OnTheFly(Spoiled(), 16, 1, max_bad=0.01)
    with pytest.raises(ValueError, match=r"1 truncated.*row 3"):
        live.take(np.array([0, 3]))
    live.workers.close()
