"""The RMS norm over a whole projection of queries or keys (OLMoE, MiniMax-M2), also where heads are sharded over `tp`.

A rank then has some of the numbers that a norm is taken of. The ranks sum their squares, and in the backward one number
per token of the gradient. `attention/gqa.py` makes the norm; `shard/tensor_parallel.py` gives it a shard.

Shapes: X numbers of a projection on this rank, ... any dims before.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.mesh import Group
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.sum_dtype import fp32_or_wider


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
