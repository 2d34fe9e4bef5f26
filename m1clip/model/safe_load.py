"""Weights and JSON from files and the Hugging Face hub, read so that no code in them can run.

safetensors and torch's zip archives are read as tensors only, and every name and shape is checked.
"""

import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from m1clip import hub
from m1clip.devices import short_error

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "state_dict_ema")


class WeightMismatch(ValueError):  # noqa: N818
    """Names of weights by what is wrong with them: missing, unexpected, misshapen."""

    def __init__(self, source: object, **names_by_kind: Iterable[str]):
        listed = {kind: sorted(names) for kind, names in names_by_kind.items()}
        counts = [f"{len(names)} {kind} (such as {names[0]})" for kind, names in listed.items() if names]
        super().__init__(f"the weights in {source} do not fit the model: {', '.join(counts)}")


def check_weights(source: object, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise WeightMismatch unless all names and shapes are equal."""
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    misshapen = []
    for name in expected.keys() & found.keys():
        if found[name].shape != expected[name].shape:
            in_file, in_model = (" × ".join(map(str, weights[name].shape)) or "scalar" for weights in (found, expected))
            misshapen.append(f"{name}  {in_file} in the file, {in_model} in the model")
    if missing or unexpected or misshapen:
        raise WeightMismatch(source, missing=missing, unexpected=unexpected, misshapen=misshapen)


def load_checked(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a safetensors file with exactly these names and shapes."""
    tensors = _load_safetensors(path)
    check_weights(path, tensors, expected)
    return tensors


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # also raised when the disk is full
        raise OSError(f"cannot write {path}: {error}") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a file in float32 (integers as they are), without the name prefixes of wrappers."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    tensors = _load_safetensors(path) if path.suffix == ".safetensors" else _load_archive(path)
    for prefix in ("module.", "_orig_mod."):  # DistributedDataParallel, torch.compile
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def load_folder_tensors(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """The weights of a folder: the first of these files that exists, whole or sharded with an index."""
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return load_tensors(folder / name)
        if index.is_file():
            files = read_json(index).get("weight_map", {}).values()
            shards = [load_tensors(folder / name) for name in sorted({Path(str(file)).name for file in files})]
            return {name: tensor for shard in shards for name, tensor in shard.items()}
    raise FileNotFoundError(f"{folder} has no weights; expected {' or '.join(names[:2])}, or its index.json")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return value


def download_from_hub(name: str, owner_optional: bool = False, weights: bool = True) -> Path:
    """A snapshot of a Hugging Face model: configuration, tokenizer, and safetensors if there are any."""
    repo = name.removeprefix("hf-hub:").removeprefix("hf:")
    slashes = (0, 1) if owner_optional else (1,)
    if repo.count("/") not in slashes or repo[:1] in "./~" or repo.endswith(WEIGHT_SUFFIXES):
        expected = f"a {', '.join(WEIGHT_SUFFIXES)} file, a folder or a hub name (openai/clip-vit-base-patch32)"
        raise FileNotFoundError(f"there is no model {name!r}; expected {expected}")
    from huggingface_hub import snapshot_download

    with hub.downloading(f"there is no file or folder {name!r}; {repo}"):
        for file in ("*.safetensors", "*pytorch_model*.bin") if weights else ("*.model",):
            patterns = ["*.json", "merges.txt", "vocab.txt", "*.model", file]
            folder = Path(snapshot_download(repo, allow_patterns=patterns))
            if any(folder.glob(file)):
                break
    return folder


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from None


def _load_archive(path: Path) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(name.endswith("/constants.pkl") for name in archive.namelist()):  # OpenAI's own checkpoints
                    return _TorchScriptUnpickler(archive).tensors()
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage raises errors of a dozen kinds
        reason = f"({short_error(error)}); it is damaged or contains more than weights"
        raise ValueError(f"{path} cannot be read as tensors only {reason}") from None
    for key in STATE_DICT_KEYS:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
    entries = value.items() if isinstance(value, Mapping) else ()
    tensors = {str(name): tensor for name, tensor in entries if isinstance(tensor, Tensor)}
    if not tensors:
        raise ValueError(f"{path} contains no named weights")
    return tensors


class _TorchScriptUnpickler(pickle.Unpickler):
    """Reads the tensors of a TorchScript archive; refuses every class but tensors, dicts and modules."""

    def __init__(self, archive: zipfile.ZipFile):
        data = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        self.archive, self.root = archive, data.removesuffix("data.pkl")
        self.storages: dict[Any, Tensor] = {}
        super().__init__(archive.open(data))

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):  # a TorchScript module: its attributes are kept, its code is never loaded
            return SimpleNamespace
        if module == "torch.jit._pickle":  # wraps a value in its type
            return lambda value, *_: value
        if f"{module}.{name}" not in UNPICKLED:
            raise pickle.UnpicklingError(f"{module}.{name} is not a weight")
        return UNPICKLED[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, _, count = pid
        if key not in self.storages:
            data = bytearray(self.archive.read(f"{self.root}data/{key}"))
            self.storages[key] = (
                torch.frombuffer(data, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
            )
        return self.storages[key]

    def tensors(self) -> dict[str, Tensor]:
        tensors, queue, visited = dict[str, Tensor](), [("", self.load())], set[int]()
        while queue:
            prefix, module = queue.pop()
            if id(module) in visited:  # a module that contains itself would never end
                continue
            visited.add(id(module))
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    tensors[prefix + name] = value
                elif isinstance(value, SimpleNamespace):
                    queue.append((f"{prefix}{name}.", value))
        return tensors


def _rebuild_tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    if math.prod(size) > storage.numel():  # strides of 0 would turn a few bytes into a huge tensor
        raise pickle.UnpicklingError(f"a tensor of shape {tuple(size)} in {storage.numel()} numbers")
    return storage.as_strided(tuple(size), tuple(stride), offset)


STORAGE_TYPES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Bool")
UNPICKLED: dict[str, Any] = {
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    **{f"torch.{kind}Storage": getattr(torch, kind.lower()) for kind in STORAGE_TYPES},
}
