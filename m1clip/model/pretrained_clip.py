"""CLIPs of OpenAI, open_clip and transformers as models of m1clip.

Our own towers are used where they compute the same; otherwise the library's module is the tower. Sizes of our own
towers are read from the weights. What weights do not show (attention heads, activation, preprocessing) comes from
the configuration beside them or from open_clip's, or else follows OpenAI's and OpenCLIP's conventions.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch

from m1clip import hub
from m1clip.config import (
    OPENAI_MEAN,
    OPENAI_STD,
    LibraryTextConfig,
    LibraryVisionConfig,
    ModelConfig,
    TextConfig,
    VisionConfig,
    check_config,
    override,
    require,
)
from m1clip.errors import short_error, untrusted_input
from m1clip.files import read_json
from m1clip.format import did_you_mean
from m1clip.model import library, safe_load
from m1clip.model.clip import CLIP, load
from m1clip.model.interop import OPEN_CLIP, TABLES, TRANSFORMERS, Layout, Weights
from m1clip.model.pretrained import BUILD_ERRORS, POSITION_OFFSET, clean_hf_config, parse_hf_config, require_extra
from m1clip.model.safe_load import WEIGHT_SUFFIXES, WeightMismatch, check_module_size, load_folder_tensors, on_meta
from m1clip.model.tokenizer import Tokenizer, find_clip_tokenizer
from m1clip.run import Run
from m1clip.targets import OPENAI_VOCAB_SIZE

# Width of an attention head by the width of the vision tower, where it is not 64 (ViT-H, g and bigG).
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}
QUICK_GELU_NAMES = ("openai", "quickgelu", "metaclip", "dfn")  # in names of checkpoints trained with quick_gelu
OPEN_CLIP_STEMS = ("open_clip_model", "open_clip_pytorch_model", "model", "pytorch_model")  # of weight files
PREPROCESS_KEYS = ("mean", "std", "interpolation", "resize_mode")
INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, in transformers' configs
TEXT_NAMES = r"(transformer|token_embedding|positional_embedding|ln_final|text_projection|cls_emb)\b"
# What a checkpoint of open_clip is, by the name of one of its weights.
FAMILIES = {
    r"^text_decoder\.": "CoCa",
    r"^visual\.layer1\.0\.": "CLIP with a ResNet",
    r"^visual\.trunk\.attn_pool\.latent": "SigLIP",
    r"^visual\.trunk\..*(fc1_g|attn\.q_proj)": "CLIP with an EVA-02 vision tower",
    r"^visual\.trunk\..*(token_mixer|conv_kxk)|^image_encoder\.model\.": "MobileCLIP",
    r"^visual\.trunk\..*conv_dw": "CLIP with a ConvNeXt",
    r"^visual\.trunk\.": "CLIP with a vision tower of timm",
    r"^text\.transformer\.(embeddings|encoder|block|embed_tokens|layers)\.": "CLIP with a text tower of transformers",
}
Settings = Mapping[str, Any]


class LibraryTowers(NamedTuple):
    """The towers of a model that are modules of another library; None where ours are used."""

    vision: LibraryVisionConfig | None = None
    text: LibraryTextConfig | None = None


NATIVE = LibraryTowers()


def import_clip(spec: str, tokenizer: str = "", quick_gelu: bool = False, model_name: str = "") -> tuple[CLIP, str]:
    """The model that `--init` names, and a note on what had to be assumed.

    For weights that come without them: `tokenizer` is a vocabulary file or a folder with a tokenizer, `quick_gelu`
    is the activation, `model_name` is the architecture in open_clip.
    """
    path, config = find_checkpoint(spec, model_name)
    if path.is_dir() and config is None:
        with untrusted_input(f"{path} cannot be imported", path):
            return (import_transformers(path, tokenizer) if is_transformers(path) else load(path)), ""
    weights, note = read_weights(path), ""
    if config is None:
        config, note = infer_open_clip(spec, path, weights, quick_gelu)
    with untrusted_input(f"{path} cannot be imported", path):
        return build_open_clip(path, weights, config, tokenizer), note


def find_checkpoint(spec: str, model_name: str) -> tuple[Path, Settings | None]:
    """The weights or folder that a spec names, and the configuration of open_clip that belongs to it."""
    if spec.startswith("open_clip:"):
        return find_open_clip(spec.removeprefix("open_clip:"))
    path = Path(spec.removeprefix("hf:")).expanduser()
    path = path if path.exists() else safe_load.download_from_hub(spec)
    if path.is_dir() and "vision" in Run(path).read_or_empty("config.json"):  # a model of ours
        return path, None
    return path, named_config(model_name) if model_name else config_beside(path)


def is_transformers(folder: Path) -> bool:
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    return "model_type" in config or "architectures" in config


# open_clip: its configurations have a model_cfg and a preprocess_cfg.
def find_open_clip(spec: str) -> tuple[Path, Settings]:
    """The downloaded weights and the configuration of NAME/TAG."""
    name, _, tag = spec.partition("/")
    model_cfg = named_config(name)["model_cfg"]
    import open_clip

    tags, pretrained = open_clip_tags(name), open_clip.get_pretrained_cfg(name, tag)
    if not pretrained:
        weights = f"{name} has {', '.join(tags)}" if tags else f"{name} has none; use --init FILE --model-name {name}"
        raise ValueError(f"open_clip:{name}/TAG needs the tag of the model's weights, not {tag!r}: {weights}")
    with hub.downloading(f"the weights open_clip:{spec}"):
        path = Path(open_clip.download_pretrained(pretrained))
    # The weights know the activation they were trained with; open_clip has both under one name, such as ViT-B-32.
    quick_gelu = model_cfg.get("quick_gelu") or pretrained.get("quick_gelu")
    return path, {"model_cfg": {**model_cfg, "quick_gelu": quick_gelu}, "preprocess_cfg": pretrained}


def open_clip_tags(name: str) -> list[str]:
    """The weights of an architecture."""
    import open_clip

    return list(open_clip.list_pretrained_tags_by_model(name))


def named_config(name: str) -> Settings:
    """open_clip's configuration of an architecture, with the preprocessing that all of its weights share."""
    require_extra("open_clip", "openclip", f"the architecture {name}")
    import open_clip

    model_cfg = open_clip.get_model_config(name)
    if model_cfg is None:
        raise ValueError(f"open_clip has no {name!r}; {did_you_mean(name, open_clip.list_models())}")
    pretrained = [open_clip.get_pretrained_cfg(name, tag) for tag in open_clip_tags(name)]
    first = {key: pretrained[0][key] for key in PREPROCESS_KEYS} if pretrained else {}
    is_shared = all(first.items() <= one.items() for one in pretrained)
    return {"model_cfg": model_cfg, "preprocess_cfg": first if is_shared else {}}


def config_beside(path: Path) -> Settings | None:
    file = (path if path.is_dir() else path.parent) / "open_clip_config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    return config if "model_cfg" in config else {"model_cfg": config}


def read_weights(path: Path) -> Weights:
    if path.is_dir():
        return load_folder_tensors(path, [f"{stem}{suffix}" for stem in OPEN_CLIP_STEMS for suffix in WEIGHT_SUFFIXES])
    if path.suffix not in WEIGHT_SUFFIXES:
        raise ValueError(f"{path} is not a checkpoint; expected a {', '.join(WEIGHT_SUFFIXES)} file")
    return safe_load.load_tensors(path)


def infer_open_clip(spec: str, path: Path, weights: Weights, quick_gelu: bool) -> tuple[Settings, str]:
    """The configuration of weights that come without one, and a note on what was assumed."""
    family = find_family(weights)
    if family:
        name = recognize(path, weights, family)
        return named_config(name), f"its weights have the shapes of {name}"
    if not any(layout.marker in weights for layout in (OPEN_CLIP, TRANSFORMERS)):
        raise ValueError(f"{path} is not a CLIP of OpenAI, open_clip or transformers")
    is_quick = quick_gelu or any(name in path.name.lower() for name in QUICK_GELU_NAMES)
    is_quick = is_quick or "input_resolution" in weights  # only OpenAI's own archives have it
    advice = f"first run: m1clip export {shlex.quote(spec)} --to m1clip --quick-gelu"
    note = f"no configuration names the activation, so it is gelu; if it was quick_gelu, {advice}"
    return {"model_cfg": {"quick_gelu": is_quick}}, "" if is_quick else note


def find_family(names: Iterable[str]) -> str:
    """What the weights belong to, if it is more than a vision transformer with CLIP's text tower."""
    all_names = "\n".join(names)
    return next((family for pattern, family in FAMILIES.items() if re.search(pattern, all_names, re.M)), "")


def recognize(path: Path, weights: Weights, family: str) -> str:
    """The architecture of open_clip whose weights have these names and shapes."""
    require_extra("open_clip", "openclip", f"{path} is a {family}, which")
    import open_clip

    shapes = {name: tensor.shape for name, tensor in custom_text_names(weights).items()}
    found = [name for name in open_clip.list_models() if has_shapes(open_clip.get_model_config(name), shapes)]
    if len(found) == 1:
        return found[0]
    names = f"it may be {' or '.join(found)}" if found else "`m1clip models` lists the names"
    raise ValueError(f"{path} is a {family}; --model-name has to say which architecture it is ({names})")


def has_shapes(model_cfg: Settings, shapes: Mapping[str, torch.Size]) -> bool:
    import open_clip

    vision, text = model_cfg["vision_cfg"], model_cfg["text_cfg"]
    table = (text.get("vocab_size", OPENAI_VOCAB_SIZE), text.get("width", 512))
    is_timm = any(name.startswith("visual.trunk.") for name in shapes)
    # Most are excluded without building them.
    if "hf_model_name" in text or is_timm != ("timm_model_name" in vision):
        return False
    if shapes.get("text.token_embedding.weight") != table or model_cfg["embed_dim"] not in shapes.get(
        "text.text_projection", shapes.get("text.text_projection.weight", ())
    ):
        return False
    with on_meta():
        theirs = open_clip.CustomTextCLIP(model_cfg["embed_dim"], vision, text).state_dict()
    return all(shapes.get(name) == tensor.shape for name, tensor in theirs.items())


def custom_text_names(weights: Weights) -> Weights:
    """The names of open_clip's CustomTextCLIP, in which text. is the prefix of the text tower."""
    return {re.sub(rf"^{TEXT_NAMES}", r"text.\1", name): tensor for name, tensor in weights.items()}


def build_open_clip(path: Path, weights: Weights, config: Settings, tokenizer: str) -> CLIP:
    model_cfg, text_cfg = config["model_cfg"], config["model_cfg"].get("text_cfg", {})
    is_ours = is_native(text_cfg) and is_native(model_cfg.get("vision_cfg", {}))
    require(is_ours or "embed_dim" in model_cfg, f"the open_clip configuration of {path} has no embed_dim")
    if is_native(text_cfg):
        chosen = find_clip_tokenizer(path, tokenizer)
    else:
        chosen = library.open_clip_tokenizer(path, tokenizer, text_cfg)
    towers = LibraryTowers(open_clip_vision(config), open_clip_text(path, config, chosen))
    if towers.vision and "image_encoder.model." in "".join(weights):  # as Apple distributes MobileCLIP
        from open_clip.convert import convert_state_dict

        weights = convert_state_dict(SimpleNamespace(visual=library.build_net(towers.vision, "vision")), dict(weights))
    weights = custom_text_names(weights) if towers.text else weights
    return build_clip(path, weights, open_clip_hints(config), chosen, towers)


def open_clip_vision(config: Settings) -> LibraryVisionConfig | None:
    model_cfg, vision_cfg = config["model_cfg"], config["model_cfg"].get("vision_cfg", {})
    if is_native(vision_cfg):
        return None
    size = vision_cfg.get("image_size", 224)
    size = size if isinstance(size, int) else size[0]
    settings = {key: model_cfg.get(key) for key in ("embed_dim", "vision_cfg", "quick_gelu")}
    preprocess = preprocess_settings(config.get("preprocess_cfg", {}))
    return LibraryVisionConfig("open_clip", settings, size, model_cfg["embed_dim"], **preprocess)


def open_clip_text(path: Path, config: Settings, tokenizer: Tokenizer) -> LibraryTextConfig | None:
    model_cfg, text_cfg = config["model_cfg"], config["model_cfg"].get("text_cfg", {})
    if is_native(text_cfg):
        return None
    settings = {key: model_cfg.get(key) for key in ("embed_dim", "text_cfg", "quick_gelu")}
    vocab_size = text_cfg.get("vocab_size", OPENAI_VOCAB_SIZE)
    if hf_name := text_cfg.get("hf_model_name"):
        settings["hf_config"] = library.find_hf_config(path, hf_name)
        vocab_size = settings["hf_config"].get("vocab_size", vocab_size)
    length, dim = text_cfg.get("context_length", 77), model_cfg["embed_dim"]
    return LibraryTextConfig("open_clip", settings, vocab_size, length, dim, tokenizer.settings)


def is_native(tower_cfg: Settings) -> bool:
    """Whether our own tower computes what a vision_cfg or text_cfg describes."""
    keys, values = TABLES["open_clip_keys"], TABLES["open_clip_values"]

    def is_known(key: str, value: Any) -> bool:
        is_size = key in keys and not isinstance(value, list)  # a ResNet has a list of layers
        return is_size or value in (None, False, 0, "", {}) or value in values.get(key, ())

    return all(is_known(key, value) for key, value in tower_cfg.items())


def open_clip_hints(config: Settings) -> dict[str, Any]:
    """Settings of our own towers that the weights do not show."""
    model_cfg = config["model_cfg"]
    vision, text = model_cfg.get("vision_cfg", {}), model_cfg.get("text_cfg", {})
    hints = {f"vision.{key}": value for key, value in preprocess_settings(config.get("preprocess_cfg", {})).items()}
    if vision and is_native(vision):
        hints["vision.heads"] = vision.get("width", 768) // vision.get("head_width", 64)
    if text and is_native(text):
        hints["text.heads"] = text.get("heads", 8)
    return {**hints, "activation": "quick_gelu" if model_cfg.get("quick_gelu") else "gelu"}


def preprocess_settings(preprocess: Settings) -> dict[str, Any]:
    given = {key: preprocess[key] for key in PREPROCESS_KEYS if preprocess.get(key)}
    return given | {key: tuple(given[key]) for key in ("mean", "std") if key in given}


# transformers
def import_transformers(folder: Path, tokenizer: str) -> CLIP:
    config = clean_hf_config(read_json(folder / "config.json"))
    require_dual_encoder(folder, config)
    processor = read_image_processor(folder)
    is_known = bool(processor) or config["model_type"] == "clip"  # whose own preprocessing is the default
    require(is_known, f"{folder} has no preprocessor_config.json, which says how images are resized and normalized")
    preprocess = transformers_preprocess(processor)
    if config["model_type"] == "clip" and (hints := transformers_hints(config)):
        weights = load_folder_tensors(folder, ["model.safetensors", "pytorch_model.bin"])
        hints |= {f"vision.{key}": value for key, value in preprocess.items()}
        return build_clip(folder, weights, hints, find_clip_tokenizer(folder, tokenizer))
    parsed = parse_hf_config(config)
    vision, text = parsed.vision_config, parsed.text_config
    width, is_naflex = getattr(parsed, "projection_dim", None) or text.hidden_size, config["model_type"] == "siglip2"
    size = math.isqrt(vision.num_patches) * vision.patch_size if is_naflex else vision.image_size
    preprocess |= {"resize_mode": "squash"} if is_naflex else {}
    chosen, limit = library.transformers_tokenizer(folder, tokenizer, config)
    length = min(limit, text.max_position_embeddings - POSITION_OFFSET.get(text.model_type, 0))
    towers = LibraryTowers(
        LibraryVisionConfig("transformers", config, size, width, **preprocess),
        LibraryTextConfig("transformers", config, text.vocab_size, length, width, chosen.settings),
    )
    return build_clip(folder, transformers_weights(folder, parsed), {}, chosen, towers)


def read_image_processor(folder: Path) -> Settings:
    """preprocessor_config.json, or since transformers 5 a part of processor_config.json."""
    for name, part in (("preprocessor_config.json", ""), ("processor_config.json", "image_processor")):
        if (folder / name).is_file():
            config = read_json(folder / name)
            if not part or isinstance(config.get(part), dict):
                return config[part] if part else config
    return {}


def require_dual_encoder(folder: Path, config: Settings) -> None:
    """Refuse by its name what is not a CLIP, or needs code of its own."""
    kind = config.get("model_type")
    if kind == "clip":  # our own towers may do, without transformers
        return
    require_extra("transformers", "hf", f"{folder} is a {kind} model, which")
    from transformers import CONFIG_MAPPING, MODEL_MAPPING, __version__

    if kind not in CONFIG_MAPPING:
        reason = f"which transformers {__version__} does not have; code that comes with a model is never run"
        raise ValueError(f"{folder} is a {kind} model, {reason}")
    model, towers = MODEL_MAPPING.get(CONFIG_MAPPING[kind], None), config.keys() & {"vision_config", "text_config"}
    if not (hasattr(model, "get_image_features") and hasattr(model, "get_text_features") and len(towers) == 2):
        raise ValueError(f"{folder} is a {kind} model, not a dual encoder of images and text such as clip or siglip")


def transformers_hints(config: Settings) -> dict[str, Any]:
    """Settings of our own towers that the weights do not show; empty if they cannot compute this CLIP."""
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    activations = {tower.get("hidden_act", "quick_gelu") for tower in (vision, text)}
    epsilons = [tower.get("layer_norm_eps", 1e-5) for tower in (vision, text)]
    if activations not in ({"gelu"}, {"quick_gelu"}) or not all(math.isclose(eps, 1e-5) for eps in epsilons):
        return {}
    hints = {
        "vision.heads": vision.get("num_attention_heads", 12),
        "text.heads": text.get("num_attention_heads", 8),
        "activation": activations.pop(),
    }
    end_id = text.get("eos_token_id", OPENAI_VOCAB_SIZE - 1)
    if end_id != 2:  # which old versions of transformers wrote for every model
        hints["end_id"] = end_id
    return hints


def transformers_preprocess(config: Settings) -> dict[str, Any]:
    """The settings of a preprocessor_config.json."""
    size, crop, is_cropped = config.get("size"), config.get("crop_size"), config.get("do_center_crop", True)
    edge = size.get("shortest_edge") if isinstance(size, dict) else size if is_cropped else None
    crop = crop.get("height") if isinstance(crop, dict) else crop
    interpolation = INTERPOLATIONS.get(config.get("resample", 3), "bicubic")
    settings: dict[str, Any] = {"interpolation": interpolation, "crop_offset": "floor"}
    if size and not edge:
        settings["resize_mode"] = "squash"
    elif edge and crop and is_cropped:
        settings["crop_pct"] = min(1.0, crop / edge)
    mean, std = config.get("image_mean") or OPENAI_MEAN, config.get("image_std") or OPENAI_STD
    if config.get("rescale_offset"):  # pixels from -1 to 1
        mean = std = (0.5,) * 3
    elif not config.get("do_normalize", True):
        mean, std = (0.0,) * 3, (1.0,) * 3
    return {**settings, "mean": tuple(mean), "std": tuple(std)}


def transformers_weights(folder: Path, config: Any) -> Weights:
    """As transformers loads them: it knows the names that older versions used."""
    from transformers import MODEL_MAPPING, logging

    logging.disable_progress_bar()
    require(not (folder / "adapter_config.json").is_file(), f"{folder} is an adapter, not a whole model")
    tensors = load_folder_tensors(folder, ["model.safetensors", "pytorch_model.bin"])
    options = {"config": config, "state_dict": tensors, "dtype": torch.float32, "output_loading_info": True}
    kind = MODEL_MAPPING[type(config)]
    try:
        check_module_size(str(folder), partial(kind, config))
        model, info = kind.from_pretrained(None, **options)
    except BUILD_ERRORS as error:
        raise ValueError(f"the weights of {folder} cannot be loaded: {short_error(error)}") from None
    if info["missing_keys"] or info["mismatched_keys"]:
        raise WeightMismatch(folder, missing=info["missing_keys"], misshapen=map(str, info["mismatched_keys"]))
    weights: dict[str, Any] = model.state_dict()
    if "temperature" in weights:
        weights["logit_scale"] = -weights.pop("temperature").log()
    return weights


# The model.
def build_clip(
    source: Path, weights: Weights, hints: Settings, tokenizer: Tokenizer, towers: LibraryTowers = NATIVE
) -> CLIP:
    from_transformers = any(tower and tower.library == "transformers" for tower in towers)
    layout = TRANSFORMERS if from_transformers or TRANSFORMERS.marker in weights else OPEN_CLIP
    if towers.text is None and "text.token_embedding.weight" in weights:  # open_clip's CustomTextCLIP
        weights = {re.sub(rf"^text\.{TEXT_NAMES}", r"\1", name): tensor for name, tensor in weights.items()}
    weights = {name: tensor for name, tensor in weights.items() if not re.search(layout.ignored, name)}
    weights |= {name: weights[name].reshape(()) for name in ("logit_scale", "logit_bias") if name in weights}
    library_towers = [name for name, tower in towers._asdict().items() if tower]
    known = {key: hints[key] for key in hints if key.split(".")[0] not in (*library_towers, "end_id")}
    config = check_config(override(infer_config(source, layout, weights, towers), known))
    if towers.text is None:
        check_vocabulary(source, config.text.vocab_size, tokenizer, hints.get("end_id"))
    with on_meta() if config.is_native else nullcontext():
        model = CLIP(config, tokenizer)
    ours = model.state_dict()
    heads = {name: ours.pop(name) for name in (f"{tower}_projection.weight" for tower in library_towers)}
    safe_load.check_weights(source, weights, layout.from_ours(ours))
    model.load_state_dict({**layout.to_ours(weights, ours), **heads}, assign=True)
    if library_towers:
        check_embeddings(source, model)
    return model.eval()


@torch.no_grad()
def check_embeddings(source: Path, model: CLIP) -> None:
    """Refuse modules of other libraries that do not give one embedding of the expected size."""
    size = model.config.vision.image_size
    try:
        model.embed_images(torch.zeros(1, 3, size, size))
        model.embed_tokens(model.tokenize("a"))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"{source} gives no embedding of an image or caption: {short_error(error)}") from None


def check_vocabulary(source: Path, vocab_size: int, tokenizer: Tokenizer, end_id: int | None) -> None:
    """Refuse a tokenizer that is not that of the weights."""
    sizes = {vocab_size, len(tokenizer)}
    if OPENAI_VOCAB_SIZE in sizes and len(sizes) > 1:
        raise ValueError(
            f"{source} has embeddings of {vocab_size:,} tokens, but the tokenizer has {len(tokenizer):,}; "
            "put its own tokenizer.json beside it, or name it with --tokenizer"
        )
    if end_id not in (None, tokenizer.end_id):
        raise ValueError(f"{source}: its config has end token {end_id}, its tokenizer {tokenizer.end_id}")


def infer_config(source: Path, layout: Layout, weights: Weights, towers: LibraryTowers = NATIVE) -> ModelConfig:
    """The configuration of a model with weights of these shapes; the rest as OpenAI and OpenCLIP have it."""
    needed = [] if towers.vision else ["vision.patch.weight", "vision.position", "vision_projection.weight"]
    needed += [] if towers.text else ["text.token.weight", "text.position", "text_projection.weight"]
    needed += [f"{name}.blocks.0.mlp.wide.weight" for name, tower in towers._asdict().items() if not tower]
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

    def native_vision() -> VisionConfig:
        patch_size = shapes["vision.patch.weight"][-1]
        image_size = math.isqrt(shapes["vision.position"][0] - 1) * patch_size
        return VisionConfig(image_size, patch_size, **blocks("vision", HEAD_WIDTHS))

    def native_text() -> TextConfig:
        return TextConfig(shapes["text.token.weight"][0], shapes["text.position"][0], **blocks("text", {}))

    vision, text = towers.vision or native_vision(), towers.text or native_text()
    dims = [shapes[name][0] for name in ("vision_projection.weight", "text_projection.weight") if name in shapes]
    loss: Literal["softmax", "sigmoid"] = "sigmoid" if "logit_bias" in weights else "softmax"
    return ModelConfig(vision, text, dims[0] if dims else vision.width, loss=loss)
