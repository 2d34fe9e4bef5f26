"""What a source of image–caption pairs is, to everything that uses one. No torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from PIL import Image

Advance = Callable[[int], None]
ProgressFactory = Callable[[str, int | None], AbstractContextManager[Advance]]
"""How long work is shown: what it is and how much, if that is known; what is given hears of each bit done."""


class PairDataset(Protocol):
    """Random access by index; light enough to be sent to another process."""

    @property
    def fingerprint(self) -> str:
        """Equal for equal images in the same order: what a store of them is named by."""
        ...

    @property
    def identity(self) -> str:
        """Equal for the same pairs in the same order."""
        ...

    def __len__(self) -> int: ...
    def image(self, index: int, least: int = 0) -> Image.Image: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def row(self, index: int) -> str: ...


@contextmanager
def no_progress(what: str, total: int | None) -> Iterator[Advance]:
    yield lambda done: None
