import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.config import PRESETS
from m1clip.images import square
from m1clip.model.clip import CLIP


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (10, 10), (64, 64), (1, 500), (65, 64)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
def test_any_image_becomes_a_square_of_rgb_bytes(size, mode):
    made = square(Image.new(mode, size), 64)
    assert (made.shape, made.dtype) == ((64, 64, 3), np.uint8)


def test_the_middle_is_kept_and_not_squeezed():
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    assert np.array_equal(np.unique(square(wide, 100).reshape(-1, 3), axis=0), [[0, 0, 255]])


def test_a_photo_lying_on_its_side_is_put_upright():
    photo = Image.new("RGB", (64, 64), "black")
    photo.paste("white", (0, 0, 64, 32))  # the upper half, as stored
    photo.getexif()[0x0112] = 6  # to be turned a quarter to the right
    upright = square(photo, 64)
    assert upright[32, 60].tolist() == [255] * 3
    assert upright[32, 3].tolist() == [0] * 3


def test_pixels_are_normalized_as_torchvision_does():
    from torchvision.transforms import v2

    vision = PRESETS["base"].model.vision
    with torch.device("meta"):
        model = CLIP(PRESETS["base"].model)
    images_BHWC = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    theirs = v2.Normalize(vision.mean, vision.std)(images_BHWC.permute(0, 3, 1, 2).float() / 255)
    assert torch.allclose(model.normalize(images_BHWC), theirs, atol=1e-5)
