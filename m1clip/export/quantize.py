"""INT8 with ONNX Runtime: several recipes are tried on this machine, and the fastest that loses no recall is kept.

No recipe is best everywhere: which operators have fast INT8 kernels depends on the CPU, and static quantization of
everything is right for convolutional networks and destroys text transformers (R@1 94.6 → 40.2).
"""

import contextlib
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from m1clip.console import Console
from m1clip.errors import short_error
from m1clip.evals.retrieval import Retrieval
from m1clip.export.layouts import OnnxEncoders
from m1clip.export.onnx import load_model, save_model
from m1clip.export.verify import (
    CHUNK,
    TOWERS,
    Array,
    Encode,
    ExportFailed,
    FileCheck,
    Reference,
    Tower,
    check_encoder,
    compare_speed,
    find_difference,
    find_loss,
)
from m1clip.onnx_model import graph_bytes

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

MATMULS = ("MatMul", "Gemm", "Gather")
CALIBRATION_ITEMS = 64
COLORS = 3  # input channels of a first convolution
MAX_SIZE = 0.6  # of the fp32 file; int8 weights alone would be 0.25


@dataclass(frozen=True)
class Recipe:
    """Arguments of onnxruntime's quantizers."""

    name: str
    static: bool = False  # activations are scaled by ranges that are measured beforehand, not by each batch's own
    operators: tuple[str, ...] = ()  # empty: all that onnxruntime can quantize
    per_channel: bool = True
    reduce_range: bool = True  # 7 bits: int8 products saturate on CPUs without VNNI (onnxruntime#12072)
    unsigned: bool = False


RECIPES = (
    Recipe("dynamic, matrices, per channel", operators=MATMULS),
    Recipe("dynamic, matrices, uint8", operators=MATMULS, per_channel=False, reduce_range=False, unsigned=True),
    Recipe("static, matrices and convolutions", static=True, operators=("MatMul", "Gemm", "Conv")),
    Recipe("static, all operators", static=True),
)


@dataclass(frozen=True)
class Trial:
    """One recipe for one encoder. `after` is its recall, if it was needed."""

    tower: Tower
    recipe: Recipe
    path: Path
    check: FileCheck | None = None
    after: Retrieval | None = None
    problem: str | None = None
    encode: Encode | None = None
    embeddings: Array | None = None

    @property
    def speed(self) -> float:
        """Geometric mean of the items per second of single items and of batches."""
        speeds = list((self.check.items_per_s or {}).values()) if self.check else []
        return sqrt(speeds[0] * speeds[-1]) if speeds else 0.0

    def record(self) -> dict[str, Any]:
        scores = {"mean_r1": self.after.mean_r1} if self.after else {}
        check = self.check.record() if self.check else {}
        return {"tower": self.tower, "recipe": self.recipe.name, "problem": self.problem, **scores, **check}


@dataclass(frozen=True)
class Search:
    """All trials, and the one that is kept for each encoder."""

    trials: dict[Tower, list[Trial]]
    chosen: dict[Tower, Trial]
    fp32: dict[Tower, dict[int, float]]  # items per second by batch size, measured beside the trials

    def record(self) -> dict[str, Any]:
        trials = [trial.record() for of_tower in self.trials.values() for trial in of_tower]
        return {"chosen": {tower: trial.recipe.name for tower, trial in self.chosen.items()}, "trials": trials}


def find_int8(
    source: OnnxEncoders,
    reference: Reference,
    max_loss: float,
    folder: Path,
    load: Callable[[Path], Encode],
    console: Console,
    recipes: Sequence[Recipe] = RECIPES,
) -> Search:
    """The fastest recipe of each encoder whose recall is within `max_loss`.

    The vision encoder is judged beside the text encoder in fp32, the text encoder beside the chosen vision encoder.
    """
    trials, chosen, fp32 = dict[Tower, list[Trial]](), dict[Tower, Trial](), dict[Tower, dict[int, float]]()
    for tower in TOWERS:
        path = source.vision if tower == "vision" else source.text
        made = list[Trial]()
        with console.progress(f"quantizing the {tower} encoder", len(recipes)) as advance:
            for recipe in recipes:
                target = folder / f"{tower}-int8-{len(made)}.onnx"
                made.append(make_trial(path, target, tower, recipe, reference, load))
                advance(1)
        tried, fp32[tower] = time_trials(made, load(path), tower, reference)
        image_NE = chosen["vision"].embeddings if "vision" in chosen else None
        chosen[tower], trials[tower] = choose_trial(tried, reference, image_NE, max_loss, console)
    return Search(trials, chosen, fp32)


def make_trial(
    source: Path, target: Path, tower: Tower, recipe: Recipe, reference: Reference, load: Callable[[Path], Encode]
) -> Trial:
    """Quantize, and run a sample; a recipe that onnxruntime cannot apply or run is a trial with a problem."""
    trial = Trial(tower, recipe, target)
    batches = [reference.inputs(tower, start, start + CHUNK) for start in range(0, CALIBRATION_ITEMS, CHUNK)]
    try:
        quantize(source, trial.path, recipe, [batch for batch in batches if len(batch)])
        share = graph_bytes(trial.path) / graph_bytes(source)
        if share > MAX_SIZE:
            return replace(trial, problem=f"{share:.0%} of the size of fp32: it leaves most weights as they are")
        arguments = (trial.path, recipe.name, tower, "int8", load, reference)
        check, _, encode = check_encoder(*arguments, limit=CALIBRATION_ITEMS)
    except Exception as error:  # neither the quantizer's nor the runtime's errors have a common class
        return replace(trial, problem=str(error) if isinstance(error, ExportFailed) else short_error(error))
    return replace(trial, check=check, encode=encode)


def time_trials(
    trials: Sequence[Trial], fp32: Encode, tower: Tower, reference: Reference
) -> tuple[list[Trial], dict[int, float]]:
    """The trials with their speeds, the fastest first, and the speeds of fp32: all measured in turn."""
    encoders = {trial.recipe.name: trial.encode for trial in trials if trial.encode}
    speeds = compare_speed({"fp32": fp32, **encoders}, tower, reference)
    timed = [
        replace(trial, check=replace(trial.check, items_per_s=speeds[trial.recipe.name])) if trial.check else trial
        for trial in trials
    ]
    return sorted(timed, key=lambda trial: -trial.speed), speeds["fp32"]


def choose_trial(
    trials: Sequence[Trial], reference: Reference, image_NE: Array | None, max_loss: float, console: Console
) -> tuple[Trial, list[Trial]]:
    """The first trial that passes; slower ones need not be judged. If none passes, the one that loses least."""
    judged, chosen = list[Trial](), None
    for trial in trials:
        if chosen is None and trial.encode is not None:
            trial = judge(trial, reference, image_NE, max_loss, console)
            chosen = None if trial.problem else trial
        judged.append(trial)
    if chosen is None:
        measured = [trial for trial in judged if trial.after]
        if not measured:
            raise ExportFailed(f"no INT8 recipe works for the {trials[0].tower} encoder: {trials[0].problem}")
        chosen = max(measured, key=lambda trial: trial.after.mean_r1 if trial.after else 0.0)
    return chosen, judged


def judge(trial: Trial, reference: Reference, image_NE: Array | None, max_loss: float, console: Console) -> Trial:
    """Run a trial on the whole reference; `image_NE` are the embeddings of the vision encoder beside a text encoder."""
    assert trial.encode is not None
    assert trial.check is not None
    encode, speeds = trial.encode, trial.check.items_per_s
    arguments = (trial.path, trial.recipe.name, trial.tower, "int8", lambda path: encode, reference, console.progress)
    check, found, _ = check_encoder(*arguments)
    check = replace(check, items_per_s=speeds, cold_start_ms=trial.check.cold_start_ms)
    if trial.tower == "vision":
        after = reference.retrieval(found, reference.text_KE)
    else:
        after = reference.retrieval(reference.image_NE if image_NE is None else image_NE, found)
    problem = find_loss(after, reference, max_loss) or find_difference(check, reference)
    return replace(trial, check=check, after=after, problem=problem, embeddings=found)


def quantize(source: Path, target: Path, recipe: Recipe, calibration: Sequence[Array]) -> None:
    """Write an INT8 file; `calibration` are batches of the encoder's inputs for static recipes."""
    from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static

    weights = QuantType.QUInt8 if recipe.unsigned else QuantType.QInt8
    options: dict[str, Any] = {"per_channel": recipe.per_channel, "reduce_range": recipe.reduce_range}
    options |= {"weight_type": weights, "op_types_to_quantize": list(recipe.operators) or None}
    with quiet_quantizer():
        if recipe.static:
            quantize_static(source, target, Calibration(source, calibration), **options)
        else:
            quantize_dynamic(source, target, **options)
            save_model(store_int8_weights(load_model(target)), target)


def store_int8_weights(model: "ModelProto") -> "ModelProto":
    """Store the weights of convolutions as int8 with a scale per output channel; they are computed in fp32.

    The first one and depthwise ones are small and sensitive, and stay as they are: EfficientNet-lite0's minimum cosine
    is 0.992 instead of 0.978 on 200 photographs. Dynamic INT8 convolutions are slower than fp32. Cast and Mul, unlike
    DequantizeLinear, are folded when the file is loaded, so that nothing is computed twice.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph, nodes = model.graph, []
    weights = {node.input[1] for node in graph.node if node.op_type == "Conv" and group_of(node) == 1}
    for tensor in [one for one in graph.initializer if one.name in weights and one.data_type == TensorProto.FLOAT]:
        if tensor.dims[1] <= COLORS:
            continue
        weight, name = numpy_helper.to_array(tensor), tensor.name
        largest = np.abs(weight).max(axis=tuple(range(1, weight.ndim)), keepdims=True)
        scale = np.maximum(largest / 127, np.finfo(np.float32).tiny).astype(np.float32)
        stored = numpy_helper.from_array(np.rint(weight / scale).astype(np.int8), f"{name}_int8")
        graph.initializer.remove(tensor)
        graph.initializer.extend([stored, numpy_helper.from_array(scale, f"{name}_scale")])
        nodes.append(helper.make_node("Cast", [f"{name}_int8"], [f"{name}_cast"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{name}_cast", f"{name}_scale"], [name]))
    for node in reversed(nodes):
        graph.node.insert(0, node)
    return model


def group_of(node: "NodeProto") -> int:
    return next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)


class Calibration:
    """onnxruntime's CalibrationDataReader over batches in memory."""

    def __init__(self, model: Path, batches: Sequence[Array]):
        import onnx

        name = onnx.load(str(model), load_external_data=False).graph.input[0].name
        self.batches = iter([{name: batch} for batch in batches])

    def get_next(self) -> dict[str, Array] | None:
        return next(self.batches, None)


@contextlib.contextmanager
def quiet_quantizer() -> Iterator[None]:
    """It advises preprocessing that our graphs do not need, through the root logger."""
    root = logging.getLogger()
    level = root.level
    try:
        root.setLevel(logging.ERROR)
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        root.setLevel(level)
