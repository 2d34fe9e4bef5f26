"""Captions with one word changed: does an image prefer its own? By word lists, or by the files of a benchmark.

Shapes: M edits, N images, E embedding.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from m1clip.data.choices import Choice
from m1clip.evals.embed import Embedder

FILE = Path(__file__).with_suffix(".toml")
MIN_EDITS = 20  # of real captions; with fewer an accuracy says nothing
Edit = tuple[int, str, str]  # row, kind of the changed word, changed caption
Alternatives = dict[str, list[str]]  # of each word


@dataclass(frozen=True)
class EditScore:
    changed: str
    accuracy: float
    edits: int
    chance: float = 0.5


@cache
def word_lists() -> dict[str, Alternatives]:
    """By kind, what each word can be exchanged for."""
    kinds = {}
    for kind, lists in tomllib.loads(FILE.read_text()).items():
        words: Alternatives = {}
        for group in chain.from_iterable(_groups(one) for one in lists.values()):
            for word in group:
                words.setdefault(word, []).extend(other for other in group if other != word)
        kinds[kind] = words
    return kinds


def _groups(values: list[str] | list[list[str]]) -> list[list[str]]:
    """A list of words is one group; a list of pairs has a direction each."""
    return [list(value) for value in values] if isinstance(values[0], list) else [values]


@cache
def _pattern(kind: str) -> re.Pattern[str]:
    words = sorted(word_lists()[kind], key=len, reverse=True)
    return re.compile(rf"(?<!hot )\b({'|'.join(map(re.escape, words))})\b", re.I)  # a hot dog is no animal


def caption_edits(captions: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Kind and text of one edit of the first caption for each kind of word that it has.

    The new word occurs in none of the image's captions; which one it is depends on the caption alone.
    """
    caption, known = captions[0], " ".join(captions).lower()
    for kind, alternatives in word_lists().items():
        if not (found := _pattern(kind).search(caption)):
            continue
        words = alternatives.get(found[1].lower(), [])  # none for ſmall, which matches without case
        others = [word for word in words if not re.search(rf"\b{re.escape(word)}", known)]
        if others:
            number = int.from_bytes(blake2b(f"{kind}/{caption}".encode(), digest_size=4).digest())
            word = others[number % len(others)]
            word = word.capitalize() if found[1][0].isupper() else word
            yield kind, _with_article(caption[: found.start()], word) + caption[found.end() :]


def _with_article(before: str, word: str) -> str:
    """The text before a word and the word, with a or an as it needs."""
    article = "an" if word[0].lower() in "aeiou" else "a"
    fixed = re.sub(r"\b([Aa])n?\s$", lambda found: f"{found[1]}{article[1:]} ", before)
    return fixed + word


def edit_scores(embedder: Embedder, edits: Sequence[Edit], image_NE: Tensor, text_NE: Tensor) -> list[EditScore]:
    """How often an image prefers its caption to the same caption with one word changed, by the kind of word."""
    rows, kinds, texts = zip(*edits, strict=True)
    rows_M = torch.tensor(rows)
    margin_M = (image_NE[rows_M] * (text_NE[rows_M] - embedder.texts(texts))).sum(1)
    won_M = (margin_M.sign() + 1) / 2  # a tie counts half, as a guess would
    scores = []
    for changed in dict.fromkeys(kinds):
        won = won_M[[kind == changed for kind in kinds]]
        scores.append(EditScore(changed, won.mean().item(), len(won)))
    return scores


def choice_scores(embedder: Embedder, choices: Sequence[Choice], image_NE: Tensor) -> list[EditScore]:
    """Accuracy by kind, and of all. With two images also of text→image and of both, as in Winoground."""
    texts = [text for choice in choices for text in choice.texts]
    text_C2E = embedder.texts(texts).view(len(choices), 2, -1)
    image_CIE = image_NE[torch.tensor([choice.images for choice in choices])]
    score_CI2 = image_CIE @ text_C2E.transpose(1, 2)
    text_C = _prefers_diagonal(score_CI2)
    correct = {"": (text_C, 0.5)}
    if score_CI2.shape[1] == 2:
        image_C = _prefers_diagonal(score_CI2.transpose(1, 2))
        correct = {" text": (text_C, 0.25), " image": (image_C, 0.25), " group": (text_C & image_C, 1 / 6)}
    kinds = [choice.kind for choice in choices]
    scores = []
    for kind in (*dict.fromkeys(kinds), *(["all"] if len(set(kinds)) > 1 else [])):
        is_kind = torch.tensor([kind in (one, "all") for one in kinds])
        for name, (correct_C, chance) in correct.items():
            fraction = correct_C[is_kind].float().mean().item()
            scores.append(EditScore(f"{kind}{name}", fraction, int(is_kind.sum()), chance))
    return scores


def _prefers_diagonal(score_CI2: Tensor) -> Tensor:
    """Whether each item in the rows scores highest with its own column; a tie is an error."""
    rows = range(score_CI2.shape[1])
    return torch.stack([score_CI2[:, row, row] > score_CI2[:, row, 1 - row] for row in rows]).all(0)
