"""Folders that products open: the ONNX encoders with the names, tokenizer and preprocessing files that each expects."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import punctuation
from typing import Any

import tokenizers
from tokenizers import Regex, normalizers

from m1clip.config import to_json
from m1clip.export import onnx
from m1clip.export.verify import Tower
from m1clip.model.clip import CLIP
from m1clip.model.interop import RESAMPLE, preprocessor_config
from m1clip.model.tokenizer import END, START, HFTokenizer, Tokenizer, find_openai_vocabulary
from m1clip.targets import IMMICH_NAMES

RCLIP_MODEL = "ViT-B-32-256-datacomp_s34b_b86k"  # the one name that rclip knows
# Steps of open_clip's cleaning of captions that a tokenizer.json can have, and which of them each cleaning takes.
CLEANING = (
    ("underscore", normalizers.Replace("_", " ")),
    ("lower", normalizers.Lowercase()),
    ("punctuation", normalizers.Replace(Regex(f"[{re.escape(punctuation)}]"), "")),
    ("space", normalizers.Replace(Regex(r"\s+"), " ")),
    ("space", normalizers.Strip()),
)
CLEANED_BY: dict[str, tuple[str, ...]] = {"none": (), "whitespace": ("space",), "lower": ("space", "lower")}
CLEANED_BY["strip_punctuation"] = ("lower", "punctuation", "space")
CLEANED_BY["canonicalize"] = ("underscore", *CLEANED_BY["strip_punctuation"])


@dataclass(frozen=True)
class OnnxEncoders:
    """The ONNX files of one precision."""

    vision: Path = Path()
    text: Path = Path()
    precision: str = "fp32"


@dataclass(frozen=True)
class Written:
    """A file to verify, by its path within the folder."""

    file: str
    tower: Tower
    precision: str


@dataclass(frozen=True)
class ProductLayout:
    """What a folder is made of; `shipped` is the precision that was asked for."""

    model: CLIP
    fp32: OnnxEncoders = OnnxEncoders()
    shipped: OnnxEncoders = OnnxEncoders()

    @property
    def tokenizer_json(self) -> dict[str, Any]:
        """Adds the special tokens and cleans the text by itself, as far as the tokenizers library can."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if not isinstance(tokenizer, HFTokenizer):
            return tokenizer.to_clip_json()
        core = tokenizers.Tokenizer.from_str(tokenizer.core.to_str())
        steps = [step for name, step in CLEANING if name in CLEANED_BY[tokenizer.settings.clean]]
        core.normalizer = normalizers.Sequence([*steps, *([core.normalizer] if core.normalizer else [])])
        return json.loads(core.to_str())

    @property
    def tokenizer_config(self) -> dict[str, Any]:
        tokenizer, length = self.model.tokenizer, self.model.config.text.context_length
        assert tokenizer is not None
        settings = tokenizer.settings
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": length}
        kind |= {"padding_side": "left" if settings.pad_left else "right"}
        pad = tokenizer.core.id_to_token(settings.pad_id)
        if isinstance(tokenizer, HFTokenizer):
            return {**kind, "pad_token": pad}
        # OpenAI pads with the end token; a tower that attends to padding needs the token that it was trained with.
        pad = END if tokenizer.is_openai and not settings.fixed_length else pad
        return {**kind, "bos_token": START, "eos_token": END, "pad_token": pad}

    @property
    def special_tokens(self) -> dict[str, str]:
        return {name: token for name, token in self.tokenizer_config.items() if name.endswith("_token")}

    @property
    def preprocessor_config(self) -> dict[str, Any]:
        """The image processor of transformers."""
        return preprocessor_config(self.model.config.vision)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_graph(
    source: Path, target: Path, input_name: str = "", output_name: str = "", int32: bool = False, width: int = 0
) -> None:
    """Copy an ONNX file, with other names of its input and output, and a larger width, if they are given."""
    target.parent.mkdir(parents=True, exist_ok=True)
    model = onnx.load_model(source)
    model = onnx.pad_output(model, width) if width else model
    onnx.save_model(onnx.rename(model, input_name, output_name, int32) if input_name else model, target)


def written_pair(vision: str, text: str, encoders: OnnxEncoders) -> list[Written]:
    return [Written(vision, "vision", encoders.precision), Written(text, "text", encoders.precision)]


def write_onnx(layout: ProductLayout, folder: Path) -> list[Written]:
    """What m1clip.load opens without torch, with transformers' files for other programs."""
    suffix = "" if layout.shipped.precision == "fp32" else f"_{layout.shipped.precision}"
    files = {"vision": f"vision_model{suffix}.onnx", "text": f"text_model{suffix}.onnx"}
    write_graph(layout.shipped.vision, folder / files["vision"])
    write_graph(layout.shipped.text, folder / files["text"])
    assert layout.model.tokenizer is not None
    (folder / "config.json").write_text(to_json(layout.model.config))
    layout.model.tokenizer.save(folder / "tokenizer.json")
    write_json(folder / "preprocessor_config.json", layout.preprocessor_config)
    return written_pair(files["vision"], files["text"], layout.shipped)


def write_rclip(layout: ProductLayout, folder: Path) -> list[Written]:
    model = folder / RCLIP_MODEL
    write_graph(layout.shipped.vision, model / "visual.onnx", "input", "output")
    write_graph(layout.shipped.text, model / "textual.onnx", "input", "output")
    (folder / "tokenizer").mkdir()
    vocabulary = find_openai_vocabulary()
    ours = layout.model.tokenizer
    if ours is None or ours.core.get_vocab() != Tokenizer.from_clip_vocabulary(vocabulary).core.get_vocab():
        raise ValueError("rclip needs OpenAI's vocabulary, and this model has another one of the same size")
    shutil.copyfile(vocabulary, folder / "tokenizer" / vocabulary.name)
    return written_pair(f"{RCLIP_MODEL}/visual.onnx", f"{RCLIP_MODEL}/textual.onnx", layout.shipped)


def write_immich(layout: ProductLayout, folder: Path) -> list[Written]:
    config = layout.model.config
    width = min(width for width in IMMICH_NAMES if width >= config.embed_dim)
    name, size = f"clip/{IMMICH_NAMES[width]}", config.vision.image_size
    model = folder / name
    write_graph(layout.shipped.vision, model / "visual" / "model.onnx", "image", "image_embeds", width=width)
    write_graph(layout.shipped.text, model / "textual" / "model.onnx", "text", "text_embeds", int32=True, width=width)
    text_cfg = {"context_length": config.text.context_length, "vocab_size": config.text.vocab_size}
    open_clip_cfg = {"embed_dim": width, "vision_cfg": {"image_size": size}, "text_cfg": text_cfg}
    write_json(model / "config.json", open_clip_cfg)
    colors = {"mean": list(config.vision.mean), "std": list(config.vision.std)}
    preprocess = {"size": [size, size], "mode": "RGB", **colors, "interpolation": config.vision.interpolation}
    write_json(
        model / "visual" / "preprocess_cfg.json",
        {**preprocess, "resize_mode": config.vision.resize_mode, "fill_color": 0},
    )
    write_json(model / "textual" / "tokenizer.json", layout.tokenizer_json)
    write_json(model / "textual" / "tokenizer_config.json", layout.tokenizer_config)
    return written_pair(f"{name}/visual/model.onnx", f"{name}/textual/model.onnx", layout.shipped)


def write_fastembed(layout: ProductLayout, folder: Path) -> list[Written]:
    assert layout.model.tokenizer is not None
    config = {"model_type": "clip", "projection_dim": layout.model.config.embed_dim}
    config["pad_token_id"] = layout.model.tokenizer.core.token_to_id(layout.tokenizer_config["pad_token"])
    for tower, source in (("vision", layout.shipped.vision), ("text", layout.shipped.text)):
        write_graph(source, folder / tower / "model.onnx")
        write_json(folder / tower / "config.json", config)
    write_json(folder / "vision" / "preprocessor_config.json", layout.preprocessor_config)
    write_tokenizer(layout, folder / "text")
    return written_pair("vision/model.onnx", "text/model.onnx", layout.shipped)


def write_tokenizer(layout: ProductLayout, folder: Path) -> None:
    write_json(folder / "tokenizer.json", layout.tokenizer_json)
    write_json(folder / "tokenizer_config.json", layout.tokenizer_config)
    write_json(folder / "special_tokens_map.json", layout.special_tokens)


def write_transformers_js(layout: ProductLayout, folder: Path) -> list[Written]:
    """Two encoders and both in one graph, in fp32 and, for browsers, as *_quantized.onnx."""
    model, written = layout.model, list[Written]()
    for encoders in {layout.fp32.precision: layout.fp32, layout.shipped.precision: layout.shipped}.values():
        suffix = "" if encoders.precision == "fp32" else "_quantized"
        names = {"vision": f"onnx/vision_model{suffix}.onnx", "text": f"onnx/text_model{suffix}.onnx"}
        write_graph(encoders.vision, folder / names["vision"])
        write_graph(encoders.text, folder / names["text"])
        graphs = (onnx.load_model(encoders.vision), onnx.load_model(encoders.text))
        joint = onnx.join(*graphs, *model.scale_and_bias)
        onnx.save_model(joint, folder / "onnx" / f"model{suffix}.onnx")
        written += written_pair(names["vision"], names["text"], encoders)
    config, size = model.config, model.config.vision.image_size
    text = {"model_type": "clip_text_model", "max_position_embeddings": config.text.context_length}
    vision = {"model_type": "clip_vision_model", "image_size": size}
    clip = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": config.embed_dim}
    write_json(folder / "config.json", {**clip, "text_config": text, "vision_config": vision})
    preprocessor = layout.preprocessor_config
    if config.vision.interpolation == "bicubic":
        # Its bicubic resize has no antialiasing, so Lanczos is nearer to everybody else's bicubic.
        preprocessor["resample"] = RESAMPLE["lanczos"]
    write_json(folder / "preprocessor_config.json", preprocessor)
    write_tokenizer(layout, folder)
    return written


ONNX_LAYOUTS: dict[str, Callable[[ProductLayout, Path], list[Written]]] = {
    "onnx": write_onnx,
    "rclip": write_rclip,
    "immich": write_immich,
    "fastembed": write_fastembed,
    "transformers-js": write_transformers_js,
}
