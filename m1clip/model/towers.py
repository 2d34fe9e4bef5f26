"""The two transformer towers behind one face: a batch in, one feature vector per item out.

Shapes: B items, L tokens, D width, H heads, C colors, S pixels a side.
"""

import itertools
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from m1clip import devices
from m1clip.config import TextConfig, VisionConfig
from m1clip.model.fast import linear_after
from m1clip.model.rng import dropout, some_of, uniform


class QuickGELU(nn.Module):
    """OpenAI's cheaper GELU; their weights give wrong features with the exact one."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


PARTS, LEAST = 4, 12
"""Parts of a batch of captions that are read apart, by their lengths; captions in one, at least."""
ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "quick_gelu": QuickGELU}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_BLD: Tensor, norm: nn.LayerNorm, only_B: Tensor | None) -> Tensor:
        if only_B is not None and type(self.qkv) is nn.Linear:  # adapters stand beside the whole of it
            one_BD: Tensor = self.out(self.of_one(norm(x_BLD), only_B))
            return one_BD[:, None]
        B, L, _ = x_BLD.shape
        qkv_BLX = linear_after(norm, self.qkv, x_BLD)
        q_BHLd, k_BHLd, v_BHLd = qkv_BLX.view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y_BHLd = devices.attention(q_BHLd, k_BHLd, v_BHLd, self.causal)
        y_BLD: Tensor = self.out(y_BHLd.transpose(1, 2).flatten(2))
        return y_BLD if only_B is None else one_of_each(y_BLD, only_B)

    def of_one(self, x_BLD: Tensor, only_B: Tensor) -> Tensor:
        """What one token of each item sees of all.

        The key and the value of a token are matrices times the token. With one query the matrices can be put
        to the other side: q · (K x) = (q K) · x, and the sum of p V x is V times the sum of p x. So no key
        and no value is made. The keys' bias would add the same to all scores, which softmax does not notice.
        """
        B, L, D = x_BLD.shape
        (q_DD, k_DD, v_DD), (q_D, _, v_D) = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        q_HBd = F.linear(one_of_each(x_BLD, only_B)[:, 0], q_DD, q_D).view(B, self.heads, -1).transpose(0, 1)
        wish_BHD = (q_HBd @ k_DD.view(self.heads, -1, D)).transpose(0, 1)
        score_BHL = wish_BHD * q_HBd.shape[-1] ** -0.5 @ x_BLD.mT
        if self.causal:
            later_BL = torch.arange(L, device=only_B.device) > only_B[:, None]
            score_BHL = score_BHL.masked_fill(later_BL[:, None], float("-inf"))
        seen_HBD = (score_BHL.softmax(-1) @ x_BLD).transpose(0, 1)
        y_HBd = seen_HBD @ v_DD.view(self.heads, -1, D).mT
        y_BD: Tensor = y_HBd.transpose(0, 1).flatten(1) + v_D
        return y_BD


def one_of_each(x_BLD: Tensor, only_B: Tensor) -> Tensor:
    """(B, 1, D): of each item, one token."""
    return x_BLD[torch.arange(len(only_B), device=only_B.device), only_B][:, None]


class MLP(nn.Module):
    def __init__(self, width: int, inside: int, activation: str):
        super().__init__()
        self.wide = nn.Linear(width, inside)
        self.activation = ACTIVATIONS[activation]()
        self.narrow = nn.Linear(inside, width)

    def forward(self, x_BLD: Tensor, norm: nn.LayerNorm) -> Tensor:
        return linear_after(self.activation, self.narrow, linear_after(norm, self.wide, x_BLD))


class Block(nn.Module):
    """Pre-norm: the residual stream itself is never normalized, so deep towers train.

    Of the last one a single token is asked for, where the tower's output is that token: it alone (B, 1, D)
    goes through. The others it looks at, as ever; nobody will look at what would become of them.
    """

    def __init__(self, width: int, heads: int, inside: int, causal: bool, activation: str, salt: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads, causal)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, inside, activation)
        self.salt = salt

    def forward(
        self, x_BLD: Tensor, part: float, key_B: Tensor | None, only_B: Tensor | None = None
    ) -> Tensor:
        seen_BLD = self.attn(x_BLD, self.ln_1, only_B)
        if only_B is not None:
            x_BLD = one_of_each(x_BLD, only_B)
        x_BLD = x_BLD + dropout(seen_BLD, part, key_B, self.salt)
        return x_BLD + dropout(self.mlp(x_BLD, self.ln_2), part, key_B, self.salt + 1)


class Thought(nn.Module):
    """A block for one vector an item, which has nobody to attend to."""

    def __init__(self, width: int, inside: int, activation: str, salt: int):
        super().__init__()
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width, inside, activation)
        self.salt = salt

    def forward(self, x_BD: Tensor, part: float, key_B: Tensor | None) -> Tensor:
        return x_BD + dropout(self.mlp(x_BD, self.ln_2), part, key_B, self.salt)


class Tower(nn.Module):
    """What all have: blocks, and how they are practised. Noise needs keys, which only training gives."""

    def __init__(self, blocks: Iterable[nn.Module], width: int):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.ln_post = nn.LayerNorm(width)
        self.dropout, self.grad_checkpointing = 0.0, False

    def layers_from_top(self, name: str) -> int:
        """How many layers stand between a weight and the output: 0 for what comes after the last of them."""
        first, _, rest = name.partition(".")
        if first == "ln_post":
            return 0
        return len(self.blocks) - (int(rest.split(".")[0]) if first == "blocks" else -1)

    def through(self, x_BLD: Tensor, key_B: Tensor | None, only_B: Tensor | None = None) -> Tensor:
        """All blocks; at the end all tokens, or one of each item."""
        for block in self.blocks:
            ends = () if only_B is None or block is not self.blocks[-1] else (only_B,)
            inputs = (x_BLD, self.dropout, key_B, *ends)
            if self.grad_checkpointing and torch.is_grad_enabled():
                # Noise is a function of the keys, so there is no state to restore.
                x_BLD = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BLD = block(*inputs)
        return x_BLD


def attending(config: VisionConfig | TextConfig, causal: bool, activation: str, salt: int) -> Iterator[Block]:
    shape = (config.width, config.heads, config.mlp_width or 4 * config.width, causal, activation)
    return (Block(*shape, salt=salt + 2 * i) for i in range(config.layers))


def patch_stem(config: VisionConfig) -> nn.Conv2d:
    """CLIP's: each patch on its own, one matrix for all."""
    return nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size, bias=False)


def conv_stem(config: VisionConfig) -> nn.Sequential:
    """Halves the image until a pixel is a patch: edges and shapes are found before attention begins."""
    halvings = config.patch_size.bit_length() - 1
    channels = [3, *(config.width >> (halvings - 1 - i) for i in range(halvings))]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Vision(Tower):
    """A ViT: every patch sees every other; the class token (or the mean) is the image."""

    def __init__(self, config: VisionConfig, activation: str):
        super().__init__(attending(config, False, activation, salt=1), config.width)
        self.config, self.patch_dropout = config, 0.0
        self.patch = patch_stem(config) if config.stem == "patch" else conv_stem(config)
        self.class_token = nn.Parameter(torch.empty(config.width)) if config.pool == "class" else None
        self.position = nn.Parameter(torch.empty(config.tokens, config.width))
        self.ln_pre = nn.LayerNorm(config.width)

    def forward(self, pixels_BCHW: Tensor, key_B: Tensor | None = None) -> Tensor:
        x_BDGG = self.patch(pixels_BCHW)
        first_1D, place_LD = self.places(x_BDGG.shape[-1])
        x_BLD = some_of(x_BDGG.flatten(2).transpose(1, 2) + place_LD, self.patch_dropout, key_B, salt=0)
        if self.class_token is not None:
            first_B1D = (self.class_token + first_1D).expand(len(x_BLD), 1, -1)
            x_BLD = torch.cat([first_B1D, x_BLD], dim=1)
        first_B = None if self.class_token is None else x_BLD.new_zeros(len(x_BLD), dtype=torch.long)
        y_BD: Tensor = self.ln_post(self.through(self.ln_pre(x_BLD), key_B, first_B).mean(1))
        return y_BD

    def places(self, grid: int) -> tuple[Tensor, Tensor]:
        """Positions of the class token (none without one) and of the patches, stretched to a smaller grid."""
        first = int(self.class_token is not None)
        first_1D, place_LD = self.position[:first], self.position[first:]
        full = self.config.image_size // self.config.patch_size
        if grid == full:
            return first_1D, place_LD
        place_1DGG = place_LD.T.view(1, -1, full, full)
        small_1DGG = F.interpolate(place_1DGG, size=(grid, grid), mode="bilinear")
        return first_1D, small_1DGG.flatten(2)[0].T


class Text(Tower):
    """A causal transformer: the end-of-text token has seen the whole caption, and only the caption."""

    def __init__(self, config: TextConfig, activation: str, end_id: int):
        super().__init__(attending(config, True, activation, salt=1001), config.width)
        self.config, self.end_id = config, end_id
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Parameter(torch.empty(config.context_length, config.width))

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        """Short captions are read with short ones: what pads them up to the longest is work for nothing."""
        end_B = (tokens_BL == self.end_id).int().argmax(dim=1)
        parts = max(1, min(PARTS, len(end_B) // LEAST))
        if parts == 1 or devices.is_async(tokens_BL.device):  # it would have to wait for the lengths
            return self.read(tokens_BL, end_B, key_B)
        order_B = end_B.argsort()
        read = [
            self.read(
                tokens_BL[rows_b, : int(end_B[rows_b[-1]]) + 1],
                end_B[rows_b],
                None if key_B is None else key_B[rows_b],
            )
            for rows_b in order_B.chunk(parts)
        ]
        return torch.cat(read)[order_B.argsort()]

    def read(self, tokens_BL: Tensor, end_B: Tensor, key_B: Tensor | None) -> Tensor:
        x_BLD = self.token(tokens_BL) + self.position[: tokens_BL.shape[1]]
        # Padding follows the end token, and causality hides it.
        y_BD: Tensor = self.ln_post(self.through(x_BLD, key_B, end_B).squeeze(1))
        return y_BD


class BagOfWords(Tower):
    """The mean of a caption's words, whatever their order: nearly free, and most that few pairs can teach."""

    def __init__(self, config: TextConfig, activation: str, end_id: int):
        inside = config.mlp_width or 4 * config.width
        thoughts = (Thought(config.width, inside, activation, 1001 + i) for i in range(config.layers))
        super().__init__(thoughts, config.width)
        self.config, self.end_id, self.word_dropout = config, end_id, 0.0
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.ln_pre = nn.LayerNorm(config.width)

    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        word_BL = (tokens_BL == self.end_id).cumsum(1) == 0
        word_BL[:, 0] = False  # the mark of the start says nothing
        if self.word_dropout and key_B is not None:
            left_BL = word_BL & (uniform(key_B, 1000, (word_BL.shape[1],)) >= self.word_dropout)
            # A caption of no words would be the zero vector, whose direction has no gradient that is finite.
            word_BL = torch.where(left_BL.any(1, keepdim=True), left_BL, word_BL)
        part_BL1 = (word_BL / word_BL.sum(1, keepdim=True).clamp(min=1))[..., None]
        x_BD = self.ln_pre((self.token(tokens_BL) * part_BL1).sum(1))
        y_BD: Tensor = self.ln_post(self.through(x_BD, key_B))
        return y_BD


def initialize(tower: Vision | Text | BagOfWords) -> None:
    """CLIP's own: residual branches start small, in proportion to the depth of the stream."""
    width, depth = tower.config.width, tower.config.layers
    for block in tower.blocks:
        assert isinstance(block, Block | Thought)
        small = (2 * width * depth) ** -0.5
        layers = [(block.mlp.wide, (2 * width) ** -0.5), (block.mlp.narrow, small)]
        if isinstance(block, Block):
            layers = [(block.attn.qkv, width**-0.5), (block.attn.out, small), *layers]
        for layer, std in layers:
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
    if isinstance(tower, Text):
        nn.init.normal_(tower.position, std=0.01)
