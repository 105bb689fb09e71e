"""The short convolution of the gated delta rule, from projected columns to heads. `attention/gated_delta.py` calls it.

One kernel reads queries, keys and values where the projection wrote them, convolves each channel over the last few
tokens of its document, applies silu, divides queries and keys by their length, and writes heads as the recurrence reads
them. Only the projected columns are saved for the backward.

Shapes: B batch, S sequence, N = B * S, K key heads, H value heads, k key dim, v value dim, X = 2k + H / K * v columns
of a key head, W channels (all queries, all keys, all values), T taps, P programs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from threefold.engine.device import is_simulated
from threefold.engine.kernels.launch_config import num_programs

MAX_TAPS = 8  # of the convolution
_PROGRAMS_PER_SM = 8


@dataclass(frozen=True)
class ConvHeads:
    """Sizes of the heads."""

    k_dim: int
    v_dim: int
    values_per_key: int  # value heads of a key head
    eps: float | None  # added to the squared length of queries and keys; None leaves their length


def conv_heads(
    qkv_BSKX: Tensor, weight_WT: Tensor, document_BS: Tensor | None, sizes: ConvHeads
) -> tuple[Tensor, Tensor, Tensor]:
    """-> queries (B, S, K, k), keys (B, S, K, k) and values (B, S, H, v), each contiguous.

    `document_BS` numbers the documents of a row (int32), so that neighbors differ.
    """
    q, k, v = _ConvHeads.apply(qkv_BSKX, weight_WT, document_BS, sizes)
    return q, k, v


class _ConvHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_BSKX: Tensor, weight_WT: Tensor, document_BS: Tensor | None, sizes: ConvHeads
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_BSKX = qkv_BSKX if qkv_BSKX.stride(3) == 1 else qkv_BSKX.contiguous()
        ctx.save_for_backward(qkv_BSKX, weight_WT, document_BS)
        ctx.sizes = sizes
        both, v = _empty_heads(qkv_BSKX, sizes)
        if not is_simulated():
            from threefold.engine.kernels.mixers.conv_heads_triton import launch_conv

            launch_conv(qkv_BSKX, weight_WT.contiguous(), document_BS, both, v, sizes)
        return both[0], both[1], v

    @staticmethod
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor, v_grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv_BSKX, weight_WT, document_BS = ctx.saved_tensors
        grads = [grad.contiguous() for grad in (q_grad, k_grad, v_grad)]
        convolved = _empty_heads(qkv_BSKX, ctx.sizes)  # the gradient of the convolution's result
        out_BSKX = torch.empty(qkv_BSKX.shape, dtype=qkv_BSKX.dtype, device=qkv_BSKX.device)
        programs = max(1, num_programs(out_BSKX.device, _PROGRAMS_PER_SM) // out_BSKX.shape[2])
        part_PX = torch.empty(programs, weight_WT.numel(), dtype=torch.float32, device=out_BSKX.device)
        weight_grad = torch.empty(weight_WT.shape, dtype=weight_WT.dtype, device=weight_WT.device)
        if not is_simulated():
            from threefold.engine.kernels.elementwise.rms_norm_triton import launch_sum_partials
            from threefold.engine.kernels.mixers.conv_heads_triton import launch_conv_grad

            weight = weight_WT.contiguous()
            launch_conv_grad(qkv_BSKX, weight, document_BS, grads, convolved, part_PX, out_BSKX, ctx.sizes)
            launch_sum_partials(part_PX, weight_grad.view(-1))
        return out_BSKX, weight_grad, None, None


def _empty_heads(qkv_BSKX: Tensor, sizes: ConvHeads) -> tuple[Tensor, Tensor]:
    """Memory for queries and keys, (2, B, S, K, k), and for values."""
    batch, length, heads, _ = qkv_BSKX.shape
    both = qkv_BSKX.new_empty(2, batch, length, heads, sizes.k_dim)
    return both, qkv_BSKX.new_empty(batch, length, heads * sizes.values_per_key, sizes.v_dim)
