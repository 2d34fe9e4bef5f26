"""Every default, once: a field here is a flag, its help line and a key of config.json.

Knows no torch, so help and error messages are instant. The presets stand at the end, in one table.
"""

import difflib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from m1clip.shapes import ModelConfig, TextConfig, VisionConfig, require
from m1clip.starts import RECIPES, Recipe, StartConfig

T = TypeVar("T")


def nearest(word: str, names: Iterable[str]) -> str:
    """The end of an error message: the names most like the one asked for, or all of them."""
    names = sorted(names)
    close = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"


def printable(text: str) -> str:
    """Text from a file, that cannot play tricks with the terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


@dataclass(frozen=True)
class DataConfig:
    """Which pairs, and how they are read: the flags that every verb about data has."""

    data: str = "synthetic:12000"
    """A folder, a .csv, .tsv, .jsonl or .parquet, coco:DIR, flickr30k:DIR, flickr8k:DIR, shards/{00..99}.tar,
    hf:NAME or synthetic:N; a@2+b mixes, and takes each pair of a twice."""
    held_out: int | Literal["auto"] = "auto"
    """Pictures never trained on, for the scores; auto takes the split as given, or one in twenty."""
    image_column: str = "auto"
    """The column of a table that names the picture, or holds it; auto guesses from names and contents."""
    caption_column: str = "auto"
    """The column that holds the caption, or a list of them."""
    prompt: str = "a photo of a {}"
    """What a folder's name becomes where folders are labels."""
    allow: tuple[Literal["urls", "links"], ...] = ()
    """What is otherwise refused: pictures named by their address on the net, links that leave the folder."""
    max_bad: float = 0.01
    """Part of the rows that may be unusable; they are named and passed over. More is refused."""
    cache_gb: float = 20.0
    """Most that decoded pictures may take on the disk, of all runs together; 0 decodes while training."""
    workers: int = 0
    """Processes that decode pictures; 0 is one for each core."""
    seed: int = 0
    """Decides weights, drawn scenes and the order of the data."""

    def __post_init__(self) -> None:
        require(
            self.held_out == "auto" or self.held_out >= 1,
            f"held_out must be auto or at least 1, not {self.held_out}",
        )
        require(0 <= self.max_bad <= 1, f"max_bad is a part of the rows, 0 to 1, not {self.max_bad}")
        require(0 <= self.cache_gb < float("inf"), f"cache_gb must be 0 or more, not {self.cache_gb}")
        require(0 <= self.workers <= 256, f"workers must be 0 to 256, not {self.workers}")
        require("{}" in self.prompt, f"prompt needs a {{}} where the folder's name goes: {self.prompt!r}")
        require(0 <= self.seed < 2**63, f"seed must be in 0…2^63-1, not {self.seed}")


@dataclass(frozen=True)
class TrainConfig(DataConfig, StartConfig):
    model: ModelConfig = ModelConfig()
    preset: str = "nano"
    """Where the defaults of the other flags come from; `m1clip info` lists them."""
    tokenizer: str = "bpe"
    """bpe (learned from the captions), char (33 letters and marks), or the path of a CLIP vocabulary."""
    epochs: int = 6
    """Passes over the data."""
    steps: int = 0
    """End after this many steps, whatever the number of passes; 0 goes by --epochs."""
    batch: int = 256
    """Pairs in one contrastive batch: each is told from the others."""
    captions: int = 1
    """Captions of each picture that a step reads, where it has several: more is learned from one look."""
    lr: float = 1e-3
    """Peak learning rate."""
    warmup: float = 0.1
    """Part of the run in which the rate climbs to its peak; a cosine takes it down again."""
    weight_decay: float = 0.1
    """Pull of the matrices towards zero; biases, norms and embeddings are exempt."""
    beta2: float = 0.98
    """Memory of AdamW's second moment."""
    clip_norm: float = 1.0
    """Longest gradient; longer ones are shortened to it."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices from features to features, and AdamW for everything else."""
    layer_decay: float = 1.0
    """Rate of a block against that of the block above it; below 1, early layers move less."""
    ema: float = 0.0
    """Memory of a running mean of the weights, such as 0.999: the mean is scored and kept; 0 is off."""
    label_smoothing: float = 0.0
    """Part of the target that is spread over the whole batch."""
    count_twins: bool = False
    """Take pairs with the same caption or the same picture for each other's negatives, which they are not."""
    dropout: float = 0.0
    """Part of each block's output set to zero in training."""
    drop_tokens: float = 0.0
    """Part of the picture's patches left out in training: less work, and harder."""
    drop_words: float = 0.0
    """Part of a caption's words left out in training, where captions are bags of words."""
    start_size: int = 0
    """Pixels a side of the first pictures, growing to full size in equal shares of the run; 0 is off."""
    crop: float = 1.0
    """Augmentation: the smallest part of a picture's area that a random crop may leave; 1 is off."""
    flip: bool = False
    """Augmentation: half of the pictures are mirrored (not where captions say left and right)."""
    colour: float = 0.0
    """Augmentation: brightness, contrast and saturation change by up to this part."""
    chunk: int | Literal["auto"] = "auto"
    """Pairs in memory at once, with the whole batch as negatives all the same; auto measures what fits."""
    recompute: bool = False
    """Keep no activations inside the blocks: far less memory, a third more work."""
    device: str = "auto"
    """auto (measured), cpu, cuda, mps, or one a tower: vision=mps,text=cpu; printed with the reason."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the products inside the towers; auto takes less than fp32 only where that was measured to pay."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Translate the blocks with torch.compile; auto does where it was measured to pay in this run."""
    threads: int = 0
    """CPU threads; 0 takes what was measured to be fastest, or torch's own number."""
    trust_device: bool = False
    """Do not compare a GPU's results with the CPU's before training on it."""
    log_every: int = 10
    """Steps between two lines of metrics; scalars are read from the device only then."""
    eval_every: int = 1
    """Epochs between two held-out evaluations; there is always one at the end."""
    watch_every: int = 50
    """Steps between two looks inside: norms by block, embeddings, memory, the machine's sensors."""
    save_minutes: float = 5.0
    """Minutes between two checkpoints; there is always one at the end and on Ctrl-C."""
    save_steps: int = 0
    """Steps between two checkpoints; 0 leaves it to the other two."""
    save_epochs: int = 1
    """Epochs between two checkpoints; 0 leaves it to the other two."""
    keep: int = 2
    """How many of the newest checkpoints are kept, beside the best."""
    best_by: Literal["mean_r1", "i2t_r1", "t2i_r1", "i2t_r5", "t2i_r5", "i2t_r10", "t2i_r10"] = "mean_r1"
    """The held-out score that decides which checkpoint is the best."""
    patience: int = 0
    """Stop after this many evaluations without a better score, and keep the best; 0 never does."""
    max_skips: int = 20
    """Batches with a loss or gradient that is not finite are passed over; after so many the run stops."""
    track: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Mirror the metrics to a tracker too (needs m1clip[tensorboard], [wandb] or [trackio])."""

    def __post_init__(self) -> None:
        DataConfig.__post_init__(self)
        StartConfig.__post_init__(self)
        for key in ("epochs", "captions", "log_every", "eval_every", "watch_every", "keep"):
            value = getattr(self, key)
            require(value >= 1, f"{key} must be at least 1, not {value}")
        for key in ("lr", "clip_norm", "save_minutes"):
            value = getattr(self, key)
            require(0 < value < float("inf"), f"{key} must be above 0 and finite, not {value}")
        for key in ("steps", "save_steps", "save_epochs", "patience", "max_skips"):
            value = getattr(self, key)
            require(value >= 0, f"{key} must be 0 or more, not {value}")
        for key in (
            "warmup",
            "colour",
            "beta2",
            "ema",
            "dropout",
            "drop_tokens",
            "drop_words",
            "label_smoothing",
            "head_dropout",
        ):
            value = getattr(self, key)
            require(0 <= value < 1, f"{key} must be at least 0 and below 1, not {value}")
        require(
            self.batch >= 2, f"batch must be at least 2, not {self.batch}: a pair is learned against others"
        )
        require(
            self.chunk == "auto" or self.chunk >= 1, f"chunk must be auto or at least 1, not {self.chunk}"
        )
        require(0 < self.layer_decay <= 1, f"layer_decay must be above 0, at most 1, not {self.layer_decay}")
        require(0.05 <= self.crop <= 1, f"crop must be 0.05 to 1, not {self.crop}")
        bag = isinstance(self.model.text, TextConfig) and self.model.text.mix == "bag"
        require(bag or not self.drop_words, "drop_words is for bags of words: --model.text.mix bag")
        require(
            not (self.start_size and self.budget),
            "start_size grows with the steps, and a budget goes by the clock: give one of them",
        )
        if isinstance(self.model.vision, VisionConfig):
            _check_start(self.start_size, self.model.vision)
        else:
            require(not self.start_size, "start_size is for our own vision tower; others see one size")
        require(self.weight_decay >= 0, f"weight_decay must be 0 or more, not {self.weight_decay}")
        require(0 <= self.threads <= 1024, f"threads must be 0 to 1024, not {self.threads}")


def _check_start(side: int, vision: VisionConfig) -> None:
    require(
        side == 0 or (vision.patch <= side <= vision.image_size and side % vision.patch == 0),
        f"start_size must be 0, or {vision.patch} to {vision.image_size} in steps of a patch, not {side}",
    )


def to_json(config: object) -> str:
    assert is_dataclass(config)
    assert not isinstance(config, type)
    return json.dumps(asdict(config), indent=2) + "\n"


def from_json(kind: type[T], path: Path) -> T:
    try:
        return build(kind, json.loads(path.read_text()))
    except FileNotFoundError:
        raise FileNotFoundError(f"no configuration at {path}") from None
    except (ValueError, TypeError) as error:  # ValueError covers bad JSON and bad UTF-8 too
        raise ValueError(f"{path}: {error}") from None


def build(kind: type[T], values: Any, where: str = "") -> T:
    """A config from parsed JSON; an unknown key or a value of the wrong type is an error that names it."""
    require(isinstance(values, dict), f"{where or 'the file'} should be an object, not {values!r}")
    hints = get_type_hints(kind)
    for key in values.keys() - hints.keys():
        raise ValueError(f"unknown key {where}{key}; {nearest(key, hints)}")
    return kind(**{key: _value(hints[key], value, where + key) for key, value in values.items()})


def _value(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return build(kind, value, where + ".")  # type: ignore[arg-type]
    if get_origin(kind) is Literal:
        require(value in get_args(kind), f"{where} must be one of {', '.join(get_args(kind))}, not {value!r}")
        return value
    if get_origin(kind) in (Union, UnionType):  # of plain types, and of words that stand for a choice
        if value is None and type(None) in get_args(kind):
            return None
        kinds = [one for one in get_args(kind) if is_dataclass(one)]
        if kinds:  # of several, the one that has these keys
            keys = set(value) if isinstance(value, dict) else set()
            fits = [one for one in kinds if keys <= get_type_hints(one).keys()]
            return _value((fits or kinds)[0], value, where)
        words = [word for one in get_args(kind) if get_origin(one) is Literal for word in get_args(one)]
        plain = next(one for one in get_args(kind) if get_origin(one) is not Literal)
        if words and type(value) is not plain:
            require(value in words, f"{where} must be {', '.join(words)} or {plain.__name__}, not {value!r}")
            return value
        return _value(plain, value, where)
    if get_origin(kind) is dict:
        require(isinstance(value, dict), f"{where} must be an object, not {value!r}")
        return value
    if get_origin(kind) is tuple:
        want = get_args(kind)
        if want[-1] is ...:  # any number of them
            require(isinstance(value, list), f"{where} must be a list, not {value!r}")
            return tuple(_value(want[0], item, where) for item in value)
        require(isinstance(value, list) and len(value) == len(want), f"{where} must be {len(want)} numbers")
        return tuple(_value(one, item, where) for one, item in zip(want, value, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    require(type(value) is kind, f"{where} must be of type {kind.__name__}, not {value!r}")
    return value


def preset(name: str) -> TrainConfig:
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; {nearest(name, PRESETS)}")
    return PRESETS[name]


def recipe_defaults(config: TrainConfig, recipe: Recipe) -> TrainConfig:
    """The same with the defaults that suit a recipe; docs/finetuning.md has what they were chosen by."""
    made = replace(config, **RECIPES.get(recipe, {}), recipe=recipe)
    if not config.vision and not config.text:
        return made
    if not (config.vision and config.text):  # one tower is new, and learns as slowly as new ones do
        slow: dict[str, Any] = {"batch": 256, "lr": 1e-3, "epochs": 10, "weight_decay": 0.1, "eval_every": 1}
        made = replace(made, **slow)
    return replace(made, model=replace(made.model, embed=192, head="mlp"))


Shape = tuple[int, int, int, int, int]


def _clip(vision: Shape, text: Shape, embed: int, **changes: Any) -> ModelConfig:
    """vision: (image_size, patch, width, depth, heads); text: (vocab, length, width, depth, heads)."""
    return ModelConfig(VisionConfig(*vision), TextConfig(*text), embed, **changes)


def _light(model: ModelConfig) -> ModelConfig:
    """Convolutions first, and no class token; docs/log.md has what the first is worth."""
    assert isinstance(model.vision, VisionConfig)
    return replace(model, vision=replace(model.vision, stem="conv", pool="mean"))


def _preset(name: str, model: ModelConfig, **changes: Any) -> TrainConfig:
    return TrainConfig(model=model, preset=name, **changes)


_OPENAI = (49408, 77)

# nano, tiny and small are ours, sized for hundreds to thousands of pairs a second on a laptop; seed is the
# documents' model and run; base, large and 1b have the shapes of OpenAI's ViT-B/32 and ViT-L/14 and of
# OpenCLIP's ViT-H/14, so that known weights fit; medium stands between for the scaling study.
PRESETS: dict[str, TrainConfig] = {
    config.preset: config
    for config in [
        _preset(
            "nano",
            _light(_clip((64, 16, 128, 4, 2), (1024, 32, 128, 2, 2), 128)),
            optimizer="muon",  # by far the largest gain that docs/log.md has
            lr=3e-3,
            epochs=3,
        ),
        _preset("tiny", _light(_clip((112, 16, 256, 6, 4), (4096, 48, 256, 4, 4), 256))),
        _preset("small", _clip((112, 16, 384, 12, 6), (16384, 64, 384, 6, 6), 384), batch=128, lr=5e-4),
        _preset(
            "seed",
            _clip((224, 16, 768, 12, 12), (33, 77, 512, 6, 8), 512),
            data="synthetic:216",
            held_out=24,
            tokenizer="char",
            epochs=15,
            batch=12,
            lr=3e-4,
            warmup=0.0,
            weight_decay=0.01,
            beta2=0.999,
            log_every=1,
            save_epochs=5,
        ),
        _preset(
            "base",
            _clip((224, 32, 768, 12, 12), (*_OPENAI, 512, 12, 8), 512, activation="quick_gelu"),
            batch=32,
            lr=5e-4,
        ),
        _preset("medium", _clip((224, 16, 896, 14, 14), (*_OPENAI, 640, 12, 10), 640), batch=16, lr=4e-4),
        _preset(
            "large",
            _clip((224, 14, 1024, 24, 16), (*_OPENAI, 768, 12, 12), 768, activation="quick_gelu"),
            batch=8,
            lr=4e-4,
        ),
        _preset("1b", _clip((224, 14, 1280, 32, 16), (*_OPENAI, 1024, 24, 16), 1024), batch=4, lr=3e-4),
    ]
}
