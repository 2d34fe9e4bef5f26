"""Random numbers keyed by row."""

import pytest
import torch

from m1clip.model import rng


def test_numbers_are_uniform_and_differ_by_row_salt_and_index():
    key_B = torch.tensor([7, 8, 7])
    numbers, other_salt = rng.uniform(key_B, 3, 10_000), rng.uniform(key_B, 4, 10_000)
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.01)
    assert numbers.std().item() == pytest.approx(12**-0.5, abs=0.01)
    assert torch.equal(numbers[0], numbers[2])
    for other in (numbers[1], other_salt[0]):
        pair = torch.stack([numbers[0], other]).flatten(1)
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.05
    assert len(numbers[0].unique()) > 9_990


def test_dropout_masks_keep_the_mean_and_belong_to_rows():
    key_B = torch.arange(2000) * 97
    mask_BD = rng.dropout_mask(50, 0.25, key_B, 2001)
    assert mask_BD.mean().item() == pytest.approx(1, abs=0.02)
    assert (mask_BD == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(rng.dropout_mask(50, 0.25, key_B[5:7], 2001), mask_BD[5:7])


def test_image_and_caption_with_one_key_have_unrelated_masks():
    """Masks picked by the same index would let a model match pairs by their masks."""
    masks = [rng.dropout_mask(64, 0.5, torch.arange(3000), salt).tolist() for salt in (2001, 2003)]
    image, caption = ([tuple(mask) for mask in rows] for rows in masks)
    assert len(set(zip(image, caption, strict=True))) > 2 * len(set(image))


def test_each_row_keeps_its_own_tokens_in_order():
    x_BLD = torch.arange(10.0).view(1, 10, 1).expand(4, 10, 1)
    kept_BK = rng.drop_tokens(x_BLD, 0.6, torch.arange(4), 0)[..., 0]
    assert kept_BK.shape == (4, 4)
    assert all(row.tolist() == sorted(set(row.tolist())) for row in kept_BK)
    assert len({tuple(row.tolist()) for row in kept_BK}) > 1
    assert rng.drop_tokens(x_BLD, 0.999, torch.arange(4), 0).shape == (4, 1, 1)
