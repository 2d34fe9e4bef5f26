"""What a source of image–caption pairs is, and which source a spec means. No torch."""

from collections.abc import Sequence
from typing import Protocol

from PIL import Image

from m1clip.config import nearest
from m1clip.data.synthetic import Synthetic


class Pairs(Protocol):
    """Random access by index; light enough to be sent to another process."""

    @property
    def fingerprint(self) -> str: ...
    def __len__(self) -> int: ...
    def image(self, index: int) -> Image.Image: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def row(self, index: int) -> str: ...


def open_pairs(spec: str, held_out: int, seed: int) -> tuple[Pairs, Pairs]:
    """Training and held-out pairs of a spec such as synthetic:12000."""
    source, _, size = spec.partition(":")
    if source != "synthetic":
        raise ValueError(
            f"no data source {spec!r}; {nearest(source, ['synthetic'])} (synthetic:N draws N scenes)"
        )
    if size and not size.isdecimal():
        raise ValueError(f"in {spec!r}, {size!r} should be a whole number of scenes")
    return Synthetic(int(size or 12000), seed), Synthetic(held_out, seed, "held-out")
