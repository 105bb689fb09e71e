"""The kernel of flash-linear-attention for tensors of a dry run, which have no values: it allocates and saves what the
package does (release 0.6), so that memory is rehearsed. `fused_delta.py` puts it in the kernel's place.

Shapes: B batch, S sequence, K key heads, H value heads, k key dim, v value dim, C = S / 64 chunks, N documents.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK = 64  # tokens


def empty_results(
    q_BSKk: Tensor,
    k_BSKk: Tensor,
    v_BSHv: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    **options: bool,
) -> tuple[Tensor, Tensor | None]:
    """Results of the kernel with decay and step computed inside; the state behind each document where it is wanted."""
    tensors = q_BSKk, k_BSKk, v_BSHv, g, beta, A_log, dt_bias, initial_state
    out, state = _EmptyDelta.apply(*tensors, None if cu_seqlens is None else len(cu_seqlens) - 1)
    return out, state if output_final_state else None


class _EmptyDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        state: Tensor | None,
        documents: int | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        q, k, v, a, b = (x.contiguous() for x in (q, k, v, a, b))
        decay, step = (torch.empty_like(x, dtype=torch.float32) for x in (a, b))
        inverse = k.new_empty(*v.shape[:3], CHUNK)
        held = _intermediates(k, v)
        out = torch.empty_like(v)
        del held
        after = v.new_empty(documents or len(v), v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, decay, b, step, inverse, state, a, a_log, dt_bias)
        return out, after

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, state_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, decay, b, _, _, state, a, a_log, dt_bias = ctx.saved_tensors
        held = [*_intermediates(k, v), torch.empty_like(v)]  # values corrected within their chunks, and their gradient
        held += [torch.empty_like(held[2]), torch.empty_like(v)]  # gradients of states and of corrected values
        wide = [torch.empty_like(held[0]) for _ in range(3)]  # of q and k of each value head, and of `w`
        sums = [torch.empty_like(x) for x in (q, k)] if q.shape[2] != v.shape[2] else wide[:2]
        del wide[:2]
        extra = [torch.empty_like(held[0]), torch.empty_like(v), torch.empty_like(decay)]
        v_grad, state_grad = extra[1], None if state is None else torch.empty_like(state)
        grads = [*sums, v_grad, torch.empty_like(a), torch.empty_like(b), torch.empty_like(a_log)]
        return *grads, torch.empty_like(dt_bias), state_grad, None


def _intermediates(k: Tensor, v: Tensor) -> list[Tensor]:
    """`w` and `u` of each chunk, states before chunks, and corrected values."""
    batch, length, heads, values = v.shape
    states = k.new_empty(batch, -(-length // CHUNK), heads, k.shape[-1], values)
    return [k.new_empty(batch, length, heads, k.shape[-1]), torch.empty_like(v), states, torch.empty_like(v)]
