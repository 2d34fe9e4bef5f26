from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from m1clip.config import Preprocess
from m1clip.data.batches import (
    Augmentation,
    BatchStream,
    CaptionFeatureTable,
    FeatureTables,
    ImageFeatures,
    ImageFeatureTable,
    Images,
    TextFeatures,
    Tokens,
    find_duplicates,
    flip_half,
    group_ids,
    jitter_color,
    pixel_ids,
    random_resized_crop,
    resize,
    sample_uniform,
    tokenize_captions,
)
from m1clip.data.pixel_cache import decode_rows
from m1clip.data.splits import Split, SplitPart
from m1clip.data.synthetic import SyntheticScenes
from m1clip.model.tokenizer import Tokenizer

ALL = Augmentation(crop_scale=0.5, hflip=True, color_jitter=0.3)


def make_part(count: int, image_size: int, seed: int = 0, weight: float = 1.0) -> SplitPart:
    pairs, rows = SyntheticScenes(count, seed), np.arange(count)
    return SplitPart(pairs, rows, decode_rows(pairs, Preprocess(image_size), rows.tolist()).pixels, weight)


@pytest.fixture(scope="module")
def batches() -> BatchStream:
    tokenize = partial(Tokenizer.characters(), length=77)
    return BatchStream(Split([make_part(40, 40)]), tokenize, batch_size=8, seed=1, image_size=32, augmentation=ALL)


def samples_by_row(batches: BatchStream, epoch: int) -> dict[int, tuple[list[int], np.ndarray]]:
    """Token ids without padding and pixels of each row in an epoch."""
    samples = {}
    for step in range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch):
        batch = batches.batch(step)
        for row, ids, image in zip(
            batch.rows, batch.text.tokens_BKL[:, 0].tolist(), batch.image.images_BHWC, strict=True
        ):
            samples[int(row)] = ([i for i in ids if i], image.numpy())
    return samples


def test_an_epoch_has_every_pair_once(batches):
    rows = np.concatenate([batches.batch(step).rows for step in range(batches.steps_per_epoch)])
    assert sorted(rows) == list(range(40))


def test_epochs_differ_in_order_augmentation_and_captions(batches):
    assert list(batches.batch(0).rows) != list(batches.batch(batches.steps_per_epoch).rows)
    first, second = samples_by_row(batches, 0), samples_by_row(batches, 1)
    assert 20 <= sum(first[row][0] != second[row][0] for row in range(40)) < 40  # one of four captions
    assert sum(not np.array_equal(first[row][1], second[row][1]) for row in range(40)) > 30


def test_a_sample_does_not_depend_on_its_batch(batches):
    small, large = samples_by_row(batches, 0), samples_by_row(replace(batches, batch_size=20), 0)
    assert all(small[row][0] == large[row][0] for row in range(40))
    assert all(np.array_equal(small[row][1], large[row][1]) for row in range(40))


def test_several_captions_per_image_are_different_ones_of_that_image(batches):
    one, three = batches.batch(3), replace(batches, captions_per_image=3).batch(3)
    assert three.text.tokens_BKL.shape[:2] == (len(one), 3)
    length = one.text.tokens_BKL.shape[2]
    assert torch.equal(three.text.tokens_BKL[:, 0, :length], one.text.tokens_BKL[:, 0])
    for row, tokens_KL in zip(three.rows, three.text.tokens_BKL.numpy(), strict=True):
        captions_L = batches.tokenize(batches.pairs.captions(int(row)))
        expected = {np.trim_zeros(ids, "b").tobytes() for ids in captions_L}
        used = {np.trim_zeros(ids, "b").tobytes() for ids in tokens_KL}
        assert used <= expected
        assert len(used) == min(3, len(expected))


@pytest.mark.parametrize("captions", [1, 3])
def test_captions_tokenized_in_advance_give_the_same_batches(batches, captions):
    plain, tokenizer = replace(batches, captions_per_image=captions), Tokenizer.characters()
    encode, pad = partial(tokenizer.encode, length=77), partial(tokenizer.pad, length=77)
    tokenized = replace(plain, tokenized=tokenize_captions(batches.pairs, encode, pad))
    for step in range(7):
        one, other = plain.batch(step), tokenized.batch(step)
        assert torch.equal(one.text.tokens_BKL, other.text.tokens_BKL)
        assert torch.equal(one.image.images_BHWC, other.image.images_BHWC)


def test_features_of_frozen_towers_replace_pixels_and_tokens(batches):
    """Features that name their row and caption must come back for exactly these."""
    counts = [len(batches.pairs.captions(row)) for row in range(40)]
    views = [np.arange(40, dtype=np.float16)[:, None] + 100 * view for view in range(3)]
    images = ImageFeatureTable(views, np.arange(40), np.where(np.arange(40) == 7, 8, np.arange(40)))
    order = np.random.default_rng(0).permutation(sum(counts))
    captions = CaptionFeatureTable(
        order[:, None].astype(np.float16), np.argsort(order), np.cumsum([0, *counts]), np.arange(sum(counts))
    )
    frozen = replace(batches, captions_per_image=2, features=FeatureTables(images, captions))
    seen = []
    for step in range(frozen.steps_per_epoch):
        batch = frozen.batch(step)
        assert isinstance(batch.image, ImageFeatures)
        assert isinstance(batch.text, TextFeatures)
        assert (batch.image.features_BD[:, 0] % 100).tolist() == batch.rows.tolist()
        first_K = captions.start_N[batch.rows][:, None]
        features_BK = batch.text.features_BKD[..., 0].numpy()
        assert ((first_K <= features_BK) & (features_BK < first_K + 4)).all()
        assert (features_BK[:, 0] != features_BK[:, 1]).all()
        seen += batch.rows.tolist()
    assert sorted(seen) == sorted([8 if row == 7 else row for row in range(40)])
    assert isinstance(replace(frozen, features=FeatureTables(images)).batch(0).text, Tokens)
    assert isinstance(replace(frozen, features=FeatureTables(None, captions)).batch(0).image, Images)


def test_a_stream_that_starts_in_the_middle_gives_the_same_batches(batches):
    whole, rest = list(batches.stream(0, 12)), list(batches.stream(7, 12))
    assert len(rest) == 5
    for one, other in zip(whole[7:], rest, strict=True):
        assert torch.equal(one.image.images_BHWC, other.image.images_BHWC)
        assert torch.equal(one.text.tokens_BKL, other.text.tokens_BKL)


def test_epochs_end_at_multiples_of_their_steps(batches):
    assert batches.steps_per_epoch == 5
    assert [batches.epoch_end(step) for step in (0, 4, 5, 10)] == [0, None, 1, 2]


def test_pixels_belong_to_their_rows(batches):
    batch = replace(batches, augmentation=Augmentation(), image_size=40).batch(3)
    assert np.array_equal(batch.image.images_BHWC, batches.pairs.take(batch.rows)[1])


def test_random_numbers_depend_on_the_sample_not_on_its_neighbors():
    samples = np.array([5, 900, 31])
    assert sample_uniform(0, 2, samples, 0)[1] == sample_uniform(0, 2, np.array([900]), 0)[0]
    many = sample_uniform(0, 0, np.arange(20000), 0)
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03
    assert not np.allclose(many, sample_uniform(0, 1, np.arange(20000), 0))


def gradient_images(size: int, count: int = 1) -> np.ndarray:
    """Images whose red is the column and whose green is the row."""
    column, row = np.meshgrid(np.arange(size), np.arange(size))
    image = np.stack([column, row, np.zeros_like(row)], axis=2).astype(np.uint8)
    return image[None].repeat(count, axis=0)


def test_a_crop_has_its_minimum_area_and_lies_inside_the_image():
    rng = np.random.default_rng(0)
    crops = random_resized_crop(gradient_images(80, 200), rng.random((4, 200)), 0.4, 64).numpy().astype(int)
    width, height = (crops[..., c].max((1, 2)) - crops[..., c].min((1, 2)) + 1 for c in (0, 1))
    assert (width * height >= 0.37 * 80**2).all()  # the outermost columns are blends
    assert len(set(zip(crops[:, 0, 0, 0], crops[:, 0, 0, 1], strict=True))) > 100  # in many positions
    assert (np.diff(crops[:, 0, :, 0], axis=1) >= 0).all()
    assert abs(np.log(width / height)).max() < np.log(4 / 3) + 0.05


def test_a_crop_of_the_whole_image_is_the_resized_image():
    whole = random_resized_crop(gradient_images(80), np.array([[1.0], [0.5], [0.3], [0.9]]), 0.5, 64)
    assert torch.equal(whole, resize(torch.from_numpy(gradient_images(80)), 64))


def test_half_of_the_images_are_flipped():
    flipped = flip_half(torch.from_numpy(gradient_images(8, 2)), np.array([0.2, 0.8]))
    assert flipped[0, 0, :, 0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert flipped[1, 0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_color_jitter_is_torchvisions():
    from torchvision.transforms import v2

    images_BHWC = torch.randint(0, 256, (1, 16, 16, 3), generator=torch.Generator().manual_seed(0)).byte()
    images_BCHW = images_BHWC.permute(0, 3, 1, 2).float() / 255
    # Not contrast: torchvision takes the mean of rounded grays.
    for index, adjust in ((0, v2.functional.adjust_brightness), (2, v2.functional.adjust_saturation)):
        uniform_3B = np.full((3, 1), 0.5)
        uniform_3B[index] = 0.0  # the minimum: 1 - strength
        expected = (adjust(images_BCHW, 0.7) * 255).permute(0, 2, 3, 1)
        assert (jitter_color(images_BHWC, uniform_3B, 0.3).float() - expected).abs().max() < 1.5
    flat = jitter_color(images_BHWC, np.array([[0.5], [0.0], [0.5]]), 0.999)  # hardly any contrast
    assert flat.float().std() < 1


def test_an_error_in_the_prefetch_thread_is_raised_in_the_loop(batches):
    def refuse(texts):
        raise ValueError(f"bad caption {texts[0]}")

    with pytest.raises(ValueError, match="bad caption"):
        next(replace(batches, tokenize=refuse).stream(0, 3))


def test_sources_are_mixed_by_weight():
    split = Split([make_part(40, 8, weight=2), make_part(30, 8, seed=1, weight=0.5)])
    assert (len(split), split.pairs_per_epoch) == (70, 95)
    order = split.order(0, 0)
    times = np.bincount(order % 70, minlength=70)
    assert (times[:40] == 2).all()
    assert sorted(times[40:]) == [0] * 15 + [1] * 15
    assert len(set(order.tolist())) == 95  # a repetition is another sample: other captions, another crop
    other = np.bincount(split.order(0, 1) % 70, minlength=70)
    assert (other[40:] != times[40:]).any()  # another half of it in the next epoch
    half = len(order) // 2
    assert 30 < (order[:half] % 70 < 40).sum() < 47  # evenly mixed, not one after the other


def test_rows_of_mixed_sources_have_their_own_images_and_captions():
    first, second = make_part(10, 8), make_part(10, 8, seed=5)
    split = Split([first, second])
    rows, pixels = split.take(np.array([12, 3, 19]))
    assert rows.tolist() == [12, 3, 19]
    assert np.array_equal(pixels[0], second.images[2])
    assert np.array_equal(pixels[1], first.images[3])
    assert np.array_equal(pixels[2], second.images[9])
    assert list(split.captions(12)) == SyntheticScenes(10, 5).captions(2)
    assert split.location(3) == SyntheticScenes(10).location(3)


def test_duplicates_are_different_rows_with_equal_captions_or_images():
    def duplicates(tokens_BL, pixels):
        return find_duplicates([ids.tobytes() for ids in tokens_BL.numpy()], pixel_ids(pixels))

    tokens_BL = torch.tensor([[1, 5, 2], [1, 6, 2], [1, 5, 2], [1, 7, 2]])
    pixels = np.arange(4, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)
    assert duplicates(tokens_BL[1:], pixels[1:]) is None
    assert duplicates(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [2, 0]]
    pixels[3] = pixels[1]
    assert duplicates(tokens_BL, pixels).nonzero().tolist() == [[0, 2], [1, 3], [2, 0], [3, 1]]


def test_images_that_agree_in_the_sampled_pixels_only_are_no_duplicates():
    pixels = np.zeros((2, 64, 64, 3), np.uint8)
    pixels[1, 1, 1] = 255
    assert len(set(pixel_ids(pixels))) == 2


def test_group_ids_are_equal_for_equal_values():
    assert group_ids(["a", "b", "a", "c", "b"]).tolist() == [0, 1, 0, 2, 1]


def test_a_batch_marks_its_duplicates_unless_this_is_off(batches):
    (part,) = batches.pairs.parts
    black = np.zeros_like(part.images)
    same = replace(batches, pairs=Split([replace(part, images=black)]))  # every image is the same
    assert same.batch(0).duplicate_BB.sum() == 8 * 7
    assert replace(same, mask_duplicates=False).batch(0).duplicate_BB is None
    assert batches.batch(0).duplicate_BB is None


def test_keys_belong_to_row_and_epoch_not_to_the_position_in_the_batch(batches):
    steps = batches.steps_per_epoch
    keys = [
        {int(key) for step in epoch for key in batches.batch(step).key_B}
        for epoch in (range(steps), range(steps, 2 * steps))
    ]
    assert len(keys[0]) == 40
    assert not keys[0] & keys[1]
    halved = replace(batches, batch_size=4)
    assert {int(key) for step in range(10) for key in halved.batch(step).key_B} == keys[0]


def test_micro_batches_add_up_to_the_batch(batches):
    batch = replace(batches, captions_per_image=2).batch(0)
    parts = batch.split(3)
    assert [len(part) for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.image.images_BHWC for part in parts]), batch.image.images_BHWC)
    assert torch.equal(torch.cat([part.text.tokens_BKL for part in parts]), batch.text.tokens_BKL)
    assert torch.equal(torch.cat([part.key_B for part in parts]), batch.key_B)
    assert np.concatenate([part.rows for part in parts]).tolist() == batch.rows.tolist()
