"""Known CLIPs: OpenAI's, OpenCLIP's and transformers' checkpoints as models of ours.

Shapes are read from the weights; what weights cannot tell (heads, the activation) from the configuration
beside them, or else by the rule that their authors followed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.config import OPENAI_MEAN, OPENAI_STD, ModelConfig, TextConfig, VisionConfig
from m1clip.model.clip import CLIP, load
from m1clip.model.fit import WeightMismatch
from m1clip.model.safe_load import ENDINGS, download_from_hub, gathered, load_tensors, read_json
from m1clip.model.tokenizer import Tokenizer
from m1clip.model.weight_names import OPEN_CLIP, TRANSFORMERS, Layout, Translated

VOCABULARY = "bpe_simple_vocab_16e6.txt.gz"
# Features of one head, by the width of the tower, where it is not 64 (OpenCLIP's ViT-H, g and bigG).
HEAD = {1280: 80, 1408: 88, 1664: 104}
QUICK = ("openai", "quickgelu", "metaclip", "dfn")
"""In the names of files whose weights were trained with quick-GELU."""
OPENAI_VOCAB = 49408
# What an OpenCLIP configuration may say; anything else would be another function of the same weights.
SAID = {
    "vision_cfg": {"image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio", "patch_dropout"},
    "text_cfg": {"context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio", "hf_tokenizer_name"}
    | {"tokenizer_kwargs"},
    "preprocess_cfg": {"size", "mean", "std", "interpolation", "mode", "fill_color"},
}
AS_EVER = {"pool_type": ("tok", "argmax"), "resize_mode": ("shortest",), "eos_id": (2,), "pad_id": (0, 1)}


@dataclass(frozen=True)
class Hints:
    """What a configuration beside the weights says; None where it is no_progress."""

    vision_heads: int | None = None
    text_heads: int | None = None
    quick: bool | None = None
    end_id: int | None = None
    image_size: int | None = None
    mean: tuple[float, float, float] = OPENAI_MEAN
    std: tuple[float, float, float] = OPENAI_STD


def import_clip(spec: str, tokenizer: str = "", quick: bool = False) -> tuple[CLIP, str]:
    """The model that `--init` names and what had to be guessed of it, or a sentence on what is wrong with it.

    `tokenizer` is a vocabulary file for weights that come without one; `quick` asks for quick-GELU where
    nothing beside them says which activation they were trained with.
    """
    path = Path(spec).expanduser()
    if not path.exists():
        path = download_from_hub(spec)
    if path.is_dir() and not is_foreign(path):
        return load(path), ""
    weights, hints = read_folder(path) if path.is_dir() else read_file(path)
    told = ""
    if hints.quick is None:
        known = quick or any(name in path.name.lower() for name in QUICK)
        told = "" if known else "gelu, as nothing beside the weights names their activation"
        told += " (--model.activation quick_gelu if they are OpenAI's)" if told else ""
        hints = replace(hints, quick=known)
    return build(path, weights, hints, vocabulary_of(path, tokenizer)), told


def is_foreign(folder: Path) -> bool:
    """Whether a folder is another library's."""
    if (folder / "open_clip_config.json").is_file():
        return True
    with_type = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return "model_type" in with_type or "architectures" in with_type


def read_file(path: Path) -> tuple[dict[str, Tensor], Hints]:
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} is no checkpoint: {', '.join(ENDINGS)} are read")
    weights = load_tensors(path)
    beside = path.parent / "open_clip_config.json"
    hints = open_clip_hints(read_json(beside)) if beside.is_file() else Hints()
    if "input_resolution" in weights:  # OpenAI's own archives have it
        hints = replace(hints, quick=True)
    return weights, hints


def read_folder(folder: Path) -> tuple[dict[str, Tensor], Hints]:
    beside = folder / "open_clip_config.json"
    if beside.is_file():
        hints = open_clip_hints(read_json(beside))
        first = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")
        return gathered(folder, [f"{name}{ending}" for name in first for ending in ENDINGS]), hints
    config = read_json(folder / "config.json")
    if config.get("model_type") != "clip":
        raise ValueError(
            f"{folder} is a {config.get('model_type')} model; --init takes a CLIP (model_type clip)"
        )
    return gathered(folder, ["model.safetensors", "pytorch_model.bin"]), transformers_hints(folder, config)


def open_clip_hints(held: dict[str, Any]) -> Hints:
    model, prepare = held.get("model_cfg", held), held.get("preprocess_cfg", {})
    vision, text = model.get("vision_cfg", {}), model.get("text_cfg", {})
    if "timm_model_name" in vision or "hf_model_name" in text:
        raise ValueError("this OpenCLIP model has towers of timm or transformers; --init takes its ViTs only")
    for part, held_there in (("vision_cfg", vision), ("text_cfg", text), ("preprocess_cfg", prepare)):
        for key, value in held_there.items():
            usual = key in SAID[part] or value in (None, False, 0, "", {}) or value in AS_EVER.get(key, ())
            if not usual:
                raise ValueError(
                    f"this OpenCLIP model has {part} {key} = {value!r}, which --init does not know"
                )
    width, one = vision.get("width", 768), vision.get("head_width", 64)
    return Hints(
        width // one,
        text.get("heads", 8),
        bool(model.get("quick_gelu", False)),
        None,
        None,
        tuple(prepare.get("mean", OPENAI_MEAN)),
        tuple(prepare.get("std", OPENAI_STD)),
    )


def transformers_hints(folder: Path, config: dict[str, Any]) -> Hints:
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    prepare = folder / "preprocessor_config.json"
    colors = read_json(prepare) if prepare.is_file() else {}
    acts = {part.get("hidden_act", "quick_gelu") for part in (vision, text)}
    if len(acts) > 1 or acts - {"quick_gelu", "gelu"}:
        raise ValueError(
            f"{folder}: both towers should use gelu or quick_gelu, not {' and '.join(sorted(acts))}"
        )
    for part in (vision, text):
        if not math.isclose(part.get("layer_norm_eps", 1e-5), 1e-5):
            raise ValueError(f"{folder}: layer_norm_eps is {part['layer_norm_eps']}, CLIP's is 1e-5")
    return Hints(
        vision.get("num_attention_heads", 12),
        text.get("num_attention_heads", 8),
        acts == {"quick_gelu"},
        text.get("eos_token_id", 49407),
        vision.get("image_size", 224),
        tuple(colors.get("image_mean", OPENAI_MEAN)),
        tuple(colors.get("image_std", OPENAI_STD)),
    )


def build(where: Path, weights: Mapping[str, Tensor], hints: Hints, tokenizer: Tokenizer) -> CLIP:
    """A model of exactly these weights."""
    rows = next((len(weights[name]) for name in weights if name.endswith("token_embedding.weight")), None)
    if OPENAI_VOCAB in (rows, len(tokenizer)) and rows not in (None, len(tokenizer)):
        raise ValueError(
            f"{where} has a table of {rows:,} tokens, the tokenizer found for it {len(tokenizer):,}; put its "
            "own tokenizer.json beside it, or name it with --tokenizer"
        )
    layout = layout_of(where, weights)
    made = layout.to_ours(without_wrapper(weights))
    config = shape_of(where, layout, made, hints)
    with torch.device("meta"):
        model = CLIP(config, tokenizer)
    want = model.state_dict()
    missing = [name for ours in want.keys() - made.tensors.keys() for name in layout.theirs_of(ours)]
    misshapen = [
        ("/".join(layout.theirs_of(ours)), tuple(made.tensors[ours].shape), tuple(want[ours].shape))
        for ours in want.keys() & made.tensors.keys()
        if made.tensors[ours].shape != want[ours].shape
    ]
    beyond = [name for ours in made.tensors.keys() - want.keys() for name in layout.theirs_of(ours)]
    missing, beyond = list({*missing, *made.missing}), [*beyond, *made.unexpected]
    if missing or beyond or misshapen or made.misshapen:
        raise WeightMismatch(where, missing, beyond, [*misshapen, *made.misshapen])
    model.load_state_dict({name: made.tensors[name].contiguous() for name in want}, assign=True)
    end_id = hints.end_id if hints.end_id not in (None, 2) else None  # 2 was a mistake that transformers made
    if end_id is not None and end_id != tokenizer.end_id:
        raise ValueError(
            f"{where}: its config ends captions with token {end_id}, its tokenizer with {tokenizer.end_id}"
        )
    return model.eval()


def layout_of(where: Path, weights: Mapping[str, Tensor]) -> Layout:
    for layout in (OPEN_CLIP, TRANSFORMERS):
        if layout.mark in weights:
            return layout
    if "visual.layer1.0.conv1.weight" in weights:
        raise ValueError(f"{where} is a CLIP with a ResNet; those with a ViT are taken")
    found = ", ".join(list(weights)[:3])
    raise (
        WeightMismatch(where, [OPEN_CLIP.mark, TRANSFORMERS.mark], list(weights))
        if found
        else ValueError(f"{where} holds no weights")
    )


def without_wrapper(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """OpenCLIP's models with a text tower of their own class have one prefix more."""
    if "text.token_embedding.weight" not in weights:
        return weights
    return {name.removeprefix("text."): tensor for name, tensor in weights.items()}


def shape_of(where: Path, layout: Layout, made: Translated, hints: Hints) -> ModelConfig:
    """The configuration that these weights have, as far as they go together."""
    held = made.tensors
    needed = ["vision.patch.weight", "vision.position", "text.token.weight", "text.position"]
    needed += ("vision_projection.weight", "vision.blocks.0.mlp.wide.weight", "text.blocks.0.mlp.wide.weight")
    if lost := [name for ours in needed if ours not in held for name in layout.theirs_of(ours)]:
        raise WeightMismatch(where, [*lost, *made.missing], made.unexpected, made.misshapen)
    width, _, patch, _ = held["vision.patch.weight"].shape
    grid = math.isqrt(len(held["vision.position"]) - 1)
    vocab, text_width = held["text.token.weight"].shape
    inside = {tower: len(held[f"{tower}.blocks.0.mlp.wide.weight"]) for tower in ("vision", "text")}
    widths = {"vision": width, "text": text_width}
    depth = {
        tower: 1 + max(int(name.split(".")[2]) for name in held if name.startswith(f"{tower}.blocks."))
        for tower in ("vision", "text")
    }
    mlp = {tower: 0 if inside[tower] == 4 * widths[tower] else inside[tower] for tower in inside}
    return ModelConfig(
        VisionConfig(
            grid * patch,
            patch,
            width,
            depth["vision"],
            hints.vision_heads or width // HEAD.get(width, 64) or 1,
            mean=hints.mean,
            std=hints.std,
            mlp_width=mlp["vision"],
        ),
        TextConfig(
            vocab,
            len(held["text.position"]),
            text_width,
            depth["text"],
            hints.text_heads or text_width // 64 or 1,
            mlp["text"],
        ),
        len(held["vision_projection.weight"]),
        "quick_gelu" if hints.quick else "gelu",
        "sigmoid" if "logit_bias" in held else "softmax",
    )


def vocabulary_of(path: Path, tokenizer: str) -> Tokenizer:
    """As asked for, or from beside the weights, or OpenAI's own wherever this machine has it."""
    if tokenizer not in ("", "bpe", "char"):
        return Tokenizer.clip(Path(tokenizer))
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.borrowed(folder / "tokenizer.json")
    installed = find_spec("open_clip")
    places = (
        [Path(place) / VOCABULARY for place in (installed.submodule_search_locations or [])]
        if installed
        else []
    )
    for place in (folder / "merges.txt", folder / VOCABULARY, *places):
        if place.is_file():
            return Tokenizer.clip(place)
    raise FileNotFoundError(
        f"{path} comes without a tokenizer; put tokenizer.json, merges.txt or {VOCABULARY} beside it, "
        "or name one with --tokenizer FILE"
    )
