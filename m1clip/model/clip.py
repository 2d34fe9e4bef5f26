"""CLIP: two towers, two projections, one temperature; saved as a folder that anyone can load.

Shapes: B items, L tokens, E embedding, C colors, S pixels a side.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from m1clip import config as configs
from m1clip.config import HFConfig, ModelConfig, TimmConfig
from m1clip.files import atomic_folder
from m1clip.images import center_crop
from m1clip.model import lora
from m1clip.model.fit import check_weights
from m1clip.model.heads import Head
from m1clip.model.pretrained import HFText, TimmVision
from m1clip.model.safe_load import save_tensors
from m1clip.model.tokenizer import HFTokenizer, Tokenizer
from m1clip.model.towers import BagOfWords, Text, Vision, initialize

MAX_SCALE = math.log(100)
START = {"softmax": (math.log(1 / 0.07), None), "sigmoid": (math.log(10), -10.0)}
END_ID = 2  # where no tokenizer says otherwise: that of our own
FILES = ("config.json", "model.safetensors", "tokenizer.json")


class CLIP(nn.Module):
    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None = None):
        super().__init__()
        if tokenizer is not None and len(tokenizer) > config.text.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer)} tokens, the model's table {config.text.vocab_size}"
            )
        self.config, self.tokenizer = config, tokenizer
        self.vision = vision_tower(config)
        self.text = text_tower(config, tokenizer)
        self.vision_projection = projection(config, config.vision.width, salt=2001)
        self.text_projection = projection(config, config.text.width, salt=2003)
        scale, bias = START[config.loss]
        self.logit_scale = nn.Parameter(torch.tensor(scale))
        self.logit_bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        self.initialize()

    def initialize(self) -> None:
        for tower in (self.vision, self.text):
            if isinstance(tower, Vision | Text | BagOfWords):
                initialize(tower)
        for head in (self.vision_projection, self.text_projection):
            if isinstance(head, Head):
                head.initialize()
            else:
                nn.init.normal_(head.weight, std=head.in_features**-0.5)

    def forward(self, pixels_BCHW: Tensor, tokens_BL: Tensor) -> Tensor:
        return self.logits(self.embed_images(pixels_BCHW), self.embed_tokens(tokens_BL))

    def place(self, vision: torch.device, text: torch.device) -> "CLIP":
        """Each tower with its projection on its device; what both need is with the images."""
        self.to(vision)
        self.text.to(text)
        self.text_projection.to(text)
        return self

    @property
    def places(self) -> tuple[torch.device, torch.device]:
        """Where images are embedded, and where captions are."""
        return self.logit_scale.device, next(self.text_projection.parameters()).device

    def logits(self, image_BE: Tensor, text_BE: Tensor) -> Tensor:
        """Every image (rows) with every caption (columns): what the losses take."""
        logit_BB = self.logit_scale.exp() * image_BE @ text_BE.T
        return logit_BB if self.logit_bias is None else logit_BB + self.logit_bias

    def set_regularization(
        self,
        dropout: float = 0.0,
        patch_dropout: float = 0.0,
        word_dropout: float = 0.0,
        grad_checkpointing: bool = False,
        head_dropout: float = 0.0,
    ) -> None:
        """How training treats the towers; noise falls only where a step passes its rows' keys."""
        self.vision.patch_dropout = patch_dropout
        if isinstance(self.text, BagOfWords):
            self.text.word_dropout = word_dropout
        for tower in (self.vision, self.text):
            tower.dropout, tower.grad_checkpointing = dropout, grad_checkpointing
        for head in (self.vision_projection, self.text_projection):
            if isinstance(head, Head):
                head.dropout = head_dropout

    def embed_images(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of normalized pixels."""
        return met(self.vision_projection, self.vision(pixels_BCHW, key_B), key_B)

    def embed_tokens(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of token ids."""
        return met(self.text_projection, self.text(tokens_BL, key_B), key_B)

    def embed_features(self, side: str, x_BD: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Unit vectors of what the tower of a side, vision or text, made of a batch before."""
        return met(self.vision_projection if side == "vision" else self.text_projection, x_BD, key_B)

    @torch.no_grad()
    def encode_image(self, images: Image.Image | Sequence[Image.Image]) -> Tensor:
        """Unit vectors of PIL images of any size; one image gives one row."""
        images = [images] if isinstance(images, Image.Image) else images
        images_BHWC = np.stack([center_crop(image, self.config.vision.image_size) for image in images])
        return self.embed_images(self.normalize(torch.from_numpy(images_BHWC).to(self.places[0])))

    @torch.no_grad()
    def encode_text(self, texts: str | Sequence[str]) -> Tensor:
        """Unit vectors of strings; one string gives one row."""
        return self.embed_tokens(self.tokenize(texts).to(self.places[1]))

    def tokenize(self, texts: str | Sequence[str], rows: Sequence[str] | None = None) -> Tensor:
        """Token ids; `rows` says where each text came from, for the message when one is empty."""
        if self.tokenizer is None:
            raise ValueError("this model has no tokenizer; load one that was saved, or pass one to CLIP(…)")
        return self.tokenizer(
            [texts] if isinstance(texts, str) else texts, self.config.text.context_length, rows
        )

    def normalize(self, images_BHWC: Tensor) -> Tensor:
        """Pixels as the vision tower wants them, from bytes, on the device where the bytes are."""
        vision, device = self.config.vision, images_BHWC.device
        return (images_BHWC.permute(0, 3, 1, 2).float() - of_255(vision.mean, device)) / of_255(
            vision.std, device
        )

    def clamp_logit_scale(self) -> None:
        """Keep the temperature above 0.01, as CLIP does: beyond it, training becomes unstable."""
        self.logit_scale.data.clamp_(max=MAX_SCALE)

    def save(self, folder: str | os.PathLike[str], apart: bool = False) -> None:
        """Make or replace the folder, all at once: config.json, model.safetensors, tokenizer.json.

        Adapters are merged into the weights, or with `apart` kept in a file of their own.
        """
        with atomic_folder(Path(folder)) as aside:
            self.write(aside, apart)

    def write(self, folder: Path, apart: bool = False) -> None:
        if self.tokenizer is None:
            raise ValueError("a model is saved with its tokenizer; this one has none")
        (folder / "config.json").write_text(configs.to_json(self.config))
        held = lora.write_apart(self, folder) if apart else lora.merged_state_dict(self)
        weights = {name: weight.cpu().contiguous() for name, weight in held.items()}
        save_tensors(folder / "model.safetensors", weights)
        self.tokenizer.save(folder / "tokenizer.json")


def vision_tower(config: ModelConfig) -> Vision | TimmVision:
    if isinstance(config.vision, TimmConfig):
        return TimmVision(config.vision)
    return Vision(config.vision, config.activation)


def text_tower(config: ModelConfig, tokenizer: Tokenizer | None) -> Text | BagOfWords | HFText:
    if isinstance(config.text, HFConfig):
        return HFText(config.text)
    kind = Text if config.text.encoder == "transformer" else BagOfWords
    return kind(config.text, config.activation, END_ID if tokenizer is None else tokenizer.end_id)


def projection(config: ModelConfig, width: int, salt: int) -> Head | nn.Linear:
    if config.head == "linear":
        return nn.Linear(width, config.embed_dim, bias=False)
    return Head(width, config.embed_dim, config.head_hidden if config.head == "mlp" else 0, salt)


def met(head: Head | nn.Linear, x_BD: Tensor, key_B: Tensor | None) -> Tensor:
    """Features in the shared space, as unit vectors."""
    return F.normalize(head(x_BD, key_B) if isinstance(head, Head) else head(x_BD), dim=-1)


@lru_cache
def of_255(colors: tuple[float, float, float], device: torch.device) -> Tensor:
    """Color constants in units of bytes, kept on the device: sending them anew would make a GPU wait."""
    return 255 * torch.tensor(colors, device=device).view(3, 1, 1)


def load(folder: str | os.PathLike[str]) -> CLIP:
    """A model from its folder (or from a run's), ready to encode images and strings."""
    path = Path(folder)
    if not (path / "model.safetensors").exists():  # a run: its model, or the last checkpoint before it
        path = next((path / name for name in ("model", "last") if (path / name).is_dir()), path)
    for name in FILES:
        if not (path / name).is_file():
            raise FileNotFoundError(f"no {name} in {path}; a model is a folder of {', '.join(FILES)}")
    config = configs.from_json(ModelConfig, path / "config.json")
    tokenizer = read_tokenizer(config, path / "tokenizer.json")
    with torch.device("meta") if config.is_native else nullcontext():  # theirs hold more than weights
        model = CLIP(config, tokenizer)
    weights = read_weights(path / "model.safetensors", model.state_dict())
    if (path / lora.FILES[0]).is_file():
        lora.merge(path, weights)
    model.load_state_dict(weights, assign=True)
    return model.eval()


def read_tokenizer(config: ModelConfig, path: Path) -> Tokenizer:
    if isinstance(config.text, HFConfig):
        return HFTokenizer.load_for(path, int(config.text.hf.get("pad_token_id") or 0))
    return Tokenizer.load(path)


def read_weights(path: Path, want: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors, once every name and shape is known to be the model's."""
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None
    check_weights(path, found, want)
    return found
