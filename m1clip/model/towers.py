"""The two transformer towers behind one face: a batch in, one feature vector per item out.

Shapes: B items, L tokens, D width, H heads, C colours, S pixels a side.
"""

import itertools

import torch
from torch import Tensor, nn

from m1clip import devices
from m1clip.config import TextConfig, VisionConfig


class QuickGELU(nn.Module):
    """OpenAI's cheaper GELU; their weights give wrong features with the exact one."""

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
        B, L, D = x_BLD.shape
        q_BHLd, k_BHLd, v_BHLd = self.qkv(x_BLD).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y_BHLd = devices.attention(q_BHLd, k_BHLd, v_BHLd, self.causal)
        y_BLD: Tensor = self.out(y_BHLd.transpose(1, 2).reshape(B, L, D))
        return y_BLD


class MLP(nn.Module):
    def __init__(self, width: int, activation: str):
        super().__init__()
        self.wide = nn.Linear(width, 4 * width)
        self.activation = ACTIVATIONS[activation]()
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        y_BLD: Tensor = self.narrow(self.activation(self.wide(x_BLD)))
        return y_BLD


class Block(nn.Module):
    """Pre-norm: the residual stream itself is never normalised, so deep towers train."""

    def __init__(self, width: int, heads: int, causal: bool, activation: str):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, activation)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attn(self.ln_1(x_BLD))
        y_BLD: Tensor = x_BLD + self.mlp(self.ln_2(x_BLD))
        return y_BLD


def blocks(config: VisionConfig | TextConfig, causal: bool, activation: str) -> nn.Sequential:
    return nn.Sequential(
        *(Block(config.width, config.heads, causal, activation) for _ in range(config.depth))
    )


def patch_stem(config: VisionConfig) -> nn.Conv2d:
    """CLIP's: each patch on its own, one matrix for all."""
    return nn.Conv2d(3, config.width, config.patch, stride=config.patch, bias=False)


def conv_stem(config: VisionConfig) -> nn.Sequential:
    """Halves the picture until a pixel is a patch: edges and shapes are found before attention begins."""
    halvings = config.patch.bit_length() - 1
    channels = [3, *(config.width >> (halvings - 1 - i) for i in range(halvings))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Vision(nn.Module):
    """A ViT: every patch sees every other; the class token (or the mean) is the picture."""

    def __init__(self, config: VisionConfig, activation: str):
        super().__init__()
        self.config = config
        self.patch = patch_stem(config) if config.stem == "patch" else conv_stem(config)
        self.class_token = nn.Parameter(torch.empty(config.width)) if config.pool == "class" else None
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.ln_pre = nn.LayerNorm(config.width)
        self.blocks = blocks(config, causal=False, activation=activation)
        self.ln_post = nn.LayerNorm(config.width)

    def forward(self, pixels_BCSS: Tensor) -> Tensor:
        x_BLD = self.patch(pixels_BCSS).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            x_BLD = torch.cat([self.class_token.expand(len(x_BLD), 1, -1), x_BLD], dim=1)
        x_BLD = self.blocks(self.ln_pre(x_BLD + self.position))
        x_BD = x_BLD.mean(1) if self.class_token is None else x_BLD[:, 0]
        y_BD: Tensor = self.ln_post(x_BD)
        return y_BD


class Text(nn.Module):
    """A causal transformer: the end-of-text token has seen the whole caption, and only the caption."""

    def __init__(self, config: TextConfig, activation: str, end_id: int):
        super().__init__()
        self.config, self.end_id = config, end_id
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Parameter(torch.empty(config.length, config.width))
        self.blocks = blocks(config, causal=True, activation=activation)
        self.ln_post = nn.LayerNorm(config.width)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.token(tokens_BL) + self.position[: tokens_BL.shape[1]]
        x_BLD = self.blocks(x_BLD)
        # Padding follows the end token, and causality hides it: no mask is needed.
        end_B = (tokens_BL == self.end_id).int().argmax(dim=1)
        x_BD = x_BLD[torch.arange(len(end_B), device=end_B.device), end_B]
        y_BD: Tensor = self.ln_post(x_BD)
        return y_BD


def initialise(tower: Vision | Text) -> None:
    """CLIP's own: residual branches start small, in proportion to the depth of the stream."""
    width, depth = tower.config.width, tower.config.depth
    for block in tower.blocks:
        assert isinstance(block, Block)
        small = (2 * width * depth) ** -0.5
        for layer, std in (
            (block.attn.qkv, width**-0.5),
            (block.attn.out, small),
            (block.mlp.wide, (2 * width) ** -0.5),
            (block.mlp.narrow, small),
        ):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    if isinstance(tower, Vision):
        for stage in tower.patch.modules():
            if isinstance(stage, nn.Conv2d):
                nn.init.normal_(stage.weight, std=stage.weight[0].numel() ** -0.5)
        nn.init.normal_(tower.position, std=width**-0.5)
        if tower.class_token is not None:
            nn.init.normal_(tower.class_token, std=width**-0.5)
    else:
        nn.init.normal_(tower.token.weight, std=0.02)
        nn.init.normal_(tower.position, std=0.01)
