"""Every setting of a model and a run: default, help line, flag and JSON key in one place. No torch.

Presets, recipes and budgets are functions of a TrainConfig; `override` puts the user's own settings back on top.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from tyro.conf import Suppress  # keeps a field out of `m1clip train --help`; it can be set in a config file

from m1clip.files import read_json
from m1clip.format import did_you_mean

T = TypeVar("T")
ResizeMode = Literal["shortest", "longest", "squash"]
CropOffset = Literal["round", "floor"]
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
BestMetric = Literal[
    "mean_r1", "i2t_r1", "t2i_r1", "i2t_r5", "t2i_r5", "i2t_r10", "t2i_r10", "label_accuracy", "zeroshot_accuracy"
]
Target = Literal[
    "onnx",
    "coreml",
    "rclip",
    "immich",
    "fastembed",
    "transformers-js",
    "sentence-transformers",
    "infinity",
    "transformers",
    "open_clip",
    "queryable",
    "m1clip",
]
"""What `m1clip export` can write; m1clip/targets.py says what each requires."""
Recipe = Literal["auto", "scratch", "frozen", "lora", "full"]
Positive = Annotated[int, Ge(1), Le(10**9)]
NonNegative = Annotated[int, Ge(0), Le(10**9)]
Fraction = Annotated[float, Ge(0), Lt(1)]
# Bounds of a model, well above any that is in use: a config.json may come from anyone.
ImageSize = Annotated[int, Ge(1), Le(4096)]
Width = Annotated[int, Ge(1), Le(2**16)]
FeatureWidth = Annotated[int, Ge(1), Le(2**22)]  # of all layers of an encoder, concatenated
Layers = Annotated[int, Ge(1), Le(256)]
MlpWidth = Annotated[int, Ge(0), Le(2**18)]
VocabSize = Annotated[int, Ge(1), Le(2**22)]
ContextLength = Annotated[int, Ge(1), Le(2**16)]
CropPct = Annotated[float, Ge(0.5), Le(1)]
Color = Annotated[float, Ge(-1e3), Le(1e3)]
Colors = tuple[Color, Color, Color]
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


MAX_SECONDS = 10 * 365 * 86400.0


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Preprocess:
    """How an image becomes square RGB bytes, in the words of open_clip's preprocess_cfg and of timm."""

    size: int
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    crop_pct: float = 1.0
    crop_offset: CropOffset = "round"


class HasPreprocess:
    """What all configurations of vision towers have in common."""

    image_size: int
    resize_mode: ResizeMode
    interpolation: Interpolation
    crop_pct: float
    crop_offset: CropOffset

    @property
    def preprocess(self) -> Preprocess:
        return Preprocess(self.image_size, self.resize_mode, self.interpolation, self.crop_pct, self.crop_offset)


@dataclass(frozen=True)
class VisionConfig(HasPreprocess):
    """Vision transformer, as in OpenAI CLIP and OpenCLIP."""

    image_size: ImageSize = 224
    """Input resolution in pixels (square)."""
    patch_size: ImageSize = 16
    """Patch size in pixels; each patch is one token."""
    width: Width = 768
    """Embedding width of a token."""
    layers: Layers = 12
    """Transformer blocks."""
    heads: Width = 12
    """Attention heads."""
    pool: Suppress[Literal["class", "mean"]] = "class"
    """Image feature: the class token or the mean of the patch tokens."""
    stem: Suppress[Literal["patch", "conv"]] = "patch"
    """Patch embedding: one linear layer per patch (ViT), or a stack of stride-2 convolutions."""
    mean: Suppress[Colors] = OPENAI_MEAN
    """Channel means subtracted from the pixels."""
    std: Suppress[Colors] = OPENAI_STD
    """Channel standard deviations the pixels are divided by."""
    mlp_width: Suppress[MlpWidth] = 0
    """Hidden width of the MLPs; 0 means 4 x width."""
    resize_mode: Suppress[ResizeMode] = "shortest"
    """Resize the shortest edge and crop the center, squash to a square, or resize the longest edge and pad."""
    interpolation: Suppress[Interpolation] = "bicubic"
    """Interpolation of the resize."""
    crop_pct: Suppress[CropPct] = 1.0
    """Image size divided by the length that the shortest edge is resized to."""
    crop_offset: Suppress[CropOffset] = "round"
    """Half a pixel of the crop's position is rounded by torchvision and open_clip, and dropped by transformers."""

    @property
    def tokens(self) -> int:
        return int((self.image_size // self.patch_size) ** 2 + (self.pool == "class"))


@dataclass(frozen=True)
class TextConfig:
    """Text transformer, as in OpenAI CLIP and OpenCLIP, or a bag of words."""

    vocab_size: Suppress[Annotated[VocabSize, Ge(4)]] = 49408
    """Rows of the token embedding; a tokenizer may use fewer."""
    context_length: Annotated[ContextLength, Ge(3)] = 77
    """Maximum caption length in tokens, start and end included; longer captions are truncated."""
    width: Width = 512
    """Embedding width of a token."""
    layers: Layers = 12
    """Transformer blocks."""
    heads: Width = 8
    """Attention heads."""
    mlp_width: Suppress[MlpWidth] = 0
    """Hidden width of the MLPs; 0 means 4 x width."""
    encoder: Literal["transformer", "bag_of_words"] = "transformer"
    """bag_of_words averages the token embeddings: no word order, but learns faster from few pairs."""


@dataclass(frozen=True)
class TimmConfig(HasPreprocess):
    """An image encoder of the timm library; all values come from timm."""

    timm: str
    """Model name in timm."""
    image_size: ImageSize
    width: FeatureWidth
    """Size of an image's feature vector."""
    mean: Colors
    std: Colors
    stages: tuple[str, ...] = ()
    """Stages whose mean outputs are appended to the final features."""
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    crop_pct: CropPct = 1.0
    crop_offset: CropOffset = "round"


@dataclass(frozen=True)
class TokenizerSettings:
    """What a tokenizer.json does not say about the captions of a library's text encoder."""

    clip_tokens: bool = False
    """Captions are cleaned and enclosed in start and end tokens as in CLIP; others bring their own rules."""
    clean: Literal["none", "lower", "whitespace", "canonicalize", "strip_punctuation"] = "none"
    """open_clip's cleaning of captions; strip_punctuation is that of SigLIP in transformers."""
    pad_id: int = 0
    pad_left: bool = False
    fixed_length: bool = False
    """Pad to the context length: the encoder attends to the padding."""
    zeroed_id: int | None = None
    """Token that is replaced by 0 (strip_sep_token of open_clip)."""


@dataclass(frozen=True)
class HFConfig:
    """A text encoder of the transformers library, such as BERT; all values come from its folder."""

    hf: dict[str, Any]
    """The encoder's own config.json."""
    vocab_size: VocabSize
    context_length: ContextLength
    """Maximum caption length in tokens, special tokens included."""
    width: FeatureWidth
    """Size of a caption's feature vector."""

    @property
    def tokenizer(self) -> TokenizerSettings:
        return TokenizerSettings(pad_id=int(self.hf.get("pad_token_id") or 0))


@dataclass(frozen=True)
class LibraryVisionConfig(HasPreprocess):
    """The image encoder of a CLIP of open_clip or transformers, projection included; all values come from the model."""

    library: Literal["open_clip", "transformers"]
    settings: dict[str, Any]
    """What the library builds it from: embed_dim, vision_cfg and quick_gelu, or a config.json."""
    image_size: ImageSize
    width: FeatureWidth
    """Size of an image's embedding."""
    mean: Colors = OPENAI_MEAN
    std: Colors = OPENAI_STD
    resize_mode: ResizeMode = "shortest"
    interpolation: Interpolation = "bicubic"
    crop_pct: CropPct = 1.0
    crop_offset: CropOffset = "round"


@dataclass(frozen=True)
class LibraryTextConfig:
    """The text encoder of a CLIP of open_clip or transformers, projection included; all values come from the model."""

    library: Literal["open_clip", "transformers"]
    settings: dict[str, Any]
    """What the library builds it from: embed_dim, text_cfg, quick_gelu and hf_config, or a config.json."""
    vocab_size: VocabSize
    context_length: ContextLength
    width: FeatureWidth
    """Size of a caption's embedding."""
    tokenizer: TokenizerSettings


@dataclass(frozen=True)
class ModelConfig:
    vision: VisionConfig | TimmConfig | LibraryVisionConfig = VisionConfig()
    text: TextConfig | HFConfig | LibraryTextConfig = TextConfig()
    embed_dim: Width = 512
    """Size of the joint image-text embedding."""
    activation: Suppress[Literal["gelu", "quick_gelu"]] = "gelu"
    """Activation of the MLPs; OpenAI's weights were trained with quick_gelu."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax is CLIP's contrastive loss, sigmoid is SigLIP's (adds a learned bias)."""
    head: Literal["linear", "standardized", "mlp"] = "linear"
    """Projection head: CLIP's matrix; standardized features and a bias; the same with a small MLP added."""
    head_hidden: Suppress[Width] = 256
    """Hidden width of the MLP head."""

    @property
    def is_native(self) -> bool:
        """Whether both towers are our own transformers, not timm's or transformers'."""
        return isinstance(self.vision, VisionConfig) and isinstance(self.text, TextConfig)


@dataclass(frozen=True)
class DataConfig:
    """Which pairs are read, and how: the flags of every command about data."""

    data: str = "synthetic:12000"
    """Folder, .csv, .tsv, .jsonl, .parquet, coco:DIR, flickr30k:DIR, flickr8k:DIR, shards/{00..99}.tar,
    hf:NAME or synthetic:N; a@2+b mixes sources, each pair of a twice per epoch."""
    val_size: Positive | Literal["auto"] = "auto"
    """Validation images; auto uses the dataset's own split, or holds out 5 %."""
    group_by: str = "none"
    """Keep images with the same caption, label, folder or value of a table column, or near duplicates (duplicates),
    in one split; not where the data has its own splits."""
    image_column: str = "auto"
    """Table column with the image path or bytes; auto guesses from names and values."""
    caption_column: str = "auto"
    """Table column with the caption or a list of captions."""
    label_column: str = "auto"
    """Table column with the class of the image, for zero-shot accuracy; auto uses label, class, category …"""
    labels: Suppress[str] = ""
    """Class names of data with class numbers: cat,dog,… or a text file with one per line."""
    caption_from: Literal["auto", "text", "folder", "filename"] = "auto"
    """Captions of a folder: text (.txt beside each image), folder (labels) or filename; auto asks if unclear."""
    template: str = "a photo of a {}"
    """Caption of images in labelled folders."""
    allow: tuple[Literal["urls", "links"], ...] = ()
    """Permit image URLs in tables, or symlinks that leave the data folder; both are refused by default."""
    max_bad_rows: Annotated[float, Ge(0), Le(1)] = 0.01
    """Largest fraction of unusable rows; they are listed and skipped."""
    cache_gb: Annotated[float, Ge(0), Lt(float("inf"))] = 20.0
    """Disk limit for decoded images of all runs, in GB; 0 decodes on the fly."""
    workers: Annotated[int, Ge(0), Le(256)] = 0
    """Image decoding processes; 0 uses one per core."""
    seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    """Random seed for weights, data order, augmentation and synthetic scenes."""


@dataclass(frozen=True)
class TrainConfig(DataConfig):
    model: ModelConfig = ModelConfig()
    preset: str = "nano"
    """Named set of defaults for all other flags; `m1clip info` lists them."""
    recipe: Recipe = "auto"
    """scratch; frozen (train heads on features encoded once); lora; full; auto chooses and says why."""
    init: str = ""
    """Start from a CLIP: run, model folder, checkpoint, open_clip:NAME/TAG, hf:NAME; `m1clip models` lists them."""
    model_name: str = ""
    """Architecture of the checkpoint given to --init, by its name in open_clip, such as ViT-B-16-SigLIP."""
    vision: str = ""
    """Pretrained image encoder: timm:NAME, or timm:NAME?weights=FILE (needs m1clip[timm])."""
    text: str = ""
    """Pretrained text encoder: hf:NAME or hf:FOLDER, BERT-like (needs m1clip[hf])."""
    budget: str = ""
    """Training time, such as 90s, 10m or 2h: the model is chosen to fit, and training ends in time."""
    freeze: Literal["auto", "both", "vision", "text"] = "auto"
    """Frozen towers; auto freezes pretrained ones with --recipe frozen, and none otherwise."""
    unfreeze: NonNegative = 0
    """full: train only the last N layers of each tower; frozen: train them in a second run afterwards."""
    lora_rank: Positive = 16
    """LoRA rank."""
    head_dropout: Fraction = 0.0
    """Dropout on the features before the projection heads."""
    wise_ft: Annotated[float, Ge(0), Le(1)] = 1.0
    """WiSE-FT: weight of the fine-tuned model when averaged with the initial one; 1 is off."""
    tokenizer: str = "bpe"
    """bpe (learned from the captions), char, openai (CLIP's, needs m1clip[openclip]), or the path of a vocabulary."""
    epochs: Positive = 6
    """Passes over the training images."""
    steps: NonNegative = 0
    """Stop after this many steps; 0 trains for --epochs."""
    batch_size: Annotated[int, Ge(2), Le(10**7)] = 256
    """Contrastive batch size."""
    captions_per_image: Positive = 1
    """Captions of each image used per step, where it has several."""
    lr: Annotated[float, Gt(0), Lt(float("inf"))] = 1e-3
    """Peak learning rate."""
    warmup: Fraction = 0.1
    """Fraction of the run with linear warm-up, followed by cosine decay to 0."""
    weight_decay: Annotated[float, Ge(0), Lt(float("inf"))] = 0.1
    """Weight decay of matrices; biases, norms and embeddings have none."""
    grad_clip: Annotated[float, Gt(0), Lt(float("inf"))] = 1.0
    """Maximum gradient norm."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon uses Muon for hidden matrices and AdamW for everything else."""
    ema: Fraction = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999; 0 is off."""
    label_smoothing: Fraction = 0.0
    """Label smoothing of the contrastive targets."""
    patch_dropout: Fraction = 0.0
    """Fraction of image patches dropped in training."""
    word_dropout: Fraction = 0.0
    """Fraction of caption tokens dropped in training (bag_of_words only)."""
    crop_scale: Annotated[float, Ge(0.05), Le(1)] = 1.0
    """Augmentation: minimum area of a random resized crop; 1 is off."""
    hflip: bool = False
    """Augmentation: flip half of the images horizontally (not with captions that say left or right)."""
    color_jitter: Fraction = 0.0
    """Augmentation: strength of brightness, contrast and saturation jitter."""
    chunk: Positive | Literal["auto"] = "auto"
    """Pairs in memory at once (GradCache); the contrastive batch stays whole. auto measures what fits."""
    grad_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more compute."""
    device: str = "auto"
    """auto (measured), cpu, cuda, mps, or one per tower: vision=mps,text=cpu."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Autocast precision; auto leaves fp32 only where a measurement shows a gain."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile for the transformer blocks; auto where a measurement shows a gain."""
    threads: Annotated[int, Ge(0), Le(1024)] = 0
    """CPU threads; 0 uses the fastest measured number, or PyTorch's default."""
    log_every: Positive = 10
    """Steps between log writes; diagnostics (norms, memory, sensors) are logged every 5th time."""
    eval_every: Positive = 1
    """Epochs between evaluations; there is always one at the end."""
    zeroshot: str = ""
    """Labelled images (a spec as in --data) whose zero-shot accuracy is measured at each evaluation."""
    save_every: str = "5m"
    """Time (5m) or steps (500) between checkpoints; also saved at each new best score, at the end, on Ctrl-C."""
    best_metric: BestMetric = "mean_r1"
    """Metric that selects the best checkpoint; label_accuracy replaces mean_r1 where captions are labels,
    zeroshot_accuracy is that of --zeroshot."""
    patience: NonNegative = 0
    """Stop after this many evaluations without improvement and keep the best model; 0 is off."""
    ship_to: tuple[Target, ...] = ()
    """Refuse a model that these targets of `m1clip export` cannot use, such as rclip or immich, before training it."""
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Also log to a tracker (needs m1clip[tensorboard], [wandb] or [trackio])."""

    @property
    def budget_s(self) -> float | None:
        """The budget in seconds; None without one."""
        return parse_duration(self.budget, "budget") if self.budget else None

    @property
    def is_pretrained(self) -> bool:
        return bool(self.init or self.vision or self.text)

    @property
    def inspect_every(self) -> int:
        """Steps between records of gradient norms, embedding statistics, memory and sensors."""
        return 5 * self.log_every

    @property
    def save_interval(self) -> tuple[float, int]:
        """Seconds and steps between checkpoints; 0 for the one that does not apply."""
        if self.save_every.isdecimal() and int(self.save_every):
            return 0.0, int(self.save_every)
        return parse_duration(self.save_every, "save_every"), 0


def parse_duration(text: str, name: str) -> float:
    """Seconds of 90s, 10m or 2h."""
    try:
        seconds = float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1:]]
    except (ValueError, KeyError):
        seconds = 0.0
    require(0 < seconds < MAX_SECONDS, f"{name} must be a duration such as 90s, 10m or 2h, not {text!r}")
    return seconds


# Validation and JSON. Configs are plain values; whoever builds one from outside input checks it.
def check_config(config: T) -> T:
    """The config with exact types (a path as text); a setting out of range or a contradiction is a ValueError."""
    config = from_dict(type(config), asdict(config))  # type: ignore[call-overload]
    if isinstance(config, DataConfig):
        require("{}" in config.template, f"template needs a {{}} for the label: {config.template!r}")
    if isinstance(config, ModelConfig):
        check_model(config)
    if not isinstance(config, TrainConfig):
        return config
    check_model(config.model)
    bag = isinstance(config.model.text, TextConfig) and config.model.text.encoder == "bag_of_words"
    require(bag or not config.word_dropout, "word_dropout needs --model.text.encoder bag_of_words")
    needs_zeroshot = config.best_metric == "zeroshot_accuracy" and not config.zeroshot
    require(not needs_zeroshot, "best_metric zeroshot_accuracy needs labelled images: --zeroshot SPEC")
    both = config.init and (config.vision or config.text)
    require(not both, "--init provides both towers; --vision and --text cannot be combined with it")
    require(
        bool(config.init) or not config.model_name, "--model-name is the architecture of a checkpoint: add --init FILE"
    )
    if config.preset != "budget":
        get_preset(config.preset)
    _ = config.budget_s, config.save_interval
    return config


def check_model(model: ModelConfig) -> None:
    """Raise ValueError if the towers cannot be built."""
    vision, text = model.vision, model.text
    require(min(vision.std) >= 1e-4, f"std must be at least 0.0001, not {vision.std}")
    if isinstance(vision, VisionConfig):
        size, patch = vision.image_size, vision.patch_size
        require(patch <= size and size % patch == 0, f"image_size {size} is not a multiple of patch_size {patch}")
        power_of_two = patch.bit_count() == 1 and patch > 1
        require(vision.stem == "patch" or power_of_two, f"a conv stem needs a patch_size of 2, 4, 8, 16 …, not {patch}")
    for name, tower in (("vision", vision), ("text", text)):
        if isinstance(tower, VisionConfig | TextConfig):
            width, heads = tower.width, tower.heads
            require(width % heads == 0, f"{name} width {width} is not divisible by {heads} heads")
    if isinstance(text, HFConfig):
        require("model_type" in text.hf, "the text encoder's config.json has no model_type")
    if not isinstance(text, TextConfig):
        pad_id = text.tokenizer.pad_id
        require(0 <= pad_id < text.vocab_size, f"pad_id {pad_id} is not a token of {text.vocab_size:,}")


def to_json(config: object) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"  # type: ignore[call-overload]


def from_json(kind: type[T], path: Path) -> T:
    """A valid config from a file; errors name the key."""
    if not path.exists():
        raise FileNotFoundError(f"no configuration at {path}")
    values = read_json(path)
    try:
        return check_config(from_dict(kind, values))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None


def from_dict(kind: type[T], values: Any) -> T:
    """A dataclass from JSON values: unknown keys and values of the wrong type or range are errors."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    for one in (*_TOWERS, ModelConfig, kind):
        one.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[union-attr]
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ValueError(_explain(error.errors(), kind)) from None


_TOWERS = (VisionConfig, TimmConfig, LibraryVisionConfig, TextConfig, HFConfig, LibraryTextConfig, TokenizerSettings)
_UNION_MEMBERS = {*(tower.__name__ for tower in _TOWERS), "constrained-int", "literal['auto']"}
_PHRASES = {"Input should be ": "", "greater than or equal to": "at least", "less than or equal to": "at most"}
_PHRASES |= {"greater than": "above", "less than inf": "finite", "less than": "below"}


def _explain(errors: Sequence[Mapping[str, Any]], kind: type) -> str:
    """The first error as a sentence that names the key. Of a union, the member with the fewest errors is meant."""

    def key_of(error: Mapping[str, Any]) -> str:
        return ".".join(str(part) for part in error["loc"] if part not in _UNION_MEMBERS)

    counts = Counter(part for error in errors for part in error["loc"] if part in _UNION_MEMBERS)
    unknown = "unexpected_keyword_argument"
    first = min(errors, key=lambda error: (max(counts[part] for part in ("", *error["loc"])), error["type"] != unknown))
    key, parent = key_of(first), first["loc"][:-1]
    if first["type"] == unknown:
        names = {field.name for one in (*_TOWERS, ModelConfig, kind) for field in fields(one)}
        return f"unknown key {key}; {did_you_mean(key.rpartition('.')[2], names)}"
    if first["type"] == "missing":
        return f"{key} is missing"
    same = [error["msg"] for error in errors if error["loc"][:-1] == parent and key_of(error) == key]
    allowed = " or ".join(dict.fromkeys(same))
    for phrase, short in _PHRASES.items():
        allowed = allowed.replace(phrase, short)
    return f"{key or 'the file'} must be {allowed}, not {first['input']!r}"[:300]


# Overrides: settings by dotted path, such as {"lr": 1e-3, "model.vision.width": 256}.
def override(config: T, settings: Mapping[str, Any]) -> T:
    names = [field.name for field in fields(config)]  # type: ignore[arg-type]
    for path, value in sorted(settings.items()):  # model before model.head
        name, _, inner = path.partition(".")
        require(name in names, f"unknown setting {name}; {did_you_mean(name, names)}")
        new = override(getattr(config, name), {inner: value}) if inner else value
        config = replace(config, **{name: new})  # type: ignore[type-var]
    return config


def with_defaults(config: TrainConfig, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> TrainConfig:
    """The config with other defaults, where the user has not given a setting."""
    return override(override(config, defaults), given)


# Requests: what the user gave, on top of where the defaults come from.

FIXED_ON_RESUME = (
    *("model", "data", "val_size", "group_by", "image_column", "caption_column", "caption_from", "template", "allow"),
    *("label_column", "labels", "zeroshot"),
    *("seed", "batch_size", "captions_per_image", "crop_scale", "hflip", "color_jitter", "tokenizer", "optimizer"),
    *("ema", "best_metric", "recipe", "init", "model_name", "vision", "text", "freeze", "lora_rank"),
)
"""Settings that data order, weights and optimizer state depend on."""
# Settings that come with pretrained weights.
PRETRAINED_SHAPE: dict[str, tuple[str, ...]] = {"vision": ("model.vision",), "text": ("model.text",)}
PRETRAINED_SHAPE |= {"init": ("model.vision", "model.text", "model.embed_dim")}


def check_exclusive(given: Set[str]) -> None:
    """Refuse arguments of a training command that contradict each other."""
    pairs = [("resume", "overwrite"), ("resume", "config"), ("resume", "preset"), ("config", "preset")]
    for one, other in (*pairs, ("budget", "epochs"), ("budget", "steps")):
        require(not {one, other} <= given, f"--{one} and --{other} cannot be combined")


def select_settings(config: TrainConfig, paths: Iterable[str]) -> dict[str, Any]:
    """Some settings of a config by dotted path."""
    return {path: reduce(getattr, path.split("."), config) for path in paths}


def requested_config(
    settings: Mapping[str, Any], config: TrainConfig | str | Path | None = None, resumed: TrainConfig | None = None
) -> TrainConfig:
    """The user's settings with defaults from a run to resume, a config or its file, or a preset."""
    source = resumed or config
    if isinstance(source, str | Path):
        source = from_json(TrainConfig, Path(source))
    base = source or _requested_preset(settings)
    requested = check_config(override(base, settings))
    if base.budget and ("epochs" in settings or "steps" in settings):
        requested = replace(requested, budget="")
    changed = [key for key in FIXED_ON_RESUME if getattr(requested, key) != getattr(base, key)]
    if resumed and changed:
        raise ValueError(f"a resumed run cannot change {', '.join(changed)}: its weights and data order depend on it")
    return requested


def _requested_preset(settings: Mapping[str, Any]) -> TrainConfig:
    for pretrained, shape in PRETRAINED_SHAPE.items():
        fixed = [f"--{key.replace('_', '-')}" for key in settings if key.startswith(shape)]
        if settings.get(pretrained) and fixed:
            raise ValueError(f"--{pretrained} brings a model with its own shape; {fixed[0]} cannot change it")
    preset = get_preset(settings.get("preset", "nano"))
    # A pretrained CLIP has its own activation; the preset's is not a request.
    return override(preset, {"model.activation": "gelu"}) if settings.get("init") else preset


# Presets and recipe defaults.

_FINETUNE: dict[str, Any] = {"optimizer": "adamw", "warmup": 0.1, "crop_scale": 0.5, "hflip": True}
_HEADS_ONLY: dict[str, Any] = {"head_dropout": 0.5, "label_smoothing": 0.1, "ema": 0.98, "eval_every": 18}
RECIPES: dict[str, dict[str, Any]] = {
    "frozen": {**_FINETUNE, **_HEADS_ONLY, "batch_size": 1024, "lr": 3e-3, "epochs": 36, "weight_decay": 1.0},
    "lora": {**_FINETUNE, "batch_size": 64, "lr": 1e-3, "epochs": 3, "weight_decay": 0.0},
    "full": {**_FINETUNE, "batch_size": 64, "lr": 3e-4, "epochs": 3, "patience": 2},
}


def recipe_defaults(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    """Settings that suit a recipe; docs/finetuning.md has the measurements behind them."""
    settings: dict[str, Any] = {**RECIPES.get(recipe, {}), "recipe": recipe}
    if not config.vision and not config.text:
        return settings
    if not (config.vision and config.text):  # one tower is trained from scratch and needs smaller steps
        settings |= {"batch_size": 256, "lr": 1e-3, "epochs": 10, "weight_decay": 0.1, "eval_every": 1}
    return {**settings, "model.embed_dim": 192, "model.head": "mlp"}


def get_preset(name: str) -> TrainConfig:
    require(name in PRESETS, f"no preset {name!r}; {did_you_mean(name, PRESETS)}")
    return PRESETS[name]


# nano, tiny and small are sized for hundreds to thousands of pairs per second on a laptop. vit-b16-char is a
# ViT-B/16 with a small character-level text tower. base, large and 1b have the shapes of OpenAI's ViT-B/32 and
# ViT-L/14 and of OpenCLIP's ViT-H/14, so their weights fit; medium lies between them for the scaling study.
# Columns: image_size, patch_size, width, layers, heads; vocab_size, context_length, width, layers, heads; embed_dim.
TowerShape = tuple[int, int, int, int, int]
_CONV_STEM = {"model.vision.stem": "conv", "model.vision.pool": "mean"}  # docs/log.md has what the stem gains
_MUON = {"optimizer": "muon", "lr": 3e-3}  # the largest single gain in docs/log.md
_QUICK_GELU = {"model.activation": "quick_gelu"}
_FEW_SCENES = {"data": "synthetic:216", "val_size": 24, "tokenizer": "char", "epochs": 15, "batch_size": 12, "lr": 3e-4}
_FEW_SCENES |= {"warmup": 0.0, "weight_decay": 0.01, "log_every": 1}
_PRESETS: dict[str, tuple[TowerShape, TowerShape, int, dict[str, Any]]] = {
    "nano": ((64, 16, 128, 4, 2), (1024, 32, 128, 2, 2), 128, {**_CONV_STEM, **_MUON, "epochs": 3}),
    "tiny": ((112, 16, 256, 6, 4), (4096, 48, 256, 4, 4), 256, _CONV_STEM),
    "small": ((112, 16, 384, 12, 6), (16384, 64, 384, 6, 6), 384, {"batch_size": 128, "lr": 5e-4}),
    "vit-b16-char": ((224, 16, 768, 12, 12), (33, 77, 512, 6, 8), 512, _FEW_SCENES),
    "base": ((224, 32, 768, 12, 12), (49408, 77, 512, 12, 8), 512, {**_QUICK_GELU, "batch_size": 32, "lr": 5e-4}),
    "medium": ((224, 16, 896, 14, 14), (49408, 77, 640, 12, 10), 640, {"batch_size": 16, "lr": 4e-4}),
    "large": ((224, 14, 1024, 24, 16), (49408, 77, 768, 12, 12), 768, {**_QUICK_GELU, "batch_size": 8, "lr": 4e-4}),
    "1b": ((224, 14, 1280, 32, 16), (49408, 77, 1024, 24, 16), 1024, {"batch_size": 4, "lr": 3e-4}),
}
PRESETS = {
    name: override(TrainConfig(model=ModelConfig(VisionConfig(*vision), TextConfig(*text), dim), preset=name), settings)
    for name, (vision, text, dim, settings) in _PRESETS.items()
}
