"""The application: its endpoints and its errors."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar, get_type_hints

from fastapi import FastAPI, File, Form, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from m1clip.model.classify import Floats
from m1clip.serve import ENCODER_BATCH, schema
from m1clip.serve.dialects import (
    CohereRequest,
    EmbeddingRequest,
    ImageSource,
    Input,
    SearchRequest,
    ZeroShotRequest,
    parse_body,
    parse_immich,
    to_json,
    zero_shot_response,
)
from m1clip.serve.engine import Engine, truncate_rows
from m1clip.serve.errors import RequestError
from m1clip.serve.metrics import Metrics
from m1clip.serve.middleware import LineWriter, RequestMiddleware
from m1clip.web.access import Access, AccessMiddleware, published_app

T = TypeVar("T")
# The shape of an error on the paths of other servers than OpenAI's.
ERROR_SHAPES: dict[str, Callable[[str], Any]] = {
    "/v2/embed": lambda message: {"message": message},
    "/predict": lambda message: {"detail": message},
    "/v1/classify": lambda message: {"error": message},
    "/": lambda message: {"error": message},
}


@dataclass(frozen=True)
class SearchHit:
    row: int
    path: str  # relative to the folder that was indexed
    score: float


class SearchIndex(Protocol):
    def search(self, query_E: Floats, top_k: int) -> list[SearchHit]:
        """The best images of an index, the best first."""


class JsonRoute(APIRoute):
    """A route whose endpoint takes the request and a body, which pydantic validates, and returns JSON.

    FastAPI reads the published schema from the endpoint. Its dependencies, exit stacks and serialization are left out:
    they take half of the time of a small request.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any):
        super().__init__(path, endpoint, **options)
        self.app, self.kind = self.answer, get_type_hints(endpoint)["body"]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body: bytes = await self.endpoint(request, parse_body(self.kind, await read_body(receive)))
        except (HTTPException, ClientDisconnect) as error:
            response = await answer_error(request, error)
            return await response(scope, receive, send)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive) -> bytes:
    parts, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


class DirectRoutes:
    """Leads to the JSON routes directly, and to all others through FastAPI, whose layers take 50 µs of a request.

    HEAD, which FastAPI refuses, is answered as GET, whose body uvicorn leaves out: health checks send it.
    """

    def __init__(self, app: ASGIApp, routes: Mapping[str, JsonRoute]):
        self.app, self.routes = app, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.routes.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if route is None:
            asked = {**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope
            await self.app(asked, receive, send)
            scope["route"] = asked.get("route")
            return
        scope["route"] = route
        await route.answer(scope, receive, send)


class Service:
    """The endpoints, as methods."""

    def __init__(self, engine: Engine, name: str, metrics: Metrics, index: SearchIndex | None = None):
        self.engine, self.name, self.metrics, self.index = engine, name, metrics, index
        self.created = int(time.time())

    async def embed(self, request: Request, inputs: list[Input]) -> tuple[Floats, int]:
        request.scope["items"] = len(inputs)  # for the access log
        embedding = self.engine.embed(inputs)
        will_wait = len(inputs) + self.engine.texts.queued + self.engine.pending_images > ENCODER_BATCH
        return await (unless_disconnected(request, embedding) if will_wait else embedding)

    async def openai(self, request: Request, body: EmbeddingRequest) -> bytes:
        """Embeddings in the formats of OpenAI, infinity (`modality`), Jina (objects) and vLLM (`messages`)."""
        rows_BE, tokens = await self.embed(request, body.to_inputs())
        return body.to_response(truncate_rows(rows_BE, body.dimensions), tokens, self.name)

    async def cohere(self, request: Request, body: CohereRequest) -> bytes:
        """Embeddings in the format of Cohere."""
        rows_BE, tokens = await self.embed(request, body.to_inputs())
        return body.to_response(truncate_rows(rows_BE, body.output_dimension), tokens, self.name)

    async def classify(self, request: Request, body: ZeroShotRequest) -> bytes:
        """Zero-shot classification of an image, in the format of Hugging Face."""
        classifier = await self.engine.classifier(body.parameters.labels, body.parameters.hypothesis_template)
        rows_BE, _ = await self.embed(request, [ImageSource(body.inputs)])
        return zero_shot_response(classifier, rows_BE)

    async def search(self, request: Request, body: SearchRequest) -> bytes:
        """The images of the index that fit a text or an image best."""
        if self.index is None:
            raise RequestError(404, "this server has no index: start it with --search DIR")
        rows_BE, _ = await self.embed(request, body.to_inputs())
        hits = await asyncio.to_thread(self.index.search, rows_BE[0], body.top_k)
        return to_json({"object": "list", "data": list(map(asdict, hits)), "model": self.name})

    async def predict(
        self,
        request: Request,
        entries: Annotated[str, Form(description='{"clip": {"visual": {…}}} or {"clip": {"textual": {…}}}')],
        text: Annotated[str | None, Form()] = None,
        image: Annotated[UploadFile | None, File()] = None,
    ) -> Response:
        """The embedding of one text or image, in the format of immich's machine learning server."""
        kind, answer = parse_immich(entries), dict[str, Any]()
        if (text if kind == "textual" else image) is None:
            raise RequestError(422, f"{kind} needs {'text' if kind == 'textual' else 'image'}")
        if image is not None and kind == "visual":
            data = await image.read()
            answer["imageWidth"], answer["imageHeight"] = await self.engine.image_size(data)
            rows_BE, _ = await self.embed(request, [ImageSource(data)])
        else:
            rows_BE, _ = await self.embed(request, [text or ""])
        answer["clip"] = to_json(rows_BE[0]).decode()
        return Response(to_json(answer), media_type="application/json")

    async def models(self) -> schema.ModelList:
        """The model that is served, as a list."""
        return schema.ModelList(object="list", data=[self.served])

    async def model(self, name: str) -> schema.ServedModel:
        """The model that is served."""
        if name != self.name:
            raise RequestError(404, f"the model of this server is {self.name}", "model")
        return self.served

    @property
    def served(self) -> schema.ServedModel:
        config = self.engine.model.config
        return schema.ServedModel(
            id=self.name,
            object="model",
            created=self.created,
            owned_by="m1clip",
            dimensions=config.embed_dim,
            context_length=config.text.context_length,
            image_size=config.vision.image_size,
        )

    async def health(self) -> schema.Health:
        """Whether requests are answered: not before both encoders are loaded."""
        return schema.Health(status="ok")

    async def ping(self) -> str:
        """As immich asks."""
        return "pong"

    async def figures(self) -> Response:
        """Requests, batches, queues, memory: the text format of Prometheus."""
        return PlainTextResponse(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def embedding_app(
    service: Service, access: Access, log: LineWriter | None = None, on_start: Callable[[], None] = lambda: None
) -> ASGIApp:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        on_start()
        yield
        service.engine.close()
        if log is not None:
            log.flush()

    limits = service.engine.limits
    MultiPartParser.spool_max_size = limits.max_bytes  # in memory, not in a temporary file
    app = published_app("m1clip serve", access, lifespan=lifespan)
    add_routes(app, service)
    for kind in (HTTPException, RequestValidationError, ClientDisconnect):
        app.add_exception_handler(kind, answer_error)
    routes = {route.path: route for route in app.routes if isinstance(route, JsonRoute)}
    return RequestMiddleware(AccessMiddleware(DirectRoutes(app, routes), access), limits, service.metrics, log)


def add_routes(app: FastAPI, service: Service) -> None:
    def post(path: str, endpoint: Callable[..., Any], response: Any, route: type[APIRoute] = JsonRoute) -> None:
        options: dict[str, Any] = {"response_model": response, "responses": schema.ERRORS}
        app.router.add_api_route(path, endpoint, methods=["POST"], route_class_override=route, **options)

    post("/v1/embeddings", service.openai, schema.EmbeddingList)
    post("/embeddings", service.openai, schema.EmbeddingList)
    post("/v2/embed", service.cohere, schema.CohereResponse)
    post("/v1/classify", service.classify, list[schema.LabelScore])
    post("/", service.classify, list[schema.LabelScore])
    post("/v1/search", service.search, schema.SearchResults)
    post("/predict", service.predict, schema.ImmichResponse, APIRoute)
    app.get("/v1/models", responses=schema.ERRORS)(service.models)
    app.get("/v1/models/{name}", responses=schema.ERRORS)(service.model)
    app.get("/health", responses=schema.ERRORS)(service.health)
    app.get("/ping", response_class=PlainTextResponse, responses=schema.ERRORS)(service.ping)
    app.get("/metrics", response_class=PlainTextResponse, responses=schema.ERRORS)(service.figures)
    for path in ("/", "/docs"):
        app.get(path, response_class=HTMLResponse, include_in_schema=False)(lambda: docs_page(app, service.name))


def docs_page(app: FastAPI, model: str) -> str:
    """The published schema as one page, which loads nothing."""
    from jinja2 import Environment  # slow to import, and seldom needed

    page = Environment(autoescape=True).from_string((Path(__file__).parent / "docs.html").read_text())
    return page.render(schema=app.openapi(), model=model)


async def answer_error(request: Request, error: Exception) -> Response:
    """One sentence, in the format of the server that the client expects."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        reason = "needs a file" if first["type"] == "value_error" else first["msg"]  # a form field has no others
        error = RequestError(422, f"{'.'.join(map(str, first['loc'][1:]))}: {reason}")
    if not isinstance(error, HTTPException):  # the client has gone, and nobody reads the response
        return Response(status_code=499)
    message, shape = str(error.detail), ERROR_SHAPES.get(request.scope["path"])
    body = shape(message) if shape else openai_error(error, message)
    return Response(to_json(body), error.status_code, error.headers, "application/json")


def openai_error(error: HTTPException, message: str) -> dict[str, Any]:
    kind = "rate_limit_error" if error.status_code == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": getattr(error, "param", None), "code": None}}


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled when the client closes the connection."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
