"""Queries: texts and images with weights as one vector, and the images that fit it best.

Shapes: N images, R rows of the index, T terms, E embedding.
"""

import mmap
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from m1clip.config import require
from m1clip.model.inputs import ImageInput
from m1clip.onnx_model import OnnxCLIP
from m1clip.perceptual_hash import HASH, connected_rows, near_duplicates
from m1clip.search.index import Floats, ImageFile, Index

QUOTED = r"""(?:"[^"]*"|'[^']*'|“[^”]*”|„[^“”]*[“”]|«[^»]*»)"""
OPERATOR = re.compile(rf"({QUOTED})|(?:\s+|^)([+-])(?:\s+|$)")
TERM = re.compile(rf"\s*(?:(\d+(?:\.\d+)?)\s*[*×]\s*)?(?:({QUOTED})|(.*?))\s*", re.S)
MAX_QUERY, MAX_WEIGHT = 10_000, 1_000_000  # characters, and factor of a term
IDEOGRAPHIC = ("CJK", "HANGUL", "HIRAGANA", "KATAKANA")  # scripts whose letters are tokens
UNKNOWN_TOKENS = ("<|unknown|>", "[UNK]", "<unk>")
CHUNK = 8_192  # rows that are multiplied at once


@dataclass(frozen=True)
class Term:
    weight: float
    text: str


def parse_query(query: str) -> list[Term]:
    """The terms of `dog + 0.5 * "snow at night" - person`. Operators stand between spaces; quotes hide them."""
    require(bool(query.strip()), "the query is empty")
    require(len(query) <= MAX_QUERY, f"a query may have {MAX_QUERY:,} characters, not {len(query):,}")
    parts, signs, start = list[str](), [1.0], 0
    for found in OPERATOR.finditer(query):
        if found[2]:
            parts.append(query[start : found.start()])
            signs.append(1.0 if found[2] == "+" else -1.0)
            start = found.end()
    parts.append(query[start:])
    terms = [parse_term(part, sign, query) for part, sign in zip(parts, signs, strict=True)]
    require(any(term.weight > 0 for term in terms), f"the query {query!r} has nothing to look for, only to avoid")
    return terms


def parse_term(part: str, sign: float, query: str) -> Term:
    match = TERM.fullmatch(part)
    assert match is not None
    text = (match[2][1:-1] if match[2] else match[3]).strip()
    require(bool(text), f"an operator in the query {query!r} has no text beside it")
    weight = float(match[1] or 1)
    require(weight <= MAX_WEIGHT, f"a weight in the query must be at most {MAX_WEIGHT:,}, not {match[1]}"[:200])
    return Term(sign * weight, text)


def encode_query(model: OnnxCLIP, terms: Sequence[Term], like: Sequence[ImageInput] = ()) -> Floats:
    """A unit vector (E,): the weighted sum of the terms and of images that results should look like."""
    vectors, weights = list[Floats](), [term.weight for term in terms]
    if terms:
        vectors.append(model.encode_text([term.text for term in terms]))
    if like:
        vectors.append(model.encode_image(list(like)))
        weights += [1.0] * len(like)
    return add_terms(weights, np.concatenate(vectors))


def add_terms(weights: Sequence[float], vectors_TE: Floats) -> Floats:
    """The unit vector (E,) of a weighted sum."""
    query_E = np.asarray(weights, np.float32) @ vectors_TE
    norm = float(np.linalg.norm(query_E))
    require(norm > 1e-6, "the terms of the query cancel each other")
    return query_E / np.float32(norm)


def require_known_script(model: OnnxCLIP, terms: Sequence[Term]) -> None:
    if word := find_unknown_script(model, terms):
        raise ValueError(f"the model's tokenizer does not know {word!r}: it was trained on other languages")


def unknown_ids(model: OnnxCLIP) -> set[int]:
    """Tokens that stand for anything that the tokenizer does not know."""
    ids = (model.tokenizer.core.token_to_id(name) for name in UNKNOWN_TOKENS)
    return {id_ for id_ in ids if id_ is not None}


def find_unknown_script(model: OnnxCLIP, terms: Sequence[Term]) -> str | None:
    """A term in letters that the tokenizer knows only as single bytes or not at all: the model never learned it."""
    core, unknown = model.tokenizer.core, unknown_ids(model)
    for term in terms:
        letters = "".join(filter(str.isalpha, term.text))
        if letters.isascii():
            continue
        ids = core.encode(letters.lower(), add_special_tokens=False).ids
        if set(ids) <= unknown or len(ids) >= len(letters.encode()) > len(letters):
            return term.text
        if 3 * len(ids) >= 2 * len(letters) and not joins_letters(core.get_vocab(), letters):
            return term.text
    return None


def joins_letters(vocabulary: Iterable[str], letters: str) -> bool:
    """Whether tokens have several letters of the script of these letters, as those of other scripts have.

    MiniLM has 25,660 such tokens in Latin and two in Cyrillic.
    """
    scripts = {script_of(letter) for letter in letters if not letter.isascii()}
    long = [script_of(token[-1]) for token in vocabulary if len(token) > 2 and token[-3:].isalpha()]
    return not scripts.isdisjoint(IDEOGRAPHIC) or sum(script in scripts for script in long) >= len(long) / 1000


def script_of(letter: str) -> str:
    """Such as CYRILLIC."""
    return unicodedata.name(letter, "").partition(" ")[0]


@dataclass(frozen=True)
class Hit:
    """An image that was found, with all its files; copies of a file share one vector."""

    score: float  # cosine similarity
    files: Sequence[ImageFile]

    @property
    def file(self) -> ImageFile:
        return self.files[0]


@dataclass(frozen=True)
class Answer:
    hits: list[Hit]  # best first
    images: int  # in the library
    is_nothing: bool = False  # no image fits
    nearest: Hit | None = None  # then the best of those that do not


class Library:
    """The images below a folder, as they were when it was opened.

    `reads_once`: vectors are dropped from memory as soon as they are multiplied, because few queries will follow.
    """

    def __init__(self, index: Index, folder: Path, reads_once: bool = False):
        self.index, self.folder, self.reads_once = index, folder, reads_once
        self.open()

    def open(self) -> None:
        with self.index.snapshot():
            self.generation = self.index.generation
            self.vectors_RE, self.rows_N = self.index.open_vectors(), self.index.rows_below(self.folder)

    def __len__(self) -> int:
        return len(self.rows_N)

    def scores(self, query_E: Floats) -> Floats:
        """(N,) cosine similarities, in the order of `rows_N`."""
        is_copied = len(self) < len(self.vectors_RE) / 4  # few of many
        scores = np.empty(len(self) if is_copied else len(self.vectors_RE), np.float32)
        for start in range(0, len(scores), CHUNK):
            part = slice(start, start + CHUNK)
            # Not matmul, whose threads wait for each other on a busy machine: 100,000 rows took 8 to 100 ms, this 6.
            vectors_RE = self.vectors_RE[self.rows_N[part] if is_copied else part]
            np.einsum("re,e->r", vectors_RE, query_E, out=scores[part])
            if self.reads_once and isinstance(self.vectors_RE, np.memmap):
                self.vectors_RE.base.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
        return scores if len(self) == len(scores) else scores[self.rows_N]

    def best(self, query_E: Floats, top_k: int) -> tuple[list[Hit], Floats]:
        """The images with the highest similarities, and all similarities (N,).

        The library is opened again if another process has renumbered the rows, or removed all these files.
        """
        while True:
            scores_N = self.scores(query_E)
            hits = self.hits(best_first(scores_N, top_k), scores_N)
            if self.index.generation == self.generation and (hits or not len(self)):
                return hits, scores_N
            self.open()

    def hits(self, positions: NDArray[np.int64], scores_N: Floats) -> list[Hit]:
        """Images by their positions in `rows_N`, with their files."""
        files: dict[int, list[ImageFile]] = {row: [] for row in self.rows_N[positions].tolist()}
        for file in self.index.image_files(self.folder, list(files)):
            files[file.row].append(file)
        scores = scores_N[positions].tolist()
        return [Hit(score, of_row) for score, of_row in zip(scores, files.values(), strict=True) if of_row]

    def duplicates(self) -> list[list[ImageFile]]:
        """Groups of files with equal bytes, or whose perceptual hashes are nearly equal."""
        with self.index.snapshot():
            self.open()
            files, hash_of = self.index.image_files(self.folder), self.index.perceptual_hashes()
        hashes_N = np.frombuffer(b"".join(hash_of[row] for row in self.rows_N.tolist()), HASH)
        keys: list[list[object]] = [[position] for position in range(len(self))]
        for pair in near_duplicates(hashes_N):
            for position in pair:
                keys[position].append(pair)
        group_of = dict(zip(self.rows_N.tolist(), connected_rows(keys), strict=True))
        groups = dict[int, list[ImageFile]]()
        for file in files:
            groups.setdefault(group_of[file.row], []).append(file)
        return [files for files in groups.values() if len(files) > 1]


def best_first(scores_N: Floats, top_k: int) -> NDArray[np.int64]:
    """Positions of the highest scores; of equal ones the first."""
    top_k = min(top_k, len(scores_N))
    if 0 < top_k < len(scores_N):
        worst = np.partition(scores_N, len(scores_N) - top_k)[len(scores_N) - top_k]
        candidates = np.flatnonzero(scores_N >= worst)
    else:
        candidates = np.arange(len(scores_N))
    return candidates[np.argsort(-scores_N[candidates], kind="stable")[:top_k]]


class Searcher:
    """Answers queries to a model and a library."""

    def __init__(self, model: OnnxCLIP, library: Library):
        self.model, self.library = model, library

    def search(
        self, terms: Sequence[Term], like: Sequence[ImageInput] = (), top_k: int = 10, min_score: float | None = None
    ) -> Answer:
        """The best images, or none if nothing fits: below `min_score`, or by the model's calibration for texts."""
        require_known_script(self.model, terms)
        query_E = encode_query(self.model, terms, like)
        hits, scores_N = self.library.best(query_E, top_k)
        require(bool(hits), f"{self.library.folder} has no image any more")
        if min_score is not None:
            found = [hit for hit in hits if hit.score >= min_score]
        else:
            is_text = bool(terms) and not like
            is_nothing = is_text and self.model.is_nothing(query_E, hits[0].score, float(scores_N.mean()))
            found = [] if is_nothing else hits
        return Answer(found, len(self.library), not found, None if found else hits[0])
