"""The Triton kernels of `conv_heads.py`.

A program takes a tile of tokens and one head: one launch for queries and keys, one for values. The backward has two
kernels. The first goes back through length and silu, for which it convolves again, and sums its part of the weight
gradient; the second is the convolution backwards in time.

Shapes: B batch, S sequence, N = B * S, K key heads, H value heads, k key dim, v value dim, X columns of a key head, W
channels, T taps, P programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2
from threefold.engine.kernels.mixers.conv_heads import MAX_TAPS, ConvHeads

_VALUES_PER_TILE = 4096


def launch_conv(
    qkv_BSKX: Tensor, weight_WT: Tensor, document_BS: Tensor | None, both: Tensor, v: Tensor, sizes: ConvHeads
) -> None:
    num_tokens, length = _tokens(qkv_BSKX)
    for out, part in ((both, _key_part(qkv_BSKX, weight_WT, sizes)), (v, _value_part(qkv_BSKX, weight_WT, sizes))):
        _conv[(cdiv(num_tokens, part["ROWS"]) * part["HEADS"],)](
            qkv_BSKX, weight_WT, document_BS, out, num_tokens, length, *qkv_BSKX.stride()[:3],
            DOCUMENTS=document_BS is not None, num_warps=4, **part,
        )  # fmt: skip


def launch_conv_grad(
    qkv_BSKX: Tensor,
    weight_WT: Tensor,
    document_BS: Tensor | None,
    grads: Sequence[Tensor],
    convolved: tuple[Tensor, Tensor],
    part_PX: Tensor,
    out_BSKX: Tensor,
    sizes: ConvHeads,
) -> None:
    num_tokens, length = _tokens(qkv_BSKX)
    parts = _key_part(qkv_BSKX, weight_WT, sizes), _value_part(qkv_BSKX, weight_WT, sizes)
    q_grad, k_grad, v_grad = grads
    for first, second, between, part in (
        (q_grad, k_grad, convolved[0], parts[0]),
        (v_grad, v_grad, convolved[1], parts[1]),
    ):
        shared = {"DOCUMENTS": document_BS is not None, "num_warps": 4, **part}
        _activation_grad[(len(part_PX) * part["HEADS"],)](
            qkv_BSKX, weight_WT, document_BS, first, second, between, part_PX, num_tokens, length, part_PX.shape[1],
            *qkv_BSKX.stride()[:3], SLOTS=MAX_TAPS, **shared,
        )  # fmt: skip
        _conv_grad[(cdiv(num_tokens, part["ROWS"]) * part["HEADS"],)](
            between, weight_WT, document_BS, out_BSKX, num_tokens, length, *out_BSKX.stride()[:3], **shared
        )


def _tokens(qkv_BSKX: Tensor) -> tuple[int, int]:
    return qkv_BSKX.shape[0] * qkv_BSKX.shape[1], qkv_BSKX.shape[1]


def _key_part(qkv_BSKX: Tensor, weight_WT: Tensor, sizes: ConvHeads) -> dict[str, Any]:
    """Constants of the launch for queries and keys: all heads of queries, then all heads of keys."""
    keys = qkv_BSKX.shape[2]
    return {
        "HEADS": 2 * keys,
        "GROUP": keys,
        "KEYS": True,
        "COLUMN": 0,
        "CHANNEL": 0,
        "NORM": sizes.eps is not None,
        "EPS": sizes.eps or 0.0,
        **_dims(sizes.k_dim, weight_WT),
    }


def _value_part(qkv_BSKX: Tensor, weight_WT: Tensor, sizes: ConvHeads) -> dict[str, Any]:
    """Constants of the launch for values, which lie behind query and key of their key head."""
    keys = qkv_BSKX.shape[2]
    return {
        "HEADS": keys * sizes.values_per_key,
        "GROUP": sizes.values_per_key,
        "KEYS": False,
        "COLUMN": 2 * sizes.k_dim,
        "CHANNEL": 2 * keys * sizes.k_dim,
        "NORM": False,
        "EPS": 0.0,
        **_dims(sizes.v_dim, weight_WT),
    }


def _dims(dim: int, weight_WT: Tensor) -> dict[str, int]:
    block = next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "TAPS": weight_WT.shape[1], "ROWS": max(1, _VALUES_PER_TILE // block)}


@triton.jit
def _columns(head, GROUP: tl.constexpr, KEYS: tl.constexpr, COLUMN: tl.constexpr, DIM: tl.constexpr):
    """-> (key head that a head belongs to, its first column there)."""
    if KEYS:
        return head % GROUP, (head // GROUP) * DIM
    else:  # noqa: RET505 - Triton compiles what follows a return under a constant condition
        return head // GROUP, COLUMN + (head % GROUP) * DIM


@triton.jit
def _head_offset(
    token, head, num_tokens, GROUP: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr
):
    """The offset of each token's head among queries and keys, (2, N, K, k), or among values, (N, H, v)."""
    if KEYS:
        first = (head // GROUP).to(tl.int64) * num_tokens
        return ((first + token) * GROUP + head % GROUP) * DIM
    else:  # noqa: RET505
        return (token.to(tl.int64) * HEADS + head) * DIM


@triton.jit
def _neighbor(doc_ptr, token, place, live, back, length, DOCUMENTS: tl.constexpr):
    """Which tokens have a token of their document `back` tokens before them (behind them, if negative)."""
    there = live & (place >= back) & (place - back < length)
    if DOCUMENTS:
        own = tl.load(doc_ptr + token, mask=there, other=0)
        there = there & (own == tl.load(doc_ptr + token - back, mask=there, other=0))
    return there


@triton.jit
def _taps(weight_ptr, channel, tap, mask, TAPS: tl.constexpr):
    return tl.load(weight_ptr + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _convolve(
    x, weight_ptr, doc_ptr, token, place, live, channel, c, length, token_stride, DIM: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for back in tl.static_range(TAPS):
        there = _neighbor(doc_ptr, token, place, live, back, length, DOCUMENTS)
        value = tl.load(x - back * token_stride, mask=there[:, None] & (c < DIM)[None, :], other=0.0)
        total += value.to(tl.float32) * _taps(weight_ptr, channel, TAPS - 1 - back, c < DIM, TAPS)
    return total


@fast_launch
@triton.jit
def _conv(
    x_ptr, weight_ptr, doc_ptr, out_ptr, num_tokens, length, batch_stride, token_stride, head_stride,
    DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, COLUMN: tl.constexpr,
    CHANNEL: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS) * ROWS + tl.arange(0, ROWS)
    live, c, place = token < num_tokens, tl.arange(0, BLOCK), token % length
    key_head, column = _columns(head, GROUP, KEYS, COLUMN, DIM)
    offset = (token // length).to(tl.int64) * batch_stride + place.to(tl.int64) * token_stride
    x = x_ptr + (offset + key_head * head_stride)[:, None] + (column + c)[None, :]
    channel = CHANNEL + head * DIM + c
    y = _convolve(
        x, weight_ptr, doc_ptr, token, place, live, channel, c, length, token_stride, DIM, BLOCK, ROWS, TAPS, DOCUMENTS
    )
    y = y * tl.sigmoid(y)
    if NORM:
        y = y * tl.rsqrt(tl.sum(y * y, 1) + EPS)[:, None]
    out = out_ptr + _head_offset(token, head, num_tokens, GROUP, KEYS, HEADS, DIM)[:, None] + c[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < DIM)[None, :])


@fast_launch
@triton.jit
def _activation_grad(
    x_ptr, weight_ptr, doc_ptr, first_grad_ptr, second_grad_ptr, out_ptr, part_ptr, num_tokens, length, part_stride,
    batch_stride, token_stride, head_stride, DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEYS: tl.constexpr, COLUMN: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    start = (tl.program_id(0) // HEADS) * ROWS
    step = (tl.num_programs(0) // HEADS) * ROWS
    c = tl.arange(0, BLOCK)
    channel = CHANNEL + head * DIM + c
    key_head, column = _columns(head, GROUP, KEYS, COLUMN, DIM)
    # Gradients of queries and keys are two tensors, (N, K, k) each.
    inner: tl.constexpr = GROUP if KEYS else HEADS
    tap = tl.arange(0, SLOTS)
    part = tl.zeros((SLOTS, BLOCK), tl.float32)
    for first in tl.range(start, num_tokens, step):
        token = first + tl.arange(0, ROWS)
        live, place = token < num_tokens, token % length
        mask = live[:, None] & (c < DIM)[None, :]
        offset = (token // length).to(tl.int64) * batch_stride + place.to(tl.int64) * token_stride
        x = x_ptr + (offset + key_head * head_stride)[:, None] + (column + c)[None, :]
        y = _convolve(
            x, weight_ptr, doc_ptr, token, place, live, channel, c, length, token_stride, DIM, BLOCK, ROWS, TAPS,
            DOCUMENTS,
        )  # fmt: skip
        at = ((token.to(tl.int64) * inner + head % inner) * DIM)[:, None] + c[None, :]
        if KEYS:
            grad = tl.load(first_grad_ptr + at, mask=mask & (head < GROUP), other=0.0).to(tl.float32)
            grad += tl.load(second_grad_ptr + at, mask=mask & (head >= GROUP), other=0.0).to(tl.float32)
        else:
            grad = tl.load(first_grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(y)
        if NORM:
            active = y * sigmoid
            scale = tl.rsqrt(tl.sum(active * active, 1) + EPS)[:, None]
            unit = active * scale
            grad = scale * (grad - unit * tl.sum(grad * unit, 1)[:, None])
        grad = grad * sigmoid * (1.0 + y * (1.0 - sigmoid))
        out = out_ptr + _head_offset(token, head, num_tokens, GROUP, KEYS, HEADS, DIM)[:, None] + c[None, :]
        tl.store(out, grad.to(out_ptr.dtype.element_ty), mask=mask)
        for back in tl.static_range(TAPS):
            there = _neighbor(doc_ptr, token, place, live, back, length, DOCUMENTS)
            value = tl.load(x - back * token_stride, mask=there[:, None] & (c < DIM)[None, :], other=0.0)
            total = tl.sum(grad * value.to(tl.float32), 0)
            part += tl.where((tap == TAPS - 1 - back)[:, None], total[None, :], 0.0)
    row = part_ptr + (tl.program_id(0) // HEADS).to(tl.int64) * part_stride
    tl.store(row + channel[None, :] * TAPS + tap[:, None], part, mask=(tap < TAPS)[:, None] & (c < DIM)[None, :])


@fast_launch
@triton.jit
def _conv_grad(
    grad_ptr, weight_ptr, doc_ptr, out_ptr, num_tokens, length, batch_stride, token_stride, head_stride,
    DOCUMENTS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, COLUMN: tl.constexpr,
    CHANNEL: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS) * ROWS + tl.arange(0, ROWS)
    live, c, place = token < num_tokens, tl.arange(0, BLOCK), token % length
    channel = CHANNEL + head * DIM + c
    inner: tl.constexpr = GROUP if KEYS else HEADS
    grad = grad_ptr + _head_offset(token, head, num_tokens, GROUP, KEYS, HEADS, DIM)[:, None] + c[None, :]
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for ahead in tl.static_range(TAPS):
        there = _neighbor(doc_ptr, token, place, live, -ahead, length, DOCUMENTS)
        value = tl.load(grad + ahead * inner * DIM, mask=there[:, None] & (c < DIM)[None, :], other=0.0)
        total += value.to(tl.float32) * _taps(weight_ptr, channel, TAPS - 1 - ahead, c < DIM, TAPS)
    key_head, column = _columns(head, GROUP, KEYS, COLUMN, DIM)
    offset = (token // length).to(tl.int64) * batch_stride + place.to(tl.int64) * token_stride
    out = out_ptr + (offset + key_head * head_stride)[:, None] + (column + c)[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=live[:, None] & (c < DIM)[None, :])
