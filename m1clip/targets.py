"""What a model can be exported to, and what each product requires of a model. No torch."""

from collections.abc import Sequence

from m1clip.config import OPENAI_MEAN, OPENAI_STD, ModelConfig, Target, TextConfig, VisionConfig

# What is written, and how it is opened; {} is the folder.
TARGETS: dict[Target, tuple[str, str]] = {
    "onnx": ("two ONNX encoders for onnxruntime", 'm1clip.load("{}")  # without torch'),
    "coreml": ("Core ML packages for macOS and iOS", "docs/export.md has the Swift code"),
    "rclip": ("the data folder of rclip", "RCLIP_DATADIR={} rclip -t 3 'a red car'"),
    "immich": ("the model cache of immich's machine learning", "copy {}/clip into immich's model-cache volume"),
    "fastembed": (
        "a folder for each encoder",
        'TextEmbedding("Qdrant/clip-ViT-B-32-text", specific_model_path="{}/text")',
    ),
    "transformers-js": (
        "ONNX and configuration for browsers and Node",
        'pipeline("zero-shot-image-classification", "{}")',
    ),
    "sentence-transformers": ("a SentenceTransformer of images and texts", 'SentenceTransformer("{}")'),
    "infinity": ("a folder for infinity's torch engine", "infinity_emb v2 --model-id {} --engine torch"),
    "transformers": ("a CLIPModel", 'CLIPModel.from_pretrained("{}")'),
    "open_clip": (
        "a model of open_clip, also for CLIP_benchmark",
        'open_clip.create_model_and_transforms("local-dir:{}")',
    ),
    "queryable": ("Core ML packages for the iOS app Queryable", "add the packages to its Xcode project"),
    "m1clip": ("an m1clip model", 'm1clip.load("{}")'),
}
TRANSFORMERS_FOLDERS = ("transformers", "infinity", "sentence-transformers")
OPENAI_VOCAB_SIZE = 49408
# immich refuses names that it does not know, so a model takes the name of a known one: that with the next larger
# embedding, which is filled with zeros.
IMMICH_NAMES = {
    512: "ViT-B-32__openai",
    640: "ViT-B-16-plus-240__laion400m_e31",
    768: "ViT-L-14__openai",
    1024: "ViT-H-14__laion2b-s32b-b79k",
    1152: "ViT-SO400M-16-SigLIP2-384__webli",
    1536: "ViT-gopt-16-SigLIP2-384__webli",
}
SHAPES: dict[str, dict[str, int]] = {
    "rclip": {"image_size": 256, "context_length": 77, "embed_dim": 512},
    "queryable": {"image_size": 256, "context_length": 77, "embed_dim": 512},
}
FLAGS = {
    "image_size": "--model.vision.image-size",
    "context_length": "--model.text.context-length",
    "embed_dim": "--model.embed-dim",
}


def check_targets(targets: Sequence[str], model: ModelConfig, has_openai_tokenizer: bool) -> None:
    """Raise ValueError with the flags to train with, if a product cannot use such a model."""
    for target in targets:
        if reason := find_misfit(target, model, has_openai_tokenizer):
            raise ValueError(reason)


def find_misfit(target: str, model: ModelConfig, has_openai_tokenizer: bool) -> str | None:
    """Why a product cannot use a model, and the flags to train one with that it can; None if it can."""
    if reason := find_input_misfit(target, model):
        return reason
    if target in (*TRANSFORMERS_FOLDERS, "open_clip"):
        return find_library_misfit(target, model)
    required = dict(SHAPES.get(target, {}))
    if target == "immich" and model.embed_dim > max(IMMICH_NAMES):
        required = {"embed_dim": 512}
    found = {"image_size": model.vision.image_size, "context_length": model.text.context_length}
    found["embed_dim"] = model.embed_dim
    wrong = {name: value for name, value in required.items() if found[name] != value}
    needs = [f"{name} {value}, not {found[name]}" for name, value in wrong.items()]
    flags = [f"{FLAGS[name]} {value}" for name, value in wrong.items()]
    if target in SHAPES and not has_openai_tokenizer:
        needs.append("OpenAI's tokenizer")
        flags.append("--tokenizer openai")
    if target in SHAPES and not isinstance(model.text, TextConfig):
        return f"{target} needs a text encoder with OpenAI's tokenizer; train without --text"
    if not needs:
        return None
    if "image_size" in wrong and not isinstance(model.vision, VisionConfig):
        return f"{target} needs {', '.join(needs)}; train without --vision and with {' '.join(flags)}"
    return f"{target} needs {', '.join(needs)}; train with {' '.join(flags)}"


def find_input_misfit(target: str, model: ModelConfig) -> str | None:
    """Why a product cannot prepare the images or captions of a model that was trained by others."""
    settings, needs = model.vision.preprocess, "which this model needs"
    if target in ("rclip", "immich") and (settings.resize_mode, settings.interpolation) != ("shortest", "bicubic"):
        return f"{target} resizes the shortest edge by bicubic interpolation, not {settings.resize_mode} by " + (
            f"{settings.interpolation}, {needs}"
        )
    if settings.resize_mode == "longest" and target not in ("onnx", "coreml", "open_clip", "m1clip"):
        return f"{target} cannot resize the longest edge and pad, {needs}"
    if settings.crop_pct != 1 and target in ("rclip", "immich", "open_clip"):
        return f"{target} cannot crop images to {settings.crop_pct:g} of their size, {needs}"
    if target == "rclip" and (model.vision.mean, model.vision.std) != (OPENAI_MEAN, OPENAI_STD):
        return "rclip normalizes images with OpenAI's mean and standard deviation, and this model has others"
    is_fixed = not isinstance(model.text, TextConfig) and model.text.tokenizer.fixed_length
    if target in ("fastembed", "transformers-js") and is_fixed:
        return f"{target} pads captions to the longest, and this text encoder needs them at their full length"
    return None


def find_library_misfit(library: str, model: ModelConfig) -> str | None:
    """Why a CLIP of transformers or open_clip cannot represent a model."""
    vision, text = model.vision, model.text
    if not isinstance(vision, VisionConfig) or not isinstance(text, TextConfig):
        return f"a CLIP of {library} cannot have the timm or transformers tower of this model"
    reason, flags = "", list[str]()
    if model.head != "linear":
        reason, flags = f"a {model.head} head", ["--model.head linear"]
    elif (vision.stem, vision.pool) != ("patch", "class"):
        reason, flags = f"a {vision.stem} stem and {vision.pool} pooling", ["--preset small or --preset base"]
    elif text.encoder != "transformer":
        reason, flags = f"a {text.encoder} text encoder", ["--model.text.encoder transformer"]
    elif library != "open_clip" and model.loss == "sigmoid":
        reason, flags = "a logit bias", ["--model.loss softmax (or export it with --to open_clip)"]
    return f"a CLIP of {library} cannot have {reason}; train with {flags[0]}" if reason else None
