"""The Triton kernels of `mla_heads.py`.

A program takes some heads of one token. The gradient of the rotated key is a sum over heads, so that there a program
goes through all heads of its token.

Shapes: B batch, S sequence, H heads, n unrotated dims, r rotated dims, d = n + r, v value dim, F = r / 2 frequencies.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fast_launch import fast_launch
from threefold.engine.kernels.launch_config import cdiv, next_power_of_2

_HEADS = 8  # of a tile


def launch_rotate_tails(
    x_BSHd: Tensor, cos_BSF: Tensor, sin_BSF: Tensor, out_BSHd: Tensor, interleaved: bool, backward: bool
) -> None:
    """Rotate the last 2F dims; with `backward`, rotate a gradient back. The dims before them are copied where `out` is
    another tensor. `out` is contiguous, or x itself."""
    batch, length, heads, dim = x_BSHd.shape
    freqs, copies = cos_BSF.shape[-1], out_BSHd.data_ptr() != x_BSHd.data_ptr()
    rest = dim - 2 * freqs
    _rotate_tails[(batch * length, cdiv(heads, _HEADS))](
        x_BSHd, cos_BSF, sin_BSF, out_BSHd, length, *x_BSHd.stride()[:3], *out_BSHd.stride()[:3], H=heads, F=freqs,
        NF=next_power_of_2(freqs), REST=rest, NREST=next_power_of_2(max(rest, 1)), ROWS=_HEADS, COPY=copies,
        INTERLEAVED=interleaved, BACKWARD=backward, num_warps=4 if copies else 2,
    )  # fmt: skip


def launch_join_keys(kv_BSHx: Tensor, k_BSr: Tensor, out_BSHd: Tensor, unrotated: int) -> None:
    batch, length, heads, _ = kv_BSHx.shape
    rotated = k_BSr.shape[-1]
    _join_keys[(batch * length, cdiv(heads, _HEADS))](
        kv_BSHx, k_BSr, out_BSHd, length, *kv_BSHx.stride()[:3], *k_BSr.stride()[:2], H=heads, N=unrotated,
        NN=next_power_of_2(unrotated), R=rotated, NR=next_power_of_2(rotated), ROWS=_HEADS, num_warps=4,
    )  # fmt: skip


def launch_join_keys_grad(k_grad_BSHd: Tensor, v_grad_BSHv: Tensor, kv_grad: Tensor, k_grad_BSr: Tensor) -> None:
    batch, length, heads, dim = k_grad_BSHd.shape
    rotated, values = k_grad_BSr.shape[-1], v_grad_BSHv.shape[-1]
    unrotated = dim - rotated
    _join_keys_grad[(batch * length,)](
        k_grad_BSHd, v_grad_BSHv, kv_grad, k_grad_BSr, length, *k_grad_BSHd.stride()[:3], *v_grad_BSHv.stride()[:3],
        H=heads, N=unrotated, NN=next_power_of_2(unrotated), R=rotated, NR=next_power_of_2(rotated), V=values,
        NV=next_power_of_2(values), ROWS=_HEADS, num_warps=4,
    )  # fmt: skip


@triton.jit
def _tile(head, length, batch_stride, token_stride, head_stride):
    """The offsets of some heads of this program's token."""
    token = tl.program_id(0).to(tl.int64)
    return (token // length) * batch_stride + (token % length) * token_stride + head.to(tl.int64) * head_stride


@fast_launch
@triton.jit
def _rotate_tails(
    x_ptr, cos_ptr, sin_ptr, out_ptr, length, batch_stride, token_stride, head_stride, out_batch_stride,
    out_token_stride, out_head_stride, H: tl.constexpr, F: tl.constexpr, NF: tl.constexpr, REST: tl.constexpr,
    NREST: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr, INTERLEAVED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = x_ptr + _tile(head, length, batch_stride, token_stride, head_stride)[:, None]
    out = out_ptr + _tile(head, length, out_batch_stride, out_token_stride, out_head_stride)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    f = tl.arange(0, NF)
    mask = (head < H)[:, None] & (f < F)[None, :]
    at = tl.program_id(0).to(tl.int64) * F + f
    cos = tl.load(cos_ptr + at, mask=f < F, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + at, mask=f < F, other=0.0).to(tl.float32)[None, :]
    if INTERLEAVED and not BACKWARD:
        first = tl.load(x + (REST + 2 * f)[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + (REST + 2 * f + 1)[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        first = tl.load(x + (REST + f)[None, :], mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x + (REST + F + f)[None, :], mask=mask, other=0.0).to(tl.float32)
    if COPY:
        n = tl.arange(0, NREST)
        inside = (head < H)[:, None] & (n < REST)[None, :]
        tl.store(out + n[None, :], tl.load(x + n[None, :], mask=inside, other=0.0), mask=inside)
    else:
        tl.debug_barrier()  # in place: every thread has loaded before any stores
    if BACKWARD:
        sin = -sin
    left = (first * cos - second * sin).to(dtype)
    right = (second * cos + first * sin).to(dtype)
    if INTERLEAVED and BACKWARD:
        tl.store(out + (REST + 2 * f)[None, :], left, mask=mask)
        tl.store(out + (REST + 2 * f + 1)[None, :], right, mask=mask)
    else:
        tl.store(out + (REST + f)[None, :], left, mask=mask)
        tl.store(out + (REST + F + f)[None, :], right, mask=mask)


@fast_launch
@triton.jit
def _join_keys(
    kv_ptr, k_ptr, out_ptr, length, batch_stride, token_stride, head_stride, k_batch_stride, k_token_stride,
    H: tl.constexpr, N: tl.constexpr, NN: tl.constexpr, R: tl.constexpr, NR: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n, r = tl.arange(0, NN), tl.arange(0, NR)
    kv = kv_ptr + _tile(head, length, batch_stride, token_stride, head_stride)[:, None]
    out = out_ptr + (token * H + head)[:, None] * (N + R)
    inside = (head < H)[:, None] & (n < N)[None, :]
    tl.store(out + n[None, :], tl.load(kv + n[None, :], mask=inside, other=0.0), mask=inside)
    k = k_ptr + (token // length) * k_batch_stride + (token % length) * k_token_stride
    shared = tl.load(k + r, mask=r < R, other=0.0)[None, :] + tl.zeros((ROWS, NR), out_ptr.dtype.element_ty)
    tl.store(out + (N + r)[None, :], shared, mask=(head < H)[:, None] & (r < R)[None, :])


@fast_launch
@triton.jit
def _join_keys_grad(
    k_ptr, v_ptr, kv_out_ptr, k_out_ptr, length, k_batch_stride, k_token_stride, k_head_stride, v_batch_stride,
    v_token_stride, v_head_stride, H: tl.constexpr, N: tl.constexpr, NN: tl.constexpr, R: tl.constexpr,
    NR: tl.constexpr, V: tl.constexpr, NV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    n, r, v = tl.arange(0, NN), tl.arange(0, NR), tl.arange(0, NV)
    total = tl.zeros((ROWS, NR), tl.float32)
    for first in range(0, H, ROWS):
        head = first + tl.arange(0, ROWS)
        live = (head < H)[:, None]
        k = k_ptr + _tile(head, length, k_batch_stride, k_token_stride, k_head_stride)[:, None]
        values = v_ptr + _tile(head, length, v_batch_stride, v_token_stride, v_head_stride)[:, None]
        out = kv_out_ptr + (token * H + head)[:, None] * (N + V)
        unrotated, inside = live & (n < N)[None, :], live & (v < V)[None, :]
        tl.store(out + n[None, :], tl.load(k + n[None, :], mask=unrotated, other=0.0), mask=unrotated)
        tl.store(out + (N + v)[None, :], tl.load(values + v[None, :], mask=inside, other=0.0), mask=inside)
        total += tl.load(k + (N + r)[None, :], mask=live & (r < R)[None, :], other=0.0).to(tl.float32)
    tl.store(k_out_ptr + token * R + r, tl.sum(total, 0).to(k_out_ptr.dtype.element_ty), mask=r < R)
