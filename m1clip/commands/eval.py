"""m1clip eval: what a model is good for, on its own or other data."""

import json
import os
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from m1clip.commands import RunsFolder
from m1clip.console import command, loading, show_retrieval, show_rows
from m1clip.files import json_safe
from m1clip.format import number, percent, with_interval
from m1clip.run import Run, is_empty, is_run

if TYPE_CHECKING:  # imports torch
    from m1clip.evaluation import EvalResult

SHOWN_LABELS = 8  # worst labels that are printed


@dataclass(frozen=True)
class Args(RunsFolder):
    """Every task that the data allows: retrieval, zero-shot classification, probes, changed captions, corruptions.

    m1clip eval                                     the newest run on its validation split
    m1clip eval nano-1 --data photos/               labelled folders: zero-shot accuracy, linear probe, few-shot
    m1clip eval nano-1 --data coco:~/coco --task retrieval
    m1clip eval nano-1 --data pets.csv --task zeroshot --template "a photo of a {}, a pet."
    m1clip eval nano-1 --data sugarcrepe:~/sugarcrepe       also aro:DIR, winoground:DIR
    m1clip eval path/to/model --json                one line of JSON with CLIP_benchmark's keys

    A run gets a page with figures, evals/DATA-SPLIT/eval.html in its folder; --out writes it elsewhere.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """A run (name or path) or a model folder; by default the newest run."""
    data: Annotated[str | None, tyro.conf.arg(metavar="SPEC")] = None
    """Data to evaluate on; by default the run's own, or synthetic."""
    task: tuple[Literal["retrieval", "zeroshot", "probe", "edits", "robustness"], ...] = ()
    """Only these tasks; by default all that the data allows."""
    split: Literal["auto", "val", "test", "all"] = "auto"
    """Split, or every image; auto is val, or all of other data without splits of its own."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Labels to choose from (cat,dog,… or a file), if not those of the data; of class numbers, their names from 0."""
    template: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT|FILE")] = ()
    """Prompt with {} for the label, file of prompts or descriptions (JSON), or openai; repeatable."""
    val_size: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of images; by default as in training."""
    seed: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Seed of synthetic scenes and of few-shot draws; by default the run's."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Table column with the image; by default as in training, or guessed."""
    caption_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Table column with the caption."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Table column with the class of the image; by default label, class, category …"""
    caption_from: Literal["auto", "text", "folder", "filename"] | None = None
    """Captions of a folder: .txt files beside the images, folder names, or file names."""
    max_bad_rows: Annotated[float | None, tyro.conf.arg(metavar="FRACTION")] = None
    """Largest fraction of unusable rows; they are listed and skipped."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for the page, figures, predictions and JSON; by default evals/NAME in the run's folder."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print all results as one line of JSON."""

    def check(self) -> None:
        out = self.out
        if out and out.exists() and not (out.is_dir() and ((out / "eval.json").is_file() or is_empty(out))):
            raise ValueError(f"--out {out} exists and is not an earlier evaluation; choose a new folder")


SETTINGS = ("data", "val_size", "seed", "labels", "image_column", "caption_column", "label_column", "caption_from")


def main(args: Args) -> None:
    with loading():
        from m1clip.evaluation import evaluate

    names = (*SETTINGS, "max_bad_rows")
    settings: Any = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    options: Any = {"tasks": args.task, "split": args.split, "templates": args.template, "device": args.device}
    result = evaluate(args.model, runs=args.runs, **options, **settings)
    folder = args.out or own_folder(result, args)
    with loading("writing the page"):
        page = result.write(folder) if folder else None
    if args.json:
        scores = result.scores.record() if result.scores else {}
        print(json.dumps(json_safe({**scores, **result.record(), "page": str(page) if page else None})))
        return
    show_result(result, is_own_split=args.split in ("auto", "val") and not settings)
    print(f"\npage: {page}" if page else f"\n{command('eval', '--out', 'DIR')} … writes a page with figures")


def own_folder(result: "EvalResult", args: Args) -> Path | None:
    """evals/NAME in the run that the model belongs to; None for other models."""
    run = next((parent for parent in result.model.resolve().parents[:2] if is_run(parent)), None)
    scheme, _, path = result.data.rpartition(":")
    parts = [scheme, *Path(os.path.abspath(os.path.expanduser(path))).parts[-2:]] if "/" in path else [result.data]
    name = re.sub(r"[^\w.-]+", "-", "-".join(filter(None, parts))).strip("-.")[:60]
    split = result.split.partition(" ")[0].replace("/", "-")
    variant = (args.labels, *args.template) if args.labels or args.template else ()
    key = [blake2b(repr(variant).encode(), digest_size=3).hexdigest()] if variant else []
    return run / "evals" / "-".join([name or "data", split, *args.task, *key]) if run else None


def show_result(result: "EvalResult", is_own_split: bool) -> None:
    print(f"{result.model} on {result.data}, split: {result.split}, {result.images:,} images\n")
    if result.zeroshot:
        show_zeroshot(result)
    if result.probe:
        show_probe(result)
    if result.scores:
        record = result.scores.record()
        if result.zeroshot:
            record = {key: value for key, value in record.items() if key != "label_accuracy"}
        # The run has compared its own split with its training images.
        data = Run(result.model.parent).read_or_empty("data.json") if is_own_split else {}
        title = "validation retrieval" if result.split.startswith("val") else "retrieval"
        show_retrieval(record, data.get("val_near_duplicates"), title)
    if result.edits:
        rows = [
            (edit.changed, with_interval(edit.accuracy, edit.edits), f"{edit.edits:,}", percent(edit.chance))
            for edit in result.edits
        ]
        title = "\ncaption changed: is the original closer to the image?"
        show_rows(title, ("changed", "accuracy (95 % interval)", "captions", "chance"), rows)
    if robustness := result.robustness:
        cells = [[kind, percent(robustness.clean), *map(percent, values)] for kind, values in robustness.scores.items()]
        cells.append(["chance", percent(robustness.chance), *[""] * 5])
        title = f"\n{robustness.metric} of corrupted images, by strength ({robustness.images:,} images)"
        show_rows(title, ("", "clean", "1", "2", "3", "4", "5"), cells)
    for task, reason in result.results.skipped.items():
        print(f"\nnot measured: {task} ({reason})")


def show_zeroshot(result: "EvalResult") -> None:
    from m1clip.evals.zeroshot import gain_is_significant  # imports torch

    one = result.zeroshot
    assert one is not None
    rows = [("top-1", with_interval(one.accuracy, one.images))]
    if one.top5 is not None:
        rows.append(("top-5", with_interval(one.top5, one.images)))
    rows += [("mean per label", percent(one.mean_per_class)), ("chance", percent(one.chance))]
    rows.append(("most frequent label", percent(one.majority)))
    show_rows(f"zero-shot: {one.images:,} images, {len(one.labels):,} labels", ("", "accuracy (95 % interval)"), rows)
    print(f"prompts: {one.prompts}", end="\n" if one.label_only is None else "")
    if one.label_only:
        plain, won, lost = one.label_only
        gain = round(100 * (one.accuracy - plain), 1) + 0.0  # not -0.0
        doubt = "" if gain_is_significant(won, lost) else "; not significant"
        print(f", {gain:+.1f} points ({won} images won, {lost} lost{doubt}) against the names alone, {percent(plain)}")
    for note in one.notes:
        print(note)
    known = [(recall, name) for recall, name in zip(one.recall, one.labels, strict=True) if recall is not None]
    worst = ", ".join(f"{name} {percent(recall)}" for recall, name in sorted(known)[:SHOWN_LABELS])
    print(f"worst labels: {worst}\ncalibration error (ECE) {percent(one.ece)}\n")


def show_probe(result: "EvalResult") -> None:
    probe = result.probe
    assert probe is not None
    rows = [("linear probe", with_interval(probe.accuracy, probe.test_images), f"C = {number(probe.c, 2)}")]
    knn = with_interval(probe.knn_accuracy, probe.test_images)
    rows.append(("nearest neighbors", knn, f"k = {probe.neighbors}"))
    for one in probe.few_shot:
        fewer = f"; {one.short} labels have fewer" if one.short else ""
        spread = f"{percent(one.mean)} ± {100 * one.std:.1f}"
        rows.append((f"{one.shots}-shot", spread, f"{one.draws} draws{fewer}"))
    rows += [("chance", percent(probe.chance), ""), ("most frequent label", percent(probe.majority), "")]
    sizes = f"{probe.train_images:,} training and {probe.test_images:,} test images"
    show_rows(f"frozen image embeddings: {sizes}", ("", "accuracy (95 % interval)", "with"), rows)
    print("\n".join([*probe.notes, ""]))
