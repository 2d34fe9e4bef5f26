"""m1clip export: a model as files for other programs, each compared with the model before it is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from m1clip.commands import RunsFolder
from m1clip.config import Target, require
from m1clip.console import Console, loading, show_rows
from m1clip.format import UNKNOWN, file_size, milliseconds, number, percent, with_interval
from m1clip.run import Run, find_model, find_run, open_run
from m1clip.targets import TARGETS

if TYPE_CHECKING:  # imports torch
    from m1clip.evals.retrieval import Retrieval
    from m1clip.export.export import Exported
    from m1clip.export.quantize import Search
    from m1clip.export.verify import FileCheck

Targets = tuple[Target | Literal["all"], ...]


@dataclass(frozen=True)
class Args(RunsFolder):
    """Export a model for other programs. Each file is loaded again and compared with torch; none that fails is kept.

    m1clip export nano-1                                   ONNX, for onnxruntime and m1clip.load without torch
    m1clip export nano-1 --int8                            INT8: the fastest recipe here that loses no recall
    m1clip export nano-1 --to coreml                       Core ML packages for macOS and iOS
    m1clip export nano-1 --to immich fastembed --out DIR   folders that other products open
    m1clip export nano-1 --to all --out DIR                everything that this model fits
    m1clip export ViT-B-32.pt --to m1clip                  weights of OpenAI or OpenCLIP as an m1clip model

    Targets: onnx, coreml, rclip, immich, fastembed, transformers-js, sentence-transformers, infinity, transformers,
    open_clip (also CLIP_benchmark), queryable, m1clip, all.
    """

    model: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|MODEL]")] = None
    """Run (name or path; by default the newest), model folder, or a CLIP of another library: file, folder, hub name."""
    to: Annotated[Targets, tyro.conf.arg(metavar="TARGET ...")] = ("onnx",)
    """What to write; see above."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Output folder, with a folder in it for each of several targets; by default export/TARGET in the run."""
    int8: tyro.conf.FlagCreatePairsOff[bool] = False
    """Quantize to INT8: several recipes are tried on this machine with the validation data."""
    precision: Literal["fp16", "fp32"] = "fp16"
    """Precision of Core ML packages."""
    opset: Literal[18, 23] = 18
    """ONNX opset; 23 is faster in new runtimes, 18 runs in all."""
    max_loss: Annotated[float, tyro.conf.arg(metavar="POINTS")] = 0.5
    """Largest loss of R@1 in points."""
    data: Annotated[str, tyro.conf.arg(metavar="SPEC")] = ""
    """Images and captions to compare on; by default the run's validation split, or else generic images."""
    val_size: Annotated[int, tyro.conf.arg(metavar="N")] = 1000
    """Images to compare on, at most."""
    force: tyro.conf.FlagCreatePairsOff[bool] = False
    """Keep files that fail the comparison."""
    overwrite: tyro.conf.FlagCreatePairsOff[bool] = False
    """Replace an earlier export."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="FILE")] = ""
    """Vocabulary of a checkpoint without one (bpe_simple_vocab_16e6.txt.gz or merges.txt)."""
    model_name: Annotated[str, tyro.conf.arg(metavar="NAME")] = ""
    """Architecture of a checkpoint by its name in open_clip, such as ViT-B-16-SigLIP."""
    quick_gelu: tyro.conf.FlagCreatePairsOff[bool] = False
    """The checkpoint was trained with quick_gelu, but has no configuration that says so."""

    def check(self) -> None:
        require(bool(self.to), f"--to needs a target: {', '.join(get_args(Target))} or all")
        require(self.val_size >= 2, f"--val-size must be at least 2, not {self.val_size}")
        require(0 <= self.max_loss <= 100, f"--max-loss must be 0 to 100 points, not {self.max_loss}")


def main(args: Args) -> int:
    console = Console()
    run = open_run(args.runs, None) if args.model is None else find_run(args.runs, args.model)
    folder = find_model(args.runs, args.model)
    spec = str(folder or args.model)
    with loading():
        from m1clip.export.export import Options, export_model
        from m1clip.model.pretrained_clip import import_clip

    if run and folder and folder != run.model:
        console.warn(f"{run.path} has no finished model: its checkpoint {folder.resolve().name} is exported")
    model, note = import_clip(spec, args.tokenizer, args.quick_gelu, args.model_name)
    if note:
        console.warn(f"{spec}: {note}")
    options = Options(args.int8, args.precision, args.opset, args.max_loss, args.force)
    settings: dict[str, Any] = {"data": args.data, "val_size": args.val_size, "overwrite": args.overwrite}
    out = args.out or default_out(args, run)
    settings["spec"] = args.model or ""
    results = export_model(model, args.to, out, options, source=folder, console=console, **settings)
    search = next((result.search for result in results if result.search), None)
    if search:
        show_search(search)
    for result in results:
        show_export(result)
    return int(any(result.failed for result in results))


def default_out(args: Args, run: Run | None) -> Path:
    """export/TARGET in the run, or a folder beside the model."""
    name = args.to[0] if len(args.to) == 1 and args.to[0] != "all" else ""
    if run:
        return run.path / "export" / name
    path = Path(str(args.model)).expanduser()
    stem = path.stem if path.is_file() else path.name
    return (path.parent if path.exists() else Path()) / f"{stem}-{name or 'export'}"


def show_export(result: "Exported") -> None:
    """The files of a target, what was measured, and how the folder is opened."""
    what, opened = TARGETS[result.target]
    show_rows(f"\n{result.target}: {what}", COLUMNS, [file_row(check) for check in result.checks])
    if result.before and result.after:
        print("\n".join(recall_lines(result.before, result.after)))
    if result.checks:
        print(f"compared with torch by {result.checks[0].checked_by} on {result.compared_on}")
    for note in result.notes:
        print(note)
    for problem in result.problems:
        print(f"FAILED {problem}")
    if not result.is_written:
        print(f"{result.folder} was not written; --force keeps files that fail")
    else:
        print(f"{result.folder}\n{opened.format(result.folder)}")


COLUMNS = ("file", "size", "min. cosine", "max. diff.", "cold start", "items/s (batch)", "× torch")


def file_row(check: "FileCheck") -> Sequence[str]:
    ours, theirs = check.items_per_s or {}, check.torch_items_per_s or {}
    speeds = show_speeds(ours)
    ratios = ", ".join(f"{speed / theirs[batch]:.1f}" for batch, speed in ours.items() if batch in theirs) or UNKNOWN
    cold_start = UNKNOWN if check.cold_start_ms is None else milliseconds(check.cold_start_ms)
    cosine, difference = f"{check.min_cosine:.7f}", f"{check.max_difference:.1e}"
    return (check.file, file_size(check.bytes), cosine, difference, cold_start, speeds, ratios)


def show_speeds(items_per_s: Mapping[int, float]) -> str:
    return ", ".join(f"{number(speed)} ({batch})" for batch, speed in items_per_s.items()) or UNKNOWN


def recall_lines(before: "Retrieval", after: "Retrieval") -> list[str]:
    """Both directions before and after, with intervals."""
    directions = (("image→text", "image_to_text", before.images), ("text→image", "text_to_image", before.captions))
    lines = []
    for name, direction, count in directions:
        old, new = (getattr(scores, direction).r1 for scores in (before, after))
        lines.append(f"R@1 {name} {with_interval(old, count)} → {with_interval(new, count)}")
    return [*lines[:-1], f"{lines[-1]}, chance {percent(before.chance_r1)}"]


def show_search(search: "Search") -> None:
    """The INT8 recipes that were tried for each encoder, the fastest first."""
    for tower, trials in search.trials.items():
        rows = []
        for trial in trials:
            check, after = trial.check, trial.after
            speeds = show_speeds((check and check.items_per_s) or {})
            state = "kept" if trial is search.chosen[tower] else trial.problem or "slower, not needed"
            cosine = f"{check.min_cosine:.4f}" if check else UNKNOWN
            size, recall = file_size(check.bytes) if check else UNKNOWN, percent(after.mean_r1) if after else UNKNOWN
            rows.append((trial.recipe.name, size, cosine, recall, speeds, state))
        rows.append(("fp32, for comparison", UNKNOWN, UNKNOWN, UNKNOWN, show_speeds(search.fp32[tower]), ""))
        columns = ("recipe", "size", "min. cosine", "mean R@1", "items/s (batch)", "")
        beside = "the text encoder in fp32" if tower == "vision" else "the vision encoder in INT8"
        show_rows(f"\nINT8 recipes for the {tower} encoder, beside {beside}", columns, rows)
