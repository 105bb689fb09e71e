"""cuDNN's causal attention with a backward that takes some heads at a time.

The kernel sums the gradient of the queries in fp32, and where queries share keys and values it makes gradients of those
for each query head first: together eight bytes for every value of the queries, which itself has two.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.chunks import WIDEST_BYTES

_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def heads_at_a_time(q_BHSD: Tensor, num_kv: int) -> int:
    """Key/value heads whose queries' gradient in fp32 is no wider than the limit; all: one backward for them."""
    num_groups = min(num_kv, -(-4 * q_BHSD.numel() // WIDEST_BYTES))
    return -(-num_kv // max(1, num_groups))


def attend_by_groups(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, size: int) -> Tensor:
    """`size` key/value heads at a time."""
    return _ByGroups.apply(q_BHSD, k_BGSD, v_BGSD, scale, size)


class _ByGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, size: int) -> Tensor:
        out, lse, _, _, _, _, seed, offset, _ = _CUDNN(q, k, v, None, True, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.scale, ctx.size = scale, size
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        each, length = q.shape[1] // k.shape[1], q.shape[2]
        for first in range(0, k.shape[1], ctx.size):
            kv = slice(first, first + ctx.size)
            heads = slice(first * each, (first + ctx.size) * each)
            of_queries = (grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads].contiguous())
            random = (seed, offset)  # of a dropout that there is not
            parts = _CUDNN_BACKWARD(*of_queries, *random, None, None, None, length, length, 0.0, True, scale=ctx.scale)
            for whole, at, part in zip(grads, (heads, kv, kv), parts, strict=True):
                whole[:, at] = part
            del parts, part
        return *grads, None, None
