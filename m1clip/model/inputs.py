"""Images and texts as callers have them: one or many, files or pixels, read lazily and in batches. No torch."""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import islice
from operator import length_hint
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard, TypeVar, Union

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from m1clip.config import Preprocess, require
from m1clip.decode import DECODE_ERRORS, MAX_BYTES, decode
from m1clip.images import Pixels, preprocess

if TYPE_CHECKING:
    from torch import Tensor

ImageInput = Union[str, os.PathLike[str], bytes, bytearray, memoryview, BinaryIO, Image.Image, NDArray[Any], "Tensor"]
ENCODED = (str, os.PathLike, bytes, bytearray, memoryview)  # files, still to be decoded
# Large JPEGs are decoded at this multiple of the image size or more. With 4, embeddings of 20 photographs have a
# minimum cosine of 0.99995 to those of full decoding, with 2 of 0.9976 (nano); 12 megapixels for 224 px are decoded
# and resized 4 times as fast as in full.
DECODE_SCALE = 4
THREADS = min(4, os.cpu_count() or 1)
T = TypeVar("T")
R = TypeVar("R", bound=Sized)  # rows of embeddings: a tensor or an array
Reading = tuple[int, Pixels | Future[Pixels]]  # position of an image, and its pixels or their decoding
OnError = Callable[[int, Exception], None]  # position of an image that cannot be read, and the reason


def is_tensor(value: Any) -> "TypeGuard[Tensor]":
    """Whether it is a tensor of PyTorch, which need not be imported: without it nothing is one."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def list_images(images: Any) -> Iterable[ImageInput]:
    """The images of an iterable or of one array with a batch axis; anything else is a list of one."""
    is_pixels = is_tensor(images) or (isinstance(images, np.ndarray) and images.dtype.kind not in "OU")
    is_batch = images.ndim > 3 if is_pixels else hasattr(images, "__iter__") or hasattr(images, "__getitem__")
    is_one = isinstance(images, (*ENCODED, Image.Image)) or hasattr(images, "read")
    return images if is_batch and not is_one else [images]


def image_batches(
    images: Iterable[ImageInput], settings: Preprocess, batch_size: int, on_error: OnError | None = None
) -> Generator[tuple[list[int], Pixels]]:
    """Positions and pixels (B, size, size, 3) as in training.

    While one batch is encoded, threads decode the files of the next. An image that cannot be read is an error, or
    is left out if `on_error` takes it.
    """
    pending = deque[Reading]()
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for index, image in enumerate(images):
                # Pixels are copied at once: a generator may reuse its buffer or close its image.
                is_file = isinstance(image, ENCODED)
                arguments = (index, image, settings)
                reading = pool.submit(read_image, *arguments) if is_file else read_image(*arguments)
                pending.append((index, reading))
                if len(pending) == 2 * batch_size:
                    yield from take_batch(pending, batch_size, on_error)
            while pending:
                yield from take_batch(pending, batch_size, on_error)
        finally:
            pool.shutdown(cancel_futures=True)


def take_batch(
    pending: deque[Reading], batch_size: int, on_error: OnError | None
) -> Generator[tuple[list[int], Pixels]]:
    """The next batch; none if all its images were left out."""
    positions, images = list[int](), list[Pixels]()
    for index, image in (pending.popleft() for _ in range(min(batch_size, len(pending)))):
        try:
            images.append(image.result() if isinstance(image, Future) else image)
            positions.append(index)
        except (OSError, ValueError) as error:
            if on_error is None:
                raise
            on_error(index, error)
    if images:
        yield positions, np.stack(images)


def read_image(index: int, image: ImageInput, settings: Preprocess) -> Pixels:
    """One image as the vision tower sees it; errors name it."""
    path = image if isinstance(image, str | os.PathLike) else getattr(image, "filename", "")
    name = f"image {index} ({os.fspath(path)})" if path else f"image {index}"
    try:
        return preprocess(open_image(image, DECODE_SCALE * settings.size), settings)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    except OSError as error:
        raise type(error)(f"{name}: {error.strerror or error}") from None
    except DECODE_ERRORS as error:
        raise ValueError(f"{name}: {error}") from None


def open_image(image: ImageInput, min_size: int) -> Image.Image:
    if isinstance(image, Image.Image):
        return image
    image = image.read(MAX_BYTES + 1) if hasattr(image, "read") else image  # an open file
    if isinstance(image, bytes | bytearray | memoryview):
        require(len(image) <= MAX_BYTES, "too many bytes for an image")
        return decode(bytes(image), min_size)
    if isinstance(image, str | os.PathLike):
        with open(image, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            require(size <= MAX_BYTES, f"{size:,} bytes are too many for an image")
            return decode(file.read(size), min_size)
    if is_tensor(image):
        pixels = image.detach().cpu()
        pixels = pixels.float() if pixels.is_floating_point() else pixels  # NumPy has no bfloat16
        return pixels_to_image((pixels.movedim(0, -1) if image.ndim == 3 else pixels).numpy(), "(3, H, W)", image.shape)
    if isinstance(image, np.ndarray):
        return pixels_to_image(image, "(H, W, 3)", image.shape)
    raise TypeError(f"expected a path, bytes, PIL image, array or tensor, not {type(image).__name__}")


def pixels_to_image(pixels: NDArray[Any], expected: str, shape: tuple[int, ...]) -> Image.Image:
    """From (H, W), or (H, W, C) with 1, 3 or 4 channels: uint8, or float from 0 to 1."""
    is_image = pixels.size and (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4)))
    require(bool(is_image), f"expected pixels of shape {expected}, not {tuple(shape)}")
    if pixels.dtype.kind == "f":
        low, high = pixels.min(), pixels.max()
        require(low >= 0 and high <= 1, f"float pixels must be between 0 and 1, not {low:.3g} to {high:.3g}")
        pixels = (255 * pixels).round().astype(np.uint8)
    require(pixels.dtype == np.uint8, f"pixels must be uint8 or float, not {pixels.dtype}")
    return Image.fromarray(pixels.squeeze(2) if pixels.shape[2:] == (1,) else pixels)


def text_batches(texts: Iterable[str], batch_size: int) -> Generator[list[str]]:
    texts, start = iter(texts), 0
    while batch := list(islice(texts, batch_size)):
        check_texts(batch, start)
        start += len(batch)
        yield batch


def check_texts(texts: Sequence[str], start: int = 0) -> None:
    for index, text in enumerate(texts, start):
        if not isinstance(text, str):
            raise TypeError(f"text {index}: expected a string, not {type(text).__name__}")
        require(bool(text.strip()), f"text {index} is empty: {text!r}")


def fold_texts(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The distinct texts, the shortest first, and where each text is among them: batches need little padding."""
    check_texts(texts)
    distinct = sorted(set(texts), key=lambda text: (len(text), text))
    position = {text: index for index, text in enumerate(distinct)}
    return distinct, [position[text] for text in texts]


def encode_images(
    images: ImageInput | Iterable[ImageInput],
    encode: Callable[[Pixels], R],
    settings: Preprocess,
    batch_size: int,
    progress: bool,
) -> list[R]:
    """Embeddings of each batch of images."""
    require(batch_size >= 1, f"batch_size must be at least 1, not {batch_size}")
    items = list_images(images)
    batches = image_batches(items, settings, batch_size)
    return encode_batches(batches, lambda batch: encode(batch[1]), items, "encoding images" if progress else None)


def encode_texts(
    texts: str | Iterable[str], encode: Callable[[list[str]], R], batch_size: int, progress: bool
) -> tuple[list[R], list[int] | slice]:
    """Embeddings of each batch of texts, and which of their rows belong to the texts.

    Of a list, equal texts are encoded once and texts of similar length together; an iterator is read lazily.
    """
    require(batch_size >= 1, f"batch_size must be at least 1, not {batch_size}")
    items: Iterable[str] = [texts] if isinstance(texts, str) else texts
    rows: list[int] | slice = slice(None)
    if isinstance(items, Sequence):
        items, rows = fold_texts(items)
    batches = text_batches(items, batch_size)
    return encode_batches(batches, encode, items, "encoding texts" if progress else None), rows


def encode_batches(batches: Generator[T], encode: Callable[[T], R], items: Iterable[Any], bar: str | None) -> list[R]:
    """Embeddings of each batch; `bar` is the name of a progress bar over the items."""
    parts = list[R]()
    with ExitStack() as stack:
        stack.enter_context(closing(batches))
        advance = stack.enter_context(show_progress(bar, length_hint(items) or None)) if bar else None
        for batch in batches:
            parts.append(encode(batch))
            if advance:
                advance(len(parts[-1]))
    return parts


def show_progress(bar: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    from m1clip.console import Console  # imports rich, which most calls do not need

    return Console().progress(bar, total)
