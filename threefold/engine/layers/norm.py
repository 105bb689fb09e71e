"""RMS norms, with the residual addition in front of them; statistics are in fp32 or wider.

The decoder, the gated delta rule, Mamba-2 and the norms of heads (`rope.py`) use them.

Shapes: D the normed dim, ... any dims before it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Group
from threefold.engine.kernels.availability import runs_fused
from threefold.engine.kernels.elementwise.rms_norm import add_rms_norm, residual_rms_norm, rms_norm
from threefold.engine.kernels.mixers.gated_norm import gated_rms_norm
from threefold.engine.sum_dtype import fp32_or_wider


class RMSNorm(nn.Module):
    """x / rms(x) * weight. `zero_centered` stores weight - 1, so that weight decay pulls towards 1 (Qwen3-Next)."""

    def __init__(self, dim: int, eps: float = 1e-6, zero_centered: bool = False) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.weight = nn.Parameter(torch.zeros(dim) if zero_centered else torch.ones(dim))

    def forward(
        self, x: Tensor, added: Tensor | None = None, return_residual: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x. With `return_residual`, the residual stream (x plus `added`) and the norm of it."""
        assert return_residual or added is None
        if runs_fused(x):
            settings = self.weight, self.eps, self.zero_centered
            if not return_residual:
                return rms_norm(x, *settings)
            return residual_rms_norm(x, *settings) if added is None else add_rms_norm(x, added, *settings)
        if added is not None:
            x = x + added
        return (x, self._eager(x)) if return_residual else self._eager(x)

    def _eager(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        y = F.rms_norm(x.to(fp32_or_wider(x.dtype)), self.weight.shape, None, self.eps)
        return (y * (1 + self.weight.to(y.dtype))).to(x.dtype)


class PlainRMSNorm(nn.Module):
    """x / rms(x) without weights, called as `RMSNorm` is (Gemma 4)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(
        self, x: Tensor, added: Tensor | None = None, return_residual: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x. With `return_residual`, the residual stream (x plus `added`) and the norm of it."""
        assert return_residual or added is None
        if added is not None:
            x = x + added
        y = F.rms_norm(x, (self.dim,), None, self.eps)
        return (x, y) if return_residual else y


class LayerNorm(nn.LayerNorm):
    """LayerNorm with a bias, called as `RMSNorm` is (Phi-MoE)."""

    def forward(  # type: ignore[override]
        self, x: Tensor, added: Tensor | None = None, return_residual: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x. With `return_residual`, the residual stream (x plus `added`) and the norm of it."""
        assert return_residual or added is None
        if added is not None:
            x = x + added
        y = super().forward(x)
        return (x, y) if return_residual else y


class GatedRMSNorm(nn.Module):
    """The output norm of the gated delta rule: RMS norm of x, times silu(gate)."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x is (..., heads, dim); its gate has the same values in the same order, with any split of the last dims."""
        if runs_fused(x, gate):
            return gated_rms_norm(x, gate, self.weight, self.eps)
        gate = gate.reshape(x.shape)
        y = F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)
        return (y * F.silu(gate.to(fp32_or_wider(gate.dtype)))).to(x.dtype)


class GroupedGatedRMSNorm(nn.Module):
    """The output norm of Mamba-2: x times silu(gate), then an RMS norm of each group of channels.

    Tensor parallelism shards `weight` by whole groups.
    """

    def __init__(self, dim: int, group_dim: int, eps: float) -> None:
        super().__init__()
        self.group_dim, self.eps = group_dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        dtype = fp32_or_wider(x.dtype)
        gated = (x.to(dtype) * F.silu(gate.to(dtype))).unflatten(-1, (-1, self.group_dim))
        return F.rms_norm(gated, (self.group_dim,), None, self.eps).flatten(-2).to(x.dtype) * self.weight


@dataclass(frozen=True)
class NormShard:
    """The ranks that share a norm."""

    group: Group
    copies: int  # ranks that hold the same numbers: copies of a key head
    dim: int  # numbers of the whole projection


class ProjectionNorm(RMSNorm):
    shard: NormShard | None = None

    def __init__(self, like: RMSNorm) -> None:
        super().__init__(len(like.weight), like.eps, like.zero_centered)

    def forward(
        self, x: Tensor, added: Tensor | None = None, return_residual: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        if self.shard is None:
            return super().forward(x, added, return_residual)
        assert added is None
        assert not return_residual
        weight_X = 1 + self.weight if self.zero_centered else self.weight
        y: Tensor = _ShardedRmsNorm.apply(x, weight_X, self.eps, self.shard)
        return y


class _ShardedRmsNorm(torch.autograd.Function):
    """Statistics in fp32 or wider. With c copies of every number the sums over ranks count each of them c times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_X: Tensor, eps: float, shard: NormShard) -> Tensor:
        wide = x.to(fp32_or_wider(x.dtype))
        square = wide.square().sum(dim=-1, keepdim=True)
        all_reduce(square, shard.group).wait()
        scale = (square / (shard.copies * shard.dim) + eps).rsqrt()
        ctx.save_for_backward(x, weight_X, scale)
        ctx.shard = shard
        return (wide * scale * weight_X).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_X, scale = ctx.saved_tensors
        shard: NormShard = ctx.shard
        normed, wide_grad = x.to(scale.dtype) * scale, grad.to(scale.dtype)
        weight_grad_X = (wide_grad * normed).flatten(0, -2).sum(dim=0)
        wide_grad = wide_grad * weight_X
        along = (wide_grad * normed).sum(dim=-1, keepdim=True)
        all_reduce(along, shard.group).wait()
        x_grad = scale * (wide_grad - normed * (along / (shard.copies * shard.dim)))
        return x_grad.to(x.dtype), weight_grad_X.to(weight_X.dtype), None, None
