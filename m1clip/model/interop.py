"""Names of a CLIP's weights in open_clip and transformers, and models of m1clip in the formats of both."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m1clip.config import LibraryVisionConfig, ModelConfig, TextConfig, TimmConfig, VisionConfig
from m1clip.files import atomic_folder
from m1clip.model import safe_load
from m1clip.model.clip import CLIP
from m1clip.model.tokenizer import END, PAD, START, Tokenizer
from m1clip.targets import find_library_misfit

# The weight names of both libraries, and the keys and values of an open_clip configuration that our towers know.
TABLES = json.loads(Path(__file__).with_name("interop.json").read_text())
RESAMPLE = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers
Weights = Mapping[str, Tensor]
Files = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """How a library names and stores the weights of a CLIP."""

    marker: str  # a name that only this library's checkpoints contain
    replacements: dict[str, str]  # parts of our names and what they become, in this order
    transposed: list[str]
    towers: dict[str, str]  # prefix of the weights of a tower that is the library's own module
    ignored: str  # pattern of names without weights

    def names(self, ours: str) -> list[str]:
        """Their name of one of our weights, or of its parts along the first axis."""
        name = ours
        tower, is_library, rest = ours.partition(".net.")
        if is_library:
            return [self.towers[tower] + rest]
        for part, replacement in self.replacements.items():
            name = name.replace(part, replacement)
        return [name.replace(".qkv.", f".{part}_proj.") for part in "qkv"] if ".qkv." in name else [name]

    def from_ours(self, weights: Weights) -> dict[str, Tensor]:
        converted: dict[str, Tensor] = {}
        for ours, weight in weights.items():
            names = self.names(ours)
            parts = weight.chunk(len(names)) if len(names) > 1 else (weight.T if self.transposes(ours) else weight,)
            converted |= dict(zip(names, parts, strict=True))
        return converted

    def to_ours(self, weights: Weights, names: Iterable[str]) -> dict[str, Tensor]:
        converted = {}
        for ours in names:
            parts = [weights[name].T if self.transposes(ours) else weights[name] for name in self.names(ours)]
            converted[ours] = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
        return converted

    def transposes(self, ours: str) -> bool:
        """Whether the library stores the transpose of one of our weights."""
        return ".net." not in ours and self.names(ours)[0] in self.transposed


OPEN_CLIP, TRANSFORMERS = Layout(**TABLES["open_clip"]), Layout(**TABLES["transformers"])


def export_clip(model: CLIP, library: str, folder: Path) -> None:
    """Write or replace a folder for `transformers` or `open_clip`, atomically."""
    exportable_towers(model.config, library)
    with atomic_folder(folder) as partial:
        write_clip(model, library, partial)


def write_clip(model: CLIP, library: str, folder: Path) -> None:
    """Write the files of a CLIP of `transformers` or `open_clip` into an existing folder."""
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
    pad = END if tokenizer.is_openai else PAD
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": text.context_length}
    files["tokenizer_config.json"] = {**kind, "bos_token": START, "eos_token": END, "pad_token": pad}
    files["tokenizer.json"] = tokenizer.to_clip_json()
    tensors = {name: tensor.clone().contiguous() for name, tensor in layout.from_ours(weights).items()}
    safe_load.save_tensors(folder / weights_file, tensors, {"format": "pt"})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def exportable_towers(config: ModelConfig, library: str) -> tuple[VisionConfig, TextConfig]:
    """The towers of a model that the library's CLIP can represent; ValueError for any other model."""
    if reason := find_library_misfit(library, config):
        raise ValueError(reason)
    vision, text = config.vision, config.text
    assert isinstance(vision, VisionConfig)
    assert isinstance(text, TextConfig)
    return vision, text


def with_end_last(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer with the highest id for the end token, where both libraries look for it."""
    state = json.loads(tokenizer.core.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    last = max(vocab, key=lambda token: vocab[token])
    vocab[last], vocab[END] = vocab[END], vocab[last]
    return Tokenizer.from_state(state)


def transformers_files(config: ModelConfig, vision: VisionConfig, text: TextConfig, tokenizer: Tokenizer) -> Files:
    """config.json, and what is not the default of CLIPImageProcessor: bicubic scaling, center crop, RGB in 0 to 1."""
    projection = {"projection_dim": config.embed_dim}

    def tower(kind: str, shape: VisionConfig | TextConfig) -> dict[str, Any]:
        widths = {"hidden_size": shape.width, "intermediate_size": shape.mlp_width or 4 * shape.width}
        blocks = {"num_hidden_layers": shape.layers, "num_attention_heads": shape.heads}
        return {"model_type": kind, **widths, **blocks, "hidden_act": config.activation, **projection}

    size, pad_id = vision.image_size, tokenizer.end_id if tokenizer.is_openai else 0
    ids = {"bos_token_id": tokenizer.start_id, "eos_token_id": tokenizer.end_id, "pad_token_id": pad_id}
    tokens = {"vocab_size": text.vocab_size, "max_position_embeddings": text.context_length, **ids}
    length = {"max_length": text.context_length}  # infinity would cut captions at 20 tokens
    towers = {
        "vision_config": {**tower("clip_vision_model", vision), "image_size": size, "patch_size": vision.patch_size},
        "text_config": {**tower("clip_text_model", text), **tokens},
    }
    return {
        "config.json": {"architectures": ["CLIPModel"], "model_type": "clip", **projection, **length, **towers},
        "preprocessor_config.json": preprocessor_config(vision),
    }


def preprocessor_config(vision: VisionConfig | TimmConfig | LibraryVisionConfig) -> dict[str, Any]:
    """The image processor of transformers, with its defaults: others, such as fastembed, do only what is written."""
    settings, square = vision.preprocess, {"height": vision.image_size, "width": vision.image_size}
    is_cropped = settings.resize_mode != "squash"
    edge = {"shortest_edge": round(settings.size / settings.crop_pct)}
    return {
        "image_processor_type": "CLIPImageProcessor",
        **{f"do_{step}": True for step in ("resize", "rescale", "normalize", "convert_rgb")},
        "do_center_crop": is_cropped,
        "size": edge if is_cropped else square,
        "crop_size": square,
        "resample": RESAMPLE[settings.interpolation],
        "rescale_factor": 1 / 255,
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
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
    if not tokenizer.is_openai:
        text_cfg |= {"hf_tokenizer_name": "tokenizer.json", "tokenizer_kwargs": {"clean": "lower"}}
    settings = {"embed_dim": model.config.embed_dim, "quick_gelu": model.config.activation == "quick_gelu"}
    bias = {} if model.logit_bias is None else {"init_logit_bias": model.logit_bias.item()}
    return {
        "model_cfg": {**settings, "vision_cfg": vision_cfg, "text_cfg": text_cfg, **bias},
        "preprocess_cfg": {
            **{"mean": list(vision.mean), "std": list(vision.std)},
            **{"interpolation": vision.interpolation, "resize_mode": vision.resize_mode},
        },
    }
