"""The shape of a model: its towers, ours or the field's, and the space where they meet. Knows no torch."""

from dataclasses import dataclass
from typing import Any, Literal

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


@dataclass(frozen=True)
class VisionConfig:
    """Our vision transformer, which is also OpenAI's and OpenCLIP's."""

    image_size: int = 224
    """Pixels a side of the square picture the tower sees."""
    patch: int = 16
    """Pixels a side of one patch; a patch is one token."""
    width: int = 768
    """Features per token."""
    depth: int = 12
    """Transformer blocks."""
    heads: int = 12
    """Attention heads; width / heads is the size of one."""
    pool: Literal["class", "mean"] = "class"
    """What stands for the picture: a class token, or the mean of its patches."""
    stem: Literal["patch", "conv"] = "patch"
    """How pixels become tokens: one matrix per patch (CLIP), or a stack of small convolutions."""
    mean: tuple[float, float, float] = OPENAI_MEAN
    """Mean of each colour, subtracted from the pixels (OpenAI CLIP's by default)."""
    std: tuple[float, float, float] = OPENAI_STD
    """Spread of each colour, the pixels are divided by it."""
    mlp: int = 0
    """Features inside a block's MLP; 0 is four times the width."""

    def __post_init__(self) -> None:
        _check_tower("vision", self)
        require(
            0 < self.patch <= self.image_size and self.image_size % self.patch == 0,
            f"image_size {self.image_size} is not a multiple of patch {self.patch}",
        )
        require(
            self.stem == "patch" or (self.patch.bit_count() == 1 and self.patch > 1),
            f"a conv stem halves the picture, so patch must be 2, 4, 8, 16 …, not {self.patch}",
        )
        require(min(self.std) > 0, f"std must be positive, not {self.std}")

    @property
    def tokens(self) -> int:
        return int((self.image_size // self.patch) ** 2 + (self.pool == "class"))


@dataclass(frozen=True)
class TextConfig:
    """Our text transformer, which is also OpenAI's and OpenCLIP's."""

    vocab: int = 49408
    """Rows of the token table; a tokenizer may use fewer."""
    length: int = 77
    """Longest caption in tokens, start and end included; longer ones are cut."""
    width: int = 512
    """Features per token."""
    depth: int = 12
    """Transformer blocks."""
    heads: int = 8
    """Attention heads."""
    mlp: int = 0
    """Features inside a block's MLP; 0 is four times the width."""
    mix: Literal["attention", "bag"] = "attention"
    """How words meet: by attention, in their order (CLIP); or as a bag, by their mean: learned far sooner."""

    def __post_init__(self) -> None:
        _check_tower("text", self)
        require(self.vocab >= 4, f"vocab must be at least 4 (pad, start, end, one symbol), not {self.vocab}")
        require(self.length >= 3, f"length must be at least 3 (start, one symbol, end), not {self.length}")


def _check_tower(name: str, tower: VisionConfig | TextConfig) -> None:
    for key in ("width", "depth", "heads"):
        require(getattr(tower, key) > 0, f"{name} {key} must be positive, not {getattr(tower, key)}")
    require(
        tower.width % tower.heads == 0,
        f"{name} width {tower.width} does not divide into {tower.heads} heads",
    )
    require(tower.mlp >= 0, f"{name} mlp must be 0 or more, not {tower.mlp}")


@dataclass(frozen=True)
class TimmConfig:
    """A picture encoder of the timm library; everything here comes from it."""

    timm: str
    """Its name there."""
    image_size: int
    width: int
    """Features of a picture."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    stages: tuple[str, ...] = ()
    """Its parts whose mean outputs are features too, beside what it gives at the end."""

    def __post_init__(self) -> None:
        for key in ("image_size", "width"):
            require(getattr(self, key) > 0, f"{key} must be positive, not {getattr(self, key)}")
        require(min(self.std) > 0, f"std must be positive, not {self.std}")


@dataclass(frozen=True)
class HFConfig:
    """A text encoder of the transformers library, such as BERT; everything here comes from its folder."""

    hf: dict[str, Any]
    """Its own configuration."""
    vocab: int
    length: int
    """Longest caption in tokens, marks included; longer ones are cut."""
    width: int
    """Features of a caption."""
    pool: Literal["mean", "first", "all"] = "mean"
    """What stands for the caption: the mean of its tokens; the first of them; or the means of every layer,
    with the first and the largest of the last."""

    def __post_init__(self) -> None:
        require("model_type" in self.hf, "the encoder's own configuration has no model_type")
        require(self.length >= 3, f"length must be at least 3, not {self.length}")


@dataclass(frozen=True)
class ModelConfig:
    vision: VisionConfig | TimmConfig = VisionConfig()
    text: TextConfig | HFConfig = TextConfig()
    embed: int = 512
    """Size of the space where pictures and captions meet."""
    activation: Literal["gelu", "quick_gelu"] = "gelu"
    """quick_gelu is what OpenAI's own weights were trained with."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """softmax is CLIP's loss, sigmoid is SigLIP's (adds a learned bias)."""
    head: Literal["matrix", "linear", "mlp"] = "matrix"
    """How features become embeddings: CLIP's matrix; standardised, with a bias; or with a small MLP too."""
    inside: int = 256
    """Features inside the small MLP."""

    def __post_init__(self) -> None:
        require(self.embed > 0, f"embed must be positive, not {self.embed}")

    @property
    def is_ours(self) -> bool:
        """Whether both towers are our own transformers."""
        return isinstance(self.vision, VisionConfig) and isinstance(self.text, TextConfig)
