"""Captions as token ids, made once: a batch takes them from here and need not read them again.

Shapes: N images, M captions, T ids of all captions one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from m1clip.data.index import Rows
from m1clip.data.splits import Split

MOST, AT_ONCE = 500_000, 4096
Ids = Sequence[Sequence[int] | NDArray[np.int32]]


@dataclass(frozen=True)
class TokenizedCaptions:
    ids_T: NDArray[np.int32]
    end_M: Rows
    start_N: Rows
    """The number of each image's first caption, and at the end of all the number of captions."""
    padded: Callable[[Ids], Tensor]

    def take(self, numbers: Rows) -> tuple[Tensor, list[bytes]]:
        """Padded ids of some captions, and a name for each, equal for equal ones."""
        spans = zip(
            (self.end_M[numbers - 1] * (numbers > 0)).tolist(), self.end_M[numbers].tolist(), strict=True
        )
        ids = [self.ids_T[first:end] for first, end in spans]
        return self.padded(ids), [one.tobytes() for one in ids]


def tell(
    pairs: Split, cut: Callable[[Sequence[str]], Ids], padded: Callable[[Ids], Tensor]
) -> TokenizedCaptions | None:
    """All captions of a side; None where they are so many that they are better read when needed."""
    counts = [len(pairs.captions(row)) for row in range(min(len(pairs), MOST + 1))]
    if len(counts) < len(pairs) or sum(counts) > MOST:
        return None
    said = (caption for row in range(len(pairs)) for caption in pairs.captions(row))
    found: list[NDArray[np.int32]] = []
    while some := list(islice(said, AT_ONCE)):
        found += [np.array(one, np.int32) for one in cut(some)]
    ends = np.cumsum([len(one) for one in found])
    return TokenizedCaptions(np.concatenate(found), ends, np.concatenate([[0], np.cumsum(counts)]), padded)
