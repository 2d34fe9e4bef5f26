import os
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from m1clip.data import cache
from m1clip.data.batches import Batches, draws, growing, resized, shifted, twins
from m1clip.data.pairs import open_pairs
from m1clip.data.synthetic import Synthetic
from m1clip.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def batches() -> Batches:
    pairs = Synthetic(40)
    letters = Tokenizer.characters()
    return Batches(pairs, cache.pixels(pairs, 32), partial(letters, length=77), size=8, seed=1, shift=0.1)


def same(a, b):
    return torch.equal(a.bytes_BSSC, b.bytes_BSSC) and torch.equal(a.tokens_BL, b.tokens_BL)


def test_an_epoch_shows_every_pair_once(batches):
    rows = np.concatenate([batches.at(step).rows for step in range(batches.per_epoch)])
    assert sorted(rows) == list(range(40))


def by_row(batches: Batches, epoch: int) -> dict[int, tuple[list[int], np.ndarray]]:
    """Each pair of an epoch as it was shown: its token ids without padding, and its pixels."""
    shown = {}
    for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
        batch = batches.at(step)
        for row, ids, picture in zip(batch.rows, batch.tokens_BL.tolist(), batch.bytes_BSSC, strict=True):
            shown[int(row)] = ([i for i in ids if i], picture.numpy())
    return shown


def test_epochs_differ_in_order_augmentation_and_wording(batches):
    assert list(batches.at(0).rows) != list(batches.at(batches.per_epoch).rows)
    first, second = by_row(batches, 0), by_row(batches, 1)
    other_words = sum(first[row][0] != second[row][0] for row in range(40))
    other_pixels = sum(not np.array_equal(first[row][1], second[row][1]) for row in range(40))
    assert 20 <= other_words < 40  # four ways to say it: a quarter stays by chance
    assert other_pixels > 30


def test_a_stream_begun_in_the_middle_gives_the_same_batches(batches):
    whole = list(batches.stream(0, 12))
    rest = list(batches.stream(7, 12))
    assert len(rest) == 5
    assert all(same(a, b) for a, b in zip(whole[7:], rest, strict=True))


def test_pixels_belong_to_their_rows(batches):
    plain = Batches(batches.pairs, batches.pixels, batches.tokenize, 8, 1)
    batch = plain.at(3)
    for picture, row in zip(batch.bytes_BSSC, batch.rows, strict=True):
        assert np.array_equal(picture, batches.pixels[row])


def test_draws_depend_on_the_row_not_on_its_neighbours():
    rows = np.array([5, 900, 31])
    assert draws(0, 2, rows, 0)[1] == draws(0, 2, np.array([900]), 0)[0]
    many = draws(0, 0, np.arange(20000), 0)
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    assert not np.allclose(many, draws(0, 1, np.arange(20000), 0))


def test_shifted_moves_and_repeats_the_edge():
    picture = np.arange(16, dtype=np.uint8).reshape(1, 4, 4, 1)
    moved = shifted(picture, np.array([[1, 0]]))[0, :, :, 0]
    assert moved.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_failing_batch_raises_in_the_loop_not_in_the_thread(batches):
    def refuse(texts, rows):
        raise ValueError(f"bad caption in {rows[0]}")

    broken = Batches(batches.pairs, batches.pixels, refuse, 8, 1)
    with pytest.raises(ValueError, match="bad caption in synthetic train scene"):
        next(broken.stream(0, 3))


def test_cache_is_made_once_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path))
    heard = []
    first = cache.pixels(Synthetic(20), 16, heard.append)
    assert (sum(heard), first.shape) == (20, (20, 16, 16, 3))
    again = cache.pixels(Synthetic(20), 16, heard.append)
    assert sum(heard) == 40  # counted as done at once, not drawn again
    assert np.array_equal(first, again)
    (file,) = tmp_path.iterdir()
    expected = np.array(first)
    file.write_bytes(file.read_bytes()[:100])
    assert np.array_equal(cache.pixels(Synthetic(20), 16), expected)


def test_what_a_killed_process_left_in_the_cache_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path))
    cache.pixels(Synthetic(5), 16)
    (whole,) = tmp_path.iterdir()
    gone, alive = (
        whole.with_name(f"{whole.name}.{2**22 + 1}"),
        whole.with_name(f"{whole.name}.{os.getpid()}9"),
    )
    monkeypatch.setattr("psutil.pid_exists", lambda pid: str(pid).endswith("9"))
    gone.touch()
    alive.touch()
    whole.unlink()
    cache.pixels(Synthetic(5), 16)
    assert sorted(tmp_path.iterdir()) == sorted([whole, alive])


def test_cache_made_by_several_processes_equals_one_made_here(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "CHUNK", 8)
    many = cache.pixels(Synthetic(20), 16)
    assert np.array_equal(many, cache._decode(Synthetic(20), 16, range(20)))


def test_a_cache_that_would_fill_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("M1CLIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "free_bytes", lambda folder: 1000)
    with pytest.raises(OSError, match="M1CLIP_CACHE"):
        cache.pixels(Synthetic(20), 16)
    assert not list(tmp_path.rglob("*.npy*"))


@pytest.mark.parametrize(
    ("spec", "words"),
    [("sinthetic:5", "did you mean synthetic"), ("synthetic:ten", "whole number"), ("synthetic:0", "1 to")],
)
def test_a_spec_that_means_nothing_is_refused(spec, words):
    with pytest.raises(ValueError, match=words):
        open_pairs(spec, 10, 0)


def test_twins_are_equal_captions_or_equal_pictures_of_different_rows():
    tokens_BL = torch.tensor([[1, 5, 2], [1, 6, 2], [1, 5, 2], [1, 7, 2]])
    pixels = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    assert twins(tokens_BL[1:], pixels[1:]) is None
    assert twins(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [2, 0]]
    pixels[3] = pixels[1]
    assert twins(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]


def test_a_batch_marks_its_twins_unless_told_not_to(batches):
    same = replace(batches, pixels=np.zeros_like(batches.pixels))  # every picture is the same
    assert same.at(0).twin_BB.sum() == 8 * 7
    assert replace(same, mask_twins=False).at(0).twin_BB is None
    assert batches.at(0).twin_BB is None


def test_keys_belong_to_row_and_epoch_and_not_to_the_place_in_the_batch(batches):
    per_epoch = batches.per_epoch
    keys = [
        {
            int(row): int(key)
            for step in steps
            for row, key in zip(batches.at(step).rows, batches.at(step).key_B, strict=True)
        }
        for steps in (range(per_epoch), range(per_epoch, 2 * per_epoch))
    ]
    assert len(set(keys[0].values())) == 40
    assert not set(keys[0].values()) & set(keys[1].values())
    halved = replace(batches, size=4)
    assert {int(k) for step in range(10) for k in halved.at(step).key_B} == set(keys[0].values())


def test_a_batch_in_parts_is_the_batch(batches):
    batch = batches.at(0)
    parts = batch.split(3)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.bytes_BSSC for part in parts]), batch.bytes_BSSC)
    assert torch.equal(torch.cat([part.key_B for part in parts]), batch.key_B)


def test_pictures_grow_in_equal_shares_of_the_run(batches):
    assert growing(32, 64, 16) == (32, 48, 64)
    assert growing(0, 64, 16) == ()
    growing_up = replace(batches, sides=(16, 32), total=10)
    assert [growing_up.at(step).bytes_BSSC.shape[1] for step in range(10)] == [16] * 5 + [32] * 5
    assert torch.equal(growing_up.at(7).bytes_BSSC, batches.at(7).bytes_BSSC)
    halved = resized(torch.full((1, 4, 4, 3), 7, dtype=torch.uint8), 2)
    assert halved.shape == (1, 2, 2, 3)
    assert halved.unique().tolist() == [7]
