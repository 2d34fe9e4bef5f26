from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from m1clip.config import VisionConfig
from m1clip.data import augment
from m1clip.data.batches import Augmentation, BatchStream, draws, duplicates, growing, looks_of
from m1clip.data.splits import Cached, Part, Split
from m1clip.data.synthetic.scenes import SyntheticScenes
from m1clip.data.workers import decode_rows
from m1clip.model.tokenizer import Tokenizer

ALL = Augmentation(crop=0.5, flip=True, color=0.3)


def drawn(number: int, size: int, seed: int = 0, weight: float = 1.0) -> Part:
    pairs, rows = SyntheticScenes(number, seed), np.arange(number)
    return Part(pairs, rows, Cached(decode_rows(pairs, size, rows.tolist()).pixels, rows), weight)


@pytest.fixture(scope="module")
def batches() -> BatchStream:
    letters = Tokenizer.characters()
    return BatchStream(Split([drawn(40, 40)]), partial(letters, length=77), size=8, seed=1, side=32, augment=ALL)


def same(a, b):
    return torch.equal(a.images_BHWC, b.images_BHWC) and torch.equal(a.tokens_BL, b.tokens_BL)


def test_an_epoch_shows_every_pair_once(batches):
    rows = np.concatenate([batches.at(step).rows for step in range(batches.per_epoch)])
    assert sorted(rows) == list(range(40))


def by_row(batches: BatchStream, epoch: int) -> dict[int, tuple[list[int], np.ndarray]]:
    """Each pair of an epoch as it was shown: its token ids without padding, and its pixels."""
    shown = {}
    for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
        batch = batches.at(step)
        for row, ids, image in zip(batch.rows, batch.tokens_BL.tolist(), batch.images_BHWC, strict=True):
            shown[int(row)] = ([i for i in ids if i], image.numpy())
    return shown


def test_epochs_differ_in_order_augmentation_and_wording(batches):
    assert list(batches.at(0).rows) != list(batches.at(batches.per_epoch).rows)
    first, second = by_row(batches, 0), by_row(batches, 1)
    other_words = sum(first[row][0] != second[row][0] for row in range(40))
    other_pixels = sum(not np.array_equal(first[row][1], second[row][1]) for row in range(40))
    assert 20 <= other_words < 40  # four ways to say it: a quarter stays by chance
    assert other_pixels > 30


def test_what_is_drawn_for_a_row_does_not_depend_on_the_batch_it_is_in(batches):
    """BatchStream of another size have other neighbours in them, and the same images and words."""
    wide = replace(batches, size=20)
    ours, theirs = by_row(batches, 0), by_row(wide, 0)
    assert all(ours[row][0] == theirs[row][0] for row in range(40))
    assert all(np.array_equal(ours[row][1], theirs[row][1]) for row in range(40))


def test_several_captions_of_a_image_are_different_ones_of_its_own(batches):
    one, three = batches.at(3), replace(batches, captions=3).at(3)
    assert three.tokens_BL.shape[:2] == (len(one), 3)
    wide = one.tokens_BL.shape[1]
    assert torch.equal(three.tokens_BL[:, 0, :wide], one.tokens_BL)  # the first is the one of before
    for row, tokens_KL in zip(three.rows, three.tokens_BL, strict=True):
        own = {ids.numpy().tobytes() for ids in batches.tokenize(batches.pairs.captions(int(row)))}
        kinds = {np.trim_zeros(ids.numpy(), "b").tobytes() for ids in tokens_KL}
        own = {np.trim_zeros(np.frombuffer(ids, np.int64), "b").tobytes() for ids in own}
        assert kinds <= own
        assert len(kinds) == min(3, len(own))


def test_a_stream_begun_in_the_middle_gives_the_same_batches(batches):
    whole = list(batches.stream(0, 12))
    rest = list(batches.stream(7, 12))
    assert len(rest) == 5
    assert all(same(a, b) for a, b in zip(whole[7:], rest, strict=True))


def test_pixels_belong_to_their_rows(batches):
    plain = replace(batches, augment=Augmentation(), side=40)
    batch = plain.at(3)
    assert np.array_equal(batch.images_BHWC, batches.pairs.take(batch.rows)[1])


def test_draws_depend_on_the_row_not_on_its_neighbours():
    rows = np.array([5, 900, 31])
    assert draws(0, 2, rows, 0)[1] == draws(0, 2, np.array([900]), 0)[0]
    many = draws(0, 0, np.arange(20000), 0)
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    assert not np.allclose(many, draws(0, 1, np.arange(20000), 0))


def ramp(side: int, number: int = 1) -> np.ndarray:
    """Images whose red is the column and whose green is the row."""
    column, row = np.meshgrid(np.arange(side), np.arange(side))
    image = np.stack([column, row, np.zeros_like(row)], axis=2).astype(np.uint8)
    return image[None].repeat(number, axis=0)


def test_a_crop_keeps_at_least_its_part_of_the_image_and_lies_inside_it():
    rng = np.random.default_rng(0)
    made = augment.cropped(ramp(80, 200), rng.random((4, 200)), 0.4, 64).numpy().astype(int)
    wide, high = (made[..., c].max((1, 2)) - made[..., c].min((1, 2)) + 1 for c in (0, 1))
    assert (wide * high >= 0.37 * 80**2).all()  # the outermost columns are blends
    assert len(set(zip(made[:, 0, 0, 0], made[:, 0, 0, 1], strict=True))) > 100  # in many places
    assert (np.diff(made[:, 0, :, 0], axis=1) >= 0).all()
    assert abs(np.log(wide / high)).max() < np.log(4 / 3) + 0.05


def test_a_crop_of_everything_is_the_image_scaled():
    whole = augment.cropped(ramp(80), np.array([[1.0], [0.5], [0.3], [0.9]]), 0.5, 64)
    assert torch.equal(whole, augment.resized(torch.from_numpy(ramp(80)), 64))


def test_half_of_the_images_are_mirrored():
    made = augment.flipped(torch.from_numpy(ramp(8, 2)), np.array([0.2, 0.8]))
    assert made[0, 0, :, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert made[1, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_color_is_as_torchvision_changes_it():
    from torchvision.transforms import v2

    images_BHWC = torch.randint(0, 256, (1, 16, 16, 3), generator=torch.Generator().manual_seed(0)).byte()
    image = images_BHWC.permute(0, 3, 1, 2).float() / 255
    # Not contrast: theirs takes the mean of rounded greys.
    for which, change in ((0, v2.functional.adjust_brightness), (2, v2.functional.adjust_saturation)):
        draw = np.full((3, 1), 0.5)
        draw[which] = 0.0  # the least: 1 - strength
        theirs = (change(image, 0.7) * 255).permute(0, 2, 3, 1)
        assert (augment.colored(images_BHWC, draw, 0.3).float() - theirs).abs().max() < 1.5
    flat = augment.colored(images_BHWC, np.array([[0.5], [0.0], [0.5]]), 0.999)  # hardly any contrast
    assert flat.float().std() < 1


def test_a_failing_batch_raises_in_the_loop_not_in_the_thread(batches):
    def refuse(texts):
        raise ValueError(f"bad caption {texts[0]}")

    with pytest.raises(ValueError, match="bad caption"):
        next(replace(batches, tokenize=refuse).stream(0, 3))


def test_sources_are_mixed_by_weight():
    side = Split([drawn(40, 8, weight=2), drawn(30, 8, seed=1, weight=0.5)])
    assert (len(side), side.per_epoch) == (70, 95)
    order = side.order(0, 0)
    times = np.bincount(order % 70, minlength=70)
    assert (times[:40] == 2).all()
    assert sorted(times[40:]) == [0] * 15 + [1] * 15
    assert len(set(order.tolist())) == 95  # the second time is another number: other words, another crop
    other = np.bincount(side.order(0, 1) % 70, minlength=70)
    assert (other[40:] != times[40:]).any()  # another half of it in the next epoch
    half = len(order) // 2
    assert 30 < (order[:half] % 70 < 40).sum() < 47  # they come together, not one after the other


def test_mixed_rows_find_their_images_and_words():
    first, second = drawn(10, 8), drawn(10, 8, seed=5)
    side = Split([first, second])
    rows, pixels = side.take(np.array([12, 3, 19]))
    assert rows.tolist() == [12, 3, 19]
    assert np.array_equal(pixels[0], second.images.take(np.array([2]))[1][0])
    assert np.array_equal(pixels[1], first.images.take(np.array([3]))[1][0])
    assert list(side.captions(12)) == SyntheticScenes(10, 5).captions(2)
    assert side.row(3) == SyntheticScenes(10).row(3)


def test_duplicates_are_equal_captions_or_equal_images_of_different_rows():
    def named(tokens_BL, pixels):
        return duplicates([ids.tobytes() for ids in tokens_BL.numpy()], looks_of(pixels))

    tokens_BL = torch.tensor([[1, 5, 2], [1, 6, 2], [1, 5, 2], [1, 7, 2]])
    pixels = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    assert named(tokens_BL[1:], pixels[1:]) is None
    assert named(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [2, 0]]
    pixels[3] = pixels[1]
    assert named(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]


def test_a_batch_marks_its_duplicates_unless_told_not_to(batches):
    (part,) = batches.pairs.parts
    black = Cached(np.zeros_like(part.images.pixels), part.rows)
    same = replace(batches, pairs=Split([replace(part, images=black)]))  # every image is the same
    assert same.at(0).duplicate_BB.sum() == 8 * 7
    assert replace(same, mask_duplicates=False).at(0).duplicate_BB is None
    assert batches.at(0).duplicate_BB is None


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
    assert torch.equal(torch.cat([part.images_BHWC for part in parts]), batch.images_BHWC)
    assert torch.equal(torch.cat([part.key_B for part in parts]), batch.key_B)


def test_images_grow_in_equal_shares_of_the_run(batches):
    vision = VisionConfig(64, 16, 32, 1, 1)
    assert growing(32, vision) == (32, 48, 64)
    assert growing(0, vision) == ()
    growing_up = replace(batches, sides=(16, 32), total=10)
    assert [growing_up.at(step).images_BHWC.shape[1] for step in range(10)] == [16] * 5 + [32] * 5
    assert torch.equal(growing_up.at(7).images_BHWC, batches.at(7).images_BHWC)
    halved = augment.resized(torch.full((1, 4, 4, 3), 7, dtype=torch.uint8), 2)
    assert halved.shape == (1, 2, 2, 3)
    assert halved.unique().tolist() == [7]
