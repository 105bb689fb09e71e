"""Rotary embedding of queries or keys, fused with the norm of each head (QK norm). `layers/rope.py` calls it.

Only the heads as the projection gave them are saved for the backward. The result lies in memory as (B, S, H, d),
whatever the strides of the input: attention takes it as a view and returns its own result in the same order.

Shapes: B batch, S sequence, H heads, d head dim, N = B * S * H, F frequencies (2F dims of a head are rotated),
P programs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.launch_config import num_programs

_PROGRAMS_PER_SM = 4


@dataclass(frozen=True)
class RotaryOptions:
    """How heads are normed and their first 2F dims rotated; the other dims are only normed."""

    interleaved: bool = False  # pairs are neighboring dims, not dims f and F + f (Megatron's `rotary_interleaved`)
    eps: float = 0.0  # of the norm
    zero_centered: bool = False  # the norm multiplies by 1 + weight


def norm_and_rotate(
    x_BSHd: Tensor, weight_d: Tensor | None, table: tuple[Tensor, Tensor], options: RotaryOptions
) -> Tensor:
    """Rotate each head by the cosines and sines of `table`. With a weight, RMSNorm is applied to each head first.

    -> (B, S, H, d), contiguous
    """
    cos_BSF, sin_BSF = (each.expand(*x_BSHd.shape[:2], -1).contiguous() for each in table)
    out_BSHd: Tensor = _NormAndRotate.apply(x_BSHd, weight_d, cos_BSF, sin_BSF, options)
    return out_BSHd


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHd: Tensor, weight_d: Tensor | None, cos_BSF: Tensor, sin_BSF: Tensor, options: RotaryOptions
    ) -> Tensor:
        # Without a norm the rotation is linear, and its gradient does not need x.
        ctx.save_for_backward(None if weight_d is None else x_BSHd, weight_d, cos_BSF, sin_BSF)
        ctx.options = options
        out_BSHd = torch.empty(x_BSHd.shape, dtype=x_BSHd.dtype, device=x_BSHd.device)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.rotary_triton import launch_rotate

            launch_rotate(_tokens(x_BSHd), weight_d, cos_BSF, sin_BSF, out_BSHd, options)
        return out_BSHd

    @staticmethod
    def backward(ctx: Any, grad_BSHd: Tensor) -> tuple[Tensor | None, ...]:
        x_BSHd, weight_d, cos_BSF, sin_BSF = ctx.saved_tensors
        out_BSHd = torch.empty(grad_BSHd.shape, dtype=grad_BSHd.dtype, device=grad_BSHd.device)
        part_Pd = weight_grad = None
        if weight_d is not None:
            weight_grad = torch.empty_like(weight_d)
            programs = num_programs(out_BSHd.device, _PROGRAMS_PER_SM)
            part_Pd = torch.empty(programs, len(weight_d), dtype=torch.float32, device=out_BSHd.device)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.rms_norm_triton import launch_sum_partials
            from threefold.engine.kernels.elementwise.rotary_triton import launch_rotate_grad

            x = None if x_BSHd is None else _tokens(x_BSHd)
            launch_rotate_grad(_tokens(grad_BSHd), x, weight_d, cos_BSF, sin_BSF, out_BSHd, part_Pd, ctx.options)
            if part_Pd is not None and weight_grad is not None:
                launch_sum_partials(part_Pd, weight_grad)
        return out_BSHd, weight_grad, None, None, None


def _tokens(x_BSHd: Tensor) -> Tensor:
    """x as (B * S, H, d). Tokens and heads may have gaps between them, dims of a head may not."""
    x = x_BSHd.reshape(-1, *x_BSHd.shape[2:])
    return x if x.stride(2) == 1 else x.contiguous()
