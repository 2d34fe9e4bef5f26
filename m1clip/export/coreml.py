"""Convert the encoders of a CLIP to Core ML packages (ML programs, iOS 16 and macOS 13 or later).

Batch sizes are fixed, because a flexible batch does not run on the Neural Engine (coremltools#2022). Shapes: B images
or texts, C colors, H W pixels, L tokens, E embedding.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._decomp import get_decompositions

import m1clip
from m1clip.config import require
from m1clip.errors import short_error
from m1clip.export.graph import ImageEncoder, TextEncoder
from m1clip.export.mil import quiet_coremltools

CoreMLPrecision = Literal["fp16", "fp32", "int8"]
PixelInput = Literal["image", "bytes", "normalized"]
INPUT_DESCRIPTIONS = {
    "image": "RGB image of {size} × {size} pixels",
    "bytes": "RGB pixels from 0 to 255, (batch, 3, {size}, {size})",
    "normalized": "RGB pixels as (pixel / 255 - mean) / std, (batch, 3, {size}, {size})",
}


class PixelEncoder(nn.Module):
    """Pixels from 0 to 255 (B, C, H, W) to unit vectors (B, E): mean and standard deviation are in the graph."""

    def __init__(self, encoder: ImageEncoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        model = self.encoder.model
        return self.encoder((pixels_BCHW - model.mean_C11) / model.std_C11)


class FloatTextEncoder(nn.Module):
    """Token ids as floats (B, L) to unit vectors (B, E)."""

    def __init__(self, encoder: TextEncoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, ids_BL: Tensor) -> Tensor:
        return self.encoder(ids_BL.int())


def convert_image(
    encoder: ImageEncoder,
    path: Path,
    precision: CoreMLPrecision = "fp16",
    batch: int = 1,
    input_name: str = "image",
    output_name: str = "image_embeds",
    pixels: PixelInput = "image",
) -> None:
    """Write the image encoder. Core ML takes images one at a time: `pixels="image"` needs a batch of 1."""
    require(batch == 1 or pixels != "image", f'an image input has a batch of 1, not {batch}; use pixels="bytes"')
    config, size = encoder.model.config.vision, encoder.image_size
    example_BCHW = encoder.example(batch)
    module = encoder if pixels == "normalized" else PixelEncoder(encoder)
    metadata = {"mean": config.mean, "std": config.std, "image_size": size, "pixels": pixels}
    metadata |= {"resize_mode": config.resize_mode, "interpolation": config.interpolation}
    with quiet_coremltools() as log:
        import coremltools as ct

        shape = tuple(example_BCHW.shape)
        given = ct.TensorType(name=input_name, shape=shape, dtype=np.float32)
        if pixels == "image":
            given = ct.ImageType(name=input_name, shape=shape, color_layout=ct.colorlayout.RGB)
        model = convert(module, example_BCHW, given, output_name, precision, log)
        describe_input = INPUT_DESCRIPTIONS[pixels].format(size=size)
        save_package(model, path, "image", describe_input, {**metadata, "precision": precision})


def convert_text(
    encoder: TextEncoder,
    path: Path,
    precision: CoreMLPrecision = "fp16",
    batch: int = 1,
    input_name: str = "input_ids",
    output_name: str = "text_embeds",
    float_ids: bool = False,
) -> None:
    """Write the text encoder; ids have the full context length. `float_ids` is for apps that pass a float array."""
    length, tokenizer = encoder.context_length, encoder.model.tokenizer
    assert tokenizer is not None
    example_BL = torch.ones(batch, length, dtype=torch.float32 if float_ids else torch.int32)
    metadata: dict[str, Any] = {
        "context_length": length,
        "vocab_size": encoder.model.config.text.vocab_size,
        "precision": precision,
    }
    metadata |= {name: getattr(tokenizer, name) for name in ("start_id", "end_id") if hasattr(tokenizer, name)}
    metadata |= {"pad_id": tokenizer.settings.pad_id, "tokenizer": "tokenizer.json"}
    module = FloatTextEncoder(encoder) if float_ids else encoder
    with quiet_coremltools() as log:
        import coremltools as ct

        given = ct.TensorType(name=input_name, shape=tuple(example_BL.shape), dtype=example_BL.numpy().dtype.type)
        model = convert(module, example_BL, given, output_name, precision, log)
        save_package(model, path, "text", f"Token ids, padded to {length}", metadata)


def convert(
    module: nn.Module, example: Tensor, input_type: Any, output_name: str, precision: CoreMLPrecision, log: list[str]
) -> Any:
    """The coremltools model of a module with one input and one float32 output."""
    import coremltools as ct

    try:
        program = torch.export.export(module.eval(), (example,)).run_decompositions(decompositions())
        model = ct.convert(
            program,
            inputs=[input_type],
            outputs=[ct.TensorType(name=output_name, dtype=np.float32)],
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS16,
            compute_precision=ct.precision.FLOAT32 if precision == "fp32" else ct.precision.FLOAT16,
            skip_model_load=True,
        )
        return quantize_weights(model) if precision == "int8" else model
    except Exception as error:  # a converter of hundreds of ops raises whatever they raise
        raise ValueError(explain_failure(error, log)) from None


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Ops that coremltools lacks or converts badly, by simpler ones."""
    aten = torch.ops.aten
    table: dict[Any, Callable[..., Any]] = get_decompositions([aten.new_ones])
    return {**table, aten.__and__.Tensor: and_masks, aten.clamp.default: one_sided_clamp}


def and_masks(x: Tensor, y: Tensor) -> Any:
    return torch.logical_and(x, y) if x.dtype == y.dtype == torch.bool else NotImplemented


def one_sided_clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Any:
    """A clamp with one bound; coremltools would write infinity for the other."""
    if min is None and max is not None:
        return torch.minimum(x, torch.full((), max, dtype=x.dtype))
    if max is None and min is not None:
        return torch.maximum(x, torch.full((), min, dtype=x.dtype))
    return NotImplemented


def quantize_weights(model: Any) -> Any:
    """Linear symmetric int8 weights, one scale for each output channel; everything else stays fp16."""
    import coremltools.optimize.coreml as cto

    weights = cto.OpLinearQuantizerConfig(mode="linear_symmetric")
    # Only these: by default positions and masks are quantized too, with a single scale for the tensor.
    kinds = dict.fromkeys(("linear", "conv", "gather"), weights)
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(op_type_configs=kinds))


def explain_failure(error: Exception, log: Sequence[str]) -> str:
    """One sentence that names the op: it is in the message of an unsupported op, else only in the log."""
    found = [re.search(r"(?:converting '|Unsupported fx node .*kind )([\w.:]+)", text) for text in (*log, str(error))]
    ops = [match[1] for match in found if match]
    if ops and isinstance(error, NotImplementedError):
        return f"coremltools cannot convert the op {ops[-1]}"
    return f"coremltools cannot convert {f'the op {ops[-1]}' if ops else 'this model'}: {short_error(error)}"


def save_package(model: Any, path: Path, name: str, input_description: str, metadata: Mapping[str, Any]) -> None:
    spec = model.get_spec().description
    model.author, model.version = "m1clip", m1clip.__version__
    model.short_description = f"CLIP {name} encoder: unit vectors, compared by dot product"
    model.input_description[spec.input[0].name] = input_description
    model.output_description[spec.output[0].name] = f"Unit vectors of the {name}s, (batch, embedding)"
    for key, value in metadata.items():
        model.user_defined_metadata[f"m1clip.{key}"] = value if isinstance(value, str) else json.dumps(value)
    model.save(str(path))
    (path / "executorch_debug_handle_mapping.json").unlink(missing_ok=True)  # no part of the package's manifest
