"""Unusual images become RGB, broken ones one sentence. All files come from real encoders."""

import io
import random
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from m1clip.config import Preprocess
from m1clip.decode import BadImage, count_scans, decode, read_header, supports_heic
from m1clip.images import preprocess
from photos import SCENES, jpeg


def encode(image: Image.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def scene(mode: str = "RGB") -> Image.Image:
    return SCENES.image(7).resize((96, 64)).convert(mode)


def mean_difference(image: Image.Image, other: Image.Image) -> float:
    a, b = (np.asarray(each.convert("RGB"), dtype=float) for each in (image, other))
    return float(np.abs(a - b).mean())


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_every_common_format_is_read(format):
    image = decode(encode(scene(), format))
    assert (image.mode, image.size) == ("RGB", (96, 64))
    assert mean_difference(image, scene()) < 8


@pytest.mark.parametrize(
    ("mode", "format"), [("CMYK", "JPEG"), ("L", "JPEG"), ("1", "PNG"), ("P", "PNG"), ("CMYK", "TIFF")]
)
def test_other_color_modes_become_rgb(mode, format):
    image = decode(encode(scene(mode), format))
    assert image.mode == "RGB"
    assert mean_difference(image, scene(mode)) < 12


def test_sixteen_bits_are_scaled_and_not_clipped():
    grey = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    image = np.asarray(decode(encode(Image.fromarray(grey), "PNG")))[..., 0]
    assert np.abs(image.astype(int) - grey // 257).max() <= 1


def test_transparency_becomes_white():
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 16, 32))
    decoded = decode(encode(image, "PNG"))
    assert decoded.getpixel((5, 5)) == (255, 0, 0)
    assert decoded.getpixel((30, 5)) == (255, 255, 255)
    palette = image.quantize(8)
    decoded = decode(encode(palette, "PNG", transparency=palette.getpixel((30, 5))))
    assert decoded.getpixel((30, 5)) == (255, 255, 255)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied_once(format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(scene(), format, exif=exif)
    expected = preprocess(Image.open(io.BytesIO(data)), Preprocess(48))  # by Pillow's exif_transpose
    assert np.abs(preprocess(decode(data), Preprocess(48)).astype(int) - expected).max() <= 2


def test_the_first_frame_of_an_animation_is_decoded():
    data = encode(scene(), "GIF", save_all=True, append_images=[Image.new("RGB", (96, 64))] * 3)
    assert mean_difference(decode(data), scene()) < 8


@pytest.mark.skipif(not supports_heic(), reason="pillow-heif is not installed: pip install 'm1clip[heic]'")
def test_heic_is_read():
    assert mean_difference(decode(encode(scene(), "HEIF", quality=90)), scene()) < 8


def test_heic_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("m1clip.decode.supports_heic", lambda: False)
    with pytest.raises(BadImage, match=r"pip install 'm1clip\[heic\]'"):
        decode(b"\0\0\0\x18ftypheic" + bytes(100))


def test_a_large_jpeg_is_decoded_at_a_smaller_scale():
    data = encode(SCENES.image(3).resize((1600, 1200)), "JPEG", quality=95)
    small = decode(data, 2 * 64)
    assert 128 <= min(small.size) < 300
    assert np.abs(preprocess(small, Preprocess(64)).astype(int) - preprocess(decode(data), Preprocess(64))).mean() < 1


@pytest.mark.parametrize("part", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_file_is_detected(part, format):
    data = encode(scene(), format)
    with pytest.raises(BadImage):
        decode(data[: int(len(data) * part)])


def test_the_kind_of_damage_is_reported():
    for data, kind in (
        (b"", "empty file"),
        (b"not an image at all", "unreadable"),
        (b"<html>404</html>", "unreadable"),
        (jpeg(1)[:500], "truncated"),
        (encode(Image.new("RGB", (1, 1)), "PNG"), "tiny"),
    ):
        with pytest.raises(BadImage) as caught:
            decode(data)
        assert caught.value.kind == kind


def test_random_bytes_give_an_image_or_bad_image_and_nothing_else():
    rng = random.Random(0)
    files = [encode(scene(), format) for format in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")]
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


def test_damage_inside_a_jpeg_is_detected_more_often_than_by_pillow():
    rng, ours, theirs = random.Random(1), 0, 0
    for turn in range(100):
        data = bytearray(jpeg(turn, size=128))
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


def decompression_bomb(size: int) -> bytes:
    """A PNG of a few bytes with an enormous size in its header."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_a_decompression_bomb_is_refused_before_it_is_decoded():
    with pytest.raises(BadImage, match=r"60,000 × 60,000 pixels are refused as a decompression bomb"):
        read_header(decompression_bomb(60_000))


def test_formats_that_run_programs_are_not_opened():
    with pytest.raises(BadImage, match="not an image of a known format"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\nshowpage\n")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "CMYK"])
def test_a_huge_image_is_reduced_to_no_less_than_the_minimum_and_looks_the_same(mode, monkeypatch):
    monkeypatch.setattr("m1clip.decode.HUGE", 100_000)
    image = SCENES.image(5).resize((700, 500)).convert("RGB")
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.linear_gradient("L").resize((700, 500)))
    data = encode(image.convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    whole, reduced = decode(data), decode(data, 120)
    assert (whole.size, reduced.size, reduced.mode) == ((700, 500), (175, 125), "RGB")
    expected = np.asarray(whole.resize((35, 25), Image.Resampling.BOX), dtype=float)
    assert np.abs(np.asarray(reduced.resize((35, 25), Image.Resampling.BOX)) - expected).max() <= 3


def test_a_transparent_color_is_not_averaged(monkeypatch):
    monkeypatch.setattr("m1clip.decode.HUGE", 10_000)
    pixels = np.where(np.indices((200, 200)).sum(0)[..., None] % 2, np.uint8([0, 0, 0]), np.uint8([255, 0, 0]))
    data = encode(Image.fromarray(pixels.astype(np.uint8)), "PNG", transparency=(0, 0, 0))
    assert np.asarray(decode(data, 50)).mean((0, 1)) == pytest.approx([255, 127.5, 127.5], abs=1)


def test_decoding_in_threads_leaves_the_warnings_and_limits_of_the_program_alone():
    filters, limit = list(warnings.filters), Image.MAX_IMAGE_PIXELS
    files = [jpeg(0), encode(scene(), "PNG"), encode(scene(), "TIFF")] * 30
    with ThreadPoolExecutor(8) as pool:
        sizes = [image.size for image in pool.map(decode, files)]
    assert sizes == [(48, 48), (96, 64), (96, 64)] * 30
    assert (list(warnings.filters), Image.MAX_IMAGE_PIXELS) == (filters, limit)


def test_a_jpeg_of_very_many_scans_is_refused():
    data = encode(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    assert count_scans(data) <= 12
    decode(data)
    with pytest.raises(BadImage, match="more than 50 scans"):
        decode(data[:-2] + 60 * scan + data[-2:])
