"""Root-mean-square norm, with the sum of the residual stream before it and that of its gradients behind it.

Beside the normed tensor the stream itself comes out, so that what later flows back along it is added where the norm's
own gradient is made. Kept for the backward: the stream. Statistics are taken again from the row that is read anyway.

Shapes: N rows, D the normed dim, P programs, ... any dims before D.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.around import num_programs
from threefold.engine.ways import stood_for

_WIDE = 2048  # values of a row beyond which fewer programs share a multiprocessor


def norm(x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> Tensor:
    out: Tensor = _Norm.apply(x, weight_D, eps, zero_centered)
    return out


def norm_through(x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """-> (x, its norm)."""
    through, out = _Through.apply(x, weight_D, eps, zero_centered)
    return through, out


def add_norm(x: Tensor, y: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """-> (x + y, its norm)."""
    total, out = _AddNorm.apply(x, y, weight_D, eps, zero_centered)
    return total, out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.facts = eps, zero_centered
        return _forward(x, None, weight_D, eps, zero_centered)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, None, grad), None, None


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight_D)
        ctx.facts = eps, zero_centered
        return x.view_as(x), _forward(x, None, weight_D, eps, zero_centered)[1]

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, through, grad), None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight_D: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total, out = _forward(x, y, weight_D, eps, zero_centered)
        ctx.save_for_backward(total, weight_D)
        ctx.facts = eps, zero_centered
        return total, out

    @staticmethod
    def backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = _backward(ctx, through, grad)
        return x_grad, x_grad, weight_grad, None, None


def _rows(x: Tensor) -> Tensor:
    """(N, D); rows may lie apart."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _forward(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty_like(out)
    if not stood_for():
        from threefold.engine.kernels.norm_passes import launch_norm

        launch_norm(_rows(x), None if y is None else _rows(y), weight_D, total, out, eps, zero_centered)
    return total, out


def _backward(ctx: Any, through: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the stream and of the weight."""
    x, weight_D = ctx.saved_tensors
    if grad is None:
        return through, None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    programs = min(num_programs(x.device, 6 if dim <= _WIDE else 4), num_rows)
    part_PD = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    weight_grad = torch.empty_like(weight_D)
    if not stood_for():
        from threefold.engine.kernels.norm_passes import launch_norm_grad, launch_sum

        through_ND = None if through is None else _rows(through)
        launch_norm_grad(_rows(x), _rows(grad), through_ND, weight_D, out, part_PD, *ctx.facts)
        launch_sum(part_PD, weight_grad)
    return out, weight_grad
