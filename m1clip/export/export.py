"""Export a model to one or several targets: write, load again, compare with torch, and keep only what passes."""

import copy
import hashlib
import io
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from m1clip import __version__, sensors
from m1clip.calibration import SEARCH_REFERENCE, Calibration, calibrate, word_queries, write_reference
from m1clip.config import Target, TimmConfig, TrainConfig
from m1clip.console import Console
from m1clip.data.splits import Split
from m1clip.evals.embed import Embedder
from m1clip.evals.retrieval import Retrieval
from m1clip.evaluation import eval_config, is_part_of, open_eval_data, trained_config
from m1clip.export.graph import make_encoders
from m1clip.export.layouts import ONNX_LAYOUTS, OnnxEncoders, ProductLayout, Written
from m1clip.export.onnx import OPSET, export_onnx, require_onnx
from m1clip.export.quantize import Search, find_int8
from m1clip.export.verify import (
    SAMPLE,
    Array,
    ExportFailed,
    FileCheck,
    Reference,
    Tower,
    check_encoder,
    check_joint,
    compare_speed,
    find_difference,
    find_loss,
    find_token_difference,
    load_session,
    require_any_length,
    torch_encoder,
)
from m1clip.files import atomic_folder, json_safe, remove_partial
from m1clip.model.clip import CLIP
from m1clip.model.pretrained import require_extra
from m1clip.settings import DataSettings
from m1clip.targets import TARGETS, find_misfit

MANIFEST = "export.json"
COREML_TARGETS = ("coreml", "queryable")
VAL_SIZE, GENERIC = 1_000, "synthetic:1000"
BUSY = 0.2  # share of the CPU that others use, from which speeds are not to be trusted
UNKNOWN_LICENSE = "unknown: see where the weights come from"
LIBRARIES = ("torch", "onnx", "onnxscript", "onnxruntime", "coremltools", "transformers", "open_clip_torch", "timm")


@dataclass(frozen=True)
class Options:
    int8: bool = False
    precision: Literal["fp16", "fp32"] = "fp16"  # of Core ML
    opset: int = OPSET
    max_loss: float = 0.5  # points of R@1
    force: bool = False


@dataclass
class Exported:
    """One target: its folder, what was checked, and what failed."""

    target: Target
    folder: Path
    checks: list[FileCheck] = field(default_factory=list)
    before: Retrieval | None = None  # recall of the model, and of the exported encoders
    after: Retrieval | None = None
    search: Search | None = None  # the INT8 recipes
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    calibration: Calibration | None = None  # of search
    compared_on: str = ""  # which images
    is_written: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.problems)


@dataclass(frozen=True)
class Verified:
    """ONNX encoders that were run on the whole reference."""

    encoders: OnnxEncoders
    checks: dict[Tower, FileCheck]
    after: Retrieval
    problems: list[str]
    search: Search | None = None


class Exporter:
    """Exports one model; graphs that several targets share are made and verified once."""

    def __init__(
        self, reference: Reference, options: Options, facts: dict[str, Any], workspace: Path, console: Console
    ):
        self.reference, self.options, self.facts, self.console = reference, options, facts, console
        self.model, self.workspace = reference.model, workspace

    def export(self, target: Target, folder: Path) -> Exported:
        """Write a target's folder. If a check fails, nothing is left of it, unless the export is forced."""
        result = Exported(target, folder)
        try:
            with atomic_folder(folder) as partial_folder:
                result = self.write(target, partial_folder, folder)
                result.compared_on = result.compared_on or self.reference.description
                self.write_manifest(result, partial_folder)
                if result.failed and not self.options.force:
                    raise ExportFailed("; ".join(result.problems))
            result.is_written = True
        except (ExportFailed, ValueError) as error:  # such as an operator that Core ML does not have
            result.problems = result.problems or [str(error)]
        return result

    def write(self, target: Target, folder: Path, final: Path) -> Exported:
        if target in ONNX_LAYOUTS:
            return self.write_onnx_layout(target, folder, final)
        if target in COREML_TARGETS:
            from m1clip.export.apple import write_packages

            precision: Literal["fp16", "fp32", "int8"] = "int8" if self.options.int8 else self.options.precision
            checks, after, reference, notes = write_packages(target, self.reference, precision, folder, self.console)
            result = Exported(target, final, checks, reference.recall, after, notes=notes)
            result.compared_on = reference.description
            self.judge_tokenizers(result, folder)
            return self.judge(result, reference)
        from m1clip.export.weights import write_weights

        reference = self.reference.first(SAMPLE)  # the same weights: a sample shows whether they are in their places
        result = Exported(target, final, write_weights(target, reference, folder), compared_on=reference.description)
        return self.judge(result, self.reference)

    def judge_tokenizers(self, result: Exported, folder: Path) -> None:
        for path in folder.rglob("tokenizer.json"):
            if problem := find_token_difference(path, self.reference):
                result.problems.append(problem)

    def judge(self, result: Exported, reference: Reference) -> Exported:
        """Add what is wrong with the files of a target."""
        result.problems += [problem for check in result.checks if (problem := find_difference(check, reference))]
        if result.after and (loss := find_loss(result.after, reference, self.options.max_loss)):
            result.problems.append(loss)
        return result

    def write_onnx_layout(self, target: Target, folder: Path, final: Path) -> Exported:
        verified = self.int8 if self.options.int8 else self.fp32
        written = ONNX_LAYOUTS[target](ProductLayout(self.model, self.fp32.encoders, verified.encoders), folder)
        result = Exported(target, final, problems=list(verified.problems), search=verified.search)
        result.before, result.after = self.reference.recall, verified.after
        for one in written:
            whole = (self.fp32 if one.precision == "fp32" else verified).checks[one.tower]
            result.checks.append(self.check_copy(folder / one.file, one, whole))
        if target in ("fastembed", "transformers-js"):  # which pad captions to the longest of a batch
            require_any_length([folder / one.file for one in written if one.tower == "text"])
        for path in sorted((folder / "onnx").glob("model*.onnx")):  # the joint graphs of transformers.js
            check_joint(path, self.reference, is_int8="quantized" in path.name)
        if target == "rclip":
            self.add_rclip_package(result, folder)
        if target == "onnx":
            result.calibration = self.calibrate_search(folder)
        if target != "onnx":  # where the tokenizer is ours, and start and end tokens are added by m1clip
            self.judge_tokenizers(result, folder)
        result.problems += [problem for check in result.checks if (problem := find_difference(check, self.reference))]
        return result

    def calibrate_search(self, folder: Path) -> Calibration | None:
        """Learn when a library has nothing like a text; None without images like those that the model knows."""
        if self.reference.is_generic or not self.reference.is_above_chance:
            return None
        image_NE, embedder = self.reference.image_NE, Embedder(self.model, self.console.progress)
        found = calibrate(
            lambda texts: embedder.texts(texts).numpy(), word_queries(self.reference.captions()), image_NE
        )
        if found and found.has_rule:
            write_reference(folder / SEARCH_REFERENCE, image_NE)
        return found

    def add_rclip_package(self, result: Exported, folder: Path) -> None:
        """The Core ML package that rclip looks for on macOS, where coremltools is installed."""
        if find_spec("coremltools") is None:
            missing = "without pip install 'm1clip[coreml]' there is no Core ML package"
            result.notes.append(f"{missing}: on macOS, set RCLIP_USE_ONNX_ON_MACOS=1")
            return
        from m1clip.export.apple import write_packages

        checks, _, _, notes = write_packages("rclip", self.reference, "fp32", folder, self.console)
        result.checks += checks
        result.notes += notes

    def check_copy(self, path: Path, one: Written, whole: FileCheck) -> FileCheck:
        """Run a sample of the items; the rest was measured with the graph that it is a copy of."""
        arguments = (path, one.file, one.tower, one.precision, self.load, self.reference)
        check, _, _ = check_encoder(*arguments, limit=SAMPLE)
        lowest = min(check.min_cosine, whole.min_cosine)
        largest = max(check.max_difference, whole.max_difference)
        copied = replace(whole, file=one.file, bytes=check.bytes, cold_start_ms=check.cold_start_ms)
        return replace(copied, min_cosine=lowest, max_difference=largest)

    @cached_property
    def load(self) -> Any:
        assert self.model.tokenizer is not None
        return partial(load_session, pad_id=self.model.tokenizer.settings.pad_id, width=self.model.config.embed_dim)

    @cached_property
    def fp32(self) -> Verified:
        require_onnx()
        traced = make_encoders(self.model)
        paths: dict[Tower, Path] = {"vision": self.workspace / "vision.onnx", "text": self.workspace / "text.onnx"}
        with self.console.progress("exporting to ONNX", 2) as advance:
            for encoder, path in ((traced.image, paths["vision"]), (traced.text, paths["text"])):
                export_onnx(encoder, path, self.options.opset)
                advance(1)
        return self.verify(OnnxEncoders(paths["vision"], paths["text"], "fp32"))

    @cached_property
    def int8(self) -> Verified:
        search = find_int8(
            self.fp32.encoders, self.reference, self.options.max_loss, self.workspace, self.load, self.console
        )
        verified = self.verify(OnnxEncoders(search.chosen["vision"].path, search.chosen["text"].path, "int8"))
        return replace(verified, search=search)

    def verify(self, encoders: OnnxEncoders) -> Verified:
        """Run both files on the whole reference, beside torch."""
        checks, found = dict[Tower, FileCheck](), dict[Tower, Array]()
        towers: list[tuple[Tower, Path]] = [("vision", encoders.vision), ("text", encoders.text)]
        for tower, path in towers:
            name = f"{encoders.precision} {tower} encoder"
            arguments = (path, name, tower, encoders.precision, self.load, self.reference, self.console.progress)
            check, found[tower], encode = check_encoder(*arguments)
            speeds = compare_speed({"torch": torch_encoder(self.model, tower), "onnx": encode}, tower, self.reference)
            checks[tower] = replace(check, items_per_s=speeds["onnx"], torch_items_per_s=speeds["torch"])
        after = self.reference.retrieval(found["vision"], found["text"])
        problems = [problem for check in checks.values() if (problem := find_difference(check, self.reference))]
        if loss := find_loss(after, self.reference, self.options.max_loss):
            problems.append(loss)
        return Verified(encoders, checks, after, problems)

    def write_manifest(self, result: Exported, folder: Path) -> None:
        """export.json: what was written and what was measured, with a checksum of every other file."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = {str(path.relative_to(folder)): file_record(path) for path in files}
        by_tower: dict[str, Any] = {check.tower: check.file for check in result.checks}
        recall = {"before": result.before and result.before.record(), "after": result.after and result.after.record()}
        scale, bias = self.model.scale_and_bias
        manifest = {
            "format": result.target,
            **(by_tower if result.target == "onnx" else {}),
            "logit_scale": scale,
            "logit_bias": bias,
            "opset": self.options.opset,
            "passed": not result.problems,
            "problems": result.problems,
            "notes": result.notes,
            "compared_on": result.compared_on,
            "checks": [check.record() for check in result.checks],
            "recall": recall,
            "int8": result.search and result.search.record(),
            "calibration": result.calibration and result.calibration.record(),
            **self.facts,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": {"m1clip": __version__, **library_versions()},
            "machine": sensors.machine(),
            "cpu_flags": sensors.cpu_flags(),
            "files": sums,
        }
        (folder / MANIFEST).write_text(json.dumps(json_safe(manifest), indent=2, ensure_ascii=False) + "\n")


def file_record(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def library_versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def export_model(
    model: CLIP,
    targets: Sequence[str],
    out: Path,
    options: Options = Options(),
    *,
    data: str = "",
    val_size: int = VAL_SIZE,
    overwrite: bool = False,
    source: Path | None = None,
    spec: str = "",
    console: Console | None = None,
) -> list[Exported]:
    """Export to `out`, or to a folder in it for each of several targets.

    `source` is the model's own folder, `spec` what the user called it.

    The result of a target that fails has `problems`, and its folder is not written unless `options.force` is set.
    """
    console, source = console or Console(), source or model.folder
    model = copy.deepcopy(model).cpu().eval()  # everything is compared with the CPU
    chosen, misfits = fitting_targets(targets, model)
    for target, reason in misfits.items():
        console.print_fact("skipped", f"{target}: {reason}")
    folders = {target: out / target if len(targets) > 1 or "all" in targets else out for target in chosen}
    for folder in folders.values():
        check_replaceable(folder, overwrite)
    is_quick = not {*ONNX_LAYOUTS, *COREML_TARGETS} & set(chosen)  # the same weights: a sample shows whether they fit
    reference = open_reference(model, source, data, min(val_size, SAMPLE) if is_quick else val_size, console)
    load = sensors.BackgroundLoad()
    with workspace_beside(out) as workspace:
        exporter = Exporter(reference, options, start_weights(source, spec, model), workspace, console)
        results = [exporter.export(target, folder) for target, folder in folders.items()]
    if (share := load.share()) > BUSY:
        console.warn(f"other programs used {share:.0%} of the CPU: the measured speeds are not those of this machine")
    return results


@contextmanager
def workspace_beside(out: Path) -> Iterator[Path]:
    """A hidden folder on the same disk; what a killed process left of an earlier one is removed."""
    parents = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    name = f"{out.name}-graphs"
    remove_partial(out.parent, name)
    workspace = out.parent / f".{name}.{os.getpid()}.new"
    try:
        workspace.mkdir()
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
        for folder in (out, *parents):
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()


def check_replaceable(folder: Path, overwrite: bool) -> None:
    """Nothing is deleted but an earlier export, and that only if it is asked for."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / MANIFEST).is_file():
        raise FileExistsError(f"{folder} exists and is not an earlier export; choose another --out")
    if not overwrite:
        raise FileExistsError(f"{folder} exists; --overwrite replaces it, --out DIR writes elsewhere")


def open_reference(model: CLIP, source: Path | None, data: str, val_size: int, console: Console) -> Reference:
    """The validation images of the model's run, or of other data; without either, generic images."""
    settings: DataSettings = {"data": data} if data else {}
    trained = trained_config(source, bool(data), console)
    run_data = "" if source is None or trained == TrainConfig() else trained.data
    if not (data or run_data):
        settings, generic = {"data": GENERIC}, "no validation data is known for this model (--data names some)"
    else:
        generic = ""
    try:
        is_own = bool(run_data) and is_part_of(data or run_data, run_data)
        config = eval_config(trained, settings, is_other := not is_own)
        found, split = open_eval_data(config, trained, is_other, False, "auto", model, console)
    except (FileNotFoundError, ValueError) as error:
        if data:
            raise
        generic = f"the data of its run cannot be read ({error})"
        config = eval_config(trained, {"data": GENERIC}, True)
        found, split = open_eval_data(config, trained, True, False, "auto", model, console)
    every = -(-len(found.pairs) // val_size)
    pairs = Split([part.every(every) for part in found.pairs.parts])
    name = split.partition(" ")[0]
    description = f"{len(pairs):,} {'images' if name == 'all' else f'{name} images'} of {config.data}"
    if generic:
        description = f"{len(pairs):,} generic images ({GENERIC})"
        console.print_fact("note", f"{generic}: compared with torch on generic images, which say little about recall")
    return Reference.encode(model, pairs, description, console.progress, bool(generic))


def start_weights(source: Path | None, spec: str, model: CLIP) -> dict[str, Any]:
    """Where the model comes from: its folder or name, the weights that its training started from, and their licence."""
    facts: dict[str, Any] = {"model": str(source or spec) or None}
    config = trained_config(source, True, Console(io.StringIO()))
    started_from = {name: value for name in ("init", "vision", "text") if (value := getattr(config, name))}
    if spec and source is None:  # a CLIP of another library
        started_from["init"] = spec
    vision, licenses = model.config.vision, dict[str, str]()
    if isinstance(vision, TimmConfig) and not config.vision.endswith("?weights=none"):
        import timm

        known = timm.get_pretrained_cfg(vision.timm, allow_unregistered=True)
        licenses[f"timm:{vision.timm}"] = (known and known.license) or UNKNOWN_LICENSE
    for weights in started_from.values():
        licenses.setdefault(weights.partition("?")[0], UNKNOWN_LICENSE)
    return {**facts, "start_weights": started_from or None, "licenses": licenses or None}


def missing_extra(target: str) -> str | None:
    """Why a target cannot be written here; known before the reference is encoded."""
    try:
        if target in ONNX_LAYOUTS:
            require_onnx()
        if target in COREML_TARGETS:
            require_extra("coremltools", "coreml", "a Core ML export")
    except ValueError as error:
        return str(error)
    return None


def fitting_targets(requested: Sequence[str], model: CLIP) -> tuple[list[Target], dict[str, str]]:
    """The targets that can use a model; of `all`, the others with their reasons. A misfit that is named is an error."""
    assert model.tokenizer is not None
    has_openai = model.tokenizer.is_openai
    if "all" not in requested:
        chosen = list(dict.fromkeys(requested))
        for target in chosen:
            if reason := find_misfit(target, model.config, has_openai) or missing_extra(target):
                raise ValueError(reason)
        return chosen, {}  # type: ignore[return-value]
    fitting, misfits = list[Target](), dict[str, str]()
    for target in TARGETS:
        if target == "m1clip":
            continue
        if reason := find_misfit(target, model.config, has_openai) or missing_extra(target):
            misfits[target] = reason
        else:
            fitting.append(target)
    return fitting, misfits
