"""Images as they come: odd ones become RGB, broken ones one sentence. Made by real encoders."""

import io
import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from m1clip.data.decode import BadImage, decode, header, heic
from m1clip.images import rgb, square
from photos import SCENES, jpeg


def saved(image: Image.Image, kind: str, **options) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def scene(mode: str = "RGB") -> Image.Image:
    return SCENES.image(7).resize((96, 64)).convert(mode)


def near(image: Image.Image, other: Image.Image) -> float:
    a, b = (np.asarray(one.convert("RGB"), dtype=float) for one in (image, other))
    return float(np.abs(a - b).mean())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_every_common_format_is_read(kind):
    made = decode(saved(scene(), kind))
    assert (made.mode, made.size) == ("RGB", (96, 64))
    assert near(made, scene()) < 8


@pytest.mark.parametrize(
    ("mode", "kind"), [("CMYK", "JPEG"), ("L", "JPEG"), ("1", "PNG"), ("P", "PNG"), ("CMYK", "TIFF")]
)
def test_other_colors_become_rgb(mode, kind):
    made = decode(saved(scene(mode), kind))
    assert made.mode == "RGB"
    assert near(made, scene(mode)) < 12


def test_sixteen_bits_are_scaled_and_not_clipped():
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    made = np.asarray(decode(saved(Image.fromarray(grey), "PNG")))[..., 0]
    assert np.abs(made.astype(int) - grey // 257).max() <= 1


def test_what_is_transparent_lies_on_white():
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 16, 32))
    made = np.asarray(decode(saved(image, "PNG")))
    assert made[5, 5].tolist() == [255, 0, 0]
    assert made[5, 30].tolist() == [255, 255, 255]
    palette = image.quantize(8)
    assert (
        np.asarray(decode(saved(palette, "PNG", transparency=palette.getpixel((30, 5)))))[5, 30].tolist() == [255] * 3
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_photos_are_turned_upright_once(kind, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(scene(), kind, exif=exif)
    upright = square(Image.open(io.BytesIO(data)), 48)  # Pillow's own way
    assert np.abs(square(decode(data), 48).astype(int) - upright).max() <= 2


def test_the_first_image_of_an_animation_is_taken():
    data = saved(scene(), "GIF", save_all=True, append_images=[Image.new("RGB", (96, 64))] * 3)
    assert near(decode(data), scene()) < 8


@pytest.mark.skipif(not heic(), reason="pillow-heif is not installed: pip install 'm1clip[heic]'")
def test_heic_is_read():
    assert near(decode(saved(scene(), "HEIF", quality=90)), scene()) < 8


def test_heic_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("m1clip.data.decode.heic", lambda: False)
    with pytest.raises(BadImage, match=r"pip install 'm1clip\[heic\]'"):
        decode(b"\0\0\0\x18ftypheic" + bytes(100))


def test_a_large_jpeg_is_decoded_small_and_looks_the_same():
    """Within what a model could tell: the mean difference is below one step of 255."""
    data = saved(SCENES.image(3).resize((1600, 1200)), "JPEG", quality=95)
    small = decode(data, 2 * 64)
    assert 128 <= min(small.size) < 300
    assert np.abs(square(small, 64).astype(int) - square(decode(data), 64)).mean() < 1


@pytest.mark.parametrize("part", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_file_that_breaks_off_is_noticed(part, kind):
    data = saved(scene(), kind)
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * part)])


def test_the_kind_of_damage_is_told():
    for data, kind in (
        (b"", "empty file"),
        (b"not an image at all", "unreadable"),
        (b"<html>404</html>", "unreadable"),
        (jpeg(1)[:500], "truncated"),
        (saved(Image.new("RGB", (1, 1)), "PNG"), "tiny"),
    ):
        with pytest.raises(BadImage) as caught:
            decode(data)
        assert caught.value.kind == kind


def test_no_bytes_do_more_than_raise_our_error():
    """Ten thousand flipped bytes: an image or BadImage, and nothing else."""
    rng = random.Random(0)
    files = [saved(scene(), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]
    caught = 0
    for turn in range(700):
        data = bytearray(files[turn % len(files)])
        for _ in range(rng.choice([1, 5, 40])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            assert decode(bytes(data)).mode == "RGB"
        except BadImage:
            caught += 1
    assert caught > 200


def test_damage_inside_a_jpeg_is_noticed_more_often_than_pillow_does():
    rng, ours, theirs = random.Random(1), 0, 0
    for turn in range(100):
        data = bytearray(jpeg(turn, side=128))
        for _ in range(10):
            data[rng.randrange(300, len(data))] = rng.randrange(256)
        try:
            decode(bytes(data))
        except BadImage:
            ours += 1
        try:
            Image.open(io.BytesIO(data)).load()
        except OSError:
            theirs += 1
    assert ours > 60 > 2 * theirs


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that says it is enormous."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    with pytest.raises(BadImage, match=r"60,000 × 60,000 pixels are refused as a decompression bomb"):
        header(bomb(60_000))


def test_formats_that_run_programs_are_not_opened():
    with pytest.raises(BadImage, match="not an image of a known kind"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\nshowpage\n")


def test_rgb_leaves_rgb_alone():
    image = scene()
    assert rgb(image) is image
