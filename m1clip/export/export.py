"""Export a model to one or several targets: write, load again, compare with torch, and keep only what passes."""

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from m1clip import __version__, sensors
from m1clip.console import Console
from m1clip.evals.retrieval import Retrieval
from m1clip.export.graph import make_encoders
from m1clip.export.layouts import ONNX_LAYOUTS, Encoders, Layout, Written
from m1clip.export.onnx import OPSET, export_onnx, require_onnx
from m1clip.export.quantize import Search, find_int8
from m1clip.export.verify import (
    SAMPLE,
    Array,
    ExportFailed,
    FileCheck,
    Reference,
    Tower,
    check_file,
    compare_speed,
    find_loss,
    find_problem,
    load_session,
    torch_encoder,
)
from m1clip.files import atomic_folder, json_safe
from m1clip.model.interop import is_openai
from m1clip.model.tokenizer import HFTokenizer
from m1clip.targets import TARGETS, TRANSFORMERS_FOLDERS, Target, find_misfit

MANIFEST = "export.json"
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
    after: Retrieval | None = None  # recall of the exported encoders
    search: Search | None = None  # the INT8 recipes
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return bool(self.problems)


@dataclass(frozen=True)
class Verified:
    """ONNX encoders that were run on the whole reference."""

    encoders: Encoders
    checks: dict[Tower, FileCheck]
    after: Retrieval
    problems: list[str]
    search: Search | None = None


class Exporter:
    """Exports one model; graphs that several targets share are made and verified once."""

    def __init__(self, reference: Reference, options: Options, facts: dict[str, Any], console: Console):
        self.reference, self.options, self.facts, self.console = reference, options, facts, console
        self.model = reference.model
        self.stack = ExitStack()

    def __enter__(self) -> "Exporter":
        self.workspace = Path(self.stack.enter_context(TemporaryDirectory(prefix="m1clip-export-")))
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def export(self, target: Target, folder: Path) -> Exported:
        """Write a target's folder. If a check fails, nothing is left of it, unless the export is forced."""
        result = Exported(target, folder)
        try:
            with atomic_folder(folder) as partial_folder:
                result = self.write(target, partial_folder, folder)
                self.write_manifest(result, partial_folder)
                if result.failed and not self.options.force:
                    raise ExportFailed("; ".join(result.problems))
        except ExportFailed as error:
            result.problems = result.problems or [str(error)]
        return result

    def write(self, target: Target, folder: Path, final: Path) -> Exported:
        if target in ONNX_LAYOUTS:
            return self.write_onnx_layout(target, folder, final)
        if target in ("coreml", "queryable"):
            from m1clip.export.apple import write_coreml

            return write_coreml(target, self.reference, self.options, folder, final, self.console)
        from m1clip.export.weights import write_weights

        checks = write_weights(target, self.reference, folder)
        problems = [problem for check in checks if (problem := find_problem(check, self.reference))]
        return Exported(target, final, checks, problems=problems)

    def write_onnx_layout(self, target: Target, folder: Path, final: Path) -> Exported:
        verified = self.int8 if self.options.int8 else self.fp32
        written = ONNX_LAYOUTS[target](Layout(self.model, self.fp32.encoders, verified.encoders), folder)
        result = Exported(target, final, after=verified.after, search=verified.search, problems=list(verified.problems))
        for one in written:
            source = self.fp32 if one.precision == "fp32" else verified
            check = self.check_copy(folder, one)
            speeds = source.checks[one.tower]
            check = replace(check, items_per_s=speeds.items_per_s, torch_items_per_s=speeds.torch_items_per_s)
            result.checks.append(check)
            if problem := find_problem(check, self.reference):
                result.problems.append(problem)
        return result

    def check_copy(self, folder: Path, one: Written) -> FileCheck:
        check, _, _ = check_file(
            folder / one.file, one.file, one.tower, one.precision, self.load, self.reference, limit=SAMPLE
        )
        return check

    @cached_property
    def load(self) -> Any:
        assert self.model.tokenizer is not None
        return partial(load_session, pad_id=self.model.tokenizer.settings.pad_id)

    @cached_property
    def fp32(self) -> Verified:
        require_onnx()
        traced = make_encoders(self.model)
        paths: dict[Tower, Path] = {"vision": self.workspace / "vision.onnx", "text": self.workspace / "text.onnx"}
        with self.console.progress("exporting to ONNX", 2) as advance:
            for encoder, path in ((traced.image, paths["vision"]), (traced.text, paths["text"])):
                export_onnx(encoder, path, self.options.opset)
                advance(1)
        return self.verify(Encoders(paths["vision"], paths["text"], "fp32"))

    @cached_property
    def int8(self) -> Verified:
        search = find_int8(
            self.fp32.encoders, self.reference, self.options.max_loss, self.workspace, self.load, self.console
        )
        verified = self.verify(Encoders(search.chosen["vision"].path, search.chosen["text"].path, "int8"))
        return replace(verified, search=search)

    def verify(self, encoders: Encoders) -> Verified:
        """Run both files on the whole reference, beside torch."""
        checks, found = dict[Tower, FileCheck](), dict[Tower, Array]()
        towers: list[tuple[Tower, Path]] = [("vision", encoders.vision), ("text", encoders.text)]
        for tower, path in towers:
            name = f"{encoders.precision} {tower} encoder"
            arguments = (path, name, tower, encoders.precision, self.load, self.reference, self.console.progress)
            check, found[tower], encode = check_file(*arguments)
            speeds = compare_speed({"torch": torch_encoder(self.model, tower), "onnx": encode}, tower, self.reference)
            checks[tower] = replace(check, items_per_s=speeds["onnx"], torch_items_per_s=speeds["torch"])
        after = self.reference.retrieval(found["vision"], found["text"])
        problems = [problem for check in checks.values() if (problem := find_problem(check, self.reference))]
        if loss := find_loss(after, self.reference, self.options.max_loss):
            problems.append(loss)
        return Verified(encoders, checks, after, problems)

    def write_manifest(self, result: Exported, folder: Path) -> None:
        """export.json: what was written and what was measured, with a checksum of every other file."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = {str(path.relative_to(folder)): file_record(path) for path in files}
        by_tower = {check.tower: check.file for check in result.checks}
        before = self.reference.recall
        recall = {"before": before.record(), "after": result.after and result.after.record()}
        bias = None if self.model.logit_bias is None else float(self.model.logit_bias)
        manifest = {
            "format": "onnx" if result.target == "onnx" else result.target,
            **(by_tower if result.target == "onnx" else {}),
            "logit_scale": float(self.model.logit_scale.exp()),
            "logit_bias": bias,
            "opset": self.options.opset,
            "passed": not result.problems,
            "problems": result.problems,
            "notes": result.notes,
            "checked_on": self.reference.description,
            "checks": [check.record() for check in result.checks],
            "recall": recall,
            "int8": result.search and result.search.record(),
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


def fitting_targets(requested: Sequence[str], model: Any) -> tuple[list[Target], dict[str, str]]:
    """The targets that can use a model; of `all`, the others with their reasons. A misfit that is named is an error."""
    has_openai = not isinstance(model.tokenizer, HFTokenizer) and is_openai(model.tokenizer)
    if "all" not in requested:
        chosen = list(dict.fromkeys(requested))
        reasons = {target: find_misfit(target, model.config, has_openai) for target in chosen}
        if reason := next((reason for reason in reasons.values() if reason), None):
            raise ValueError(reason)
        return chosen, {}  # type: ignore[return-value]
    fitting, misfits = list[Target](), dict[str, str]()
    for target in TARGETS:
        if target == "m1clip":
            continue
        if reason := find_misfit(target, model.config, has_openai):
            misfits[target] = reason
        else:
            fitting.append(target)
    return fitting, misfits


__all__ = ["TRANSFORMERS_FOLDERS", "Exported", "Exporter", "Options", "fitting_targets"]
