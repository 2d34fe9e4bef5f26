"""What encode_image and encode_text accept: compared with the plain way, one PIL image or one string at a time."""

import io
import signal
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import Image

from m1clip.config import ModelConfig, Preprocess
from m1clip.console import Console
from m1clip.images import preprocess
from m1clip.model import inputs
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import Tokenizer
from photos import SCENES, jpeg, write_photos


@pytest.fixture
def model(tiny: ModelConfig) -> CLIP:
    torch.manual_seed(0)
    return CLIP(tiny, Tokenizer.characters()).eval()


def embed_one_by_one(model: CLIP, images: list[Image.Image]) -> torch.Tensor:
    """Without any of the code under test."""
    pixels = [torch.from_numpy(np.array(preprocess(image, Preprocess(32))))[None] for image in images]
    with torch.no_grad():
        return torch.cat([model.embed_images(model.normalize(one)) for one in pixels])


def assert_same(encoded: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(encoded, expected, rtol=0, atol=1e-5)


SCENE = SCENES.image(3).resize((50, 40))
PIXELS = np.asarray(SCENE)


@pytest.mark.parametrize(
    "image",
    [
        SCENE,
        PIXELS,
        (PIXELS / 255).astype(np.float32),
        PIXELS[:, ::-1][:, ::-1],  # negative strides
        torch.from_numpy(PIXELS.copy()).permute(2, 0, 1),
        torch.from_numpy(PIXELS.copy()).permute(2, 0, 1) / 255,
    ],
    ids=["PIL", "uint8 array", "float array", "view", "uint8 tensor", "float tensor"],
)
def test_an_image_in_memory_is_encoded_as_the_pil_image(model, image):
    assert_same(model.encode_image(image), embed_one_by_one(model, [SCENE]))


def test_a_file_is_encoded_as_its_path_its_name_and_its_bytes(model, tmp_path):
    (name,) = write_photos(tmp_path, 1)
    path = tmp_path / name
    with Image.open(path) as image:
        expected = embed_one_by_one(model, [image])
    for same in (path, str(path), path.read_bytes()):
        assert_same(model.encode_image(same), expected)


def test_files_are_decoded_upright_and_with_transparency_on_white(model):
    file, rotated = io.BytesIO(), SCENE.copy()
    rotated.getexif()[0x0112] = 6
    rotated.save(file, "PNG", exif=rotated.getexif())
    assert_same(model.encode_image(file.getvalue()), embed_one_by_one(model, [SCENE.rotate(-90, expand=True)]))
    transparent = np.zeros((20, 20, 4), np.uint8)
    assert_same(model.encode_image(transparent), embed_one_by_one(model, [Image.new("RGB", (20, 20), "white")]))


def test_gray_pixels_are_rgb_with_equal_channels(model):
    gray = PIXELS[:, :, 0]
    expected = embed_one_by_one(model, [Image.fromarray(gray)])
    for same in (gray, gray[..., None], torch.from_numpy(gray.copy()), torch.from_numpy(gray.copy())[None]):
        assert_same(model.encode_image(same), expected)


def test_many_images_come_in_any_iterable_and_keep_their_order(model, tmp_path):
    names = [str(tmp_path / name) for name in write_photos(tmp_path, 7)]
    opened = [Image.open(name) for name in names]
    expected = embed_one_by_one(model, opened)
    array = np.stack([np.asarray(image) for image in opened])
    for same in (names, tuple(names), np.array(names), opened, array, torch.from_numpy(array).permute(0, 3, 1, 2)):
        assert_same(model.encode_image(same, batch_size=3), expected)
    assert_same(model.encode_image((name for name in names), batch_size=2), expected)
    assert_same(model.encode_image([names[0], opened[1], array[2]]), expected[:3])


def test_nothing_gives_an_empty_result_of_the_right_kind(model):
    for empty in (model.encode_image([]), model.encode_text([]), model.encode_text(iter(()))):
        assert (empty.shape, empty.dtype, empty.device.type) == ((0, 24), torch.float32, "cpu")
    assert model.double().encode_image([]).dtype == torch.float64
    assert model.encode_image(np.zeros((0, 8, 8, 3), np.uint8)).shape == (0, 24)
    assert len(model.tokenize([])) == 0


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (jpeg(0)[:-200], "image 2: the file ends before the image does"),
        (b"", "image 2: the file is empty"),
        (b"no image", "image 2: not an image of a known format"),
        (np.zeros((3, 40, 50), np.uint8), r"image 2: expected pixels of shape \(H, W, 3\), not \(3, 40, 50\)"),
        (torch.zeros(40, 50, 3), r"image 2: expected pixels of shape \(3, H, W\), not \(40, 50, 3\)"),
        (np.zeros((0, 5, 3), np.uint8), "image 2: expected pixels of shape"),
        (np.full((9, 9, 3), 200.0), "image 2: float pixels must be between 0 and 1, not 200 to 200"),
        (torch.full((3, 9, 9), float("nan")), "image 2: float pixels must be between 0 and 1, not nan"),
        (np.zeros((9, 9, 3), np.int64), "image 2: pixels must be uint8 or float, not int64"),
    ],
)
def test_an_image_that_cannot_be_encoded_is_named_by_its_index(model, image, words):
    with pytest.raises(ValueError, match=words):
        model.encode_image([SCENE, PIXELS, image, SCENE])


def test_a_file_that_cannot_be_encoded_is_named_by_index_and_path(model, tmp_path):
    (tmp_path / "a.jpg").write_bytes(jpeg(0)[:-200])
    with pytest.raises(ValueError, match=r"image 1 \(.*a.jpg\): the file ends before the image does"):
        model.encode_image([SCENE, tmp_path / "a.jpg"])
    with pytest.raises(FileNotFoundError, match=r"image 0 \(gone.jpg\): No such file"):
        model.encode_image("gone.jpg")
    with pytest.raises(IsADirectoryError, match=r"image 0 \(.*\): Is a directory"):
        model.encode_image(tmp_path)
    truncated = Image.open(tmp_path / "a.jpg")  # Pillow decodes it when it is used
    with pytest.raises(OSError, match=r"image 0 \(.*a.jpg\): .*truncated"):
        model.encode_image(truncated)


def test_a_value_that_is_no_image_or_text_is_named_by_its_type(model):
    for wrong in (None, 5):
        with pytest.raises(TypeError, match="image 0: expected a path, bytes, PIL image, array or tensor, not"):
            model.encode_image(wrong)
    with pytest.raises(TypeError, match="image 1: expected a path"):
        model.encode_image([SCENE, {}])
    with pytest.raises(TypeError, match="text 3: expected a string, not int"):
        model.encode_text(["a", "b", "c", 4], batch_size=2)
    with pytest.raises(ValueError, match="text 2 is empty"):
        model.encode_text(["a", "b", " "], batch_size=2)
    for encode in (model.encode_image, model.encode_text):
        with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
            encode([], batch_size=0)


def test_texts_come_in_any_iterable(model):
    texts = ["a red cat", "a bus", "b", "a much longer caption than the others"]
    expected = torch.cat([model.encode_text(text) for text in texts])
    for same in (texts, tuple(texts), iter(texts), np.array(texts), dict.fromkeys(texts)):
        assert_same(model.encode_text(same, batch_size=3), expected)


def test_a_generator_is_read_at_most_two_batches_ahead(model, monkeypatch):
    taken, encoded = [], []

    def frames():
        buffer = np.zeros((8, 8, 3), np.uint8)  # reused, as video readers do
        for number in range(40):
            taken.append(number)
            buffer[:] = number
            yield buffer

    def embed_images(pixels_BCHW):
        encoded.extend(pixels_BCHW.tolist())
        assert len(taken) - len(encoded) <= 4
        return torch.ones(len(pixels_BCHW), 24)

    monkeypatch.setattr(model, "embed_images", embed_images)
    monkeypatch.setattr(model, "normalize", lambda images_BHWC: images_BHWC[:, 0, 0, 0])
    assert len(model.encode_image(frames(), batch_size=4)) == 40
    assert encoded == list(range(40))


def test_memory_does_not_grow_with_the_number_of_images(model, tmp_path):
    (name,) = write_photos(tmp_path, 1)

    def peak_of(count: int) -> int:
        tracemalloc.start()
        for _ in inputs.image_batches((tmp_path / name for _ in range(count)), Preprocess(64), 8):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    peak_of(8)
    assert peak_of(640) < 1.5 * peak_of(64)


def test_ctrl_c_ends_encoding_and_its_threads(model, tmp_path, monkeypatch):
    names = write_photos(tmp_path, 4) * 50
    read = []
    monkeypatch.setattr(inputs, "decode", lambda data, size: read.append(1) or SCENE)
    monkeypatch.setattr(model, "normalize", lambda images: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        model.encode_image([tmp_path / name for name in names], batch_size=8)
    assert len(read) <= 16


def test_progress_is_shown_on_stderr_with_a_total_if_there_is_one(model, monkeypatch):
    bars = []

    class Bar:
        def __init__(self, name, total):
            bars.append([name, total, 0])

        def __enter__(self):
            return lambda count: bars[-1].__setitem__(2, bars[-1][2] + count)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(Console, "progress", lambda console, name, total: Bar(name, total))
    model.encode_image([SCENE] * 5, batch_size=2, progress=True)
    model.encode_text((text for text in "abc"), progress=True)
    model.encode_text("abc")
    assert bars == [["encoding images", 5, 5], ["encoding texts", None, 3]]
