import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.config import PRESETS
from m1clip.data.synthetic import SyntheticScenes
from m1clip.images import center_crop, to_rgb
from m1clip.model.clip import CLIP


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (10, 10), (64, 64), (1, 500), (65, 64)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
def test_any_image_becomes_square_rgb_bytes(size, mode):
    pixels = center_crop(Image.new(mode, size), 64)
    assert (pixels.shape, pixels.dtype) == ((64, 64, 3), np.uint8)
    assert (pixels == (255 if mode in ("RGBA", "CMYK") else 0)).all()  # transparent, and no ink: white


def test_the_center_is_kept_and_not_distorted():
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    assert np.array_equal(np.unique(center_crop(wide, 100).reshape(-1, 3), axis=0), [[0, 0, 255]])


def test_the_exif_orientation_is_applied():
    photo = Image.new("RGB", (64, 64), "black")
    photo.paste("white", (0, 0, 64, 32))  # the upper half, as stored
    photo.getexif()[0x0112] = 6  # rotate by 90 degrees clockwise
    upright = center_crop(photo, 64)
    assert upright[32, 60].tolist() == [255] * 3
    assert upright[32, 3].tolist() == [0] * 3


def test_the_crop_is_close_to_clips_resize_and_center_crop():
    from torchvision.transforms import v2

    image = SyntheticScenes(1).image(0).resize((300, 200))
    clip = v2.Compose([v2.Resize(64, v2.InterpolationMode.BICUBIC), v2.CenterCrop(64)])
    assert np.abs(center_crop(image, 64).astype(int) - np.asarray(clip(image))).mean() < 1


def test_rgb_images_are_not_copied():
    image = Image.new("RGB", (8, 8))
    assert to_rgb(image) is image


def test_pixels_are_normalized_as_by_torchvision():
    from torchvision.transforms import v2

    vision = PRESETS["base"].model.vision
    with torch.device("meta"):
        model = CLIP(PRESETS["base"].model)
    images_BHWC = torch.randint(0, 256, (2, 8, 8, 3), dtype=torch.uint8)
    expected = v2.Normalize(vision.mean, vision.std)(images_BHWC.permute(0, 3, 1, 2).float() / 255)
    assert torch.allclose(model.normalize(images_BHWC), expected, atol=1e-5)
