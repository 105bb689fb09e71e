"""RMSNorm fused with the addition to the residual stream before it. `layers/norm.py` calls it.

`residual_rms_norm` and `add_rms_norm` return the residual stream beside the normed tensor. Its gradient then arrives in
the backward of the norm, which adds it to the norm's own gradient in the same kernel. Only the residual stream is saved
for the backward: the kernel computes the statistics again from the row, which it reads anyway.

Shapes: N rows, D the normed dim, P programs, ... any dims before D.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.launch_config import num_programs

_LARGE_DIM = 2048  # with longer rows fewer programs share a multiprocessor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> Tensor:
    out: Tensor = _RmsNorm.apply(x, weight_D, eps, zero_centered)
    return out


def residual_rms_norm(x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """-> (x, RMSNorm of x)."""
    residual, out = _ResidualRmsNorm.apply(x, weight_D, eps, zero_centered)
    return residual, out


def add_rms_norm(x: Tensor, y: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """-> (x + y, RMSNorm of x + y)."""
    total, out = _AddRmsNorm.apply(x, y, weight_D, eps, zero_centered)
    return total, out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> Tensor:
        ctx.save_for_backward(x, weight_D)
        ctx.options = eps, zero_centered
        return _forward(x, None, weight_D, eps, zero_centered)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, None, grad), None, None


class _ResidualRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight_D)
        ctx.options = eps, zero_centered
        return x.view_as(x), _forward(x, None, weight_D, eps, zero_centered)[1]

    @staticmethod
    def backward(ctx: Any, residual_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, residual_grad, grad), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weight_D: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        total, out = _forward(x, y, weight_D, eps, zero_centered)
        ctx.save_for_backward(total, weight_D)
        ctx.options = eps, zero_centered
        return total, out

    @staticmethod
    def backward(ctx: Any, residual_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = _backward(ctx, residual_grad, grad)
        return x_grad, x_grad, weight_grad, None, None


def _rows(x: Tensor) -> Tensor:
    """x as (N, D). Rows may have gaps between them, values of a row may not."""
    x_ND = x.reshape(-1, x.shape[-1])
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def _forward(x: Tensor, y: Tensor | None, weight_D: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if y is None else torch.empty_like(out)
    if not is_simulated():
        from threefold.engine.kernels.elementwise.rms_norm_triton import launch_rms_norm

        launch_rms_norm(_rows(x), None if y is None else _rows(y), weight_D, total, out, eps, zero_centered)
    return total, out


def _backward(ctx: Any, residual_grad: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """-> (gradient of the residual stream, gradient of the weight). Each argument is None where no gradient arrives."""
    x, weight_D = ctx.saved_tensors
    if grad is None:
        return residual_grad, None
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, dim = x.numel() // x.shape[-1], x.shape[-1]
    programs = min(num_programs(x.device, 6 if dim <= _LARGE_DIM else 4), num_rows)
    part_PD = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
    weight_grad = torch.empty_like(weight_D)
    if not is_simulated():
        from threefold.engine.kernels.elementwise.rms_norm_triton import launch_rms_norm_grad, launch_sum_partials

        residual_grad_ND = None if residual_grad is None else _rows(residual_grad)
        launch_rms_norm_grad(_rows(x), _rows(grad), residual_grad_ND, weight_D, out, part_PD, *ctx.options)
        launch_sum_partials(part_PD, weight_grad)
    return out, weight_grad
