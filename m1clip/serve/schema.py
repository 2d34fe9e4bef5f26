"""The responses, as the OpenAPI schema publishes them."""

from typing import Any, Literal

from pydantic import BaseModel, Field

JSON_OBJECT = {"application/json": {"schema": {"type": "object"}}}
TEXT = {"text/plain": {"schema": {"type": "string"}}}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "What is wrong, as one sentence.", "content": {**JSON_OBJECT, **TEXT}},
    429: {"description": "Too many requests or wrong tokens; try again later.", "content": {**JSON_OBJECT, **TEXT}},
}


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class CohereEmbeddings(BaseModel):
    floats: list[list[float]] | None = Field(None, alias="float")
    base64: list[str] | None = None
    int8: list[list[int]] | None = None
    uint8: list[list[int]] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereResponse(BaseModel):
    response_type: Literal["embeddings_by_type"]
    id: str
    embeddings: CohereEmbeddings
    texts: list[str]
    meta: dict[str, Any]


class LabelScore(BaseModel):
    score: float
    label: str


class SearchResult(BaseModel):
    row: int
    path: str
    score: float


class SearchResults(BaseModel):
    object: Literal["list"]
    data: list[SearchResult]
    model: str


class ImmichResponse(BaseModel):
    clip: str
    imageHeight: int | None = None
    imageWidth: int | None = None


class ServedModel(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    dimensions: int
    context_length: int
    image_size: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ServedModel]


class Health(BaseModel):
    status: Literal["ok"]
