"""CLIP checkpoints of OpenAI, OpenCLIP and transformers as models of m1clip.

Sizes are read from the weights. What weights do not show (attention heads, activation, color constants) is
read from the configuration beside them, or else follows OpenAI's and OpenCLIP's conventions.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.config import OPENAI_MEAN, OPENAI_STD, ModelConfig, TextConfig, VisionConfig, override
from m1clip.model import safe_load
from m1clip.model.clip import CLIP, load
from m1clip.model.safe_load import WEIGHT_SUFFIXES, WeightMismatch, read_json
from m1clip.model.tokenizer import Tokenizer

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
OPENAI_VOCAB_SIZE = 49408
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
"""Width of an attention head by the width of the tower, where it is not 64 (OpenCLIP's ViT-H, g and bigG)."""
QUICK_GELU_NAMES = ("openai", "quickgelu", "metaclip", "dfn")
"""In the names of checkpoints that were trained with quick_gelu."""
# Keys and values of an OpenCLIP configuration that leave CLIP's equations as they are; others are refused.
OPEN_CLIP_KEYS = {
    "vision_cfg": {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "patch_dropout"},
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"}
    | {"hf_tokenizer_name", "tokenizer_kwargs"},
    "preprocess_cfg": {"size", "mean", "std", "interpolation", "mode", "fill_color"},
}
OPEN_CLIP_VALUES: dict[str, tuple[Any, ...]] = {
    **{"pool_type": ("tok", "argmax"), "resize_mode": ("shortest",), "eos_id": (2,), "pad_id": (0, 1)}
}
Weights = Mapping[str, Tensor]
Hints = dict[str, Any]
"""Settings of a ModelConfig by path (vision.heads, activation, …), and end_id."""


@dataclass(frozen=True)
class Layout:
    """How a library names and stores the weights of a CLIP."""

    marker: str
    """A name that only this library's checkpoints contain."""
    replacements: dict[str, str]
    """Parts of our names and what they become, in this order."""
    transposed: tuple[str, ...] = ()
    ignored: str = "$^"
    """Pattern of names without weights."""

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


OPEN_CLIP = Layout(
    "visual.conv1.weight",
    {
        **{"vision_projection.weight": "visual.proj", "text_projection.weight": "text_projection"},
        **{"vision.blocks.": "visual.transformer.resblocks.", "text.blocks.": "transformer.resblocks."},
        **{"attn.qkv.": "attn.in_proj_", "attn.out.": "attn.out_proj."},
        **{"mlp.wide.": "mlp.c_fc.", "mlp.narrow.": "mlp.c_proj."},
        **{"vision.patch.": "visual.conv1.", "vision.class_token": "visual.class_embedding"},
        **{"vision.position": "visual.positional_embedding", "vision.ln_": "visual.ln_"},
        **{"text.token.": "token_embedding.", "text.position": "positional_embedding"},
        **{"text.ln_post.": "ln_final."},
    },
    ("visual.proj", "text_projection"),
    r"^(input_resolution|context_length|vocab_size)$|attn_mask$",
)
TRANSFORMERS = Layout(
    "vision_model.embeddings.patch_embedding.weight",
    {
        **{"vision_projection.": "visual_projection."},
        **{"vision.blocks.": "vision_model.encoder.layers.", "text.blocks.": "text_model.encoder.layers."},
        **{"ln_1.": "layer_norm1.", "ln_2.": "layer_norm2."},
        **{"attn.": "self_attn.", "attn.out.": "attn.out_proj."},
        **{"mlp.wide.": "mlp.fc1.", "mlp.narrow.": "mlp.fc2."},
        **{"vision.ln_pre.": "vision_model.pre_layrnorm."},  # transformers' spelling
        **{
            "vision.ln_post.": "vision_model.post_layernorm.",
            "text.ln_post.": "text_model.final_layer_norm.",
        },
        **{"vision.": "vision_model.embeddings.", "text.": "text_model.embeddings."},
        **{
            ".patch.": ".patch_embedding.",
            ".class_token": ".class_embedding",
            ".token.": ".token_embedding.",
        },
        **{"embeddings.position": "embeddings.position_embedding.weight"},
    },
    ignored=r"position_ids$",
)


def import_clip(spec: str, tokenizer: str = "", quick_gelu: bool = False) -> tuple[CLIP, str]:
    """The model that `--init` names, and a note on what had to be assumed.

    `tokenizer` is a vocabulary file for weights that come without one. `quick_gelu` is the activation of
    weights that come without a configuration.
    """
    path = Path(spec).expanduser()
    if not path.exists():
        path = safe_load.download_from_hub(spec)
    if path.is_dir() and not is_foreign(path):
        return load(path), ""
    weights, hints = read_folder(path) if path.is_dir() else read_file(path)
    note = ""
    if "activation" not in hints:
        quick_gelu = quick_gelu or any(name in path.name.lower() for name in QUICK_GELU_NAMES)
        hints["activation"] = "quick_gelu" if quick_gelu else "gelu"
        advice = f"first run: m1clip convert {spec} --to m1clip --quick-gelu"
        note = f"no configuration names the activation, so it is gelu; if it was quick_gelu, {advice}"
    return build_clip(path, weights, hints, find_tokenizer(path, tokenizer)), "" if quick_gelu else note


def is_foreign(folder: Path) -> bool:
    """Whether a folder is a model of another library."""
    if (folder / "open_clip_config.json").is_file():
        return True
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return "model_type" in config or "architectures" in config


def read_file(path: Path) -> tuple[Weights, Hints]:
    if path.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"{path} is not a checkpoint; expected a {', '.join(WEIGHT_SUFFIXES)} file")
    weights = safe_load.load_tensors(path)
    config = path.parent / "open_clip_config.json"
    hints = open_clip_hints(read_json(config)) if config.is_file() else {}
    if "input_resolution" in weights:  # only OpenAI's own archives have it
        hints["activation"] = "quick_gelu"
    return weights, hints


def read_folder(folder: Path) -> tuple[Weights, Hints]:
    if (folder / "open_clip_config.json").is_file():
        stems = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
        files = [stem + suffix for stem in stems for suffix in WEIGHT_SUFFIXES]
        hints = open_clip_hints(read_json(folder / "open_clip_config.json"))
        return safe_load.load_folder_tensors(folder, files), hints
    config = read_json(folder / "config.json")
    if config.get("model_type") != "clip":
        raise ValueError(f"{folder} is a {config.get('model_type')} model; --init takes a CLIP")
    weights = safe_load.load_folder_tensors(folder, ["model.safetensors", "pytorch_model.bin"])
    return weights, transformers_hints(folder, config)


def open_clip_hints(config: dict[str, Any]) -> Hints:
    model, preprocess = config.get("model_cfg", config), config.get("preprocess_cfg", {})
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    if "timm_model_name" in vision or "hf_model_name" in text:
        raise ValueError("this OpenCLIP model has a timm or transformers tower; --init takes its own ViTs only")
    for section, values in (("vision_cfg", vision), ("text_cfg", text), ("preprocess_cfg", preprocess)):
        for key, value in values.items():
            unset = value in (None, False, 0, "", {})
            if not (unset or key in OPEN_CLIP_KEYS[section] or value in OPEN_CLIP_VALUES.get(key, ())):
                raise ValueError(f"--init does not support {section} {key} = {value!r} of this OpenCLIP model")
    return {
        "vision.heads": vision.get("width", 768) // vision.get("head_width", 64),
        "text.heads": text.get("heads", 8),
        "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "vision.mean": tuple(preprocess.get("mean", OPENAI_MEAN)),
        "vision.std": tuple(preprocess.get("std", OPENAI_STD)),
    }


def transformers_hints(folder: Path, config: dict[str, Any]) -> Hints:
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    path = folder / "preprocessor_config.json"
    preprocess = read_json(path) if path.is_file() else {}
    for tower in (vision, text):
        if not math.isclose(tower.get("layer_norm_eps", 1e-5), 1e-5):
            raise ValueError(f"{folder}: layer_norm_eps must be 1e-5, not {tower['layer_norm_eps']}")
    activation, text_activation = (tower.get("hidden_act", "quick_gelu") for tower in (vision, text))
    if activation != text_activation or activation not in ("gelu", "quick_gelu"):
        found = f"not {activation} and {text_activation}"
        raise ValueError(f"{folder}: hidden_act must be gelu or quick_gelu in both towers, {found}")
    hints = {
        "vision.heads": vision.get("num_attention_heads", 12),
        "text.heads": text.get("num_attention_heads", 8),
        "activation": activation,
        "vision.mean": tuple(preprocess.get("image_mean", OPENAI_MEAN)),
        "vision.std": tuple(preprocess.get("image_std", OPENAI_STD)),
    }
    end_id = text.get("eos_token_id", OPENAI_VOCAB_SIZE - 1)
    return hints if end_id == 2 else {**hints, "end_id": end_id}  # old versions of transformers wrote a wrong 2


def build_clip(source: Path, weights: Weights, hints: Hints, tokenizer: Tokenizer) -> CLIP:
    """A model with exactly these weights."""
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
    for layout in (OPEN_CLIP, TRANSFORMERS):
        if layout.marker in weights:
            return layout
    if "visual.layer1.0.conv1.weight" in weights:
        raise ValueError(f"{source} is a CLIP with a ResNet; only vision transformers can be imported")
    raise WeightMismatch(source, [OPEN_CLIP.marker, TRANSFORMERS.marker], list(weights))


def infer_config(source: Path, layout: Layout, weights: Weights) -> ModelConfig:
    """The configuration of a model with weights of these shapes; the rest as OpenAI and OpenCLIP have it."""
    towers = ("vision", "text")
    needed = ["vision.patch.weight", "vision.position", "text.token.weight", "text.position"]
    needed += ["vision_projection.weight", *(f"{tower}.blocks.0.mlp.wide.weight" for tower in towers)]
    missing = [name for ours in needed for name in layout.names(ours) if name not in weights]
    if missing:
        raise WeightMismatch(source, missing)
    patch, position, token, text_position, projection, *mlps = (
        tensor.shape for tensor in layout.to_ours(weights, needed).values()
    )
    patch_size, image_size = patch[-1], math.isqrt(position[0] - 1) * patch[-1]
    widths = [width for _, width in mlps]
    layers = [count_layers(layout, weights, tower) for tower in towers]
    heads = [width // HEAD_WIDTHS.get(width, 64) or 1 for width in widths]
    mlp_widths = [0 if hidden == 4 * width else hidden for hidden, width in mlps]
    vision = VisionConfig(image_size, patch_size, widths[0], layers[0], heads[0], mlp_width=mlp_widths[0])
    text = TextConfig(token[0], text_position[0], widths[1], layers[1], heads[1], mlp_widths[1])
    return ModelConfig(vision, text, projection[0], loss="sigmoid" if "logit_bias" in weights else "softmax")


def count_layers(layout: Layout, weights: Weights, tower: str) -> int:
    prefix = re.escape(layout.names(f"{tower}.blocks.")[0])
    return len({match[1] for name in weights if (match := re.match(rf"{prefix}(\d+)\.", name))})


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
    raise FileNotFoundError(f"{path} has no tokenizer; put {files} beside it, or name one with --tokenizer FILE")
