"""Heads of multi-head latent attention (MLA), made in the layout that attention kernels read. `attention/mla.py` calls
it.

`rotate_query_tails` rotates the last dims of every query head where they lie. `join_key_heads` puts the rotated key of
all heads behind the unrotated dims of each; values stay where the up projection wrote them. Nothing is saved for the
backward but the rotary tables.

Shapes: B batch, S sequence, H heads, n unrotated dims, r rotated dims, d = n + r, v value dim, F = r / 2 frequencies, X
columns of all heads.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated


def rotate_query_tails(q_BSX: Tensor, num_heads: int, table: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotate the last dims of each head. -> (B, S, H, d)

    `q_BSX` is what a projection made: nobody else reads it, and it is overwritten unless it is a view. With
    `interleaved`, pairs are neighboring dims, and the result has all first dims before all second dims.
    """
    cos_BSF, sin_BSF = (each.expand(*q_BSX.shape[:2], -1).contiguous() for each in table)
    rotated_BSX: Tensor = _RotateTails.apply(q_BSX, num_heads, cos_BSF, sin_BSF, interleaved)
    return rotated_BSX.unflatten(-1, (num_heads, -1))


def join_key_heads(kv_BSHx: Tensor, k_BSr: Tensor, num_unrotated: int) -> tuple[Tensor, Tensor]:
    """Keys (B, S, H, d) and values (B, S, H, v), from heads that hold n dims of a key and then a value, and from the
    rotated key of all heads. The values are a view."""
    k_BSHd, v_BSHv = _JoinKeyHeads.apply(kv_BSHx, k_BSr, num_unrotated)
    return k_BSHd, v_BSHv


class _RotateTails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BSX: Tensor, num_heads: int, cos_BSF: Tensor, sin_BSF: Tensor, interleaved: bool) -> Tensor:
        out_BSX = q_BSX
        if q_BSX._is_view() or (q_BSX.is_leaf and q_BSX.requires_grad):  # of which others may have more than this
            out_BSX = torch.empty(q_BSX.shape, dtype=q_BSX.dtype, device=q_BSX.device)
        else:
            ctx.mark_dirty(q_BSX)
        ctx.save_for_backward(cos_BSF, sin_BSF)
        ctx.num_heads, ctx.interleaved = num_heads, interleaved
        if not is_simulated():
            from threefold.engine.kernels.mixers.mla_heads_triton import launch_rotate_tails

            q_BSHd, out_BSHd = (x.unflatten(-1, (num_heads, -1)) for x in (_dense_dims(q_BSX), out_BSX))
            launch_rotate_tails(q_BSHd, cos_BSF, sin_BSF, out_BSHd, interleaved, backward=False)
        return out_BSX

    @staticmethod
    def backward(ctx: Any, grad_BSX: Tensor) -> tuple[Tensor | None, ...]:
        cos_BSF, sin_BSF = ctx.saved_tensors
        out_BSX = torch.empty(grad_BSX.shape, dtype=grad_BSX.dtype, device=grad_BSX.device)
        if not is_simulated():
            from threefold.engine.kernels.mixers.mla_heads_triton import launch_rotate_tails

            grad_BSHd, out_BSHd = (x.unflatten(-1, (ctx.num_heads, -1)) for x in (_dense_dims(grad_BSX), out_BSX))
            launch_rotate_tails(grad_BSHd, cos_BSF, sin_BSF, out_BSHd, ctx.interleaved, backward=True)
        return out_BSX, None, None, None, None


class _JoinKeyHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv_BSHx: Tensor, k_BSr: Tensor, num_unrotated: int) -> tuple[Tensor, Tensor]:
        ctx.num_unrotated = num_unrotated
        batch, length, heads, _ = kv_BSHx.shape
        dim = num_unrotated + k_BSr.shape[-1]
        k_BSHd = torch.empty(batch, length, heads, dim, dtype=kv_BSHx.dtype, device=kv_BSHx.device)
        if not is_simulated():
            from threefold.engine.kernels.mixers.mla_heads_triton import launch_join_keys

            launch_join_keys(_dense_dims(kv_BSHx), _dense_dims(k_BSr), k_BSHd, num_unrotated)
        return k_BSHd, kv_BSHx[..., num_unrotated:]

    @staticmethod
    def backward(ctx: Any, k_grad_BSHd: Tensor, v_grad_BSHv: Tensor) -> tuple[Tensor | None, ...]:
        batch, length, heads, dim = k_grad_BSHd.shape
        kv_grad = k_grad_BSHd.new_empty(batch, length, heads, ctx.num_unrotated + v_grad_BSHv.shape[-1])
        k_grad_BSr = k_grad_BSHd.new_empty(batch, length, dim - ctx.num_unrotated)
        if not is_simulated():
            from threefold.engine.kernels.mixers.mla_heads_triton import launch_join_keys_grad

            launch_join_keys_grad(_dense_dims(k_grad_BSHd), _dense_dims(v_grad_BSHv), kv_grad, k_grad_BSr)
        return kv_grad, k_grad_BSr, None


def _dense_dims(x: Tensor) -> Tensor:
    """x with neighboring values in its last dim; other dims may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
