"""The two encoders of a CLIP as modules that torch.export can trace: one tensor in, unit vectors out.

Shapes: B items, L tokens, C colors, H W pixels, h heads, d width of a head, E embedding.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.evals.embed import inference_tower
from m1clip.model import towers
from m1clip.model.clip import CLIP
from m1clip.model.fast import make_plain

MASKED = -1e4  # finite score of a token that must not be attended to; -inf becomes NaN on fp16 accelerators (UForm#50)


class ImageEncoder(nn.Module):
    """Normalized pixels (B, C, H, W) to unit vectors (B, E)."""

    name, input_name, output_name = "image", "pixel_values", "image_embeds"

    def __init__(self, model: CLIP):
        super().__init__()
        self.model, self.image_size = model, model.config.vision.image_size

    def example(self, batch: int, full_length: bool = False) -> Tensor:
        return torch.zeros(batch, 3, self.image_size, self.image_size)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model.embed_images(pixel_values)


class TextEncoder(nn.Module):
    """Token ids (B, L), padded after the end token, to unit vectors (B, E)."""

    name, input_name, output_name = "text", "input_ids", "text_embeds"

    def __init__(self, model: CLIP):
        super().__init__()
        self.model, self.context_length = model, model.config.text.context_length

    def example(self, batch: int, full_length: bool = False) -> Tensor:
        assert self.model.tokenizer is not None
        ids = self.model.tokenize(["a photo of a cat"] * batch)
        missing = self.context_length - ids.shape[1] if full_length else 0
        return F.pad(ids, (0, missing), value=self.model.tokenizer.settings.pad_id)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(self.with_end(input_ids))

    def with_end(self, tokens_BL: Tensor) -> Tensor:
        """Captions that a product has truncated without keeping their end token, as transformers.js does, get one."""
        end_id = getattr(self.model.text, "end_id", None)  # of our own text towers
        if end_id is None:
            return tokens_BL
        is_last_L = torch.arange(tokens_BL.shape[1]) == tokens_BL.shape[1] - 1
        has_end_B1 = (tokens_BL == end_id).any(1, keepdim=True)
        return torch.where(is_last_L & ~has_end_B1, end_id, tokens_BL)


@dataclass(frozen=True)
class Encoders:
    image: ImageEncoder
    text: TextEncoder


def make_encoders(model: CLIP, finite_masks: bool = False) -> Encoders:
    """Encoders of a copy of the model on the CPU: plain towers, batch norms folded into convolutions."""
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    model.vision = inference_tower(model.vision)
    for tower in (model.vision, model.text):
        if isinstance(tower, towers.Tower):
            make_plain(tower)
        for module in tower.modules():
            if type(module) is towers.Attention:
                module.__class__ = FiniteMaskAttention if finite_masks else SplitAttention
        if finite_masks:
            bound_masks(tower)
    return Encoders(ImageEncoder(model).eval(), TextEncoder(model).eval())


def bound_masks(tower: nn.Module) -> None:
    """Replace -inf in the stored masks of other libraries, in place."""
    for module in tower.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module._buffers[name] = buffer.clamp(min=MASKED) if buffer.isneginf().any() else buffer


class SplitAttention(towers.Attention):
    """The same attention; onnxruntime runs one Split faster than slices of five dimensions (nano, batch 32: 12 %)."""

    def attend(self, qkv_BLX: Tensor) -> Tensor:
        B, L, _ = qkv_BLX.shape
        q_BhLd, k_BhLd, v_BhLd = (x_BLD.view(B, L, self.heads, -1).transpose(1, 2) for x_BLD in qkv_BLX.chunk(3, -1))
        return self.mix(q_BhLd, k_BhLd, v_BhLd).transpose(1, 2).flatten(2)

    def mix(self, q_BhLd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BhLd, k_BhLd, v_BhLd, is_causal=self.causal)


class FiniteMaskAttention(SplitAttention):
    def mix(self, q_BhLd: Tensor, k_BhLd: Tensor, v_BhLd: Tensor) -> Tensor:
        L = q_BhLd.shape[2]
        score_BhLL = q_BhLd * q_BhLd.shape[-1] ** -0.5 @ k_BhLd.transpose(-2, -1)
        if self.causal:
            score_BhLL = score_BhLL + torch.full((L, L), MASKED).triu(1)
        y_BhLd: Tensor = score_BhLL.softmax(-1) @ v_BhLd
        return y_BhLd
