"""The dense feed-forward network: used by dense layers and as the shared experts of an MoE layer.

Shapes: D model dim, H hidden dim, ... any dims before.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.elementwise.silu_mul import silu_mul
from threefold.engine.layers.input_linears import InputLinears, apply_linears

DENSE_ACTIVATIONS = (
    "silu",
    "relu2",
    "gelu_tanh",
    "limited silu",
)  # those of `spec/stacks.py`, ENGINE_DENSE_ACTIVATIONS


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return silu_mul(gate, up) if runs_fused(gate, up) else F.silu(gate) * up


def gated_gelu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with the approximation by tanh (Gemma 4)."""
    return F.gelu(gate, approximate="tanh") * up


def limited_swiglu(limit: float, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of values that are clamped first, gates from above alone (DeepSeek-V4)."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared, the activation of Nemotron-H's networks, which have no gate."""
    return F.relu(x).square()


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)), the same with gelu, or without a gate down(relu(up(x))^2). Tensor parallelism
    replaces `input_linears` and `down`."""

    def __init__(self, dim: int, hidden_dim: int, activation: str = "silu", glu_limit: float | None = None) -> None:
        super().__init__()
        assert activation in DENSE_ACTIVATIONS, "engine_lacks refuses others"
        self.multiply: Callable[[Tensor, Tensor], Tensor] = gated_gelu if activation == "gelu_tanh" else gated_silu
        if glu_limit is not None:
            self.multiply = partial(limited_swiglu, glu_limit)
        self.gate = nn.Linear(dim, hidden_dim, bias=False) if activation != "relu2" else None
        self.up = nn.Linear(dim, hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)
        self.input_linears: InputLinears = apply_linears

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            (up,) = self.input_linears(x, (self.up,))
            return self.down(squared_relu(up))
        gate, up = self.input_linears(x, (self.gate, self.up))
        return self.down(self.multiply(gate, up))
