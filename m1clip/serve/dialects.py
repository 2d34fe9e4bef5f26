"""Requests and responses of other servers: OpenAI, infinity, Jina, vLLM, Cohere, Hugging Face and immich.

Each request becomes one list of inputs (texts, token ids, images), and the embeddings become each server's response.
"""

import time
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from m1clip.model.classify import Classifier, Floats
from m1clip.serve.errors import RequestError

T = TypeVar("T")
MAX_TOP_K = 1000
MAX_ITEMS = 100_000  # of a list; --max-batch is at most as many
MAX_VALUES = 1_000_000  # of a body: 31 MB of {"text": 1} became 8 GB of Python objects and their errors
Uri = Annotated[str, Field(description="data URI, base64, or URL where the server allows them")]
Name = Annotated[str, StringConstraints(max_length=500)]
Items = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A file, or text: data URI, base64 or URL."""

    data: str | bytes


Input = str | list[int] | ImageSource  # a text, token ids without start and end, or an image


class Request(BaseModel):
    """Other fields are ignored: every server has its own. `model` is, too: there is one."""

    model_config = ConfigDict(strict=True)  # "5" is no number, as the published schema says
    model: Name | None = None


class ImageUrl(BaseModel):
    url: Uri


class Content(BaseModel):
    """A part of a message of vLLM, or of an input of Cohere."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | Uri | None = None

    def to_input(self) -> Input:
        value = self.text if self.type == "text" else self.image_url
        if value is None:
            raise RequestError(400, f"content of type {self.type} needs a field {self.type}", "content")
        if self.type == "text":
            return str(value)
        return ImageSource(value.url if isinstance(value, ImageUrl) else value)


class Message(BaseModel):
    role: Name = "user"
    content: str | Items[Content]


class JinaItem(BaseModel):
    text: str | None = None
    image: Uri | None = None

    def to_input(self) -> Input:
        return either("text", self.text, "image", self.image)


class EmbeddingRequest(Request):
    """OpenAI's request; `modality` is infinity's, objects in `input` are Jina's, `messages` are vLLM's."""

    input: Annotated[
        str | Items[str] | Items[int] | Items[Items[int]] | JinaItem | Items[JinaItem | str] | None,
        Field(description='a text, a list of texts, token ids, or objects {"text": …} or {"image": …}'),
    ] = None
    messages: Items[Message] | None = None
    modality: Literal["text", "image"] = "text"
    encoding_format: Literal["float", "base64"] | None = None
    embedding_type: Annotated[Literal["float", "base64"] | None, Field(description="Jina's encoding_format")] = None
    dimensions: Annotated[int | None, Field(ge=1, le=65_536)] = None

    def to_inputs(self) -> list[Input]:
        if (self.input is None) == (self.messages is None):
            raise RequestError(400, "a request needs either input or messages", "input")
        if self.messages is not None:
            return [one_part([part for message in self.messages for part in message_parts(message)], "messages")]
        given = self.input
        is_one = isinstance(given, str | JinaItem) or is_ids(given)
        inputs = [each.to_input() if isinstance(each, JinaItem) else each for each in ([given] if is_one else given)]  # type: ignore[union-attr]
        if self.modality == "text":
            return inputs  # type: ignore[return-value]
        if not all(isinstance(each, str) for each in inputs):
            raise RequestError(400, "with modality image, input must be data URIs", "input")
        return [ImageSource(each) for each in inputs if isinstance(each, str)]

    def to_response(self, rows_BE: Floats, tokens: int, model: str) -> bytes:
        encoded = encode_rows(rows_BE, self.embedding_type or self.encoding_format or "float")
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return to_json({"object": "list", "data": data, "model": model, "usage": usage})


def either(text_field: str, text: str | None, image_field: str, image: str | None) -> Input:
    if text is not None and image is None:
        return text
    if image is not None and text is None:
        return ImageSource(image)
    raise RequestError(400, f"an object needs either {text_field} or {image_field}", text_field)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int)


def message_parts(message: Message) -> list[Input]:
    content = message.content
    return [content] if isinstance(content, str) else [part.to_input() for part in content]


def one_part(parts: Sequence[Input], param: str) -> Input:
    if len(parts) != 1:
        raise RequestError(400, f"{param} must have one text or one image, not {len(parts)} parts", param)
    return parts[0]


class CohereInput(BaseModel):
    content: Items[Content]


class CohereRequest(Request):
    """Cohere's /v2/embed."""

    texts: Items[str] | None = None
    images: Items[Uri] | None = None
    inputs: Items[CohereInput] | None = None
    embedding_types: Items[Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]] | None = None
    output_dimension: Annotated[int | None, Field(ge=1, le=65_536)] = None

    def to_inputs(self) -> list[Input]:
        if sum(each is not None for each in (self.texts, self.images, self.inputs)) != 1:
            raise RequestError(400, "a request needs one of texts, images and inputs", "texts")
        if self.inputs is not None:
            return [one_part([part.to_input() for part in each.content], "content") for each in self.inputs]
        return [*(self.texts or ()), *map(ImageSource, self.images or ())]

    def to_response(self, rows_BE: Floats, tokens: int, model: str) -> bytes:
        kinds = dict.fromkeys(self.embedding_types or ["float"])
        embeddings = {kind: encode_rows(rows_BE, kind) for kind in kinds}
        units = {"input_tokens": tokens} if tokens else {"images": len(rows_BE)}
        meta = {"api_version": {"version": "2"}, "billed_units": units}
        response = {"response_type": "embeddings_by_type", "id": f"m1clip-{time.time_ns():x}", "embeddings": embeddings}
        return to_json({**response, "texts": self.texts or [], "meta": meta})


class ZeroShotParameters(BaseModel):
    candidate_labels: Annotated[Items[str] | str, Field(description="labels, as a list or with commas between them")]
    hypothesis_template: Annotated[str | None, StringConstraints(max_length=1000)] = None

    @property
    def labels(self) -> list[str]:
        labels = self.candidate_labels
        return [label.strip() for label in (labels.split(",") if isinstance(labels, str) else labels)]


class ZeroShotRequest(Request):
    """Hugging Face's zero-shot image classification."""

    inputs: Uri
    parameters: ZeroShotParameters


def zero_shot_response(classifier: Classifier, rows_BE: Floats) -> bytes:
    (result,) = classifier.classify(rows_BE, len(classifier.labels))
    return to_json([{"score": score, "label": label} for label, score in result.top])


class SearchRequest(Request):
    query: str | None = None
    image: Uri | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 10

    def to_inputs(self) -> list[Input]:
        return [either("query", self.query, "image", self.image)]


def parse_immich(entries: str) -> Literal["visual", "textual"]:
    """Which encoder a `/predict` of immich asks for: {"clip": {"visual": {"modelName": …}}}."""
    try:
        value = orjson.loads(entries)
        (task,), (kinds,) = value.keys(), value.values()
        (kind,) = kinds
    except (orjson.JSONDecodeError, AttributeError, TypeError, ValueError):
        task = kind = None
    if task != "clip" or kind not in ("visual", "textual"):
        raise RequestError(422, 'entries must be {"clip": {"visual": …}} or {"clip": {"textual": …}}', "entries")
    return "visual" if kind == "visual" else "textual"


def encode_rows(rows_BE: Floats, kind: str) -> Any:
    """Floats as they are, base64 of little-endian float32, bytes up to ±127 in each row, or one bit for each sign."""
    if kind == "float":
        return list(rows_BE)
    if kind == "base64":
        return [b64encode(row_E.astype("<f4", copy=False).tobytes()).decode() for row_E in rows_BE]
    if kind in ("int8", "uint8"):
        bytes_BE = np.rint(rows_BE * (127 / abs(rows_BE).max(axis=1, keepdims=True).clip(min=1e-12)))
        return list(bytes_BE.astype(np.int8) if kind == "int8" else (bytes_BE + 128).astype(np.uint8))
    bits = np.packbits(rows_BE > 0, axis=1)
    return list(bits) if kind == "ubinary" else list((bits.astype(np.int16) - 128).astype(np.int8))


def to_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def parse_body(kind: type[BaseModel], body: bytes) -> BaseModel:
    if len(body) > MAX_VALUES and sum(map(body.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestError(413, f"the body has more than {MAX_VALUES:,} values")
    try:
        return kind.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    except ValidationError as error:
        raise explain(kind, error) from None


def explain(kind: type[BaseModel], error: ValidationError) -> RequestError:
    """What is wrong, and the field it is wrong in. Where a field may have several types, its description says which."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    names = [str(part) for part in errors[0]["loc"]]
    if not names:
        return RequestError(400, f"the body must be an object: {errors[0]['msg']}")
    if any(each["type"] == "too_long" for each in errors):
        return RequestError(413, f"{names[0]} has a list of more than {MAX_ITEMS:,} items", names[0])
    description = kind.model_fields[names[0]].description if names[0] in kind.model_fields else None
    if len(errors) > 1 and description:
        return RequestError(400, f"{names[0]} must be {description}", names[0])
    return RequestError(400, f"{'.'.join(names)}: {errors[0]['msg']}", names[0])
