"""The dense feed-forward part: gate and up, silu, down.

Shapes: D model dim, H hidden dim, ... any dims before.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.seams import Into, each


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.into: Into = each

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(x, (self.gate, self.up))
        return self.down(F.silu(gate) * up)
