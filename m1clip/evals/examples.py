"""Example queries of an evaluation: the images ranked first for a caption, and the rank of the correct one.

Shapes: M captions, N images, K top results, E embedding.
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
from m1clip.evals.retrieval import Relevance

CHUNK = 1024
TOP_K = 5
QUERIES = 8  # queries in each group
MAX_SIZE = 160  # pixels of the stored images


@dataclass(frozen=True)
class TopResults:
    """For every caption its first images, and score and rank (from 1) of the best correct image.

    Among equal scores the correct image comes last: a collapsed model finds nothing.
    """

    row_MK: Tensor
    score_MK: Tensor
    correct_score_M: Tensor
    correct_rank_M: Tensor


def top_results(text_ME: Tensor, image_NE: Tensor, relevance: Relevance) -> TopResults:
    chunks = []
    for start in range(0, len(text_ME), CHUNK):
        score_mN = text_ME[start : start + CHUNK] @ image_NE.T
        correct_mN = relevance.images_of(start, start + CHUNK)
        best_m1 = score_mN.masked_fill(~correct_mN, float("-inf")).amax(1, keepdim=True)
        rank_m = 1 + ((score_mN >= best_m1) & ~correct_mN).sum(1)
        top = score_mN.topk(min(TOP_K, len(image_NE)))
        chunks.append((top.indices, top.values, best_m1[:, 0], rank_m))
    return TopResults(*(torch.cat(tensors) for tensors in zip(*chunks, strict=True)))


def example_queries(text_ME: Tensor, image_NE: Tensor, relevance: Relevance, pairs: Split) -> dict[str, Any]:
    """Queries with their results, and the images they show, ready for JSON.

    `errors` are queries whose first image is wrong by the largest margin, each image once; `sample` are evenly
    spaced, the same at every evaluation.
    """
    results = top_results(text_ME, image_NE, relevance)
    captions = len(relevance.owner_M)
    groups = {
        "errors": largest_errors(results, relevance, pairs),
        "sample": [int(m) for m in np.linspace(0, captions - 1, min(QUERIES, captions))],
    }
    queries = [
        {"group": group, **query_record(m, results, relevance, pairs)}
        for group, members in groups.items()
        for m in members
    ]
    rows = {row for query in queries for row in (query["truth"], *(hit["row"] for hit in query["top"]))}
    return {"queries": queries, "shown": image_records(sorted(rows), pairs)}


def largest_errors(results: TopResults, relevance: Relevance, pairs: Split) -> list[int]:
    """Captions whose first image is wrong by the largest margin; an image with the same caption is not wrong."""
    margin_M = results.score_MK[:, 0] - results.correct_score_M
    chosen: list[int] = []
    truths, winners = set[int](), set[int]()
    for m in margin_M.argsort(descending=True, stable=True).tolist():
        if len(chosen) == QUERIES:
            break
        truth, winner = int(relevance.owner_M[m]), int(results.row_MK[m, 0])
        if winner == truth or truth in truths or winner in winners:
            continue
        if has_caption(pairs, winner, caption_text(m, relevance, pairs)):
            continue
        chosen.append(m)
        truths.add(truth)
        winners.add(winner)
    return chosen


def caption_text(m: int, relevance: Relevance, pairs: Split) -> str:
    owner = int(relevance.owner_M[m])
    return pairs.captions(owner)[m - int(torch.searchsorted(relevance.owner_M, owner))]


def has_caption(pairs: Split, row: int, text: str) -> bool:
    """Compared as Relevance does: without case and outer spaces."""
    return text.strip().lower() in (caption.strip().lower() for caption in pairs.captions(row))


def query_record(m: int, results: TopResults, relevance: Relevance, pairs: Split) -> dict[str, Any]:
    truth, text = int(relevance.owner_M[m]), caption_text(m, relevance, pairs)
    top = [
        {"row": row, "score": round(score, 4), "same_caption": row != truth and has_caption(pairs, row, text)}
        for row, score in zip(results.row_MK[m].tolist(), results.score_MK[m].tolist(), strict=True)
    ]
    return {
        "text": text,
        "truth": truth,
        "rank": int(results.correct_rank_M[m]),
        "true_score": round(float(results.correct_score_M[m]), 4),
        "top": top,
    }


def image_records(rows: list[int], pairs: Split) -> dict[str, dict[str, str]]:
    """First caption, location and JPEG (as the model sees it) of each row."""
    decoded_rows, pixels = pairs.take(np.array(rows))
    records = {}
    for row, decoded, image in zip(rows, decoded_rows, pixels, strict=True):
        records[str(row)] = {"caption": pairs.captions(row)[0], "name": pairs.location(row)}
        if row == decoded:  # otherwise it could not be decoded, and another image came instead
            buffer, thumbnail = io.BytesIO(), Image.fromarray(image)
            thumbnail.thumbnail((MAX_SIZE, MAX_SIZE))
            thumbnail.save(buffer, "JPEG", quality=85)
            records[str(row)]["jpeg"] = base64.b64encode(buffer.getvalue()).decode()
    return records
