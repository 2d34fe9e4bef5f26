"""Wide layers that keep less for the backward pass: what is cheap to make again is made again.

The output of a norm or an activation is kept by the matrix behind it, though it follows from an input that
is kept as well. Without these outputs a block keeps 10 values of each token and feature where it kept 16.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Of a step, norms and activations are less the wider the matrices are. Made twice, they cost 7 to 9 % at 128
# and 384 features, and nothing that could be measured at 768 (2 AVX2 cores, November 2026).
WIDE = 512


def linear_after(cheap: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
    """linear(cheap(x)), for whose gradients only x is kept if that pays."""
    if type(linear) is nn.Linear and pays(linear, x):
        weights = (linear.weight, linear.bias, *cheap.parameters())
        y: Tensor = _LinearAfter.apply(cheap, linear, x, *weights)
        return y
    return linear(cheap(x))  # type: ignore[no-any-return]


def pays(linear: nn.Linear, x: Tensor) -> bool:
    """Not for a frozen matrix, which keeps nothing anyway; and other precisions, compilers and whoever
    listens to a layer want it as it is."""
    return (
        min(linear.in_features, linear.out_features) >= WIDE
        and linear.weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(x.device.type)
        and not torch.compiler.is_compiling()
        and not linear._backward_hooks
    )


class _LinearAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cheap: nn.Module, linear: nn.Linear, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.cheap, ctx.inner = cheap, weights[2:]
        ctx.save_for_backward(x, linear.weight)
        # Made first, so that what is freed at once lies behind it in memory, and leaves no hole.
        y = x.new_empty(*x.shape[:-1], linear.out_features)
        torch.addmm(linear.bias, cheap(x).flatten(0, -2), linear.weight.T, out=y.flatten(0, -2))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, (x, weight) = grads[0], ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            made = ctx.cheap.forward(x)  # and not a call, to which others may listen
        rows, again = grad.flatten(0, -2), made.detach().flatten(0, -2)
        of_linear = rows.T @ again, rows.sum(0)
        torch.mm(rows, weight, out=again)  # done with, and what is cheap does not need its own output
        moving = [w for w in ctx.inner if w.requires_grad]
        of_x, *rest = torch.autograd.grad(made, (x, *moving), again.view_as(made))
        of_inner = iter(rest)
        return None, None, of_x, *of_linear, *(next(of_inner) if w.requires_grad else None for w in ctx.inner)
