"""Files of others: folders and hub names, safetensors, and torch's own archives, read so that nothing in them
can run."""

import json
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

ENDINGS = (".safetensors", ".pt", ".pth", ".bin")
# All that a damaged archive was seen to raise.
TROUBLE: tuple[type[Exception], ...] = (
    *(RuntimeError, EOFError, OSError, LookupError, ValueError, TypeError, AttributeError, AssertionError),
    *(StopIteration, zlib.error, zipfile.BadZipFile, pickle.UnpicklingError),
)
WRAPPED = ("state_dict", "model_state_dict", "model", "state_dict_ema")
DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def save_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str] | None = None) -> None:
    try:
        save_file(tensors, path, notes)
    except SafetensorError as error:  # its name for a full disk, among others
        raise OSError(f"cannot write {path}: {error}") from None


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file by its name, in float32 where it is a weight; prefixes of wrappers are gone."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    found = _safetensors(path) if path.suffix == ".safetensors" else _archive(path)
    for prefix in ("module.", "_orig_mod."):
        if found and all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def download_from_hub(name: str, bare: bool = False) -> Path:
    """A model of the Hugging Face hub, fetched once; weights as safetensors where there are any.

    With `bare`, its name may be without an owner, as bert-base-uncased.
    """
    known_as = name.removeprefix("hf-hub:").removeprefix("hf:")
    slashes = known_as.count("/")
    if slashes > 1 or (slashes < 1 and not bare) or known_as[:1] in "./~" or known_as.endswith(ENDINGS):
        raise FileNotFoundError(
            f"there is no model {name!r}: a checkpoint ({', '.join(ENDINGS)}), a folder, or a hub name such "
            "as openai/clip-vit-base-patch32 was expected"
        )
    from huggingface_hub import HfApi, snapshot_download

    known = ["*.json", "merges.txt", "vocab.txt"]
    try:
        files = HfApi().list_repo_files(known_as)
        safe = any(file.endswith(".safetensors") for file in files)
        weights = ["*.safetensors"] if safe else ["pytorch_model*.bin", "open_clip_pytorch_model.bin"]
    except Exception:  # the network's many ways to fail, through three libraries
        weights = ["*.safetensors"]  # what is in the cache will do
    try:
        return Path(snapshot_download(known_as, allow_patterns=[*known, *weights]))
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise FileNotFoundError(
            f"there is no file or folder {name!r}, and the hub cannot be asked for it ({first})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path} should hold an object")
    return held


def gathered(folder: Path, names: list[str]) -> dict[str, Tensor]:
    """The weights of a folder, from one file or from the several that an index lists."""
    for name in names:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return load_tensors(folder / name)
        if index.is_file():
            parts = set(read_json(index).get("weight_map", {}).values())
            made: dict[str, Tensor] = {}
            for part in sorted(map(str, parts)):
                made |= load_tensors(folder / Path(part).name)
            return made
    raise FileNotFoundError(
        f"{folder} has no weights: {', '.join(names[:2])} or an index of parts was expected"
    )


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None


def _archive(path: Path) -> dict[str, Tensor]:
    try:
        if _is_script(path):
            return _Script(path).tensors()
        held = torch.load(path, map_location="cpu", weights_only=True)
    except TROUBLE as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path} cannot be read as tensors alone ({first}); it is damaged, or holds more than weights"
        ) from None
    for key in WRAPPED:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
    tensors = (
        {str(k): v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, Mapping) else {}
    )
    if not tensors:
        raise ValueError(f"{path} holds no weights by name")
    return tensors


def _is_script(path: Path) -> bool:
    """Whether it is a TorchScript archive, as OpenAI's own checkpoints are."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return any(name.endswith("/constants.pkl") for name in file.namelist())


class _Part:
    """A module of an archive, as the bag of things it holds; its code is not looked at."""

    def __init__(self, *held: Any):
        self.held: dict[str, Any] = {}

    def __setstate__(self, state: Any) -> None:
        self.held = state if isinstance(state, dict) else {}


class _Script(pickle.Unpickler):
    """Reads the tensors of a TorchScript archive. Of all that a pickle may name, only these are known here:
    tensors, ordered dictionaries, and modules as bags. Anything else is refused."""

    def __init__(self, path: Path):
        self.zip = zipfile.ZipFile(path)
        listing = next(name for name in self.zip.namelist() if name.endswith("/data.pkl"))
        self.root = listing.removesuffix("data.pkl")
        self.storages: dict[Any, Tensor] = {}
        super().__init__(self.zip.open(listing))

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Part
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name.startswith(("build_", "restore_type_tag")):
            return lambda held, *_: held
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no weight")

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, _, number = pid
        if not str(key).isalnum():
            raise pickle.UnpicklingError(f"a storage called {key!r}")
        if key not in self.storages:
            data = bytearray(self.zip.read(f"{self.root}data/{key}"))
            full = (
                torch.frombuffer(data, dtype=dtype, count=number) if number else torch.empty(0, dtype=dtype)
            )
            self.storages[key] = full
        return self.storages[key]

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with self.zip:
            parts = [("", self.load())]
        seen = set[int]()
        while parts:
            prefix, part = parts.pop()
            if id(part) in seen:  # a part that holds itself would never end
                continue
            seen.add(id(part))
            for name, value in getattr(part, "held", {}).items():
                if isinstance(value, Tensor):
                    found[prefix + name] = value
                elif isinstance(value, _Part):
                    parts.append((f"{prefix}{name}.", value))
        return found


def _rebuilt(flat: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    if math.prod(size) > flat.numel():  # a few bytes that pretend to be many
        raise pickle.UnpicklingError(f"a tensor of {tuple(size)} in {flat.numel()} numbers")
    return flat.as_strided(tuple(size), tuple(stride), offset)
