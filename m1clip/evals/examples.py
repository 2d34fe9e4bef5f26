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
from m1clip.evals.retrieval import CHUNK, Relevance

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
    is_correct_MK: Tensor  # also of other images with the same caption
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
        chunks.append((top.indices, top.values, correct_mN.gather(1, top.indices), best_m1[:, 0], rank_m))
    return TopResults(*(torch.cat(tensors) for tensors in zip(*chunks, strict=True)))


def example_queries(text_ME: Tensor, image_NE: Tensor, relevance: Relevance, pairs: Split) -> dict[str, Any]:
    """Queries with their results, and the images they show, ready for JSON.

    `errors` are queries whose first image is wrong by the largest margin, each image once; `sample` are evenly
    spaced, the same at every evaluation.
    """
    results = top_results(text_ME, image_NE, relevance)
    captions = len(relevance.owner_M)
    sample = np.linspace(0, captions - 1, min(QUERIES, captions)).astype(int).tolist()
    chosen = [*(("errors", m) for m in largest_errors(results, relevance)), *(("sample", m) for m in sample)]
    queries = [{"group": group, **query_record(m, results, relevance, pairs)} for group, m in chosen]
    rows = {row for query in queries for row in (query["truth"], *(hit["row"] for hit in query["top"]))}
    return {"queries": queries, "shown": image_records(sorted(rows), pairs)}


def largest_errors(results: TopResults, relevance: Relevance) -> list[int]:
    """Captions whose first image is wrong by the largest margin."""
    margin_M = results.score_MK[:, 0] - results.correct_score_M
    chosen, truths, winners = list[int](), set[int](), set[int]()
    for m in margin_M.argsort(descending=True, stable=True).tolist():
        if len(chosen) == QUERIES:
            break
        truth, winner = int(relevance.owner_M[m]), int(results.row_MK[m, 0])
        if not (results.is_correct_MK[m, 0] or truth in truths or winner in winners):
            chosen.append(m)
            truths.add(truth)
            winners.add(winner)
    return chosen


def query_record(m: int, results: TopResults, relevance: Relevance, pairs: Split) -> dict[str, Any]:
    truth = int(relevance.owner_M[m])
    first = int(torch.searchsorted(relevance.owner_M, truth))
    hits = zip(*(x_MK[m].tolist() for x_MK in (results.row_MK, results.score_MK, results.is_correct_MK)), strict=True)
    return {
        "text": pairs.captions(truth)[m - first],
        "truth": truth,
        "rank": int(results.correct_rank_M[m]),
        "true_score": round(float(results.correct_score_M[m]), 4),
        "top": [
            {"row": row, "score": round(score, 4), "same_caption": is_correct and row != truth}
            for row, score, is_correct in hits
        ],
    }


def image_records(rows: list[int], pairs: Split) -> dict[str, dict[str, str]]:
    """First caption, location and JPEG (as the model sees it) of each row."""
    if not rows:
        return {}
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
