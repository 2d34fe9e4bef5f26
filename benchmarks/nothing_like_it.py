"""How often "nothing like it" of `m1clip search` is right, on images that the model was not calibrated on.

    python benchmarks/nothing_like_it.py EXPORT --labels FOLDER
    python benchmarks/nothing_like_it.py EXPORT --captions captions.csv --images FOLDER --list train.txt

With labels (a folder for each), the names of the labels are the queries. With captions (CSV with the columns image and
caption), their words and pairs of words are, as in calibration. For each query, libraries of 30 to all images are
drawn, half of them without a fitting image; and libraries of fitting images alone. Intervals are by bootstrap over the
queries, because the libraries of one query are alike.
"""

import argparse
import csv
from pathlib import Path

import numpy as np

from m1clip.calibration import WordQueries, find_peak, word_queries
from m1clip.onnx_model import OnnxCLIP, load_onnx

LIBRARIES, RESAMPLES, KNOWN = 64, 2_000, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of m1clip export --to onnx")
    parser.add_argument("--labels", type=Path, metavar="FOLDER")
    parser.add_argument("--captions", type=Path, metavar="CSV")
    parser.add_argument("--images", type=Path, metavar="FOLDER")
    parser.add_argument("--list", type=Path, metavar="FILE", help="names of images, one in each line")
    parser.add_argument("--rows", type=int, nargs=2, default=(0, None), metavar=("FIRST", "END"), help="of the list")
    args = parser.parse_args()
    model = load_onnx(args.model)
    print(f"rule: {model.calibration}\n")
    if args.labels:
        images, queries = read_labels(args.labels)
    else:
        images, queries = read_captions(args.captions, args.images, args.list, slice(*args.rows))
    image_NE, text_QE = model.encode_image(images, progress=True), model.encode_text(queries.texts)
    measure(f"{len(images):,} images, all {len(queries.texts)} queries", model, image_NE, text_QE, queries)
    if args.captions:
        areas = [ranking(*row) for row in zip(text_QE @ image_NE.T, queries.is_fitting_QN, strict=True)]
        known = np.flatnonzero(np.array(areas) >= KNOWN)
        some = WordQueries([queries.texts[q] for q in known], queries.is_fitting_QN[known], queries.is_other_QN[known])
        measure(f"the {len(known)} queries that the model knows", model, image_NE, text_QE[known], some)


def read_labels(folder: Path) -> tuple[list[Path], WordQueries]:
    images = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    labels = sorted({path.parent.name for path in images})
    has_QN = np.array([[path.parent.name == label for path in images] for label in labels])
    return images, WordQueries(labels, has_QN, ~has_QN)


def read_captions(table: Path, folder: Path, names: Path | None, rows: slice) -> tuple[list[Path], WordQueries]:
    captions = dict[str, list[str]]()
    with open(table, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            captions.setdefault(row["image"], []).append(row["caption"])
    chosen = names.read_text().split() if names else sorted(captions)
    chosen = chosen[rows]
    return [folder / name for name in chosen], word_queries([captions[name] for name in chosen])


def measure(title: str, model: OnnxCLIP, image_NE, text_QE, queries: WordQueries) -> None:  # type: ignore[no-untyped-def]
    """How often the answer comes, and how often it is right."""
    assert model.calibration is not None
    assert model.reference_RE is not None, "the model has no rule"
    rng, counts = np.random.default_rng(0), list[list[int]]()
    for text_E, fits_N, other_N in zip(text_QE, queries.is_fitting_QN, queries.is_other_QN, strict=True):
        score_N, peak = image_NE @ text_E, find_peak(text_E, model.reference_RE)
        fitting, others = np.flatnonzero(fits_N), np.flatnonzero(other_N)
        row = [0, 0, 0, 0]
        for number in range(LIBRARIES):
            size = int(np.exp(rng.uniform(np.log(30), np.log(len(image_NE)))))
            library, some = (
                rng.permutation(others)[:size],
                rng.permutation(fitting)[: rng.integers(1, len(fitting) + 1)],
            )
            chosen = score_N[np.concatenate([library, some]) if number % 2 else library]
            row[number % 2] += model.calibration.is_nothing(peak, chosen.max(), chosen.mean())
            row[2] += not number % 2
            row[3] += model.calibration.is_nothing(peak, score_N[some].max(), score_N[some].mean())
        counts.append(row)
    table = np.array(counts)
    right, wrong, absent, alone = table.sum(0)
    answering = int((table[:, 0] + table[:, 1] > 0).sum())
    low, high = bootstrap(table, rng)
    print(title)
    print(f"  precision {right / max(1, right + wrong):.3f} (95 %: {low:.2f}–{high:.2f})", end="")
    print(f", {right + wrong:,} answers to {answering} queries")
    print(f"  libraries without a fitting image that got the answer: {right / absent:.1%}")
    print(f"  libraries of fitting images alone that got it, wrongly: {alone / (LIBRARIES * len(table)):.2%}\n")


def ranking(score_N, has_N) -> float:  # type: ignore[no-untyped-def]
    """The probability that an image with the word ranks before one without it: the area under the ROC curve."""
    rank_N = np.argsort(np.argsort(score_N))
    with_word, without = int(has_N.sum()), int((~has_N).sum())
    return float((rank_N[has_N].sum() - with_word * (with_word - 1) / 2) / max(1, with_word * without))


def bootstrap(table, rng) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    sums = np.array([table[rng.integers(0, len(table), len(table))].sum(0) for _ in range(RESAMPLES)])
    low, high = np.quantile(sums[:, 0] / np.maximum(1, sums[:, 0] + sums[:, 1]), [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
