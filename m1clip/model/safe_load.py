"""Weights and JSON from files and the Hugging Face hub, read so that no code in them can run.

safetensors and torch's zip archives are read as tensors only, and every name and shape is checked.
"""

import io
import math
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from m1clip import sensors
from m1clip.config import require
from m1clip.errors import NOT_CONVERTED, untrusted_input
from m1clip.files import open_regular, read_json

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
# Bounds of files from outside. A ViT-bigG has a header of 0.2 MB, and with its optimizer a pickle of 0.5 MB.
HEADER_BYTES, PICKLE_BYTES = 4_000_000, 1_000_000
MAX_DEPTH = 16  # of tuples in tuples in a pickle, and thousands of values on its stack
NO_VALUES = (pickletools.markobject, pickletools.stackslice)
MAX_ENTRIES = 50_000  # of an archive: one per tensor
SLACK_BYTES = 64_000_000
MAX_TENSORS = 10_000  # weights of a model; a ViT-bigG has 1,300
MAX_SIZE, MAX_LAYERS = 2**24, 1_024  # of any integer in a configuration, and of those that count layers
TOO_LONG = f"has more than {PICKLE_BYTES / 1e6:.0f} MB without tensors"
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "state_dict_ema")


class WithoutInit(TorchFunctionMode):
    """Skip random initial values, which weights from a file replace.

    On the meta device they would import torch._dynamo: 3 s and 160 MB (torch 2.15).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "trunc_normal_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules without memory for their weights."""
    with torch.device("meta"), WithoutInit():
        yield


@contextmanager
def bounded_modules(what: str) -> Iterator[list[int]]:
    """The sizes of the weights of modules that a library builds from a configuration of others, bounded in number."""
    sizes: list[int] = []

    def count(module: Any, name: str, parameter: Tensor | None) -> None:
        sizes.append(0 if parameter is None else parameter.nbytes)
        require(len(sizes) <= MAX_TENSORS, f"{what} has more than {MAX_TENSORS:,} weight tensors")

    handle = register_module_parameter_registration_hook(count)
    try:
        yield sizes
    finally:
        handle.remove()


def check_module_size(what: str, build: Callable[[], Any]) -> None:
    """Require that the weights of what a library would build fit into memory."""
    with on_meta(), bounded_modules(what) as sizes:
        try:
            build()
        except (NotImplementedError, RuntimeError) as error:  # a few models read their tensors: counted until there
            if "meta tensor" not in str(error).lower():
                raise
    require_memory(sum(sizes), what)


class WeightMismatch(ValueError):  # noqa: N818
    """Names of weights by what is wrong with them: missing, unexpected, misshapen."""

    def __init__(self, source: object, **names_by_kind: Iterable[str]):
        listed = {kind: sorted(names) for kind, names in names_by_kind.items()}
        counts = [f"{len(names)} {kind} (such as {names[0][:200]})" for kind, names in listed.items() if names]
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
    tensors = load_safetensors(path)
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
    tensors = load_safetensors(path) if path.suffix == ".safetensors" else _load_archive(path)
    require_memory(sum(4 * tensor.numel() for tensor in tensors.values()), f"{path} in float32")
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


def download_from_hub(name: str, owner_optional: bool = False, weights: bool = True) -> Path:
    """A snapshot of a Hugging Face model: configuration, tokenizer, and safetensors if there are any."""
    repo = name.removeprefix("hf-hub:").removeprefix("hf:")
    slashes = (0, 1) if owner_optional else (1,)
    if repo.count("/") not in slashes or repo[:1] in "./~" or repo.endswith(WEIGHT_SUFFIXES):
        expected = f"a {', '.join(WEIGHT_SUFFIXES)} file, a folder or a hub name (openai/clip-vit-base-patch32)"
        raise FileNotFoundError(f"there is no model {name!r}; expected {expected}")
    from huggingface_hub import snapshot_download

    from m1clip import hub

    with hub.downloading(f"there is no file or folder {name!r}; {repo}"):
        for file in ("*.safetensors", "*pytorch_model*.bin") if weights else ("*.model",):
            patterns = ["*.json", "merges.txt", "vocab.txt", "*.model", file]
            folder = Path(snapshot_download(repo, allow_patterns=patterns))
            if any(folder.glob(file)):
                break
    return folder


def load_safetensors(path: Path) -> dict[str, Tensor]:
    length = int.from_bytes(check_file(path), "little")
    if length > HEADER_BYTES:
        raise ValueError(f"{path} is not a model: its header of {length:,} bytes is above {HEADER_BYTES:,}")
    with untrusted_input(f"{path} is damaged or not a safetensors file"):
        return load_file(path)


def check_file(path: Path) -> bytes:
    """The first bytes of a regular file that fits into memory."""
    with open_regular(path) as file:
        require_memory(os.fstat(file.fileno()).st_size, str(path))
        return file.read(8)


def check_settings(settings: Any, key: str = "") -> None:
    """Refuse numbers in a configuration of others with which a library would build for ever."""
    if isinstance(settings, Mapping | list):
        items = settings.items() if isinstance(settings, Mapping) else ((key, item) for item in settings)
        for name, item in items:
            check_settings(item, str(name))
    elif isinstance(settings, int | float):
        limit = MAX_LAYERS if re.search("layer|depth|block|stage|group", key) else MAX_SIZE
        require(abs(settings) <= limit or isinstance(settings, float), f"{key[:100]} {settings:,} is above {limit:,}")


def require_memory(size: int, what: str) -> None:
    """Of the whole machine: less may be available now, but other programs can be closed or swapped out."""
    needed, total = size / 1e9, sensors.memory_limit_gb()
    if needed > total:
        raise MemoryError(f"{what} needs {needed:,.1f} GB of memory; this machine has {total:,.1f} GB")


def _load_archive(path: Path) -> dict[str, Tensor]:
    check_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # about versions of pickle
            value = _unpickle(path)
    except BaseException as error:  # damage raises errors of a dozen kinds, some of them without Exception
        if isinstance(error, NOT_CONVERTED):
            raise
        raise ValueError(f"{path} is refused: {explain_refusal(error)}") from None
    for key in STATE_DICT_KEYS:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
    entries = value.items() if isinstance(value, Mapping) else ()
    tensors = {name: tensor for name, tensor in entries if isinstance(name, str) and isinstance(tensor, Tensor)}
    if not tensors:
        raise ValueError(f"{path} contains no named weights")
    for name, tensor in tensors.items():  # strides of 0 would turn a few bytes into gigabytes
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(f"{path} is refused: its tensor {name[:100]} is larger than its data")
    return tensors


def _unpickle(path: Path) -> Any:
    if not zipfile.is_zipfile(path):  # as torch wrote it until 2020
        with open(path, "rb") as file:
            check_pickles(file.read(PICKLE_BYTES), 5)
        with PickleReader(open(path, "rb", buffering=0)) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    with open(path, "rb") as file:
        entries = zipfile._EndRecData(file)[zipfile._ECD_ENTRIES_TOTAL]  # type: ignore[attr-defined]
    require(entries <= MAX_ENTRIES, f"it has {entries:,} entries, more than {MAX_ENTRIES:,}")
    with zipfile.ZipFile(path) as archive:
        expanded = sum(entry.file_size for entry in archive.infolist())
        limit = path.stat().st_size + SLACK_BYTES  # torch compresses only the code of TorchScript
        require(expanded <= limit, f"its entries expand to {expanded / 1e9:,.1f} GB, as in a zip bomb")
        pickles = [entry for entry in archive.infolist() if entry.filename.endswith(".pkl")]
        require(all(entry.file_size <= PICKLE_BYTES for entry in pickles), f"a pickle in it {TOO_LONG}")
        for entry in pickles:
            check_pickles(archive.read(entry), 1)
        if any(entry.filename.endswith("/constants.pkl") for entry in pickles):  # OpenAI's own checkpoints
            return _TorchScriptUnpickler(archive).tensors()
    return torch.load(path, map_location="cpu", weights_only=True)


def check_pickles(data: bytes, count: int) -> None:
    """Refuse deep tuples: the hash of one that contains another twice takes exponential time, in C."""
    file, deep = io.BytesIO(data), False
    try:
        while count and not deep and file.tell() < len(data):
            deep, count = any(depth > MAX_DEPTH for depth in tuple_depths(file)), count - 1
    except (ValueError, LookupError):
        raise ValueError(f"its pickle is damaged or {TOO_LONG}") from None
    require(not deep, f"its pickle has more than {MAX_DEPTH:,} values in one another")


def tuple_depths(file: io.BytesIO) -> Iterator[int]:
    """How deep each tuple of a pickle is, and the number of marks, found without building anything."""
    mark, stack, memo = -1, list[int](), dict[Any, int]()
    for code, argument, _ in pickletools.genops(file):
        if code.name == "GLOBAL" and str(argument).endswith(" bytearray"):  # of any size, and torch allows it
            raise ValueError("bytearray")
        taken: list[int] = []
        if pickletools.markobject in code.stack_before:
            while (value := stack.pop()) != mark:
                taken.append(value)
        taken += [stack.pop() for kind in code.stack_before if kind not in NO_VALUES]
        if code.name.endswith("PUT") or code.name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = taken[0] if taken else stack[-1]
        depth = memo[argument] if code.name.endswith("GET") else max(taken, default=0)
        depth += pickletools.pytuple in code.stack_after
        stack += [mark if kind is pickletools.markobject else depth for kind in code.stack_after]
        yield max(depth, len(stack) // 1_000)


class PickleReader(io.BufferedReader):
    """A file whose pickles are bounded; torch reads tensors past this object, by the file's descriptor."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(PICKLE_BYTES if size is None or size < 0 else min(size, PICKLE_BYTES))
        self.total += len(data)
        if self.total > PICKLE_BYTES:
            raise ValueError(f"its pickle {TOO_LONG}")
        return data

    def readline(self, size: int | None = -1, /) -> bytes:
        return super().readline(PICKLE_BYTES)


def explain_refusal(error: BaseException) -> str:
    """Why torch did not load a file, without its advice to load it unsafely."""
    name = re.search(r"GLOBAL ([\w.]+)|^([\w.]+) is not a weight", str(error))
    if name:
        safe = "convert it to safetensors where it is trusted"
        return f"it asks for {name[1] or name[2]}, which is not a tensor; nothing in it was run ({safe})"
    reason = re.sub(r"(?s).*WeightsUnpickler error: ", "", str(error)).strip().partition("\n")[0]
    advice = re.search("weights.only|safe_globals", reason, re.I)
    reason = type(error).__name__ if advice else reason[:200]
    return f"it is damaged or contains more than tensors ({reason}); nothing in it was run"


class _TorchScriptUnpickler(pickle._Unpickler):
    """Reads the tensors of a TorchScript archive; refuses every class but tensors, dicts and modules.

    In Python, because the unpickler in C allocates 34 GB for a memo of one entry with a high number.
    """

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
