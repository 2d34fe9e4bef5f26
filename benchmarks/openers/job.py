"""What products.py asks of an opener, and the opener's answer: JSON files named on the command line."""

import json
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    folder: str
    """What `m1clip export` wrote for the product."""
    images: list[str]
    captions: list[str]
    labels: list[int]
    """Caption that m1clip assigns to each image."""
    out: str
    """Folder for temporary files, and for the answer."""


def read_job() -> Job:
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def write_answer(job: Job, package: str, images: Any = None, texts: Any = None, **own: Any) -> None:
    """Embeddings as the product returned them, and what it found: `top` images of each caption, or `labels`."""
    vectors = {
        name: np.asarray(rows, np.float64).tolist()
        for name, rows in (("images", images), ("texts", texts))
        if rows is not None
    }
    answer = {"version": version(package) if package else "", **vectors, **own}
    (Path(job.out) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


def rank_images(texts: Any, images: Any, k: int = 3) -> list[list[int]]:
    """The images nearest to each caption by cosine, as a vector database ranks them."""
    texts_ME, images_NE = (np.stack([row / np.linalg.norm(row) for row in rows]) for rows in (texts, images))
    top: list[list[int]] = (-texts_ME @ images_NE.T).argsort(1, kind="stable")[:, :k].tolist()
    return top
