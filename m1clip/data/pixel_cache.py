"""Decoded pixels: every image once, as bytes in a memory-mapped file that runs share.

No torch.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from m1clip import images
from m1clip.data import decode
from m1clip.data.cache_space import make_room
from m1clip.data.pairs import Advance, PairDataset
from m1clip.data.row_store import PART, Notes, unheard
from m1clip.data.row_store import Store as Rows
from m1clip.data.rows import BadRow
from m1clip.data.workers import Decoded, Workers, decode_rows, parts_of
from m1clip.files import cache_folder
from m1clip.images import Pixels

PASSING = ("HEIC", "missing file", "cannot be read")
"""Kinds of faults that another day may mend: they are tried again."""


class Store(Rows):
    """The images of a source at one size."""

    def __init__(self, pairs: PairDataset, size: int):
        self.pairs, self.size = pairs, size
        # An image decoded or squared otherwise is another image.
        how = "".join(Path(str(module.__file__)).read_text() for module in (images, decode))
        name = sha256(f"{pairs.fingerprint}/{len(pairs)}/{size}/{how}".encode()).hexdigest()[:16]
        super().__init__(cache_folder() / f"pixels-{name}", len(pairs), size**2 * 3)

    def decode(self, workers: int, progress: Advance = unheard) -> None:
        """Make it whole."""

        def make(parts: list[range]) -> Iterator[tuple[bytes, Notes]]:
            for done in _decode(self.pairs, self.size, parts, workers):
                yield done.pixels.tobytes(), done.bad

        self.fill(make, progress)

    def is_final(self, entry: Notes) -> bool:
        return not any(kind in PASSING for kind, _ in entry["bad"].values())

    def pixels(self) -> Pixels:
        return self.mapped(np.uint8, self.size, self.size, 3)

    def bad(self) -> dict[int, BadRow]:
        """Rows whose images could not be decoded."""
        found: dict[int, BadRow] = {}
        for entry in self.entries().values():
            for row, (kind, what) in dict(entry["bad"]).items():
                found[int(row)] = BadRow(kind, self.pairs.row(int(row)), what)
        return dict(sorted(found.items()))


def _decode(pairs: PairDataset, size: int, parts: Sequence[range], workers: int) -> Iterator[Decoded]:
    if len(parts) == 1 or workers == 1:
        yield from (decode_rows(pairs, size, part) for part in parts)
        return
    with Workers(partial(decode_rows, pairs, size), workers) as pool:
        yield from pool.map(parts)


def decoded(pairs: PairDataset, size: int, workers: int, progress: Advance = unheard) -> Decoded:
    """All of them, in memory."""
    done = []
    for part in _decode(pairs, size, parts_of(len(pairs), PART), workers):
        done.append(part)
        progress(len(part.pixels))
    bad = {row: what for part in done for row, what in part.bad.items()}
    return Decoded(np.concatenate([part.pixels for part in done]), bad)


def stored(
    pairs: PairDataset, size: int, most_gb: float, workers: int, progress: Advance = unheard
) -> Store | None:
    """The whole store, or None where it would not fit into the cache."""
    if len(pairs) * size**2 * 3 > most_gb * 1e9:
        return None
    store = Store(pairs, size)
    store.claim()
    try:
        if store.need and not make_room(store.need, most_gb * 1e9, store.folder):
            store.close()
            with suppress(OSError):
                store.folder.rmdir()
            return None
        store.decode(workers, progress)
    except BaseException:
        store.close()
        raise
    return store
