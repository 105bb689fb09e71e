"""The dense feed-forward network (SwiGLU): used by dense layers and as the shared experts of an MoE layer.

Shapes: D model dim, H hidden dim, ... any dims before.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.kernels.elementwise.silu_mul import silu_mul
from threefold.engine.kernels.fusion_switch import runs_fused
from threefold.engine.layers.input_linears import InputLinears, apply_linears


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return silu_mul(gate, up) if runs_fused(gate, up) else F.silu(gate) * up


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)). Tensor parallelism replaces `input_linears` and `down`."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden_dim, bias=False)
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.input_linears: InputLinears = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.input_linears(x, (self.gate, self.up))
        return self.down(gated_silu(gate, up))
