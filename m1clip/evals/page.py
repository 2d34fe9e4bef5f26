"""The results of an evaluation as files: a page with figures, JSON, predictions, and files for CLIP_benchmark.

The text is in templates/evaluation.md.j2, which the report of a run includes too. No torch.
"""

import base64
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from m1clip.document import COLORS, Markdown, axes, save_figure, write_document
from m1clip.files import json_safe, replace_files
from m1clip.format import interval, number, percent, with_interval

TEMPLATE = "evals/templates/evaluation.md.j2"
OUTPUTS = ("*.png", "error-*.jpg", "predictions.csv", "clip_benchmark/*.json")
MAX_NAMED = 60  # labels of a confusion matrix that are named
Record = dict[str, Any]


def write_page(
    record: Record, metrics: Mapping[str, Mapping[str, Any]], errors: Sequence[Record], folder: Path
) -> Path:
    """Write all files into the folder; return the path of the HTML file. `errors` are predictions with thumbnails."""
    with replace_files(folder) as partial:
        predictions = record["predictions"]
        if predictions:
            with open(partial / "predictions.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, predictions[0])
                writer.writeheader()
                writer.writerows(predictions)
        details = json_safe({name: value for name, value in record.items() if name != "predictions"})
        details["errors"] = write_errors(errors, partial)
        (partial / "eval.json").write_text(json.dumps(details, indent=1) + "\n")
        (partial / "clip_benchmark").mkdir()
        for task, scores in metrics.items():
            names = {key: record[key] for key in ("dataset", "model", "pretrained", "language")}
            result = {**names, "task": task, "metrics": dict(scores)}
            (partial / "clip_benchmark" / f"{task}.json").write_text(json.dumps(json_safe(result)) + "\n")
        figures = draw_figures(details, partial)
        model = Path(record["model"])
        title = f"{model.parent.name if model.name == 'model' else model.name} on {record['dataset']}"
        values = {"eval": details, "heading": Markdown("##"), "prefix": "", "figures": figures, **FUNCTIONS}
        page = write_document(partial, "eval", title, TEMPLATE, **values)
        new = {file.relative_to(partial) for file in partial.rglob("*")}
    for old in [path for pattern in OUTPUTS for path in folder.glob(pattern)]:
        if old.relative_to(folder) not in new:  # of an earlier evaluation with other tasks
            old.unlink()
    return folder / page.name


def write_errors(errors: Sequence[Record], folder: Path) -> list[Record]:
    """Write the thumbnails; the predictions with the names of their files."""
    written = []
    for index, error in enumerate(errors, 1):
        if error["jpeg"]:
            (folder / f"error-{index}.jpg").write_bytes(base64.b64decode(error["jpeg"]))
            written.append({**error, "jpeg": f"error-{index}.jpg"})
    return written


FUNCTIONS = {one.__name__: one for one in (percent, number, interval, with_interval, zip)}


def draw_figures(details: Record, folder: Path) -> list[str]:
    """Draw what was measured; return the names of the files."""
    if zeroshot := details.get("zeroshot"):
        if zeroshot["confusion"]:
            draw_confusion(zeroshot, folder / "confusion.png")
        draw_calibration(zeroshot, folder / "calibration.png")
    if (probe := details.get("probe")) and probe["few_shot"]:
        draw_few_shot(probe, zeroshot, folder / "few_shot.png")
    if robustness := details.get("robustness"):
        draw_robustness(robustness, folder / "robustness.png")
    return sorted(file.name for file in folder.iterdir() if file.suffix in (".png", ".jpg"))


def draw_confusion(zeroshot: Record, path: Path) -> None:
    """Rows are correct labels, as fractions of their images; labels without images are left out of the rows."""
    counts, labels = np.array(zeroshot["confusion"], float), zeroshot["labels"]
    rows = np.flatnonzero(counts.sum(1))
    fractions = counts[rows] / counts[rows].sum(1, keepdims=True)
    size = min(12.0, max(4.0, 1.5 + 0.2 * len(labels)))
    figure, (panel,) = axes(1, size + 1.2, size)
    image = panel.imshow(100 * fractions, cmap="Blues", vmin=0, vmax=100, aspect="auto", interpolation="nearest")
    panel.grid(visible=False)
    if len(labels) <= MAX_NAMED:
        panel.set_xticks(range(len(labels)), labels, rotation=90, fontsize=7)
        panel.set_yticks(range(len(rows)), [labels[row] for row in rows], fontsize=7)
    panel.set(xlabel="predicted", ylabel="correct")
    if len(labels) <= 12:
        for i, row in enumerate(fractions):
            for j, value in enumerate(row):
                if value >= 0.005:
                    color = "white" if value > 0.5 else "black"
                    panel.text(j, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=8, color=color)
    bar = figure.colorbar(image, ax=panel)
    bar.set_label("% of the images of a label")
    save_figure(figure, path)


def draw_calibration(zeroshot: Record, path: Path) -> None:
    bins = [bin for bin in zeroshot["bins"] if bin[0]]
    counts, probabilities, accuracies = (np.array(column, float) for column in zip(*bins, strict=True))
    figure, (reliability, histogram) = axes(2, 4.6, 3.2)
    reliability.plot([0, 100], [0, 100], color=COLORS[6], lw=1, ls="--", label="calibrated")
    sizes = 12 + 90 * counts / counts.max()
    reliability.plot(100 * probabilities, 100 * accuracies, color=COLORS[0], lw=1.2)
    reliability.scatter(100 * probabilities, 100 * accuracies, s=sizes, color=COLORS[0], label="images by probability")
    reliability.set(xlabel="probability of the best label, %", ylabel="accuracy, %", xlim=(0, 102), ylim=(0, 102))
    reliability.set_title("reliability", fontsize=10)
    reliability.legend(frameon=False, fontsize=8)
    edges = np.arange(len(zeroshot["bins"])) * 100 / len(zeroshot["bins"])
    width = 100 / len(zeroshot["bins"])
    histogram.bar(edges + width / 2, [bin[0] for bin in zeroshot["bins"]], 0.9 * width, color=COLORS[5])
    histogram.set(xlabel="probability of the best label, %", ylabel="images", xlim=(0, 100))
    histogram.set_title("probabilities", fontsize=10)
    save_figure(figure, path)


def draw_few_shot(probe: Record, zeroshot: Record | None, path: Path) -> None:
    shots, means, stds = ([one[key] for one in probe["few_shot"]] for key in ("shots", "mean", "std"))
    figure, (panel,) = axes(1, 5.6, 3.3)
    style: Record = {"marker": "o", "ms": 4, "capsize": 3, "color": COLORS[0], "label": "few-shot probe"}
    panel.errorbar(shots, 100 * np.array(means), 100 * np.array(stds), **style)
    lines = {"linear probe, all training images": (probe["accuracy"], COLORS[2])}
    if zeroshot:
        lines["zero-shot"] = (zeroshot["accuracy"], COLORS[1])
    for name, (value, color) in {**lines, "chance": (probe["chance"], COLORS[6])}.items():
        panel.axhline(100 * value, color=color, lw=1.2, ls="--", label=name)
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    panel.set_xscale("log", base=2)
    panel.set_xticks(shots, map(str, shots))
    panel.set(xlabel="training images per label", ylabel="accuracy, %", ylim=(0, 102))
    save_figure(figure, path)


def draw_robustness(robustness: Record, path: Path) -> None:
    figure, (panel,) = axes(1, 5.6, 3.3)
    for (kind, scores), color in zip(robustness["scores"].items(), COLORS, strict=False):
        values = 100 * np.array([robustness["clean"], *scores])
        panel.plot(range(len(values)), values, marker="o", ms=3, lw=1.4, color=color, label=kind)
    panel.axhline(100 * robustness["chance"], color=COLORS[6], lw=1, ls="--", label="chance")
    panel.set(xlabel="strength of the corruption", ylabel=f"{robustness['metric']}, %")
    panel.set_ylim(bottom=0)
    panel.legend(frameon=False, fontsize=8, ncols=2)
    save_figure(figure, path)
