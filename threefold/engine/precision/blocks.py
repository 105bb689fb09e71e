"""FP8 in blocks of 128, in one pass over memory: along rows, turned for a sum over rows, or a weight in squares.

Laid out as cuBLAS wants it: what is summed over lies together and is whole blocks, scales of neighbours too. Bit for
bit what `quantize` says.

Shapes: M rows, K columns; m, k blocks of 128 of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fp8.quantize import any_scale, by_one, scales

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_SQUARE_STEP = 4  # scales of squares: along what is summed over, in fours


def quantize_blocks(
    x_MK: Tensor, rows: bool, columns: bool, square: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values and scales along the rows, (M, K') and (M, k); then those of the transpose, (K, M') and (K, m), or if
    `square` as `quantize_squares` has them."""
    (M, K), (m, k) = x_MK.shape, (triton.cdiv(size, BLOCK) for size in x_MK.shape)
    new = x_MK.new_empty
    value, scale = new(M if rows else 0, k * BLOCK, dtype=_FP8), new(k, M if rows else 0, dtype=torch.float32)
    if square:
        turned, turned_scale = new(k * BLOCK, m * BLOCK, dtype=_FP8), _square_scales(x_MK, k, m)
    else:
        high = K if columns else 0
        turned, turned_scale = new(high, m * BLOCK, dtype=_FP8), new(m, high, dtype=torch.float32).T
    _vectors[(m, k)](
        x_MK, value, scale, turned, turned_scale, M, K, x_MK.stride(0), m * BLOCK, k * BLOCK, turned_scale.stride(0),
        rows, columns, square, BLOCK, num_warps=4,
    )  # fmt: skip
    return (value, scale.T), (turned, turned_scale)


def quantize_squares(x_MK: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values, both sides whole blocks, and scales (m, k) in rows of whole fours; then the same of the transpose."""
    m, k = (triton.cdiv(size, BLOCK) for size in x_MK.shape)
    new = x_MK.new_empty
    value, turned = new(m * BLOCK, k * BLOCK, dtype=_FP8), new(k * BLOCK, m * BLOCK, dtype=_FP8)
    scale, turned_scale = _square_scales(x_MK, m, k), _square_scales(x_MK, k, m)
    _squares[(m, k)](
        x_MK, value, scale, turned, turned_scale, *x_MK.shape, x_MK.stride(0), m * BLOCK, k * BLOCK, scale.shape[1],
        turned_scale.shape[1], BLOCK, num_warps=8,
    )  # fmt: skip
    return (value, scale), (turned, turned_scale)


def _square_scales(like: Tensor, num: int, summed: int) -> Tensor:
    return like.new_zeros(num, -(-summed // _SQUARE_STEP) * _SQUARE_STEP, dtype=torch.float32)


@triton.jit
def _load(x_ptr, m, k, M, K, stride):
    kept = (m < M)[:, None] & (k < K)[None, :]
    return tl.load(x_ptr + m.to(tl.int64)[:, None] * stride + k[None, :], mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _vectors(
    x_ptr, value_ptr, scale_ptr, turned_ptr, turned_scale_ptr, M, K, stride, wide_m, wide_k, scales_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(x_ptr, m, k, M, K, stride)
    if ROWS:
        scale, inverse = scales(tl.max(tl.abs(x), 1))
        there = m.to(tl.int64)[:, None] * wide_k + k[None, :]
        tl.store(value_ptr + there, (x * inverse[:, None]).to(tl.float8e4nv), mask=(m < M)[:, None])
        tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * M + m, scale, mask=m < M)
    at = k.to(tl.int64)[:, None] * wide_m + m[None, :]
    if COLUMNS and SQUARE:
        scale, inverse = scales(tl.max(tl.max(tl.abs(x), 0), 0))
        tl.store(turned_ptr + at, (x * inverse).to(tl.float8e4nv).T)
        tl.store(turned_scale_ptr + tl.program_id(1) * scales_m + tl.program_id(0), scale)
    elif COLUMNS:
        scale, inverse = scales(tl.max(tl.abs(x), 0))
        tl.store(turned_ptr + at, (x * inverse[None, :]).to(tl.float8e4nv).T, mask=(k < K)[:, None])
        tl.store(turned_scale_ptr + tl.program_id(0).to(tl.int64) * K + k, scale, mask=k < K)


@triton.jit
def _squares(
    x_ptr, value_ptr, scale_ptr, turned_ptr, turned_scale_ptr, M, K, stride, wide_m, wide_k, scales_k, scales_m,
    BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load(x_ptr, m, k, M, K, stride)
    scale = any_scale(tl.max(tl.max(tl.abs(x), 1), 0))
    narrow = by_one(x, scale).to(tl.float8e4nv)
    tl.store(value_ptr + m.to(tl.int64)[:, None] * wide_k + k[None, :], narrow)
    tl.store(turned_ptr + k.to(tl.int64)[:, None] * wide_m + m[None, :], narrow.T)
    tl.store(scale_ptr + tl.program_id(0) * scales_k + tl.program_id(1), scale)
    tl.store(turned_scale_ptr + tl.program_id(1) * scales_m + tl.program_id(0), scale)
