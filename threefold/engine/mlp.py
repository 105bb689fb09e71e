"""The dense feed-forward part: gate and up, silu, down.

Shapes: D model dim, H hidden dim, ... any dims before.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.seams import Seam, stay


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.enter: Seam = stay

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))
