"""From a tower's features to the space where both meet. CLIP's own is one matrix; these learn from few pairs.

Shapes: B items, D features, E embedding, N samples.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from m1clip.model.rng import row_masks


class Head(nn.Module):
    """Standardised features through a matrix; with `inside`, then a small network that adds to the result.

    The network is zero at first, and works in the small space behind the matrix: it costs little.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, width: int, embed: int, inside: int, salt: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("spread", torch.ones(width))
        self.linear = nn.Linear(width, embed)
        self.wide = nn.Linear(embed, inside) if inside else None
        self.narrow = nn.Linear(inside, embed) if inside else None
        self.salt, self.dropout = salt, 0.0

    def forward(self, x_BD: Tensor, key_B: Tensor | None = None) -> Tensor:
        x_BD = x_BD - self.mean
        if self.dropout and key_B is not None:
            factor_BD = row_masks(x_BD.shape[1], self.dropout, key_B, self.salt)
            x_BD = (
                x_BD * factor_BD if x_BD.requires_grad else x_BD.mul_(factor_BD)
            )  # large, and soon done with
        y_BE: Tensor = F.linear(x_BD, self.linear.weight / self.spread, self.linear.bias)
        if self.wide is not None and self.narrow is not None:
            hidden_BH = F.gelu(self.wide(y_BE))
            if self.dropout and key_B is not None:
                hidden_BH = hidden_BH * row_masks(hidden_BH.shape[1], self.dropout, key_B, self.salt + 1)
            y_BE = y_BE + self.narrow(hidden_BH)
        return y_BE

    def initialize(self) -> None:
        nn.init.normal_(self.linear.weight, std=self.linear.in_features**-0.5)
        nn.init.zeros_(self.linear.bias)
        if self.wide is not None and self.narrow is not None:
            nn.init.normal_(self.wide.weight, std=self.wide.in_features**-0.5)
            nn.init.zeros_(self.wide.bias)
            nn.init.zeros_(self.narrow.weight)
            nn.init.zeros_(self.narrow.bias)

    @torch.no_grad()
    def standardize(self, x_ND: Tensor) -> None:
        """Take the features' mean and spread for 0 and 1."""
        spread_D, mean_D = torch.std_mean(x_ND.float(), dim=0)
        self.mean.copy_(mean_D)
        self.spread.copy_(spread_D.clamp(min=1e-3 * float(spread_D.mean())))
