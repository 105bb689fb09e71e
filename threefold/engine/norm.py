"""Root-mean-square norms. Statistics in fp32 at least.

Shapes: D the normed dim, ... any dims before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.kernels.around import fused
from threefold.engine.kernels.norm import add_norm, norm, norm_through


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums are taken: fp32, or fp64 when the model itself is fp64."""
    return torch.promote_types(dtype, torch.float32)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; `zero_centered` stores weight - 1, so that weight decay pulls towards 1 (Qwen3-Next)."""

    def __init__(self, dim: int, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(dim) if zero_centered else torch.ones(dim))

    def forward(self, x: Tensor, added: Tensor | None = None, stream: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with `stream`, x (plus what is `added` to it) and the norm of that."""
        assert stream or added is None
        if fused(x):
            facts = self.weight, self.eps, self.zero_centered
            if not stream:
                return norm(x, *facts)
            return norm_through(x, *facts) if added is None else add_norm(x, added, *facts)
        if added is not None:
            x = x + added
        return (x, self._in_torch(x)) if stream else self._in_torch(x)

    def _in_torch(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        y = F.rms_norm(x.to(wide(x.dtype)), self.weight.shape, None, self.eps)
        return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """The norm behind the delta rule: rms norm of x, then times silu(gate)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return (y * F.silu(gate.to(wide(gate.dtype)))).to(x.dtype)
