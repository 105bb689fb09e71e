"""cuDNN's causal attention for long sequences: a forward by blocks of keys, and a backward over groups of heads.

Where all keys and values of a head are larger than the GPU's cache, the forward kernel reads them from memory for every
block of queries, which bounds its speed. Here queries run over one block of keys at a time, which stays in the cache.

Besides its inputs the backward kernel needs eight bytes of workspace per element of the queries: the fp32 gradient of
the queries and, where query heads share keys and values, the gradients of keys and values per query head. `backend.py`
chooses this path for long sequences, and where the output is saved inside a recomputed layer.

Shapes: B batch, H query heads, G key/value heads, S sequence, D head dim.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from threefold.engine.attention.attend_tiles import merge_tile
from threefold.engine.autograd.saved_tensors import CORE_ATTENTION, save_output
from threefold.engine.autograd.token_chunks import MAX_CHUNK_BYTES
from threefold.engine.device import is_simulated

MAX_UNBLOCKED = 262144  # longer sequences run by blocks of keys
# Keys and values of 65,536 tokens and one head of 128 take 32 MiB; an H200 has a cache of 50.
QUERY_BLOCK = KEY_BLOCK = 65536
_CUDNN = torch.ops.aten._scaled_dot_product_cudnn_attention
_CUDNN_BACKWARD = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def query_heads_per_group(num_heads: int, num_kv: int, head_bytes: int, limit: int = MAX_CHUNK_BYTES) -> int:
    """Query heads of a group such that `head_bytes` for each are within the limit of a chunk.

    A group has whole key/value heads with all their queries, or an equal part of the queries of one.
    """
    queries_per_kv, fitting = num_heads // num_kv, max(1, limit // max(1, head_bytes))
    if fitting >= queries_per_kv:
        num_groups = -(-num_kv // (fitting // queries_per_kv))
        return -(-num_kv // num_groups) * queries_per_kv
    return next(size for size in range(fitting, 0, -1) if queries_per_kv % size == 0)


def head_groups(num_heads: int, num_kv: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Groups of `size` query heads, each with its key/value heads."""
    queries_per_kv = num_heads // num_kv
    for first in range(0, num_heads, size):
        last = min(first + size, num_heads)
        yield slice(first, last), slice(first // queries_per_kv, -(-last // queries_per_kv))


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool = True) -> tuple[Tensor, ...]:
    """-> (output, log-sum-exps, and the random state of dropout, which is off)."""
    out, lse, _, _, _, _, seed, offset, _ = _CUDNN(q, k, v, None, True, 0.0, is_causal, False, scale=scale)
    return out, lse, seed, offset


def attend_in_key_blocks(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float) -> tuple[Tensor, ...]:
    """`_attend` by blocks: a block of queries attends to itself, and then to the keys before it block by block."""
    out = torch.empty_like(q_BHSD[..., : v_BGSD.shape[-1]])
    lse = q_BHSD.new_empty(*q_BHSD.shape[:3], 1, dtype=torch.float32)
    random: list[Tensor] = []
    for first in range(0, q_BHSD.shape[2], QUERY_BLOCK):
        block = slice(first, first + QUERY_BLOCK)
        q = q_BHSD[:, :, block]
        block_out, block_lse, *random = _attend(q, k_BGSD[:, :, block], v_BGSD[:, :, block], scale)
        block_out = block_out.to(lse.dtype)
        for start in range(0, first, KEY_BLOCK):
            keys = slice(start, start + KEY_BLOCK)
            part_out, part_lse, *_ = _attend(q, k_BGSD[:, :, keys], v_BGSD[:, :, keys], scale, is_causal=False)
            merge_tile(block_out, block_lse.squeeze(-1), part_out, part_lse.squeeze(-1))
        out[:, :, block], lse[:, :, block] = block_out, block_lse
    return out, lse, *random


def attend_in_head_groups(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, scale: float, heads: int) -> Tensor:
    """Causal attention whose backward takes `heads` query heads at a time (`query_heads_per_group`)."""
    return _HeadGroups.apply(q_BHSD, k_BGSD, v_BGSD, scale, heads)


class _HeadGroups(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, heads: int) -> Tensor:
        # A dry run would take minutes for thousands of blocks, whose tensors are small beside the rest.
        in_blocks = q.shape[2] > MAX_UNBLOCKED and not is_simulated()
        attend = attend_in_key_blocks if in_blocks else _attend
        out, lse, seed, offset = save_output(CORE_ATTENTION, partial(attend, q, k, v, scale), 4)
        ctx.save_for_backward(q, k, v, out, lse, seed, offset)
        ctx.scale, ctx.heads = scale, heads
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        length = q.shape[2]

        def of_group(heads: slice, kv: slice) -> Any:
            inputs = (grad[:, heads], q[:, heads], k[:, kv], v[:, kv], out[:, heads], lse[:, heads].contiguous())
            random = (seed, offset)  # the random state of dropout, which is off
            return _CUDNN_BACKWARD(*inputs, *random, None, None, None, length, length, 0.0, True, scale=ctx.scale)

        groups = [*head_groups(q.shape[1], k.shape[1], ctx.heads)]
        if len(groups) == 1:
            return *of_group(*groups[0]), None, None
        grads, filled = [torch.empty_like(x) for x in (q, k, v)], 0
        for heads, kv in groups:
            parts = of_group(heads, kv)
            grads[0][:, heads] = parts[0]
            for whole, part in zip(grads[1:], parts[1:], strict=True):
                if kv.stop > filled:
                    whole[:, kv] = part
                else:  # other queries of the same keys and values were there before
                    whole[:, kv] += part
            filled = kv.stop
            del parts, part
        return *grads, None, None
