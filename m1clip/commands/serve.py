"""m1clip serve: embeddings of an ONNX model over HTTP."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from m1clip.commands import RunsFolder, ServerFlags
from m1clip.config import require
from m1clip.console import Console
from m1clip.serve import Limits

if TYPE_CHECKING:
    from m1clip.serve.app import SearchIndex


@dataclass(frozen=True)
class Args(ServerFlags, RunsFolder):
    """Serve embeddings of texts and images over HTTP, without torch.

    m1clip serve nano-1                                   OpenAI's API at http://127.0.0.1:8266/v1
    m1clip serve nano-1 --host 0.0.0.0 --token auto       for other machines, which need the token
    m1clip serve model/ --workers 4 --no-access-log

    It also understands the requests of infinity, Jina, vLLM, Cohere, Hugging Face (zero-shot classification) and
    immich: docs/serve.md. Its own address shows the endpoints.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """A run (name or path; default: the newest), a model folder, or an ONNX export."""
    port: int = 8266
    """Port; if it is taken, one of the next twenty."""
    search: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Answer /v1/search from the index of this folder."""
    allow: tuple[Literal["urls"], ...] = ()
    """urls: fetch images from public http and https addresses."""
    workers: int = 1
    """Processes, each with its own copy of the model."""
    max_batch: int = Limits.max_batch
    """Texts and images in one request."""
    max_queue: int = Limits.max_queue
    """Texts, and images, that may wait; more are refused with status 429."""
    max_mb: float = Limits.max_bytes / 1e6
    """Megabytes of one request."""
    max_megapixels: float = Limits.max_pixels / 1e6
    """Megapixels of one image."""
    access_log: bool = True
    """Print a line of JSON for each request."""

    def check(self) -> None:
        self.check_server("the model")
        require(1 <= self.workers <= 256, f"--workers must be 1–256, not {self.workers}")
        require(1 <= self.max_batch <= 100_000, f"--max-batch must be 1–100000, not {self.max_batch}")
        allowed = f"at least --max-batch ({self.max_batch}), or the largest request could never be answered"
        require(self.max_queue >= self.max_batch, f"--max-queue must be {allowed}, not {self.max_queue}")
        require(0.001 <= self.max_mb <= 2000, f"--max-mb must be 0.001–2000, not {self.max_mb:g}")
        in_range = 0.0001 <= self.max_megapixels <= 200
        require(in_range, f"--max-megapixels must be 0.0001–200, not {self.max_megapixels:g}")

    @property
    def limits(self) -> Limits:
        return Limits(self.max_batch, self.max_queue, round(self.max_mb * 1e6), round(self.max_megapixels * 1e6))


def main(args: Args) -> None:
    from m1clip.onnx_cache import find_onnx
    from m1clip.serve.start import ServeSettings, serve

    folder = find_onnx(args.runs, args.model, Console())
    serve(
        ServeSettings(
            folder=folder,
            name=Path(args.model or folder).name,
            limits=args.limits,
            address=args.address,
            workers=args.workers,
            allow_urls="urls" in args.allow,
            access_log=args.access_log,
            open_index=partial(open_search_index, args.search, folder),
        )
    )


def open_search_index(folder: Path | None, model: Path) -> "SearchIndex | None":
    """The index of a folder of images, which was made with this model."""
    if folder is None:
        return None
    from m1clip.onnx_model import load_onnx
    from m1clip.search.index import index_of
    from m1clip.search.query import Library
    from m1clip.search.scan import existing_folder
    from m1clip.serve.search import LibraryIndex

    library = Library(index_of(load_onnx(model)), existing_folder(folder))
    require(len(library) > 0, f"{folder} has no image in the index of this model; m1clip search makes it")
    return LibraryIndex(library)
