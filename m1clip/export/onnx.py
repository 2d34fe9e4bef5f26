"""ONNX files of the two encoders, and variants that products read: other names, int32 ids, one joint graph."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import Dim

from m1clip.errors import short_error
from m1clip.export.graph import ImageEncoder, TextEncoder
from m1clip.model.pretrained import require_extra

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 18  # every runtime reads it; 23 has an Attention operator, 12 to 20 % faster (onnxruntime 1.31)
MAX_BATCH = 2**20
MAX_FILE_BYTES = 2_000_000_000  # of a protobuf; the weights of larger models are in a second file


def require_onnx() -> None:
    for library in ("onnx", "onnxscript"):
        require_extra(library, "export", "an ONNX export")


def export_onnx(encoder: ImageEncoder | TextEncoder, path: Path, opset: int = OPSET) -> None:
    """Write an encoder with a symbolic batch; for text, also with a symbolic length where its graph allows that."""
    require_onnx()
    batch = Dim("batch", min=1, max=MAX_BATCH)
    shapes: list[dict[int, Any]] = [{0: batch}]
    if isinstance(encoder, TextEncoder) and not encoder.model.tokenizer.settings.fixed_length:  # type: ignore[union-attr]
        shapes.insert(0, {0: batch, 1: Dim("length", min=2, max=encoder.context_length)})
    reason = ""
    for shape in shapes:
        # An example of one item would make the batch a constant (pytorch#148629).
        example = encoder.example(2) if len(shape) == 2 else encoder.example(2, full_length=True)
        try:
            with quiet_exporter():
                program = torch.onnx.export(
                    encoder,
                    (example,),
                    dynamo=True,
                    opset_version=opset,
                    dynamic_shapes=(shape,),
                    input_names=[encoder.input_name],
                    output_names=[encoder.output_name],
                    verbose=False,
                )
            assert program is not None
            save_stripped(program, path)
            return
        except torch.onnx.errors.OnnxExporterError as error:
            reason = short_error(error.__cause__ or error)
    raise ValueError(f"the {encoder.name} encoder cannot be exported to ONNX: {reason}")


def save_stripped(program: torch.onnx.ONNXProgram, path: Path) -> None:
    """Without stack traces of our source and inferred shapes: a tenth of a small file, and paths of this machine."""
    model = program.model_proto
    del model.graph.value_info[:]  # quantize_dynamic stumbles over the exporter's shapes
    for part in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.input,
        *model.graph.output,
        *model.graph.initializer,
    ):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    save_model(model, path)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without the exporter's progress, warnings and Markdown reports: the result is verified instead."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
        try:
            for logger in loggers:
                logger.setLevel(logging.CRITICAL)
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def rename(model: "ModelProto", input_name: str, output_name: str, int32: bool = False) -> "ModelProto":
    """A copy of a graph of one input and one output with other names for both; with `int32`, ids of that type."""
    import onnx

    model = copy_of(model)
    graph = model.graph
    old = {graph.input[0].name: input_name, graph.output[0].name: output_name}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [old.get(name, name) for name in names]
    graph.input[0].name, graph.output[0].name = input_name, output_name
    if int32:
        for node in graph.node:
            node.input[:] = [f"{name}_int64" if name == input_name else name for name in node.input]
        cast = onnx.helper.make_node("Cast", [input_name], [f"{input_name}_int64"], to=onnx.TensorProto.INT64)
        graph.node.insert(0, cast)
        graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT32
    return model


def pad_output(model: "ModelProto", width: int) -> "ModelProto":
    """A copy whose embeddings are filled with zeros, which change no cosine, for a product with a fixed width."""
    import numpy as np
    from onnx import helper, numpy_helper

    model = copy_of(model)
    output = model.graph.output[0]
    missing = width - output.type.tensor_type.shape.dim[1].dim_value
    if not missing:
        return model
    for node in model.graph.node:
        node.output[:] = [f"{name}_unpadded" if name == output.name else name for name in node.output]
        node.input[:] = [f"{name}_unpadded" if name == output.name else name for name in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 0, missing]), "padding"))
    model.graph.node.append(helper.make_node("Pad", [f"{output.name}_unpadded", "padding"], [output.name]))
    output.type.tensor_type.shape.dim[1].dim_value = width
    return model


def join(vision: "ModelProto", text: "ModelProto", logit_scale: float, logit_bias: float | None) -> "ModelProto":
    """Both encoders and their logits in one graph, as transformers.js reads it."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    graphs = [onnx.compose.add_prefix(rename(vision, "pixel_values", "image_embeds"), "vision/", inplace=True)]
    graphs.append(onnx.compose.add_prefix(rename(text, "input_ids", "text_embeds"), "text/", inplace=True))
    names = {"vision/pixel_values": "pixel_values", "vision/image_embeds": "image_embeds"}
    names |= {"text/input_ids": "input_ids", "text/text_embeds": "text_embeds"}
    joint = onnx.compose.merge_models(graphs[0], graphs[1], io_map=[], name="clip")
    graph = joint.graph
    for node in graph.node:
        for edges in (node.input, node.output):
            edges[:] = [names.get(edge, edge) for edge in edges]
    for value in (*graph.input, *graph.output):
        value.name = names[value.name]
    for value in (graph.input[0], graph.output[0]):  # images and texts have batches of their own
        value.type.tensor_type.shape.dim[0].dim_param = "image_batch"
    scale, bias = (np.array(value or 0.0, np.float32) for value in (logit_scale, logit_bias))
    graph.initializer.extend(
        [numpy_helper.from_array(scale, "logit_scale"), numpy_helper.from_array(bias, "logit_bias")]
    )
    graph.node.extend(
        [
            helper.make_node("Transpose", ["image_embeds"], ["image_embeds_T"], perm=[1, 0]),
            helper.make_node("MatMul", ["text_embeds", "image_embeds_T"], ["cosine"], name="logits/MatMul"),
            helper.make_node("Mul", ["cosine", "logit_scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "logit_bias"], ["logits_per_text"]),
            helper.make_node("Transpose", ["logits_per_text"], ["logits_per_image"], perm=[1, 0]),
        ]
    )
    shapes = {"logits_per_image": ["image_batch", "batch"], "logits_per_text": ["batch", "image_batch"]}
    graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in shapes.items())
    return joint


def load_model(path: Path) -> "ModelProto":
    import onnx

    return onnx.load(str(path))


def save_model(model: "ModelProto", path: Path) -> None:
    """In one file; the weights of models above 2 GB are beside it."""
    import onnx

    is_large = sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_FILE_BYTES
    options: dict[str, Any] = {"save_as_external_data": True, "location": f"{path.name}.data"} if is_large else {}
    onnx.save(model, str(path), **options)


def copy_of(model: "ModelProto") -> "ModelProto":
    copied = type(model)()
    copied.CopyFrom(model)
    return copied
