"""CLIPs of OpenAI, OpenCLIP and transformers: their checkpoints as models of m1clip, and the other way.

On import, sizes are read from the weights. What weights do not show (attention heads, activation, color
constants) is read from the configuration beside them, or else follows OpenAI's and OpenCLIP's conventions.
"""

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.config import OPENAI_MEAN, OPENAI_STD, ModelConfig, TextConfig, VisionConfig, override
from m1clip.files import atomic_folder
from m1clip.model import safe_load
from m1clip.model.clip import CLIP, load
from m1clip.model.safe_load import WEIGHT_SUFFIXES, WeightMismatch, load_folder_tensors, read_json
from m1clip.model.tokenizer import END, PAD, START, Tokenizer

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
OPENAI_VOCAB_SIZE = 49408
# Width of an attention head by the width of the vision tower, where it is not 64 (ViT-H, g and bigG).
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
QUICK_GELU_NAMES = ("openai", "quickgelu", "metaclip", "dfn")  # in names of checkpoints trained with quick_gelu
OPEN_CLIP_STEMS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")  # of weight files
# The weight names of both libraries, and the keys and values of an OpenCLIP configuration that leave CLIP's
# equations as they are; others are refused.
TABLES = json.loads(Path(__file__).with_name("interop.json").read_text())
Weights = Mapping[str, Tensor]
Files = dict[str, dict[str, Any]]
Hints = dict[str, Any]  # settings of a ModelConfig by path (vision.heads, activation, …), and end_id


@dataclass(frozen=True)
class Layout:
    """How a library names and stores the weights of a CLIP."""

    marker: str  # a name that only this library's checkpoints contain
    replacements: dict[str, str]  # parts of our names and what they become, in this order
    transposed: list[str]
    ignored: str  # pattern of names without weights

    def names(self, ours: str) -> list[str]:
        """Their name of one of our weights, or of its parts along the first axis."""
        name = ours
        for part, replacement in self.replacements.items():
            name = name.replace(part, replacement)
        return [name.replace(".qkv.", f".{part}_proj.") for part in "qkv"] if ".qkv." in name else [name]

    def from_ours(self, weights: Weights) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for ours, weight in weights.items():
            names = self.names(ours)
            parts = weight.chunk(len(names)) if len(names) > 1 else (weight,)
            converted |= dict(zip(names, parts, strict=True))
        return {name: part.T if name in self.transposed else part for name, part in converted.items()}

    def to_ours(self, weights: Weights, names: Iterable[str]) -> dict[str, Tensor]:
        converted = {}
        for ours in names:
            parts = [weights[name].T if name in self.transposed else weights[name] for name in self.names(ours)]
            converted[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        return converted


OPEN_CLIP, TRANSFORMERS = Layout(**TABLES["open_clip"]), Layout(**TABLES["transformers"])


def import_clip(spec: str, tokenizer: str = "", quick_gelu: bool = False) -> tuple[CLIP, str]:
    """The model that `--init` names, and a note on what had to be assumed.

    For weights that come without them: `tokenizer` is a vocabulary file, `quick_gelu` is the activation.
    """
    path = Path(spec).expanduser()
    if not path.exists():
        path = safe_load.download_from_hub(spec)
    if path.is_dir() and not is_foreign(path):
        return load(path), ""
    weights, hints = read_checkpoint(path)
    if "activation" not in hints and (quick_gelu or any(name in path.name.lower() for name in QUICK_GELU_NAMES)):
        hints["activation"] = "quick_gelu"
    clip = build_clip(path, weights, hints, find_tokenizer(path, tokenizer))
    advice = f"first run: m1clip convert {shlex.quote(spec)} --to m1clip --quick-gelu"
    note = f"no configuration names the activation, so it is gelu; if it was quick_gelu, {advice}"
    return clip, "" if "activation" in hints else note


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a model of another library."""
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return (folder / "open_clip_config.json").is_file() or "model_type" in config or "architectures" in config


def read_checkpoint(path: Path) -> tuple[Weights, Hints]:
    """The weights of a file or folder, and the settings of the configuration beside them."""
    config = (path if path.is_dir() else path.parent) / "open_clip_config.json"
    hints = open_clip_hints(read_json(config)) if config.is_file() else {}
    if path.is_dir() and config.is_file():
        names = [f"{stem}{suffix}" for stem in OPEN_CLIP_STEMS for suffix in WEIGHT_SUFFIXES]
        return load_folder_tensors(path, names), hints
    if path.is_dir():
        hints = transformers_hints(path)
        return load_folder_tensors(path, ["model.safetensors", "pytorch_model.bin"]), hints
    if path.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"{path} is not a checkpoint; expected a {', '.join(WEIGHT_SUFFIXES)} file")
    weights = safe_load.load_tensors(path)
    if "input_resolution" in weights:  # only OpenAI's own archives have it
        hints["activation"] = "quick_gelu"
    return weights, hints


def open_clip_hints(config: dict[str, Any]) -> Hints:
    model, preprocess = config.get("model_cfg", config), config.get("preprocess_cfg", {})
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    keys, values = TABLES["open_clip_keys"], TABLES["open_clip_values"]
    for section, settings in (("vision_cfg", vision), ("text_cfg", text), ("preprocess_cfg", preprocess)):
        for key, value in settings.items():
            unset = value in (None, False, 0, "", {})
            if not (unset or key in keys or value in values.get(key, ())):
                raise ValueError(f"OpenCLIP models with {section} {key} = {value!r} cannot be imported")
    return {
        "vision.heads": vision.get("width", 768) // vision.get("head_width", 64),
        "text.heads": text.get("heads", 8),
        "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "vision.mean": tuple(preprocess.get("mean", OPENAI_MEAN)),
        "vision.std": tuple(preprocess.get("std", OPENAI_STD)),
    }


def transformers_hints(folder: Path) -> Hints:
    config = read_json(folder / "config.json")
    if config.get("model_type") != "clip":
        raise ValueError(f"{folder} is a {config.get('model_type')} model; only a CLIP can be imported")
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    path = folder / "preprocessor_config.json"
    preprocess = read_json(path) if path.is_file() else {}
    for tower in (vision, text):
        if not math.isclose(tower.get("layer_norm_eps", 1e-5), 1e-5):
            raise ValueError(f"{folder}: layer_norm_eps must be 1e-5, not {tower['layer_norm_eps']}")
    activations = [tower.get("hidden_act", "quick_gelu") for tower in (vision, text)]
    if activations not in (["gelu"] * 2, ["quick_gelu"] * 2):
        found = " and ".join(map(str, activations))
        raise ValueError(f"{folder}: hidden_act must be gelu or quick_gelu in both towers, not {found}")
    hints = {
        "vision.heads": vision.get("num_attention_heads", 12),
        "text.heads": text.get("num_attention_heads", 8),
        "activation": activations[0],
        "vision.mean": tuple(preprocess.get("image_mean", OPENAI_MEAN)),
        "vision.std": tuple(preprocess.get("image_std", OPENAI_STD)),
    }
    end_id = text.get("eos_token_id", OPENAI_VOCAB_SIZE - 1)
    if end_id != 2:  # which old versions of transformers wrote for every model
        hints["end_id"] = end_id
    return hints


def build_clip(source: Path, weights: Weights, hints: Hints, tokenizer: Tokenizer) -> CLIP:
    layout = find_layout(source, weights)
    if "text.token_embedding.weight" in weights:  # OpenCLIP's CustomTextCLIP
        weights = {name.removeprefix("text."): tensor for name, tensor in weights.items()}
    weights = {name: tensor for name, tensor in weights.items() if not re.search(layout.ignored, name)}
    end_id = hints.pop("end_id", tokenizer.end_id)
    config = override(infer_config(source, layout, weights), hints)
    sizes = {config.text.vocab_size, len(tokenizer)}
    if OPENAI_VOCAB_SIZE in sizes and len(sizes) > 1:
        raise ValueError(
            f"{source} has embeddings of {config.text.vocab_size:,} tokens, but the tokenizer has "
            f"{len(tokenizer):,}; put its own tokenizer.json beside it, or name it with --tokenizer"
        )
    if end_id != tokenizer.end_id:
        raise ValueError(f"{source}: its config has end token {end_id}, its tokenizer {tokenizer.end_id}")
    with torch.device("meta"):
        model = CLIP(config, tokenizer)
    safe_load.check_weights(source, weights, layout.from_ours(model.state_dict()))
    model.load_state_dict(layout.to_ours(weights, model.state_dict()), assign=True)
    return model.eval()


def find_layout(source: Path, weights: Weights) -> Layout:
    if "visual.layer1.0.conv1.weight" in weights:
        raise ValueError(f"{source} is a CLIP with a ResNet; only vision transformers can be imported")
    for layout in (OPEN_CLIP, TRANSFORMERS):
        if layout.marker in weights:
            return layout
    raise WeightMismatch(source, missing=[OPEN_CLIP.marker, TRANSFORMERS.marker], unexpected=weights)


def infer_config(source: Path, layout: Layout, weights: Weights) -> ModelConfig:
    """The configuration of a model with weights of these shapes; the rest as OpenAI and OpenCLIP have it."""
    needed = ["vision.patch.weight", "vision.position", "text.token.weight", "text.position"]
    needed += ["vision_projection.weight", "vision.blocks.0.mlp.wide.weight", "text.blocks.0.mlp.wide.weight"]
    missing = [name for ours in needed for name in layout.names(ours) if name not in weights]
    if missing:
        raise WeightMismatch(source, missing=missing)
    shapes = {name: tensor.shape for name, tensor in layout.to_ours(weights, needed).items()}

    def blocks(tower: str, head_widths: dict[int, int]) -> dict[str, Any]:
        hidden, width = shapes[f"{tower}.blocks.0.mlp.wide.weight"]
        prefix = re.escape(layout.names(f"{tower}.blocks.")[0])
        layers = len({match[1] for name in weights if (match := re.match(rf"{prefix}(\d+)\.", name))})
        heads, mlp_width = width // head_widths.get(width, 64) or 1, 0 if hidden == 4 * width else hidden
        return {"width": width, "layers": layers, "heads": heads, "mlp_width": mlp_width}

    patch_size = shapes["vision.patch.weight"][-1]
    image_size = math.isqrt(shapes["vision.position"][0] - 1) * patch_size
    vision = VisionConfig(image_size, patch_size, **blocks("vision", HEAD_WIDTHS))
    text = TextConfig(shapes["text.token.weight"][0], shapes["text.position"][0], **blocks("text", {}))
    embed_dim = shapes["vision_projection.weight"][0]
    return ModelConfig(vision, text, embed_dim, loss="sigmoid" if "logit_bias" in weights else "softmax")


def find_tokenizer(path: Path, tokenizer: str) -> Tokenizer:
    """From the given vocabulary, from beside the weights, or OpenAI's from an installed open_clip."""
    if tokenizer not in ("", "bpe", "char"):
        return Tokenizer.from_clip_vocabulary(Path(tokenizer))
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_clip_json(folder / "tokenizer.json")
    package = find_spec("open_clip")
    installed = [Path(location) for location in (package and package.submodule_search_locations) or ()]
    for file in (folder / "merges.txt", *(parent / VOCABULARY for parent in (folder, *installed))):
        if file.is_file():
            return Tokenizer.from_clip_vocabulary(file)
    files = f"tokenizer.json, merges.txt or {VOCABULARY}"
    raise FileNotFoundError(f"{path} has no tokenizer; put {files} beside it, or use --tokenizer FILE")


def export_clip(model: CLIP, library: str, folder: Path) -> None:
    """Write or replace a folder for `transformers` or `open_clip`, atomically."""
    vision, text = exportable_towers(model.config, library)
    assert model.tokenizer is not None
    end_id, tokenizer = model.tokenizer.end_id, with_end_last(model.tokenizer)
    weights = {name: weight.detach().cpu().float() for name, weight in model.state_dict().items()}
    order = list(range(text.vocab_size))
    order[end_id], order[tokenizer.end_id] = tokenizer.end_id, end_id
    weights["text.token.weight"] = weights["text.token.weight"][order]
    if library == "transformers":
        layout, weights_file = TRANSFORMERS, "model.safetensors"
        files = transformers_files(model.config, vision, text, tokenizer)
    else:
        layout, weights_file = OPEN_CLIP, "open_clip_model.safetensors"
        files = {"open_clip_config.json": open_clip_config(model, vision, text, tokenizer)}
    pad = END if is_openai(tokenizer) else PAD
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": text.context_length}
    files["tokenizer_config.json"] = {**kind, "bos_token": START, "eos_token": END, "pad_token": pad}
    files["tokenizer.json"] = tokenizer.to_clip_json()
    tensors = {name: tensor.clone().contiguous() for name, tensor in layout.from_ours(weights).items()}
    with atomic_folder(folder) as partial:
        safe_load.save_tensors(partial / weights_file, tensors, {"format": "pt"})
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def exportable_towers(config: ModelConfig, library: str) -> tuple[VisionConfig, TextConfig]:
    """The towers of a model that the library's CLIP can represent; ValueError for any other model."""
    vision, text = config.vision, config.text
    if not isinstance(vision, VisionConfig) or not isinstance(text, TextConfig):
        raise ValueError(f"a CLIP of {library} cannot have the timm or transformers tower of this model")
    train, reason = "to convert a model, train it with", ""
    if config.head != "linear":
        reason = f"a {config.head} head; {train} --model.head linear"
    elif (vision.stem, vision.pool) != ("patch", "class"):
        reason = f"a {vision.stem} stem and {vision.pool} pooling; {train} --preset small or --preset base"
    elif text.encoder != "transformer":
        reason = f"a {text.encoder} text encoder; {train} --model.text.encoder transformer"
    elif library == "transformers" and config.loss == "sigmoid":
        reason = f"a logit bias; convert it with --to open_clip, or {train} --model.loss softmax"
    if reason:
        raise ValueError(f"a CLIP of {library} cannot have {reason}")
    return vision, text


def with_end_last(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the highest id for the end token, where both libraries look for it."""
    state = json.loads(tokenizer.core.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    last = max(vocab, key=lambda token: vocab[token])
    vocab[last], vocab[END] = vocab[END], vocab[last]
    return Tokenizer.from_state(state)


def is_openai(tokenizer: Tokenizer) -> bool:
    return len(tokenizer) == OPENAI_VOCAB_SIZE and tokenizer.end_id == OPENAI_VOCAB_SIZE - 1


def transformers_files(config: ModelConfig, vision: VisionConfig, text: TextConfig, tokenizer: Tokenizer) -> Files:
    """config.json, and what is not the default of CLIPImageProcessor: bicubic scaling, center crop, RGB in 0 to 1."""
    projection = {"projection_dim": config.embed_dim}

    def tower(kind: str, shape: VisionConfig | TextConfig) -> dict[str, Any]:
        widths = {"hidden_size": shape.width, "intermediate_size": shape.mlp_width or 4 * shape.width}
        blocks = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
        return {"model_type": kind, **widths, **blocks, "hidden_act": config.activation, **projection}

    size, pad_id = vision.image_size, tokenizer.end_id if is_openai(tokenizer) else 0
    ids = {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.end_id, "pad_token_id": pad_id}
    tokens = {"vocab_size": text.vocab_size, "max_position_embeddings": text.context_length, **ids}
    scaling = {"size": {"shortest_edge": size}, "crop_size": {"height": size, "width": size}}
    colors = {"image_mean": list(vision.mean), "image_std": list(vision.std)}
    towers = {
        "vision_config": {**tower("clip_vision_model", vision), "image_size": size, "patch_size": vision.patch_size},
        "text_config": {**tower("clip_text_model", text), **tokens},
    }
    return {
        "config.json": {"architectures": ["CLIPModel"], "model_type": "clip", **projection, **towers},
        "preprocessor_config.json": {"image_processor_type": "CLIPImageProcessor", **scaling, **colors},
    }


def open_clip_config(model: CLIP, vision: VisionConfig, text: TextConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    def tower(shape: VisionConfig | TextConfig) -> dict[str, Any]:
        # open_clip multiplies and rounds down, so half a feature is added.
        ratio = {"mlp_ratio": (shape.mlp_width + 0.5) / shape.width} if shape.mlp_width else {}
        return {"width": shape.width, "layers": shape.layers, **ratio}

    patches = {"image_size": vision.image_size, "patch_size": vision.patch_size}
    vision_cfg = {**tower(vision), **patches, "head_width": vision.width // vision.heads}
    tokens = {"context_length": text.context_length, "vocab_size": text.vocab_size}
    text_cfg = {**tower(text), **tokens, "heads": text.heads}
    if not is_openai(tokenizer):
        text_cfg |= {"hf_tokenizer_name": "tokenizer.json", "tokenizer_kwargs": {"clean": "lower"}}
    settings = {"embed_dim": model.config.embed_dim, "quick_gelu": model.config.activation == "quick_gelu"}
    bias = {} if model.logit_bias is None else {"init_logit_bias": model.logit_bias.item()}
    return {
        "model_cfg": {**settings, "vision_cfg": vision_cfg, "text_cfg": text_cfg, **bias},
        "preprocess_cfg": {"mean": list(vision.mean), "std": list(vision.std)},
    }
