"""The Triton kernel of `delta_chunk_grads.py`. A program takes one chunk of one value head.

Shapes: T tokens of a chunk, k key dim, v value dim.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2
from threefold.engine.kernels.mixers.delta_chunk_grads import CHUNK

_VALUES = 64  # value dims of one step


def launch_chunk_grads(
    inputs: Sequence[Tensor],
    wide: Tensor,
    decay_grad: Tensor,
    scale: float,
    edges: Tensor | None,
    chunks_N2: Tensor | None,
) -> None:
    q, _, v, *_ = inputs
    batch, length, keys, k_dim = q.shape
    heads, v_dim = v.shape[2:]
    num_chunks = cdiv(length, CHUNK) if chunks_N2 is None else len(chunks_N2)
    _chunk_grads[(num_chunks, batch * heads)](
        *(x.contiguous() for x in inputs), wide[0], wide[1], wide[2], decay_grad, edges, chunks_N2, length, SCALE=scale,
        KEYS=keys, H=heads, K=k_dim, NK=max(16, next_power_of_2(k_dim)), V=v_dim, T=CHUNK,
        NV=min(_VALUES, max(16, next_power_of_2(v_dim))), PACKED=chunks_N2 is not None, num_warps=4, num_stages=2,
    )  # fmt: skip


@fast_launch
@triton.jit
def _chunk_grads(
    q_ptr, k_ptr, v_ptr, out_grad_ptr, state_ptr, state_grad_ptr, decay_ptr, v_grad_ptr, q_grad_ptr, k_grad_ptr,
    w_grad_ptr, decay_grad_ptr, edges_ptr, chunks_ptr, length, SCALE: tl.constexpr, KEYS: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, NK: tl.constexpr, V: tl.constexpr, T: tl.constexpr, NV: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = q_grad_ptr.dtype.element_ty
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    number, start, end = _span(edges_ptr, chunks_ptr, row, length, T, PACKED)
    token, n, place = start + tl.arange(0, T), tl.arange(0, NK), tl.arange(0, T)
    live = token < end
    of_keys, both = live[:, None] & (n < K)[None, :], live[:, None] & live[None, :]
    state, decay_at = (number * H + head) * K * V, token * H + head
    decay = tl.load(decay_ptr + decay_at, mask=live, other=0.0)
    last = tl.minimum(start + T, end) - 1
    last_decay = tl.load(decay_ptr + last * H + head)

    scores, q_grad, w_grad = _sums_for_queries(
        v_ptr, out_grad_ptr, v_grad_ptr, state_ptr + state, decay_at, live, n, K, NK, V, T, NV, dtype
    )
    grads_at = decay_at[:, None] * K + n[None, :]
    tl.store(w_grad_ptr + grads_at, (-w_grad).to(dtype), mask=of_keys)
    heads_at = (token * KEYS + head // (H // KEYS))[:, None] * K + n[None, :]
    q = tl.load(q_ptr + heads_at, mask=of_keys, other=0.0)
    k = tl.load(k_ptr + heads_at, mask=of_keys, other=0.0)
    # Differences of sums of decays: masked before the power, which overflows where a key follows its query.
    between = tl.where(both & (place[:, None] >= place[None, :]), decay[:, None] - decay[None, :], float("-inf"))
    scores = scores * tl.exp2(between) * SCALE
    q_grad = tl.dot(scores.to(dtype), k, q_grad * tl.exp2(decay)[:, None] * SCALE)
    decay_grad = tl.sum(q_grad * q.to(tl.float32), 1)
    tl.store(q_grad_ptr + grads_at, q_grad.to(dtype), mask=of_keys)

    k_grad, transposed, kept = _sums_for_keys(
        v_ptr, out_grad_ptr, state_ptr + state, state_grad_ptr + state, decay_at, live, n, K, NK, V, T, NV, dtype
    )
    k_grad = k_grad * tl.where(live, tl.exp2(last_decay - decay), 0.0)[:, None]
    kept = kept * tl.exp2(last_decay) + tl.sum(k_grad * k.to(tl.float32))
    between = tl.where(both & (place[:, None] <= place[None, :]), decay[None, :] - decay[:, None], float("-inf"))
    transposed = transposed * tl.exp2(between) * SCALE
    k_grad = tl.dot(transposed.to(dtype), q, k_grad)
    decay_grad -= tl.sum(k_grad * k.to(tl.float32), 1)
    decay_grad += tl.where(token == last, kept, 0.0)
    tl.store(k_grad_ptr + grads_at, k_grad.to(dtype), mask=of_keys)
    tl.store(decay_grad_ptr + decay_at, decay_grad, mask=live)


@triton.jit
def _span(edges_ptr, chunks_ptr, row, length, T: tl.constexpr, PACKED: tl.constexpr):
    """-> (number of the chunk in the batch, its first token, end of its sequence or document)."""
    number = tl.program_id(0).to(tl.int64)
    if PACKED:
        document, chunk = tl.load(chunks_ptr + 2 * number), tl.load(chunks_ptr + 2 * number + 1)
        start = tl.load(edges_ptr + document).to(tl.int64) + chunk * T
        end = tl.load(edges_ptr + document + 1).to(tl.int64)
    else:
        start, end = row * length + number * T, (row + 1) * length
        number = row * tl.num_programs(0) + number
    return number, start, end


@triton.jit
def _value_offsets(
    at, heads_at, live, n, K: tl.constexpr, V: tl.constexpr, NV: tl.constexpr
):  # fmt: skip
    """Offsets and masks of some value dims: of values, (T, v), and of the state with value dims first, (v, k)."""
    column = at + tl.arange(0, NV)
    inside = live[:, None] & (column < V)[None, :]
    of_state = (column < V)[:, None] & (n < K)[None, :]
    return heads_at[:, None] * V + column[None, :], inside, n[None, :] * V + column[:, None], of_state


@triton.jit
def _sums_for_queries(
    v_ptr, out_grad_ptr, v_grad_ptr, state_ptr, heads_at, live, n, K: tl.constexpr, NK: tl.constexpr, V: tl.constexpr,
    T: tl.constexpr, NV: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums over value dims: gradients of scores, and what the state before the chunk adds to gradients of q and w."""
    scores = tl.zeros((T, T), tl.float32)
    q_grad = tl.zeros((T, NK), tl.float32)
    w_grad = tl.zeros((T, NK), tl.float32)
    for at in range(0, V, NV):
        values_at, inside, state_at, of_state = _value_offsets(at, heads_at, live, n, K, V, NV)
        value = tl.load(v_ptr + values_at, mask=inside, other=0.0)
        out_grad = tl.load(out_grad_ptr + values_at, mask=inside, other=0.0)
        v_grad = tl.load(v_grad_ptr + values_at, mask=inside, other=0.0).to(dtype)
        before = tl.load(state_ptr + state_at, mask=of_state, other=0.0).to(dtype)
        scores = tl.dot(out_grad, tl.trans(value), scores)
        q_grad = tl.dot(out_grad, before, q_grad)
        w_grad = tl.dot(v_grad, before, w_grad)
    return scores, q_grad, w_grad


@triton.jit
def _sums_for_keys(
    v_ptr, out_grad_ptr, state_ptr, state_grad_ptr, heads_at, live, n, K: tl.constexpr, NK: tl.constexpr,
    V: tl.constexpr, T: tl.constexpr, NV: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Sums over value dims: the gradient of k by the state behind the chunk; gradients of scores, transposed by a GEMM
    (`delta_chunk_grads.py` says why); and what the state that goes through adds to the gradient of the last decay."""
    k_grad = tl.zeros((T, NK), tl.float32)
    transposed = tl.zeros((T, T), tl.float32)
    kept = tl.zeros((1,), tl.float32)
    for at in range(0, V, NV):
        values_at, inside, state_at, of_state = _value_offsets(at, heads_at, live, n, K, V, NV)
        value = tl.load(v_ptr + values_at, mask=inside, other=0.0)
        out_grad = tl.load(out_grad_ptr + values_at, mask=inside, other=0.0)
        before = tl.load(state_ptr + state_at, mask=of_state, other=0.0)
        after_grad = tl.load(state_grad_ptr + state_at, mask=of_state, other=0.0)
        kept += tl.sum(before.to(tl.float32) * after_grad.to(tl.float32))
        k_grad = tl.dot(value, after_grad.to(dtype), k_grad)
        transposed = tl.dot(value, tl.trans(out_grad), transposed)
    return k_grad, transposed, kept
