"""The norm of each head, its rotary embedding and its place in memory, one pass each way.

Kept for the backward: the heads as the projection gave them. The result lies as (B, S, H, d): attention takes it as a
view, and gives its own result in the same order.

Shapes: B batch, S sequence, H heads, d head dim, N = B * S * H, F frequencies (2F dims of a head turn), P programs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.around import num_programs
from threefold.engine.ways import stood_for

_PER_SM = 4


@dataclass(frozen=True)
class Turn:
    """How the first 2F dims of a head turn; the rest stay. `pairs`: as in `rope.rotate`."""

    pairs: bool = False
    eps: float = 0.0
    zero_centered: bool = False


def turn(x_BSHd: Tensor, weight_d: Tensor | None, table: tuple[Tensor, Tensor], how: Turn) -> Tensor:
    """With a weight each head is normed first. -> (B, S, H, d)."""
    cos_BSF, sin_BSF = (each.expand(*x_BSHd.shape[:2], -1).contiguous() for each in table)
    out_BSHd: Tensor = _Turn.apply(x_BSHd, weight_d, cos_BSF, sin_BSF, how)
    return out_BSHd


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSHd: Tensor, weight_d: Tensor | None, cos_BSF: Tensor, sin_BSF: Tensor, how: Turn
    ) -> Tensor:
        # Without a norm the turn is linear: its gradient needs no x.
        ctx.save_for_backward(None if weight_d is None else x_BSHd, weight_d, cos_BSF, sin_BSF)
        ctx.how = how
        out_BSHd = torch.empty(x_BSHd.shape, dtype=x_BSHd.dtype, device=x_BSHd.device)
        if not stood_for():
            from threefold.engine.kernels.rotary_passes import launch_turn

            launch_turn(_tokens(x_BSHd), weight_d, cos_BSF, sin_BSF, out_BSHd, how)
        return out_BSHd

    @staticmethod
    def backward(ctx: Any, grad_BSHd: Tensor) -> tuple[Tensor | None, ...]:
        x_BSHd, weight_d, cos_BSF, sin_BSF = ctx.saved_tensors
        out_BSHd = torch.empty(grad_BSHd.shape, dtype=grad_BSHd.dtype, device=grad_BSHd.device)
        part_Pd = weight_grad = None
        if weight_d is not None:
            weight_grad = torch.empty_like(weight_d)
            programs = num_programs(out_BSHd.device, _PER_SM)
            part_Pd = torch.empty(programs, len(weight_d), dtype=torch.float32, device=out_BSHd.device)
        if not stood_for():
            from threefold.engine.kernels.norm_passes import launch_sum
            from threefold.engine.kernels.rotary_passes import launch_turn_grad

            x = None if x_BSHd is None else _tokens(x_BSHd)
            launch_turn_grad(_tokens(grad_BSHd), x, weight_d, cos_BSF, sin_BSF, out_BSHd, part_Pd, ctx.how)
            if part_Pd is not None and weight_grad is not None:
                launch_sum(part_Pd, weight_grad)
        return out_BSHd, weight_grad, None, None, None


def _tokens(x_BSHd: Tensor) -> Tensor:
    """(B * S, H, d); tokens and heads may lie apart."""
    x = x_BSHd.reshape(-1, *x_BSHd.shape[2:])
    return x if x.stride(2) == 1 else x.contiguous()
