"""One-word edits: does an image prefer its caption to the same caption with one word changed?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from torch import Tensor

from m1clip.data.rows import PairDataset
from m1clip.evals.evaluate import embed_captions
from m1clip.model.clip import CLIP


class EditableDataset(Protocol):
    """A dataset that can change one word of its captions: (kind of word, changed caption)."""

    def __len__(self) -> int: ...
    def captions(self, index: int) -> Sequence[str]: ...
    def edits(self, index: int) -> Iterator[tuple[str, str]]: ...


def is_editable(pairs: PairDataset) -> TypeGuard[EditableDataset]:
    return hasattr(pairs, "edits")


@dataclass(frozen=True)
class EditScore:
    changed: str
    accuracy: float
    edits: int
    chance: float = 0.5


def edit_scores(model: CLIP, pairs: EditableDataset, image_NE: Tensor, text_NE: Tensor) -> list[EditScore]:
    """Fraction of edited captions that score below the original, by the kind of word changed."""
    edits = [(row, kind, text) for row in range(len(pairs)) for kind, text in pairs.edits(row)]
    edited_ME = embed_captions(model, [text for _, _, text in edits])
    rows = [row for row, _, _ in edits]
    margin_M = (image_NE[rows] * (text_NE[rows] - edited_ME)).sum(1)
    won_M = (margin_M.sign() + 1) / 2  # a tie counts half, as a guess would
    scores = []
    for name in dict.fromkeys(kind for _, kind, _ in edits):
        won = won_M[[kind == name for _, kind, _ in edits]]
        scores.append(EditScore(name, won.mean().item(), len(won)))
    return scores
