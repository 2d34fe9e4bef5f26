"""The index of `m1clip search` behind /v1/search."""

import os
from threading import Lock

from m1clip.model.classify import Floats
from m1clip.search.query import Library
from m1clip.serve.app import SearchHit


class LibraryIndex:
    def __init__(self, library: Library):
        self.library, self.lock = library, Lock()  # one database connection for all threads

    def search(self, query_E: Floats, top_k: int) -> list[SearchHit]:
        with self.lock:
            hits, _ = self.library.best(query_E, top_k)
        return [SearchHit(hit.file.row, self.name(hit.file.path), hit.score) for hit in hits]

    def name(self, path: os.PathLike[str]) -> str:
        """Relative to the folder; bytes that are no text are replaced."""
        return os.fsencode(os.path.relpath(path, self.library.folder)).decode("utf-8", "replace")
