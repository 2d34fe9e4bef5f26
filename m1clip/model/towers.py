"""CLIP's encoders: a vision transformer, and a causal text transformer or a bag of words.

The plain equations; `m1clip.model.fast` computes the same with less work and memory.
Shapes: B items, L tokens, D width, X = 3 D, H heads, d width of a head, C colors, H W pixels of an image.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m1clip import devices
from m1clip.config import TextConfig, VisionConfig
from m1clip.model.rng import drop_tokens, uniform


class QuickGELU(nn.Module):
    """OpenAI's approximation of GELU; their weights give wrong features with the exact one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "quick_gelu": QuickGELU}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.out(self.attend(self.qkv(x_BLD)))

    def attend(self, qkv_BLX: Tensor) -> Tensor:
        B, L, _ = qkv_BLX.shape
        q_BHLd, k_BHLd, v_BHLd = qkv_BLX.view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return devices.attention(q_BHLd, k_BHLd, v_BHLd, self.causal).transpose(1, 2).flatten(2)


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str):
        super().__init__()
        self.wide = nn.Linear(width, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.narrow = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.activation(self.wide(x)))


class Block(nn.Module):
    """A pre-norm transformer block; without attention, for one vector per item, if `causal` is None."""

    def __init__(self, config: VisionConfig | TextConfig, activation: str, causal: bool | None):
        super().__init__()
        if causal is not None:
            self.ln_1 = nn.LayerNorm(config.width)
            self.attn = Attention(config.width, config.heads, causal)
        self.has_attention = causal is not None
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, config.mlp_width or 4 * config.width, activation)

    def forward(self, x: Tensor, token_B: Tensor | None = None) -> Tensor:
        """With `token_B`, only the output at that token of each item (B, D)."""
        if self.has_attention:
            x = x + self.attn(self.ln_1(x))
        x = x if token_B is None else select_tokens(x, token_B)
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    """Blocks and a final norm. Patches and words are dropped only where row keys are passed: in training."""

    def __init__(self, config: VisionConfig | TextConfig, activation: str, causal: bool | None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config, activation, causal) for _ in range(config.layers))
        self.ln_post = nn.LayerNorm(config.width)
        self.config, self.grad_checkpointing = config, False

    def run_block(self, block: nn.Module, *inputs: Tensor | None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            # No random state to restore: what is dropped is a function of the row keys.
            return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
        return block(*inputs)

    def run_blocks(self, x: Tensor, token_B: Tensor | None = None) -> Tensor:
        """The last block's output; with `token_B`, of one token per item (B, D)."""
        *blocks, last = self.blocks
        for block in blocks:
            x = self.run_block(block, x)
        return self.run_block(last, x, token_B)

    def layers_from_top(self, parameter: str) -> int:
        """Layers from a parameter to the output, its own included; 0 for the final norm."""
        first, _, rest = parameter.partition(".")
        if first == "ln_post":
            return 0
        return len(self.blocks) - (int(rest.split(".")[0]) if first == "blocks" else -1)


def select_tokens(x_BLD: Tensor, token_B: Tensor) -> Tensor:
    return x_BLD[torch.arange(token_B.shape[0], device=token_B.device), token_B]


class VisionTransformer(Tower):
    """Every patch attends to every other; the image feature is the class token or the mean of the patches."""

    def __init__(self, config: VisionConfig, activation: str):
        super().__init__(config, activation, causal=False)
        self.patch, self.patch_dropout = make_stem(config), 0.0
        self.class_token = nn.Parameter(torch.empty(config.width)) if config.pool == "class" else None
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.ln_pre = nn.LayerNorm(config.width)

    def forward(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        first = 0 if self.class_token is None else 1
        x_BLD = self.patch(pixels_BCHW).flatten(2).transpose(1, 2) + self.position[first:]
        if self.patch_dropout and key_B is not None:
            x_BLD = drop_tokens(x_BLD, self.patch_dropout, key_B, salt=0)
        if self.class_token is None:
            return self.ln_post(self.run_blocks(self.ln_pre(x_BLD)).mean(1))
        B = x_BLD.shape[0]  # not len(), which torch.export would take for a constant
        class_B1D = (self.class_token + self.position[:1]).expand(B, 1, -1)
        x_BLD = self.ln_pre(torch.cat([class_B1D, x_BLD], dim=1))
        return self.ln_post(self.run_blocks(x_BLD, x_BLD.new_zeros(B, dtype=torch.long)))


def make_stem(config: VisionConfig) -> nn.Conv2d | nn.Sequential:
    """One matrix for each patch; or stride-2 convolutions until one pixel is left of each patch."""
    if config.stem == "patch":
        return nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size, bias=False)
    layers, channels = list[nn.Module](), 3
    for i in reversed(range(config.patch_size.bit_length() - 1)):
        layers += [nn.Conv2d(channels, config.width >> i, 3, stride=2, padding=1), nn.GELU()]
        channels = config.width >> i
    return nn.Sequential(*layers[:-1])


class TextTransformer(Tower):
    """A causal transformer: the text feature is the output at the end token. Padding follows it, unseen."""

    def __init__(self, config: TextConfig, activation: str, end_id: int):
        super().__init__(config, activation, causal=True)
        self.end_id = end_id
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Parameter(torch.empty(config.context_length, config.width))

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        x_BLD = self.token(tokens_BL) + self.position[: tokens_BL.shape[1]]
        end_B = (tokens_BL == self.end_id).int().argmax(dim=1)
        return self.ln_post(self.run_blocks(x_BLD, end_B))


class BagOfWords(Tower):
    """The mean of the token embeddings and MLP blocks: no word order, but learns faster from few pairs."""

    def __init__(self, config: TextConfig, activation: str, end_id: int):
        super().__init__(config, activation, causal=None)
        self.end_id, self.word_dropout = end_id, 0.0
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.ln_pre = nn.LayerNorm(config.width)

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        is_after_start_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device) > 0
        word_BL = ((tokens_BL == self.end_id).cumsum(1) == 0) & is_after_start_L
        if self.word_dropout and key_B is not None:
            kept_BL = word_BL & (uniform(key_B, 1000, word_BL.shape[1]) >= self.word_dropout)
            # Keep at least one word: the gradient of a normalized zero vector is not finite.
            word_BL = torch.where(kept_BL.any(1, keepdim=True), kept_BL, word_BL)
        weight_BL1 = (word_BL / word_BL.sum(1, keepdim=True).clamp(min=1))[..., None]
        x_BD = self.ln_pre((self.token(tokens_BL) * weight_BL1).sum(1))
        return self.ln_post(self.run_blocks(x_BD))


def init_tower(tower: Tower) -> None:
    """CLIP's initialization: the deeper the tower, the smaller the residual branches start."""
    width, residual_std = tower.config.width, (2 * tower.config.width * tower.config.layers) ** -0.5
    std = {"qkv": width**-0.5, "wide": (2 * width) ** -0.5, "out": residual_std, "narrow": residual_std}
    for name, layer in tower.named_modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std[name.rpartition(".")[2]])
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
        elif isinstance(layer, nn.Embedding):
            nn.init.normal_(layer.weight, std=0.02)
    if isinstance(tower, VisionTransformer):
        nn.init.normal_(tower.position, std=width**-0.5)
        if tower.class_token is not None:
            nn.init.normal_(tower.class_token, std=width**-0.5)
    if isinstance(tower, TextTransformer):
        nn.init.normal_(tower.position, std=0.01)
