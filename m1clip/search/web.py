"""The search page: serves it, answers its queries as JSON, and its images by their rows. Writes only thumbnails."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect

from m1clip.onnx_model import OnnxCLIP
from m1clip.search.index import Index
from m1clip.search.query import MAX_QUERY
from m1clip.search.shared import Filters, LibraryFacts, NotInLibrary, SearchResults, SharedLibrary
from m1clip.web import SHARED_PAGE, Address
from m1clip.web.access import Access, secured_app
from m1clip.web.server import run_server
from m1clip.workers import usable_cores

PAGE = Path(__file__).parent / "page"
MAX_TOP_K, MAX_OFFSET = 200, 10_000
MAX_UPLOAD, UPLOAD_S, UPLOADS = 32_000_000, 60.0, 4  # bytes and seconds of an upload; uploads at a time
SEARCHES = 2  # at the same time: each uses several cores
FOREVER = "private, max-age=31536000, immutable"
DAY = r"^\d{4}-\d{2}-\d{2}$"
T = TypeVar("T")
Row = Annotated[int, Field(ge=0, le=2**53)]
Version = Annotated[str | None, Query(pattern=r"^[0-9a-f]{16}$", description="`version` of a result.")]
BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}
DETAIL = {"type": "string", "description": "One sentence."}
ERROR: dict[str, Any] = {"schema": {"type": "object", "properties": {"detail": DETAIL}, "required": ["detail"]}}
REASONS = {
    400: "The query cannot be used.",
    404: "No such image or folder, or its file is gone or has changed.",
    408: "The upload is too slow.",
    413: "The image is too large.",
    422: "A parameter is invalid.",
    503: "Too many requests; try again.",
}


class PageQuery(BaseModel):
    """What to search for, among which files. Without a text and a row: the newest."""

    q: Annotated[str, Field(max_length=MAX_QUERY, description='Such as `dog + 0.5 * "snow at night" - cat`.')] = ""
    like: Annotated[Row | None, Field(description="Row of an image that results should look like.")] = None
    folder: Annotated[str, Field(max_length=4096, description="Name of one of the library's folders.")] = ""
    first: Annotated[str | None, Field(alias="from", pattern=DAY, description="First day.")] = None
    last: Annotated[str | None, Field(alias="to", pattern=DAY, description="Last day, which is included.")] = None
    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET)] = 0
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] = 60


class ConcurrencyLimit:
    """Runs so many functions at a time. Other requests wait without a thread, and end when their client disconnects."""

    def __init__(self, count: int):
        self.free = asyncio.Semaphore(count)

    async def run(self, request: Request, function: Callable[..., T], *arguments: Any) -> T:
        async with self.free:
            if await request.is_disconnected():
                raise HTTPException(503, "the client is gone")
            try:
                return await run_in_threadpool(function, *arguments)
            except NotInLibrary as error:
                raise HTTPException(404, str(error)) from None
            except ValueError as error:
                raise HTTPException(400, str(error)) from None


def create_search_app(
    library: SharedLibrary, token: str | None = None, clock: Callable[[], float] = time.monotonic
) -> FastAPI:
    app = secured_app("m1clip search", Access(token, clock))
    app.add_exception_handler(RequestValidationError, explain_invalid)
    add_search_api(app, library)
    add_image_api(app, library)
    # Not a mount, which would also answer wrong methods of the API.
    app.router.default = StaticFiles(directory=PAGE, packages=[SHARED_PAGE], html=True)
    return app


async def explain_invalid(request: Request, error: Exception) -> Response:
    """One sentence in place of pydantic's list."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"[:300]}, 422)


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Of an operation, in the published schema."""
    return {status: {"description": REASONS[status], "content": {"application/json": ERROR}} for status in statuses}


def add_search_api(app: FastAPI, library: SharedLibrary) -> None:
    searches, uploads = ConcurrencyLimit(SEARCHES), asyncio.Semaphore(UPLOADS)

    async def answer(request: Request, query: PageQuery, upload: bytes | None = None) -> SearchResults:
        filters = Filters(query.folder, query.first, query.last)
        arguments = (query.q, query.like, upload, filters, query.offset, query.top_k)
        return await searches.run(request, library.search, *arguments)

    @app.get("/api/library", response_model=LibraryFacts, responses=errors(503))
    async def describe_library(request: Request) -> Any:
        return await searches.run(request, library.facts)

    @app.get("/api/search", response_model=SearchResults, responses=errors(400, 404, 422, 503))
    async def search(request: Request, query: Annotated[PageQuery, Query()]) -> Any:
        return await answer(request, query)

    @app.post(
        "/api/search",
        response_model=SearchResults,
        responses=errors(400, 404, 408, 413, 422, 503),
        openapi_extra={"requestBody": {"required": True, "content": {"image/*": BINARY}}},
    )
    async def search_by_image(request: Request, query: Annotated[PageQuery, Query()]) -> Any:
        """Images like the one in the body."""
        if uploads.locked():
            raise HTTPException(503, "too many uploads at the same time; try again", {"Retry-After": "2"})
        async with uploads:
            return await answer(request, query, await read_upload(request))


async def read_upload(request: Request) -> bytes:
    """The body of a request, bounded in size and time."""
    data, length = bytearray(), request.headers.get("content-length", "")
    too_large = HTTPException(413, f"an image may have {MAX_UPLOAD // 1_000_000} MB")
    if length.isdecimal() and (len(length) > 12 or int(length) > MAX_UPLOAD):
        raise too_large
    try:
        async with asyncio.timeout(UPLOAD_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_UPLOAD:
                    raise too_large
    except TimeoutError:
        raise HTTPException(408, "the upload is too slow") from None
    except ClientDisconnect:
        raise HTTPException(400, "the upload ended too early") from None
    return bytes(data)


def add_image_api(app: FastAPI, library: SharedLibrary) -> None:
    decoders = ConcurrencyLimit(usable_cores())

    @app.get(
        "/api/thumbnail/{row}",
        response_class=Response,
        responses={200: {"content": {"image/jpeg": BINARY}}, **errors(400, 404, 422, 503)},
    )
    async def thumbnail(request: Request, row: Row, v: Version = None) -> Response:
        jpeg = await decoders.run(request, library.thumbnail, row, v)
        return Response(jpeg, headers=cache_headers(v), media_type="image/jpeg")

    @app.get(
        "/api/image/{row}",
        response_class=Response,
        responses={200: {"content": {"image/*": BINARY}}, **errors(400, 404, 422, 503)},
    )
    async def image(request: Request, row: Row, v: Version = None) -> Response:
        """The file, or a JPEG of it if browsers do not show its format."""
        data, media_type, name = await decoders.run(request, library.image, row, v)
        shown_as = f"inline; filename*=UTF-8''{quote(name)}"
        return Response(data, headers={**cache_headers(v), "Content-Disposition": shown_as}, media_type=media_type)


def cache_headers(version: str | None) -> dict[str, str]:
    """An address with a version always leads to the same image."""
    return {"Cache-Control": FOREVER if version else "no-cache"}


def serve_library(model: OnnxCLIP, index: Index, folder: Path, address: Address) -> None:
    library = SharedLibrary(model, index, folder)
    run_server(f"searching {folder}/", lambda token, is_closing: create_search_app(library, token), address)
