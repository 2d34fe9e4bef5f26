"""Texts, token ids and images to embeddings, for many requests at once."""

import asyncio
import binascii
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from m1clip.decode import DECODE_ERRORS, BadImage, decode, read_header
from m1clip.images import Pixels, preprocess
from m1clip.model.classify import Classifier, Floats, combine_prompts, prompt_texts
from m1clip.model.inputs import DECODE_SCALE
from m1clip.onnx_model import OnnxCLIP
from m1clip.prompts import NULL_PROMPTS, PLACEHOLDER, Prompts
from m1clip.serve import ENCODER_BATCH, Limits
from m1clip.serve.batching import BatchQueue
from m1clip.serve.dialects import ImageSource, Input
from m1clip.serve.errors import RequestError, busy

MAX_TEXT = 10_000  # characters or token ids
DECODERS = min(4, os.cpu_count() or 1)  # threads
CLASSIFIERS = 16  # that are kept
Fetch = Callable[[str], Coroutine[Any, Any, bytes]]
OnBatch = Callable[[str, int, float, int], None]  # encoder, items, seconds, and the items that wait


class Engine:
    """`fetch` downloads images; without it, URLs are refused."""

    def __init__(
        self, model: OnnxCLIP, limits: Limits, fetch: Fetch | None = None, on_batch: OnBatch = lambda *batch: None
    ):
        self.model, self.limits, self.fetch = model, limits, fetch
        self.texts = BatchQueue(self._encode_texts, ENCODER_BATCH, limits.max_queue, partial(on_batch, "text"))
        self.images = BatchQueue(self._encode_pixels, ENCODER_BATCH, limits.max_queue, partial(on_batch, "vision"))
        self.decoders = ThreadPoolExecutor(DECODERS)
        self.decoding = asyncio.Semaphore(2 * ENCODER_BATCH)  # images between their decoding and their embedding
        self.pending_images = 0
        self.classifiers = OrderedDict[tuple[str | None, ...], Classifier]()

    async def embed(self, inputs: Sequence[Input]) -> tuple[Floats, int]:
        """Unit vectors (B, E) in the order of the inputs, and the number of their tokens."""
        self.check(inputs)
        images = [each for each in inputs if isinstance(each, ImageSource)]
        texts = [each for each in inputs if not isinstance(each, ImageSource)] if images else inputs
        image_rows = iter(await self._embed_images(images) if images else ())
        encoded = await self.texts.run(texts) if texts else []  # type: ignore[arg-type]
        text_rows = (row_E for row_E, _ in encoded)
        rows = [next(image_rows if isinstance(each, ImageSource) else text_rows) for each in inputs]
        return np.array(rows), sum(tokens for _, tokens in encoded)

    def check(self, inputs: Sequence[Input]) -> None:
        if not inputs:
            raise RequestError(400, "there is nothing to embed: the list of inputs is empty", "input")
        if len(inputs) > self.limits.max_batch:
            given = f"{len(inputs):,} items in one request"
            raise RequestError(413, f"{given}; the limit is {self.limits.max_batch:,} (--max-batch)", "input")
        vocabulary, takes_ids = self.model.config.text.vocab_size, hasattr(self.model.tokenizer, "start_id")
        for index, each in enumerate(inputs):
            if isinstance(each, ImageSource):
                continue
            kind, unit = ("text", "characters") if isinstance(each, str) else ("list", "token ids")
            if len(each) > MAX_TEXT:
                raise RequestError(413, f"input {index} has {len(each):,} {unit}; the limit is {MAX_TEXT:,}", "input")
            if not (each.strip() if isinstance(each, str) else each):
                raise RequestError(400, f"input {index} is an empty {kind}", "input")
            if isinstance(each, str):
                continue
            if not takes_ids:
                raise RequestError(
                    400, "this model's tokenizer adds its own tokens: send texts, not token ids", "input"
                )
            if not all(0 <= number < vocabulary for number in each):
                wanted = f"0 to {vocabulary - 1:,}, of this model's own tokenizer"
                raise RequestError(400, f"input {index}: token ids must be {wanted}; or send texts", "input")

    def _encode_texts(self, items: list[str | list[int]]) -> list[tuple[Floats, int]]:
        tokenizer, length = self.model.tokenizer, self.model.config.text.context_length
        with encoder_errors():
            tokenized = iter(tokenizer.encode([each for each in items if isinstance(each, str)], length))
            ids = [next(tokenized) if isinstance(each, str) else self._enclose(each, length - 2) for each in items]
            return list(zip(self.model.embed_ids(ids), map(len, ids), strict=True))

    def _enclose(self, ids: list[int], length: int) -> list[int]:
        return [self.model.tokenizer.start_id, *ids[:length], self.model.tokenizer.end_id]

    async def _embed_images(self, images: Sequence[ImageSource]) -> list[Floats]:
        if self.pending_images + len(images) > self.limits.max_queue:
            raise busy(f"{self.pending_images:,} images are waiting", self.pending_images * self.images.item_s)
        self.pending_images += len(images)
        tasks = [asyncio.ensure_future(self._embed_image(index, image)) for index, image in enumerate(images)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            self.pending_images -= len(images)
            for task in tasks:
                task.cancel()

    async def _embed_image(self, index: int, image: ImageSource) -> Floats:
        async with self.decoding:
            data = image.data
            if isinstance(data, str) and data[:8].lower().startswith(("http://", "https://")):
                if self.fetch is None:
                    reason = "URLs are not fetched by this server (--allow urls); send the image as a data URI"
                    raise RequestError(400, f"image {index}: {reason}", "input")
                data = await self.fetch(data)
            pixels = await self._in_thread(self._read_pixels, index, data)
            (row_E,) = await self.images.run([pixels])
            return row_E

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function, *args)

    def _read_pixels(self, index: int, data: str | bytes) -> Pixels:
        settings = self.model.config.vision.preprocess
        try:
            content = data if isinstance(data, bytes) else decode_base64(data)
            return preprocess(decode(content, DECODE_SCALE * settings.size, self.limits.max_pixels), settings)
        except DECODE_ERRORS as error:
            raise bad_image(error, f"image {index}") from None

    async def image_size(self, data: bytes) -> tuple[int, int]:
        """Width and height, from the header of a file."""
        try:
            header = await self._in_thread(read_header, data, self.limits.max_pixels)
        except DECODE_ERRORS as error:
            raise bad_image(error, "image") from None
        width, height = header.size
        return width, height

    def _encode_pixels(self, items: list[Pixels]) -> list[Floats]:
        with encoder_errors():
            return list(self.model.embed_pixels(np.stack(items)))

    async def classifier(self, labels: Sequence[str], template: str | None) -> Classifier:
        """The classifier of these labels; those of the last requests are kept."""
        key = (template, *labels)
        if key not in self.classifiers:
            if template is not None and not PLACEHOLDER.search(template):
                raise RequestError(400, "hypothesis_template needs a {} for the label", "hypothesis_template")
            if len(labels) > self.limits.max_batch:
                raise RequestError(413, f"{len(labels):,} labels; the limit is {self.limits.max_batch:,} (--max-batch)")
            try:
                texts = prompt_texts(labels, Prompts() if template is None else Prompts((template,)))
            except ValueError as error:
                raise RequestError(400, str(error), "candidate_labels") from None
            prompts = [*chain.from_iterable(texts), *NULL_PROMPTS]
            if len(prompts) > self.limits.max_batch:
                given = f"{len(labels):,} labels have {len(prompts):,} prompts"
                raise RequestError(413, f"{given}; the limit is {self.limits.max_batch:,} (--max-batch)")
            encoded = await self.texts.run(prompts)
            text_PE = np.stack([row_E for row_E, _ in encoded])
            self.classifiers[key] = combine_prompts(labels, texts, text_PE, *self.model.scale_and_bias)
        while len(self.classifiers) > CLASSIFIERS:
            self.classifiers.popitem(last=False)
        self.classifiers.move_to_end(key)
        return self.classifiers[key]

    def close(self) -> None:
        for each in (self.texts, self.images):
            each.close()
        self.decoders.shutdown(cancel_futures=True)


@contextmanager
def encoder_errors() -> Iterator[None]:
    """Both encoders have been run before, so an error is about this input, or about memory."""
    try:
        yield
    except MemoryError:
        raise busy("there is not enough memory for this batch") from None
    except ValueError as error:
        raise RequestError(400, f"the input cannot be encoded: {str(error)[:300]}", "input") from None


def truncate_rows(rows_BE: Floats, dimensions: int | None) -> Floats:
    """The first `dimensions` of each vector, scaled to unit length again."""
    width = rows_BE.shape[1]
    if dimensions is None or dimensions == width:
        return rows_BE
    if dimensions > width:
        raise RequestError(400, f"dimensions must be at most {width}, not {dimensions}", "dimensions")
    rows_BE = rows_BE[:, :dimensions]
    return np.ascontiguousarray(rows_BE / np.linalg.norm(rows_BE, axis=1, keepdims=True).clip(min=1e-12))


def decode_base64(text: str) -> bytes:
    """The content of a data URI or of plain base64."""
    if text.startswith("data:"):
        kind, comma, text = text.partition(",")
        if not comma or not kind.endswith(";base64"):
            raise ValueError("a data URI must be data:image/…;base64,…")
    try:
        return binascii.a2b_base64(text)
    except binascii.Error as error:
        raise ValueError(f"neither a data URI nor base64 ({error})") from None


def bad_image(error: BaseException, name: str) -> RequestError:
    is_too_large = isinstance(error, BadImage) and error.kind == "refused"
    return RequestError(413 if is_too_large else 400, f"{name}: {str(error)[:300]}", "input")
