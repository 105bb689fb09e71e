"""cuDNN's causal attention with a backward that runs over groups of heads, to bound its workspace.

Besides its inputs the backward kernel needs eight bytes of workspace per element of the queries: the fp32 gradient of
the queries and, where query heads share keys and values, the gradients of keys and values per query head. `backend.py`
chooses this path for long sequences.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from typing import Any

import torch
from torch import Tensor

from threefold.engine.autograd.token_chunks import MAX_CHUNK_BYTES

_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def kv_heads_per_group(q_BHSD: Tensor, num_kv: int) -> int:
    """Key/value heads of a group such that the fp32 gradient of its queries is within the chunk limit."""
    num_groups = min(num_kv, -(-4 * q_BHSD.numel() // MAX_CHUNK_BYTES))
    return -(-num_kv // max(1, num_groups))


def attend_in_head_groups(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Causal attention whose backward takes `kv_heads` key/value heads at a time."""
    return _HeadGroups.apply(q_BHSD, k_BGSD, v_BGSD, scale, kv_heads)


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, kv_heads: int) -> Tensor:
        out, lse, _, _, _, _, seed, offset, _ = _CUDNN(q, k, v, None, True, 0.0, True, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.scale, ctx.kv_heads = scale, kv_heads
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v)]
        queries_per_kv, length = q.shape[1] // k.shape[1], q.shape[2]
        for first in range(0, k.shape[1], ctx.kv_heads):
            kv = slice(first, first + ctx.kv_heads)
            heads = slice(first * queries_per_kv, (first + ctx.kv_heads) * queries_per_kv)
            inputs = (grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads].contiguous())
            random = (seed, offset)  # the random state of dropout, which is off
            parts = _CUDNN_BACKWARD(*inputs, *random, None, None, None, length, length, 0.0, True, scale=ctx.scale)
            for whole, heads_slice, part in zip(grads, (heads, kv, kv), parts, strict=True):
                whole[:, heads_slice] = part
            del parts, part
        return *grads, None, None
