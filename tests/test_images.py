import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.config import PRESETS, Preprocess
from m1clip.data.synthetic import SyntheticScenes
from m1clip.images import preprocess, to_rgb
from m1clip.model.clip import CLIP


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (10, 10), (64, 64), (1, 500), (65, 64)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "1", "CMYK"])
def test_any_image_becomes_square_rgb_bytes(size, mode):
    pixels = preprocess(Image.new(mode, size), Preprocess(64))
    assert (pixels.shape, pixels.dtype) == ((64, 64, 3), np.uint8)
    assert (pixels == (255 if mode in ("RGBA", "CMYK") else 0)).all()  # transparent, and no ink: white


def test_the_center_is_kept_and_not_distorted():
    wide = Image.new("RGB", (300, 100), "red")
    wide.paste("blue", (100, 0, 200, 100))
    assert np.array_equal(np.unique(preprocess(wide, Preprocess(100)).reshape(-1, 3), axis=0), [[0, 0, 255]])


def test_the_exif_orientation_is_applied():
    photo = Image.new("RGB", (64, 64), "black")
    photo.paste("white", (0, 0, 64, 32))  # the upper half, as stored
    photo.getexif()[0x0112] = 6  # rotate by 90 degrees clockwise
    upright = preprocess(photo, Preprocess(64))
    assert upright[32, 60].tolist() == [255] * 3
    assert upright[32, 3].tolist() == [0] * 3


@pytest.mark.parametrize("size", [(300, 200), (201, 303), (64, 65), (31, 500), (500, 333), (40, 40), (97, 101)])
@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_pixels_are_those_of_open_clips_transform(size, mode, interpolation):
    from open_clip.transform import PreprocessCfg, image_transform_v2

    image = SyntheticScenes(1).image(0).resize(size)
    cfg = PreprocessCfg(64, "RGB", (0, 0, 0), (1, 1, 1), interpolation, mode)
    expected = image_transform_v2(cfg, is_train=False)(image).permute(1, 2, 0) * 255
    assert np.abs(preprocess(image, Preprocess(64, mode, interpolation)) - expected.numpy()).max() < 1e-3


def test_a_crop_percentage_resizes_the_shorter_edge_further():
    from torchvision.transforms import v2

    image = SyntheticScenes(1).image(0).resize((301, 200))
    timm = v2.Compose([v2.Resize(64, v2.InterpolationMode.BICUBIC), v2.CenterCrop(56)])
    expected = np.asarray(timm(image)).astype(int)
    assert np.abs(preprocess(image, Preprocess(56, crop_pct=0.875)) - expected).max() == 0


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
