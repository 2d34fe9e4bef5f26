"""Faster forward passes with the results and gradients of the plain towers (tests/test_fast.py).

- The last block computes one token per item, without keys and values, where only that token is used.
- Captions are sorted by length and encoded in groups, so that short ones are not padded to the longest.
- Wide layers recompute the norm or activation before them instead of storing its output.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from m1clip import devices
from m1clip.model import towers
from m1clip.model.towers import select_tokens

AnyTower = TypeVar("AnyTower", bound=towers.Tower)
TEXT_GROUPS, MIN_GROUP = 4, 12  # groups of captions by length, and the fewest captions of a group
# The wider the matrices, the smaller the share of norms and activations in a step. Computing them twice costs
# 7 to 9 % at widths 128 and 384, and nothing measurable at 768 (2 AVX2 cores, November 2026).
MIN_RECOMPUTE_WIDTH = 512


def make_fast(tower: AnyTower) -> AnyTower:
    """Replace the forward methods of a tower and its blocks; parameters and their names stay."""
    for module in tower.modules():
        module.__class__ = FAST.get(type(module), type(module))
    return tower


class FastBlock(towers.Block):
    def forward(self, x: Tensor, token_B: Tensor | None = None) -> Tensor:
        if token_B is not None:
            y_BD = attend_from_token(self.attn, self.ln_1(x), token_B)
            x = select_tokens(x, token_B) + self.attn.out(y_BD)
        elif self.has_attention:
            y_BLD = self.attn.attend(linear_with_recompute(self.ln_1, self.attn.qkv, x))
            x = x + self.attn.out(y_BLD)
        hidden = linear_with_recompute(self.ln_2, self.mlp.wide, x)
        return x + linear_with_recompute(self.mlp.activation, self.mlp.narrow, hidden)


class FastTextTransformer(towers.TextTransformer):
    def forward(self, tokens_BL: Tensor, key_B: Tensor | None = None) -> Tensor:
        groups = min(TEXT_GROUPS, len(tokens_BL) // MIN_GROUP)
        if groups <= 1 or devices.is_async(tokens_BL.device):  # reading the lengths would wait for the queue
            return super().forward(tokens_BL, key_B)
        end_B = (tokens_BL == self.end_id).int().argmax(dim=1)
        order_B = end_B.argsort()
        features = []
        for rows_b in order_B.chunk(groups):
            longest = int(end_B[rows_b[-1]]) + 1
            features.append(super().forward(tokens_BL[rows_b, :longest]))
        return torch.cat(features)[order_B.argsort()]


def make_plain(tower: AnyTower) -> AnyTower:
    """Undo make_fast: the plain forward methods do not depend on the lengths of captions, and can be exported."""
    plain = {fast: module for module, fast in FAST.items()}
    for module in tower.modules():
        module.__class__ = plain.get(type(module), type(module))
    return tower


FAST: dict[type[nn.Module], Any] = {towers.Block: FastBlock, towers.TextTransformer: FastTextTransformer}


def attend_from_token(attn: towers.Attention, x_BLD: Tensor, token_B: Tensor) -> Tensor:
    """(B, D): attention with one query per item, before the output projection."""
    if type(attn.qkv) is not nn.Linear:  # LoRA adapters are added to the whole product
        return select_tokens(attn.attend(attn.qkv(x_BLD)), token_B)
    # With a single query the key and value matrices can be applied to it instead of to all L tokens:
    # q · (K x) = (q K) · x, and Σ p V x = V Σ p x. The bias of the keys adds the same number to all scores,
    # which softmax ignores.
    B, L, D = x_BLD.shape
    (q_DD, k_DD, v_DD), (q_D, _, v_D) = attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3)
    q_BD = F.linear(select_tokens(x_BLD, token_B), q_DD, q_D)
    q_HBd = q_BD.view(B, attn.heads, -1).transpose(0, 1)
    query_BHD = (q_HBd @ k_DD.view(attn.heads, -1, D)).transpose(0, 1)
    score_BHL = query_BHD * q_HBd.shape[-1] ** -0.5 @ x_BLD.mT
    if attn.causal:
        future_BL = torch.arange(L, device=token_B.device) > token_B[:, None]
        score_BHL = score_BHL.masked_fill(future_BL[:, None], float("-inf"))
    mean_HBD = (score_BHL.softmax(-1) @ x_BLD).transpose(0, 1)
    y_HBd = mean_HBD @ v_DD.view(attn.heads, -1, D).mT
    return y_HBd.transpose(0, 1).flatten(1) + v_D


def linear_with_recompute(pre: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    """linear(pre(x)); if it pays, the output of `pre` is not stored for the backward pass but recomputed."""
    # Without these outputs a block stores 10 values per token and feature instead of 16.
    if type(linear) is nn.Linear and should_recompute(linear, x):
        return _LinearWithRecompute.apply(pre, linear, x, linear.weight, linear.bias, *pre.parameters())
    return linear(pre(x))


def should_recompute(linear: nn.Linear, x: Tensor) -> bool:
    """A frozen matrix stores no input anyway; autocast, torch.compile and hooks need the plain layers."""
    return (
        min(linear.in_features, linear.out_features) >= MIN_RECOMPUTE_WIDTH
        and linear.weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not linear._backward_hooks
    )


class _LinearWithRecompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pre: nn.Module, linear: nn.Linear, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.pre, ctx.pre_parameters = pre, parameters[2:]
        ctx.save_for_backward(x, linear.weight)
        # Allocated before the temporary below, whose memory then leaves no hole when it is freed.
        y = x.new_empty(*x.shape[:-1], linear.out_features)
        torch.addmm(linear.bias, pre(x).flatten(0, -2), linear.weight.T, out=y.flatten(0, -2))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), grad_NO = ctx.saved_tensors, grads[0].flatten(0, -2)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            output = ctx.pre.forward(x)  # not a call, which would run hooks a second time
        input_NI = output.detach().flatten(0, -2)
        grad_weight, grad_bias = grad_NO.T @ input_NI, grad_NO.sum(0)
        torch.mm(grad_NO, weight, out=input_NI)  # reuses the memory: no `pre` needs its own output
        trainable = [parameter for parameter in ctx.pre_parameters if parameter.requires_grad]
        grad_x, *grad_trainable = torch.autograd.grad(output, (x, *trainable), input_NI.view_as(output))
        grad_pre = dict(zip(trainable, grad_trainable, strict=True))
        return None, None, grad_x, grad_weight, grad_bias, *map(grad_pre.get, ctx.pre_parameters)


@contextmanager
def saved_for_backward(weights: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Bytes of each storage that autograd saves in the block, without those of `weights`."""
    addresses = {weight.untyped_storage()._cdata for weight in weights}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # keeps addresses from being reused and counted twice

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in addresses:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        yield sizes
