"""A model of m1clip as a folder that transformers or open_clip can load."""

import json
from pathlib import Path
from typing import Any

from m1clip.config import ModelConfig, TextConfig, VisionConfig
from m1clip.files import atomic_folder
from m1clip.model.clip import CLIP
from m1clip.model.import_clip import OPEN_CLIP, OPENAI_VOCAB_SIZE, TRANSFORMERS
from m1clip.model.safe_load import save_tensors
from m1clip.model.tokenizer import END, PAD, START, Tokenizer


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
        files = {
            "config.json": transformers_config(model.config, vision, text, tokenizer),
            "preprocessor_config.json": preprocessor_config(vision),
        }
    else:
        layout, weights_file = OPEN_CLIP, "open_clip_model.safetensors"
        files = {"open_clip_config.json": open_clip_config(model, vision, text, tokenizer)}
    files["tokenizer.json"] = tokenizer.to_clip_json()
    files["tokenizer_config.json"] = tokenizer_config(tokenizer, text.context_length)
    tensors = {name: tensor.clone().contiguous() for name, tensor in layout.from_ours(weights).items()}
    with atomic_folder(folder) as partial:
        save_tensors(partial / weights_file, tensors, {"format": "pt"})
        for name, values in files.items():
            (partial / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def exportable_towers(config: ModelConfig, library: str) -> tuple[VisionConfig, TextConfig]:
    """The towers of a model that the library's CLIP can represent; ValueError for any other model."""
    vision, text = config.vision, config.text
    if not isinstance(vision, VisionConfig) or not isinstance(text, TextConfig):
        raise ValueError(f"a CLIP of {library} cannot have the timm or transformers tower of this model")
    train = "to convert a model, train it with"
    for unsupported, reason in (
        (config.head != "linear", f"a {config.head} head; {train} --model.head linear"),
        (
            (vision.stem, vision.pool) != ("patch", "class"),
            f"a {vision.stem} stem and {vision.pool} pooling; {train} --preset small or --preset base",
        ),
        (
            text.encoder != "transformer",
            f"a {text.encoder} text encoder; {train} --model.text.encoder transformer",
        ),
        (
            library == "transformers" and config.loss == "sigmoid",
            f"a logit bias; convert it with --to open_clip, or {train} --model.loss softmax",
        ),
    ):
        if unsupported:
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


def transformers_config(
    config: ModelConfig, vision: VisionConfig, text: TextConfig, tokenizer: Tokenizer
) -> dict[str, Any]:
    def tower(kind: str, shape: VisionConfig | TextConfig) -> dict[str, Any]:
        return {
            "model_type": kind,
            "hidden_size": shape.width,
            "intermediate_size": shape.mlp_width or 4 * shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "hidden_act": config.activation,
            "projection_dim": config.embed_dim,
        }

    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.embed_dim,
        "vision_config": {
            **tower("clip_vision_model", vision),
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
        },
        "text_config": {
            **tower("clip_text_model", text),
            "vocab_size": text.vocab_size,
            "max_position_embeddings": text.context_length,
            "bos_token_id": tokenizer.start_id,
            "eos_token_id": tokenizer.end_id,
            "pad_token_id": tokenizer.end_id if is_openai(tokenizer) else 0,
        },
    }


def preprocessor_config(vision: VisionConfig) -> dict[str, Any]:
    """The rest is the default of CLIPImageProcessor: bicubic scaling, center crop, RGB in 0 to 1."""
    size = vision.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "crop_size": {"height": size, "width": size},
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
    }


def open_clip_config(model: CLIP, vision: VisionConfig, text: TextConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    def tower(shape: VisionConfig | TextConfig) -> dict[str, Any]:
        # open_clip multiplies and rounds down, so half a feature is added.
        ratio = {"mlp_ratio": (shape.mlp_width + 0.5) / shape.width} if shape.mlp_width else {}
        return {"width": shape.width, "layers": shape.layers, **ratio}

    vision_cfg = {
        **tower(vision),
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "head_width": vision.width // vision.heads,
    }
    text_cfg = {
        **tower(text),
        "context_length": text.context_length,
        "vocab_size": text.vocab_size,
        "heads": text.heads,
    }
    if not is_openai(tokenizer):
        text_cfg |= {"hf_tokenizer_name": "tokenizer.json", "tokenizer_kwargs": {"clean": "lower"}}
    bias = {} if model.logit_bias is None else {"init_logit_bias": model.logit_bias.item()}
    return {
        "model_cfg": {
            "embed_dim": model.config.embed_dim,
            "quick_gelu": model.config.activation == "quick_gelu",
            "vision_cfg": vision_cfg,
            "text_cfg": text_cfg,
            **bias,
        },
        "preprocess_cfg": {"mean": list(vision.mean), "std": list(vision.std)},
    }


def tokenizer_config(tokenizer: Tokenizer, context_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END if is_openai(tokenizer) else PAD,
    }
