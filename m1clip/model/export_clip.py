"""Our model as others know it: a transformers folder, or open_clip's configuration and weights."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from m1clip.config import TextConfig, VisionConfig
from m1clip.files import atomic_folder
from m1clip.model.clip import CLIP
from m1clip.model.safe_load import save_tensors
from m1clip.model.tokenizer import END, PAD, START, Tokenizer
from m1clip.model.weight_names import OPEN_CLIP, TRANSFORMERS, Layout

OPENAI_VOCAB = 49408


def convert(model: CLIP, library: str, folder: Path) -> None:
    """Make or replace the folder, all at once."""
    vision, text = towers_of(model)
    if library == "transformers" and model.logit_bias is not None:
        raise ValueError(
            "transformers' CLIP has no bias, and this model was trained with --model.loss sigmoid"
        )
    assert model.tokenizer is not None
    words, row = with_end_last(model.tokenizer)
    weights = {name: weight.detach().cpu().float() for name, weight in model.state_dict().items()}
    table_VD = weights["text.token.weight"]
    weights["text.token.weight"] = table_VD[swapped(len(table_VD), model.tokenizer.end_id, row)]
    with atomic_folder(folder) as aside:
        if library == "transformers":
            save(weights, TRANSFORMERS, aside / "model.safetensors")
            write(aside / "config.json", transformers_config(model, vision, text, words))
            write(aside / "preprocessor_config.json", preprocessor(vision))
        else:
            save(weights, OPEN_CLIP, aside / "open_clip_model.safetensors")
            write(aside / "open_clip_config.json", open_clip_config(model, vision, text, words))
        write(aside / "tokenizer.json", words.with_marks())
        write(aside / "tokenizer_config.json", tokenizer_config(words, text.context_length))


def towers_of(model: CLIP) -> tuple[VisionConfig, TextConfig]:
    vision, text = model.config.vision, model.config.text
    if not isinstance(vision, VisionConfig) or not isinstance(text, TextConfig):
        raise ValueError(
            "this model has a tower of timm or transformers, for which their CLIPs have no place; "
            "m1clip.load and its export work with it as it is"
        )
    if model.config.head != "linear":
        raise ValueError(f"this model has {model.config.head} heads, where both libraries have one matrix")
    if vision.stem != "patch" or vision.pool != "class":
        raise ValueError(
            f"this model has a {vision.stem} stem and takes the {vision.pool} of its tokens, which neither "
            "library knows; train with --model.vision.stem patch --model.vision.pool class to convert"
        )
    if text.encoder != "transformer":
        raise ValueError(
            "this model takes captions for bags of words, which neither library knows; "
            "train with --model.text.encoder transformer to convert"
        )
    return vision, text


def with_end_last(tokenizer: Tokenizer) -> tuple[Tokenizer, int]:
    """The same tokenizer, but no token's number is above the end's: there both libraries look for it."""
    state = json.loads(tokenizer.core.to_str())
    vocab: dict[str, int] = state["model"]["vocab"]
    last = max(vocab.values())
    top = next(token for token, number in vocab.items() if number == last)
    vocab[top], vocab[END] = vocab[END], last
    return Tokenizer.from_state(state), last


def swapped(rows: int, one: int, other: int) -> list[int]:
    order = list(range(rows))
    order[one], order[other] = order[other], order[one]
    return order


def save(weights: dict[str, Tensor], layout: Layout, path: Path) -> None:
    save_tensors(path, dict(layout.from_ours(weights)), {"format": "pt"})


def write(path: Path, held: dict[str, Any]) -> None:
    path.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def is_openai(words: Tokenizer) -> bool:
    return len(words) == OPENAI_VOCAB and words.end_id == OPENAI_VOCAB - 1


def transformers_config(
    model: CLIP, vision: VisionConfig, text: TextConfig, words: Tokenizer
) -> dict[str, Any]:
    shared = {"hidden_act": model.config.activation, "projection_dim": model.config.embed_dim}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": model.config.embed_dim,
        "dtype": "float32",
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": vision.width,
            "intermediate_size": vision.mlp_width or 4 * vision.width,
            "num_hidden_layers": vision.layers,
            "num_attention_heads": vision.heads,
            "image_size": vision.image_size,
            "patch_size": vision.patch_size,
            **shared,
        },
        "text_config": {
            "model_type": "clip_text_model",
            "vocab_size": text.vocab_size,
            "hidden_size": text.width,
            "intermediate_size": text.mlp_width or 4 * text.width,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.heads,
            "max_position_embeddings": text.context_length,
            "bos_token_id": words.start_id,
            "eos_token_id": words.end_id,
            "pad_token_id": words.end_id if is_openai(words) else 0,
            **shared,
        },
    }


def preprocessor(vision: VisionConfig) -> dict[str, Any]:
    side = vision.image_size
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
    }


def open_clip_config(model: CLIP, vision: VisionConfig, text: TextConfig, words: Tokenizer) -> dict[str, Any]:
    made: dict[str, Any] = {
        "embed_dim": model.config.embed_dim,
        "quick_gelu": model.config.activation == "quick_gelu",
        "vision_cfg": {
            "image_size": vision.image_size,
            "layers": vision.layers,
            "width": vision.width,
            "head_width": vision.width // vision.heads,
            "patch_size": vision.patch_size,
            **ratio(vision),
        },
        "text_cfg": {
            "context_length": text.context_length,
            "vocab_size": text.vocab_size,
            "width": text.width,
            "heads": text.heads,
            "layers": text.layers,
            **ratio(text),
        },
    }
    if not is_openai(words):  # theirs otherwise
        made["text_cfg"] |= {"hf_tokenizer_name": "tokenizer.json", "tokenizer_kwargs": {"clean": "lower"}}
    if model.logit_bias is not None:
        made["init_logit_bias"] = model.logit_bias.item()
    colors = {"mean": list(vision.mean), "std": list(vision.std)}
    return {
        "model_cfg": made,
        "preprocess_cfg": {**colors, "interpolation": "bicubic", "resize_mode": "shortest"},
    }


def ratio(tower: VisionConfig | TextConfig) -> dict[str, float]:
    """They multiply and round down: half a feature more is on the safe side."""
    return {"mlp_ratio": (tower.mlp_width + 0.5) / tower.width} if tower.mlp_width else {}


def tokenizer_config(words: Tokenizer, length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END if is_openai(words) else PAD,
        "padding_side": "right",
        "truncation_side": "right",
    }
