"""The dense feed-forward part: gate and up, silu, down.

Shapes: D model dim, H hidden dim, ... any dims before.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.chunks import chunk_tokens
from threefold.engine.kernels.around import fused
from threefold.engine.kernels.gated import silu_times
from threefold.engine.seams import Into, each


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu_times(gate, up) if fused(gate, up) else F.silu(gate) * up


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.into: Into = each

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(x, (self.gate, self.up))
        return self.down(gated(gate, up))

    def chunk(self, x: Tensor, asked: int | None) -> int:
        """Tokens of a chunk where it is recomputed chunk by chunk; all where ranks meet inside it."""
        num_tokens = x.shape[:-1].numel()
        whole = self.into is not each
        return num_tokens if whole else chunk_tokens(num_tokens, self.gate.out_features * x.element_size(), asked)
