"""What the model finds for a few validation captions: the images it puts first, and where the true one is.

Shapes: M captions, N images, E embedding.
"""

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from m1clip.data.splits import Split

CHUNK = 1024
FIRST = 5
EACH = 8
"""Queries of each group."""
LARGEST = 160
"""Pixels a side of the images that are kept."""


@dataclass(frozen=True)
class Found:
    """For every caption its first images and their scores, the true image's score and rank from 1.

    Of equals the true one comes last: a collapsed model, to which all look alike, has found nothing.
    """

    row_MK: Tensor
    score_MK: Tensor
    true_M: Tensor
    rank_M: Tensor


def find(text_ME: Tensor, image_NE: Tensor, owner_M: Tensor) -> Found:
    parts = []
    for start in range(0, len(text_ME), CHUNK):
        score_mN = text_ME[start : start + CHUNK] @ image_NE.T
        true_m1 = score_mN.gather(1, owner_M[start : start + CHUNK, None])
        best = score_mN.topk(min(FIRST, len(image_NE)))
        parts.append((best.indices, best.values, true_m1[:, 0], (score_mN >= true_m1).sum(1)))
    return Found(*(torch.cat(part) for part in zip(*parts, strict=True)))


def examples(text_ME: Tensor, image_NE: Tensor, owner_M: Tensor, pairs: Split) -> dict[str, Any]:
    """Queries with what was found, and the images they show, as JSON can hold it.

    `errors` are those in which a wrong image beats the true one by most, each image and each winner once;
    `sample` are at equal distances, the same at every evaluation.
    """
    found = find(text_ME, image_NE, owner_M)
    first_M = torch.searchsorted(owner_M, owner_M)  # the place of each owner's first caption
    groups = {
        "errors": instructive(found, owner_M, pairs, first_M),
        "sample": [int(m) for m in np.linspace(0, len(owner_M) - 1, min(EACH, len(owner_M)))],
    }
    queries = [
        {"group": group, **query(m, found, owner_M, first_M, pairs)}
        for group, some in groups.items()
        for m in some
    ]
    shown = sorted({row for one in queries for row in (one["truth"], *(hit["row"] for hit in one["top"]))})
    return {"queries": queries, "shown": images(shown, pairs)}


def instructive(found: Found, owner_M: Tensor, pairs: Split, first_M: Tensor) -> list[int]:
    """The captions whose best image is wrong by most; one captioned alike is not wrong."""
    margin_M = found.score_MK[:, 0] - found.true_M
    chosen: list[int] = []
    seen, winners = set[int](), set[int]()
    for m in margin_M.argsort(descending=True, stable=True).tolist():
        if len(chosen) == EACH:
            break
        truth, winner = int(owner_M[m]), int(found.row_MK[m, 0])
        if winner == truth or truth in seen or winner in winners:
            continue
        if caption(m, owner_M, first_M, pairs) in pairs.captions(winner):
            continue
        chosen.append(m)
        seen.add(truth)
        winners.add(winner)
    return chosen


def caption(m: int, owner_M: Tensor, first_M: Tensor, pairs: Split) -> str:
    return pairs.captions(int(owner_M[m]))[m - int(first_M[m])]


def query(m: int, found: Found, owner_M: Tensor, first_M: Tensor, pairs: Split) -> dict[str, Any]:
    truth, text = int(owner_M[m]), caption(m, owner_M, first_M, pairs)
    top = [
        {"row": row, "score": round(score, 4), "same_caption": row != truth and text in pairs.captions(row)}
        for row, score in zip(found.row_MK[m].tolist(), found.score_MK[m].tolist(), strict=True)
    ]
    place = {"truth": truth, "rank": int(found.rank_M[m]), "true_score": round(float(found.true_M[m]), 4)}
    return {"text": text, **place, "top": top}


def images(rows: list[int], pairs: Split) -> dict[str, dict[str, str]]:
    """Each row's first caption, where it comes from, and the image as the model sees it, as a JPEG."""
    there, pixels = pairs.take(np.array(rows))
    shown = {}
    for row, real, image in zip(rows, there, pixels, strict=True):
        shown[str(row)] = {"caption": pairs.captions(row)[0], "name": pairs.location(row)}
        if row == real:  # else it could not be decoded, and another's came in its place
            made, small = io.BytesIO(), Image.fromarray(image)
            small.thumbnail((LARGEST, LARGEST))
            small.save(made, "JPEG", quality=85)
            shown[str(row)]["jpeg"] = base64.b64encode(made.getvalue()).decode()
    return shown
