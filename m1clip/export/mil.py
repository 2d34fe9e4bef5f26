"""Run the program of a saved Core ML package on any OS: op by op, each output rounded to the type it declares.

Core ML itself runs on Macs only. This shows what the file computes, fp16 and int8 rounding and overflows included,
but neither the speed nor the order of summation of a GPU or Neural Engine.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from m1clip.config import require
from m1clip.errors import short_error
from m1clip.model.pretrained import require_extra

Value = Tensor | str
Arrays = Mapping[str, NDArray[Any]]


class Feature(NamedTuple):
    """Shape and type of an input or output."""

    shape: tuple[int, ...]
    dtype: str


class MILProgram:
    """The `main` function of a package. Floats are held as float32 and rounded to half where the program says fp16."""

    def __init__(self, path: Path):
        self.path, main = path, read_main(path)
        self.ops = [op for op in main.operations if not is_constant(op)]
        unknown = sorted({op.op_type for op in self.ops} - OPS.keys())
        require(not unknown, f"{path} has an op that cannot be run here: {', '.join(unknown)}")
        self.inputs = {name: describe(var) for name, var in main.inputs.items()}
        self.outputs = {var.name: describe(var) for var in main.outputs}
        constants = (
            (var.name, constant_value(op, var)) for op in main.operations if is_constant(op) for var in op.outputs
        )
        self.constants: dict[str, Value] = dict(constants)

    @torch.inference_mode()
    def predict(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """Outputs by name; an image input is an array of pixels from 0 to 255 (1, 3, H, W)."""
        check_names(inputs, self.inputs)
        values = dict(self.constants)
        for name, (shape, dtype) in self.inputs.items():
            require(inputs[name].shape == shape, f"{name} must have the shape {shape}, not {inputs[name].shape}")
            values[name] = round_to(torch.from_numpy(np.ascontiguousarray(inputs[name])), dtype)
        for op in self.ops:
            self.run(op, values)
        return {name: to_array(values[name], dtype) for name, (_, dtype) in self.outputs.items()}

    def run(self, op: Any, values: dict[str, Value]) -> None:
        """Add the outputs of one op to the values."""
        arguments = {
            key: [values[var.name] for var in arg] if isinstance(arg, list | tuple) else values[arg.name]
            for key, arg in op.inputs.items()
            if arg is not None
        }
        try:
            result = OPS[op.op_type](**arguments)
        except (RuntimeError, IndexError, TypeError) as error:  # such as an id outside of the vocabulary
            raise ValueError(f"{op.op_type} {op.name} of {self.path} failed: {short_error(error)}") from None
        for var, output in zip(op.outputs, result if isinstance(result, list | tuple) else [result], strict=True):
            values[var.name] = rounded = round_to(output, describe(var).dtype)
            require_finite(rounded, f"{op.op_type} {var.name} of {self.path}")

    def embed(self, rows_N: NDArray[Any]) -> NDArray[Any]:
        """The only output for any number of rows of the only input, in batches of the size that the program has."""
        (input_name,), (output_name,) = self.inputs, self.outputs
        parts, batch = [], self.inputs[input_name].shape[0]
        for start in range(0, len(rows_N), batch):
            rows_B = rows_N[start : start + batch]
            filled = np.concatenate([rows_B, np.repeat(rows_B[:1], batch - len(rows_B), axis=0)])
            parts.append(self.predict({input_name: filled})[output_name][: len(rows_B)])
        return np.concatenate(parts)


class NativeProgram(MILProgram):
    """The same package run by Core ML itself, on macOS only."""

    # This class has never been run: it was written on Linux, where coremltools cannot predict.
    def __init__(self, path: Path):
        require(sys.platform == "darwin", "Core ML runs on macOS only; MILProgram runs a package anywhere")
        super().__init__(path)
        with quiet_coremltools():
            import coremltools as ct

            self.model = ct.models.MLModel(str(path))
        features = self.model.get_spec().description.input
        self.kinds = {feature.name: feature.type.WhichOneof("Type") for feature in features}

    def predict(self, inputs: Arrays) -> dict[str, NDArray[Any]]:
        from PIL import Image

        check_names(inputs, self.kinds)
        given = {
            name: Image.fromarray(value[0].transpose(1, 2, 0).astype(np.uint8))
            if self.kinds[name] == "imageType"
            else value
            for name, value in inputs.items()
        }
        return dict(self.model.predict(given))


@contextmanager
def quiet_coremltools() -> Iterator[list[str]]:
    """No warnings, log or progress bars of coremltools; yields the list that its log messages are added to."""
    require_extra("coremltools", "coreml", "Core ML")
    messages, logger = list[str](), logging.getLogger("coremltools")

    def keep(record: logging.LogRecord) -> bool:
        messages.append(record.getMessage())
        return False

    logger.addFilter(keep)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield messages
    finally:
        logger.removeFilter(keep)


def read_main(path: Path) -> Any:
    """The function that a package runs; whatever is wrong with the files is one ValueError."""
    if not path.exists():
        raise FileNotFoundError(f"no Core ML package at {path}")
    with quiet_coremltools():
        import coremltools as ct
        from coremltools.converters.mil.frontend.milproto.load import load

        try:
            model = ct.models.MLModel(str(path), skip_model_load=True)
            spec = model.get_spec()
            return load(spec, spec.specificationVersion, model.weights_dir or "").functions["main"]
        except Exception as error:  # of protobuf, JSON and two C++ libraries, without a common class
            raise ValueError(f"{path} is not a readable Core ML program: {short_error(error)}") from None


def describe(var: Any) -> Feature:
    from coremltools.converters.mil.mil import types

    return Feature(tuple(map(int, var.shape)), types.builtin_to_string(var.dtype))


def is_constant(op: Any) -> bool:
    return op.op_type == "const" or op.op_type.startswith("constexpr_")


def constant_value(op: Any, var: Any) -> Value:
    """The value of a constant; compressed weights are decompressed."""
    value = op.materialized_val_inference() if op.op_type.startswith("constexpr_") else var.val
    if isinstance(value, str):
        return value
    rounded = round_to(torch.from_numpy(np.array(value)), describe(var).dtype)
    require_finite(rounded, f"constant {var.name}")
    return rounded


def round_to(value: Tensor, dtype: str) -> Tensor:
    if dtype == "fp16":
        return value.half().float()
    return value.to({"fp32": torch.float32, "bool": torch.bool}.get(dtype) or getattr(torch, dtype))


def to_array(value: Value, dtype: str) -> NDArray[Any]:
    assert isinstance(value, Tensor)
    return value.numpy().astype({"fp16": np.float16}.get(dtype, value.numpy().dtype))


def require_finite(value: Tensor, where: str) -> None:
    require(not value.is_floating_point() or bool(value.isfinite().all()), f"not finite after {where}")


def check_names(inputs: Arrays, expected: Mapping[str, object]) -> None:
    require(inputs.keys() == expected.keys(), f"the inputs are {', '.join(expected)}, not {', '.join(inputs)}")


# The ops, with the parameter names of MIL. Every argument is a tensor or a string.


def conv(
    x: Tensor,
    weight: Tensor,
    strides: Tensor,
    pad_type: str,
    pad: Tensor,
    dilations: Tensor,
    groups: Tensor,
    **bias: Tensor,
) -> Tensor:
    kernel = (torch.tensor(weight.shape[2:]) - 1) * dilations + 1
    x = pad_window(x, kernel, strides, pad_type, pad)
    convolve = F.conv1d if x.ndim == 3 else F.conv2d
    return convolve(x, weight, bias.get("bias"), strides.tolist(), 0, dilations.tolist(), int(groups))


def pad_window(
    x: Tensor, kernel: Tensor, strides: Tensor, pad_type: str, pad: Tensor | None, value: float = 0.0
) -> Tensor:
    """The input with the padding of a convolution or pooling around it."""
    if pad_type == "custom":
        assert pad is not None
        return F.pad(x, pad.view(-1, 2).flip(0).flatten().tolist(), value=value)
    require(pad_type in ("valid", "same", "same_lower"), f"unknown padding {pad_type}")
    if pad_type == "valid":
        return x
    size = torch.tensor(x.shape[2:])
    total = (((size + strides - 1) // strides - 1) * strides + kernel - size).clamp(min=0)
    first = (total + (pad_type == "same_lower")) // 2
    return F.pad(x, torch.stack([first, total - first], 1).flip(0).flatten().tolist(), value=value)


def max_pool(
    x: Tensor, kernel_sizes: Tensor, strides: Tensor, pad_type: str, ceil_mode: Tensor, pad: Tensor | None = None
) -> Tensor:
    x = pad_window(x, kernel_sizes, strides, pad_type, pad, -torch.inf)
    return F.max_pool2d(x, kernel_sizes.tolist(), strides.tolist(), ceil_mode=bool(ceil_mode))


def avg_pool(
    x: Tensor,
    kernel_sizes: Tensor,
    strides: Tensor,
    pad_type: str,
    ceil_mode: Tensor,
    exclude_padding_from_average: Tensor,
    pad: Tensor | None = None,
) -> Tensor:
    window = (kernel_sizes.tolist(), strides.tolist(), 0, bool(ceil_mode))
    mean = F.avg_pool2d(pad_window(x, kernel_sizes, strides, pad_type, pad), *window)
    if not exclude_padding_from_average:
        return mean
    return mean / F.avg_pool2d(pad_window(torch.ones_like(x), kernel_sizes, strides, pad_type, pad), *window)


def layer_norm(
    x: Tensor, axes: Tensor, epsilon: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
) -> Tensor:
    dims = sorted(axis % x.ndim for axis in axes.tolist())
    require(dims == [*range(x.ndim - len(dims), x.ndim)], f"layer_norm over the axes {dims} of {x.ndim}")
    return F.layer_norm(x, [x.shape[dim] for dim in dims], gamma, beta, float(epsilon))


def batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, epsilon: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
) -> Tensor:
    return F.batch_norm(x, mean, variance, gamma, beta, eps=float(epsilon))


def gelu(x: Tensor, mode: str) -> Tensor:
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def gather(x: Tensor, indices: Tensor, axis: Tensor, batch_dims: Tensor | None = None, **_: Tensor) -> Tensor:
    require(not batch_dims, "gather with batch_dims cannot be run here")
    dim = int(axis) % x.ndim
    found = x.index_select(dim, from_end(indices, x.shape[dim]).flatten())
    return found.reshape(*x.shape[:dim], *indices.shape, *x.shape[dim + 1 :])


def gather_nd(x: Tensor, indices: Tensor, batch_dims: Tensor | None = None, **_: Tensor) -> Tensor:
    require(not batch_dims, "gather_nd with batch_dims cannot be run here")
    return x[tuple(from_end(index, size) for index, size in zip(indices.unbind(-1), x.shape, strict=False))]


def from_end(indices: Tensor, size: int) -> Tensor:
    """Negative indices count from the end."""
    return torch.where(indices < 0, indices + size, indices).long()


def slice_by_index(x: Tensor, begin: Tensor, end: Tensor, **options: Tensor) -> Tensor:
    """Negative strides are not used by any encoder and raise an error in torch."""
    for dim in range(x.ndim):
        masks = ("begin_mask", "end_mask", "squeeze_mask")
        from_start, to_end, is_index = (key in options and bool(options[key][dim]) for key in masks)
        step = int(options["stride"][dim]) if "stride" in options else 1
        first, last = None if from_start else int(begin[dim]), None if to_end else int(end[dim])
        if is_index:
            assert first is not None
            first %= x.shape[dim]
            first, last = first, first + 1
        x = x[(slice(None),) * dim + (slice(first, last, step),)]
    squeezed = [dim for dim in range(x.ndim) if "squeeze_mask" in options and options["squeeze_mask"][dim]]
    return x.squeeze(squeezed) if squeezed else x


def slice_by_size(x: Tensor, begin: Tensor, size: Tensor) -> Tensor:
    for dim, (start, length) in enumerate(zip(begin.tolist(), size.tolist(), strict=True)):
        x = x.narrow(dim, start, x.shape[dim] - start if length == -1 else length)
    return x


def split(x: Tensor, axis: Tensor, num_splits: Tensor | None = None, split_sizes: Tensor | None = None) -> list[Tensor]:
    if split_sizes is not None:
        return [*torch.split(x, split_sizes.tolist(), int(axis))]
    assert num_splits is not None
    return [*x.chunk(int(num_splits), int(axis))]


def pad_tensor(x: Tensor, pad: Tensor, mode: str = "constant", constant_val: Tensor | None = None) -> Tensor:
    widths = pad.view(-1, 2).flip(0).flatten().tolist()
    if mode == "constant":
        return F.pad(x, widths, value=0.0 if constant_val is None else float(constant_val))
    spatial = 2 * (x.ndim - 2)
    require(not any(widths[spatial:]), f"{mode} padding of the batch or channels cannot be run here")
    return F.pad(x, widths[:spatial], mode)


def concat(values: list[Tensor], axis: Tensor, interleave: Tensor) -> Tensor:
    require(not interleave, "concat with interleave cannot be run here")
    return torch.cat(values, int(axis))


def cumsum(x: Tensor, axis: Tensor, exclusive: Tensor, reverse: Tensor) -> Tensor:
    require(not exclusive and not reverse, "an exclusive or reverse cumsum cannot be run here")
    return x.cumsum(int(axis))


def matmul(x: Tensor, y: Tensor, transpose_x: Tensor, transpose_y: Tensor) -> Tensor:
    return (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)


def reduction(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, keep_dims: Tensor, axes: Tensor | None = None) -> Tensor:
        return function(x, dim=[*range(x.ndim)] if axes is None else axes.tolist(), keepdim=bool(keep_dims))

    return reduce


def reduce_argmax(x: Tensor, axis: Tensor, keep_dims: Tensor, **_: Value) -> Tensor:
    return x.argmax(int(axis), keepdim=bool(keep_dims))


def unary(function: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x: function(x)


def binary(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda x, y: function(x, y)


OPS: dict[str, Callable[..., Any]] = {
    **{"conv": conv, "max_pool": max_pool, "avg_pool": avg_pool, "layer_norm": layer_norm, "batch_norm": batch_norm},
    **{"gather": gather, "gather_nd": gather_nd, "slice_by_index": slice_by_index, "slice_by_size": slice_by_size},
    **{
        "split": split,
        "pad": pad_tensor,
        "concat": concat,
        "cumsum": cumsum,
        "matmul": matmul,
        "reduce_argmax": reduce_argmax,
        "gelu": gelu,
    },
    **{name: binary(getattr(torch, name)) for name in ("add", "sub", "mul", "maximum", "minimum", "pow")},
    **{name: binary(getattr(torch, name)) for name in ("not_equal", "greater", "greater_equal", "less", "less_equal")},
    **{name: binary(getattr(torch, name)) for name in ("logical_and", "logical_or", "logical_xor")},
    **{"equal": binary(torch.eq), "real_div": binary(torch.div), "floor_div": binary(torch.floor_divide)},
    "mod": binary(torch.remainder),
    **{f"reduce_{name}": reduction(getattr(torch, name)) for name in ("sum", "mean")},
    "reduce_max": reduction(torch.amax),
    "reduce_min": reduction(torch.amin),
    "reduce_l2_norm": reduction(torch.linalg.vector_norm),
    "reduce_sum_square": reduction(lambda x, dim, keepdim: x.square().sum(dim, keepdim)),
    **{name: unary(getattr(torch, name)) for name in ("abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "round")},
    **{name: unary(getattr(torch, name)) for name in ("sign", "sin", "sqrt", "square", "tanh", "sigmoid", "relu")},
    **{"logical_not": unary(torch.logical_not), "relu6": unary(F.relu6), "silu": unary(F.silu)},
    "identity": lambda x: x,
    "cast": lambda x, dtype: x,  # the output is rounded to its declared type
    "clip": lambda x, alpha, beta: x.clamp(float(alpha), float(beta)),
    "elu": lambda x, alpha: F.elu(x, float(alpha)),
    "expand_dims": lambda x, axes: expand_dims(x, axes),
    "fill": lambda shape, value: value.expand(shape.tolist()),
    "gather_along_axis": lambda x, indices, axis, **_: x.gather(int(axis), from_end(indices, x.shape[int(axis)])),
    "inverse": lambda x, epsilon: 1 / (x + epsilon),
    "leaky_relu": lambda x, alpha: F.leaky_relu(x, float(alpha)),
    "linear": lambda x, weight, bias=None: F.linear(x, weight, bias),
    "log": lambda x, epsilon: (x + epsilon).log(),
    "reshape": lambda x, shape: x.reshape(shape.tolist()),
    "reverse": lambda x, axes: x.flip(axes.tolist()),
    "rsqrt": lambda x, epsilon: (x + epsilon).rsqrt(),
    "select": lambda cond, a, b: torch.where(cond, a, b),
    "sigmoid_hard": lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1),
    "softmax": lambda x, axis: x.softmax(int(axis)),
    "squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(axes.tolist()),
    "stack": lambda values, axis: torch.stack(values, int(axis)),
    "thresholded_relu": lambda x, alpha: torch.where(x >= alpha, x, 0),
    "tile": lambda x, reps: x.repeat(reps.tolist()),
    "transpose": lambda x, perm: x.permute(perm.tolist()),
}


def expand_dims(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes.tolist()):
        x = x.unsqueeze(axis)
    return x
