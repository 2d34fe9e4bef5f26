"""Projection heads from a tower's features to the joint embedding that learn from few pairs.

CLIP's own head is one matrix (nn.Linear without bias). Shapes: B items, D features, E embedding, N samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.rng import dropout_mask


class ProjectionHead(nn.Module):
    """Standardized features times a matrix; with `hidden`, a residual MLP on the result.

    The MLP starts at zero, and it is cheap because it works on the embedding, not on the wider features.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int, embed_dim: int, hidden: int, salt: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.linear = nn.Linear(width, embed_dim)
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
