"""CLIP: two towers, two projection heads, one temperature; saved as a folder of safetensors and JSON.

Shapes: B items, L tokens, D features, E embedding, C colors, H height, W width, N samples.
"""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.config import (
    HFConfig,
    LibraryTextConfig,
    LibraryVisionConfig,
    ModelConfig,
    Target,
    TextConfig,
    TimmConfig,
    TrainConfig,
    VisionConfig,
    check_model,
    from_json,
    to_json,
)
from m1clip.errors import untrusted_input
from m1clip.files import atomic_folder
from m1clip.images import Pixels
from m1clip.model.fast import make_fast
from m1clip.model.inputs import ImageInput, encode_images, encode_texts
from m1clip.model.lora import merged_state_dict
from m1clip.model.pretrained import HFText, PretrainedTower, TimmVision
from m1clip.model.rng import dropout_mask
from m1clip.model.safe_load import load_checked, on_meta, save_tensors
from m1clip.model.tokenizer import Tokenizer, load_tokenizer
from m1clip.model.towers import BagOfWords, TextTransformer, Tower, VisionTransformer, init_tower

if TYPE_CHECKING:
    from m1clip.export.export import Exported
    from m1clip.model.classify import Classification

# logit_scale and logit_bias as CLIP and SigLIP start them
INITIAL_LOGITS = {"softmax": (math.log(1 / 0.07), None), "sigmoid": (math.log(10), -10.0)}
END_ID = 2  # of a model without a tokenizer: the end token of our own ones
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")


class ProjectionHead(nn.Module):
    """Learns from few pairs: standardized features times a matrix; with `hidden`, a residual MLP on the result."""

    def __init__(self, width: int, embed_dim: int, hidden: int, salt: int):
        super().__init__()
        self.mean, self.std = nn.Buffer(torch.zeros(width)), nn.Buffer(torch.ones(width))
        self.linear = nn.Linear(width, embed_dim)
        # The MLP starts at zero, and it is cheap because it works on the embedding, not on the wider features.
        self.wide = nn.Linear(embed_dim, hidden) if hidden else None
        self.narrow = nn.Linear(hidden, embed_dim) if hidden else None
        self.salt, self.dropout = salt, 0.0

    def forward(self, x_BD: Tensor, key_B: Tensor | None = None) -> Tensor:
        x_BD = x_BD - self.mean
        if self.dropout and key_B is not None:
            mask_BD = dropout_mask(x_BD.shape[1], self.dropout, key_B, self.salt)
            # In place where autograd allows it: the features of all layers are a large tensor.
            x_BD = x_BD * mask_BD if x_BD.requires_grad else x_BD.mul_(mask_BD)
        y_BE = F.linear(x_BD, self.linear.weight / self.std, self.linear.bias)
        if self.wide is not None and self.narrow is not None:
            hidden_BH = F.gelu(self.wide(y_BE))
            if self.dropout and key_B is not None:
                hidden_BH = hidden_BH * dropout_mask(hidden_BH.shape[1], self.dropout, key_B, self.salt + 1)
            y_BE = y_BE + self.narrow(hidden_BH)
        return y_BE

    def initialize(self) -> None:
        for layer in (self.linear, self.wide):
            if layer is not None:
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)
        if self.narrow is not None:
            nn.init.zeros_(self.narrow.weight)
            nn.init.zeros_(self.narrow.bias)

    @torch.no_grad()
    def calibrate(self, features_ND: Tensor) -> None:
        """Set the mean and standard deviation that features are standardized by."""
        std_D, mean_D = torch.std_mean(features_ND.float(), dim=0)
        self.mean.copy_(mean_D)
        self.std.copy_(std_D.clamp(min=1e-3 * float(std_D.mean())))  # constant features must not blow up


class CLIP(nn.Module):
    vision: VisionTransformer | PretrainedTower
    text: TextTransformer | BagOfWords | PretrainedTower
    folder: Path | None = None  # where it was loaded from

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None):
        super().__init__()
        check_model(config)
        if tokenizer is not None and len(tokenizer) > config.text.vocab_size:
            raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, but vocab_size is {config.text.vocab_size}")
        if tokenizer is not None and tokenizer.highest_id >= config.text.vocab_size:
            highest = f"the tokenizer has a token with id {tokenizer.highest_id:,}"
            raise ValueError(f"{highest}, but vocab_size is {config.text.vocab_size:,}")
        self.config, self.tokenizer = config, tokenizer
        vision, text, act = config.vision, config.text, config.activation
        self.vision = make_vision(vision, act)
        self.text = make_text(text, act, getattr(tokenizer, "end_id", END_ID))
        self.vision_projection = make_head(config, vision.width, salt=2001)
        self.text_projection = make_head(config, text.width, salt=2003)
        # In units of bytes. They are never on the meta device, because no file has them.
        colors = (255 * torch.tensor(color, device="cpu").view(3, 1, 1) for color in (vision.mean, vision.std))
        self.mean_C11, self.std_C11 = (nn.Buffer(color, persistent=False) for color in colors)
        scale, bias = INITIAL_LOGITS[config.loss]
        self.logit_scale = nn.Parameter(torch.tensor(scale))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        for tower in (self.vision, self.text):
            if isinstance(tower, Tower):
                init_tower(make_fast(tower))
        for head, tower_config in ((self.vision_projection, vision), (self.text_projection, text)):
            if isinstance(head, ProjectionHead):
                head.initialize()
            elif isinstance(tower_config, LibraryVisionConfig | LibraryTextConfig):
                nn.init.eye_(head.weight)
            else:
                nn.init.normal_(head.weight, std=head.in_features**-0.5)

    def forward(self, pixels_BCHW: Tensor, tokens_BL: Tensor) -> Tensor:
        return self.logits(self.embed_images(pixels_BCHW), self.embed_tokens(tokens_BL))

    def logits(self, image_BE: Tensor, text_BE: Tensor) -> Tensor:
        """Images in rows, captions in columns."""
        logit_BB = self.logit_scale.exp() * image_BE @ text_BE.T
        return logit_BB if self.logit_bias is None else logit_BB + self.logit_bias

    def to_devices(self, vision: torch.device, text: torch.device) -> "CLIP":
        """Move each tower with its head; the logit scale and bias are on the vision tower's device."""
        self.to(vision)
        self.text.to(text)
        self.text_projection.to(text)
        return self

    @property
    def devices(self) -> tuple[torch.device, torch.device]:
        """Of the vision and of the text tower."""
        return self.logit_scale.device, next(self.text_projection.parameters()).device

    def set_regularization(self, config: TrainConfig) -> None:
        """Dropout rates and gradient checkpointing. Dropout needs row keys, which only training steps pass."""
        self.vision.patch_dropout = config.patch_dropout
        if isinstance(self.text, BagOfWords):
            self.text.word_dropout = config.word_dropout
        for tower in (self.vision, self.text):
            tower.grad_checkpointing = config.grad_checkpointing
        for head in (self.vision_projection, self.text_projection):
            if isinstance(head, ProjectionHead):
                head.dropout = config.head_dropout

    def embed_images(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of normalized pixels."""
        return self.embed_features("vision", self.vision(pixels_BCHW, key_B), key_B)

    def embed_tokens(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of token ids."""
        return self.embed_features("text", self.text(tokens_BL, key_B), key_B)

    def embed_features(self, tower: str, features_BD: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of the features of a tower, vision or text."""
        head = self.vision_projection if tower == "vision" else self.text_projection
        keys = (key_B,) if isinstance(head, ProjectionHead) else ()
        return F.normalize(head(features_BD, *keys), dim=-1)

    @torch.no_grad()
    def embed_pixels(self, images_BHWC: Pixels) -> Tensor:
        """Unit vectors of preprocessed images, on the device of the vision tower."""
        return self.embed_images(self.normalize(torch.from_numpy(images_BHWC).to(self.devices[0])))

    def encode_image(
        self, images: ImageInput | Iterable[ImageInput], batch_size: int = 32, progress: bool = False
    ) -> Tensor:
        """Unit vectors (B, E) of images of any size; one image gives one row.

        An image is a path, the bytes of a file, a PIL image, a NumPy array (H, W, 3) or a tensor (3, H, W), where
        pixels are uint8 or float from 0 to 1; gray and transparent images are fine. Many are any iterable of these,
        or one array with a batch axis. They are read lazily, at most two batches at a time.
        """
        empty_0E = next(self.vision_projection.parameters()).new_empty(0, self.config.embed_dim)
        parts = encode_images(images, self.embed_pixels, self.config.vision.preprocess, batch_size, progress)
        return torch.cat([empty_0E, *parts])

    @torch.no_grad()
    def encode_text(self, texts: str | Iterable[str], batch_size: int = 256, progress: bool = False) -> Tensor:
        """Unit vectors (B, E) of a string or of any iterable of strings; one string gives one row.

        Of a list, equal texts are encoded once and texts of similar length together; an iterator is read lazily.
        """

        def encode(batch: list[str]) -> Tensor:
            return self.embed_tokens(self.tokenize(batch).to(self.devices[1]))

        empty_0E = next(self.text_projection.parameters()).new_empty(0, self.config.embed_dim)
        parts, rows = encode_texts(texts, encode, batch_size, progress)
        return torch.cat([empty_0E, *parts])[rows]

    def similarity(self, images: ImageInput | Iterable[ImageInput], texts: str | Iterable[str]) -> Tensor:
        """Cosine similarities (B, T) of images, in rows, and texts."""
        return self.encode_image(images).cpu() @ self.encode_text(texts).cpu().T

    def classify(
        self,
        images: ImageInput | Iterable[ImageInput],
        labels: str | Sequence[str] | Mapping[str, Sequence[str]],
        templates: str | Sequence[str] = (),
        top_k: int = 5,
        batch_size: int = 32,
    ) -> "list[Classification]":
        """Zero-shot classification of images (as in encode_image): the best labels with their probabilities.

        `labels` are names ("cat,dog" or a list), or a dict with descriptions of each. `templates` are as in
        `m1clip classify --template`: texts with {} for the label, files, or "openai"; by default a small set.
        """
        from m1clip.model.classify import classify

        return classify(self, images, labels, templates, top_k, batch_size)

    @property
    def scale_and_bias(self) -> tuple[float, float | None]:
        """The factor of cosine similarities in the logits, and what a sigmoid model adds to them."""
        return self.logit_scale.exp().item(), None if self.logit_bias is None else self.logit_bias.item()

    def tokenize(self, texts: str | Iterable[str]) -> Tensor:
        """Token ids (B, L)."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; pass one to CLIP(config, tokenizer)")
        texts = [texts] if isinstance(texts, str) else list(texts)
        return torch.from_numpy(self.tokenizer(texts, self.config.text.context_length))

    def normalize(self, images_BHWC: Tensor) -> Tensor:
        """Input of the vision tower from uint8 images."""
        return (images_BHWC.permute(0, 3, 1, 2).float() - self.mean_C11) / self.std_C11

    def clamp_logit_scale(self) -> None:
        """Keep the temperature at 0.01 or above, as CLIP does for stability."""
        self.logit_scale.data.clamp_(max=math.log(100))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write or replace a model folder atomically; LoRA adapters are merged into the weights."""
        with atomic_folder(Path(folder)) as partial:
            self.write(partial)

    def export(
        self,
        target: Target,
        folder: str | os.PathLike[str],
        *,
        int8: bool = False,
        data: str = "",
        val_size: int = 1000,
        max_loss: float = 0.5,
        precision: Literal["fp16", "fp32"] = "fp16",
        opset: int = 18,
        force: bool = False,
        overwrite: bool = False,
    ) -> "Exported":
        """Write a folder for another program, as `m1clip export --to TARGET` does, and return what was measured.

        Every file is loaded again and compared with the model on `data`, by default the validation images of its run.

        Raises:
            ExportFailed: a file does not compute what the model computes; nothing is left of it without `force`.
            ValueError: the target cannot use such a model.

        Example:
            m1clip.load("nano-1").export("onnx", "nano-onnx", int8=True)
        """
        from m1clip.export.export import Options, export_model
        from m1clip.export.verify import ExportFailed

        options = Options(int8, precision, opset, max_loss, force)
        settings: dict[str, Any] = {"data": data, "val_size": val_size, "overwrite": overwrite}
        (result,) = export_model(self, [target], Path(folder), options, **settings)
        if result.failed and not force:
            raise ExportFailed("; ".join(result.problems))
        return result

    def write(self, folder: Path) -> None:
        """Write the model's files into an existing folder."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer, so it cannot be saved")
        weights = {name: weight.cpu().contiguous() for name, weight in merged_state_dict(self).items()}
        (folder / "config.json").write_text(to_json(self.config))
        save_tensors(folder / "model.safetensors", weights)
        self.tokenizer.save(folder / "tokenizer.json")


def make_vision(config: VisionConfig | TimmConfig | LibraryVisionConfig, activation: str) -> Any:
    if isinstance(config, VisionConfig):
        return VisionTransformer(config, activation)
    if isinstance(config, TimmConfig):
        return TimmVision(config)
    from m1clip.model.library import LibraryVision

    return LibraryVision(config)


def make_text(config: TextConfig | HFConfig | LibraryTextConfig, activation: str, end_id: int) -> Any:
    if isinstance(config, TextConfig):
        encoder = TextTransformer if config.encoder == "transformer" else BagOfWords
        return encoder(config, activation, end_id)
    if isinstance(config, HFConfig):
        return HFText(config)
    from m1clip.model.library import LibraryText

    return LibraryText(config)


def make_head(config: ModelConfig, width: int, salt: int) -> ProjectionHead | nn.Linear:
    if config.head == "linear":
        return nn.Linear(width, config.embed_dim, bias=False)
    return ProjectionHead(width, config.embed_dim, config.head_hidden if config.head == "mlp" else 0, salt)


def load(folder: str | os.PathLike[str]) -> CLIP:
    """Load a model folder, or the model of a run folder, for inference."""
    path = Path(folder)
    if not (path / "model.safetensors").exists():  # a run: its final model, or its last checkpoint
        path = next((path / name for name in ("model", "last") if (path / name).is_dir()), path)
    for name in MODEL_FILES:
        if not (path / name).is_file():
            raise FileNotFoundError(f"no {name} in {path}; a model folder has {', '.join(MODEL_FILES)}")
    with untrusted_input(f"{path} cannot be loaded", path):
        return read_folder(path)


def read_folder(path: Path) -> CLIP:
    config = from_json(ModelConfig, path / "config.json")
    tokenizer = load_tokenizer(config, path / "tokenizer.json")
    # timm's and transformers' modules have buffers outside the state dict, which the meta device would lose.
    with on_meta() if config.is_native else nullcontext():
        model = CLIP(config, tokenizer)
    model.load_state_dict(load_checked(path / "model.safetensors", model.state_dict()), assign=True)
    model.folder = path
    return model.eval()
