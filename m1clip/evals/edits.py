"""Does the model read every word? An image chooses between its caption and the same with one word wrong."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from torch import Tensor

from m1clip.data.rows import PairDataset
from m1clip.evals.embed import embed_captions
from m1clip.model.clip import CLIP


class Editable(Protocol):
    """A source that can say its captions wrongly: (what was changed, the changed caption)."""

    def __len__(self) -> int: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def edits(self, index: int) -> Iterator[tuple[str, str]]: ...


def is_editable(pairs: PairDataset) -> TypeGuard[Editable]:
    return hasattr(pairs, "edits")


@dataclass(frozen=True)
class EditScore:
    changed: str
    accuracy: float
    edits: int
    chance: float = 0.5


def edit_scores(model: CLIP, pairs: Editable, image_NE: Tensor, text_NE: Tensor) -> list[EditScore]:
    """Part of the wrong captions that score below the true one, by what was changed. Chance is a half."""
    edits = [(row, what, wrong) for row in range(len(pairs)) for what, wrong in pairs.edits(row)]
    wrong_ME = embed_captions(model, [wrong for _, _, wrong in edits])
    rows = [row for row, _, _ in edits]
    margin_M = (image_NE[rows] * (text_NE[rows] - wrong_ME)).sum(1)
    won_M = (margin_M.sign() + 1) / 2  # a tie is half a win, as a guess would be
    scores = []
    for name in dict.fromkeys(what for _, what, _ in edits):
        mine = won_M[[what == name for _, what, _ in edits]]
        scores.append(EditScore(name, mine.mean().item(), len(mine)))
    return scores
