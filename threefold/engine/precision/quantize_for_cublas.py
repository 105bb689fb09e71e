"""Triton kernels that quantize a matrix to FP8 in blocks of 128, in one pass, in the layout that cuBLAS reads.

They quantize by rows, transposed for a sum over rows, or a weight in 128x128 blocks. cuBLAS wants the dim that is
summed over contiguous and padded to whole blocks, and the scales of neighbours contiguous too. The results are bit for
bit those of `quantize`. `scaled_mm_backends` calls them.

Shapes: M rows, K columns; m, k blocks of 128 of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton  # type: ignore
import triton.language as tl  # type: ignore
from torch import Tensor

from threefold.engine.kernels.fp8.blockwise_quantize import (
    divide_by_scalar,
    fp32_scale,
    power_of_two_scale,
    transpose_fp8,
)

BLOCK = 128
_FP8 = torch.float8_e4m3fn
_SCALE_ROW_MULTIPLE = 4  # the scales of 128x128 blocks have rows of a multiple of four


def quantize_blocks(
    x_MK: Tensor, rows: bool, columns: bool, square: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values and scales by rows, (M, K') and (M, k), and those of the transpose, (K, M') and (K, m).

    With `square` the transpose has 128x128 blocks, laid out as by `quantize_square_blocks`.
    """
    (M, K), (m, k) = x_MK.shape, (triton.cdiv(size, BLOCK) for size in x_MK.shape)
    new = x_MK.new_empty
    value, scale = new(M if rows else 0, k * BLOCK, dtype=_FP8), new(k, M if rows else 0, dtype=torch.float32)
    if square:
        transposed, transposed_scale = new(k * BLOCK, m * BLOCK, dtype=_FP8), _empty_square_scales(x_MK, k, m)
    else:
        num_columns = K if columns else 0
        transposed, transposed_scale = (
            new(num_columns, m * BLOCK, dtype=_FP8),
            new(m, num_columns, dtype=torch.float32).T,
        )
    _quantize_1x128[(m, k)](
        x_MK, value, scale, transposed, transposed_scale, M, K, x_MK.stride(0), m * BLOCK, k * BLOCK,
        transposed_scale.stride(0), rows, columns, square, BLOCK, num_warps=4,
    )  # fmt: skip
    return (value, scale.T), (transposed, transposed_scale)


def quantize_square_blocks(x_MK: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values padded to whole blocks and scales (m, k) padded to fours, and the same of the transpose."""
    m, k = (triton.cdiv(size, BLOCK) for size in x_MK.shape)
    new = x_MK.new_empty
    value, transposed = new(m * BLOCK, k * BLOCK, dtype=_FP8), new(k * BLOCK, m * BLOCK, dtype=_FP8)
    scale, transposed_scale = _empty_square_scales(x_MK, m, k), _empty_square_scales(x_MK, k, m)
    _quantize_128x128[(m, k)](
        x_MK, value, scale, transposed, transposed_scale, *x_MK.shape, x_MK.stride(0), m * BLOCK, k * BLOCK,
        scale.shape[1], transposed_scale.shape[1], BLOCK, num_warps=8,
    )  # fmt: skip
    return (value, scale), (transposed, transposed_scale)


def _empty_square_scales(like: Tensor, num_rows: int, num_summed: int) -> Tensor:
    return like.new_zeros(num_rows, -(-num_summed // _SCALE_ROW_MULTIPLE) * _SCALE_ROW_MULTIPLE, dtype=torch.float32)


@triton.jit
def _load_block(x_ptr, m, k, M, K, stride):
    mask = (m < M)[:, None] & (k < K)[None, :]
    return tl.load(x_ptr + m.to(tl.int64)[:, None] * stride + k[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _quantize_1x128(
    x_ptr, value_ptr, scale_ptr, transposed_ptr, transposed_scale_ptr, M, K, stride, padded_m, padded_k, scales_m,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load_block(x_ptr, m, k, M, K, stride)
    if ROWS:
        scale, inverse = power_of_two_scale(tl.max(tl.abs(x), 1))
        row_offset = m.to(tl.int64)[:, None] * padded_k + k[None, :]
        tl.store(value_ptr + row_offset, (x * inverse[:, None]).to(tl.float8e4nv), mask=(m < M)[:, None])
        tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * M + m, scale, mask=m < M)
    transposed_offset = k.to(tl.int64)[:, None] * padded_m + m[None, :]
    if COLUMNS and SQUARE:
        scale, inverse = power_of_two_scale(tl.max(tl.max(tl.abs(x), 0), 0))
        tl.store(transposed_ptr + transposed_offset, (x * inverse).to(tl.float8e4nv).T)
        tl.store(transposed_scale_ptr + tl.program_id(1) * scales_m + tl.program_id(0), scale)
    elif COLUMNS:
        scale, inverse = power_of_two_scale(tl.max(tl.abs(x), 0))
        tl.store(transposed_ptr + transposed_offset, (x * inverse[None, :]).to(tl.float8e4nv).T, mask=(k < K)[:, None])
        tl.store(transposed_scale_ptr + tl.program_id(0).to(tl.int64) * K + k, scale, mask=k < K)


@triton.jit
def _quantize_128x128(
    x_ptr, value_ptr, scale_ptr, transposed_ptr, transposed_scale_ptr, M, K, stride, padded_m, padded_k, scales_k,
    scales_m, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = _load_block(x_ptr, m, k, M, K, stride)
    scale = fp32_scale(tl.max(tl.max(tl.abs(x), 1), 0))
    fp8 = divide_by_scalar(x, scale).to(tl.float8e4nv)
    tl.store(value_ptr + m.to(tl.int64)[:, None] * padded_k + k[None, :], fp8)
    back = m.to(tl.int64)[None, :] * stride + k[:, None]
    transposed = transpose_fp8(fp8, scale, x_ptr, back, (k < K)[:, None] & (m < M)[None, :])
    tl.store(transposed_ptr + k.to(tl.int64)[:, None] * padded_m + m[None, :], transposed)
    tl.store(scale_ptr + tl.program_id(0) * scales_k + tl.program_id(1), scale)
    tl.store(transposed_scale_ptr + tl.program_id(1) * scales_m + tl.program_id(0), scale)
