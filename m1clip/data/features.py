"""What locked towers made of a side, once: a batch takes rows of it, not images and captions. No torch.

Shapes: N images, M captions, D features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from m1clip.data.index import Rows

Array = NDArray[Any]


@dataclass(frozen=True)
class Features:
    views: Sequence[Array] = ()
    """Of the images (N, D), once for each way they are seen; none where the tower is not locked."""
    texts: Array | None = None
    """Of the captions (M, D), in an order that suited the encoder."""
    place_M: Rows | None = None
    """Where each caption is in it."""
    start_N: Rows | None = None
    """The number of each image's first caption."""
    caption_M: Rows | None = None
    """Equal for equal captions."""
    look_N: Rows | None = None
    """Equal for equal images."""
    instead_N: Rows | None = None
    """The row whose image stands for a row: its own, or another's where it could not be decoded."""

    def of_images(self, rows: Rows, draw_B: NDArray[np.float64]) -> Array:
        """Each as one of its views, by the draw."""
        which = (draw_B * len(self.views)).astype(int)
        made = np.empty((len(rows), self.views[0].shape[1]), self.views[0].dtype)
        for number, view in enumerate(self.views):
            made[which == number] = view[rows[which == number]]
        return made

    def of_captions(self, numbers: Rows) -> Array:
        assert self.texts is not None
        assert self.place_M is not None
        made: Array = self.texts[self.place_M[numbers]]
        return made


def numbered(names: Sequence[Any]) -> Rows:
    """A number each, equal for equal names."""
    known: dict[Any, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], np.int64)
